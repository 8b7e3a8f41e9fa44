"""Lay out MiniMax-H3's packed sequence, also of several samples (diffusers 0.42).

Its transformer has one sequence of rows: text, sound, video. Rows have positions, a modality and a
noise level of their own, so several samples can be in one sequence, as long as attention keeps them
apart: then none of them is padded or masked. The stock transformer attends to all rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from diffusers import MiniMaxH3Transformer3DModel
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_minimax_h3 import (
    MiniMaxH3Attention,
    MiniMaxH3AttnProcessor,
    _apply_rotary_emb,
)
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

VIDEO, TEXT, SOUND = range(3)
"""Modalities, which index the modulation."""
GIVEN: Final = 3
"""Rows of video that are not denoised."""
CHANNELS: Final = 2
"""Of sound: one after the other in the sequence."""

_CHUNK: Final = 5  # latents of 17 frames
_SPACE: Final = 32  # an axis of a square is this long
_FRAME: Final = 5 / 3  # positions of a frame in time; of a latent of sound, 1


class SampleAttention(MiniMaxH3AttnProcessor):
    """Attention within each sample of a sequence.

    Attributes:
        lengths: Rows of each sample; empty for one sample.
    """

    lengths: tuple[int, ...] = ()

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Call the processor for each sample of `hidden_states (1, S, D)`."""
        if len(self.lengths) < 2:
            return super().__call__(attn, hidden_states, rotary_emb, attention_mask)
        parts = hidden_states.split(self.lengths, dim=1)
        places: Sequence[Any] = [None] * len(parts)
        if rotary_emb is not None:
            cos, sin = (table.split(self.lengths) for table in rotary_emb)
            places = list(zip(cos, sin, strict=True))
        return torch.cat(
            [
                super(SampleAttention, self).__call__(attn, part, place)
                for part, place in zip(parts, places, strict=True)
            ],
            dim=1,
        )


