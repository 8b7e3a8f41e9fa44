"""Cache predictions on disk, one small file each, shared by all processes."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jobs.memory.predicted import SCHEMA, Predicted
from jobs.paths import cache_home
from jobs.run.rundir import read_json, write_atomic
from jobs.spec.job_spec import JobSpec
from jobs.spec.values.field import facts_of

if TYPE_CHECKING:
    from collections.abc import Mapping

_MAX_FILES: Final = 2000  # cached files of about 4 KB each; the oldest are deleted
_PACKAGES: Final = ("torch", "diffusers", "transformers", "peft", "fsdp-tui")


def folder() -> Path:
    return cache_home() / "memory"


def key_of(values: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return the cache key of a prediction.

    Args:
        values: All values of the job.
        config: The denoiser's config. It is part of the key because the same path may hold another
            model tomorrow.
    """
    kept = {key: value for key, value in sorted(values.items()) if _matters(key)}
    # The number of ranks matters, but must be normalized: several keys can spell it.
    text = json.dumps(
        [SCHEMA, engine_version(), values.get("num_processes"), kept, config], sort_keys=True
    )
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:40]


def _matters(key: str) -> bool:
    """Return whether a key can change the prediction. Unknown keys are assumed to."""
    facts = facts_of(JobSpec).get(key)
    return facts is None or facts.memory


def recall(key: str) -> Predicted | None:
    """Read the prediction cached under a key; None if there is none, or it is damaged."""
    values = read_json(folder() / f"{key}.json")
    try:
        return Predicted.of(values) if values is not None else None
    except ValueError:
        return None


def remember(key: str, predicted: Predicted) -> None:
    """Store a prediction. A full disk is not an error here; this is only a cache."""
    with suppress(OSError):
        folder().mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(folder() / f"{key}.json", json.dumps(predicted.values))


def forget_old(most: int = _MAX_FILES) -> None:
    """Delete all but the `most` newest predictions."""
    with suppress(OSError):
        files = sorted(folder().glob("*.json"), key=_written, reverse=True)
        for path in files[most:]:
            path.unlink(missing_ok=True)


def _written(path: Path) -> float:
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


@lru_cache(maxsize=1)
def engine_version() -> str:
    """Return a hash of everything that determines predictions: the engine and its libraries.

    Stats some 200 files, once per process, and reads none of them.
    """
    root = Path(__file__).resolve().parents[2]
    facts = hashlib.sha256()
    for part in ("engine", "jobs"):
        for path in sorted((root / part).rglob("*.py")):
            with suppress(OSError):
                stat = path.stat()
                facts.update(
                    f"{path.relative_to(root)} {stat.st_size} {stat.st_mtime_ns}\n".encode()
                )
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            facts.update(f"{package} {version(package)}\n".encode())
    return facts.hexdigest()[:16]
