"""Files that the form reads and writes: job files, and templates."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from jobs.errors import UserError
from jobs.paths import exists
from jobs.spec.file.load import load_spec
from jobs.spec.file.templates import path_of, save_template, templates_home
from tui.form.fields import draft
from tui.widgets.modals.ask_name import AskNameScreen
from tui.widgets.modals.ask_path import AskPathScreen
from tui.widgets.modals.confirm import ConfirmScreen

if TYPE_CHECKING:
    from pathlib import Path

    from tui.form.screen import NewJobScreen


def load(form: NewJobScreen) -> None:
    """Ask for a job file, and show what it says."""

    def chosen(path: Path | None) -> None:
        if path is not None:
            form.run_worker(_load(form, path), group="load", exclusive=True, exit_on_error=False)

    form.app.push_screen(AskPathScreen("load job file", "job.yaml"), chosen)


async def _load(form: NewJobScreen, path: Path) -> None:
    """Read in a thread, since it may lie on a disk that hangs."""
    notes: list[str] = []
    try:
        spec = await asyncio.to_thread(load_spec, path, on_note=notes.append)
    except UserError as error:
        form.complain(str(error))
        return
    for note in notes:
        form.notify(note, severity="warning", markup=False)
    form.fill(spec.to_dict())


def save(form: NewJobScreen) -> None:
    """Ask for a path, and write what the form says there, complete or not."""

    def write(path: Path) -> None:
        try:
            saved = draft.save_yaml(form.values, path)
        except UserError as error:
            form.complain(str(error))
        else:
            form.notify(f"saved as {saved}", markup=False)

    def chosen(path: Path | None) -> None:
        if path is None:
            return
        if not exists(path):
            write(path)
            return

        def answered(yes: bool | None) -> None:
            if yes:
                write(path)

        detail = f"{path} already exists; its contents will be lost."
        form.app.push_screen(ConfirmScreen("Replace the file?", detail, "replace"), answered)

    name = form.values.get("name") or "job"
    form.app.push_screen(AskPathScreen("save as job file", f"{name}.yaml"), chosen)


def save_as_template(form: NewJobScreen) -> None:
    """Ask for a name, and keep what differs from the defaults under it."""

    def write(name: str) -> None:
        try:
            values = draft.non_default(form.values)
            values.pop("name", None)
            saved = save_template(name, values)
        except UserError as error:
            form.complain(str(error))
        else:
            form.notify(f"saved as {saved}", markup=False)

    def chosen(name: str | None) -> None:
        if name is None:
            return
        if not exists(path_of(name)):
            write(name)
            return

        def answered(yes: bool | None) -> None:
            if yes:
                write(name)

        detail = f"Template “{name}” already exists; its contents will be lost."
        form.app.push_screen(ConfirmScreen("Replace the template?", detail, "replace"), answered)

    family = form.values.get("model_family") or "mine"
    about = f"settings that differ from the defaults, saved in {templates_home()}"
    form.app.push_screen(AskNameScreen("save as template", f"my {family}", about), chosen)
