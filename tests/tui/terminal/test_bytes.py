"""What is sent to the terminal: nothing without a change, never more than the link can take."""

from __future__ import annotations

import fcntl
import os
import sys
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from jobs.queue.states import State
from tests.support.paths import ROOT
from tests.support.tui.emulated_screen import EmulatedScreen
from tests.support.tui.made_up_runs import add_job, write_log
from tests.support.tui.pilot import driven
from tests.support.tui.terminal import terminal
from tests.support.waiting import eventually
from tui.app.app import FsdpTui
from tui.terminal import driver
from tui.terminal.driver import ByteBudget, GovernedDriver
from tui.text.format import Span
from tui.widgets.lines import changed_cells

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from jobs.queue.store import Store
    from tests.support.nvml_stub.stub import StubNvml
    from tests.support.tui.terminal import Terminal
    from tui.text.format import Row

pytest_plugins = ["tests.support.nvml_stub.fixture"]

# Changes every cell sixty times a second; a key adds to what it shows, and to a file.
RESTLESS = """
import os, sys
sys.path.insert(0, {root!r})
from textual.app import App
from textual.widgets import Static
from tui.terminal.driver import GovernedDriver
class Restless(App):
    def compose(self):
        self.count, self.keys = 0, ""
        self.text = Static("")
        yield self.text
    def on_mount(self):
        self.set_interval(1 / 60, self.paint)
    def paint(self):
        self.count += 1
        with open({seen!r} + ".new", "w") as file:
            file.write(f"{{self.count}} {{self.keys}}")
        os.replace({seen!r} + ".new", {seen!r})
        turned = f"keys:{{self.keys}}0123456789-" * 300
        self.text.update(turned[self.count % 16:][:4000])
    def on_key(self, event):
        self.keys += event.character or ""
Restless(driver_class=GovernedDriver).run()
"""

# A key makes a picture at once, but just then the terminal can take nothing.
HELD = """
import sys
sys.path.insert(0, {root!r})
from textual.app import App
from textual.widgets import Static
from tui.terminal.driver import GovernedDriver
class Held(App):
    def compose(self):
        yield Static("keys:")
    def on_key(self, event):
        self._driver._hold(0.2)
        text = self.query_one(Static)
        text.update("keys:" + event.character)
        self.screen._compositor.update_widgets({{text}})
        self.screen._compositor_refresh()
    def post_display_hook(self):
        self._driver.picture_ended()
Held(driver_class=GovernedDriver).run()
"""

# The dashboard; after each picture a file holds all that the screen consists of.
WATCHED = """
import os, sys
from jobs.queue.store import Store
from tui.app.app import FsdpTui
def show_all(app):
    lines = enumerate(app.screen._compositor.render_strips(), 1)
    with open({seen!r} + ".new", "w") as file:
        file.write("".join(f"\\x1b[{{y}};1H{{line.render(app.console)}}" for y, line in lines))
    os.replace({seen!r} + ".new", {seen!r})
    ended(app)
ended, FsdpTui.post_display_hook = FsdpTui.post_display_hook, show_all
FsdpTui(Store()).run()
"""


def environment(store: Store, base: dict[str, str]) -> dict[str, str]:
    here = dict.fromkeys(("FSDP_TUI_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"), str(store.home))
    return base | here | {"PYTHONPATH": str(ROOT)}


