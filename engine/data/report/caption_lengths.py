"""How long captions are in tokens, without loading any model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jobs.spec.families import get_family

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from jobs.spec.keys.job import JobKeys


def count_tokens(texts: Sequence[str], spec: JobKeys, model_root: Path) -> list[int] | None:
    """Count each text's tokens, special ones included, as the family's main text encoder gets them.

    Returns:
        None when the model brings no tokenizer that can be read.
    """
    directory = model_root / get_family(spec.model_family).tokenizer
    tokenizer = _fast(directory) or _slow(directory)
    if tokenizer is None:
        return None
    return [tokenizer(text) for text in texts]


def _fast(directory: Path) -> Any:
    """From `tokenizer.json`, which takes milliseconds where transformers takes seconds."""
    from tokenizers import Tokenizer

    file = directory / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception:  # the library raises plain ones for whatever it cannot read
        return None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda text: len(tokenizer.encode(text).ids)


def _slow(directory: Path) -> Any:
    """From the vocabulary files of older models."""
    if not directory.is_dir():
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception:  # whatever its many readers raise: tokens are then not counted
        return None
    return lambda text: len(tokenizer(text, truncation=False).input_ids)
