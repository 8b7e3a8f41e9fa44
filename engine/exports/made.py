"""Say how one of the authors' tensors is assembled from diffusers' tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Made:
    """A tensor of the authors' layout.

    Attributes:
        members: The names in diffusers of what it consists of, in order.
        order: Which row of all of theirs each of its rows is; None where they follow each other.
        transposed: Whether it is a matrix with its sides swapped.
        kernel: Whether it is a linear layer as a 1x1 convolution.
    """

    members: tuple[str, ...]
    order: torch.Tensor | None = None
    transposed: bool = False
    kernel: bool = False

    def make(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Put it together.

        Args:
            tensors: At least its members, by their names in diffusers.
        """
        parts = [tensors[name] for name in self.members]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        whole = whole if self.order is None else whole[self.order]
        whole = whole.T if self.transposed else whole
        return whole[:, :, None, None] if self.kernel else whole

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """Return its shape.

        Args:
            shapes: Those of at least its members.
        """
        first = shapes[self.members[0]]
        shape = (sum(shapes[m][0] for m in self.members), *first[1:]) if first else ()
        shape = shape[::-1] if self.transposed else shape
        return (*shape, 1, 1) if self.kernel else shape
