"""When checkpoints are written, and how: while training waits, or in the background.

Writing is a thread's work either way, with a process group of its own, so that its collectives
never meet those of training. Where there is room in host memory, what is saved is copied there
first and training continues at once. A save that fails, for any reason, is tried once more
while training waits; older checkpoints are not touched before a new one is complete.
"""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from engine.checkpoint.contents import collect, expected_bytes
from engine.checkpoint.together import NoRoomError, SaveError, is_full, together, words_of
from engine.checkpoint.write import aside_of, keep_newest, write
from engine.model.release import give_back
from engine.ranks.world import available_memory
from jobs.errors import DiskFullError, UserError
from jobs.run.eventlog import STEP_LINE, EventLog
from jobs.run.events import Checkpoint
from jobs.run.judging import judge
from jobs.run.rundir import MANIFEST, read_json
from jobs.units import size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from engine.checkpoint.contents import Contents
    from engine.ranks.telemetry import Telemetry
    from engine.ranks.world import World
    from engine.train.train_state import TrainState
    from jobs.run.rundir import RunDir
    from jobs.spec.job_spec import JobSpec

_T = TypeVar("_T")

# Slow disks make slow saves: a rank that waits here for another one does not fail.
_TIMEOUT: Final = timedelta(days=14)
_LOOK_EVERY: Final = 0.5  # seconds; how far a save is, while training waits for it
_SPARE_DISK: Final = 4 * 2**20  # bytes of file headers, JSON and the file system's own
_RESCUE_SECONDS: Final = 60.0  # without a byte; hashing what was written takes its time, too
_SPARE_MEMORY: Final = 0.5  # of the free host memory may hold a copy of what is saved
_HINT: Final = "free some space, or set on_save_failure: warn to continue without this checkpoint"


@dataclass(frozen=True)
class _Pending:
    """A checkpoint that is being written; `outcome`: its bytes, and when it was complete."""

    training: TrainState
    path: Path
    step: int
    total: int
    begun: float
    outcome: Future[tuple[int, float]]


