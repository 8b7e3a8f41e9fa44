"""What the form opens over itself: data, blocks of the model, the question before leaving."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from jobs.spec.data_tool import NOT_NEEDED
from jobs.spec.values.spellings import as_list
from tui.form.fields import draft, field_texts
from tui.form.fields.pages import BLOCKS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tui.form.screen import NewJobScreen


def show_data(form: NewJobScreen, values: Mapping[str, Any]) -> None:
    """Show the data that a job of these values would train on."""
    from tui.form.data.screen import DataScreen

    heading = f"data of the new job “{values.get('name', '')}”"
    read = partial(draft.spec_of, values, ignoring=NOT_NEEDED)
    form.app.push_screen(DataScreen(heading, read))


def choose_blocks(form: NewJobScreen) -> None:
    """Choose which classes of the model become FSDP units."""
    from tui.form.blocks.screen import DetectScreen

    values = form.values
    row = form.fields.rows[BLOCKS]
    model = draft.model_of(values)
    # A blank field is a choice as well, once it was made.
    names = as_list(row.value) or ([] if model == form.chosen_of else None)

    def chosen(names: list[str] | None) -> None:
        if names is not None:
            form.chosen_of = model
            row.put(names or None)
            row.control.focus()

    form.app.push_screen(DetectScreen(model, names, draft.ranks_of(values)), chosen)


def ask_to_leave(form: NewJobScreen, *, busy: bool) -> None:
    """Close the form, if that is meant.

    Args:
        form: What would be lost is in it.
        busy: Whether it is queueing the job.
    """
    from tui.widgets.modals.confirm import ConfirmScreen

    def answered(yes: bool | None) -> None:
        if yes:
            form.dismiss(None)

    screen = ConfirmScreen("Leave the form?", field_texts.leaving(busy), "leave", refuse="stay")
    form.app.push_screen(screen, answered)
