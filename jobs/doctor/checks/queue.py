"""Check the jobs database, the queue keeper, the given job, and orphans."""

from __future__ import annotations

import json
import sqlite3
import time
from contextlib import closing, suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import psutil

from jobs.backends import backend
from jobs.backends.keeper import newest_code
from jobs.doctor.examine import Finding, Verdict, fail, ok, warn
from jobs.doctor.orphans import find_orphans
from jobs.errors import UserError
from jobs.machine.file_lock import LOCKS, holders
from jobs.machine.gpu import foreign_users
from jobs.memory.host_memory import check_host_memory
from jobs.models.find_model import DamagedError, read_metadata
from jobs.models.scorers import check_scorers
from jobs.paths import state_home
from jobs.preflight.check_job import (
    check_block_names,
    check_compiler,
    check_devices,
    check_model,
    check_wrap_policy,
)
from jobs.preflight.data import check_dataset
from jobs.queue.states import ACTIVE, State
from jobs.queue.store import Store
from jobs.queue.tables import is_locked, trouble
from jobs.spec.file.load import load_spec
from jobs.spec.job_spec import field_names, is_public
from jobs.spec.rules.cascade import settle
from jobs.spec.rules.strategy import world_size
from jobs.spec.rules.warnings import find_warnings
from jobs.trackers import check_trackers
from jobs.units import gpus, size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from jobs.doctor.examine import Patient
    from jobs.doctor.orphans import Orphan
    from jobs.machine.gpu import Gpu
    from jobs.spec.job_spec import JobSpec, RecipeKeys


# -- keeper ---------------------------------------------------------------------------------
# The jobs database and the queue keeper.


_EXPORTS: Final = 500  # exported files read at most
_NAMED: Final = 5  # names listed at most
_BUSY: Final = 5.0  # seconds to wait for a locked database


def check_database(_: Patient) -> Iterator[Finding]:
    """Check that the jobs database is readable and intact. Creates nothing."""
    path = state_home() / "jobs.db"
    if not path.exists():
        yield ok("database", f"none yet in {path.parent}; the first job creates it")
        return
    try:
        uri = f"{path.as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True, timeout=_BUSY)) as db:
            verdict = db.execute("PRAGMA quick_check").fetchone()[0]
    except sqlite3.Error as error:
        if is_locked(error):
            problem = trouble(error, path)
            yield fail("database", problem.message, problem.hint or "")
            return
        verdict = str(error)
    if verdict != "ok":
        yield fail(
            "database",
            f"{path} cannot be read: {verdict}",
            "`fsdp-tui doctor --repair` rebuilds it from the run directories and keeps the old one",
        )
        return
    store = Store(path.parent)  # raises UserError if a newer version wrote it
    everything = store.all()
    active = sum(job.state in ACTIVE for job in everything)
    queued = sum(job.state is State.QUEUED for job in everything)
    words = f"{len(everything)} jobs, {active} running, {queued} queued ({path})"
    yield ok("database", words, jobs=len(everything), active=active, queued=queued)
    if store.paused and queued:
        yield warn("queue", "is paused", "`fsdp-tui pause --off` resumes it")


def check_exports(_: Patient) -> Iterator[Finding]:
    """Report exported files of earlier versions whose headers contain private settings."""
    exports = sorted((state_home() / "runs").glob("*/export/*.safetensors"))[-_EXPORTS:]
    private = {path.parent.parent.name: keys for path in exports if (keys := _private_keys(path))}
    if not private:
        return
    runs = list(private)
    names = ", ".join(runs[:_NAMED]) + (" and others" if len(runs) > _NAMED else "")
    settings = ", ".join(sorted(set().union(*private.values())))
    words = f"those of {names} name private settings in their headers ({settings})"
    yield warn("exports", words, "export them again before you publish them", runs=runs)


def _private_keys(path: Path) -> set[str]:
    """Return the private keys in an exported file's header."""
    try:
        job = json.loads(str(read_metadata(path).get("fsdp_tui.job") or "{}"))
    except (DamagedError, ValueError):  # not an export of ours
        return set()
    return {key for key in field_names() if key in job and not is_public(key)}


