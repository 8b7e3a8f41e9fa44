"""The Hugging Face hub: a token, the cache of downloads. Nothing is asked of the network."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from jobs.doctor.finding import Finding, fail, ok, warn
from jobs.paths import nearest
from jobs.units import size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobs.doctor.patient import Patient

_COUNTING: Final = 5.0  # seconds; a cache may have very many files on a slow disk
_OTHERS_MAY_READ: Final = 0o077
_OFFLINE: Final = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")


def check_hub(_: Patient) -> Iterator[Finding]:
    """Token and cache."""
    # Half a second, paid only here.
    from huggingface_hub import constants, get_token

    token = get_token()
    yield from judge_token(token, Path(constants.HF_TOKEN_PATH), dict(os.environ))
    yield _judge_cache(Path(constants.HF_HUB_CACHE))
    offline = [
        name for name in _OFFLINE if os.environ.get(name, "").lower() in ("1", "true", "on", "yes")
    ]
    if offline:
        yield ok("offline", f"{' and '.join(offline)} set: nothing is downloaded", set=offline)


def judge_token(token: str | None, file: Path, environ: dict[str, str]) -> Iterator[Finding]:
    """Never says what the token is."""
    if token is None:
        yield ok(
            "token",
            "none; only gated models need one (`hf auth login`)",
            present=False,
        )
        return
    where = next((n for n in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN") if environ.get(n)), None)
    source = where or str(file)
    if not token.isascii() or any(character.isspace() for character in token):
        yield fail(
            "token",
            f"the one in {source} has invalid characters",
            "create a new one: `hf auth login`",
            present=True,
        )
    elif where is None and file.exists() and file.stat().st_mode & _OTHERS_MAY_READ:
        yield warn(
            "token",
            f"set, but other users can read it in {file}",
            f"chmod 600 {file}",
            present=True,
        )
    else:
        yield ok("token", f"set, from {source}", present=True)


def _judge_cache(place: Path) -> Finding:
    folder = nearest(place)
    total, whole = measure(place)
    words = f"{'' if whole else 'more than '}{size(total)} in {place}"
    facts = {"path": str(place), "bytes": total, "counted_all": whole}
    if not os.access(folder, os.W_OK | os.X_OK):
        return warn(
            "hub cache",
            f"{words}, not writable",
            "point HF_HOME elsewhere before downloading models",
            **facts,
        )
    return ok("hub cache", words, **facts)


def measure(place: Path, seconds: float = _COUNTING) -> tuple[int, bool]:
    """Bytes of the files below a directory, and whether there was time for all of them."""
    deadline = time.monotonic() + seconds
    total = 0
    for folder, _, files in os.walk(place):
        if time.monotonic() > deadline:
            return total, False
        for name in files:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except OSError:  # gone meanwhile
                continue
    return total, True
