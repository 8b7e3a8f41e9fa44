"""A toy's stream between the blocks, made so that what a few training steps change can be seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


@torch.no_grad()
def open_gates(values: torch.Tensor, *, chunks: int, gates: Sequence[int], dim: int = 0) -> None:
    """Move the gates of adaptive norms to 1, so that the blocks take part from the start.

    Args:
        values: A bias, or a table of shifts, scales and gates; changed in place.
        chunks: How many of those there are.
        gates: Which of them are gates.
        dim: Along which they lie.
    """
    parts = values.chunk(chunks, dim=dim)
    for gate in gates:
        parts[gate].add_(1.0)


@torch.no_grad()
def quieten(readout: torch.Tensor, embedding: torch.Tensor) -> None:
    """Let the last layer see only a fifth of what the first one writes.

    What a block writes elsewhere is not mixed with the embedded latents then.

    Args:
        readout: Weight of the last layer, (out, width); changed in place.
        embedding: Weight of the first layer, (width, …), with fewer inputs than width.
    """
    basis = torch.linalg.qr(embedding.flatten(1).float()).Q  # (width, in)
    weight = readout.float()
    readout.copy_(weight - 0.8 * (weight @ basis) @ basis.T)


@torch.no_grad()
def mislead(bias: torch.Tensor, seed: int) -> None:
    """Have the last layer be wrong by the same everywhere, which is soon learned.

    Args:
        bias: Of the last layer; changed in place.
        seed: Same seed, same error, of size 1.
    """
    generator = torch.Generator().manual_seed(seed)
    bias.add_(torch.randn(bias.shape, generator=generator))
