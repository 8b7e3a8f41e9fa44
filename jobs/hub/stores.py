"""Copy a dataset from an object store into the cache, through fsspec.

Objects are fetched by range into `….part` files, which a later process continues: what is repeated
after a cut is the one range that was under way. A part becomes an object only after another listing
shows that the store still has the version it was fetched from, and a snapshot is published only
when all of its objects are there. `jobs.spec.values.hub_names.StoreUrl` describes the files.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import threading
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from jobs.hub.fetches import Fetch
from jobs.hub.listing import Listing, check_room, is_data
from jobs.hub.trouble import HubError, explain, no_room
from jobs.machine import file_lock
from jobs.run.rundir import read_json, sync, write_atomic
from jobs.units import named_counts

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from jobs.spec.values.hub_names import StoreUrl

_RANGE: Final = 2 << 20  # bytes of a request: what a cut connection may lose
_CONNECTIONS: Final = 16
_TRIES: Final = 5  # of a range, before all wait for the network
_FIRST_PAUSE: Final = 0.5  # seconds before the second try; doubles each time
_TOLD_EVERY: Final = 0.5  # seconds
_LONGEST_NAME: Final = 255  # bytes
_ROUNDS: Final = 5  # listings that differ from the one before
# What stores call an object's version, the most exact first.
_VERSIONS: Final = (
    *("ETag", "etag", "generation", "md5Hash", "blob_id", "sha"),
    *("LastModified", "last_modified", "updated", "mtime", "modified", "created"),
)


@dataclass(frozen=True)
class StoredObject:
    """An object of a store.

    Attributes:
        key: Its name in the store.
        bytes: Its size.
        version: Another one means other contents.
    """

    key: str
    bytes: int
    version: str

    def place(self, root: Path) -> Path:
        """Return its file in the cache."""
        name = hashlib.sha256(f"{self.key}\0{self.version}".encode()).hexdigest()[:40]
        return root / "objects" / name[:2] / name[2:]


def list_store(url: StoreUrl) -> Listing:
    """List the objects that a job reads.

    Raises:
        HubError: The store refuses, is unreachable, or has nothing that a job can read.
    """
    objects = _list(url)[1]
    missing = sum(stored.bytes - _bytes_of(stored, url) for stored in objects.values())
    return Listing(
        _digest(objects), {path: stored.bytes for path, stored in objects.items()}, missing
    )


def bytes_there(url: StoreUrl) -> int:
    """Return the fetched bytes of an address, of objects and parts."""
    return sum(path.stat().st_size for path in url.root.glob("objects/*/*") if path.is_file())


def copy_store(
    url: StoreUrl, tell: Callable[[Fetch], None], pause: Callable[[float], None] = time.sleep
) -> Path:
    """Fetch what is missing, and publish it as the newest snapshot.

    Args:
        url: The address.
        tell: Called with the progress.
        pause: Sleeps for these seconds before a retry.

    Returns:
        The snapshot's folder.

    Raises:
        HubError: It cannot be fetched, or not now.
    """
    with _on_disk(url):
        url.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = open(url.root / "lock", "a")  # noqa: SIM115
    with lock:
        with _on_disk(url):
            free = file_lock.acquire(lock)
        if not free:
            raise HubError(f"another process is fetching {url}", passing=True)
        before: Mapping[str, StoredObject] = {}
        for _ in range(_ROUNDS):
            store, objects = _list(url)
            with _on_disk(url):
                _settle(objects, url)
            if objects == before:
                return _publish(objects, url)
            missing = sum(stored.bytes - _bytes_of(stored, url) for stored in objects.values())
            sizes = {path: stored.bytes for path, stored in objects.items()}
            check_room(Listing(_digest(objects), sizes, missing), url)
            _Copy(url, store, objects, pause).run(tell)
            before = objects
        raise HubError(f"{url} changes all the time while it is fetched", passing=True)


# -- listing ------------------------------------------------------------------------------


def _list(url: StoreUrl) -> tuple[Any, dict[str, StoredObject]]:
    """Return the store's file system, and its objects by their paths below the dataset."""
    try:
        store, top, entries = _entries(url)
        names = {_path_of(key, top, url): key for key in entries}
        chosen = sorted(path for path in names if path is not None and is_data(path))
        with ThreadPoolExecutor(_connections(store)) as pool:
            facts = list(pool.map(lambda path: _facts(store, entries[names[path]]), chosen))
    except Exception as error:  # from the network, the store or its library
        raise explain(error, url) from error
    objects = {path: StoredObject(*fact) for path, fact in zip(chosen, facts, strict=True)}
    if not entries:
        raise HubError(f"there is nothing at {url}", "check the address")
    if not objects:
        raise HubError(f"{url} has no images or tables")
    _check_names(objects, url)
    return store, objects


