"""Files that the form reads and writes, and what it finds by a part of its name."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Final

from textual.command import CommandPalette, DiscoveryHit, Hit, Hits, Provider

from jobs.errors import UserError
from jobs.paths import exists
from jobs.spec.file.load import load_spec
from jobs.spec.file.templates import list_templates, path_of, save_template, templates_home
from jobs.spec.job_spec import JobSpec
from tui.form import draft
from tui.form.pages import PAGES, label
from tui.widgets.path_input import in_daemon
from tui.widgets.questions import AskNameScreen, AskPathScreen, ConfirmScreen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from jobs.spec.file.templates import Template
    from tui.form.screen import NewJobScreen


# -- files ----------------------------------------------------------------------------------
# Files that the form reads and writes: job files, and templates.


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


# -- search ---------------------------------------------------------------------------------
# What the form finds by a part of its name: a field, or a template to begin from.


_SAVE: Final = "Save as a template …"


class _Named(Provider):
    """Offers what `_entries` gives: a name, the text beside it, and what to do."""

    def _entries(self) -> Iterator[tuple[str, str, Callable[[], object]]]:
        raise NotImplementedError

    async def discover(self) -> Hits:
        for name, about, do in self._entries():
            yield DiscoveryHit(name, do, help=about)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for name, about, do in self._entries():
            if (score := matcher.match(name)) > 0:
                yield Hit(score, matcher.highlight(name), do, help=about)

    @property
    def form(self) -> NewJobScreen:
        from tui.form.screen import NewJobScreen

        assert isinstance(self.screen, NewJobScreen)
        return self.screen


class FieldsProvider(_Named):
    """Every field of a job: by its key, or as the form calls it."""

    def _entries(self) -> Iterator[tuple[str, str, Callable[[], object]]]:
        for page in PAGES:
            for name in page.fields:
                obvious = label(name).casefold() == name.replace("_", " ")
                called = "" if obvious else f" ({label(name)})"
                about = JobSpec.model_fields[name].description or ""
                yield f"{name}{called}", about, partial(self.form.go_to, name)


class TemplatesProvider(_Named):
    """The person's templates, the families' flavours, and keeping what the form says."""

    async def startup(self) -> None:
        self._templates: list[Template] = []
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        listing = await in_daemon(list_templates)
        self._templates, problems = listing if listing is not None else ([], [])
        for problem in problems:
            self.app.notify(problem, severity="warning", markup=False)

    async def discover(self) -> Hits:
        await self._templates_read()
        async for hit in super().discover():
            yield hit

    async def search(self, query: str) -> Hits:
        await self._templates_read()
        async for hit in super().search(query):
            yield hit

    async def _templates_read(self) -> None:
        # Typing cancels the search before it. Textual 8 would cancel what `startup` waits for along
        # with it, and then no search of this palette would ever find anything.
        await asyncio.shield(self._reading)

    def _entries(self) -> Iterator[tuple[str, str, Callable[[], object]]]:
        for template in self._templates:
            yield template.title, template.about, partial(self.form.begin_with, template)
        yield _SAVE, "Save the form's settings to start other jobs from", self.form.save_as_template


def fields_palette() -> CommandPalette:
    return CommandPalette([FieldsProvider], placeholder="type part of a key …")


def templates_palette() -> CommandPalette:
    return CommandPalette([TemplatesProvider], placeholder="start from a template …")
