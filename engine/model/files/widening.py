"""A layer that has more inputs than its file: those are for a conditioning image, and zero."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.model.files.published_packing import BASE_HINT
from jobs.errors import UserError

if TYPE_CHECKING:
    import torch

    from engine.model.files.weight_files import StoredTensor


def shape_in_file(shape: tuple[int, ...], place: StoredTensor) -> tuple[int, ...]:
    """Return the shape that the file of a widened layer's weight should have.

    Args:
        shape: The weight's own, `(out, in)`.
        place: Where it is, with any number of inputs up to that.

    Raises:
        UserError: It is quantized.
    """
    if place.packed is not None:
        raise UserError(
            f"{place.file.parent} has {place.name} quantized, which cannot get inputs for a "
            "conditioning image",
            BASE_HINT,
        )
    return (*shape[:1], min(shape[1], place.shape[-1]))


def narrowed(here: torch.Tensor, place: StoredTensor) -> torch.Tensor:
    """Keep the columns of a weight that its file has, and zero all others.

    Args:
        here: Rows of the weight, or another tensor, which stays as it is.
        place: Where it is.
    """
    if len(place.shape) != 2 or here.dim() != 2 or here.shape[1] <= place.shape[1]:
        return here
    whole = here.detach()
    whole[:, place.shape[1] :].zero_()
    return whole[:, : place.shape[1]]
