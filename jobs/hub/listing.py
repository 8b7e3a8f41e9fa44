"""`python -m jobs.hub.listing KIND NAME`: list the files that a job would download.

It is a separate process because importing `huggingface_hub` takes 0.3 s, and a network may not
answer.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final, get_args

from jobs.hub.trouble import HubError, cache_of, explain
from jobs.models.find_model import find_index
from jobs.models.model_files import variant_of
from jobs.models.scorers import is_scorer
from jobs.paths import nearest
from jobs.run.rundir import read_json
from jobs.spec.families import FAMILIES
from jobs.spec.values.dataset_files import (
    CAPTION_SUFFIXES,
    METADATA,
    PICTURE_SUFFIXES,
    VIDEO_SUFFIXES,
)
from jobs.spec.values.hub_names import INDEXES, HubName, Kind, StoreUrl, is_url, why_refused
from jobs.units import size

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

# Top-level files of a repository: what the model is, and its license.
_TOP: Final = (*INDEXES, "config.json", "README.md", "LICENSE*", "NOTICE*")
_WEIGHTS: Final = (".safetensors", ".bin")
# Weights for other libraries, and files that are not part of a pipeline.
_NEVER: Final = (
    *("*.onnx*", "*.pb", "*.msgpack", "*.h5", "*.ckpt", "*.pt", "*.pth", "*.gguf", "*.tflite"),
    *("openvino*", "flax_*", "*.ot", "*.mlmodel*", "*.xml"),
    *("*.png", "*.jpg", "*.jpeg", "*.webp", "*.gif", "*.mp4"),
)
_TABLES: Final = (".parquet", ".arrow", ".tar")
_OF_SAVED_TABLES: Final = ("state.json", "dataset_dict.json", "dataset_info.json")
_NOTES: Final = ("README.md", "LICENSE*")


def choose(name: HubName, files: Iterable[str], parts: Collection[str] = ()) -> list[str]:
    """Select the files to download.

    Args:
        name: The repository.
        files: Paths of all its files.
        parts: Folders of the pipeline, if its index was read; otherwise every folder
            with a config or a tokenizer counts as a part.
    """
    paths = sorted(path for path in files if not path.startswith("."))
    if name.kind == "dataset":
        return _select_dataset_files(name, paths)
    folders = {str(PurePosixPath(path).parent) for path in paths} - {"."}
    if not set(INDEXES) & set(paths):
        folders = {"."} if "config.json" in paths else set()
    elif parts:
        folders &= set(parts)
    chosen = [path for path in paths if "/" not in path and _is_any(path, _TOP)]
    for folder in sorted(folders):
        inside = [path for path in paths if str(PurePosixPath(path).parent) == folder]
        chosen += _select_part_files(inside)
    return sorted(set(chosen))


def _select_part_files(files: list[str]) -> list[str]:
    """Return a folder's files without copies in other precisions, formats or libraries."""
    kept = [path for path in files if not _is_any(PurePosixPath(path).name, _NEVER)]
    names = {path: PurePosixPath(path).name for path in kept}
    plain = [path for path in kept if variant_of(names[path]) is None]
    # If there is only a variant, keep it; the check of the model reports what is missing.
    if any(path.endswith(_WEIGHTS) for path in plain):
        kept = plain
    if any(path.endswith(".safetensors") for path in kept):
        kept = [path for path in kept if ".bin" not in names[path]]
    return kept


def _select_dataset_files(name: HubName, files: list[str]) -> list[str]:
    inside = [
        path for path in files if not name.folder or path.startswith(f"{name.folder.rstrip('/')}/")
    ]
    chosen = [path for path in inside if is_data(path)]
    return sorted({*chosen, *(path for path in files if _is_any(path, _NOTES))})


def is_data(path: str) -> bool:
    """Return whether readers of datasets read a file of this name."""
    suffixes = {*_TABLES, *PICTURE_SUFFIXES, *VIDEO_SUFFIXES, *CAPTION_SUFFIXES}
    name = PurePosixPath(path)
    return name.suffix.lower() in suffixes or name.name in (*METADATA, *_OF_SAVED_TABLES)