def check_keeper(_: Patient) -> Iterator[Finding]:
    """Check that the queue keeper is running, with the current code."""
    home = state_home()
    waiting = _waiting(home)
    pid = keeper_of(home / "runner.lock")
    if pid is None:
        if waiting:
            yield warn(
                "queue keeper",
                f"is not running, and {waiting} jobs are queued or running",
                f"`fsdp-tui list` starts it; see {home / 'runner.log'}",
            )
        else:
            yield ok("queue keeper", "not running: nothing to do", pid=None)
        return
    started = psutil.Process(pid).create_time()
    facts = {"pid": pid, "started": started}
    if newest_code() > started:
        yield warn(
            "queue keeper",
            f"pid {pid} started before fsdp-tui was last updated",
            f"kill {pid}, then `fsdp-tui list`; jobs keep running",
            **facts,
        )
    else:
        minutes = (time.time() - started) / 60
        yield ok("queue keeper", f"pid {pid}, for {minutes:.0f} min", **facts)


# the second name is that of version 0.1
_MODULES: Final = frozenset({"jobs.backends.keeper", "jobs.queue.keeper"})


def claimed() -> dict[str, int]:
    """Return GPU UUID → id of our job that holds it; empty if there is no database."""
    home = state_home()
    return Store(home).claims() if (home / "jobs.db").exists() else {}


def keeper_of(lock: Path, locks: Path = LOCKS) -> int | None:
    """Return the pid of the process that holds the keeper's lock; None if there is none."""
    for pid in holders(lock, locks=locks):
        with suppress(psutil.Error):
            if _MODULES & {*psutil.Process(pid).cmdline()}:
                return pid
    return None


def _waiting(home: Path) -> int:
    if not (home / "jobs.db").exists():
        return 0
    return len(Store(home).in_states([State.QUEUED, *ACTIVE]))


# -- job ------------------------------------------------------------------------------------
# The job: everything that `submit` would reject, and what the job would wait for.


_OTHERWISE: Final = "change it in the job file"


def read_job(patient: Patient) -> Iterator[Finding]:
    """Parse the job file."""
    if patient.job is None:
        return
    notes: list[str] = []
    try:
        spec = load_spec(patient.job, on_note=notes.append)
    except UserError as error:
        yield _refused("job file", error)
        return
    warnings = notes + find_warnings(spec)
    patient.spec = settle(spec)
    for text in warnings:
        yield warn("job file", text, _OTHERWISE)
    if not warnings:
        yield ok(
            "job file",
            f"{patient.job}: {spec.name}, {spec.model_family}, "
            f"{spec.model_type}, {world_size(spec)} ranks",
        )


def check_job(patient: Patient) -> Iterator[Finding]:
    """Run all checks of `jobs.preflight.check_job.check`, not stopping at the first failure."""
    spec = patient.spec
    if spec is None:
        return
    model = list(_run_check("model", partial(check_model, settings=True), spec))
    yield from model
    if model[0].verdict is Verdict.OK:  # otherwise there is no model to look up blocks in
        yield from _run_check("blocks", check_block_names, spec)
    yield from _run_check("wrap policy", check_wrap_policy, spec)
    yield from _run_check("scoring models", check_scorers, spec)
    yield from _run_check("dataset", check_dataset, spec, "{} images and videos")
    yield from _run_check("trackers", check_trackers, spec)
    if spec.launcher == "slurm":  # this machine's devices say nothing about the nodes
        slurm = backend(spec.launcher)
        yield from _run_check("slurm", lambda _: slurm.request(spec) and "sbatch is there", spec)
    elif patient.nvml is not None:  # otherwise the driver hangs, and would hang again
        yield from check_job_gpus(spec, patient.nvml.gpus)
        on_gpus = spec.device != "cpu" and bool(patient.nvml.gpus)
        yield from _run_check("compiler", partial(check_compiler, on_gpus=on_gpus), spec)
        yield from _run_check("host memory", partial(check_host_memory, on_gpus=on_gpus), spec)