def _entries(url: StoreUrl) -> tuple[Any, str, dict[str, dict[str, Any]]]:
    """Return the file system, the path of the address in it, and what it lists there."""
    from fsspec.core import url_to_fs  # 60 ms, which only a fetch spends

    # A new instance each time, because instances remember listings.
    store, top = url_to_fs(str(url), skip_instance_cache=True)
    try:
        return store, top, store.find(top, detail=True)
    except Exception as error:
        if url.protocol != "s3" or type(error).__name__ != "NoCredentialsError":
            raise
        public, top = url_to_fs(str(url), anon=True, skip_instance_cache=True)
        try:
            return public, top, public.find(top, detail=True)
        except PermissionError:  # it is not public, so what lacks is a login
            raise error from None


def _facts(store: Any, entry: dict[str, Any]) -> tuple[str, int, str]:
    """Return an object's key, size and version; a listing of HTML has only names."""
    key = str(entry["name"])
    if entry.get("size") is None:
        entry = store.info(key)
    version = next((str(entry[name]) for name in _VERSIONS if entry.get(name)), "")
    if entry.get("size") is None or not version:
        raise HubError(
            f"the server of {key} does not say its size and version (ETag), so a change would not "
            "be noticed",
            "copy the folder to this machine, or use another server",
        )
    return key, int(entry["size"]), f"{version} {entry['size']}"


def _path_of(key: str, top: str, url: StoreUrl) -> str | None:
    """Return an object's path below the dataset; None for folders, hidden files and other places.

    The address may be that of a single object.
    """
    top = top.rstrip("/")
    if key.endswith("/") or (key != top and not key.startswith(f"{top}/")):
        return None
    path = key.removeprefix(top).removeprefix("/") or key.rpartition("/")[2]
    if url.protocol in ("http", "https"):
        if "?" in path or "#" in path:  # an index's links that sort it
            return None
        path = unquote(path)
    hidden = any(part.startswith(".") and part not in (".", "..") for part in path.split("/"))
    return None if hidden else path


def _check_names(objects: Mapping[str, StoredObject], url: StoreUrl) -> None:
    """Reject keys that cannot be files below one folder.

    Raises:
        HubError: One cannot.
    """
    folders = {str(folder) for path in objects for folder in PurePosixPath(path).parents}
    for path in objects:
        parts = path.split("/")
        long = any(len(os.fsencode(part)) > _LONGEST_NAME for part in parts)
        if long or "\0" in path or {"", ".", ".."} & set(parts) or path in folders:
            raise HubError(
                f"{url} has the object {path[:200]!r}, which cannot be a file of that name here",
                "rename it, or name a folder without it",
            )


