"""The keys of the form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from textual.binding import Binding

from tui.form.pages import PAGES
from tui.keys.key_table import key_line

if TYPE_CHECKING:
    from textual.binding import BindingType
    from textual.content import Content

BINDINGS: Final[list[BindingType]] = [
    Binding(
        "ctrl+r",
        "submit",
        "queue it",
        id="form.submit",
        tooltip="Validate and queue the job, or save a queued job",
    ),
    Binding(
        "ctrl+n,ctrl+pagedown",
        "turn(1)",
        "next page",
        id="form.next_page",
        tooltip="Go to the next page",
    ),
    Binding(
        "ctrl+pageup,f7",
        "turn(-1)",
        "previous page",
        id="form.previous_page",
        tooltip="Go to the previous page",
    ),
    *(
        Binding(
            f"alt+{n + 1}",
            f"show_page({n})",
            f"page {page.name}",
            show=False,
            id=f"form.page_{page.name}",
        )
        for n, page in enumerate(PAGES)
    ),
    Binding("ctrl+f,slash", "find", "find a field", id="form.find", tooltip="Find a field by name"),
    Binding(
        "ctrl+e",
        "sweep",
        "list of values",
        id="form.sweep",
        tooltip="Make the field a list of values, of which each becomes a job; again: one value",
        priority=True,
    ),
    Binding(
        "f4",
        "take_over",
        "from newest job",
        id="form.take_over",
        tooltip="Fill in model, data and ranks of the newest job, or undo that",
    ),
    Binding(
        "f6",
        "restore",
        "restore a draft",
        id="form.restore",
        tooltip="Restore what an earlier form said and never queued; again: the one before it",
    ),
    Binding(
        "ctrl+t",
        "templates",
        "templates",
        id="form.templates",
        tooltip="Start from a template, or save one",
    ),
    Binding(
        "f2,ctrl+b",  # tmux keeps ^b
        "blocks",
        "blocks to wrap",
        id="form.blocks",
        tooltip="Choose which blocks FSDP wraps",
    ),
    Binding(
        "ctrl+l",
        "data",
        "show data",
        id="form.data",
        tooltip="Show what the job would train on, and what is skipped",
    ),
    Binding("ctrl+o", "load", "load YAML", id="form.load", tooltip="Fill the form from a job file"),
    Binding(
        "ctrl+s",
        "save",
        "save YAML",
        id="form.save",
        tooltip="Save the form as a job file, even if incomplete",
    ),
    Binding(
        "f3",
        "preview",
        "preview",
        id="form.preview",
        tooltip="Switch between job file, launch command and form",
    ),
    Binding(
        "ctrl+y",
        "copy",
        "copy preview",
        id="form.copy",
        tooltip="Copy the job file or the launch command",
    ),
    Binding("escape", "leave", "leave", id="form.leave", tooltip="Leave without queuing"),
]

# Action, displayed keys, description; the form's main action comes first.
_NARROW: Final = (
    ("turn(1)", "^n", "page"),
    ("find", "^f", "find"),
    ("sweep", "^e", "list"),
    ("blocks", "F2", "blocks"),
    ("save", "^s", "save"),
    ("preview", "F3", "file"),
    ("app.show_help", "F1", "keys"),
    ("leave", "esc", "leave"),
)
_WIDE: Final = (
    *_NARROW[:3],
    ("templates", "^t", "template"),
    _NARROW[3],
    ("data", "^l", "data"),
    ("load", "^o", "load"),
    *_NARROW[4:6],
    ("copy", "^y", "copy"),
    *_NARROW[6:],
)


def last_line(verb: str, width: int, *, narrow: bool) -> Content:
    """Return the key line; the form's main action comes first."""
    return key_line((("submit", "^r", verb), *(_NARROW if narrow else _WIDE)), width)
