"""Where a model is on this machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from jobs.errors import SpecError
from jobs.paths import exists, expand

_HUB_ID: Final = re.compile(r"^[\w.-]+/[\w.-]+$")


def find_model(name_or_path: str) -> Path:
    """A local model directory, or the snapshot of a hub id in the local cache.

    Raises:
        SpecError: Neither exists.
    """
    path = expand(name_or_path)
    if exists(path) and path.is_dir():
        return path
    if exists(path):
        raise SpecError(f"{path} is a file, not a model directory")
    if _HUB_ID.match(name_or_path) and not name_or_path.startswith("."):
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            return Path(snapshot_download(name_or_path, local_files_only=True))
        except (LocalEntryNotFoundError, OSError, ValueError):
            raise SpecError(
                f"no such model: {name_or_path} is neither a directory here nor in the hub cache",
                f"check the path, or run `hf download {name_or_path}` first",
            ) from None
    raise SpecError(f"no such model directory: {name_or_path}")