def _digest(objects: Mapping[str, StoredObject]) -> str:
    text = json.dumps(_lines(objects), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _lines(objects: Mapping[str, StoredObject]) -> dict[str, list[Any]]:
    return {path: [stored.bytes, stored.version] for path, stored in sorted(objects.items())}


# -- objects ------------------------------------------------------------------------------


class _Copy:
    """Fetches the missing objects of a listing, several at a time."""

    def __init__(
        self,
        url: StoreUrl,
        store: Any,
        objects: Mapping[str, StoredObject],
        pause: Callable[[float], None],
    ) -> None:
        self._url, self._store, self._pause = url, store, pause
        self._objects = list(objects.values())
        self._total = sum(stored.bytes for stored in self._objects)
        self._done = sum(_bytes_of(stored, url) for stored in self._objects)
        self._counting, self._over = threading.Lock(), threading.Event()

    def run(self, tell: Callable[[Fetch], None]) -> None:
        """Fetch until all parts are whole.

        Raises:
            HubError: The first problem; what was fetched stays.
        """
        missing = [each for each in self._objects if _bytes_of(each, self._url) < each.bytes]
        missing += [
            empty for empty in self._objects if not (empty.bytes or _is_there(empty, self._url))
        ]
        with ThreadPoolExecutor(_connections(self._store)) as pool:
            pending = {pool.submit(self._fetch, stored) for stored in missing}
            try:
                while pending:
                    tell(Fetch("fetching", self._done, self._total))
                    ended, pending = wait(pending, _TOLD_EVERY, FIRST_EXCEPTION)
                    for future in ended:
                        future.result()
            finally:
                self._over.set()  # the others end after the range that they are fetching
                pool.shutdown(cancel_futures=True)
        tell(Fetch("fetching", self._done, self._total))

    def _fetch(self, stored: StoredObject) -> None:
        part = _part_of(stored, self._url)
        with _on_disk(self._url):
            part.parent.mkdir(parents=True, exist_ok=True)
            file = open(part, "ab")  # noqa: SIM115
        with file:
            begin = _whole_ranges(part, stored)
            with _on_disk(self._url):
                file.truncate(begin)
            while begin < stored.bytes and not self._over.is_set():
                end = min(begin + _RANGE, stored.bytes)
                data = self._range(stored, begin, end)
                with _on_disk(self._url):
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                begin = end
                with self._counting:
                    self._done += len(data)

    def _range(self, stored: StoredObject, begin: int, end: int) -> bytes:
        """Return some bytes of an object, trying several times."""
        for attempt in range(1, _TRIES + 1):
            try:
                data = bytes(self._store.cat_file(stored.key, start=begin, end=end))
            except FileNotFoundError:
                raise HubError(f"{stored.key} is gone since it was listed", passing=True) from None
            except Exception as error:  # from the network, the store or its library
                trouble = explain(error, self._url)
                if not trouble.passing or attempt == _TRIES or self._over.is_set():
                    raise trouble from error
            else:
                if len(data) == end - begin:
                    return data
                if len(data) > end - begin:
                    raise HubError(f"the server of {self._url} does not send parts of an object")
                if attempt == _TRIES or self._over.is_set():
                    raise HubError(f"{stored.key} did not come through", passing=True)
            self._pause(_FIRST_PAUSE * 2 ** (attempt - 1))
        raise AssertionError


def _connections(store: Any) -> int:
    """Return how many threads may use a file system: one, unless it is made for more."""
    return _CONNECTIONS if getattr(store, "async_impl", False) else 1


def _part_of(stored: StoredObject, url: StoreUrl) -> Path:
    return stored.place(url.root).with_suffix(".part")


def _whole_ranges(part: Path, stored: StoredObject) -> int:
    """Return how much of a part is used: all of it, or the ranges that were synced."""
    try:
        size = part.stat().st_size
    except OSError:
        return 0
    return size if size == stored.bytes else min(size, stored.bytes) // _RANGE * _RANGE


def _is_there(stored: StoredObject, url: StoreUrl) -> bool:
    return stored.place(url.root).exists() or _part_of(stored, url).exists()


def _bytes_of(stored: StoredObject, url: StoreUrl) -> int:
    """Return the bytes of an object that are here."""
    if stored.place(url.root).exists():
        return stored.bytes
    return _whole_ranges(_part_of(stored, url), stored)


def _settle(objects: Mapping[str, StoredObject], url: StoreUrl) -> None:
    """Turn whole parts of these objects, just listed, into objects, and drop parts of others.

    A part was started when the same version was listed, so no other version came in between.
    """
    parts = {_part_of(stored, url): stored for stored in objects.values()}
    for part in url.root.glob("objects/*/*.part"):
        if part not in parts:
            part.unlink()
        elif part.stat().st_size == parts[part].bytes:
            os.replace(part, part.with_suffix(""))


@contextmanager
def _on_disk(url: StoreUrl) -> Iterator[None]:
    """Turn errors of the cache's disk into ones that are not taken for the store's.

    Raises:
        HubError: The cache cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise no_room(error, url) or HubError(
            f"cannot write {error.filename or url.root} ({error.strerror or error})"
        ) from error


# -- snapshots ----------------------------------------------------------------------------


def _publish(objects: Mapping[str, StoredObject], url: StoreUrl) -> Path:
    """Make a snapshot of objects that are all here, let new jobs read it, and return its folder."""
    digest = _digest(objects)
    folder = url.folder_of(digest)
    with _on_disk(url):
        if not url.has(digest):
            for place in url.root.glob("objects/*"):
                sync(place)
            snapshots = folder.parent.parent
            for left in (folder.parent, *snapshots.glob(".*")):  # by a killed process
                shutil.rmtree(left, ignore_errors=True)
            snapshots.mkdir(exist_ok=True)
            aside = Path(tempfile.mkdtemp(prefix=".", dir=snapshots))
            for path, stored in objects.items():
                link, parent = aside / folder.name / path, (folder / path).parent
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(os.path.relpath(stored.place(url.root), parent))
            os.replace(aside, folder.parent)
            sync(snapshots)
            facts = {"url": str(url), "fetched": time.time(), "objects": _lines(objects)}
            write_atomic(url.listing_file(digest), json.dumps(facts) + "\n", durable=True)
        write_atomic(url.root / "current", digest + "\n", durable=True)
    return folder


def compare(before: str, url: StoreUrl) -> str:
    """Describe how the newest snapshot differs from an earlier one: `1 new (a.png), 2 gone (…)`.

    It is "" if they are equal, or if there is no earlier one.
    """
    if not before:
        return ""
    old, new = (
        (read_json(url.listing_file(digest)) or {}).get("objects", {})
        for digest in (before, url.digest)
    )
    return named_counts(
        {
            "new": sorted(new.keys() - old.keys()),
            "gone": sorted(old.keys() - new.keys()),
            "changed": sorted(path for path in old.keys() & new.keys() if old[path] != new[path]),
        }
    )


# -- earlier snapshots --------------------------------------------------------------------

_RETIRED: Final = ".old"  # in place of `.json`: no job takes this snapshot any more


def outdated_files(root: Path, kept: Collection[str]) -> list[Path]:
    """Return the files that belong to earlier snapshots only, in an order to delete them.

    Args:
        root: The directory of an address.
        kept: Digests of snapshots that count as needed; the newest always does.
    """
    links: dict[str, dict[Path, Path]] = {}  # snapshot → link → object
    needed: set[Path] = set()
    try:
        newest = (root / "current").read_text(encoding="utf-8").strip()
        for snapshot in (root / "snapshots").iterdir():
            own = {link: _object_of(link) for link in snapshot.rglob("*") if link.is_symlink()}
            if snapshot.name in (newest, *kept) or _listing(root, snapshot.name) is None:
                needed.update(own.values())
            else:
                links[snapshot.name] = own
    except OSError:  # there is none, or what it needs cannot be seen
        return []
    objects = {each for own in links.values() for each in own.values()} - needed
    return [
        *sorted(path for path in objects if path.exists()),
        *(link for own in links.values() for link in own),
        *filter(None, (_listing(root, digest) for digest in links)),
    ]


def delete_outdated(root: Path, kept: Collection[str]) -> list[int]:
    """Delete what `outdated_files` returns, and return the size of each file.

    A process that is killed meanwhile leaves no snapshot that looks complete and is not.

    Raises:
        OSError: A file cannot be deleted.
    """
    if not outdated_files(root, kept):
        return []
    sizes = []
    with open(root / "lock", "a") as lock:
        if not file_lock.acquire(lock):  # a fetch may use any of the objects
            return []
        outdated = outdated_files(root, kept)
        listings = [path for path in outdated if path.suffix == ".json"]
        for listing in listings:
            os.replace(listing, listing.with_suffix(_RETIRED))
        for path in outdated:
            own = path.with_suffix(_RETIRED) if path in listings else path
            sizes.append(own.lstat().st_size)
            own.unlink()
            if own.suffix == _RETIRED:
                shutil.rmtree(root / "snapshots" / own.stem, ignore_errors=True)
    return sizes


def _object_of(link: Path) -> Path:
    return Path(os.path.normpath(link.parent / link.readlink()))


def _listing(root: Path, digest: str) -> Path | None:
    """Return the file that lists a snapshot; None while it is being made."""
    places = (root / f"{digest}{suffix}" for suffix in (_RETIRED, ".json"))
    return next((place for place in places if place.exists()), None)
