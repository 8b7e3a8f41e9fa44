"""Count the tokens of what stands in quotes, which HunyuanVideo 1.5 encodes by bytes (ByT5)."""

from __future__ import annotations

import os
import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from jobs.errors import UserError
from jobs.paths import expand
from jobs.spec.keys.prompts import requests_of
from jobs.spec.values.dataset_files import CAPTION_SUFFIXES, list_files, same_name
from jobs.spec.values.datasets import TRIGGER, datasets_of, fallback_caption, find_layout
from jobs.untrusted.files import read_regular

if TYPE_CHECKING:
    from jobs.spec.job_spec import DataPlanKeys
    from jobs.spec.values.datasets import Dataset

MOST: Final = 256  # the pipeline cuts off the others
_MOST_READ: Final = 5000  # caption files: a tenth of a second
_QUOTED: Final = re.compile(r'"([^"\n]*)"|“([^”\n]*)”')
_MARKS: Final = ('"', "“")


def quoted_tokens(text: str) -> int:
    """Return the tokens of a text's quotes: of `Text "A". Text "B". ` and an end; 0 without any."""
    quotes = dict.fromkeys(map("".join, _QUOTED.findall(text)))
    size = sum(len(f'Text "{quote}". '.encode(errors="replace")) for quote in quotes)
    return min(MOST, size + 1) if quotes else 0


def most_quoted_tokens(spec: DataPlanKeys, *, training: bool) -> int:
    """Return the most tokens of any caption, or of any prompt; `MOST` where captions are unknown.

    Captions in tables, archives and metadata files count as unknown, and those of large folders.
    """
    if not training:
        prompts = [text or "" for r in requests_of(spec) for text in (r.prompt, r.negative_prompt)]
        return max((quoted_tokens(_with(spec.trigger_word, text)) for text in prompts), default=0)
    if not (spec.dataset or spec.datasets):
        return MOST
    try:
        return max(_most_of(spec, dataset) for dataset in datasets_of(spec))
    except (OSError, UserError, ValueError):  # another check says what is wrong with it
        return MOST


def _most_of(spec: DataPlanKeys, dataset: Dataset) -> int:
    root, trigger = expand(dataset.path), dataset.trigger_word or spec.trigger_word or ""
    if not root.is_dir() or find_layout(root) != "folder":
        return MOST
    listing = list_files(root)
    samples = listing.pictures + listing.videos
    if not samples or listing.metadata or len(samples) > _MOST_READ:
        return MOST
    files = []
    for sample in samples:
        beside = map(sample.with_suffix, CAPTION_SUFFIXES)
        paths = [listing.renamed.get(same_name(path), path) for path in beside]
        path = next((path for path in paths if path.is_file()), None)
        if path is not None and path.suffix == ".json":
            return MOST
        files += [] if path is None else [path]
    own = [fallback_caption(spec, dataset), spec.class_prompt, spec.preservation_class, trigger]
    texts = [*_marked(tuple(map(_stamp, files))), *filter(None, own)]
    # Shuffled parts of a caption may open quotes that others close.
    if spec.shuffle_captions and any(mark in text for text in texts for mark in _MARKS):
        return MOST
    joined = spec.caption_lines == "joined"
    lines = (line for text in texts for line in ([text] if joined else text.split("\n")))
    return max((quoted_tokens(_with(trigger, line)) for line in lines), default=0)


def _with(trigger: str | None, text: str) -> str:
    return " ".join((text.replace(TRIGGER, trigger) if trigger else text).split())


def _stamp(path: Path) -> tuple[str, int, int]:
    status = path.stat()
    return os.fspath(path), status.st_size, status.st_mtime_ns


@lru_cache(maxsize=16)
def _marked(files: tuple[tuple[str, int, int], ...]) -> tuple[str, ...]:
    """Return the captions with quotes. Cached, since a ranking of setups asks many times."""
    texts = (read_regular(Path(name)).decode(errors="replace") for name, _, _ in files)
    return tuple(text for text in texts if any(mark in text for mark in _MARKS))
