"""List the caches with their sizes, and clear them."""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from jobs import service
from jobs.errors import StateError, UserError
from jobs.hub.stores import delete_outdated, outdated_files
from jobs.models import blocks
from jobs.paths import cache_home
from jobs.queue.neighbors import find_neighbors
from jobs.queue.states import ACTIVE, State
from jobs.spec.file.load import load_spec
from jobs.spec.values.hub_names import read_pins
from jobs.spec.values.spellings import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from jobs.queue.store import Job, Store

# Cache name → contents. A job's own `cache_dir` is managed by the user and not listed.
_TITLES: Final = {
    "detection": "blocks detected in models",
    "latents": "latents of images and videos",
    "masks": "masks of images",
    "sounds": "latents of the sound of videos",
    "class_images": "class images made by base models",
    "text": "embeddings of captions",
    "index": "sizes and checks of dataset files",
    "webdataset": "unpacked archives of datasets",
    "tables": "copies of datasets' parquet files",
    "stores": "datasets fetched from object stores",
    "old_stores": "earlier copies that no unfinished job reads",
}
_NOT_FOR_JOBS: Final = ("detection", "old_stores")
_OLD: Final = "old_stores"  # files below the place of "stores", which do not count there
_IGNORE_CACHE_DIR: Final = ("tables", "stores")  # regardless of a job's cache_dir


@dataclass(frozen=True)
class Cache:
    """A cache, with its size on disk.

    Attributes:
        name: Its name on the command line: detection, latents, masks, class_images, text, index,
            webdataset, tables, stores, old_stores.
        title: Its contents, in a few words.
        path: Its file or directory, which need not exist.
        bytes: Its size.
        files: Its number of files.
    """

    name: str
    title: str
    path: Path
    bytes: int
    files: int


@dataclass(frozen=True)
class Cleared:
    """What was deleted."""

    names: tuple[str, ...]
    bytes: int
    files: int


def list_caches(store: Store) -> list[Cache]:
    """Return all caches; takes seconds if there are very many files."""
    old = {path for root, kept in _stores(store) for path in outdated_files(root, kept)}
    files = {name: _files(name) for name in _TITLES}
    files |= {"stores": (path for path in _files("stores") if path not in old), _OLD: iter(old)}
    return [_measure(name, files[name]) for name in _TITLES]


def clear(store: Store, names: Sequence[str], *, force: bool = False) -> Cleared:
    """Delete the contents of caches.

    Clearing `stores` also clears `old_stores`, whose objects they share.

    Args:
        store: The jobs.
        names: Names of the caches; empty or "all" means all.
        force: Clear them even if jobs use them; those jobs fail or recompute what they need.

    Raises:
        UserError: There is no such cache, or a file cannot be deleted.
        StateError: A running job may be using one of them, also a job of another state directory
            that shares the cache; nothing was deleted.
    """
    chosen = _valid_names(names)
    if not force:
        _check_unused(store, chosen)
    size = count = 0
    stuck: list[OSError] = []
    if _OLD in chosen:
        size, count = _clear_old(store, stuck, force=force)
    for name in chosen:
        for path in _files(name):
            try:
                freed = path.lstat().st_size
                path.unlink()
            except FileNotFoundError:  # deleted by someone else in the meantime
                continue
            except OSError as error:
                stuck.append(error)
                continue
            size, count = size + freed, count + 1
        _remove_empty(_place(name))
    if stuck:
        raise UserError(
            f"{len(stuck)} files could not be deleted: {stuck[0].filename} ({stuck[0].strerror}); "
            f"{count} deleted",
            "check the permissions",
        )
    return Cleared(tuple(chosen), size, count)


def _clear_old(store: Store, stuck: list[OSError], *, force: bool) -> tuple[int, int]:
    """Delete earlier copies; return their bytes and files, and add what cannot be deleted."""
    sizes: list[int] = []
    for root, kept in _stores(store, force=force):
        try:
            sizes += delete_outdated(root, kept)
        except OSError as error:
            stuck.append(error)
    return sum(sizes), len(sizes)