@contextmanager
def dashboard(
    store: Store, env: dict[str, str], size: tuple[int, int] = (80, 24)
) -> Iterator[Terminal]:
    """The dashboard on a terminal; the lock keeps it from starting a queue keeper."""
    with open(store.home / "runner.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = (sys.executable, "-m", "tui")
        with terminal(command, environment(store, env), size) as shown:
            shown.wait_for(lambda text: "quiet" in text)
            yield shown


def restless(seen: Path) -> tuple[str, ...]:
    """The command of a program that never rests and writes what it counted to `seen`."""
    return sys.executable, "-c", RESTLESS.format(root=str(ROOT), seen=str(seen))


# -- on a real terminal --------------------------------------------------------------------


@pytest.mark.slow
def test_nothing_changes_and_nothing_is_sent(store: Store, nvml_stub: StubNvml) -> None:
    nvml_stub.write(2)
    job = add_job(store, "quiet")
    store.hold(job.id, held=True)
    with dashboard(store, nvml_stub.environment) as shown:
        shown.wait_for(lambda _: shown.shows("q quit"))
        shown.wait_quiet(3.0)  # several looks; the clock may turn before, but not every second
        before = shown.received
        store.claim(job.id, [], "starting on CPU ranks")
        store.change(job.id, State.RUNNING, "all ranks are up")
        shown.forget()
        shown.wait_for(lambda text: "running" in text)
        assert shown.received - before < 8000  # the lines that changed, not the screen


@pytest.mark.slow
def test_f5_sends_all_again(store: Store, nvml_stub: StubNvml) -> None:
    """What another program wrote on the terminal is not known to us, and must go."""
    nvml_stub.write(2)
    store.hold(add_job(store, "quiet").id, held=True)
    with dashboard(store, nvml_stub.environment) as shown:
        shown.wait_quiet(2.0)
        shown.forget()
        shown.press("\x1b[15~")
        shown.wait_for(lambda text: "quiet" in text and "GPU" in text)


@pytest.mark.slow
def test_a_screen_over_the_dashboard_comes_to_rest(store: Store, nvml_stub: StubNvml) -> None:
    """A look at the screen below would repaint the one on top, to be held back again."""
    nvml_stub.write(2)
    job = add_job(store, "quiet", state=State.COMPLETED, reason="trained 200 steps")
    write_log(job, "".join(f"a line of some length, number {n}\n" for n in range(200)))
    with dashboard(store, nvml_stub.environment, (120, 40)) as shown:
        shown.press("i")
        shown.wait_for(lambda text: "overview" in text)
        shown.press("3")
        shown.wait_for(lambda _: shown.shows("number 199"))
        shown.wait_quiet(2.0)


@pytest.mark.slow
def test_keys_are_handled_while_the_terminal_takes_nothing(tmp_path: Path) -> None:
    seen = tmp_path / "seen"

    def now() -> tuple[int, str]:
        count, _, keys = seen.read_text().partition(" ") if seen.exists() else ("0", "", "")
        return int(count), keys

    with terminal(restless(seen), dict(os.environ), (120, 40)) as shown:
        shown.wait_for(lambda text: "keys:" in text)
        shown.stall()
        begun, _ = now()
        # As many pictures would block the loop.
        eventually(lambda: now()[0] > begun + 150, told=now)
        shown.press("z")
        eventually(lambda: now()[1] == "z", told=now)
        shown.forget()
        shown.go_on()
        shown.wait_for(lambda text: "keys:z" in text)


@pytest.mark.slow
def test_a_restless_screen_stays_within_the_budget_and_answers_keys(tmp_path: Path) -> None:
    with terminal(restless(tmp_path / "seen"), dict(os.environ), (120, 40)) as shown:
        shown.wait_for(lambda text: "keys:" in text)
        begun, before = time.monotonic(), shown.received
        shown.wait_for(lambda _: shown.received - before >= 150_000)
        got = shown.received - before
        spare = driver.SAVED + 20_000  # one picture goes over the line
        assert time.monotonic() - begun >= (got - spare) / driver.RATE
        shown.forget()
        shown.press("z")
        shown.wait_for(lambda text: "keys:z" in text)


@pytest.mark.slow
def test_a_name_that_is_no_utf8_is_shown_and_ends_nothing(tmp_path: Path) -> None:
    odd = RESTLESS.replace('"keys:', '"\\udce9keys:')
    command = sys.executable, "-c", odd.format(root=str(ROOT), seen=str(tmp_path / "seen"))
    with terminal(command, dict(os.environ)) as shown:
        shown.wait_for(lambda text: "?keys:" in text)
        shown.press("z")
        shown.wait_for(lambda text: "?keys:z" in text)


@pytest.mark.slow
def test_the_terminal_shows_what_the_screen_consists_of(
    store: Store, nvml_stub: StubNvml, tmp_path: Path
) -> None:
    nvml_stub.write(2)
    job = add_job(store, "quiet", state=State.COMPLETED, reason="trained 200 steps")
    write_log(job, "".join(f"line {n} \x1b[3{n % 7}m漢字 é\x1b[0m of it\n" for n in range(300)))
    seen, size = tmp_path / "seen", (100, 30)
    command = sys.executable, "-c", WATCHED.format(seen=str(seen))
    # A shell may have told its programs a size that the terminal had once.
    odd = {"XDG_CACHE_HOME": str(tmp_path), "COLUMNS": "70", "LINES": "20"}
    env = environment(store, nvml_stub.environment | odd)
    with open(store.home / "runner.lock", "a") as lock, terminal(command, env, size) as shown:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def is_shown(what: str) -> Callable[[str], bool]:
            """Whether the terminal shows this, and every cell as it is to be."""

            def check(_: str) -> bool:
                got, wanted = EmulatedScreen(size), EmulatedScreen(size)
                wanted.feed(seen.read_text() if seen.exists() else "")
                with suppress(AssertionError):  # the last code has come in part
                    got.feed(shown.raw)
                return got.cells == wanted.cells and any(what in line for line in got.lines)

            return check

        shown.wait_for(is_shown("line 299 漢字"))
        shown.press("\x1b[?2026;2$y")  # it can take a picture at once
        for key, what in (
            ("?", "esc close"),
            ("?", "╭─ devices"),
            ("l", "line 298"),
            ("g", "line 0 漢字"),
            ("q", "╭─ devices"),
            ("n", "family"),
            ("\x1b", "╭─ devices"),
        ):
            shown.press(key)
            shown.wait_for(is_shown(what))
        shown.wait_quiet(0.3)
        shown.forget()
        size = (80, 24)
        shown.resize(size)
        shown.wait_for(is_shown("line 299 漢字"))
        shown.wait_quiet(0.3)
        shown.forget()  # a window dragged to and fro may have lost what it showed
        shown.resize((90, 24))
        shown.resize(size)
        shown.wait_for(is_shown("line 299 漢字"))
        shown.forget()
        size = (100, 30)
        shown.resize(size, tell=False)  # as in a container, whose end of it gets no signal
        shown.wait_for(is_shown("line 299 漢字"))


@pytest.mark.slow
def test_a_terminal_that_has_no_size_yet_gets_the_usual_one(
    store: Store, nvml_stub: StubNvml
) -> None:
    nvml_stub.write(2)
    add_job(store, "quiet", state=State.COMPLETED, reason="trained 200 steps")
    with dashboard(store, nvml_stub.environment, (0, 0)) as shown:  # as in a container
        shown.forget()
        shown.resize((120, 40), tell=False)
        shown.wait_for(lambda _: shown.shows("╭─ devices") and len(shown.lines[1]) == 120)


@pytest.mark.slow
def test_a_picture_made_while_nothing_may_be_painted_is_made_again() -> None:
    with terminal((sys.executable, "-c", HELD.format(root=str(ROOT))), dict(os.environ)) as shown:
        shown.wait_for(lambda _: shown.shows("keys:"))
        shown.press("a")
        shown.wait_for(lambda _: shown.shows("keys:a"))


def test_only_a_real_terminal_has_the_budget(store: Store) -> None:
    assert FsdpTui(store).driver_class is GovernedDriver


async def test_tests_and_browsers_have_their_own_driver(
    store: Store, no_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = FsdpTui(store)
    async with driven(app):
        assert not isinstance(app._driver, GovernedDriver)
    monkeypatch.setattr("textual.constants.DRIVER", "textual.drivers.web_driver:WebDriver")
    assert FsdpTui(store).driver_class.__name__ == "WebDriver"


# -- the budget ----------------------------------------------------------------------------


def test_a_rested_budget_paints_a_screen_at_once_and_then_waits() -> None:
    budget = ByteBudget(0.0)
    assert budget.wait(0.0) == 0
    budget.spend(0.0, int(driver.SAVED) + 10_000)
    assert budget.wait(0.0) == pytest.approx(0.2)
    assert budget.wait(0.1) == pytest.approx(0.1)
    assert budget.wait(0.2) == pytest.approx(0.0)


def test_what_answers_a_key_may_borrow_but_not_without_end() -> None:
    budget = ByteBudget(0.0)
    budget.spend(0.0, int(driver.SAVED) + 40_000)
    assert budget.wait(0.0) > 0
    budget.asked_at = 0.0
    assert budget.wait(0.0) == 0
    budget.spend(0.0, 20_000)
    assert budget.wait(0.0) == pytest.approx(0.2)
    assert budget.wait(driver.ANSWERS_WITHIN + 0.1) > 0  # the answer has been painted


def test_a_terminal_that_takes_nothing_stops_painting_even_for_keys() -> None:
    budget = ByteBudget(0.0, asked_at=0.0)
    assert budget.wait(0.0, driver.MOST_BYTES_BEHIND + 1, 1) > 0
    assert budget.wait(0.0, 10, driver.MOST_WRITES_BEHIND + 1) > 0
    assert budget.wait(0.0, 10, 1) == 0


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(0, 60_000)), max_size=60))
def test_over_any_time_no_more_is_sent_than_rate_and_savings(
    frames: list[tuple[float, int]],
) -> None:
    now, sent, largest = 0.0, 0, 0
    budget = ByteBudget(now)
    for pause, count in frames:
        now += pause
        now += budget.wait(now)
        budget.spend(now, count)
        sent, largest = sent + count, max(largest, count)
        assert sent <= driver.SAVED + driver.RATE * now + largest + 1


# -- lines ---------------------------------------------------------------------------------

ROWS = st.lists(
    st.builds(Span, st.text("ab ━漢", max_size=6), st.sampled_from(("", "dim"))), max_size=6
).map(tuple)


@given(ROWS, ROWS)
def test_every_cell_that_changed_is_painted_again(old: Row, new: Row) -> None:
    cells = changed_cells(old, new)
    before, after = (
        [(c, s.role) for s in row for c in s.text for _ in range(cell_len(c))] for row in (old, new)
    )
    width = max(len(before), len(after))
    before += [(" ", "")] * (width - len(before))
    after += [(" ", "")] * (width - len(after))
    assert all(before[at] == after[at] for at in range(width) if at not in cells)


def test_a_number_in_front_does_not_send_the_rest_of_the_line() -> None:
    tail = (Span(" ━━━━┄┄┄┄ #12 demo r0"),)
    assert changed_cells((Span("97%"), *tail), (Span("98%"), *tail)) == range(3)
