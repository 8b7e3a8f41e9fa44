"""The screen of what is cached, driven by keys."""

from __future__ import annotations

import threading
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rich.cells import cell_len
from textual.geometry import Region
from textual.widgets import Static

from jobs.errors import StateError, UserError
from jobs.paths import cache_home
from jobs.queue.states import State
from jobs.service.caches import Cache, Cleared
from tests.support.tui.driven_app import all_said, question, running
from tests.support.tui.made_up_runs import add_job
from tests.support.tui.pilot import until
from tests.support.waiting import PATIENCE
from tui.app.app import ActionsProvider
from tui.dashboard.caches import CachesScreen
from tui.text.cache_text import amount, cache_rows, freed
from tui.text.format import plain

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from textual.pilot import Pilot

    from jobs.queue.store import Store
    from tui.app.app import FsdpTui

SIZES = [(80, 24), (120, 40), (200, 60)]


pytestmark = pytest.mark.usefixtures("no_processes")


class Caches:
    """Stands in for `jobs.service.caches`.

    Attributes:
        held: What there is.
        cleared: What `clear` was called with, call by call.
        refusal: Why nothing may be cleared.
        allowed: `clear` waits for it.
        broken: What listing them raises.
    """

    def __init__(self) -> None:
        base = Path("/cache/fsdp-tui")
        self.held = [
            Cache(
                "detection",
                "which classes of a model are its blocks",
                base / "blocks.json",
                41_000,
                1,
            ),
            Cache("latents", "pictures, encoded by the VAE", base / "latents", 3_400_000_000, 640),
            Cache("text", "captions, encoded by the text encoders", base / "text", 900, 12),
            Cache("tables", "copies of tables of pictures", base / "tables", 0, 0),
        ]
        self.cleared: list[list[str]] = []
        self.refusal: Exception | None = None
        self.allowed = threading.Event()
        self.allowed.set()
        self.broken: Exception | None = None

    def list(self, store: Store) -> Sequence[Cache]:
        if self.broken is not None:
            raise self.broken
        return [*self.held]

    def clear(self, store: Store, names: Sequence[str], *, force: bool = False) -> Cleared:
        assert not force
        assert self.allowed.wait(PATIENCE)
        self.cleared.append([*names])
        if self.refusal is not None:
            raise self.refusal
        gone = [one for one in self.held if one.name in names]
        self.held = [
            replace(one, bytes=0, files=0) if one.name in names else one for one in self.held
        ]
        total, files = sum(one.bytes for one in gone), sum(one.files for one in gone)
        return Cleared(tuple(names), total, files)


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> Caches:
    fake = Caches()
    monkeypatch.setattr("tui.dashboard.caches.list_caches", fake.list)
    monkeypatch.setattr("tui.dashboard.caches.clear", fake.clear)
    return fake


@asynccontextmanager
async def opened(
    store: Store, size: tuple[int, int] = (80, 24)
) -> AsyncIterator[tuple[FsdpTui, Pilot[None], CachesScreen]]:
    """The screen over the dashboard, with what it found."""
    async with running(store, size) as (app, pilot):
        await pilot.press("C")
        await until(pilot, lambda: isinstance(app.screen, CachesScreen) and app.screen.is_mounted)
        screen = app.screen
        assert isinstance(screen, CachesScreen)
        await until(pilot, lambda: screen.panel.rows or screen.has_class("-failed"))
        yield app, pilot, screen


def text_of(screen: CachesScreen, name: str) -> str:
    return str(screen.query_one(f"#cache-{name}", Static).content)


