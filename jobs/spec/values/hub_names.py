"""Names of models and datasets on the hub, and where the usual cache has them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

Kind = Literal["model", "dataset"]

_WORD: Final = r"[A-Za-z0-9][\w.-]{0,95}"
_NAME: Final = re.compile(
    rf"(?P<repo>{_WORD}/{_WORD})(?:@(?P<revision>[\w.-]+))?(?:/(?P<folder>[^@/][^@]*))?"
)
# Asked again for each sample of a dataset; what a revision stands for stays within a process.
_folders: dict[HubName, Path] = {}
_TRUE: Final = ("1", "true", "on", "yes")


@dataclass(frozen=True)
class HubName:
    """A model or a dataset of the hub: `ORG/NAME`, `ORG/NAME@REVISION`.

    Attributes:
        kind: Which of the two.
        repo: `ORG/NAME`.
        revision: Branch, tag or commit; the main branch if there is none.
        folder: Of a dataset, the only folder that is wanted: `ORG/NAME/FOLDER`.
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
        """As a job file has it."""
        revision = f"@{self.revision}" if self.revision else ""
        return self.repo + revision + (f"/{self.folder}" if self.folder else "")

    @property
    def slug(self) -> str:
        """A file name of its own."""
        return f"{self.kind}s--{self}".replace("/", "--")

    def find(self) -> Path | None:
        """Its folder in the hub's cache, whole or not; None if there is none."""
        cached = _folders.get(self)
        if cached is not None and cached.is_dir():
            return cached
        # Where the cache is, and how it is laid out, is its library's business: 0.3 s of import.
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        patterns = ["model_index.json"] if self.kind == "model" else []
        try:
            snapshot = snapshot_download(
                self.repo,
                repo_type=self.kind,
                revision=self.revision,
                local_files_only=True,
                # Else a snapshot of which only the needed files were fetched is refused.
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
    """Whether the person turned the hub off."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").strip().lower() in _TRUE for name in names)
