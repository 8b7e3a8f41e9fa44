"""The jobs database: what was asked for, what became of it, who holds which GPU.

One SQLite file in WAL mode, opened briefly by every process that needs it. A state changes only by
compare-and-set inside a write transaction, and every change is kept with its time and reason.
"""

from __future__ import annotations

import json
import sqlite3
import time
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.errors import NotFoundError, StateError, UserError
from jobs.machine.residence import residence
from jobs.paths import close_to_others, ensure_state_home
from jobs.queue import undo
from jobs.queue.job import (
    Change,
    Job,
    NewJob,
    Terms,
    backend_of,
    check_stages,
    job_of_row,
    moved,
)
from jobs.queue.states import ACTIVE, State, may_follow
from jobs.queue.tables import (
    HELD,
    HELD_BY_STAGE,
    NOT_HELD,
    PERSON,
    ROWS,
    SERVICE,
    VERSION,
    create_tables,
    insert,
    leave_wal_where_it_fails,
    opened,
    trouble,
    update,
)
from jobs.run.rundir import RunDir
from jobs.untrusted.text import harmless

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from jobs.machine.processes import ProcessId
    from jobs.queue.job import Place

__all__ = ["PERSON", "SERVICE", "Change", "Job", "NewJob", "Store", "Terms"]


