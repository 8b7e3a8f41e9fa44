"""The config tab: a job's settings, its launch, and its differences from another job."""

from __future__ import annotations

import asyncio
import re
import textwrap
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from textual.containers import Vertical
from textual.message import Message
from textual.screen import ModalScreen
from textual.widgets import Static

from jobs.errors import UserError
from jobs.service.replay import replay
from jobs.spec.file.diff import differences
from jobs.spec.file.load import dump_spec, load_spec
from tui.job.panes.text_pane import TextPane
from tui.keys.key_table import Key, bindings_of, moving, scrolling
from tui.text.format import Span, cut, in_words, left, right
from tui.widgets.job_rows import GLYPHS
from tui.widgets.lines import PickList

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.app import ComposeResult

    from jobs.queue.store import Job, Store
    from jobs.spec.file.diff import Difference
    from tui.look.job_look import Look
    from tui.text.format import Row


# -- config rows ----------------------------------------------------------------------------
# The rows of the config tab: job file, launch command, differences from another job. Pure.


_KEY: Final = re.compile(r"([A-Za-z_][\w.-]*):(?= |$)(.*)")
_SIGNS: Final = {"added": ("+", "good"), "removed": ("−", "bad"), "changed": ("~", "accent")}
_WIDEST_KEY: Final = 34


def yaml_rows(text: str) -> list[Row]:
    """Color the keys of a YAML text."""
    rows: list[Row] = []
    for line in text.splitlines():
        if match := _KEY.fullmatch(line):
            rows.append((Span(match[1] + ":", "accent"), Span(match[2])))
        else:
            rows.append((Span(line, "dim" if line.startswith("#") else ""),))
    return rows


def command_rows(text: str, width: int) -> list[Row]:
    """Show a shell script, with long lines wrapped."""
    rows: list[Row] = []
    for line in text.splitlines():
        role = "dim" if line.startswith("#") else ""
        first, *rest = textwrap.wrap(
            line, width - 2, break_on_hyphens=False, break_long_words=True, drop_whitespace=False
        ) or [""]
        rows.append((Span(first, role),))
        rows += [(Span("  ", "faint"), Span(part.lstrip(), role)) for part in rest]
    return rows


