"""What the form finds by a part of its name: a field, or a template to begin from."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Final

from textual.command import CommandPalette, DiscoveryHit, Hit, Hits, Provider

from jobs.spec.file.templates import list_templates
from jobs.spec.job_spec import JobSpec
from tui.form.fields.pages import PAGES, label
from tui.widgets.path_input import in_daemon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jobs.spec.file.templates import Template
    from tui.form.screen import NewJobScreen

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