class SharedAttention(SampleAttention):
    """Attention of a rank's rows to all rows of their samples.

    Args:
        gather: Collects the rows of all ranks, `(1, S, D)`, from each rank's own. A collective.
        rank: Which of the sequence's equal parts this rank has.
    """

    def __init__(self, gather: Callable[[torch.Tensor], torch.Tensor], rank: int) -> None:
        self._gather = gather
        self._rank = rank

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the attention of `hidden_states (1, S / ranks, D)`."""
        query, key, value = (
            layer(hidden_states).unflatten(-1, (attn.heads, -1))
            for layer in (attn.to_q, attn.to_k, attn.to_v)
        )
        query, key = attn.norm_q(query), attn.norm_k(key)
        if rotary_emb is not None:
            query, key = (_apply_rotary_emb(rows, *rotary_emb) for rows in (query, key))
        keys, values = (
            self._gather(rows.flatten(2)).unflatten(2, (attn.heads, -1)).split(self.lengths, dim=1)
            for rows in (key, value)
        )
        count = query.shape[1]
        parts, start = [], -self._rank * count  # of a sample, among this rank's rows
        for length, own_keys, own_values in zip(self.lengths, keys, values, strict=True):
            rows = query[:, max(start, 0) : max(start + length, 0)]
            start += length
            if rows.shape[1]:
                parts.append(
                    dispatch_attention_fn(
                        rows, own_keys, own_values, backend=self._attention_backend
                    )
                )
        attended = torch.cat(parts, dim=1).flatten(2, 3).type_as(query)
        for layer in attn.to_out:
            attended = layer(attended)
        return attended


class MiniMaxH3Transformer(MiniMaxH3Transformer3DModel):
    """The stock class, which can also take several samples in one sequence.

    Parameters and their names are the same.

    Attributes:
        ranks: Those that share a sequence.
    """

    ranks = 1

    # `from_config` reads the names of the settings from the signature.
    @wraps(MiniMaxH3Transformer3DModel.__init__)  # type: ignore[misc]
    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        for module in self.modules():
            if isinstance(module, MiniMaxH3Attention):
                module.set_processor(SampleAttention())

    def share_rows(
        self, gather: Callable[[torch.Tensor], torch.Tensor], rank: int, ranks: int
    ) -> None:
        """Compute on a part of each sequence; see `SharedAttention`."""
        self.ranks = ranks
        for block in self.transformer_blocks:
            block.attn.set_processor(SharedAttention(gather, rank))

    # The blocks of the pipeline read the names of its inputs from the signature.
    @wraps(MiniMaxH3Transformer3DModel.forward)
    def forward(
        self, *, texts: tuple[int, ...] = (), samples: tuple[int, ...] = (), **names: Any
    ) -> Any:
        """Call the model.

        Args:
            texts: Text rows of each sample; empty for one sample.
            samples: All rows of each sample; empty for one sample.
            names: The stock class's inputs.
        """
        if self.ranks > 1:
            samples = self._fill_up(names, samples)
        for blocks, lengths in (
            (self.token_refiner.refiner_blocks, texts),
            (self.transformer_blocks, samples),
        ):
            for block in blocks:
                block.attn.processor.lengths = lengths
        return super().forward(**names)

    def _fill_up(self, names: dict[str, Any], samples: tuple[int, ...]) -> tuple[int, ...]:
        """Add rows for ranks to have equally many: a sample that no other sees."""
        rows = len(names["position_ids"])
        more = -rows % self.ranks
        for name in ("token_tags", "timestep_indices"):
            names[name] = functional.pad(names[name], (0, more))
        names["position_ids"] = functional.pad(names["position_ids"], (0, 0, 0, more))
        return (*(samples or (rows,)), more)


class Given(NamedTuple):
    """A frame that a sample is conditioned on.

    Attributes:
        time: Its position in time, from the end of the text.
        height: Rows of its sequence, 2×2 latents each, from top to bottom.
        width: The same from left to right.
    """

    time: float
    height: int
    width: int


@dataclass(frozen=True)
class Layout:
    """Rows of a sequence of samples, each `[text | given frames | sound | video]`.

    Attributes:
        samples: Rows of each sample.
        owners: Sample of each row, `(S,)`.
        kinds: What each row is, `(S,)`: one of the modalities, or `GIVEN`.
        positions: In time, height and width, `(S, 3)`, float64.
        indices: Places of the rows of each kind. Of given frames, those of all samples' first one
            come before those of the second.
    """

    samples: tuple[int, ...]
    owners: torch.Tensor
    kinds: torch.Tensor
    positions: torch.Tensor
    indices: dict[int, torch.Tensor]


def lay_out(
    texts: Sequence[int],
    size: tuple[int, int, int],
    sounds: int,
    device: torch.device,
    given: Sequence[Given] = (),
) -> Layout:
    """Return the rows of samples that differ in the length of their texts.

    It is `MiniMaxH3PrepareLayoutStep.build_packed_sequence`, on the device: a copy would wait.

    Args:
        texts: Tokens of each sample's text.
        size: Frames, height and width in rows: those of latents, which are 2×2 latents each.
        sounds: Latents of sound, per channel; 0 for no sound.
        device: Where to.
        given: What each sample is conditioned on.
    """
    frames, height, width = size
    counts = [
        *((GIVEN, frame.height * frame.width) for frame in given),
        (SOUND, sounds * CHANNELS),
        (VIDEO, frames * height * width),
    ]
    with device:
        media = torch.cat([*map(_frame_positions, given), _media_positions(size, sounds)])
        owners, kinds, positions = [], [], []
        places: list[list[torch.Tensor]] = [[] for _ in (TEXT, *counts)]
        start = 0
        for owner, length in enumerate(texts):
            before = start
            for own, (kind, count) in zip(places, ((TEXT, length), *counts), strict=True):
                own.append(torch.arange(start, start + count))
                kinds.append(torch.full((count,), kind))
                start += count
            owners.append(torch.full((start - before,), owner))
            steps = torch.arange(length, dtype=torch.float64)
            positions.append(torch.stack([steps, *[torch.zeros_like(steps)] * 2], dim=1))
            # Everything else begins where the text ends.
            positions.append(torch.cat([media[:, :1] + length, media[:, 1:]], dim=1))
        text, *before_sound, sound, video = map(torch.cat, places)
        return Layout(
            tuple(length + sum(count for _, count in counts) for length in texts),
            torch.cat(owners),
            torch.cat(kinds),
            torch.cat(positions),
            {TEXT: text, SOUND: sound, VIDEO: torch.cat([*before_sound, video])},
        )


def keyframes(count: int, size: tuple[int, int, int]) -> list[Given]:
    """Return the places of a video's first frame and, if there are two, of its last one.

    Args:
        count: 0, 1 or 2.
        size: Of the video; see `lay_out`.
    """
    frames, height, width = size
    shown = sum(1 if latent % _CHUNK == 0 else 4 for latent in range(frames))
    times = (0.0, _FRAME * (shown - 1))
    return [Given(time, height, width) for time in times[:count]]


def _frame_positions(frame: Given) -> torch.Tensor:
    """Return positions of a frame's rows, `(rows, 3)`."""
    root = (frame.height * frame.width) ** 0.5
    time = torch.full((1,), frame.time, dtype=torch.float64)
    axes = time, _axis(frame.height, root), _axis(frame.width, root)
    return torch.stack([axis.flatten() for axis in torch.meshgrid(*axes, indexing="ij")], 1)


def _media_positions(size: tuple[int, int, int], sounds: int) -> torch.Tensor:
    """Return positions of sound and video, `(rows, 3)`, of which time begins at 0.

    Channels of sound are at both ends of the width, and at height 0.
    """
    frames, height, width = size
    root = (height * width) ** 0.5
    rows, columns = _axis(height, root), _axis(width, root)
    latent = torch.arange(frames)
    chunk, place = latent // _CHUNK, latent % _CHUNK
    # Of 17 frames, the first latent has one, and four others have four each.
    time = _FRAME * (17 * chunk + (4 * place - 3).clamp(min=0)).double()
    video = torch.stack(
        [axis.flatten() for axis in torch.meshgrid(time, rows, columns, indexing="ij")], 1
    )
    if not sounds:
        return video
    ends = torch.stack([columns[0], columns[-1]]).repeat_interleave(sounds)
    steps = torch.arange(sounds, dtype=torch.float64).repeat(CHANNELS)
    return torch.cat([torch.stack([steps, torch.zeros_like(ends), ends], dim=1), video])


def _axis(count: int, root: float) -> torch.Tensor:
    """Return positions along an axis of `count` rows, centered, of an area of `root` squared."""
    length = count / root
    steps = torch.arange(count, dtype=torch.float64)
    return _SPACE * ((1 - length) / 2 + steps * (length / count))
