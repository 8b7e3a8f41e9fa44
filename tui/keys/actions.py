"""Every action of the dashboard, once. Keys, footer, palette and help are made from this table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

from textual.binding import Binding
from textual.keys import format_key

from jobs.queue.states import State

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from textual.binding import BindingType

    from jobs.queue.store import Job

FOOTER_GAP: Final = 2  # columns between two

Group = Literal["jobs", "queue", "log", "app", "list"]
Needs = Literal["nothing", "job", "queued", "ended", "stoppable", "active"]

GROUP_TITLES: Final[dict[Group, str]] = {
    "jobs": "Jobs",
    "queue": "Queue",
    "list": "Navigation",
    "log": "Log",
    "app": "Dashboard",
}


@dataclass(frozen=True)
class Action:
    """One thing a person can do.

    Attributes:
        name: The action method, without `action_`; also the binding's id.
        keys: Comma-separated keys, as Textual names them.
        shown: The keys as people read them.
        label: A word or two for the footer.
        help: A sentence for the help screen, the palette and tooltips.
        group: Heading in the help screen.
        needs: The selected job's required condition.
        footer: Its position in the footer, if it has one.
        spare: Whether it is dropped first from a narrow footer.
        acts: Whether it changes jobs or files; a read-only dashboard refuses it.
        everywhere: Whether it is available on every screen.
    """

    name: str
    keys: str
    shown: str
    label: str
    help: str
    group: Group
    needs: Needs = "nothing"
    footer: int = 0
    spare: bool = False
    acts: bool = False
    everywhere: bool = False

    @property
    def id(self) -> str:
        """Return its id in keymaps."""
        return self.name if self.name.startswith("app.") else f"{self.group}.{self.name}"

    def fits(self, job: Job | None) -> bool:
        """Return whether the action makes sense for the selected job."""
        if self.needs == "nothing":
            return True
        if job is None:
            return False
        match self.needs:
            case "queued":
                return job.state is State.QUEUED
            case "ended":
                return job.state.ended
            case "stoppable":
                return job.state.active or job.state is State.QUEUED
            case "active":
                return job.state.active
        return True


_SAME: Final = "one place among those of its priority"
_QUEUE: Final[tuple[tuple[str, str, str, str, Needs, str], ...]] = (
    ("hold_job", "h", "h", "hold", "queued", "Hold the queued job, until it is released"),
    (
        "release_job",
        "H,shift+h",
        "H",
        "release",
        "queued",
        "Release the job: from its hold, or from waiting for jobs that failed",
    ),
    ("move_up", "K,shift+k", "K", "move up", "queued", f"Move the queued job up: {_SAME}"),
    ("move_down", "J,shift+j", "J", "move down", "queued", f"Move the queued job down: {_SAME}"),
    ("raise_priority", "plus", "+", "sooner", "queued", "Raise the queued job's priority"),
    ("lower_priority", "minus", "-", "later", "queued", "Lower the queued job's priority"),
    ("pause_queue", "P,shift+p", "P", "pause", "nothing", "Pause the queue, or run it again"),
)

ACTIONS: Final[tuple[Action, ...]] = (
    Action("new_job", "n", "n", "new", "Create a job", "jobs", footer=1, acts=True),
    Action(
        "duplicate_job",
        "D,shift+d",
        "D",
        "copy",
        "Copy the job under a new name",
        "jobs",
        "job",
        acts=True,
    ),
    Action(
        "edit_job", "e", "e", "edit", "Edit a queued job; copy any other", "jobs", "job", acts=True
    ),
    Action(
        "start_job",
        "s",
        "s",
        "resume",
        "Resume an ended job from its newest checkpoint",
        "jobs",
        "ended",
        2,
        acts=True,
    ),
    Action(
        "resume_with",
        "S,shift+s",
        "S",
        "settings",
        "Resume an ended job with other settings",
        "jobs",
        "ended",
        acts=True,
    ),
    Action(
        "stop_job",
        "x",
        "x",
        "stop",
        "Stop the job after a checkpoint: asks, x again agrees. Later: SIGTERM, then SIGKILL",
        "jobs",
        "stoppable",
        3,
        acts=True,
    ),
    Action(
        "save_now",
        "m",
        "m",
        "save",
        "Write a checkpoint at the next step",
        "jobs",
        "active",
        4,
        acts=True,
    ),
    Action(
        "sample_now",
        "p",
        "p",
        "sample",
        "Sample the validation prompts at the next step",
        "jobs",
        "active",
        5,
        acts=True,
    ),
    Action(
        "remove_job",
        "r",
        "r",
        "rm",
        "Delete an ended job and its run directory",
        "jobs",
        "ended",
        7,
        spare=True,
        acts=True,
    ),
    Action(
        "details",
        "i,enter",
        "i",
        "info",
        "Show job details: ranks, log, samples, job file, history",
        "jobs",
        "job",
        8,
    ),
    Action(
        "data",
        "d",
        "d",
        "data",
        "Show what the job trains on, and what is skipped",
        "jobs",
        "job",
        9,
    ),
    Action(
        "checkpoints",
        "c",
        "c",
        "ckpts",
        "Checkpoints: resume, verify, export, delete",
        "jobs",
        "job",
        10,
    ),
    Action(
        "export_job",
        "E,shift+e",
        "E",
        "export",
        "Export the newest checkpoint",
        "jobs",
        "job",
        acts=True,
    ),
    Action(
        "toggle_ranks",
        "R,shift+r",
        "R",
        "ranks",
        "Switch between ranks and devices",
        "jobs",
        "job",
    ),
    Action(
        "plots",
        "v",
        "v",
        "plots",
        "Plot loss, learning rate and more; compare runs",
        "jobs",
        "job",
    ),
    Action(
        "compare_sweep",
        "V,shift+v",
        "V",
        "compare",
        "Plot the curves of all jobs of the selected job's sweep",
        "jobs",
        "job",
    ),
    *(
        Action(name, keys, shown, label, does, "queue", needs, acts=True)
        for name, keys, shown, label, needs, does in _QUEUE
    ),
    Action(
        "filter_jobs",
        "slash",
        "/",
        "filter",
        "Filter jobs by name, id, state or family; esc shows all again",
        "list",
    ),
    Action("mark_job", "space", "space", "mark", "Mark the job: actions take all marked", "list"),
    Action("clear_marks", "escape", "esc", "all", "Clear the filter, then the marks", "list"),
    Action("cursor_down", "j,down", "j ↓", "next", "Select the next job", "list"),
    Action("cursor_up", "k,up", "k ↑", "previous", "Select the previous job", "list"),
    Action("page_down", "ctrl+d", "^d", "page down", "Move down half a screen", "list"),
    Action("page_up", "ctrl+u", "^u", "page up", "Move up half a screen", "list"),
    Action("first", "g,ctrl+home", "g", "first", "Select the first job", "list"),
    Action("fold", "z", "z", "fold", "Fold the selected job's sweep, or unfold it", "list"),
    Action("last", "G,shift+g,ctrl+end", "G", "last", "Select the last job", "list"),
    Action("toggle_log", "l", "l", "log", "Open the log full-screen, or close it", "log", "job", 6),
    Action(
        "search_log",
        "slash",
        "/",
        "search log",
        "Search the log: press / outside the jobs",
        "log",
        "job",
    ),
    Action(
        "next_log",
        "right_square_bracket",
        "]",
        "next log",
        "Next log: ranks, launcher, supervisor",
        "log",
        "job",
    ),
    Action(
        "previous_log", "left_square_bracket", "[", "previous log", "Previous log", "log", "job"
    ),
    Action("follow_log", "f", "f", "follow", "Follow the log, or stop following", "log", "job"),
    Action("log_page_up", "pageup", "PgUp", "scroll up", "Scroll the log up", "log", "job"),
    Action("log_page_down", "pagedown", "PgDn", "scroll down", "Scroll the log down", "log", "job"),
    Action("log_home", "home", "Home", "log start", "Go to the start of the log", "log", "job"),
    Action(
        "log_end", "end", "End", "log end", "Go to the end of the log and follow it", "log", "job"
    ),
    Action(
        "show_help",
        "question_mark,f1",
        "?",
        "help",
        "Keys of this screen",
        "app",
        footer=11,
        everywhere=True,
    ),
    Action(
        "app.command_palette",
        "ctrl+p,f9",  # some terminals, such as that of VS Code, keep ctrl+p for themselves
        "^p F9",
        "palette",
        "Find an action or a job by name",
        "app",
        everywhere=True,
    ),
    Action("gpus", "u", "u", "gpus", "GPUs: graphs of use and memory, all processes", "app"),
    Action("fleet", "F,shift+f", "F", "fleet", "Fleet: other machines, their GPUs and jobs", "app"),
    Action("caches", "C,shift+c", "C", "caches", "Show cache sizes, clear caches", "app"),
    Action("switch_theme", "t", "t", "theme", "Switch between the dark and light theme", "app"),
    Action("app.redraw", "f5", "F5", "redraw", "Redraw the screen", "app", everywhere=True),
    Action(
        "app.suspend_process",
        "ctrl+z",
        "^z",
        "suspend",
        "Suspend to shell; `fg` returns",
        "app",
        everywhere=True,
    ),
    Action(
        "app.quit",
        "ctrl+q",
        "^q",
        "quit",
        "Quit from any screen; asks while a form holds changes",
        "app",
        everywhere=True,
    ),
    Action("quit_app", "q", "q", "quit", "Quit the dashboard; jobs keep running", "app", footer=12),
)

# They mean the same on every screen that shows a job; see `tui.widgets.job_actions`.
_OF_A_JOB: Final = ("start_job", "resume_with", "stop_job", "save_now", "sample_now")

# Actions of other screens that change jobs or files, by name.
_ACTING_ELSEWHERE: Final = frozenset(
    {"resume", "export", "delete", "clear", "clear_all", "submit", "edit_job", "duplicate_job"}
    | {"end_process", "kill_process", "try_fit"}
)
ACTING: Final = _ACTING_ELSEWHERE | {action.name for action in ACTIONS if action.acts}


def bindings(*groups: Group) -> list[BindingType]:
    """Return key bindings for these groups; their screen or widget must have the methods."""
    return [
        _binding(action)
        for action in ACTIONS
        if action.group in groups and action.name not in _OF_A_JOB
    ]


def job_bindings() -> list[BindingType]:
    """Return the key bindings for a job on every screen that shows one."""
    return [_binding(action) for action in ACTIONS if action.name in _OF_A_JOB]


def job_actions(job: Job | None, keymap: Mapping[str, str] | None = None) -> list[Action]:
    """List the actions that fit a job's state, with the user's keys."""
    return [
        _own(action, keymap) for action in ACTIONS if action.name in _OF_A_JOB and action.fits(job)
    ]


def fitting(name: str, jobs: Sequence[Job]) -> list[Job]:
    """Return the actions that make sense in a job's state."""
    action = next(action for action in ACTIONS if action.name == name)
    return [job for job in jobs if action.fits(job)]