class Saver:
    """Writes a run's checkpoints. All ranks call its methods together, but for `failed`.

    Args:
        spec: The job.
        run_dir: The run.
        world: The ranks.
        telemetry: This rank's.
        data: What is recorded of the data; JSON values.
    """

    def __init__(
        self,
        spec: JobSpec,
        run_dir: RunDir,
        world: World,
        telemetry: Telemetry,
        data: Mapping[str, Any] | None = None,
    ) -> None:
        self._spec = spec
        self._run_dir = run_dir
        self._world = world
        self._telemetry = telemetry
        self._data = data
        self._group = dist.new_group(backend="gloo", timeout=_TIMEOUT) if world.size > 1 else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._thread.submit(int).result()  # if there can be no thread, then now, not after hours
        self._stager: DefaultStager | None = None
        # Whether training continues meanwhile; decided at the first save.
        self._behind: bool | None = None
        self._pending: _Pending | None = None
        self._events = EventLog(run_dir.events, passed_over=STEP_LINE)

    def save(self, training: TrainState, *, last: bool = False) -> None:
        """Save the present step, unless there is a complete checkpoint of it.

        A save that is still under way is waited for first.

        Args:
            training: What is saved.
            last: Training ends with this one: it is complete when this returns, or else the job
                fails, whatever `on_save_failure` says.

        Raises:
            UserError: A checkpoint cannot be written, and the job says to stop then.
        """
        self.finish()
        final = self._run_dir.checkpoint(training.step)
        # Agreed, since a network file system may show it to one rank before another.
        if self._world.any([read_json(final / MANIFEST) is not None])[0]:
            return
        try:
            self._begin(training, final, waits=last)
        except NoRoomError as error:
            self._fail(f"cannot save {final.name}: {error}", last=last, full=True)
        except SaveError as error:
            self._try_again(training, final, error, last=last)

    def failed(self) -> bool:
        """Whether the save that was under way has failed, as far as this rank knows."""
        pending = self._pending
        return (
            pending is not None
            and pending.outcome.done()
            and pending.outcome.exception() is not None
        )

    def tell(self) -> None:
        """Say that a checkpoint is complete, once it is; no collective."""
        pending = self._pending
        if pending is not None and pending.outcome.done() and not self.failed():
            self._pending = None
            self._say(pending)

    def finish(self, *, last: bool = False) -> None:
        """Wait for a save that is under way. All ranks get the same outcome: see `together`.

        If it failed, the present step is saved in its place.

        Raises:
            UserError: That failed too, and the job says to stop then.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if not pending.outcome.done():
            self._watch(pending)
        try:
            self._settle(pending)
        except SaveError as error:
            self._try_again(pending.training, pending.path, error, last=last)

    def rescue(self) -> None:
        """Let a save that is under way become complete, before this rank ends with a failure.

        Only while it moves on: another rank may be gone, and then it never will. No collective
        of this thread's, and nothing is raised.
        """
        pending, seen, looked = self._pending, -1, 0
        while pending is not None and not pending.outcome.done():
            written = _bytes_in(aside_of(pending.path))
            looked = looked + 1 if written == seen else 0
            if looked * _LOOK_EVERY > _RESCUE_SECONDS:
                return
            seen = written
            wait([pending.outcome], timeout=_LOOK_EVERY)
        if pending is not None and pending.outcome.exception() is None:
            self._say(pending)

    def close(self) -> None:
        """End the thread and free what it used."""
        self._thread.shutdown(wait=True)
        self._forget_copy()

    def check_room(self, training: TrainState) -> None:
        """Look whether there is room for a checkpoint, before there is anything to lose.

        Raises:
            UserError: There is none, and the job says to stop when one cannot be written.
        """
        _, lack = self._look_at_disk(expected_bytes(training, self._spec))
        if lack is not None:
            self._fail(f"no room for a checkpoint: {lack}", last=False, full=True)

    # -- how -------------------------------------------------------------------------------

    def _begin(self, training: TrainState, final: Path, *, waits: bool) -> None:
        """Start a save, and complete it unless training continues meanwhile.

        Args:
            training: What is saved.
            final: Where to.
            waits: Whether training waits, whatever the job says.

        Raises:
            SaveError: It failed, on all ranks.
            NoRoomError: There is no room for it.
        """
        contents = self._agreed(lambda: collect(training, self._spec, self._world.size, self._data))
        total, lack = self._look_at_disk(contents.total_bytes)
        if lack is not None:
            raise NoRoomError(lack)
        begun = time.monotonic()
        goes_on = not waits and self._goes_on(contents)
        if goes_on:
            contents = self._agreed(lambda: self._copied(contents))
        job = self._thread.submit(self._write, contents, final)
        pending = _Pending(training, final, contents.step, total, begun, job)
        if goes_on:
            self._pending = pending
            return
        self._watch(pending)
        self._settle(pending)

    def _settle(self, pending: _Pending) -> None:
        """Say that a save is complete.

        Raises:
            SaveError: It is not, on any rank.
            Exception: Ranks could not even agree on that: one of them is gone.
        """
        error = pending.outcome.exception()
        if error is None:
            self._say(pending)
        elif isinstance(error, SaveError) or self._world.size > 1:
            raise error
        else:
            raise SaveError(words_of(error), full=is_full(error)) from error

    def _try_again(
        self, training: TrainState, failed: Path, first: SaveError, *, last: bool
    ) -> None:
        """Save the present step while training waits, in place of a save that failed."""
        self._telemetry.say(f"cannot save {failed.name}: {first}; retrying synchronously")
        went_on, self._behind = self._behind, False
        self._forget_copy()
        final = self._run_dir.checkpoint(training.step)
        try:
            self._begin(training, final, waits=True)
        except SaveError as second:
            self._behind = went_on
            what = "tried twice" if str(second) == str(first) else f"and again: {second}"
            words = f"cannot save {failed.name}: {first} ({what})"
            self._fail(words, last=last, full=second.full)
        else:
            self._telemetry.warn(
                f"could not save {failed.name} at first: {first}; saved {final.name} synchronously"
            )

    def _agreed(self, act: Callable[[], _T]) -> _T:
        """Run `act` on all ranks; return this rank's result once all are done (`together`)."""
        own: list[_T] = []
        together(lambda: own.append(act()), self._world, self._group)
        return own[0]

    def _write(self, contents: Contents, final: Path) -> tuple[int, float]:
        written = write(contents, final, self._world, self._group)
        # Training may be sampling, and asks for the outcome minutes later.
        complete = time.monotonic()
        if self._world.main:
            with suppress(OSError):  # of this one rank, and the checkpoint is complete
                self._forget_old()
        return written, complete

    def _forget_old(self) -> None:
        """Delete what the limit leaves over, but for the best ones (one rank).

        The newest one counts for none of these: its own loss may be measured only now. What was
        measured is read from the events, which have that of earlier attempts too, and of steps
        that were trained again only the last.
        """
        complete, best = self._run_dir.complete_checkpoints(), int(self._spec.checkpoints_keep_best)
        kept: set[int] = set()
        if best and self._spec.checkpoints_total_limit is not None:
            if not os.access(self._run_dir.events, os.R_OK):
                return  # which ones are the best cannot be known
            measured = self._events.read_all().measured(self._spec.checkpoints_best_by)
            kept = {at.step for at in judge((step for step, _ in complete[:-1]), measured)[:best]}
        keep_newest(complete, self._spec.checkpoints_total_limit, kept)

    def _watch(self, pending: _Pending) -> None:
        """Wait for a save, and say how far it is."""
        aside, seen = aside_of(pending.path), 0
        with self._telemetry.phase("save", _mebibytes(pending.total)) as progress:
            while True:
                try:
                    pending.outcome.exception(timeout=_LOOK_EVERY)
                except NotYet:
                    written = _bytes_in(aside)
                    if written != seen:  # else nothing has moved on, and the job may stand still
                        seen = written
                        progress(_mebibytes(min(pending.total, written)))
                else:
                    return

    def _say(self, pending: _Pending) -> None:
        written, complete = pending.outcome.result()
        seconds = complete - pending.begun
        self._telemetry.emit(
            Checkpoint(pending.step, str(pending.path), written, round(seconds, 3))
        )
        self._telemetry.say(f"saved {pending.path.name} ({size(written)}, {seconds:.1f} s)")

    def _fail(self, what: str, *, last: bool, full: bool) -> None:
        newest = self._run_dir.latest_checkpoint()
        rest = f"{newest[1].name} is intact" if newest else "there is no other checkpoint"
        if last or self._spec.on_save_failure == "stop":
            kind = DiskFullError if full else UserError
            raise kind(f"{what}; {rest}", None if last else _HINT)
        self._telemetry.warn(f"{what}; {rest}; training continues")

    # -- room ------------------------------------------------------------------------------

    def _look_at_disk(self, total: int) -> tuple[int, str | None]:
        """Return the bytes of a checkpoint, and why they do not fit; rank 0 checks for all."""
        answer: tuple[int, str | None] = (0, None)
        if self._world.main:
            answer = (total, self._lack(total))
        return self._world.from_main(answer, self._group)

    def _lack(self, total: int) -> str | None:
        where = self._run_dir.checkpoints
        if not where.exists():
            where = self._run_dir.root
        try:
            free = shutil.disk_usage(where).free
        except OSError:  # the save itself will say what is wrong
            return None
        if total + _SPARE_DISK <= free:
            return None
        return f"it takes {size(total)}, and {size(free)} are free on the disk of {where}"

    def _goes_on(self, contents: Contents) -> bool:
        """Whether training continues while this is written; decided at the first save."""
        if self._behind is None:
            setting = self._spec.checkpointing_async
            able = contents.layout == "sharded" and contents.can_be_copied
            fits = self._agreed(
                lambda: able and (bool(setting) or _fits_in_memory(contents.own_bytes))
            )
            # One rank without room is enough, so all decide alike.
            self._behind = setting is not False and not self._world.any([not fits])[0]
            how = "while training continues" if self._behind else "while training waits"
            self._telemetry.say(f"checkpoints are written {how}")
        return self._behind

    def _copied(self, contents: Contents) -> Contents:
        """Return the contents in host memory; the previous copy is overwritten."""
        if self._stager is None:
            on_gpu = self._world.device.type == "cuda"
            self._stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=on_gpu,
                    use_shared_memory=False,
                    use_async_staging=False,
                    use_non_blocking_copy=on_gpu,
                )
            )
        with self._telemetry.phase("copy"):
            staged: Any = self._stager.stage(contents.tensors)
        return replace(contents, tensors=staged)

    def _forget_copy(self) -> None:
        """Free the copy's memory, and what else a save that failed may have left."""
        stager, self._stager = self._stager, None
        with suppress(Exception):  # it may be what failed
            if stager is not None:
                stager.close()
            give_back(self._world.device)


def _fits_in_memory(part: int) -> bool:
    """Whether all ranks of this machine can hold a copy of their parts."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return part * ranks <= _SPARE_MEMORY * available_memory()


def _bytes_in(directory: Path) -> int:
    try:
        return sum(path.stat().st_size for path in directory.iterdir())
    except OSError:  # renamed or removed meanwhile
        return 0


def _mebibytes(number: int) -> int:
    return -(-number // 2**20)
