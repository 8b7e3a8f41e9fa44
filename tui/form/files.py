"""Files that the form reads and writes, and its palette searches."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from textual.command import CommandPalette, DiscoveryHit, Hit, Hits, Provider
from textual.message import Message

from jobs.errors import UserError
from jobs.paths import ensure_private_dir, exists
from jobs.run.rundir import read_json, write_atomic
from jobs.spec.file.load import load_spec
from jobs.spec.file.templates import list_templates, path_of, save_template, templates_home
from jobs.spec.job_spec import JobSpec, field_names
from jobs.untrusted.secrets import without_secrets
from tui.form import draft
from tui.form.pages import PAGES, label
from tui.widgets.path_input import in_daemon
from tui.widgets.questions import AskNameScreen, AskPathScreen, ConfirmScreen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from textual.timer import Timer

    from jobs.spec.file.templates import Template
    from tui.form.screen import NewJobScreen


# -- files ----------------------------------------------------------------------------------
# Files that the form reads and writes: job files, and templates.


def load(form: NewJobScreen) -> None:
    """Ask for a job file, and show its values."""

    def chosen(path: Path | None) -> None:
        if path is not None:
            form.run_worker(_load(form, path), group="load", exclusive=True, exit_on_error=False)

    form.app.push_screen(AskPathScreen("load job file", "job.yaml"), chosen)


async def _load(form: NewJobScreen, path: Path) -> None:
    """Read in a thread, since the disk may hang."""
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
    """Ask for a path, and write the form's values there, complete or not."""

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
    """Ask for a name, and save what differs from the defaults under it."""

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


# -- drafts ---------------------------------------------------------------------------------
# Input is saved on disk until its job is queued, since a terminal may disappear at any time.


_SAVED_AFTER: Final = 0.3  # seconds after a change; half a dozen letters make one write
_MOST: Final = 20  # drafts on the disk; older ones are deleted
_VERSION: Final = 1


@dataclass(frozen=True)
class Draft:
    """A form that was left, or whose terminal disappeared.

    Attributes:
        path: Its file.
        t: When it was saved, in Unix seconds.
        job: The queued job that it edits; None for a new one.
        values: What differs from the defaults, by key.
    """

    path: Path
    t: float
    job: int | None
    values: Mapping[str, Any]


def saved_drafts(folder: Path) -> list[Draft]:
    """Read the drafts, the newest first; a damaged one is skipped."""
    with suppress(OSError):
        paths = sorted(folder.glob("*.json"), reverse=True)
        return [draft for path in paths if (draft := _draft(path)) is not None]
    return []


def _draft(path: Path) -> Draft | None:
    stored = read_json(path) or {}
    t, job, values = stored.get("t"), stored.get("job"), stored.get("values")
    if stored.get("version") != _VERSION or not isinstance(values, dict):
        return None
    if not isinstance(t, int | float) or not isinstance(job, int | None):
        return None
    readable = {key: value for key, value in values.items() if key in field_names()}
    return Draft(path, t, job, readable) if readable else None