@pytest.mark.parametrize("size", SIZES)
async def test_the_caches_are_listed_with_their_sizes(
    store: Store, caches: Caches, size: tuple[int, int]
) -> None:
    async with opened(store, size) as (app, pilot, screen):
        await until(pilot, lambda: text_of(screen, "totals").startswith("3.2 GiB in 653 files"))
        lines = [plain(line).split() for line in screen.panel.rows]
        assert lines[0][:3] == ["cache", "size", "files"]
        assert lines[2][:4] == ["latents", "3.2", "GiB", "640"]
        for widget in (screen.panel, screen.query_one("#cache-about"), screen.key_line):
            assert widget.region in Region(0, 0, *size)
        assert screen.panel.size.height >= 5
        await pilot.press("j")
        await until(pilot, lambda: "/cache/fsdp-tui/latents" in text_of(screen, "about"))
        await pilot.click(screen.panel, offset=(8, 5))
        await until(pilot, lambda: "/cache/fsdp-tui/tables" in text_of(screen, "about"))
        await pilot.press("escape")
        await until(pilot, lambda: app.screen is app.dashboard)


@pytest.mark.slow
async def test_what_clearing_freed_is_told_twice(store: Store, caches: Caches) -> None:
    async with opened(store) as (app, pilot, screen):
        await pilot.press("j", "delete")
        asked = await question(app, pilot)
        assert asked.question == "Clear the latents cache?"
        assert "3.2 GiB in 640 files will be deleted" in asked.detail
        assert "/cache/fsdp-tui/latents" in asked.detail
        assert caches.cleared == []
        await pilot.press("y")
        told = "freed 3.2 GiB in 640 files from the latents cache"
        await until(pilot, lambda: text_of(screen, "status") == told)
        assert caches.cleared == [["latents"]]
        await until(pilot, lambda: told in all_said(app))
        await until(pilot, lambda: text_of(screen, "totals").startswith("41 KiB in 13 files"))


async def test_no_is_no(store: Store, caches: Caches) -> None:
    async with opened(store) as (app, pilot, screen):
        await pilot.press("a")
        await question(app, pilot)
        await pilot.press("enter")  # the harmless answer has the focus
        await until(pilot, lambda: app.screen is screen)
        assert caches.cleared == []
        assert text_of(screen, "status") == ""


async def test_all_are_cleared_that_hold_anything_and_then_there_is_nothing(
    store: Store, caches: Caches
) -> None:
    async with opened(store) as (app, pilot, screen):
        await pilot.press("a")
        asked = await question(app, pilot)
        assert asked.question == "Clear the detection, latents and text caches?"
        await pilot.press("y")
        await until(pilot, lambda: text_of(screen, "status").startswith("freed 3.2 GiB in 653"))
        assert caches.cleared == [["detection", "latents", "text"]]
        await until(pilot, lambda: not any(one.files for one in screen.panel.caches))
        await pilot.press("a")
        await until(pilot, lambda: text_of(screen, "status") == "nothing to clear")
        assert app.screen is screen


@pytest.mark.slow
async def test_clearing_is_refused_while_jobs_run_and_the_screen_says_why(
    store: Store, caches: Caches
) -> None:
    caches.refusal = StateError("job 3 is running and may be using it", "stop it first")
    async with opened(store) as (app, pilot, screen):
        await pilot.press("delete")
        await question(app, pilot)
        await pilot.press("y")
        reason = "job 3 is running and may be using it; stop it first"
        await until(pilot, lambda: text_of(screen, "status") == f"nothing cleared: {reason}")
        assert screen.query_one("#cache-status").has_class("-refused")
        await until(pilot, lambda: reason in all_said(app))
        caches.refusal = None
        await pilot.press("delete")
        await question(app, pilot)
        await pilot.press("y")
        await until(pilot, lambda: text_of(screen, "status").startswith("freed 40 KiB in 1 file "))
        assert not screen.query_one("#cache-status").has_class("-refused")


@pytest.mark.slow
async def test_what_could_not_be_deleted_is_told_and_what_is_left_is_shown(
    store: Store, caches: Caches
) -> None:
    caches.refusal = UserError("3 files could not be deleted: /a (Permission denied); 637 were")
    async with opened(store) as (app, pilot, screen):
        await pilot.press("j", "delete")
        await question(app, pilot)
        caches.held[1] = replace(caches.held[1], files=3)
        await pilot.press("y")
        await until(pilot, lambda: text_of(screen, "status").startswith("3 files could not be"))
        await until(pilot, lambda: screen.panel.caches[1].files == 3)


