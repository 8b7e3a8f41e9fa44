"""What the command palette offers beside actions: jobs by their name."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from textual.command import DiscoveryHit, Hit, Hits, Provider

from tui.dashboard.screen import DashboardScreen

if TYPE_CHECKING:
    from tui.look.snapshot import JobView

_DISCOVERED = 5  # jobs that are offered before anything is typed


class JobsProvider(Provider):
    """`go to job 3 “cats”`, on the dashboard."""

    async def discover(self) -> Hits:
        for view in self._views()[:_DISCOVERED]:
            yield DiscoveryHit(_words(view), partial(self._go, view.job.id), help=_help(view))

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for view in self._views():
            words = _words(view)
            if (score := matcher.match(words)) > 0:
                go = partial(self._go, view.job.id)
                yield Hit(score, matcher.highlight(words), go, help=_help(view))

    def _views(self) -> tuple[JobView, ...]:
        screen = self.screen
        return screen.snapshot.jobs if isinstance(screen, DashboardScreen) else ()

    def _go(self, job: int) -> None:
        screen = self.screen
        if isinstance(screen, DashboardScreen):
            screen.jobs.awaited = job  # the next look selects it, if it is still there
            screen.app.collector.wake()


def _words(view: JobView) -> str:
    return f"Go to job {view.job.id} “{view.job.name}”"


def _help(view: JobView) -> str:
    reason = f": {view.job.reason}" if view.job.reason else ""
    return f"{view.job.state}{reason}"
