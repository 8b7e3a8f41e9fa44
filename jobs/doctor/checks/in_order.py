"""The list of all checks, in display order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from jobs.doctor.checks.disks import check_cache_disk, check_hub, check_room, check_state_disk
from jobs.doctor.checks.environment import (
    check_locked_memory,
    check_memory,
    check_open_files,
    check_shared_memory,
    check_variables,
)
from jobs.doctor.checks.gpus import LIMIT, check_all_reduce, check_gpus, check_names, check_topology
from jobs.doctor.checks.queue import (
    check_database,
    check_exports,
    check_job,
    check_keeper,
    check_orphans,
    read_job,
)
from jobs.doctor.checks.software import (
    SECONDS,
    ask_torch,
    check_backends,
    check_compilers,
    check_extras,
    check_packages,
    check_python,
    check_torch,
)
from jobs.doctor.examine import Check
from jobs.doctor.nvml import ask_driver

if TYPE_CHECKING:
    from collections.abc import Sequence

# Stages: gather facts for other checks; judge them; measure, which needs the machine to itself.
_LEARN: Final = 0
_JUDGE: Final = 1
_MEASURE: Final = 2
_DRIVER_HANGS: Final = (
    "the driver hangs, and so would `nvidia-smi`; check `dmesg` for Xid errors, then reboot"
)

CHECKS: Final[Sequence[Check]] = (
    Check("software", "Python", check_python),
    Check("software", "packages", check_packages),
    Check("software", "extras", check_extras),
    Check("software", "C compiler", check_compilers),
    Check("software", "torch", ask_torch, seconds=SECONDS + 10, when_late=_DRIVER_HANGS),
    Check("software", "torch", check_torch, stage=_JUDGE),
    Check("software", "NCCL", check_backends, stage=_JUDGE),
    Check("GPUs", "driver", ask_driver, seconds=30, when_late=_DRIVER_HANGS),
    Check("GPUs", "--gpus", check_names, stage=_JUDGE),
    Check("GPUs", "GPUs", check_gpus, stage=_JUDGE),
    Check("GPUs", "topology", check_topology, stage=_JUDGE),
    Check("limits", "memory", check_memory),
    Check("limits", "/dev/shm", check_shared_memory, stage=_JUDGE),
    Check("limits", "open files", check_open_files),
    Check("limits", "locked memory", check_locked_memory),
    Check("disks", "state", check_state_disk),
    Check("disks", "cache", check_cache_disk, stage=_JUDGE),
    Check("hub", "hub", check_hub, seconds=30),
    Check("environment", "variables", check_variables),
    Check("queue", "database", check_database),
    Check("queue", "run directories", check_orphans),
    Check("queue", "exports", check_exports),
    Check("queue", "queue keeper", check_keeper),
    Check("job", "job file", read_job),
    Check("job", "preflight", check_job, stage=_JUDGE, seconds=120),
    Check("job", "checkpoints", check_room, stage=_JUDGE),
    Check("all-reduce", "all-reduce", check_all_reduce, stage=_MEASURE, seconds=LIMIT + 30),
)