class Drafts:
    """Saves the form's values, and offers those of earlier forms.

    Args:
        form: The form.
        folder: Where drafts are; created when the first is saved.
    """

    @dataclass
    class Listed(Message):
        """A thread has read the drafts that fit the form, the newest first."""

        drafts: list[Draft]

    def __init__(self, form: NewJobScreen, folder: Path) -> None:
        self._form = form
        self._folder = folder
        self._file = folder / f"{time.time_ns():020}-{os.getpid()}.json"
        self._lock = threading.Lock()
        self._queued = self._failed = False
        self._newest = 0  # number of the newest text; older ones never replace it
        self._waits: Timer | None = None
        self._offered: list[Draft] = []
        self._shown: int | None = None  # the draft that is shown
        self._typed: dict[str, Any] = {}  # the values before that

    # -- saving ----------------------------------------------------------------------------

    def soon(self) -> None:
        """Save the form's values shortly."""
        if self._waits is None:
            self._waits = self._form.set_timer(_SAVED_AFTER, self.save)

    def save(self) -> None:
        """Save the form's values in a thread: the state directory may be slow."""
        self._waits = None
        self._newest += 1
        values = self._form.fields.values
        unchanged = draft.same(values, self._form.opened)
        text = "" if unchanged else self._text(draft.non_default(values))
        work = partial(self._write, text, self._newest)
        self._form.app.run_worker(work, group="draft", exit_on_error=False, thread=True)

    def delete(self) -> None:
        """Delete the draft, since its job is queued, and the one it started from. Thread-safe."""
        begun = [] if self._shown is None else [self._offered[self._shown].path]
        with self._lock, suppress(OSError):
            self._queued = True
            for path in (self._file, *begun):
                path.unlink(missing_ok=True)

    def _text(self, values: Mapping[str, Any]) -> str:
        kept = {
            key: value
            for key, value in values.items()
            if without_secrets(text := json.dumps(value, default=str)) == text
        }
        facts = {"version": _VERSION, "t": time.time(), "job": self._form.purpose.job}
        return json.dumps(facts | {"values": kept}, indent=1, default=str) + "\n"

    def _write(self, text: str, number: int) -> None:
        """Write in a thread; an error is reported once."""
        app = self._form.app
        try:
            self._replace(text, number)
        except (OSError, UserError) as error:
            if not self._failed:
                app.post_message(app.Said(f"the form's draft cannot be saved: {error}", "warning"))
            self._failed = True

    def _replace(self, text: str, number: int) -> None:
        with self._lock:
            if number != self._newest or self._queued:
                return
            if not text:
                self._file.unlink(missing_ok=True)
                return
            ensure_private_dir(self._folder)
            write_atomic(self._file, text, durable=True, private=True)
            for old in sorted(self._folder.glob("*.json"), reverse=True)[_MOST:]:
                old.unlink(missing_ok=True)

    # -- restoring -------------------------------------------------------------------------

    def look(self) -> None:
        """Read earlier drafts in a thread."""
        form, folder, job = self._form, self._folder, self._form.purpose.job

        def read() -> None:
            fitting = [draft for draft in saved_drafts(folder) if draft.job == job]
            form.post_message(self.Listed([draft for draft in fitting if draft.path != self._file]))

        form.run_worker(read, group="drafts", exit_on_error=False, thread=True)

    def take(self, message: Listed) -> None:
        """Offer the drafts."""
        self._offered = message.drafts
        if self._offered:
            self._form.show_heading()

    @property
    def offer(self) -> str:
        """Return what the key does, for the title."""
        if not self._offered:
            return ""
        following = 0 if self._shown is None else self._shown + 1
        now = "" if self._shown is None else f" · draft of {_when(self._offered[self._shown].t)}"
        if following == len(self._offered):
            return f"{now} · F6 undoes that"
        return f"{now} · F6 restores your draft of {_when(self._offered[following].t)}"

    def turn(self) -> None:
        """Show the next older draft; after the oldest, what was typed before."""
        if not self._offered:
            return
        if self._shown is None:
            self._typed = draft.non_default(self._form.fields.values)
        following = 0 if self._shown is None else self._shown + 1
        self._shown = following if following < len(self._offered) else None
        back = self._shown is None
        self._form.fill(self._typed if back else self._offered[following].values)
        self._form.show_heading()
        self.soon()


def _when(t: float) -> str:
    """Format a time as hours and minutes, with the day unless it is today."""
    today = time.localtime()[:3] == time.localtime(t)[:3]
    return time.strftime("%H:%M" if today else "%b %d %H:%M", time.localtime(t))


# -- search ---------------------------------------------------------------------------------
# Search the form: for a field, or a template.


_SAVE: Final = "Save as a template …"


class _Named(Provider):
    """Searches `_entries`: a name, its description, and an action."""

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
    """Every field of the job, by its key or its label."""

    def _entries(self) -> Iterator[tuple[str, str, Callable[[], object]]]:
        for page in PAGES:
            for name in page.fields:
                obvious = label(name).casefold() == name.replace("_", " ")
                called = "" if obvious else f" ({label(name)})"
                about = JobSpec.model_fields[name].description or ""
                yield f"{name}{called}", about, partial(self.form.go_to, name)


class TemplatesProvider(_Named):
    """The user's templates, the families' flavors, and saving a template."""

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
        # Typing cancels the previous search. Textual 8 would also cancel what `startup` waits for,
        # and then no search of this palette would ever find anything.
        await asyncio.shield(self._reading)

    def _entries(self) -> Iterator[tuple[str, str, Callable[[], object]]]:
        for template in self._templates:
            yield template.title, template.about, partial(self.form.begin_with, template)
        yield _SAVE, "Save the form's settings to start other jobs from", self.form.save_as_template


def fields_palette() -> CommandPalette:
    return CommandPalette([FieldsProvider], placeholder="type part of a key …")


def templates_palette() -> CommandPalette:
    return CommandPalette([TemplatesProvider], placeholder="start from a template …")