def _is_any(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


_SPARE = 1 << 30  # bytes to keep free on the disk


@dataclass(frozen=True)
class Listing:
    """The files of a repository that a job reads.

    Attributes:
        commit: Commit hash of the revision.
        files: Path → bytes.
        missing: Bytes of the files that are not cached.
    """

    commit: str
    files: Mapping[str, int]
    missing: int

    @property
    def total(self) -> int:
        """Return the bytes of all files."""
        return sum(self.files.values())


def list_files(name: HubName, scratch: str | None = None) -> Listing:
    """Query the hub for the files of a repository.

    Args:
        name: The repository.
        scratch: Cache directory for files read meanwhile. In the real cache, a model's index alone
            would be mistaken for the model.

    Raises:
        HubError: The hub refuses, is unreachable, or the repository has nothing that a job can
            read.
    """
    from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.hf_api import RepoFile

    try:
        api = HfApi()
        commit = api.repo_info(name.repo, repo_type=name.kind, revision=name.revision).sha or ""
        tree = api.list_repo_tree(name.repo, recursive=True, revision=commit, repo_type=name.kind)
        sizes = {
            file.path: file.lfs.size if file.lfs else file.size
            for file in tree
            if isinstance(file, RepoFile)
        }
        parts: list[str] = []
        file = next((index for index in INDEXES if index in sizes), None)
        if name.kind == "model" and file is not None:
            # This file is small. For a gated model the hub refuses it, but not the listing.
            index = hf_hub_download(name.repo, file, revision=commit, cache_dir=scratch)
            parts = find_parts(find_index(Path(index).parent) or {}, sizes)
        chosen = choose(name, sizes, parts)
        if name.kind == "dataset" and chosen:
            api.auth_check(name.repo, repo_type=name.kind)
    except Exception as error:  # from the network, the server or the library
        raise explain(error, name) from error
    whole = name.kind == "dataset" or _scores(name, sizes, commit, scratch)
    if not chosen or not (whole or any("/" in path for path in chosen)):
        what = "model in the layout of diffusers" if name.kind == "model" else "images or tables"
        raise HubError(f"{name.repo} has no {what}")
    files = {path: sizes[path] for path in chosen}
    missing = [
        path
        for path in files
        if not isinstance(
            try_to_load_from_cache(name.repo, path, revision=commit, repo_type=name.kind), str
        )
    ]
    return Listing(commit, files, sum(files[path] for path in missing))


def find_parts(index: Mapping[str, Any], files: Iterable[str]) -> list[str]:
    """Return the folders of a pipeline's components, by its index and the repository's files.

    Of a model whose denoiser is trained from a folder of its own, that one is read and no other.
    """
    parts = [part for part, entry in index.items() if isinstance(entry, list) and all(entry)]
    present = {path.partition("/")[0] for path in files}
    for family in FAMILIES.values():
        own = {flavour.folder for flavour in family.flavours.values()} & present
        if own and index.get("_class_name") in family.pipelines:
            parts = [part for part in parts if part != family.component] + sorted(own)
    return parts


def _scores(name: HubName, sizes: Mapping[str, int], commit: str, scratch: str | None) -> bool:
    """Return whether a repository without a pipeline is a model that scores samples."""
    from huggingface_hub import hf_hub_download

    if set(INDEXES) & set(sizes) or "config.json" not in sizes:
        return False
    config = hf_hub_download(name.repo, "config.json", revision=commit, cache_dir=scratch)
    return is_scorer(read_json(Path(config)))


def check_room(listing: Listing, name: HubName) -> None:
    """Reject a download that does not fit on the cache's disk.

    Raises:
        HubError: It does not fit.
    """
    cache, variable = cache_of(name)
    free = shutil.disk_usage(nearest(cache)).free
    if listing.missing and free < listing.missing + _SPARE:
        raise HubError(
            f"{name.repo} needs {size(listing.missing)} in {cache}, where {size(free)} are free",
            f"free space, or set {variable} to a larger disk",
        )


def main() -> int:
    """Print the listing as JSON; return the exit status."""
    kind, text = sys.argv[1:]
    assert kind in get_args(Kind)
    name = HubName.read(kind, text)  # type: ignore[arg-type]
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    try:
        if name is None:
            raise HubError(
                why_refused(text) or f"{text} is not a name of the hub",
                None if is_url(text) else "use ORG/NAME or ORG/NAME@REVISION",
            )
        if isinstance(name, StoreUrl):
            from jobs.hub.stores import list_store  # which imports this module

            listing = list_store(name)
        else:
            with tempfile.TemporaryDirectory(prefix="fsdp-tui-") as scratch:
                listing = list_files(name, scratch)
        check_room(listing, name)
    except HubError as error:
        print(f"fsdp-tui: {error}", file=sys.stderr)
        return 3 if error.passing else 2
    print(json.dumps(asdict(listing)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
