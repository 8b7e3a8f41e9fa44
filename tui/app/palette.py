"""The command palette: actions of the screen, those that fit the job first, and jobs by name."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.content import Content
from textual.markup import escape

from tui.dashboard.screen import DashboardScreen
from tui.keys.screen_keys import EVERYWHERE, screen_keys
from tui.widgets.job_actions import JobActions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tui.app.app import FsdpTui
    from tui.keys.screen_keys import ScreenKey
    from tui.look.snapshot import JobView

_DISCOVERED: Final = 5  # jobs that are offered before anything is typed
_COLUMN: Final = 10  # columns of keys
_LATER: Final = 0.5  # of the score of what does not fit the job
_OWN: Final = ("app.command_palette",)  # what is open already


@dataclass(frozen=True)
class Entry:
    """One line of the palette.

    Attributes:
        keys: As people read them; "" for what has none.
        title: What it does.
        about: More about that, or "".
        words: By which it is found as well.
        do: What choosing it does.
        place: Where it stands before anything is typed; None: only who looks for it finds it.
        fits: Whether it makes sense now.
    """

    keys: str
    title: str
    about: str
    words: str
    do: Callable[[], object]
    place: int | None
    fits: bool = True

    @property
    def below(self) -> str | None:
        """A second line under the title, as markup."""
        return " " * _COLUMN + escape(self.about) if self.about else None

    def shown(self, title: Content | None = None) -> Content:
        keys = Content.styled(f"{self.keys:<{_COLUMN}}", "$accent")
        return Content.assemble(keys, title if title is not None else Content(self.title))


class ActionsProvider(Provider):
    """Actions of the screen with their keys, each once; on the dashboard, jobs too."""

    @property
    def ours(self) -> FsdpTui:
        return self.app  # type: ignore[return-value]

    async def discover(self) -> Hits:
        offered = [entry for entry in self.entries() if entry.place is not None and entry.fits]
        for entry in sorted(offered, key=lambda entry: entry.place or 0):
            yield DiscoveryHit(entry.shown(), entry.do, entry.title, entry.below)

    async def search(self, query: str) -> Hits:
        """Those that have the words; only without any, those that have the letters."""
        words = query.casefold().split()
        entries = list(self.entries())
        having = [
            entry for entry in entries if all(word in entry.words.casefold() for word in words)
        ]
        matcher = self.matcher(query)
        for entry in having or entries:
            score = 1.0 + matcher.match(entry.title) if having else matcher.match(entry.title)
            if score > 0:
                title = entry.shown(matcher.highlight(entry.title))
                score *= 1.0 if entry.fits else _LATER
                yield Hit(score, title, entry.do, entry.title, entry.below)

    def entries(self) -> Iterator[Entry]:
        """All of them, each title once."""
        seen: set[str] = set()
        for entry in (*self._actions(), *self._jobs(), self._themes()):
            if entry.title not in seen:
                seen.add(entry.title)
                yield entry

    def _actions(self) -> Iterator[Entry]:
        job = self.screen.job_acted_on if isinstance(self.screen, JobActions) else None
        for key in screen_keys(self.screen):
            if key.id in _OWN:
                continue
            do = partial(self.app.run_action, key.action, key.node)
            fits = key.entry is None or key.entry.fits(job)
            place = None if key.moves else self._place(key)
            about = key.help.partition(": ")[2]
            words = f"{key.title} {key.label} {key.help}"
            yield Entry(key.shown, key.title, about, words, do, place, fits)

    def _place(self, key: ScreenKey) -> int:
        if key.section == EVERYWHERE:
            return 4
        if key.entry is not None and key.entry.group == "app":
            return 4
        if key.node is not self.screen:
            return 2
        return 0 if key.entry is not None and key.entry.needs not in ("nothing", "job") else 1

    def _jobs(self) -> Iterator[Entry]:
        screen = self.screen
        views = screen.snapshot.jobs if isinstance(screen, DashboardScreen) else ()
        for number, view in enumerate(views):
            title = f"Go to job {view.job.id} “{view.job.name}”"
            go = partial(self._go, view.job.id)
            place = 3 if number < _DISCOVERED else None
            yield Entry("", title, _state_of(view), title, go, place)

    def _themes(self) -> Entry:
        choose = self.ours.search_themes
        return Entry("", "Choose a theme", "", "Choose a theme", choose, 4)

    def _go(self, job: int) -> None:
        screen = self.screen
        if isinstance(screen, DashboardScreen):
            screen.jobs.awaited = job  # the next look selects it, if it is still there
            screen.app.collector.wake()


def _state_of(view: JobView) -> str:
    reason = f": {view.job.reason}" if view.job.reason else ""
    return f"{view.job.state}{reason}"