def check_job_gpus(spec: RecipeKeys, present: Sequence[Gpu]) -> Iterator[Finding]:
    """Check that the job's GPUs exist, and whether the job would have to wait for them."""
    try:
        requested = check_devices(spec)
    except UserError as error:
        yield _refused("devices", error)
        return
    if requested is None:
        yield ok("devices", f"{world_size(spec)} CPU ranks")
        return
    claims = claimed()
    others = {} if spec.share_gpus else foreign_users(present, (), claims)
    taken = {gpu.uuid: _holder(gpu, claims, others) for gpu in present}
    usable = [gpu for gpu in present if gpu.unusable is None]
    if isinstance(requested, int):
        free = [gpu for gpu in usable if not taken[gpu.uuid]]
        now = min(requested, len(free))
        words = f"{gpus(requested)}, of which {now} {'is' if now == 1 else 'are'} free now"
        waits = now < requested
    else:
        mine = [gpu for gpu in usable if gpu.uuid in requested]
        busy = [f"GPU {gpu.index} {taken[gpu.uuid]}" for gpu in mine if taken[gpu.uuid]]
        words = f"GPU {', '.join(str(gpu.index) for gpu in mine)}; " + ("; ".join(busy) or "free")
        waits = bool(busy)
    if waits:
        yield warn("devices", words, "the job waits in the queue until they are free")
    else:
        yield ok("devices", words)


def _holder(gpu: Gpu, claims: dict[str, int], others: dict[str, str]) -> str:
    if gpu.uuid in claims:
        return f"is held by job {claims[gpu.uuid]}"
    return f"is used by {others[gpu.uuid]}" if gpu.uuid in others else ""


def _run_check(
    name: str, check: Callable[[JobSpec], object], spec: JobSpec, words: str = "{}"
) -> Iterator[Finding]:
    """Run one preflight check; yield its outcome, or nothing if it returns None."""
    try:
        result = check(spec)
    except UserError as error:
        yield _refused(name, error)
        return
    if result is not None:
        yield ok(name, words.format(result))


def _refused(name: str, error: UserError) -> Finding:
    return fail(name, error.message, error.hint or _OTHERWISE)


# -- orphans --------------------------------------------------------------------------------
# Run directories that belong to no job.


_LISTED: Final = 20


def check_orphans(_: Patient) -> Iterator[Finding]:
    """List orphaned run directories. Creates nothing; another check reports database errors."""
    home = state_home()
    if not (home / "jobs.db").exists():
        return
    try:
        orphans = find_orphans(Store(home))
    except (sqlite3.Error, UserError):
        return
    yield from judge_orphans(orphans)


def judge_orphans(orphans: Sequence[Orphan]) -> Iterator[Finding]:
    """Judge the orphans. Pure."""
    empty = [orphan for orphan in orphans if not orphan.holds]
    trained = [orphan for orphan in orphans if orphan.holds]
    if empty:
        words = f"{_count(empty)} no job, and nothing was trained there"
        yield _listed(empty, words, "`fsdp-tui doctor --repair` deletes what is listed")
    if trained:
        words = f"{_count(trained)} no job, and what was trained there is kept"
        yield _listed(trained, words, "take from them what you need, then delete them by hand")


def _count(orphans: Sequence[Orphan]) -> str:
    total = size(sum(orphan.bytes for orphan in orphans))
    return f"{len(orphans)} ({total}) belong{'s' * (len(orphans) == 1)} to"


def _listed(orphans: Sequence[Orphan], words: str, advice: str) -> Finding:
    lines = [
        f"{size(orphan.bytes):>10}  {orphan.path}{f'  ({orphan.holds})' if orphan.holds else ''}"
        for orphan in orphans[:_LISTED]
    ]
    if len(orphans) > _LISTED:
        lines.append(f"and {len(orphans) - _LISTED} more")
    facts = {"paths": [str(orphan.path) for orphan in orphans]}
    return Finding(
        **vars(warn("run directories", words, advice, **facts)) | {"lines": tuple(lines)}
    )
