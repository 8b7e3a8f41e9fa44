"""Work that ranks share: find what no cache has, do it together, meet. No collective is open."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine.data.encode.tensor_cache import TensorCache
    from engine.ranks.progress import Progress
    from engine.ranks.team import Team

_CHECKED_TOGETHER: Final = 64  # files that a rank takes at once to check
_READERS: Final = 4  # threads
_LARGEST_PIECE: Final = 16  # files that a rank takes at once to make


def find_missing(cache: TensorCache, keys: Sequence[str], team: Team) -> list[str]:
    """Return the keys that have no sound file, in their order, the same list on every rank.

    Each file is read by one of the ranks and its checksum compared; damaged ones are removed and
    named in a warning.

    Raises:
        StoppedError: A rank wants to stop; raised on all of them.
    """
    keys = list(dict.fromkeys(keys))
    telemetry, place = team.telemetry, f"check-{cache.kind}"
    states: dict[str, str] = {}
    with (
        telemetry.phase("check", len(keys), shared=True) as progress,
        ThreadPoolExecutor(_READERS) as pool,
    ):
        if team.world.main:
            cache.sweep()
        checked = 0
        for piece in map(list, pieces(keys, _CHECKED_TOGETHER, place, team)):
            states |= zip(piece, pool.map(cache.check, piece), strict=True)
            checked += len(piece)
            progress(checked)
        wrong = {key: state for key, state in states.items() if state != "sound"}
        words = _meet(place, {"wrong": wrong, "done": checked}, team, progress)
    all_wrong: dict[str, str] = {}
    for word in words:
        all_wrong |= word["wrong"]
    damaged = [key for key in keys if all_wrong.get(key) == "damaged"]
    if damaged:
        telemetry.warn(
            f"{len(damaged)} cached {cache.kind} files are damaged and will be recomputed, such as "
            f"{cache.path(damaged[0])}"
        )
    return [key for key in keys if key in all_wrong]


def pieces(items: Sequence[str], size: int, work: str, team: Team) -> Iterator[Iterator[str]]:
    """Yield this rank's pieces of the work; the next free rank takes the next piece.

    After the rank sees a stop request, it starts no other piece and no other item of this one.
    All ranks leave at the next barrier.
    """
    for number, start in enumerate(range(0, len(items), size)):
        if team.wants_stop():
            return
        if team.barrier.claim(work, number):
            yield _until_stop(items[start : start + size], team)


def _until_stop(items: Sequence[str], team: Team) -> Iterator[str]:
    for item in items:
        if team.wants_stop():
            return
        yield item


def piece_size(count: int, ranks: int) -> int:
    """How many a rank takes at once: small enough that all are done at about the same time."""
    return max(1, min(_LARGEST_PIECE, count // (ranks * 8)))


@contextmanager
def together(phase: str, total: int, team: Team) -> Iterator[Shared]:
    """Run a phase whose work the ranks share; at its end, all of the work is done.

    Raises:
        StoppedError: A rank wants to stop, so that it is not; raised at the end, on all ranks.
    """
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
        """Count more that are done."""
        self.done += count
        self._progress(self.done)


def _meet(place: str, word: dict[str, Any], team: Team, progress: Progress) -> list[dict[str, Any]]:
    """Wait for all ranks and return their words."""
    mine: int = word["done"]
    team.arrive(place, word)
    team.barrier.wait(place, waiting=lambda: progress.say(mine))
    words = team.words(place)
    progress.ranks = [theirs["done"] for theirs in words]
    return words