def _stores(store: Store, *, force: bool = False) -> list[tuple[Path, set[str]]]:
    """Return the directory of each address, and the copies that unfinished jobs started with.

    A job that is queued for the first time will read the newest one. Where it is unknown what a job
    reads, there is no directory, unless `force` asks for those of unknown state directories.
    """
    read: dict[Path, set[str]] = {}
    every = store.all()
    for neighbor in find_neighbors(store.home):
        if neighbor.jobs is None and not force:
            return []
        every += neighbor.jobs or []
    for job in every:
        if job.state is State.COMPLETED:
            continue
        pins = read_pins(job.run_dir.root)
        if pins is None:
            return []
        for url, digest in pins.items():
            read.setdefault(url.root, set()).add(digest)
    roots = [path for path in _place("stores").glob("*") if path.is_dir()]
    return [(root, read.get(root, set())) for root in roots]


def _valid_names(names: Sequence[str]) -> list[str]:
    if not names or "all" in names:
        return list(_TITLES)
    for name in names:
        if name not in _TITLES:
            raise UserError(
                f'no cache "{name}"{did_you_mean(name, _TITLES)}; known: {", ".join(_TITLES)}'
            )
    return list(dict.fromkeys([*names, *([_OLD] if "stores" in names else [])]))


def _check_unused(store: Store, names: Sequence[str]) -> None:
    neighbors = find_neighbors(store.home)
    read = [name for name in names if name != "detection"]  # which is made again in seconds
    unknown = next((neighbor for neighbor in neighbors if neighbor.jobs is None), None)
    if read and unknown is not None:
        raise StateError(
            f"jobs of the state directory {unknown.name} may be using the cache {read[0]}, and "
            "cannot be seen from here",
            f"if it is gone, delete {unknown.record}; or use `fsdp-tui cache clear --force`",
        )
    if set(names) <= set(_NOT_FOR_JOBS):
        return
    service.refresh(store)  # a job without processes uses nothing
    there = [(job, f" of {each.home}") for each in neighbors for job in each.jobs or []]
    for job, where in [*((job, "") for job in store.in_states(ACTIVE)), *there]:
        if job.state not in ACTIVE or not (used := [n for n in names if _may_use(job, n)]):
            continue
        there_home = shlex.quote(str(job.run_dir.root.parent.parent))
        home = f"FSDP_TUI_HOME={there_home} " if where else ""
        stop = f"stop it first (`{home}fsdp-tui stop {job.id}`)"
        raise StateError(
            f"job {job.id} “{job.name}”{where} is {job.state} and may be using the cache {used[0]}",
            f"{stop}, or run `fsdp-tui cache clear --force`",
        )


def _may_use(job: Job, name: str) -> bool:
    if name in _NOT_FOR_JOBS:
        return False
    try:
        place = load_spec(job.run_dir.job_file).cache_dir
    except UserError:  # it runs nevertheless
        return True
    elsewhere = place is not None and Path(place).resolve() != cache_home().resolve()
    return not elsewhere or name in _IGNORE_CACHE_DIR


def _place(name: str) -> Path:
    if name == "detection":
        return blocks.cache_file()
    return cache_home() / ("stores" if name == _OLD else name)


def _measure(name: str, files: Iterator[Path]) -> Cache:
    size = count = 0
    for path in files:
        try:
            size += path.lstat().st_size
        except OSError:  # deleted in the meantime
            continue
        count += 1
    return Cache(name, _TITLES[name], _place(name), size, count)


def _files(name: str) -> Iterator[Path]:
    """Yield all files of a cache, without following links."""
    place = _place(name)
    if name == "detection":
        yield from [place] if place.is_file() else []
        return
    if name == _OLD:
        return
    for folder, folders, files in os.walk(place):
        yield from (Path(folder, file) for file in files)
        yield from (link for each in folders if (link := Path(folder, each)).is_symlink())


def _remove_empty(place: Path) -> None:
    """Remove a cache's subfolders, but not its root, which its users expect to exist."""
    for folder, _, _ in os.walk(place, topdown=False):
        if Path(folder) != place:
            with suppress(OSError):  # it contains something that could not be deleted
                os.rmdir(folder)
