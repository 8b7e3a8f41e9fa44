"""Parse names of hub models and datasets, and find them in the local cache."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

Kind = Literal["model", "dataset"]

INDEXES: Final = ("model_index.json", "modular_model_index.json")
"""Files that list a pipeline's components: of a stock pipeline, and of modular blocks."""

_WORD: Final = r"[A-Za-z0-9][\w.-]{0,95}"
_NAME: Final = re.compile(
    rf"(?P<repo>{_WORD}/{_WORD})(?:@(?P<revision>[\w.-]+))?(?:/(?P<folder>[^@/][^@]*))?"
)
# Cached because it is looked up for each sample of a dataset. A revision keeps its meaning within a
# process.
_folders: dict[HubName, Path] = {}
_TRUE: Final = ("1", "true", "on", "yes")


@dataclass(frozen=True)
class HubName:
    """A model or a dataset of the hub: `ORG/NAME`, `ORG/NAME@REVISION`.

    Attributes:
        kind: `model` or `dataset`.
        repo: `ORG/NAME`.
        revision: Branch, tag or commit; None for the main branch.
        folder: For a dataset, the only folder to use: `ORG/NAME/FOLDER`.
    """

    kind: Kind
    repo: str
    revision: str | None = None
    folder: str = ""

    @classmethod
    def read(cls, kind: Kind, text: str) -> HubName | None:
        """Parse a hub name; None if the text cannot be one."""
        match = _NAME.fullmatch(text.strip().removesuffix("/"))
        if match is None or ".." in text:
            return None
        folder = match["folder"] or ""
        if folder and kind == "model":
            return None
        return cls(kind, match["repo"], match["revision"], folder)

    def __str__(self) -> str:
        """Return the name as it is in a job file."""
        revision = f"@{self.revision}" if self.revision else ""
        return self.repo + revision + (f"/{self.folder}" if self.folder else "")

    @property
    def slug(self) -> str:
        """Return a unique file name."""
        return f"{self.kind}s--{self}".replace("/", "--")

    def find(self) -> Path | None:
        """Return its folder in the hub's cache, complete or not; None if there is none."""
        cached = _folders.get(self)
        if cached is not None and cached.is_dir():
            return cached
        # Only the library knows the cache's location and layout; importing it takes 0.3 s.
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        patterns = list(INDEXES) if self.kind == "model" else []
        try:
            snapshot = snapshot_download(
                self.repo,
                repo_type=self.kind,
                revision=self.revision,
                local_files_only=True,
                # Otherwise a partial snapshot with only the needed files is refused.
                allow_patterns=patterns,
            )
        except (LocalEntryNotFoundError, OSError, ValueError):
            return None
        folder = Path(snapshot, self.folder)
        if not folder.is_dir():
            return None
        _folders[self] = folder
        return folder


def is_offline() -> bool:
    """Return whether the user has disabled the hub."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").strip().lower() in _TRUE for name in names)