class Store:
    """The database file. Cheap to create; every call opens its own connection.

    Attributes:
        patience: Seconds that a call waits for a locked database.

    Raises:
        UserError: The state directory cannot be used, or holds a newer database.
    """

    def __init__(self, home: Path | None = None, patience: float = PERSON) -> None:
        self.home = home or ensure_state_home()
        self.patience = patience
        self.read_only = False  # someone only looks: what would change a job is refused
        self.path = self.home / "jobs.db"
        try:
            try:
                self._open()
            except sqlite3.OperationalError as error:
                if not leave_wal_where_it_fails(self.path, error):
                    raise
                self._open()
        except (sqlite3.Error, OSError) as error:
            raise trouble(error, self.path) from error

    def _open(self) -> None:
        with self.connect("rwc") as db:
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version > VERSION:
                raise UserError(
                    f"{self.path} was written by a newer version of fsdp-tui",
                    "upgrade, or point FSDP_TUI_HOME elsewhere",
                )
            if version < VERSION:
                create_tables(db, self.home / "jobs.lock")
        self._settle(patience=0)  # who has the database locked is in the middle of a change

    # -- reading ---------------------------------------------------------------------------

    def get(self, job_id: int) -> Job:
        """Raises `NotFoundError` when there is no such job."""
        with self.connect() as db:
            return self._get(db, job_id)

    def all(self) -> list[Job]:
        """Every job, the newest first."""
        with self.connect() as db:
            return [job_of_row(row) for row in db.execute(f"{ROWS} ORDER BY id DESC")]

    def in_states(self, states: Iterable[State]) -> list[Job]:
        """Jobs in any of these states, in queue order."""
        with self.connect() as db:
            return self._in_states(db, states)

    def unended_backends(self) -> set[str]:
        """List the backends that have queued or active jobs; cheap enough for every second."""
        states = [State.QUEUED, *ACTIVE]
        marks = ",".join("?" * len(states))
        with self.connect() as db:
            rows = db.execute(f"SELECT DISTINCT wanted FROM jobs WHERE state IN ({marks})", states)
            return {backend_of(json.loads(row["wanted"])) for row in rows}

    def run_directories(self) -> set[str]:
        """Names of the run directories of all jobs, those included that are being submitted.

        The directory of such a job is there before its row: this waits for the row.
        """
        with self._transaction(None) as db:
            return {Path(row["run_dir"]).name for row in db.execute("SELECT run_dir FROM jobs")}

    def sweeps(self) -> dict[int, str]:
        """Return the sweep of each job that belongs to one."""
        with self.connect() as db:
            return {row["job"]: row["name"] for row in db.execute("SELECT * FROM sweeps")}

    def history(self, job_id: int) -> list[Change]:
        """Every change of state, oldest first."""
        with self.connect() as db:
            rows = db.execute("SELECT * FROM history WHERE job=? ORDER BY t, rowid", (job_id,))
            return [
                Change(
                    row["t"],
                    State(row["before"]) if row["before"] else None,
                    State(row["after"]),
                    row["reason"],
                )
                for row in rows
            ]

    # -- writing ---------------------------------------------------------------------------

    def check_writable(self) -> None:
        """Raise `StateError` if the store is read-only."""
        if self.read_only:
            raise StateError("read-only: nothing changed", "open it without --read-only")

    def add(
        self, *, name: str, terms: Terms, run_id: str, prepare: Callable[[RunDir], None]
    ) -> Job:
        """Put a new job into the queue; see `NewJob` and `add_all`."""
        return self.add_all([NewJob(name, terms, run_id, prepare)])[0]

    def add_all(self, new: Sequence[NewJob]) -> list[Job]:
        """Put new jobs into the queue, in this order: all of them, or none.

        Raises:
            NotFoundError: A job that must complete before one of them does not exist. So no two
                jobs can wait for each other.
            UserError: The run directory of a new job's number exists already.
        """
        now = time.time()
        with self.write() as db:
            for earlier in dict.fromkeys(each for job in new for each in job.follows):
                self._get(db, earlier)
            made: list[tuple[int, RunDir]] = []
            for job in new:
                row: dict[str, object] = {"name": job.name, "state": State.QUEUED, "run_dir": ""}
                row |= {"run_id": job.run_id, "created": now, "queued": now}
                row["held"] = HELD_BY_STAGE if job.follows else NOT_HELD
                job_id = insert(db, "jobs", row | job.terms.columns())
                for earlier in dict.fromkeys(job.follows):
                    insert(db, "stages", {"job": job_id, "follows": earlier})
                run_dir = RunDir(self.home / "runs" / f"{job_id}-{job.name}")
                if run_dir.root.exists() and not run_dir.set_aside():
                    raise UserError(
                        f"{run_dir.root} already exists, left by a database that was deleted",
                        "move it away, or its checkpoints would be mistaken for the new job's",
                    )
                update(db, job_id, {"run_dir": str(run_dir.root)})
                self._sort_in(db, job_id, job.terms)
                made.append((job_id, run_dir))
            first = made[0][0]  # the database takes all of them or none, so one tells for all
            files = undo.Undo(self.home, first, undo.count_changes(db, first))
            files.keep([], made=[run_dir for _, run_dir in made])
            for (job_id, run_dir), job in zip(made, new, strict=True):
                self._note(db, job_id, now, None, State.QUEUED, "submitted")
                job.prepare(run_dir)
            return [self._get(db, job_id) for job_id, _ in made]

    def requeue(
        self,
        job_id: int,
        reason: str,
        terms: Terms | None = None,
        prepare: Callable[[undo.Undo], None] = lambda _: None,
    ) -> Job:
        """Put an ended job into the queue again, on other terms if they are given.

        One that was stopped before it ever started still waits for those that it follows.

        `prepare` changes its files before anyone can start it, and keeps first what undoes that.

        Raises:
            StateError: The job has not ended.
        """
        with self.write() as db:
            files = undo.Undo(self.home, job_id, undo.count_changes(db, job_id))
            job = self._get(db, job_id)
            self._change(db, job, State.QUEUED, reason)
            db.execute(
                "UPDATE jobs SET queued=?, ended=NULL, stop_level=0, attempt=attempt+1, gpus='[]',"
                " held=?, supervisor_pid=NULL, supervisor_started=NULL WHERE id=?",
                (time.time(), HELD_BY_STAGE if job.follows else NOT_HELD, job_id),
            )
            if terms is not None:
                update(db, job_id, terms.columns())
                self._sort_in(db, job_id, terms)
            prepare(files)
            return self._get(db, job_id)

    def redescribe(
        self,
        job_id: int,
        *,
        name: str,
        terms: Terms,
        reason: str,
        prepare: Callable[[undo.Undo], None],
        follows: Sequence[int] | None = None,
    ) -> Job:
        """Give a job that waits in the queue another name and other terms; its place stays.

        `prepare` changes its files while nobody can start it, and keeps first what undoes that.
        `follows` are the jobs that must complete before it starts, instead of those so far.

        Raises:
            NotFoundError: There is no such job to follow.
            StateError: The job does not wait in the queue any more, or would wait for itself.
        """
        with self.write() as db:
            job = self._get_queued(db, job_id)
            files = undo.Undo(self.home, job_id, undo.count_changes(db, job_id))
            update(db, job_id, {"name": name, "reason": ""} | terms.columns())
            self._sort_in(db, job_id, terms)
            if follows is not None:
                self._follow(db, job, follows)
            self._note(db, job_id, time.time(), job.state, job.state, reason)
            prepare(files)
            return self._get(db, job_id)

    def change(
        self, job_id: int, after: State, reason: str, *, only_from: Iterable[State] | None = None
    ) -> bool:
        """Compare-and-set of the state; whether it was changed.

        Args:
            job_id: The job.
            after: The state to reach.
            reason: One line for people; kept in the history.
            only_from: Change only if the job is in one of these; otherwise return False.

        Raises:
            StateError: The states table does not allow the change.
        """
        with self.write() as db:
            job = self._get(db, job_id)
            if only_from is not None and job.state not in set(only_from):
                return False
            self._change(db, job, after, reason)
            return True

    def claim(self, job_id: int, gpus: Sequence[str], reason: str, seen: Job | None = None) -> bool:
        """Take GPUs for a queued job and move it to `starting`, all or nothing.

        Returns:
            False when someone holds one of the GPUs, the job is not queued as it was `seen`, or a
            job that it follows has not completed.
        """
        try:
            with self.write() as db:
                job = self._get(db, job_id)
                if job.state is not State.QUEUED or (seen and job.request != seen.request):
                    return False
                if job.blockers:
                    return False
                for device in gpus:
                    insert(db, "claims", {"device": device, "job": job_id})
                self._change(db, job, State.STARTING, reason)
                row = {"gpus": json.dumps(list(gpus)), "boot_id": str(residence())}
                update(db, job_id, row)
                return True
        except sqlite3.IntegrityError:
            return False

    def claims(self) -> dict[str, int]:
        """GPU UUID → job that holds it."""
        with self.connect() as db:
            return {row["device"]: row["job"] for row in db.execute("SELECT * FROM claims")}

    def take_over(self, job_id: int, former: ProcessId | None, new: ProcessId) -> bool:
        """Compare-and-set of the job's supervisor; False when someone else was quicker."""
        with self.write() as db:
            changed = db.execute(
                "UPDATE jobs SET supervisor_pid=?, supervisor_started=?"
                " WHERE id=? AND supervisor_pid IS ? AND supervisor_started IS ?",
                (new.pid, new.started, job_id, former and former.pid, former and former.started),
            )
            return changed.rowcount == 1

    def explain(self, job_id: int, reason: str, state: State = State.QUEUED) -> None:
        """Say why a job waits, or what is the matter; no change of state, nothing in the history.

        Nothing happens when the job is not in `state`.
        """
        reason = harmless(reason)
        with self.write() as db:
            db.execute(
                "UPDATE jobs SET reason=? WHERE id=? AND state=? AND reason<>?",
                (reason, job_id, state, reason),
            )

    def explain_all(self, reasons: Mapping[int, str]) -> None:
        """`explain` for many queued jobs at once; what is known already is not written."""
        stored = {job.id: job.reason for job in self.in_states([State.QUEUED])}
        new = [(harmless(r), i, State.QUEUED) for i, r in reasons.items() if stored.get(i, r) != r]
        if new:
            with self.write() as db:
                db.executemany("UPDATE jobs SET reason=? WHERE id=? AND state=?", new)

    def hold(self, job_id: int, held: bool, *, now: bool = False) -> Job:
        """Pass the job over until it is released.

        Released again, it no longer waits for jobs that it follows if one of them will not
        complete; with `now`, it waits for none of them in any case.

        Raises:
            StateError: It does not wait in the queue.
        """
        with self.write() as db:
            job = self._get_queued(db, job_id)
            goes = now or (job.stuck and not job.held)
            mark = HELD if held else HELD_BY_STAGE if job.follows and not goes else NOT_HELD
            update(db, job_id, {"held": mark})
            if mark == NOT_HELD and job.blockers:
                db.execute("DELETE FROM stages WHERE job=?", (job_id,))
                left = ", ".join(str(earlier) for earlier, _ in job.blockers)
                note = f"released; no longer waits for job {left}"
                self._note(db, job_id, time.time(), job.state, job.state, note)
            return self._get(db, job_id)

    def move(self, job_id: int, to: Place | None = None, *, priority: int | None = None) -> Job:
        """Change a queued job's priority, then its place among those of its priority (`moved`).

        Raises:
            StateError: It does not wait in the queue, or cannot go further up or down.
        """
        with self.write() as db:
            job = self._get_queued(db, job_id)
            if priority is not None:
                update(db, job_id, {"priority": priority})
                job = self._get(db, job_id)
            if to is not None:
                for moved_id, place in moved(job, self._in_states(db, [State.QUEUED]), to).items():
                    update(db, moved_id, {"queued": place})
            return self._get(db, job_id)

    def pause(self, paused: bool) -> None:
        """Stop (or resume) starting queued jobs; running ones are not touched."""
        with self.write() as db:
            db.execute("REPLACE INTO settings VALUES ('paused', ?)", (str(int(paused)),))

    @property
    def paused(self) -> bool:
        with self.connect() as db:
            row = db.execute("SELECT value FROM settings WHERE name='paused'").fetchone()
            return row is not None and row["value"] == "1"

    def raise_stop_level(self, job_id: int, level: int) -> int:
        """Ask the supervisor to stop the job at least this firmly; the level now in force."""
        with self.write() as db:
            db.execute("UPDATE jobs SET stop_level=MAX(stop_level, ?) WHERE id=?", (level, job_id))
            return self._get(db, job_id).stop_level

    def remove(self, job_id: int) -> Job:
        """Forget a job that has no processes; see `remove_all`."""
        return self.remove_all([job_id])[0]

    def remove_all(self, job_ids: Sequence[int]) -> list[Job]:
        """Forget jobs that have no processes: all of them, or none.

        Raises:
            StateError: One is active or queued.
        """
        with self.write() as db:
            leaving = [self._get(db, job_id) for job_id in job_ids]
            waiting = {row[0] for row in db.execute("SELECT job FROM stages")}
            for job in leaving:
                if not job.state.ended:
                    raise StateError(f"job {job.id} is {job.state}", "stop it first")
                db.execute("DELETE FROM jobs WHERE id=?", (job.id,))
                if job.state is State.COMPLETED:
                    db.execute("DELETE FROM stages WHERE follows=?", (job.id,))
            waiting -= {row[0] for row in db.execute("SELECT job FROM stages")}
            db.executemany(
                "UPDATE jobs SET held=? WHERE held=? AND id=?",
                [(NOT_HELD, HELD_BY_STAGE, job_id) for job_id in waiting],
            )
            return leaving

    # -- inside ----------------------------------------------------------------------------

    def _follow(self, db: sqlite3.Connection, job: Job, follows: Sequence[int]) -> None:
        """Let a queued job start after these, instead of those so far."""
        earlier = dict.fromkeys(follows)
        check_stages(job.id, [*earlier], partial(self._get, db))
        db.execute("DELETE FROM stages WHERE job=?", (job.id,))
        for each in earlier:
            insert(db, "stages", {"job": job.id, "follows": each})
        if not job.held:
            update(db, job.id, {"held": HELD_BY_STAGE if earlier else NOT_HELD})

    def connect(
        self, mode: str = "rw", patience: float | None = None
    ) -> AbstractContextManager[sqlite3.Connection]:
        """A connection of its own; what it waits for a lock is `patience`, or the store's."""
        return opened(self.path, mode, self.patience if patience is None else patience)

    @contextmanager
    def held_open(self) -> Iterator[None]:
        """Keep SQLite's side files in existence: to make them takes space, a full disk has none."""
        with self.connect() as db:
            db.execute("SELECT 1 FROM jobs LIMIT 1").fetchone()
            yield

    @contextmanager
    def write(self, patience: float | None = None) -> Iterator[sqlite3.Connection]:
        """A write transaction: takes the lock at the start, so that what is read holds."""
        self.check_writable()
        close_to_others(self.home)
        try:
            with self._transaction(patience) as db:
                yield db
        finally:
            self._settle()

    @contextmanager
    def _transaction(self, patience: float | None) -> Iterator[sqlite3.Connection]:
        with self.connect(patience=patience) as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                undo.settle(self.home, db)
                yield db
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    with suppress(sqlite3.Error):  # closing it does the same; the first error tells
                        db.execute("ROLLBACK")
                raise

    def _settle(self, patience: float | None = None) -> None:
        """Undo the files of a change that the database did not take; later, if that fails."""
        if undo.is_left(self.home):
            with suppress(sqlite3.Error), self._transaction(patience):
                pass

    @staticmethod
    def _get(db: sqlite3.Connection, job_id: int) -> Job:
        row = None
        if 0 < job_id < 2**63:  # what SQLite can hold
            row = db.execute(f"{ROWS} WHERE id=?", (job_id,)).fetchone()
        if row is None:
            raise NotFoundError(f"no job {job_id}", "`fsdp-tui list` shows the jobs")
        return job_of_row(row)

    @classmethod
    def _get_queued(cls, db: sqlite3.Connection, job_id: int) -> Job:
        job = cls._get(db, job_id)
        if job.state is not State.QUEUED:
            raise StateError(f"job {job_id} is {job.state}, not queued")
        return job

    @staticmethod
    def _in_states(db: sqlite3.Connection, states: Iterable[State]) -> list[Job]:
        values = list(states)
        marks = ",".join("?" * len(values))
        rows = db.execute(
            f"{ROWS} WHERE state IN ({marks}) ORDER BY priority DESC, queued, id",
            values,
        )
        return [job_of_row(row) for row in rows]

    @staticmethod
    def _sort_in(db: sqlite3.Connection, job_id: int, terms: Terms) -> None:
        """Note which sweep a job belongs to, if it does."""
        db.execute("DELETE FROM sweeps WHERE job=?", (job_id,))
        if terms.sweep:
            insert(db, "sweeps", {"job": job_id, "name": terms.sweep})

    @classmethod
    def _change(cls, db: sqlite3.Connection, job: Job, after: State, reason: str) -> None:
        reason = harmless(reason)
        if not may_follow(job.state, after, here=job.here):
            raise StateError(f"job {job.id} is {job.state} and cannot become {after}")
        now = time.time()
        update(db, job.id, {"state": after, "reason": reason})
        if (job.state, after) == (State.QUEUED, State.STARTING):
            update(db, job.id, {"started": now})
            db.execute("DELETE FROM stages WHERE job=?", (job.id,))  # later tries start at once
        if after.ended:
            update(db, job.id, {"ended": now})
            db.execute("DELETE FROM claims WHERE job=?", (job.id,))
        cls._note(db, job.id, now, job.state, after, reason)

    @staticmethod
    def _note(
        db: sqlite3.Connection, job_id: int, t: float, before: State | None, after: State, why: str
    ) -> None:
        row = {"job": job_id, "t": t, "before": before, "after": after, "reason": why}
        insert(db, "history", row)
