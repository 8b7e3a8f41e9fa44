"""Content-addressed tensor files, shared by jobs and ranks, and the split of work to fill them."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
import uuid
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, Literal

from jobs.errors import NotFiniteError, UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import torch

    from engine.ranks.team import Team
    from engine.ranks.telemetry import Progress


# -- tensor cache ---------------------------------------------------------------------------
# Content-addressed tensor files: written atomically, checksummed, shared by jobs and ranks.
#
# A file's name is a hash of every input that determines its content. Two jobs that need the same
# latents therefore share a file, a killed run leaves only complete files, and a changed image or
# caption maps to a new name. A checksum in the header detects corruption.


State = Literal["sound", "missing", "damaged"]

_SCHEMA: Final = 2
_SAMPLED_BLOCKS: Final = 64
_BLOCK: Final = 64 << 10
_CHECKSUM: Final = "crc32"
_SEEN_WITHIN: Final = 90.0  # seconds; NFS may cache a failed lookup for up to 60
_POLL_EVERY: Final = 0.5  # seconds
_ABANDONED: Final = 3600.0  # seconds after which an unfinished file counts as abandoned


class CacheError(RuntimeError):
    """A cached file became unreadable or corrupt during the job. Retrying recomputes it."""


class TensorCache:
    """One kind of cached tensors (`latents` or `text`) in a subdirectory of the cache."""

    def __init__(self, root: Path, kind: str) -> None:
        self.kind = kind
        self.root = root / kind
        self.root.mkdir(parents=True, exist_ok=True)

    def key(self, **facts: Any) -> str:
        """Return the file name for content determined by these facts, which must be JSON values."""
        text = json.dumps({"schema": _SCHEMA, **facts}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:40]

    def path(self, key: str) -> Path:
        return self.root / key[:2] / f"{key}.safetensors"

    def check(self, key: str) -> State:
        """Read the entire file and verify its checksum; remove the file if it is invalid.

        Files with non-finite values are removed too, since earlier versions could write them.
        """
        from safetensors.torch import load

        path = self.path(key)
        try:
            content = path.read_bytes()
            if _sound(content) and not nonfinite(load(content)):
                return "sound"
        except FileNotFoundError:
            return "missing"
        except OSError:  # may be transient: keep the file, which will be overwritten
            return "damaged"
        with suppress(OSError):
            path.unlink()
        return "damaged"

    def write(self, key: str, tensors: dict[str, torch.Tensor]) -> None:
        """Write a file atomically. Concurrent writers of a key write the same content.

        Raises:
            UserError: The disk is full or not writable.
            NotFiniteError: A tensor has non-finite values; no file is written.
        """
        from safetensors.torch import save

        if bad := nonfinite(tensors):
            raise NotFiniteError(
                f"{', '.join(bad)} for the cache {self.root} have values that are not finite",
                "resume the job to compute them again",
            )

        path = self.path(key)
        content = save(tensors)
        content = save(tensors, metadata={_CHECKSUM: _checksum(content)})
        aside = path.with_name(f".{key}.{uuid.uuid4().hex[:12]}.tmp")
        try:
            path.parent.mkdir(exist_ok=True)
            aside.write_bytes(content)
            os.replace(aside, path)
        except OSError as error:
            raise UserError(
                f"cannot write to the cache {self.root} ({error.strerror or error})",
                "free space, or set cache_dir to another directory; cached files are kept",
            ) from error
        finally:
            with suppress(OSError):
                aside.unlink(missing_ok=True)

    def read(self, key: str) -> dict[str, torch.Tensor]:
        """Return the tensors of a file that existed when the job checked the cache.

        Raises:
            CacheError: The file is missing or damaged. A damaged file is removed so that the next
                attempt recomputes it.
        """
        from safetensors.torch import load

        path = self.path(key)
        try:
            content = _read_again(path)
        except OSError as error:
            raise CacheError(
                f"{path} cannot be read ({error.strerror}) although the job cached it; resume the "
                "job to recompute it"
            ) from None
        if not _sound(content):
            path.unlink(missing_ok=True)
            raise CacheError(
                f"{path} was damaged after the job checked it, and was deleted; check the disk, "
                "then resume the job to recompute it"
            )
        return load(content)

    def sweep(self) -> None:
        """Remove temporary files of killed writers."""
        for path in self.root.glob("*/.*.tmp"):
            try:
                if time.time() - path.stat().st_mtime > _ABANDONED:
                    path.unlink()
            except OSError:  # another job is sweeping too
                continue


def _read_again(path: Path) -> bytes:
    """Read a file that another machine may have written a moment ago.

    A network file system may cache a failed lookup for a minute. Listing the directory forces a
    request to the server; if the file is listed, wait until it can be opened.

    Raises:
        OSError: The file does not exist or cannot be read.
    """
    until = time.monotonic() + _SEEN_WITHIN
    while True:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            if path.name not in os.listdir(path.parent) or time.monotonic() > until:
                raise
            time.sleep(_POLL_EVERY)


def nonfinite(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors that hold a NaN or an infinity. Synchronizes with their device.

    Compare minimum and maximum, which propagate both: `isfinite` takes 50 times as long on a CPU.
    """
    return [
        name
        for name, tensor in tensors.items()
        if tensor.is_floating_point()
        and tensor.numel()
        and not all(math.isfinite(extreme) for extreme in tensor.detach().aminmax())
    ]