@pytest.mark.slow
async def test_a_failure_of_ours_does_not_lock_the_screen(store: Store, caches: Caches) -> None:
    caches.refusal = KeyError("latents")
    async with opened(store) as (app, pilot, screen):
        await pilot.press("delete")
        await question(app, pilot)
        await pilot.press("y")
        await until(pilot, lambda: text_of(screen, "status") == "clearing failed")
        await until(pilot, lambda: "KeyError: 'latents'" in all_said(app))
        await pilot.press("delete")
        await question(app, pilot)


@pytest.mark.slow
async def test_clearing_goes_on_when_the_screen_is_left_and_is_asked_for_once(
    store: Store, caches: Caches
) -> None:
    caches.allowed.clear()
    async with opened(store) as (app, pilot, screen):
        await pilot.press("delete")
        await question(app, pilot)
        await pilot.press("y")
        await until(pilot, lambda: text_of(screen, "status") == "clearing detection …")
        await pilot.press("delete", "a")
        assert app.screen is screen
        await pilot.press("escape")
        await until(pilot, lambda: app.screen is app.dashboard)
        caches.allowed.set()
        await until(
            pilot, lambda: "freed 40 KiB in 1 file from the detection cache" in all_said(app)
        )
        assert caches.cleared == [["detection"]]


@pytest.mark.slow
async def test_caches_that_cannot_be_read_are_told(store: Store, caches: Caches) -> None:
    caches.broken = PermissionError(13, "Permission denied")
    async with opened(store) as (_, pilot, screen):
        assert "Permission denied" in text_of(screen, "problem")
        assert screen.query_one("#cache-problem").display
        assert not screen.panel.display
        await pilot.press("delete", "a", "j")  # nothing to do anything with
        caches.broken = None
        await pilot.press("r")
        await until(pilot, lambda: screen.panel.display and screen.panel.rows)


@pytest.mark.slow
async def test_the_palette_leads_to_the_caches(store: Store, caches: Caches) -> None:
    add_job(store, state=State.COMPLETED)
    async with running(store, (80, 24)) as (app, pilot):
        entries = ActionsProvider(app.dashboard).entries()
        await next(entry for entry in entries if entry.keys == "C").do()  # type: ignore[misc]
        await until(pilot, lambda: isinstance(app.screen, CachesScreen))


@pytest.mark.slow
async def test_real_caches_are_kept_while_a_job_runs_and_cleared_when_it_has_ended(
    store: Store,
) -> None:
    job = add_job(store, "night", state=State.RUNNING)
    file = cache_home() / "latents" / "ab" / "abc.safetensors"
    file.parent.mkdir(parents=True)
    file.write_bytes(bytes(3 << 20))
    async with opened(store) as (app, pilot, screen):
        await pilot.press("a")
        await question(app, pilot)
        await pilot.press("y")
        await until(
            pilot,
            lambda: text_of(screen, "status").startswith(
                "nothing cleared: job 1 “night” is running"
            ),
        )
        assert file.exists()
        store.change(job.id, State.STOPPED, "stopped")
        await pilot.press("a")
        await question(app, pilot)
        await pilot.press("y")
        await until(pilot, lambda: text_of(screen, "status").startswith("freed 3 MiB in 1 file"))
        assert not file.exists()
        await until(pilot, lambda: text_of(screen, "totals").startswith("0 B in 0 files"))


@pytest.mark.parametrize("width", [44, 60, 76, 110, 190])
def test_rows_fit(width: int) -> None:
    held = [*Caches().held, Cache("an-odd-name", "words " * 30, Path("/x"), 10**13, 10**8)]
    rows = cache_rows(held, width)
    assert {cell_len(plain(row)) for row in rows} <= set(range(width + 1))
    assert len(rows) == len(held) + 1


def test_what_was_freed_in_words() -> None:
    assert amount([Cleared((), 2**20, 1), Cleared((), 0, 1)]) == "1 MiB in 2 files"
    assert freed(Cleared(("text",), 0, 0)) == "nothing to clear in the text cache"
    assert freed(Cleared(("a", "b"), 1024, 2)) == "freed 1 KiB in 2 files from the a and b caches"
