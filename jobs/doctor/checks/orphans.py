"""Run directories that belong to no job."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, Final

from jobs.doctor.finding import Finding, warn
from jobs.doctor.orphans import find_orphans
from jobs.errors import UserError
from jobs.paths import state_home
from jobs.queue.store import Store
from jobs.units import size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from jobs.doctor.orphans import Orphan
    from jobs.doctor.patient import Patient

_LISTED: Final = 20


def check_orphans(_: Patient) -> Iterator[Finding]:
    """List them. Nothing is created, and what is wrong with the database is said elsewhere."""
    home = state_home()
    if not (home / "jobs.db").exists():
        return
    try:
        orphans = find_orphans(Store(home))
    except (sqlite3.Error, UserError):
        return
    yield from judge_orphans(orphans)


def judge_orphans(orphans: Sequence[Orphan]) -> Iterator[Finding]:
    """Judge them. Pure."""
    empty = [orphan for orphan in orphans if not orphan.holds]
    trained = [orphan for orphan in orphans if orphan.holds]
    if empty:
        words = f"{_count(empty)} no job, and nothing was trained there"
        yield _listed(empty, words, "`fsdp-tui doctor --repair` deletes what is listed")
    if trained:
        words = f"{_count(trained)} no job, and what was trained there is kept"
        yield _listed(trained, words, "take from them what you need, then delete them by hand")


def _count(orphans: Sequence[Orphan]) -> str:
    total = size(sum(orphan.bytes for orphan in orphans))
    return f"{len(orphans)} ({total}) belong{'s' * (len(orphans) == 1)} to"


def _listed(orphans: Sequence[Orphan], words: str, advice: str) -> Finding:
    lines = [
        f"{size(orphan.bytes):>10}  {orphan.path}{f'  ({orphan.holds})' if orphan.holds else ''}"
        for orphan in orphans[:_LISTED]
    ]
    if len(orphans) > _LISTED:
        lines.append(f"and {len(orphans) - _LISTED} more")
    facts = {"paths": [str(orphan.path) for orphan in orphans]}
    return Finding(
        **vars(warn("run directories", words, advice, **facts)) | {"lines": tuple(lines)}
    )
