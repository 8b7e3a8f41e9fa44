"""What Slurm said of a job last, for everybody who only looks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from jobs.run.rundir import read_json
from jobs.slurm.records import read_handed_in, read_warden_report, warden_file

if TYPE_CHECKING:
    from jobs.queue.store import Job, Store

KEPT: Final = "slurm-answer.json"
_SHOWN: Final = ("state", "reason", "nodes", "starts", "restarts", "place")


def slurm_facts(store: Store, job: Job) -> dict[str, Any]:
    """A Slurm job's number, where it is and since when that is known; {} of a local job."""
    record = read_handed_in(job.run_dir, job.attempt) if job.on_slurm else None
    if record is None:
        return {}
    kept = read_json(store.home / KEPT) or {}
    jobs, asked = kept.get("jobs"), kept.get("t")
    listed = jobs.get(record.id) if isinstance(jobs, dict) else None
    warden = read_warden_report(warden_file(job.run_dir))
    mine = warden is not None and warden.allocation.id == record.id
    if not isinstance(listed, dict) or listed.get("name") != record.name:
        listed = {}
    facts = {name: listed[name] for name in _SHOWN if name in listed}
    age = max(0.0, time.time() - asked) if isinstance(asked, float) else None
    host = warden.host if mine and warden is not None else None
    return {"slurm": {"job": record.id, "name": record.name, **facts, "age": age, "host": host}}
