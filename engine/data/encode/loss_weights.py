"""Masks on the latent grid, and the loss weights that training reads.

A mask gets the same crop and flip as its image, is averaged over the pixels of each latent cell,
and is cached. Black areas weigh `unmasked_weight`. Each sample's weights are divided by their mean,
so its loss is a mean over the unmasked area: an image with a small mask counts as much as any
other, independent of the rest of the batch.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from engine.data.encode.tensor_cache import (
    TensorCache,
    find_missing,
    grid_of,
    piece_size,
    pieces,
    together,
)
from engine.data.index.data_index import Sample, read_content, weights_of
from engine.data.index.views import FITTING, fit, in_frames, view_of
from engine.data.read.masks import read_mask
from jobs.errors import UserError
from jobs.untrusted.files import LARGEST_PICTURE, read_regular

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from engine.data.encode.latents import LatentKeys
    from engine.run_context import RunContext
    from jobs.spec.job_spec import InputKeys, JobSpec
    from jobs.spec.keys.data import DataKeys

_CELLS: Final = 1
"""Part of the cache keys: raise it when the result of `cells_of` changes."""


class LossWeights:
    """The loss weights of a job's samples.

    Args:
        spec: The job.
        samples: The samples that the job trains on.
        masks: The cache of their masks.
    """

    def __init__(self, spec: JobSpec, samples: Sequence[Sample], masks: TensorCache) -> None:
        self._spec = spec
        self._samples = samples
        self._masks = masks
        self._weights = weights_of(samples, spec)
        self.masked = any(sample.mask for sample in samples)
        self.active = self.masked or any(weight != 1 for weight in self._weights)

    def of(self, number: int, view: int, latents: torch.Tensor) -> torch.Tensor:
        """Return the factor for a sample's per-element errors, fp32, on the CPU.

        Args:
            number: Index of the sample.
            view: Index of the view.
            latents: `(C, h, w)` or `(C, f, h, w)`; only the shape is used.

        Returns:
            A scalar if the job has no masks, else `(1, h, w)` or `(1, 1, h, w)`; `(1, f, h, w)`
            with reference images in frames of their own.
        """
        weight = torch.tensor(self._weights[number])
        return self.of_mask(number, view, latents) * weight if self.masked else weight

    def of_mask(self, number: int, view: int, latents: torch.Tensor) -> torch.Tensor:
        """Return the factor of a sample's mask alone, `(1, h, w)` or `(1, 1, h, w)`, as `of`."""
        height, width = latents.shape[-2:]
        cells = torch.ones(height, width)
        if self._samples[number].mask:
            key = mask_key(self._masks, self._samples[number], view, (height, width), self._spec)
            cells = normalised(self._masks.read(key)["mask"], self._spec.unmasked_weight)
        cells = cells.view(*[1] * (latents.dim() - 2), height, width)
        if before := len(in_frames(self._samples[number])):  # the mask is not theirs
            own = cells.expand(-1, latents.shape[1] - before, -1, -1)
            return torch.cat([torch.ones(1, before, height, width), own], dim=1)
        return cells


def normalised(mask: torch.Tensor, unmasked: float) -> torch.Tensor:
    """Return weights `(h, w)` with mean 1, or zeros if all weights are zero.

    Args:
        mask: `(h, w)`, from 0 to 1.
        unmasked: The weight where the mask is 0.
    """
    weights = unmasked + (1 - unmasked) * mask
    mean = weights.mean()
    return weights / mean if mean > 0 else weights


def mask_key(
    cache: TensorCache, sample: Sample, view: int, cells: tuple[int, int], spec: DataKeys
) -> str:
    """Return the cache key of a mask."""
    return cache.key(
        mask=sample.mask,
        alpha=not sample.mask_path,
        cells=list(cells),
        image=[sample.width, sample.height],
        fitting=FITTING,
        averaging=_CELLS,
        **view_of(sample, view, spec).facts(),
    )


def prepare_masks(
    run: RunContext,
    cache: TensorCache,
    latents: TensorCache,
    latent_keys: LatentKeys,
    samples: Sequence[Sample],
    views: Iterable[tuple[int, int]],
) -> None:
    """Fill the cache with the masks of these samples and views, split over the ranks.

    Args:
        run: The job and its ranks.
        cache: The cache of masks.
        latents: The cache of latents, complete for these views.
        latent_keys: Maps a sample and a view to its key in `latents`.
        samples: The samples of the job.
        views: Pairs of a sample's index and a view.

    Raises:
        UserError: A mask changed after it was indexed.
    """
    if not any(sample.mask for sample in samples):
        return
    drawn: dict[str, tuple[int, int, tuple[int, int]]] = {}
    for number, view in views:
        if number < len(samples) and samples[number].mask:
            cells = grid_of(latents.path(latent_keys(number, view)))
            drawn[mask_key(cache, samples[number], view, cells, run.spec)] = (
                number,
                view,
                cells,
            )
    missing = find_missing(cache, list(drawn), run)
    with together("masks", len(missing), run) as shared:
        size = piece_size(len(missing), run.world.size)
        for piece in pieces(missing, size, "masks", run):
            for key in piece:
                number, view, cells = drawn[key]
                cache.write(key, {"mask": cells_of(samples[number], view, cells, run.spec)})
                shared.add()


def cells_of(sample: Sample, view: int, cells: tuple[int, int], spec: InputKeys) -> torch.Tensor:
    """Return a view of a sample's mask, averaged over each cell: `(h, w)`, from 0 to 1.

    Raises:
        UserError: The mask changed after it was indexed.
    """
    content = _mask_content(sample, spec)
    mask = read_mask(content, alpha=not sample.mask_path)
    if mask is None:
        raise _changed(sample)
    mask = mask.resize((sample.width, sample.height))  # a mask may be smaller than its image
    pixels = np.asarray(fit(mask, view_of(sample, view, spec)), dtype=np.float32) / 255
    averaged: Any = torch.nn.functional.adaptive_avg_pool2d(
        torch.from_numpy(pixels)[None, None], cells
    )
    return averaged[0, 0].contiguous()


def _mask_content(sample: Sample, spec: InputKeys) -> bytes:
    try:
        if sample.mask_path:
            content = read_regular(Path(sample.mask_path), LARGEST_PICTURE)
        else:
            content = read_content(sample, spec)
    except OSError as error:
        raise UserError(
            f"the mask of {sample.name} is no longer readable ({error.strerror or error})",
            "resume the job: it reads its data again",
        ) from None
    if hashlib.sha256(content).hexdigest() != sample.mask:
        raise _changed(sample)
    return content


def _changed(sample: Sample) -> UserError:
    return UserError(
        f"the mask of {sample.name} changed while the job was preparing its data", "resume the job"
    )
