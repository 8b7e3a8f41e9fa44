"""Parse names of what is fetched: hub models and datasets, datasets in object stores.

Both are found in the local cache, without a network.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import urlsplit

from jobs.paths import cache_home
from jobs.run.rundir import read_json, write_atomic

if TYPE_CHECKING:
    from collections.abc import Iterable

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
_URL: Final = re.compile(r"(?P<protocol>[a-z][a-z0-9+.:-]+)://(?P<rest>.*)", re.IGNORECASE)
_LOCAL: Final = ("file", "local", "memory", "data")  # protocols of fsspec that are no store's
_PINS: Final = "stores.json"  # in a run directory: address → digest of the snapshot


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
        """Parse the name of something to fetch; None if the text cannot be one."""
        if kind == "dataset" and is_url(text):
            return _store(text)
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


# -- object stores ------------------------------------------------------------------------


@dataclass(frozen=True)
class StoreUrl(HubName):
    """A dataset in an object store, `s3://BUCKET/FOLDER`; used wherever a hub dataset may be.

    Its copies are snapshots, each of them one listing of the folder. `jobs.hub.stores` writes them:

        current                   the digest of the newest snapshot
        <digest>.json             its objects with sizes and versions; present once it is complete
        snapshots/<digest>/NAME/  the dataset: links to objects
        objects/                  the objects, each once, named after its key and version

    Attributes:
        repo: The address.
    """

    @classmethod
    def of(cls, text: str) -> StoreUrl:
        """Return the address without differences in spelling."""
        protocol, _, rest = text.strip().partition("://")
        return cls("dataset", f"{protocol.lower()}://{rest.rstrip('/')}")

    @property
    def protocol(self) -> str:
        """Return what precedes `://`."""
        return self.repo.partition("://")[0]

    @property
    def name(self) -> str:
        """Return the last part of the address, after which the dataset's folder is named."""
        return re.sub(r"[^\w.-]", "-", self.repo.rpartition("/")[2]).lstrip(".")[:100] or "data"

    @cached_property
    def slug(self) -> str:
        """Return a unique file name."""
        digest = hashlib.sha256(self.repo.encode()).hexdigest()[:12]
        return f"{self.protocol}--{self.name}--{digest}"

    @property
    def root(self) -> Path:
        """Return the directory of its copies in the cache."""
        return cache_home() / "stores" / self.slug

    @property
    def digest(self) -> str:
        """Return the digest of the snapshot that this process reads; "" if there is none."""
        if (pinned := _pins.get(self)) and self.has(pinned):
            return pinned
        current = self.root / "current"
        try:
            stamp = current.stat().st_mtime_ns
            if _newest.get(self, (0, ""))[0] != stamp:
                _newest[self] = stamp, current.read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            return ""
        newest = _newest[self][1]
        return newest if self.has(newest) else ""

    @property
    def looked_at(self) -> float:
        """Return when the store was last listed for the newest snapshot; Unix seconds, 0: never."""
        with suppress(OSError):
            return (self.root / "current").stat().st_mtime
        return 0.0

    def has(self, digest: str) -> bool:
        """Return whether a snapshot is complete."""
        return self.listing_file(digest).is_file()

    def listing_file(self, digest: str) -> Path:
        """Return the file that lists a snapshot's objects."""
        return self.root / f"{digest}.json"

    def folder_of(self, digest: str) -> Path:
        """Return a snapshot's folder, which is the dataset."""
        return self.root / "snapshots" / digest / self.name

    def find(self) -> Path | None:
        """Return the folder of its snapshot, which is complete; None if there is none."""
        return self.folder_of(digest) if (digest := self.digest) else None


_pins: dict[StoreUrl, str] = {}
_newest: dict[StoreUrl, tuple[int, str]] = {}  # time of the file `current` in ns, and its text


@cache
def _store(text: str) -> StoreUrl | None:
    """Parse an address; None if it is refused. Cached because it is looked up for each sample."""
    return None if why_refused(text) else StoreUrl.of(text)


def is_url(text: str) -> bool:
    """Return whether a text is an address rather than a path or a hub name."""
    return _URL.fullmatch(text.strip()) is not None


def why_refused(text: str) -> str:
    """Return why an address is not accepted in a job, without repeating it; "" if it is."""
    match = _URL.fullmatch(text.strip())
    if match is None:
        return ""
    protocol, rest = match["protocol"].lower(), match["rest"]
    if "@" in urlsplit(f"//{rest}").netloc or "?" in rest:
        return (
            "an address must not carry a user, password or signature; job files hold no secrets: "
            "log in on this machine, e.g. with `aws configure`, or set AWS_PROFILE"
        )
    if protocol in _LOCAL:
        return f"{protocol}:// is not an object store; write the path of the folder"
    if "::" in text or "*" in rest or not rest.strip("/"):
        return "an address names one folder or object, such as s3://BUCKET/FOLDER"
    return ""


def pin_snapshots(names: Iterable[HubName], run_root: Path) -> None:
    """Record which snapshots a run reads, so that a later attempt reads the same data.

    A snapshot that is recorded already stays, unless it was deleted.
    """
    before = read_json(run_root / _PINS) or {}
    stores = [name for name in names if isinstance(name, StoreUrl)]
    pins = {
        str(name): pinned if name.has(pinned := str(before.get(str(name)))) else name.digest
        for name in stores
    }
    if pins != before:
        write_atomic(run_root / _PINS, json.dumps(pins) + "\n", durable=True)


def use_pins(run_root: Path) -> None:
    """Let this process read the snapshots that a run has recorded."""
    _pins.update(read_pins(run_root) or {})


def read_pins(run_root: Path) -> dict[StoreUrl, str] | None:
    """Return the digests of the snapshots that a run has recorded; None if they are unreadable."""
    pins = read_json(run_root / _PINS)
    if pins is None:
        return None if (run_root / _PINS).exists() else {}
    return {StoreUrl.of(url): str(digest) for url, digest in pins.items()}


def is_offline() -> bool:
    """Return whether the user has disabled the hub."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").strip().lower() in _TRUE for name in names)
