"""Detect a model's repeated blocks with the engine, and cache the result."""

from __future__ import annotations

import json
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jobs.errors import SpecError, UserError
from jobs.machine import file_lock
from jobs.machine.engine_tools import ToolError, ask
from jobs.models.model_config import find_target
from jobs.models.parts import BlockClass, Coverage, Parts
from jobs.paths import cache_home
from jobs.run.rundir import read_json, write_atomic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from jobs.machine.engine_tools import Progress
    from jobs.models.model_config import Target


# -- detection cache ------------------------------------------------------------------------
# Cache of detections: one small file that many processes share.


SCHEMA: Final = 1  # version of an entry; other versions are discarded

_MOST: Final = 200  # entries of some 10 KB; the oldest are deleted
_PATIENCE: Final = 10.0  # seconds to wait for another writer, which takes milliseconds


def cache_file() -> Path:
    return cache_home() / "blocks.json"


def lock_file() -> Path:
    return cache_home() / "blocks.json.lock"


def recall(key: str) -> dict[str, Any] | None:
    """Read a cached value; None if there is none. A damaged file counts as empty."""
    entry = _entries().get(key)
    value = entry.get("found") if isinstance(entry, dict) else None
    return value if isinstance(value, dict) else None


def remember(key: str, answer: dict[str, Any]) -> None:
    """Store JSON values under a key. A full disk is not an error here; this is only a cache."""
    with suppress(OSError):
        cache_home().mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked():
            entries = _entries()
            entries.pop(key, None)
            entries[key] = {"t": round(time.time()), "found": answer}
            kept = dict(list(entries.items())[-_MOST:])
            write_atomic(cache_file(), json.dumps({"schema": SCHEMA, "entries": kept}))


def _entries() -> dict[str, Any]:
    """Return all entries, oldest first."""
    data = read_json(cache_file()) or {}
    entries = data.get("entries")
    return entries if data.get("schema") == SCHEMA and isinstance(entries, dict) else {}


@contextmanager
def _locked() -> Iterator[None]:
    """Hold the lock, but proceed without it after a long wait; at worst an entry is lost.

    The holder may be suspended, and some file systems have no locks.
    """
    with open(lock_file(), "w") as lock:
        with suppress(OSError):
            file_lock.acquire(lock, _PATIENCE)
        yield


# -- detection ------------------------------------------------------------------------------
# Detect which classes of a model are its repeated blocks.
#
# The engine builds the model without its weights (`engine.blocks`), in a separate process.


__all__ = ["BlockClass", "Coverage", "Detection", "cached_detection", "detect_blocks"]

# Errors from parsing what another version, or another program, wrote.
_PARSE_ERRORS: Final = (ValueError, TypeError, KeyError, AttributeError)


@dataclass(frozen=True)
class Detection:
    """The detected blocks of a model.

    Attributes:
        model_family: The requested family, if any.
        model_flavour: Its flavour.
        pretrained_model: The model: a path, a hub id, or a published config's hub id.
        model_class: Class of the model.
        total_params: Its parameters; shared ones count once.
        no_split_modules: The model class's `_no_split_modules`.
        cached: Whether this is from the cache.
        classes: The recommended ones first, then by suitability.
        dtype_bytes: Bytes of one parameter as the weights are stored.
        parts: What `coverage` needs.
    """

    model_family: str | None
    model_flavour: str | None
    pretrained_model: str
    model_class: str
    total_params: int
    no_split_modules: list[str]
    cached: bool
    classes: list[BlockClass]
    dtype_bytes: int
    parts: Parts

    @property
    def recommended(self) -> list[str]:
        """Return the classes to wrap."""
        return [block.class_name for block in self.classes if block.recommended]

    def coverage(self, chosen: Sequence[str]) -> Coverage:
        """Compute the effect of wrapping these classes; instant."""
        return self.parts.coverage(chosen)

    @classmethod
    def of(cls, target: Target, answer: dict[str, Any], *, cached: bool) -> Detection:
        """Parse the answer of `python -m engine.blocks` for a target.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: It is not such an answer.
        """
        return cls(
            model_family=target.model_family,
            model_flavour=target.model_flavour,
            pretrained_model=target.name,
            model_class=str(answer["model_class"]),
            total_params=int(answer["total_params"]),
            no_split_modules=[str(name) for name in answer["no_split_modules"]],
            cached=cached,
            classes=[BlockClass(**values) for values in answer["classes"]],
            dtype_bytes=target.dtype_bytes,
            parts=Parts.from_dict(answer["parts"]),
        )


def detect_blocks(
    *,
    model_family: str | None = None,
    model_flavour: str | None = None,
    pretrained_model: str | None = None,
    refresh: bool = False,
    progress: Progress = lambda done, total: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Detection:
    """Find the repeated blocks of a model, using the cache.

    Args:
        model_family: With `model_flavour`, selects a published model; with `pretrained_model`, the
            expected family.
        model_flavour: The family's first one if None.
        pretrained_model: A directory, a config.json, or a hub id in the local cache.
        refresh: Detect again and replace the cached result.
        progress: Called with the steps done and the total.
        cancelled: Polled many times a second, in the caller's thread.

    Raises:
        UserError: There is no such model, or it cannot be built from its config.
        ToolError: The detection failed for another reason.
        Cancelled: `cancelled` returned True.
    """
    target = find_target(model_family, model_flavour, pretrained_model)
    if not refresh and (cached := _recall(target)) is not None:
        return cached
    with tempfile.TemporaryDirectory(prefix="fsdp-tui-") as name:
        # Pass a copy, so that the cached result belongs to the config that was read.
        config = Path(name, "config.json")
        config.write_text(json.dumps(target.config), encoding="utf-8")

        def on_line(line: str) -> None:
            match line.split():
                case ["step", done, total] if done.isdigit() and total.isdigit():
                    progress(int(done), int(total))

        try:
            answer = ask("engine.blocks", [str(config)], Path(name, "answer"), on_line, cancelled)
        except UserError as error:
            raise SpecError(f"{target.name}: {error.message}", error.hint) from None
    try:
        detection = Detection.of(target, answer, cached=False)
    except _PARSE_ERRORS as error:
        raise ToolError(f"unexpected answer from python -m engine.blocks: {error!r}") from None
    remember(target.key(SCHEMA), answer)
    return detection


def cached_detection(
    *,
    model_family: str | None = None,
    model_flavour: str | None = None,
    pretrained_model: str | None = None,
) -> Detection | None:
    """Return a model's cached detection, or None. Starts no process and never fails."""
    try:
        return _recall(find_target(model_family, model_flavour, pretrained_model))
    except UserError:
        return None


def _recall(target: Target) -> Detection | None:
    stored = recall(target.key(SCHEMA))
    try:
        return Detection.of(target, stored, cached=True) if stored is not None else None
    except _PARSE_ERRORS:  # damaged; detect again
        return None
