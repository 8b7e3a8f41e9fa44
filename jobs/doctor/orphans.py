"""Find run directories that belong to no job: left by a killed submit or a failed remove.

Directories in which nothing was trained can be deleted; the others hold someone's work.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from jobs.backends.local.ranks import beats
from jobs.machine.processes import with_run_id
from jobs.run.disk_space import directory_size
from jobs.run.rundir import RunDir, read_json

if TYPE_CHECKING:
    from jobs.queue.store import Store

_RUN: Final = re.compile(r"\.?[1-9]\d{0,17}-.+")  # a run directory, or one that was set aside
_LARGEST_START: Final = 1 << 20  # bytes of events of a run that did nothing but start


@dataclass(frozen=True)
class Orphan:
    """A run directory that belongs to no job.

    Attributes:
        path: The directory.
        bytes: Its size.
        holds: Contents that keep it from being deleted, in words; "" if nothing was trained in it.
    """

    path: Path
    bytes: int
    holds: str


def find_orphans(store: Store) -> list[Orphan]:
    """List the run directories that belong to no job, except those that `remove --keep-files` kept.

    Raises:
        sqlite3.Error: The database cannot be read, so ownership is unknown.
    """
    there = _run_directories(store.home / "runs")
    ours = store.run_directories()
    lost = [path for path in there if path.name not in ours and path.is_dir()]
    return [
        Orphan(path, directory_size(path), _holds(RunDir(path)))
        for path in lost
        if not RunDir(path).is_kept
    ]


def sweep_orphans(store: Store) -> tuple[list[Orphan], list[Orphan]]:
    """Delete the orphaned run directories in which nothing was trained.

    Returns:
        The deleted ones, and the remaining ones.

    Raises:
        sqlite3.Error: The database cannot be read; nothing more is deleted.
    """
    swept: list[Orphan] = []
    left: list[Orphan] = []
    for orphan in find_orphans(store):
        if not orphan.holds and not _is_used(RunDir(orphan.path)):
            with store.write():
                if orphan.path.name not in {job.run_dir.root.name for job in store.all()}:
                    shutil.rmtree(orphan.path, ignore_errors=True)
        (left if orphan.path.exists() else swept).append(orphan)
    return swept, left


def _run_directories(runs: Path) -> list[Path]:
    if not runs.is_dir():
        return []
    return sorted(
        path
        for path in runs.iterdir()
        if _RUN.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    )


def _holds(run_dir: RunDir) -> str:
    """Name the contents of a run directory that someone may want back; "" if there are none."""
    if _has_any(run_dir.checkpoints):
        return "checkpoints"
    if any(_has_any(path) for path in run_dir.root.glob(f"{run_dir.export.name}*")):
        return "an export"
    if _has_any(run_dir.samples):
        return "samples"
    if not _only_started(run_dir.events):
        return "events of a training"
    return ""


def _has_any(folder: Path) -> bool:
    """Return whether a folder contains anything. An unreadable folder is assumed to."""
    try:
        return any(folder.iterdir())
    except FileNotFoundError:
        return False
    except OSError:
        return True


def _only_started(events: Path) -> bool:
    try:
        if events.stat().st_size > _LARGEST_START:
            return False
        lines = events.read_text(encoding="utf-8").splitlines()
        return all(json.loads(line)["kind"] == "start" for line in lines)
    except FileNotFoundError:
        return True
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _is_used(run_dir: RunDir) -> bool:
    """Return whether a process works there, on any machine.

    Assume so if it cannot be determined.
    """
    run_id = (read_json(run_dir.launch_file) or {}).get("run_id")
    try:
        if isinstance(run_id, str) and run_id and with_run_id(run_id):
            return True
        return _is_worked_in(run_dir.root) or (_has_any(run_dir.ranks) and beats(run_dir))
    except OSError:
        return True


def _is_worked_in(root: Path) -> bool:
    for name in os.listdir("/proc"):
        with suppress(OSError):  # the process has ended, or belongs to another user
            if name.isdigit() and Path(os.readlink(f"/proc/{name}/cwd")).is_relative_to(root):
                return True
    return False
