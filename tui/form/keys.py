"""The keys of the form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from textual.binding import Binding

from tui.form.pages import PAGES
from tui.keys.key_table import bind, key_line

if TYPE_CHECKING:
    from textual.binding import BindingType
    from textual.content import Content

BINDINGS: Final[list[BindingType]] = [
    bind(
        "form.submit",
        "ctrl+r",
        "Validate and queue the job, or save a queued job",
        label="queue it",
    ),
    bind("form.next_page", "ctrl+n,ctrl+pagedown", "Go to the next page", action="turn(1)"),
    bind("form.previous_page", "ctrl+pageup,f7", "Go to the previous page", action="turn(-1)"),
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
    bind("form.find", "ctrl+f,slash", "Find a field by name", label="find a field"),
    Binding(
        "ctrl+e",
        "sweep",
        "list of values",
        id="form.sweep",
        tooltip="Make the field a list of values, of which each becomes a job; again: one value",
        priority=True,
    ),
    bind(
        "form.take_over",
        "f4",
        "Fill in model, data and ranks of the newest job, or undo that",
        label="from newest job",
    ),
    bind(
        "form.restore",
        "f6",
        "Restore what an earlier form said and never queued; again: the one before it",
        label="restore a draft",
    ),
    bind(
        "form.after",
        "f8",
        "Choose jobs that must complete before this one starts",
        label="start after jobs",
        action="stages",
    ),
    bind("form.templates", "ctrl+t", "Start from a template, or save one"),
    bind("form.blocks", "f2,ctrl+b", "Choose which blocks FSDP wraps", label="blocks to wrap"),
    bind(
        "form.data",
        "ctrl+l",
        "Show what the job would train on, and what is skipped",
        label="show data",
    ),
    bind("form.load", "ctrl+o", "Fill the form from a job file", label="load YAML"),
    bind(
        "form.save", "ctrl+s", "Save the form as a job file, even if incomplete", label="save YAML"
    ),
    bind("form.preview", "f3", "Switch between job file, launch command and form"),
    bind("form.copy", "ctrl+y", "Copy the job file or the launch command", label="copy preview"),
    bind("form.leave", "escape", "Leave without queuing"),
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
    ("stages", "F8", "after"),
    ("data", "^l", "data"),
    ("load", "^o", "load"),
    *_NARROW[4:6],
    ("copy", "^y", "copy"),
    *_NARROW[6:],
)


def last_line(verb: str, width: int, *, narrow: bool) -> Content:
    """Return the key line; the form's main action comes first."""
    return key_line((("submit", "^r", verb), *(_NARROW if narrow else _WIDE)), width)
