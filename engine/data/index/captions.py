"""What a caption file says → the texts that are encoded. Pure.

Every text that training may use is known before training starts, so that each is encoded only
once: lines are separate captions, and orders of tags are drawn here, not in each step.
"""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING, Final

from jobs.spec.values.datasets import TRIGGER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.spec.keys.data import DataKeys

_SEPARATOR: Final = ","


def texts_of(written: Sequence[str], spec: DataKeys, trigger: str | None) -> tuple[str, ...]:
    """All texts of a sample, each once; they take turns.

    Args:
        written: Its captions as they are written, possibly of several lines; none is an empty one.
        spec: The job.
        trigger: The trigger word of its dataset.
    """
    texts: list[str] = []
    for caption in _captions(written, spec):
        texts += _orders(with_trigger(caption, trigger), spec, bool(trigger))
    return tuple(dict.fromkeys(texts))


def with_trigger(caption: str, trigger: str | None) -> str:
    """Return the caption with the trigger word in its place, or in front where it has none."""
    if not trigger:
        return caption
    caption = caption.replace(TRIGGER, trigger)
    if re.search(rf"(?<!\w){re.escape(trigger)}(?!\w)", caption, re.IGNORECASE):
        return caption
    return f"{trigger}{_SEPARATOR} {caption}" if caption else trigger


def prompt_text(prompt: str, spec: DataKeys) -> str:
    """Return a prompt to sample, with only `[trigger]` replaced: the user wrote the rest."""
    return prompt.replace(TRIGGER, spec.trigger_word) if spec.trigger_word else prompt


def _captions(written: Sequence[str], spec: DataKeys) -> list[str]:
    captions = []
    for text in written:
        lines = [" ".join(line.split()) for line in text.split("\n")]
        lines = [line for line in lines if line]
        captions += [" ".join(lines)] if spec.caption_lines == "joined" else lines
    return [caption for caption in captions if caption] or [""]


def _orders(caption: str, spec: DataKeys, has_trigger: bool) -> list[str]:
    """Return the caption as written, and with its parts in other orders if the job wants that."""
    if not spec.shuffle_captions:
        return [caption]
    parts = [part.strip() for part in caption.split(_SEPARATOR) if part.strip()]
    kept = parts[: spec.keep_tags or int(has_trigger)]
    rest = parts[len(kept) :]
    orders = [caption]
    for number in range(1, spec.caption_shuffles):
        # Keyed only by the caption, so that jobs share encoded texts.
        shuffled = rest.copy()
        random.Random(f"{number}:{caption}").shuffle(shuffled)
        orders.append(f"{_SEPARATOR} ".join([*kept, *shuffled]))
    return orders
