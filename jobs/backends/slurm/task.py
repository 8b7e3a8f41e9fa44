"""`python -m jobs.backends.slurm.task RUNDIR`: turn an srun task into a rank.

The engine replaces this process, so that signals, exit codes and the node's limits reach the rank.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

# Prefixes of variables of other launchers, which make torch or accelerate believe that one of them
# started this process.
_FOREIGN: Final = ("PMI_", "PMIX_", "OMPI_", "MV2_", "TORCHELASTIC_", "ACCELERATE_TORCH")
_FEWEST_THREADS, _MOST_THREADS = 1, 8


def rank_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a rank, given that of a task. Pure.

    Args:
        environment: Slurm's environment, with rank 0's address and port from the warden.

    Raises:
        KeyError: It is not the environment of a task.
    """
    local = int(environment["FSDP_TUI_LOCAL_RANKS"])
    cpus = int(environment.get("SLURM_CPUS_ON_NODE") or os.cpu_count() or 1)
    threads = min(_MOST_THREADS, max(_FEWEST_THREADS, cpus // local))
    kept = {key: value for key, value in environment.items() if not key.startswith(_FOREIGN)}
    return kept | {
        "RANK": environment["SLURM_PROCID"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "WORLD_SIZE": environment["SLURM_NTASKS"],
        "LOCAL_WORLD_SIZE": str(local),
        "GROUP_RANK": environment["SLURM_NODEID"],
        "OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS") or str(threads),
    }


def main() -> None:
    """Replace this process by a rank."""
    try:
        environment = rank_environment(os.environ)
    except (KeyError, ValueError) as error:
        sys.exit(f"not a task of a job's warden: {error}")
    os.execve(sys.executable, [sys.executable, "-m", "engine", sys.argv[1]], environment)


if __name__ == "__main__":
    main()
