"""Work that ranks share: find what no cache has, do it together, meet. No collective is open."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine.data.cache import TensorCache
    from engine.meeting import Meeting
    from engine.progress import Progress
    from engine.telemetry import Telemetry
    from engine.world import World

_CHECKED_TOGETHER: Final = 64  # files that a rank takes at once to check
_READERS: Final = 4  # threads
_LARGEST_PIECE: Final = 16  # files that a rank takes at once to make


@dataclass
class Team:
    """The ranks of an attempt, as far as they share work."""

    world: World
    meeting: Meeting
    telemetry: Telemetry


def find_missing(cache: TensorCache, keys: Sequence[str], team: Team) -> list[str]:
    """The keys that have no sound file, in their order, the same list on every rank.

    Each file is read by one of the ranks and its checksum compared; damaged ones are removed and
    named in a warning.
    """
    keys = list(dict.fromkeys(keys))
    meeting, telemetry, place = team.meeting, team.telemetry, f"check-{cache.kind}"
    found: dict[str, str] = {}
    with (
        telemetry.phase("check", len(keys), shared=True) as progress,
        ThreadPoolExecutor(_READERS) as pool,
    ):
        cache.sweep()
        checked = 0
        for piece in pieces(keys, _CHECKED_TOGETHER, place, team):
            found |= zip(piece, pool.map(cache.check, piece), strict=True)
            checked += len(piece)
            progress(checked)
        wrong = {key: state for key, state in found.items() if state != "sound"}
        _meet(place, {"wrong": wrong, "done": checked}, team, progress)
    states: dict[str, str] = {}
    for word in meeting.words(place):
        states |= word["wrong"]
    damaged = [key for key in keys if states.get(key) == "damaged"]
    if damaged:
        telemetry.warn(
            f"{len(damaged)} cached {cache.kind} files are damaged and computed anew, such as "
            f"{cache.path(damaged[0])}"
        )
    return [key for key in keys if key in states]


def pieces(items: Sequence[str], size: int, work: str, team: Team) -> Iterator[list[str]]:
    """This rank's pieces of the work: whoever is ready takes the next."""
    for number, start in enumerate(range(0, len(items), size)):
        if team.meeting.claim(work, number):
            yield list(items[start : start + size])


def piece_size(count: int, ranks: int) -> int:
    """How many a rank takes at once: small enough that all are done at about the same time."""
    return max(1, min(_LARGEST_PIECE, count // (ranks * 8)))


@contextmanager
def together(phase: str, total: int, team: Team) -> Iterator[Shared]:
    """A phase whose work the ranks share, and at whose end all of it is done."""
    with team.telemetry.phase(phase, total, shared=True) as progress:
        shared = Shared(progress)
        yield shared
        _meet(phase, {"done": shared.done}, team, progress)


class Shared:
    """Counts what this rank does."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.done = 0

    def add(self, count: int = 1) -> None:
        """So many more are done."""
        self.done += count
        self._progress(self.done)


def _meet(place: str, word: dict[str, object], team: Team, progress: Progress) -> None:
    mine = int(str(word["done"]))
    team.meeting.arrive(place, word)
    team.meeting.wait(place, waiting=lambda: progress(mine))
    progress.ranks = [int(said["done"]) for said in team.meeting.words(place)]