def _binding(action: Action) -> Binding:
    return Binding(
        action.keys,
        action.name,
        action.label,
        show=bool(action.footer),
        tooltip=action.help,
        id=action.id,
        key_display=action.shown,
    )


def _own(action: Action, keymap: Mapping[str, str] | None) -> Action:
    keys = (keymap or {}).get(action.id)
    return replace(action, keys=keys, shown=shown_key(keys)) if keys else action


def everywhere() -> list[BindingType]:
    """Return the app's bindings; over a modal screen only priority ones are active."""
    return [
        Binding(
            key,
            action.name.removeprefix("app."),
            action.label,
            show=False,
            tooltip=action.help,
            id=action.id,
            priority=len(key) > 1 and key != "question_mark",
        )
        for action in ACTIONS
        if action.everywhere
        for key in action.keys.split(",")
    ]


def footer_actions(
    width: int | None = None, keymap: Mapping[str, str] | None = None, job: Job | None = None
) -> list[Action]:
    """Return as many of the footer's actions as fit, in order.

    Args:
        width: Columns.
        keymap: The user's own keys by action id.
        job: The selected job. It can be started or stopped, never both, so these share a place.
    """
    shown = sorted((action for action in ACTIONS if action.footer), key=lambda a: a.footer)
    shown = [_own(action, keymap) for action in shown if job is None or _may_fit(action, job)]
    # Drop spare ones first, then others from the right; help and quit always stay.
    may_go = [action for action in shown if not action.spare and action.group != "app"]
    may_go += [action for action in shown if action.spare]
    while may_go and width is not None and footer_width(shown) > width:
        shown.remove(may_go.pop())
    return shown


def _may_fit(action: Action, job: Job) -> bool:
    return action.needs in ("nothing", "job") or action.fits(job)


def shown_key(keys: str) -> str:
    """Return the first of several keys as displayed: `ctrl+x` is `^x`."""
    key = keys.split(",")[0].strip()
    control = key.startswith("ctrl+")
    return f"^{format_key(key.removeprefix('ctrl+'))}" if control else format_key(key)


def footer_width(actions: Sequence[Action]) -> int:
    """Return the width of a footer with these actions, in columns."""
    return (
        sum(len(f"{action.shown} {action.label}") + FOOTER_GAP for action in actions) - FOOTER_GAP
    )
