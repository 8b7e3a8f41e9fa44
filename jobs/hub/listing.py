"""`python -m jobs.hub.listing KIND NAME`: ask the hub what of a model or dataset would be fetched.

A process of its own: `huggingface_hub` takes 0.3 s to import, and a network may not answer.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from jobs.hub.choose import choose
from jobs.hub.trouble import HubError, explain
from jobs.paths import nearest
from jobs.run.rundir import read_json
from jobs.spec.values.hub_names import HubName, Kind
from jobs.units import size

if TYPE_CHECKING:
    from collections.abc import Mapping

_SPARE = 1 << 30  # bytes that stay free on the disk


@dataclass(frozen=True)
class Listing:
    """What a job reads of a repository.

    Attributes:
        commit: The revision, as a commit.
        files: Path → bytes.
        missing: Bytes of those that are not in the cache.
    """

    commit: str
    files: Mapping[str, int]
    missing: int

    @property
    def total(self) -> int:
        """Bytes of all files."""
        return sum(self.files.values())


def list_files(name: HubName, scratch: str | None = None) -> Listing:
    """Ask the hub.

    Args:
        name: Of what.
        scratch: Takes what has to be read for that, instead of the cache, where a model's index
            alone would be taken for the model.

    Raises:
        HubError: It refuses, cannot be reached, or has nothing that a job could read.
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
        if name.kind == "model" and "model_index.json" in sizes:
            # Small, and refused where the model is gated, though its listing is not.
            index = hf_hub_download(
                name.repo, "model_index.json", revision=commit, cache_dir=scratch
            )
            parts = [
                part
                for part, entry in (read_json(Path(index)) or {}).items()
                if isinstance(entry, list) and all(entry)
            ]
        chosen = choose(name, sizes, parts)
        if name.kind == "dataset" and chosen:
            api.auth_check(name.repo, repo_type=name.kind)
    except Exception as error:  # of a network, a server, a library
        raise explain(error, name) from error
    if not any("/" in path or name.kind == "dataset" for path in chosen):
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


def check_room(listing: Listing, name: HubName) -> None:
    """Refuse what the disk of the cache has no room for.

    Raises:
        HubError: It has not.
    """
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    free = shutil.disk_usage(nearest(cache)).free
    if listing.missing and free < listing.missing + _SPARE:
        raise HubError(
            f"{name.repo} needs {size(listing.missing)} in {cache}, where {size(free)} are free",
            "free space, or set HF_HOME to a larger disk",
        )


def main() -> int:
    """Print what would be fetched, as JSON."""
    kind, text = sys.argv[1:]
    assert kind in get_args(Kind)
    name = HubName.read(kind, text)  # type: ignore[arg-type]
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    try:
        if name is None:
            raise HubError(f"{text} is not a name of the hub", "use ORG/NAME or ORG/NAME@REVISION")
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
