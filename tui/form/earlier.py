"""Taking model, data and ranks of the newest job into a blank form, and giving them back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tui.form.fields import draft

if TYPE_CHECKING:
    from tui.form.purpose import Source
    from tui.form.screen import NewJobScreen


class Earlier:
    """One key takes the values, the same key gives them back.

    Args:
        form: Which takes them.
        source: The newest job, if there is one.
    """

    def __init__(self, form: NewJobScreen, source: Source | None) -> None:
        self._form = form
        self._source = source
        self._before: dict[str, Any] | None = None  # what the form said, once they are taken

    @property
    def offer(self) -> str:
        """What the key does, for the title."""
        if self._source is None:
            return ""
        which = f"#{self._source.job} “{self._source.name}”"
        if self._before is not None:
            return f" · from {which} · F4 undoes that"
        return f" · F4 takes model and data from {which}"

    def turn(self) -> None:
        """Take them, or give them back; what was typed since stays."""
        if self._source is None:
            return
        fields, taken = self._form.fields, dict(self._source.values)
        untouched = draft.same(fields.values, self._form.opened)
        now = draft.non_default(fields.values)
        if self._before is None:
            self._before, values = now, now | taken
        else:
            values = draft.give_back(now, taken, self._before)
            self._before = None
        self._form.fill(values)
        if untouched:
            self._form.opened = fields.values
        self._form.show_heading()