def diff_rows(changed: Sequence[Difference], ours: Job, theirs: Job, width: int) -> list[Row]:
    """List the keys that differ, with the values of both jobs side by side.

    Args:
        changed: The differences; `before` is our job's value, `after` the other's.
        ours: The job on the screen.
        theirs: The other job.
        width: Columns.
    """
    if not changed:
        return [(Span("both jobs have the same settings", "good"),)]
    keys = min(_WIDEST_KEY, max(len(difference.key) for difference in changed))
    room = max(8, (width - keys - 6) // 2)
    rows: list[Row] = [
        (
            Span(" " * (keys + 4)),
            Span(left(cut(f"#{ours.id} {ours.name}", room), room), "strong"),
            Span("  "),
            Span(cut(f"#{theirs.id} {theirs.name}", room), "strong"),
        )
    ]
    group = ""
    for difference in changed:
        if difference.group != group:
            group = difference.group
            rows += [(), (Span(group, "title"),)]
        sign, role = _SIGNS[difference.kind]
        mine, other = _wrapped(difference.before, room), _wrapped(difference.after, room)
        for n in range(max(len(mine), len(other))):
            rows.append(
                (
                    Span(f"{sign} " if n == 0 else "  ", role),
                    Span(left(difference.key if n == 0 else "", keys) + "  "),
                    Span(left(mine[n] if n < len(mine) else "", room), "dim"),
                    Span("  "),
                    Span(other[n] if n < len(other) else "", role),
                )
            )
    return rows


def _wrapped(value: Any, width: int) -> list[str]:
    return textwrap.wrap(in_words(value), width, break_on_hyphens=False) or [""]


# -- pick job -------------------------------------------------------------------------------
# Pick one of the jobs.


class JobList(PickList):
    """The jobs, the newest first; those that have not started yet come last."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        super().__init__(id="pick-list")
        self.jobs = sorted(jobs, key=lambda job: (job.started is None, -job.id))

    @property
    def count(self) -> int:
        return len(self.jobs)

    def nothing(self) -> Sequence[Row]:
        return [(Span("no other jobs", "dim"),)]

    def table(self, width: int) -> Sequence[Row]:
        ids = max(2, *(len(str(job.id)) for job in self.jobs))
        rows: list[Row] = [(Span(f"{right('id', ids)}  {left('state', 12)}  name", "dim"),)]
        for job in self.jobs:
            glyph, role = GLYPHS[job.state]
            rows.append(
                (
                    Span(right(str(job.id), ids) + "  ", "dim"),
                    Span(left(f"{glyph} {job.state}", 12) + "  ", role),
                    Span(cut(job.name, max(4, width - ids - 16)), "strong"),
                )
            )
        return rows


class PickJobScreen(ModalScreen["Job | None"]):
    """Returns the job, or None if the user cancels."""

    CSS_PATH = "../job.tcss"
    KEYS: ClassVar = (
        *moving("job"),
        Key("pick", "enter", "enter", "select", "Choose the selected job"),
        Key("dismiss", "escape,q", "esc", "cancel", "Cancel"),
    )
    BINDINGS: ClassVar = bindings_of("pick_job", KEYS)
    AUTO_FOCUS = "#pick-list"

    def __init__(self, jobs: Sequence[Job], question: str) -> None:
        super().__init__()
        self.list = JobList(jobs)
        self.question = question

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog", id="pick-job") as dialog:
            dialog.border_title = self.question
            dialog.border_subtitle = "enter select · esc cancel"
            yield self.list

    def action_go(self, by: int) -> None:
        self.list.go(by)

    def action_pick(self) -> None:
        self.dismiss(self.list.jobs[self.list.index] if self.list.jobs else None)


# -- config ---------------------------------------------------------------------------------


Shown = Literal["set", "all", "command", "diff"]

_TITLES: dict[Shown, str] = {
    "set": "job file: changes from the defaults · a: all keys",
    "all": "job file: all keys · a: changes from the defaults",
    "command": "the same job in a shell · y: copy",
}


@dataclass(frozen=True)
class Config:
    """What the tab shows. `problem`: why the job file is unusable; `whole` is then its text."""

    differing: str = ""
    whole: str = ""
    command: str = ""
    problem: str = ""


class ConfigPane(TextPane):
    """Shows one of four texts."""

    KEYS: ClassVar = (
        *scrolling(),
        Key("show_all", "a", "a", "all keys", "Show all keys, or only changes from the defaults"),
        Key("show_command", "l", "l", "launch", "Show the command that launches the job by hand"),
        Key("compare", "o", "o", "other job", "Compare with another job"),
        Key("copy_shown", "y", "y", "copy", "Copy the text shown"),
    )
    BINDINGS: ClassVar = bindings_of("config", KEYS)

    @dataclass
    class Read(Message):
        """The files have been read."""

        config: Config

    @dataclass
    class Compared(Message):
        """The jobs have been compared, or could not be."""

        other: Job
        changed: list[Difference]
        problem: str = ""

    def __init__(self, store: Store) -> None:
        super().__init__(id="config")
        self.store = store
        self.shown: Shown = "set"
        self.config: Config | None = None
        self.compared: ConfigPane.Compared | None = None
        self._read_of: tuple[object, ...] = ()
        self._title = ""

    def compose(self) -> ComposeResult:
        yield Static("", id="config-title", markup=False)
        yield from super().compose()

    # -- reading ---------------------------------------------------------------------------

    def update_from(self, look: Look) -> None:
        self.look = look
        key = (look.job.queued, look.job.attempt)  # a resume may have changed the file
        if key != self._read_of:
            self._read_of = key
            work = partial(self._read, look.job)
            self.run_worker(work, group="config", exclusive=True, exit_on_error=False, thread=True)

    def _read(self, job: Job) -> None:
        """Read in a thread: model and dataset paths may be on slow disks."""
        try:
            config = read_config(job)
        except Exception as error:  # top level: report the failure in place of an empty tab
            config = Config(problem=f"{type(error).__name__}: {error}")
        self.post_message(self.Read(config))

    def on_config_pane_read(self, message: Read) -> None:
        self.config = message.config
        self.fill()

    def rows_of(self, look: Look, width: int) -> Sequence[Row]:
        if self.shown == "diff" and (compared := self.compared) is not None:
            self._say(f"differences in job {compared.other.id} “{compared.other.name}” · a: back")
            if compared.problem:
                return [(Span(f"! {compared.problem}", "bad"),)]
            return diff_rows(compared.changed, look.job, compared.other, width)
        if self.config is None:
            return [(Span("reading the job file …", "dim"),)]
        self._say(_TITLES[self.shown])
        problem: list[Row] = []
        if self.config.problem:
            problem = [(Span(f"! {self.config.problem}", "bad"),), ()]
        if self.shown == "command":
            return [*problem, *command_rows(self.config.command, width)]
        text = self.config.whole if self.shown == "all" else self.config.differing
        return [*problem, *yaml_rows(text or self.config.whole)]

    def _say(self, title: str) -> None:
        if title != self._title:
            self._title = title
            self.query_one("#config-title", Static).update(title)

    # -- keys ------------------------------------------------------------------------------

    def action_show_all(self) -> None:
        self._show("all" if self.shown == "set" else "set")

    def action_show_command(self) -> None:
        self._show("set" if self.shown == "command" else "command")

    def action_compare(self) -> None:
        if self.look is not None:
            work = self._choose(self.look.job)
            self.run_worker(work, group="diff", exclusive=True, exit_on_error=False)

    async def _choose(self, job: Job) -> None:
        """Ask for the other job; jobs are read in a thread, since the database may be locked."""

        others = [other for other in await asyncio.to_thread(self.store.all) if other.id != job.id]
        screen = PickJobScreen(others, f"compare job {job.id} with")

        def compare(other: Job | None) -> None:
            if other is not None:
                work = partial(self._compare, job, other)
                self.run_worker(
                    work, group="diff", exclusive=True, exit_on_error=False, thread=True
                )

        # docs/upstream.md says why this does not use `push_screen_wait`.
        self.app.push_screen(screen, compare)

    def _compare(self, ours: Job, theirs: Job) -> None:
        """Compare in a thread."""
        try:
            changed = differences(
                load_spec(ours.run_dir.job_file), load_spec(theirs.run_dir.job_file)
            )
            self.post_message(self.Compared(theirs, changed))
        except UserError as error:
            self.post_message(self.Compared(theirs, [], str(error)))
        except Exception as error:  # top level: report every failure to the user
            self.post_message(self.Compared(theirs, [], f"{type(error).__name__}: {error}"))

    def on_config_pane_compared(self, message: Compared) -> None:
        self.compared = message
        self._show("diff")

    def _show(self, what: Shown) -> None:
        self.shown = what
        self.fill()
        self.lines.scroll_home(animate=False)

    def action_copy_shown(self) -> None:
        if self.shown == "command" and self.config is not None:
            self.copy(self.config.command)  # the original; the screen shows it wrapped
        else:
            self.copy(self.as_text())


def read_config(job: Job) -> Config:
    """Read the job file in its short and full form, and the command.

    An unusable file is shown unchanged.
    """
    try:
        text = job.run_dir.job_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        return Config(problem=f"the job file cannot be read: {error}")
    try:
        spec = load_spec(job.run_dir.job_file)
        return Config(dump_spec(spec, only_set=True), dump_spec(spec), replay(job, "accelerate"))
    except UserError as error:
        return Config(whole=text, problem=str(error))
