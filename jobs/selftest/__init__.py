"""`fsdp-tui selftest`: train, stop, resume, export and fail on this machine, as real jobs do.

`stage` runs jobs through the ordinary queue, `scenes` says which and judges what became of them,
`speed` measures steps and memory on GPUs. Each result is a `jobs.doctor.examine.Finding`.
"""

from jobs.selftest.scenes import COUNT, REPORT, choose_gpus, run

__all__ = ["COUNT", "REPORT", "choose_gpus", "run"]
