"""Masks on the grid of the latents, and the weights of losses that training reads.

A mask is fitted as its image is (the same crop and flip), averaged over the pixels of each cell of
the latents, and cached. Where it is black the weight is `unmasked_weight`. A sample's weights are
divided by their mean, so that its loss is the mean over what its mask shows: an image with a small
mask counts as much as any other, whoever else is in the batch.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from safetensors import safe_open

from engine.data.encode.shared_work import find_missing, piece_size, pieces, together
from engine.data.index.data_index import read_content
from engine.data.index.loss_weights import weights_of
from engine.data.index.views import FITTING, fit, view_of
from engine.data.read.masks import read_mask
from jobs.errors import UserError
from jobs.untrusted.files import LARGEST_PICTURE, read_regular

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from engine.data.encode.latents import LatentKeys
    from engine.data.encode.tensor_cache import TensorCache
    from engine.data.index.data_index import Sample
    from engine.run_context import RunContext
    from jobs.spec.job_spec import InputKeys, JobSpec
    from jobs.spec.keys.data import DataKeys

_CELLS: Final = 1
"""Goes into cache keys: raise it when `cells_of` comes to other numbers."""


class LossWeights:
    """The weights of the losses of a job's samples.

    Args:
        spec: The job.
        samples: Those that it trains on.
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
        """Return the factor for the errors of a sample, fp32, on the CPU.

        Args:
            number: Of the sample.
            view: Which of its views.
            latents: `(C, h, w)` or `(C, f, h, w)`; their shape counts.

        Returns:
            A scalar in a job without masks; else `(1, h, w)` or `(1, 1, h, w)`.
        """
        weight = torch.tensor(self._weights[number])
        if not self.masked:
            return weight
        height, width = latents.shape[-2:]
        cells = torch.ones(height, width)
        if self._samples[number].mask:
            key = mask_key(self._masks, self._samples[number], view, (height, width), self._spec)
            cells = normalised(self._masks.read(key)["mask"], self._spec.unmasked_weight)
        return (cells * weight).view(*[1] * (latents.dim() - 2), height, width)


def normalised(mask: torch.Tensor, unmasked: float) -> torch.Tensor:
    """Weights `(h, w)` with a mean of 1; zeros for a mask that is black, with nothing outside.

    Args:
        mask: `(h, w)`, from 0 to 1.
        unmasked: The weight where it is 0.
    """
    weights = unmasked + (1 - unmasked) * mask
    mean = weights.mean()
    return weights / mean if mean > 0 else weights


def mask_key(
    cache: TensorCache, sample: Sample, view: int, cells: tuple[int, int], spec: DataKeys
) -> str:
    """Return the name of a mask in the cache."""
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
    """Fill the cache with the masks of these samples and views, the ranks together.

    Args:
        run: The job and its ranks.
        cache: Of masks.
        latents: Of latents, where all of theirs are.
        latent_keys: Sample and view → key in it.
        samples: The job's.
        views: Samples and views.

    Raises:
        UserError: A mask changed after it was indexed.
    """
    if not any(sample.mask for sample in samples):
        return
    drawn: dict[str, tuple[int, int, tuple[int, int]]] = {}
    for number, view in views:
        if number < len(samples) and samples[number].mask:
            cells = _grid(latents.path(latent_keys(number, view)))
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
    content = _content(sample, spec)
    mask = read_mask(content, alpha=not sample.mask_path)
    if mask is None:
        raise _changed(sample)
    mask = mask.resize((sample.width, sample.height))  # a mask may be smaller than its image
    pixels = np.asarray(fit(mask, view_of(sample, view, spec)), dtype=np.float32) / 255
    averaged: Any = torch.nn.functional.adaptive_avg_pool2d(
        torch.from_numpy(pixels)[None, None], cells
    )
    return averaged[0, 0].contiguous()


def _content(sample: Sample, spec: InputKeys) -> bytes:
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


def _grid(path: Path) -> tuple[int, int]:
    """Height and width of cached latents; reads the header alone."""
    with safe_open(path, framework="pt") as file:
        *_, height, width = file.get_slice("latents").get_shape()
    return int(height), int(width)