def grid_of(path: Path) -> tuple[int, int]:
    """Return the height and width of cached latents, reading only the file's header."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        *_, height, width = file.get_slice("latents").get_shape()
    return int(height), int(width)


def fingerprint(directory: Path) -> str:
    """Hash a model component: the full content of small files, size and samples of large ones.

    Reading 64 blocks of a 9 GB encoder takes milliseconds; reading all of it takes seconds per
    rank.
    """
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        if not path.is_file():
            continue
        size = path.stat().st_size
        digest.update(f"{path.relative_to(directory)}:{size}".encode())
        with open(path, "rb") as file:
            if size <= _SAMPLED_BLOCKS * _BLOCK:
                digest.update(file.read())
                continue
            for block in range(_SAMPLED_BLOCKS):
                file.seek((size - _BLOCK) * block // (_SAMPLED_BLOCKS - 1))
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()[:24]


def _checksum(content: bytes) -> str:
    """Return the CRC32 of a safetensors file's tensors: names, dtypes, shapes and bytes."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    names = json.dumps(header, sort_keys=True).encode()
    return f"{zlib.crc32(memoryview(content)[8 + length :], zlib.crc32(names)):08x}"


def _sound(content: bytes) -> bool:
    """Return whether a file's stored checksum matches its tensors."""
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > len(content) - 8:
        return False
    try:
        header = json.loads(content[8 : 8 + length])
        return bool(header["__metadata__"][_CHECKSUM] == _checksum(content))
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


# -- shared work ----------------------------------------------------------------------------
# Ranks find the missing cache entries, split the work, and wait for each other at file barriers. No
# collective is open meanwhile, so a slow rank cannot cause an NCCL timeout.


_CHECKED_TOGETHER: Final = 64  # files that a rank claims at a time to check
_READERS: Final = 4  # threads
_LARGEST_PIECE: Final = 16  # files that a rank claims at a time to compute


def find_missing(cache: TensorCache, keys: Sequence[str], team: Team) -> list[str]:
    """Return the keys without a valid file, in order, the same list on every rank.

    Each file is read and verified by one rank. Damaged files are removed and reported in a warning.

    Raises:
        StoppedError: A stop was requested on any rank; raised on all of them.
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
        words = _sync(place, {"wrong": wrong, "done": checked}, team, progress)
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
    """Yield the pieces of work that this rank claims; the next free rank claims the next piece.

    Once the rank sees a stop request, it starts no further piece or item. All ranks leave at the
    next barrier.
    """
    for number, start in enumerate(range(0, len(items), size)):
        if team.stop_requested():
            return
        if team.barrier.claim(work, number):
            yield _until_stop(items[start : start + size], team)


def _until_stop(items: Sequence[str], team: Team) -> Iterator[str]:
    for item in items:
        if team.stop_requested():
            return
        yield item


def piece_size(count: int, ranks: int) -> int:
    """Return how many items a rank claims at a time: few enough that ranks finish together."""
    return max(1, min(_LARGEST_PIECE, count // (ranks * 8)))


@contextmanager
def together(phase: str, total: int, team: Team) -> Iterator[Shared]:
    """Run a phase whose work the ranks share. All of the work is done when it exits.

    Raises:
        StoppedError: A stop was requested before the work was done; raised at the end, on all
            ranks.
    """
    with team.telemetry.phase(phase, total, shared=True) as progress:
        shared = Shared(progress)
        yield shared
        _sync(phase, {"done": shared.done}, team, progress)


class Shared:
    """Counts the items that this rank has finished and reports progress."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.done = 0

    def add(self, count: int = 1) -> None:
        """Add to the number of finished items."""
        self.done += count
        self._progress(self.done)


def _sync(place: str, word: dict[str, Any], team: Team, progress: Progress) -> list[dict[str, Any]]:
    """Publish this rank's result, wait for all ranks, and return the results in rank order."""
    mine: int = word["done"]
    team.arrive(place, word)
    team.barrier.wait(place, waiting=lambda: progress.say(mine))
    words = team.words(place)
    progress.ranks = [theirs["done"] for theirs in words]
    return words
