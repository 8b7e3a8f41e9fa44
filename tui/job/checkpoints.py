"""The checkpoints tab: resume from one, verify, export, delete."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final

from textual import on
from textual.message import Message
from textual.widgets import Static
from textual.worker import get_current_worker

from jobs import service
from jobs.errors import NotFoundError, UserError
from jobs.machine.engine_tools import Cancelled
from jobs.run.checkpoint_files import free_bytes, list_all, verify
from jobs.run.eventlog import ReportLog
from jobs.service.plan import plan_resume
from tui.keys.key_table import Key, bindings_of, moving
from tui.text.checkpoint_text import (
    EMPTY,
    NEXT,
    about,
    age,
    judged_column,
    marks,
    number,
    totals,
    yes_no,
)
from tui.text.format import BEST, MISSING, Row, Span, bar, cut, left, right, size
from tui.text.format import number as format_loss
from tui.widgets.bars import show
from tui.widgets.lines import Lines, PickList
from tui.widgets.pane import Pane
from tui.widgets.questions import ConfirmScreen

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from textual.app import ComposeResult
    from textual.widget import Widget

    from jobs.queue.store import Job, Store
    from jobs.run.checkpoint_files import Listed
    from jobs.service.plan import Plan
    from tui.look.job_look import Look


# -- rows -----------------------------------------------------------------------------------
# The rows of the checkpoints screen. Pure.


# Columns between size and health: heading, columns, text. The rightmost are dropped first if
# they do not fit.
_MORE: Final[tuple[tuple[str, int, Callable[[Listed], str]], ...]] = (
    ("layout", 7, lambda checkpoint: checkpoint.layout or MISSING),
    ("ranks", 5, lambda checkpoint: number(checkpoint.world_size)),
    ("EMA", 3, lambda checkpoint: yes_no(checkpoint.ema)),
    ("val", 8, lambda checkpoint: format_loss(checkpoint.value)),
    (
        "written",
        16,
        lambda checkpoint: time.strftime("%Y-%m-%d %H:%M", time.localtime(checkpoint.time)),
    ),
)
_AGE: Final = 7
_SIZE: Final = 8
_GAP: Final = "  "
_LEAST_HEALTH: Final = 20
_MOST_HEALTH: Final = 36  # the rest is shown below for the highlighted checkpoint


def checkpoint_rows(listed: Sequence[Listed], width: int, now: float) -> list[Row]:
    """Return a heading, and a row for each checkpoint.

    Args:
        listed: In the order of the rows.
        width: Columns.
        now: Unix seconds.
    """
    names = max(10, *(len(checkpoint.name) for checkpoint in listed))
    judged = judged_column(listed)
    signs = len(NEXT) + len(BEST) * bool(judged) + 1
    room = width - signs - names - _AGE - _SIZE - 3 * len(_GAP)
    longest = max(len(checkpoint.health) for checkpoint in listed)
    needed = min(_MOST_HEALTH, max(_LEAST_HEALTH, longest))
    more = [column for column in _MORE if column[0] != "val" or judged]
    while more and room - sum(columns + len(_GAP) for _, columns, _ in more) < needed:
        more.pop()
    room -= sum(columns + len(_GAP) for _, columns, _ in more)
    heading = [left("checkpoint", names), right("age", _AGE), right("size", _SIZE)]
    heading += [left(judged[0] if name == "val" else name, columns) for name, columns, _ in more]
    rows: list[Row] = [(Span(" " * signs + _GAP.join([*heading, "health"]), "dim"),)]
    for checkpoint in listed:
        facts = [right(age(now - checkpoint.time), _AGE), right(size(checkpoint.bytes), _SIZE)]
        facts += [left(text(checkpoint), columns) for _, columns, text in more]
        role = "dim" if checkpoint.set_aside else ""
        rows.append(
            (
                Span(left(marks(checkpoint), signs), "good"),
                Span(left(checkpoint.name, names), role or "strong"),
                Span(_GAP + _GAP.join(facts) + _GAP, role),
                Span(cut(checkpoint.health, max(1, room)), _role(checkpoint)),
            )
        )
    return rows


def _role(checkpoint: Listed) -> str:
    if checkpoint.damage and checkpoint.set_aside != "damaged":
        return "bad"
    if checkpoint.verified:
        return "good"
    return "dim" if checkpoint.set_aside else ""


def progress_row(words: str, done: int, total: int, count: str, width: int) -> Row:
    """Show progress, such as `reading step-20 ━━━╸┄┄┄ 1.2 GiB of 4.0 GiB`."""
    if not total:
        return (Span(f"{words} …", "accent"),)
    room = width - len(words) - len(count) - 2
    return (
        Span(words + " ", "accent"),
        *bar(done / total, max(0, min(60, room))),
        Span(" " + count, "strong"),
    )


# -- panel ----------------------------------------------------------------------------------
# The list of the checkpoints screen.


class CheckpointsPanel(PickList):
    """The checkpoints, the newest first, one of them highlighted."""

    def __init__(self) -> None:
        super().__init__(id="checkpoints")
        self.listed: list[Listed] = []

    @property
    def count(self) -> int:
        return len(self.listed)

    @property
    def highlighted(self) -> Listed | None:
        return self.listed[self.index] if self.listed else None

    def update_from(self, listed: Sequence[Listed]) -> None:
        """Show checkpoints, given the oldest first; the highlight stays on its checkpoint."""
        before = self.highlighted
        self.listed = list(reversed(listed))
        names = [checkpoint.name for checkpoint in self.listed]
        if before is not None and before.name in names:
            self.index = names.index(before.name)
        elif before is not None:  # highlight what took its place
            self.index = max(0, min(self.index, len(names) - 1))
        else:  # the one that a resume uses
            self.index = next((n for n, checkpoint in enumerate(self.listed) if checkpoint.next), 0)
        self.fill()
        if self.highlighted != before:
            self.post_message(self.Highlighted())

    def table(self, width: int) -> Sequence[Row]:
        return checkpoint_rows(self.listed, width, time.time())


# -- pane -----------------------------------------------------------------------------------
# The checkpoints tab: resume from one, verify, export, delete.


_BUSY: Final = {"verify": "cancel verify", "export": "cancel export"}
_EVERY: Final = 1.0  # seconds between refreshes


class CheckpointsPane(Pane, can_focus=True):
    """Refreshes regularly, since a running job writes new checkpoints."""

    KEYS: ClassVar = (
        *moving("checkpoint"),
        Key("resume", "s,enter", "s", "start here", "Resume training from this checkpoint"),
        Key("verify", "v", "v", "verify", "Read and check every byte; again: cancel"),
        Key("export", "e", "e", "export", "Export for other tools; again: cancel"),
        Key("delete", "r,delete", "r", "delete", "Delete the checkpoint (asks first)"),
        Key("copy_path", "y", "y", "path", "Copy the checkpoint's path"),
    )
    BINDINGS: ClassVar = bindings_of("checkpoints", KEYS)

    @dataclass
    class Looked(Message):
        """The current checkpoints."""

        job: Job
        listed: list[Listed]
        free: int | None

        def can_replace(self, message: Message) -> bool:
            return isinstance(message, CheckpointsPane.Looked)

    @dataclass
    class Failed(Message):
        """The checkpoints cannot be read."""

        problem: str

    @dataclass
    class Read(Message):
        """Progress of verifying a checkpoint."""

        name: str
        done: int
        total: int

        def can_replace(self, message: Message) -> bool:
            return isinstance(message, CheckpointsPane.Read)

    @dataclass
    class Verified(Message):
        """Verification has ended; None if it was cancelled."""

        checkpoint: Listed | None

    @dataclass
    class Planned(Message):
        """The job can resume from a checkpoint, with this plan."""

        plan: Plan

    def __init__(self, store: Store, job: Job) -> None:
        super().__init__(id="checkpoint-list")
        self.store = store
        self.job = job
        self.panel = CheckpointsPanel()
        self.status = Lines(id="ckpt-status")
        self._verified: dict[tuple[str, float], str | None] = {}  # (name, time) → damage
        self._reading: CheckpointsPane.Read | None = None
        self._busy = (False, False)  # verifying, exporting
        self._looking = False
        self._log = ReportLog.begin(job.run_dir)

    def compose(self) -> ComposeResult:
        yield Static("", id="ckpt-totals", markup=False)
        yield Static("", id="ckpt-problem", markup=False)
        yield self.panel
        yield Static("", id="ckpt-about", markup=False)
        yield self.status

    def on_mount(self) -> None:
        self.look()
        self.set_interval(_EVERY, self.look)

    @property
    def target(self) -> Widget:
        return self if self.has_class("-nothing") else self.panel

    def update_from(self, look: Look) -> None:
        self.job = look.job

    @property
    def keys(self) -> Sequence[Key]:
        """Return the keys; the key that started a verification or export also stops it."""
        exports = self.app.dashboard.exports.running
        busy = {"verify": self._reading is not None, "export": self.job.id in exports}
        return [
            replace(key, label=_BUSY[key.action]) if busy.get(key.action) else key
            for key in self.KEYS
        ]

    # -- looking ---------------------------------------------------------------------------

    def look(self) -> None:
        """Refresh, unless a refresh is running or nobody can see the tab."""
        if not self.display or self.app.screen is not self.screen:
            return
        self._show_work()
        if not self._looking:
            self._looking = True
            self.run_worker(self._look, group="list", exit_on_error=False, thread=True)

    def _look(self) -> None:
        try:
            job = self.store.get(self.job.id)
            if not job.run_dir.root.is_dir():
                raise NotFoundError(f"the run directory of the job is gone: {job.run_dir.root}")
            measured = self._log.read_all().measured()
            listed, free = list_all(job.run_dir, measured), free_bytes(job.run_dir)
            self.post_message(self.Looked(job, listed, free))
        except UserError as error:
            self.post_message(self.Failed(str(error)))
        except Exception as error:  # top level: report any failure instead of waiting forever
            self.post_message(self.Failed(f"{type(error).__name__}: {error}"))

    def on_checkpoints_pane_looked(self, message: Looked) -> None:
        self._looking = False
        self.job = message.job
        listed = [self._with_verification(checkpoint) for checkpoint in message.listed]
        self._complain("" if listed else EMPTY, harmless=True)
        show(self.query_one("#ckpt-totals", Static), totals(listed, message.free))
        self.panel.update_from(listed)

    def _with_verification(self, checkpoint: Listed) -> Listed:
        """Add the result of a verification if the checkpoint has not changed since."""
        key = (checkpoint.name, checkpoint.time)
        if key not in self._verified:
            return checkpoint
        return replace(checkpoint, damage=checkpoint.damage or self._verified[key], verified=True)

    def on_checkpoints_pane_failed(self, message: Failed) -> None:
        self._looking = False
        self.panel.update_from([])
        self._complain(f"! {message.problem}")

    def _complain(self, text: str, *, harmless: bool = False) -> None:
        show(self.query_one("#ckpt-problem", Static), text)
        self.query_one("#ckpt-problem").set_class(harmless, "-harmless")
        self.set_class(bool(text), "-nothing")
        # A hidden list would keep the keyboard focus. Ask the screen, at once: by the time that
        # `focus` and `has_focus` have passed through the queue, another tab may be open.
        focused = self.screen.focused
        if focused is not None and self in focused.ancestors_with_self:
            self.screen.set_focus(self if text else self.panel)

    @on(CheckpointsPanel.Highlighted)
    def _show_about(self) -> None:
        checkpoint = self.panel.highlighted
        show(
            self.query_one("#ckpt-about", Static),
            about(checkpoint, self.panel.listed) if checkpoint is not None else "",
        )

    def _show_work(self) -> None:
        """Show the work in progress."""
        width = self.status.content_size.width
        export = self.app.dashboard.exports.running.get(self.job.id)
        rows = []
        if (reading := self._reading) is not None:
            count = f"{size(reading.done)} of {size(reading.total)}"
            rows.append(
                progress_row(f"reading {reading.name}", reading.done, reading.total, count, width)
            )
        if export is not None:
            share = f"{export.done / export.total:.0%}" if export.total else ""
            words = f"exporting step-{export.step}"
            rows.append(progress_row(words, export.done, export.total, share, width))
        self.status.show(rows)
        if (busy := (self._reading is not None, export is not None)) != self._busy:
            self._busy = busy
            self.post_message(self.KeysChanged())

    # -- moving ----------------------------------------------------------------------------

    def action_go(self, by: int) -> None:
        self.panel.go(by)

    # -- resuming --------------------------------------------------------------------------

    def action_resume(self) -> None:
        checkpoint = self.panel.highlighted
        if checkpoint is None:
            return
        if not self.job.state.ended:
            self.app.say(f"job {self.job.id} is {self.job.state}; stop it first", "warning")
        elif checkpoint.set_aside:
            self.app.say(
                f"{checkpoint.name} is set aside; rename it to step-{checkpoint.step}, or start a "
                f"new job with resume_from_checkpoint: {checkpoint.path}",
                "warning",
            )
        else:
            self._act(partial(self._plan, checkpoint.step))

    def _plan(self, step: int) -> str:
        plan = plan_resume(self.store, self.job.id, back_to=step)
        self.post_message(self.Planned(plan))
        return ""

    def on_checkpoints_pane_planned(self, message: Planned) -> None:
        if self.app.screen is self.screen:  # do not ask twice, nor after the screen was left
            self.app.dashboard.ask_to_resume(message.plan, then=self._leave)

    def _leave(self) -> None:
        self.screen.dismiss()

    def action_copy_path(self) -> None:
        if (checkpoint := self.panel.highlighted) is not None:
            self.copy(str(checkpoint.path))

    # -- verifying -------------------------------------------------------------------------

    def action_verify(self) -> None:
        """Verify the highlighted checkpoint, or stop verifying."""
        if self._reading is not None:
            self.workers.cancel_group(self, "verify")
            return
        if (checkpoint := self.panel.highlighted) is not None:
            self._reading = self.Read(checkpoint.name, 0, checkpoint.bytes)
            self._show_work()
            work = partial(self._verify, checkpoint)
            self.run_worker(work, group="verify", exit_on_error=False, thread=True)

    def _verify(self, checkpoint: Listed) -> None:
        worker, done = get_current_worker(), 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            if worker.is_cancelled:
                raise Cancelled
            self.post_message(self.Read(checkpoint.name, done, checkpoint.bytes))

        try:
            self.post_message(self.Verified(verify(checkpoint, advance)))
        except Cancelled:
            self.post_message(self.Verified(None))
        except NotFoundError as error:
            self.app.post_message(self.app.Said(str(error)))
            self.post_message(self.Verified(None))
        except Exception as error:  # top level: report every failure to the user
            self.app.post_message(
                self.app.Said(
                    f"cannot read {checkpoint.name}: {type(error).__name__}: {error}", "error"
                )
            )
            self.post_message(self.Verified(None))

    def on_checkpoints_pane_read(self, message: Read) -> None:
        if self._reading is not None:
            self._reading = message

    def on_checkpoints_pane_verified(self, message: Verified) -> None:
        self._reading = None
        if (checkpoint := message.checkpoint) is not None:
            self._verified[checkpoint.name, checkpoint.time] = checkpoint.damage
            health = f"damaged: {checkpoint.damage}" if checkpoint.damage else "verified"
            self.app.say(
                f"{checkpoint.name}: {health}", "error" if checkpoint.damage else "information"
            )
        self.look()

    # -- exporting, deleting ---------------------------------------------------------------

    def action_export(self) -> None:
        """Export the highlighted checkpoint, or stop exporting."""
        exports, checkpoint = self.app.dashboard.exports, self.panel.highlighted
        if self.job.id in exports.running:
            exports.cancel(self.job.id)
        elif checkpoint is not None and checkpoint.set_aside:
            self.app.say(
                f"{checkpoint.name} is set aside; rename it to step-{checkpoint.step} first",
                "warning",
            )
        elif checkpoint is not None:
            exports.start(self.job, checkpoint.step)
            self._show_work()

    def action_delete(self) -> None:
        checkpoint = self.panel.highlighted
        if checkpoint is None:
            return

        def answered(yes: bool | None) -> None:
            if yes:
                self._act(partial(self._delete, checkpoint))

        detail = f"{size(checkpoint.bytes)} will be deleted permanently:\n{checkpoint.path}"
        if checkpoint.next:
            detail += "\n\nA resume would start from this checkpoint."
        self.app.push_screen(
            ConfirmScreen(f"Delete {checkpoint.name}?", detail, "delete"), answered
        )

    def _delete(self, checkpoint: Listed) -> str:
        service.delete_checkpoints(self.store, self.job.id, [checkpoint.name])
        return f"{checkpoint.name} deleted"

    def _act(self, act: Callable[[], str]) -> None:
        self.app.act(act)
