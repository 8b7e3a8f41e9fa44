"""Conditioning images in a batch: latents under their own names, together with encoded prompts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeAlias

import torch
from PIL import Image

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.diffusion.objective import NoisySample

Conditioning: TypeAlias = Image.Image | list[Image.Image]
"""A conditioning image of a prompt, or the frames of a conditioning video."""

REFERENCE: Final = "reference_"
"""With a number appended, the name of a conditioning image's latents in a condition."""

FIRST_FRAME: Final = "first_frame"
"""Name of the latents of a video's given first frame, `(B, C, 1, h, w)`, in a condition."""


BEGINNING: Final = "beginning"
"""Name of the latents `(B, C, f, h, w)` of a video's first frame followed by gray frames.

The last frame is the video's own for models that take it. `(B, C, 1, h, w)` where nothing follows
the first frame.
"""


KEYFRAME: Final = "keyframe_"
"""With 0 appended, the name of a first frame's latents `(B, C, 1, h, w)`; of a last one's, with 1.

They are for models that have it in tokens of its own, and stay in the loss.
"""


SOUND: Final = "sound"
"""Name of the latents of a video's sound, `(B, L, C)`, in a condition."""

SOUND_NOISE: Final = "sound_noise"
"""Name of their noise."""

SOUND_WEIGHT: Final = "sound_weight"
"""Name of the weight of their loss, `(B,)`: 0 for a video without sound."""


def references_in(condition: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the latents of conditioning images, each `(B, C, h, w)`, in their order.

    Of models that take videos, a control video comes first.
    """
    return _numbered(REFERENCE, condition)


def keyframes_in(condition: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the latents of a first frame and of a last one, each `(B, C, 1, h, w)`."""
    return _numbered(KEYFRAME, condition)


def _numbered(name: str, condition: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    while (own := f"{name}{len(tensors)}") in condition:
        tensors.append(condition[own])
    return tensors


def noised(
    latents: Mapping[str, torch.Tensor], level: float, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Return latents with the noise level at which a model is conditioned on them; 0 for none."""
    if not level:
        return dict(latents)
    return {
        name: torch.lerp(clean, torch.randn(clean.shape, generator=generator), level)
        for name, clean in latents.items()
    }


def first_frame_of(latents: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the condition for videos `(B, C, f, h, w)` whose first frame is given to the model.

    The autoencoders are causal: the latents of a first frame do not depend on later frames.
    """
    return {FIRST_FRAME: latents[:, :, :1].contiguous()}


def insert_first_frame(
    noisy: torch.Tensor, condition: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Replace the first latent frame by the given one, if the condition has one.

    Args:
        noisy: `(B, C, f, h, w)`.
        condition: Encoded prompts, and the given first frame, if any.

    Returns:
        The latents, and the factor of timesteps, `(f, h, w)`: 0 for the given frame; None without
        one.
    """
    first = condition.get(FIRST_FRAME)
    if first is None:
        return noisy, None
    mask = torch.ones(noisy.shape[2:], device=noisy.device)
    mask[0].zero_()
    return torch.cat([first.to(noisy.dtype), noisy[:, :, 1:]], dim=2), mask


def loss_inputs(
    prediction: torch.Tensor, problem: NoisySample, condition: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, NoisySample]:
    """Exclude a given first frame from the loss: return prediction and target without it.

    With sound, the prediction is `joint`. It is scaled so that its mean squared error is the
    video's plus the sound's.
    """
    target = problem.target
    if SOUND in condition:
        prediction, heard = split_joint(prediction, target.shape)
    if FIRST_FRAME in condition:
        prediction, target = prediction[:, :, 1:], target[:, :, 1:]
    if SOUND in condition:
        sound = (condition[SOUND_NOISE] - condition[SOUND]).flatten(1)
        cells = target[0].numel(), sound[0].numel()
        video_scale, sound_scale = ((sum(cells) / own) ** 0.5 for own in cells)
        weight = condition[SOUND_WEIGHT].view(-1, 1).sqrt() * sound_scale
        prediction = joint(prediction.float() * video_scale, heard.float() * weight)
        target = joint(target * video_scale, sound * weight)
    return prediction, replace(problem, target=target)


def joint(video: torch.Tensor, sound: torch.Tensor) -> torch.Tensor:
    """Return what is predicted of a video and of its sound as one tensor, `(B, n)`."""
    return torch.cat([video.flatten(1), sound.flatten(1)], dim=1)


def split_joint(both: torch.Tensor, size: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the video, of a size, and the sound, `(B, n)`, of `joint`."""
    cells = size[1:].numel()
    return both[:, :cells].view(size), both[:, cells:]
