"""`fsdp-tui selftest`: train, stop, resume, export and fail on this machine like real jobs.

`stage` runs jobs through the regular queue and measures steps and memory on GPUs; `scenes` defines
the jobs and judges the results. Each result is a `jobs.doctor.examine.Finding`.
"""

from jobs.selftest.scenes import COUNT, REPORT, choose_gpus, run

__all__ = ["COUNT", "REPORT", "choose_gpus", "run"]
