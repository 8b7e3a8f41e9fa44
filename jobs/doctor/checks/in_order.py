"""The list of all checks, in display order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from jobs.doctor.checks import environment, queue, software
from jobs.doctor.checks.disks import check_cache_disk, check_hub, check_room, check_state_disk
from jobs.doctor.checks.gpus import LIMIT, check_all_reduce, check_gpus, check_names, check_topology
from jobs.doctor.examine import Check
from jobs.doctor.nvml import ask_driver

if TYPE_CHECKING:
    from collections.abc import Sequence

# Stages after gathering facts: judge them; measure, which needs the machine to itself.
_JUDGE: Final = 1
_MEASURE: Final = 2
_DRIVER_HANGS: Final = (
    "the driver hangs, and so would `nvidia-smi`; check `dmesg` for Xid errors, then reboot"
)

CHECKS: Final[Sequence[Check]] = (
    Check("software", "Python", software.check_python),
    Check("software", "packages", software.check_packages),
    Check("software", "extras", software.check_extras),
    Check("software", "C compiler", software.check_compilers),
    Check(
        "software",
        "torch",
        software.ask_torch,
        seconds=software.SECONDS + 10,
        when_late=_DRIVER_HANGS,
    ),
    Check("software", "torch", software.check_torch, stage=_JUDGE),
    Check("software", "NCCL", software.check_backends, stage=_JUDGE),
    Check("GPUs", "driver", ask_driver, seconds=30, when_late=_DRIVER_HANGS),
    Check("GPUs", "--gpus", check_names, stage=_JUDGE),
    Check("GPUs", "GPUs", check_gpus, stage=_JUDGE),
    Check("GPUs", "topology", check_topology, stage=_JUDGE),
    Check("limits", "memory", environment.check_memory),
    Check("limits", "/dev/shm", environment.check_shared_memory, stage=_JUDGE),
    Check("limits", "open files", environment.check_open_files),
    Check("limits", "locked memory", environment.check_locked_memory),
    Check("disks", "state", check_state_disk),
    Check("disks", "cache", check_cache_disk, stage=_JUDGE),
    Check("hub", "hub", check_hub, seconds=30),
    Check("environment", "variables", environment.check_variables),
    Check("queue", "database", queue.check_database),
    Check("queue", "run directories", queue.check_orphans),
    Check("queue", "exports", queue.check_exports),
    Check("queue", "queue keeper", queue.check_keeper),
    Check("job", "job file", queue.read_job),
    Check("job", "preflight", queue.check_job, stage=_JUDGE, seconds=120),
    Check("job", "checkpoints", check_room, stage=_JUDGE),
    Check("all-reduce", "all-reduce", check_all_reduce, stage=_MEASURE, seconds=LIMIT + 30),
)
