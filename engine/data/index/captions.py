"""Turn the content of caption files into the texts that are encoded. Pure.

All texts that training may use are known before training starts, so that each is encoded only once:
lines are separate captions, and tag orders are drawn here rather than in each step.
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
    """Return all texts of a sample without duplicates; training cycles through them.

    Args:
        written: The captions as written, possibly of several lines; no caption means an empty one.
        spec: The job.
        trigger: The trigger word of its dataset.
    """
    texts: list[str] = []
    for caption in _captions(written, spec):
        texts += _orders(with_trigger(caption, trigger), spec, bool(trigger))
    return tuple(dict.fromkeys(texts))


def with_trigger(caption: str, trigger: str | None) -> str:
    """Return the caption with `[trigger]` replaced, or with the trigger word in front."""
    if not trigger:
        return caption
    caption = caption.replace(TRIGGER, trigger)
    if _word(trigger).search(caption):
        return caption
    return f"{trigger}{_SEPARATOR} {caption}" if caption else trigger


def with_class(caption: str, trigger: str | None, name: str) -> str:
    """Return a sample's caption with the name of a class in place of its trigger word."""
    return _word(trigger).sub(lambda match: name, caption) if trigger else caption


def _word(trigger: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w){re.escape(trigger)}(?!\w)", re.IGNORECASE)


def prompt_text(prompt: str, spec: DataKeys) -> str:
    """Return a sampling prompt with only `[trigger]` replaced, since the user wrote the rest."""
    return prompt.replace(TRIGGER, spec.trigger_word) if spec.trigger_word else prompt


def _captions(written: Sequence[str], spec: DataKeys) -> list[str]:
    captions = []
    for text in written:
        lines = [" ".join(line.split()) for line in text.split("\n")]
        lines = [line for line in lines if line]
        captions += [" ".join(lines)] if spec.caption_lines == "joined" else lines
    return [caption for caption in captions if caption] or [""]


def _orders(caption: str, spec: DataKeys, has_trigger: bool) -> list[str]:
    """Return the caption as written, plus shuffled tag orders if the job shuffles captions."""
    if not spec.shuffle_captions:
        return [caption]
    parts = [part.strip() for part in caption.split(_SEPARATOR) if part.strip()]
    kept = parts[: spec.keep_tags or int(has_trigger)]
    rest = parts[len(kept) :]
    orders = [caption]
    for number in range(1, spec.caption_shuffles):
        # Key the order by the caption alone, so that jobs share encoded texts.
        shuffled = rest.copy()
        random.Random(f"{number}:{caption}").shuffle(shuffled)
        orders.append(f"{_SEPARATOR} ".join([*kept, *shuffled]))
    return orders
