"""Everything that is recorded about one job."""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.screen import ModalScreen
from textual.widgets import Static, TabbedContent, TabPane

from jobs.checkpoint_list import list_all
from jobs.errors import UserError
from jobs.report import RunReport, read_report
from jobs.rundir import read_json
from tui.checkpoints.words import NEXT
from tui.dashboard.job_rows import GLYPHS
from tui.format import size
from tui.tables import memory_table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from textual.app import ComposeResult

    from jobs.store import Change, Job, Store

_ROLE_COLOURS = {
    "good": "$success", "warn": "$warning", "bad": "$error", "accent": "$accent",
    "dim": "$foreground 60%",
}  # fmt: skip


@dataclass(frozen=True)
class Facts:
    """What the tabs show; gathered in a thread."""

    overview: Content
    job_file: str
    launch: str


class DetailsScreen(ModalScreen[None]):
    """Tabs: overview with history and files, the job file, the launch command."""

    CSS_PATH = "modals.tcss"
    BINDINGS: ClassVar = [
        Binding("escape,q,i", "dismiss", "close"),
        Binding("right_square_bracket", "turn(1)", "next tab"),
        Binding("left_square_bracket", "turn(-1)", "previous tab"),
    ]

    @dataclass
    class Gathered(Message):
        """The facts are here."""

        facts: Facts

    def __init__(self, store: Store, job_id: int) -> None:
        super().__init__()
        self.store = store
        self.job_id = job_id

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog", id="job-details") as dialog:
            dialog.border_title = f"job {self.job_id}"
            dialog.border_subtitle = "[ ] turn the tabs · esc closes".replace("[", "\\[")
            with TabbedContent():
                for name, title in (
                    ("overview", "overview"), ("yaml", "job.yaml"), ("launch", "launch"),
                ):  # fmt: skip
                    with TabPane(title, id=f"tab-{name}"), VerticalScroll():
                        yield Static("", id=name, markup=False)

    def on_mount(self) -> None:
        self.run_worker(
            self._gather, group="details", exclusive=True, exit_on_error=False, thread=True
        )

    def on_details_screen_gathered(self, message: Gathered) -> None:
        facts = message.facts
        self.query_one("#overview", Static).update(facts.overview)
        self.query_one("#yaml", Static).update(Content(facts.job_file))
        self.query_one("#launch", Static).update(Content(facts.launch))

    def action_turn(self, by: int) -> None:
        tabs = self.query_one(TabbedContent)
        names = [pane.id or "" for pane in tabs.query(TabPane)]
        tabs.active = names[(names.index(tabs.active) + by) % len(names)]

    def _gather(self) -> None:
        try:
            job = self.store.get(self.job_id)
            facts = gather(job, self.store.history(self.job_id))
        except UserError as error:
            facts = Facts(Content(str(error)), "", "")
        self.post_message(self.Gathered(facts))


def gather(job: Job, history: list[Change]) -> Facts:
    """Read what the run directory and the database say of a job."""
    try:
        job_file = job.run_dir.job_file.read_text(encoding="utf-8")
    except OSError as error:
        job_file = f"cannot be read: {error}"
    return Facts(overview(job, history), job_file, launch_text(read_json(job.run_dir.launch_file)))


def overview(job: Job, history: list[Change]) -> Content:
    """State, times, history, checkpoints and exports."""
    heading = partial(Content.from_markup, "[b $primary]$title[/]")
    parts: list[Content] = [
        Content.assemble(Content.from_markup("[b]$name[/]  ", name=job.name), _state(job)),
        Content.from_markup("[$foreground 60%]$path[/]", path=str(job.run_dir.root)),
        Content(""),
        heading(title="history"),
    ]
    day = ""
    for change in history:
        moment = time.localtime(change.t)
        if (date := time.strftime("%Y-%m-%d", moment)) != day:
            day = date
            parts.append(Content.from_markup("[$foreground 60%]  $day[/]", day=day))
        glyph, role = GLYPHS[change.after]
        parts.append(
            Content.from_markup(
                f"  [$foreground 60%]$clock[/]  [{_ROLE_COLOURS[role]}]$state[/]  $reason",
                clock=time.strftime("%H:%M:%S", moment),
                state=f"{glyph} {change.after}".ljust(12),
                reason=change.reason,
            )
        )
    parts += _run_lines(read_report(job.run_dir), heading)
    parts += [Content(""), heading(title="checkpoints")]
    parts += [
        Content.from_markup(
            "  $mark $name [$foreground 60%]$written[/]  [$colour]$health[/]".replace(
                "$colour", "$error" if one.damage else "$foreground 60%"
            ),
            mark=NEXT if one.next else " ",
            name=one.name.ljust(16),
            written=time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.time)),
            health=one.health,
        )
        for one in list_all(job.run_dir)
    ] or [_none()]
    parts += [Content(""), heading(title="exports")]
    parts += [Content(f"  {line}") for line in _files(job.run_dir.export)] or [_none()]
    return Content("\n").join(parts)


def _run_lines(report: RunReport, heading: Callable[..., Content]) -> list[Content]:
    """How the ranks share the work, what each phase took, and what was warned about."""
    if not report.strategy:
        return []
    texts = [f"{report.strategy}: {report.reason}"]
    if sharding := report.sharding:
        units = ", ".join(f"{count} {name}" for name, count in sharding["units"].items())
        texts.append(f"{size(sharding['local_bytes'])} of weights on each rank, units: {units}")
    lines = [Content(text) for text in texts]
    lines += [Content.from_markup("[$warning]$text[/]", text=text) for text in report.warnings]
    parts = [Content(""), heading(title="run"), *lines]
    if report.peaks:
        title = "most memory by phase and rank"
        if report.measure == "rss":
            title += ", with everything that the process holds"
        parts += [Content(""), heading(title=title)]
        parts += [Content(line) for line in memory_table(report.peaks).splitlines()]
    return parts


def launch_text(record: dict[str, object] | None) -> str:
    """The launch as it could be typed into a shell, and the versions it ran with."""
    if record is None:
        return "not launched yet"
    environment, command = record.get("environment"), record.get("command")
    lines: list[str] = []
    if isinstance(environment, dict):
        lines += [f"{key}={shlex.quote(str(value))} \\" for key, value in environment.items()]
    if isinstance(command, list):
        words = [shlex.quote(str(word)) for word in command]
        lines.append(" \\\n  ".join([" ".join(words[:2]), *words[2:]]))
    versions = record.get("versions")
    if isinstance(versions, dict):
        lines += ["", *(f"{name} {number}" for name, number in versions.items())]
    return "\n".join(lines)


def _state(job: Job) -> Content:
    glyph, role = GLYPHS[job.state]
    return Content.from_markup(f"[{_ROLE_COLOURS[role]}]$state[/]", state=f"{glyph} {job.state}")


def _none() -> Content:
    return Content.from_markup("[$foreground 60%]  none yet[/]")


def _files(root: Path) -> list[str]:
    found = sorted(path for path in root.rglob("*") if path.is_file())
    return [f"{path.relative_to(root)}  {size(path.stat().st_size)}" for path in found]
