"""Generate the batch script of a job. Pure."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Final

from jobs.spec.file.load import dump_spec
from jobs.spec.rules.strategy import world_size

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from jobs.run.rundir import RunDir
    from jobs.spec.job_spec import JobSpec
    from jobs.spec.keys.devices import DeviceKeys

SIGNAL_SECONDS: Final = 300  # seconds before the time limit, used until a save has been measured
# Without this, the signal before the time limit would end the shell during the setup.
_WAIT_FOR_WARDEN: Final = "trap '' USR2"
PYTHON_VARIABLE: Final = "FSDP_TUI_PYTHON"
_PLAIN: Final = frozenset("-_./,:=+@%[]")


def script_of(
    spec: JobSpec,
    run_dir: RunDir,
    *,
    name: str,
    python: str,
    home: Path,
    signal_seconds: int = SIGNAL_SECONDS,
) -> str:
    """Return the script that the queue submits.

    Args:
        spec: The job.
        run_dir: Its run directory, on a file system shared with the nodes.
        name: Unique name of the Slurm job.
        python: Path of the interpreter, the same on the nodes.
        home: The state directory.
        signal_seconds: Seconds before the time limit, if the job sets none.
    """
    log = run_dir.supervisor_log
    lines = _head(spec, name, str(log), signal_seconds)
    lines += ["", _WAIT_FOR_WARDEN, *(spec.slurm_setup or []), *_exports(home)]
    return "\n".join([*lines, _start(python, str(run_dir.root)), ""])


def script_by_hand(spec: JobSpec, *, python: str = "python") -> str:
    """Return a self-contained script for `sbatch` that needs no queue and creates its own
    directory.
    """
    folder = f"{spec.name}-by-hand"
    lines = _head(spec, spec.name, f"{spec.name}-%j.log", spec.slurm_signal_seconds)
    lines += ["", _WAIT_FOR_WARDEN, f"mkdir -p {shlex.quote(folder)}"]
    lines += [f"cat > {shlex.quote(folder)}/job.yaml <<'END_OF_FILE'"]
    lines += [dump_spec(spec, only_set=True).rstrip("\n"), "END_OF_FILE"]
    lines += [*(spec.slurm_setup or []), *_exports(None)]
    return "\n".join([*lines, _start(python, folder), ""])


def per_machine(spec: DeviceKeys) -> int:
    """Return the number of ranks on each machine."""
    return world_size(spec) // spec.num_machines


def on_gpus(spec: DeviceKeys) -> bool:
    """Return whether the job asks Slurm for one GPU per rank."""
    return spec.device != "cpu"


def _head(spec: JobSpec, name: str, log: str, signal_seconds: int | None) -> list[str]:
    seconds = spec.slurm_signal_seconds or signal_seconds or SIGNAL_SECONDS
    options: list[tuple[str, object]] = [
        ("job-name", name),
        ("nodes", spec.num_machines),
        ("ntasks-per-node", per_machine(spec)),
        ("gpus-per-node", per_machine(spec) if on_gpus(spec) else None),
        ("partition", spec.slurm_partition),
        ("account", spec.slurm_account),
        ("qos", spec.slurm_qos),
        ("time", spec.slurm_time),
        # Only to the batch script: the ranks do not expect the signal, and NCCL may catch USR1.
        ("signal", f"B:USR2@{seconds}"),
        ("output", log if log.endswith("%j.log") else log.replace("%", "%%")),
        ("open-mode", "append"),
    ]
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH --{key}={_word(str(value))}" for key, value in options if value is not None]
    lines.append(f"#SBATCH --{'requeue' if spec.slurm_requeue else 'no-requeue'}")
    lines += [f"#SBATCH {line}" for line in _grouped(spec.slurm_extra_args or [])]
    return lines


def _exports(home: Path | None) -> list[str]:
    lines = [f"export FSDP_TUI_HOME={shlex.quote(str(home))}"] if home is not None else []
    return [
        *lines,
        "export PYTHONSAFEPATH=1",
        # CPUs that srun gives each rank; since 22.05 it no longer inherits them from sbatch.
        '[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK',
    ]


def _start(python: str, run_dir: str) -> str:
    """Return the last line, with which the batch step becomes the job's supervisor."""
    return f"exec {shlex.quote(python)} -m jobs.backends.slurm.warden {shlex.quote(run_dir)}"


def _grouped(words: Sequence[str]) -> list[str]:
    """Group options with their values, one option per line."""
    lines: list[str] = []
    for word in words:
        if lines and not word.startswith("-") and "=" not in lines[-1] and " " not in lines[-1]:
            lines[-1] += f" {_word(word)}"
        else:
            lines.append(_word(word))
    return lines


def _word(text: str) -> str:
    """Quote a word of an #SBATCH line, which Slurm splits at blanks."""
    if all(c.isalnum() or c in _PLAIN for c in text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
