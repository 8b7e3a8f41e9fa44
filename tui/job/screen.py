"""The screen of one job: a line of tabs, and their contents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from textual import on
from textual.containers import Container
from textual.content import Content
from textual.message import Message
from textual.widgets import Static
from textual.worker import get_current_worker

from jobs.queue.states import State
from tui.job.panes.logs import LogsPane
from tui.job.panes.ranks import RanksPane
from tui.job.tabs import NAMES, TABS, TabLine, build_pane
from tui.keys.key_table import Key, bindings_of, line_of, width_of
from tui.look.job_look import Look, Looker
from tui.widgets.bars import Links, reveal, show
from tui.widgets.job_actions import JobActions
from tui.widgets.job_rows import GLYPHS
from tui.widgets.pane import Pane
from tui.widgets.size_classes import set_size_classes

if TYPE_CHECKING:
    from collections.abc import Callable

    from textual.app import ComposeResult

    from jobs.queue.store import Job, Store

_COLOURS = {
    "good": "$success",
    "warn": "$warning",
    "bad": "$error",
    "accent": "$accent",
    "dim": "$foreground 60%",
}


class JobScreen(JobActions[None]):
    """Refreshes a job once a second, in a thread; the open tab shows the result."""

    CSS_PATH: ClassVar = ["job.tcss", "checkpoints.tcss"]
    VERTICAL_BREAKPOINTS = [(0, "-short"), (30, "-tall")]  # noqa: RUF012
    AUTO_FOCUS = ""
    KEYS: ClassVar = (
        *(
            Key(f"show_tab('{tab.name}')", str(number), str(number), tab.title, tab.help, False)
            for number, tab in enumerate(TABS, 1)
        ),
        Key("turn(1)", "tab,right_square_bracket", "tab", "next", "Next tab"),
        Key(
            "turn(-1)",
            "shift+tab,left_square_bracket",
            "⇧tab",
            "before",
            "Previous tab",
            line=False,
        ),
        Key("switch_theme", "t", "t", "theme", "Switch between dark and light theme", line=False),
        Key("show_help", "question_mark,f1", "?", "help", "Keys of this screen"),
        Key("dismiss", "escape,q,i", "esc", "close", "Back to the dashboard"),
    )
    BINDINGS: ClassVar = bindings_of("job", KEYS)

    @dataclass
    class Looked(Message):
        """The thread refreshed the job; only the newest message counts."""

        look: Look

        def can_replace(self, message: Message) -> bool:
            return isinstance(message, JobScreen.Looked)

    def __init__(self, store: Store, job: Job, tab: str = NAMES[0]) -> None:
        super().__init__()
        self.store = store
        self.job = job
        self.tab = ""
        self.panes: dict[str, Pane] = {}
        self.look: Look | None = None
        self.looker = Looker(store, job)
        self.tabs = TabLine()
        self.key_line = Links("", id="job-keys")
        self._first_tab = tab if tab in NAMES else NAMES[0]

    def compose(self) -> ComposeResult:
        set_size_classes(self)
        yield Static("", id="job-title")
        yield self.tabs
        yield Static("", id="job-problem", markup=False)
        yield Container(id="job-panes")
        yield self.key_line

    async def on_mount(self) -> None:
        self._show_title(self.job)
        await self.action_show_tab(self._first_tab)
        self.run_worker(self._run, group="look", exit_on_error=False, thread=True)

    def on_unmount(self) -> None:
        self.looker.close()

    def on_screen_resume(self) -> None:
        self.looker.wake()  # the data may date from before the screen was covered

    def on_resize(self) -> None:
        self._show_keys()

    # -- looking ---------------------------------------------------------------------------

    def _run(self) -> None:
        """Refresh in a thread until the screen closes."""

        def publish(look: Look) -> None:
            self.post_message(self.Looked(look))

        # Cancelled when the app ends, even if the screen was not removed.
        worker = get_current_worker()
        self.looker.run(publish, lambda: not self.is_current, lambda: worker.is_cancelled)

    def on_job_screen_looked(self, message: Looked) -> None:
        self.look, self.job = message.look, message.look.job
        self._show_title(self.job)
        problem = message.look.problem
        reveal(self.query_one("#job-problem", Static), f"! {problem}" if problem else "")
        self._update_pane()

    def _update_pane(self) -> None:
        pane = self.panes.get(self.tab)
        if pane is not None and pane.is_mounted and self.look is not None:
            pane.update_from(self.look)
        self._show_keys()

    def _show_title(self, job: Job) -> None:
        glyph, role = GLYPHS[job.state]
        title = Content.from_markup(
            f"[$foreground 60%]job[/] [b $primary]$id[/] [b]$name[/]  [{_COLOURS[role]}]$state[/]"
            "  [$foreground 60%]$reason[/]",
            id=str(job.id),
            name=job.name,
            state=f"{glyph} {job.state}",
            reason="" if job.state is State.RUNNING else " ".join(job.reason.split()),
        )
        show(
            self.query_one("#job-title", Static),
            title.truncate(max(20, self.size.width - 2), ellipsis=True),
        )

    @on(Pane.KeysChanged)
    def _show_keys(self) -> None:
        pane = self.panes.get(self.tab)
        keys = pane.keys if pane is not None else ()
        taken = {letter for key in keys for letter in key.keys.split(",")}
        acting = [key for key in self.job_keys(self.job) if taken.isdisjoint(key.keys.split(","))]
        own = [*acting, *(key for key in self.KEYS if key.line)]
        width = self.size.width - 2
        # The screen's keys are always shown, the pane's come before them; if not all fit, the least
        # used are dropped.
        if width_of([*keys, *own]) > width:
            own = [key for key in own if key.action != "resume_with"]
        reserved = width_of(own)
        line = line_of(keys, width - reserved)
        rest = line_of(own, width)
        show(self.key_line, Content.assemble(line, "  " if line.plain else "", rest))

    # -- tabs ------------------------------------------------------------------------------

    async def action_show_tab(self, name: str) -> None:
        if name == self.tab:
            return
        self.tab = name
        self.app.dashboard.job_tab = name
        self.tabs.show(name)
        pane = self.panes.get(name)
        if pane is None:
            pane = self.panes[name] = build_pane(name, self.store, self.job)
            await self.query_one("#job-panes").mount(pane)
        for other in self.panes.values():
            other.display = other is self.panes[self.tab]
        if pane is self.panes[self.tab]:
            self.set_focus(pane.target)
            self.call_after_refresh(self._update_pane)

    async def action_turn(self, by: int) -> None:
        await self.action_show_tab(NAMES[(NAMES.index(self.tab) + by) % len(NAMES)])

    async def action_show_log(self, index: int) -> None:
        """Show one of the logs; clicks on the log's title run this."""
        await self.action_show_tab("logs")
        if isinstance(pane := self.panes["logs"], LogsPane):
            pane.show_log(index)

    @on(RanksPane.LogWanted)
    async def _show_log_of_rank(self, message: RanksPane.LogWanted) -> None:
        await self.action_show_log(message.rank)

    def action_press(self, key: str) -> None:
        """Press the key of a clicked entry in the key line."""
        self.app.simulate_key(key)

    # -- acting ----------------------------------------------------------------------------

    @property
    def job_acted_on(self) -> Job:
        return self.job

    def act(self, act: Callable[[int], str]) -> None:
        super().act(act)
        self.looker.wake()

    def action_stop_job(self) -> None:
        super().action_stop_job()
        self.looker.wake()

    def action_show_help(self) -> None:
        from tui.widgets.help import HelpScreen

        self.app.push_screen(HelpScreen(self))
