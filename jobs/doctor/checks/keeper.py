"""The jobs database and the queue keeper."""

from __future__ import annotations

import json
import sqlite3
import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Final

import psutil

from jobs.backends.keeper import newest_code
from jobs.doctor.finding import Finding, fail, ok, warn
from jobs.machine.file_lock import LOCKS, holders
from jobs.models.damaged_weights import DamagedError, read_metadata
from jobs.paths import state_home
from jobs.queue.states import ACTIVE, State
from jobs.queue.store import Store
from jobs.queue.tables import is_locked, trouble
from jobs.spec.job_spec import field_names, is_public

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from jobs.doctor.patient import Patient

_EXPORTS: Final = 500  # files that are read at most
_NAMED: Final = 5  # of them
_BUSY: Final = 5.0  # seconds that the database may be locked by others


def check_database(_: Patient) -> Iterator[Finding]:
    """Whether the jobs database can be read and is whole. Nothing is created."""
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
    store = Store(path.parent)  # a newer version's is a UserError
    everything = store.all()
    active = sum(job.state in ACTIVE for job in everything)
    queued = sum(job.state is State.QUEUED for job in everything)
    words = f"{len(everything)} jobs, {active} running, {queued} queued ({path})"
    yield ok("database", words, jobs=len(everything), active=active, queued=queued)
    if store.paused and queued:
        yield warn("queue", "is paused", "`fsdp-tui pause --off` resumes it")


def check_exports(_: Patient) -> Iterator[Finding]:
    """Whether files of earlier versions say in their headers what is private."""
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
    except (DamagedError, ValueError):  # not ours
        return set()
    return {key for key in field_names() if key in job and not is_public(key)}


def check_keeper(_: Patient) -> Iterator[Finding]:
    """Whether the process is there that looks after the queue, and runs today's code."""
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


_MODULES: Final = frozenset({"jobs.backends.keeper", "jobs.queue.keeper"})  # or of version 0.1


def claimed() -> dict[str, int]:
    """GPU UUID → job of ours that holds it; nothing where there is no database to ask."""
    home = state_home()
    return Store(home).claims() if (home / "jobs.db").exists() else {}


def keeper_of(lock: Path, locks: Path = LOCKS) -> int | None:
    """Return the process that holds the keeper's lock."""
    for pid in holders(lock, locks=locks):
        with suppress(psutil.Error):
            if _MODULES & {*psutil.Process(pid).cmdline()}:
                return pid
    return None


def _waiting(home: Path) -> int:
    if not (home / "jobs.db").exists():
        return 0
    return len(Store(home).in_states([State.QUEUED, *ACTIVE]))
