"""The keys of the form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from textual.binding import Binding

from tui.form.fields.pages import PAGES
from tui.keys.key_line import key_line

if TYPE_CHECKING:
    from textual.binding import BindingType
    from textual.content import Content

BINDINGS: Final[list[BindingType]] = [
    Binding("ctrl+r", "submit", "queue it", id="form.submit",
            tooltip="Check the job and queue it, or change the one that waits"),
    Binding("ctrl+n,ctrl+pagedown", "turn(1)", "next page", id="form.next_page",
            tooltip="Turn to the next page of fields"),
    Binding("ctrl+pageup,f7", "turn(-1)", "previous page", id="form.previous_page",
            tooltip="Turn to the previous page of fields"),
    *(Binding(f"alt+{n + 1}", f"show_page({n})", f"page {page.name}", show=False,
              id=f"form.page_{page.name}") for n, page in enumerate(PAGES)),
    Binding("ctrl+f,slash", "find", "find a field", id="form.find",
            tooltip="Go to a field by a part of its key"),
    Binding("ctrl+t", "templates", "templates", id="form.templates",
            tooltip="Begin from a template, or keep one"),
    Binding("ctrl+b,f2", "blocks", "blocks to wrap", id="form.blocks",  # tmux may keep ^b
            tooltip="List the model's blocks and choose those that FSDP wraps"),
    Binding("ctrl+l", "data", "look at the data", id="form.data",
            tooltip="Show what the job would train on, and what is left out"),
    Binding("ctrl+o", "load", "load YAML", id="form.load", tooltip="Fill from a job file"),
    Binding("ctrl+s", "save", "save YAML", id="form.save",
            tooltip="Write the values as a job file, complete or not"),
    Binding("f3", "preview", "preview", id="form.preview",
            tooltip="Job file, launch command, and back"),
    Binding("ctrl+y", "copy", "copy preview", id="form.copy",
            tooltip="Copy the job file, or the launch command with the files it reads"),
    Binding("escape", "leave", "leave", id="form.leave", tooltip="Leave without queueing"),
]  # fmt: skip

# Action, keys as people read them, what it does; before them stands what the form is for.
_NARROW: Final = (
    ("turn(1)", "^n", "page"), ("find", "^f", "find"), ("blocks", "^b", "blocks"),
    ("save", "^s", "save"), ("preview", "F3", "file"), ("app.show_help", "F1", "keys"),
    ("leave", "esc", "leave"),
)  # fmt: skip
_WIDE: Final = (
    *_NARROW[:2], ("templates", "^t", "template"), _NARROW[2], ("data", "^l", "data"),
    ("load", "^o", "load"), *_NARROW[3:5], ("copy", "^y", "copy"), *_NARROW[5:],
)  # fmt: skip


def last_line(verb: str, width: int, *, narrow: bool) -> Content:
    """The line of keys, the one that does what the form is for first."""
    return key_line((("submit", "^r", verb), *(_NARROW if narrow else _WIDE)), width)
