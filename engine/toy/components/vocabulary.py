"""The two tokenizers of a FLUX model, built from the toy's own captions.

Both are of the published kinds: byte-pair merges for CLIP, which encode any text, and a
unigram vocabulary for T5, which has words, single characters and `<unk>`.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

from transformers import CLIPTokenizer, T5TokenizerFast

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

CLIP_LENGTH = 77
T5_LENGTH = 512

WORD_END = "</w>"
START, END = "<|startoftext|>", "<|endoftext|>"
WORD_START = "\N{LOWER ONE EIGHTH BLOCK}"  # T5 writes a space as this sign.

Pair = tuple[str, str]


def build_clip_tokenizer(captions: Iterable[str]) -> CLIPTokenizer:
    """Build a CLIP tokenizer in which every word of `captions` is one token."""
    merges = byte_pair_merges(_count_words(captions))
    signs = byte_signs()
    tokens = [
        *signs,
        *(sign + WORD_END for sign in signs),
        *(left + right for left, right in merges),
        START,
        # Last: the text encoder may look for the end of a text as its highest id.
        END,
    ]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=CLIP_LENGTH)


def save_clip_vocabulary(tokenizer: CLIPTokenizer, directory: Path) -> None:
    """Write `vocab.json` and `merges.txt` too, as published models have them.

    transformers 5 writes `tokenizer.json` alone; older readers want the other two.
    """
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    vocabulary = json.dumps(model["vocab"], ensure_ascii=False)
    (directory / "vocab.json").write_text(vocabulary, encoding="utf-8")
    lines = ["#version: 0.2", *merges]
    (directory / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def build_t5_tokenizer(captions: Iterable[str]) -> T5TokenizerFast:
    """Build a T5 tokenizer in which every word of `captions` is one token."""
    words = _count_words(captions)
    total = sum(words.values())
    pieces = [(WORD_START + word, math.log(words[word] / total)) for word in sorted(words)]
    # Printable ASCII and Latin-1, one sign each, less likely than the rarest word by far.
    signs = [chr(code) for code in (*range(0x21, 0x7F), *range(0xA1, 0x100))]
    rare = min(score for _, score in pieces) - 4.0
    pieces += [(sign, rare) for sign in (WORD_START, *signs)]
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    return T5TokenizerFast(
        vocab=[*special, *pieces],
        extra_ids=0,
        additional_special_tokens=[],
        model_max_length=T5_LENGTH,
    )


def byte_signs() -> list[str]:
    """Return the 256 printable signs of the byte values 0 to 255 in byte-level vocabularies.

    A byte that prints is its own Latin-1 sign; the others take the signs from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [
        chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in range(256)
    ]


def byte_pair_merges(words: Counter[str]) -> list[Pair]:
    """Merge the commonest neighbours again and again, until every word is one token.

    Args:
        words: How often each (ASCII) word occurs. Ties go to the pair first in the alphabet.
    """
    split = {word: (*word[:-1], word[-1] + WORD_END) for word in words}
    merges: list[Pair] = []
    while True:
        pairs: Counter[Pair] = Counter()
        for word, parts in split.items():
            for pair in pairwise(parts):
                pairs[pair] += words[word]
        if not pairs:
            return merges
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        split = {word: _merge(parts, best) for word, parts in split.items()}


def _merge(parts: Sequence[str], pair: Pair) -> tuple[str, ...]:
    """`parts` with every occurrence of `pair` made one."""
    merged: list[str] = []
    for part in parts:
        if merged and (merged[-1], part) == pair:
            merged[-1] += part
        else:
            merged.append(part)
    return tuple(merged)


def _count_words(captions: Iterable[str]) -> Counter[str]:
    return Counter(word for caption in captions for word in caption.lower().split())
