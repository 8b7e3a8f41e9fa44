"""Which logs a job has, and how a title offers them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from jobs.queue.store import Job

_MOST_RANKS = 4  # of the ranks beside the shown one that the title has room for


class Source(NamedTuple):
    """A log file of a job."""

    name: str
    path: Path


def log_sources(job: Job) -> list[Source]:
    """Each rank's log, then the launcher's and the supervisor's."""
    ranks = [Source(f"rank {rank}", job.run_dir.rank_log(rank)) for rank in range(job.ranks)]
    return [
        *ranks,
        Source("launcher", job.run_dir.launcher_log),
        Source("supervisor", job.run_dir.supervisor_log),
    ]


def log_title(sources: Sequence[Source], shown: int) -> str:
    """Return the title of the log panel, as markup."""
    return f"log · {log_choices(sources, shown)}"


def log_choices(sources: Sequence[Source], shown: int) -> str:
    """Markup: the shown log, and the others to click on; far ranks are omitted."""
    parts = []
    ranks = len(sources) - 2
    for index, source in enumerate(sources):
        near = index >= ranks or index < _MOST_RANKS or index == shown
        if not near:
            continue
        short = source.name if index in (0, shown) or index >= ranks else str(index)
        mark = f"[b]{short}[/b]" if index == shown else f"[dim]{short}[/dim]"
        parts.append(f"[@click=screen.show_log({index})]{mark}[/]")
    return " ".join(parts)
