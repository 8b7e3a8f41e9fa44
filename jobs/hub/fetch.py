"""`python -m jobs.hub.fetch KIND NAME`: download a model or a dataset into its cache.

The process outlives its starter and records its progress in a file, see `jobs.hub.fetches`.
Complete files are never downloaded again; after a connection failure, partial ones are resumed.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import sys
import threading
import time
from contextlib import suppress
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

from jobs.hub.fetches import Fetch, forget_start, is_to_end, lock_of
from jobs.hub.listing import check_room, list_files
from jobs.hub.stores import bytes_there, compare, copy_store
from jobs.hub.trouble import HubError, explain
from jobs.machine import file_lock
from jobs.machine.start_detached import leave_starter
from jobs.spec.values.hub_names import HubName, Kind, StoreUrl

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs.hub.listing import Listing
_POLL_INTERVAL: Final = 0.5  # seconds between two progress updates
_FIRST_PAUSE: Final = 1.0  # seconds after a temporary failure; the pause doubles each time
_LONGEST_PAUSE: Final = 60.0
_GIVES_UP: Final = 20  # consecutive failures without progress, about 15 minutes
_CHECKED_WITHIN: Final = 1.0  # seconds; a process that only checks the lock holds it briefly
_STALE: Final = 3600.0  # seconds since the last write to a partial file that nothing resumes
_HASH: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_SHA256: Final = 64  # hex digits
_PARTIAL: Final = ".incomplete"  # the suffix that `huggingface_hub` gives partial files


def fetch(
    name: HubName, tell: Callable[[Fetch], None], pause: Callable[[float], None] = time.sleep
) -> Path:
    """Download what a job reads, retrying temporary failures.

    Args:
        name: The model or dataset.
        tell: Called with every change of the progress.
        pause: Sleeps for these seconds before a retry.

    Returns:
        The folder in the cache.

    Raises:
        HubError: It cannot be downloaded.
    """
    failures, best = 0, 0
    # files that were there before were verified when they were downloaded
    of_store = isinstance(name, StoreUrl)
    intact = set() if of_store else {path.name for path in _blobs(name).glob("*")}
    while True:
        try:
            if isinstance(name, StoreUrl):
                return copy_store(name, tell, pause)
            listing = list_files(name)
            check_room(listing, name)
            return _download(name, listing, intact, tell)
        except Exception as error:
            trouble = explain(error, name)
            done = bytes_there(name) if isinstance(name, StoreUrl) else _bytes_there(name)
            failures = 1 if done > best else failures + 1
            best = max(best, done)
            if not trouble.passing or failures > _GIVES_UP:
                raise trouble from error
            tell(Fetch(state="waiting", reason=str(trouble)))
            pause(min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (failures - 1)))


def _download(
    name: HubName, listing: Listing, intact: set[str], tell: Callable[[Fetch], None]
) -> Path:
    from huggingface_hub import snapshot_download

    _remove_stale(_blobs(name))
    before, over = listing.total - listing.missing, threading.Event()

    def look() -> Fetch:
        done = before + _bytes_under_way() + _bytes_there(name) - there
        return Fetch("fetching", min(done, listing.total), listing.total)

    def watch() -> None:
        while not over.wait(_POLL_INTERVAL):
            tell(look())

    there = _bytes_there(name)
    tell(look())
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        folder = snapshot_download(
            name.repo,
            repo_type=name.kind,
            revision=name.revision,
            allow_patterns=[escape(path) for path in listing.files],
        )
    finally:
        over.set()
        watcher.join()
    # If the file listing cannot be read, the library returns whatever is cached, complete or not.
    for path, count in listing.files.items():
        if not _has(Path(folder, path), count):
            raise HubError(f"{path} of {name.repo} did not come through", passing=True)
    for path in listing.files:
        blob = Path(folder, path).resolve()
        if blob.name not in intact and not _is_intact(blob):
            blob.unlink()
            raise HubError(f"{path} of {name.repo} came through damaged", passing=True)
        intact.add(blob.name)
    return Path(folder, name.folder)


def _is_intact(blob: Path) -> bool:
    """Return whether a blob's contents match its name, which is their SHA-256 or git hash."""
    if not _HASH.fullmatch(blob.name):  # a cache without symlinks
        return True
    with open(blob, "rb") as file:
        if len(blob.name) == _SHA256:
            return hashlib.file_digest(file, "sha256").hexdigest() == blob.name
        digest = hashlib.sha1(b"blob %d\0" % blob.stat().st_size, usedforsecurity=False)
        digest.update(file.read())
        return digest.hexdigest() == blob.name


def _has(path: Path, count: int) -> bool:
    try:
        return path.stat().st_size == count
    except OSError:
        return False


def _blobs(name: HubName) -> Path:
    """Return the directory with the contents of a repository's files."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = repo_folder_name(repo_id=name.repo, repo_type=name.kind)
    return Path(constants.HF_HUB_CACHE, folder, "blobs")


def _bytes_there(name: HubName) -> int:
    """Return the bytes of the repository's complete files."""
    with suppress(OSError):
        return sum(
            os.stat(path).st_size
            for path in _blobs(name).iterdir()
            if not path.name.endswith(_PARTIAL)
        )
    return 0


def _under_way() -> set[str]:
    """Return the partial files that this process is writing."""
    paths = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{number}")
            if path.endswith(_PARTIAL):
                paths.add(path)
    return paths


def _bytes_under_way() -> int:
    total = 0
    for path in _under_way():
        with suppress(OSError):
            status = os.stat(path)
            total += min(
                status.st_size, status.st_blocks * 512
            )  # for a sparse file, count only allocated blocks
    return total


def _remove_stale(blobs: Path) -> None:
    """Remove partial files that killed processes left; nothing resumes them."""
    with suppress(OSError):
        for path in blobs.glob(f"*{_PARTIAL}"):
            if time.time() - path.stat().st_mtime > _STALE:
                path.unlink()


def _leave(number: int, _: Any) -> None:
    """Exit at once, without joining threads, and leave no partial files on disk."""
    for path in _under_way():
        with suppress(OSError):
            os.unlink(path)
    os._exit(128 + number)


def main() -> int:
    """Download unless another process does; return the exit status."""
    leave_starter()
    kind, text = sys.argv[1:]
    assert kind in get_args(Kind)
    name = HubName.read(kind, text)  # type: ignore[arg-type]
    assert name is not None
    with open(lock_of(name), "a") as lock:
        if not file_lock.acquire(lock, _CHECKED_WITHIN):
            return 0
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _leave)
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
        return _run(name)


def _run(name: HubName) -> int:
    latest = Fetch("fetching")

    def tell(now: Fetch) -> None:
        nonlocal latest
        # Keep the last known progress while waiting for the network.
        latest = now if now.total else now.of(latest.done, latest.total)
        with suppress(OSError):
            latest.write(name)

    tell(latest)
    if is_to_end(name):
        forget_start(name)
        return 1
    try:
        before = name.digest if isinstance(name, StoreUrl) else ""
        folder = fetch(name, tell)
        difference = compare(before, name) if isinstance(name, StoreUrl) else ""
    except HubError as error:
        tell(Fetch("failed", reason=str(error)))
        return 2
    tell(Fetch("done", latest.total, latest.total, difference, str(folder)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
