"""Prompts that are sampled during training, with optional settings for each."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_serializer
from pydantic_core import PydanticCustomError

from jobs.spec.families import FAMILIES, latent_step_of, makes_layers, takes_control_videos
from jobs.spec.values.datasets import Role, Roles, Texts, roles_of
from jobs.spec.values.resolutions import all_resolutions, largest_resolution
from jobs.spec.values.spellings import as_list, as_mapping, as_none, normal_key

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jobs.spec.job_spec import DataPlanKeys, InputKeys

LARGEST_SEED: Final = 2**63 - 1
_LEAST_SIDE, _LARGEST_SIDE = 16, 8192
_LAYERS: Final = 4  # that a pipeline makes if it is not told
_SIZE: Final = re.compile(r"(?P<width>\d{1,6})(?:\s*[x×*]\s*(?P<height>\d{1,6}))?", re.IGNORECASE)
_STOCK_NAMES: Final = {
    "num_inference_steps": "steps",
    "guidance_scale": "guidance",
    "frames": "num_frames",
    "image": "conditioning_image",
    "control_image": "conditioning_image",
    "ctrl_img": "conditioning_image",
}


def read_size(value: Any) -> Any:
    """Read a side (`768`), or `WIDTHxHEIGHT`; equal sides become one number.

    Raises:
        PydanticCustomError: The value is neither, or out of range.
    """
    value = as_none(value)
    if value is None:
        return None
    if isinstance(value, (list, tuple)) and len(value) == 2:
        value = f"{value[0]}x{value[1]}"
    match = None if isinstance(value, bool) else _SIZE.fullmatch(str(value).strip())
    if match is not None:
        width = int(match["width"])
        height = int(match["height"] or width)
        if all(_LEAST_SIDE <= side <= _LARGEST_SIDE for side in (width, height)):
            return width if width == height else f"{width}x{height}"
    raise PydanticCustomError(
        "size",
        f"use a side such as 768 or WIDTHxHEIGHT such as 768x512, from {_LEAST_SIDE} to "
        f"{_LARGEST_SIDE} pixels",
    )


Size = Annotated[int | str | None, BeforeValidator(read_size)]


class ValidationPrompt(BaseModel):
    """A prompt to sample. Unset fields default to the job's `validation_*` keys.

    Attributes:
        prompt: The text; `[trigger]` is replaced by the job's trigger word.
        negative_prompt: What the image should not show. It needs a guidance above 1 or, for
            guidance-distilled models, a true_cfg_scale above 1.
        resolution: Side of the image, or `WIDTHxHEIGHT`.
        steps: Denoising steps.
        guidance: Guidance scale; for distilled models, the scale that they take as an input.
        seed: Seed of the initial noise.
        true_cfg_scale: Scale of classifier-free guidance, for guidance-distilled models.
        num_frames: Number of frames of a video.
        conditioning_image: Paths of images, for models that take them.
        conditioning_roles: What each of them is, for models that take videos; see `roles_of`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    prompt: str
    negative_prompt: str | None = None
    resolution: Size = None
    steps: int | None = Field(None, ge=1, le=10_000)
    guidance: float | None = Field(None, ge=0)
    seed: int | None = Field(None, ge=0, le=LARGEST_SEED)
    true_cfg_scale: float | None = Field(None, ge=0)
    num_frames: int | None = Field(None, ge=1, le=4096)
    conditioning_image: Texts = None
    conditioning_roles: Roles = None

    @property
    def roles(self) -> tuple[Role, ...]:
        """Return what each of its conditioning images is."""
        return roles_of(self.conditioning_roles, len(self.conditioning_image or ()))

    @model_serializer
    def _as_written(self) -> str | dict[str, Any]:
        """Serialize a prompt without settings as a string, unless that parses differently."""
        values = {name: value for name, value in self if value is not None}
        plain = len(values) == 1 and as_prompt(self.prompt) is None
        return self.prompt if plain else values


@dataclass(frozen=True)
class SampleRequest:
    """One image to sample, with all values resolved.

    Attributes:
        prompt: As written.
        negative_prompt: As written; None if there is none and it has no effect.
        width: Pixels, a multiple of the family's step.
        height: Pixels, a multiple of the family's step.
        steps: Denoising steps.
        guidance: Guidance scale.
        true_cfg_scale: Scale of classifier-free guidance, for models with `guidance` as an input.
        seed: `torch.Generator("cpu").manual_seed(seed)` gives the noise.
        guided: Whether the negative prompt has an effect, as in stock pipelines.
        frames: Number of frames of a video; 1 for an image.
        conditioning: Paths of its conditioning images.
        roles: What each of them is, for models that take videos; else empty.
        layers: How many layers to split its conditioning image into; 0 for most models.
    """

    prompt: str
    negative_prompt: str | None
    width: int
    height: int
    steps: int
    guidance: float
    true_cfg_scale: float
    seed: int
    guided: bool
    frames: int = 1
    conditioning: tuple[str, ...] = ()
    roles: tuple[Role, ...] = ()
    layers: int = 0


def requests_of(spec: DataPlanKeys) -> list[SampleRequest]:
    """Return the images that a job samples, in the order of its prompts."""
    return [_request(entry, spec) for entry in spec.validation_prompts]


def class_prompts(spec: DataPlanKeys, numbers: Iterable[int]) -> list[ValidationPrompt]:
    """Return the class images with these numbers, as prompts to sample.

    A number is the image's seed.
    """
    prompt, side = spec.class_prompt or "", all_resolutions(spec)[-1]
    return [
        ValidationPrompt(prompt=prompt, seed=number, resolution=side, num_frames=1)
        for number in numbers
    ]


def validation_seed_of(spec: DataPlanKeys) -> int:
    """Return the seed of samples and of the validation loss."""
    return spec.seed if spec.validation_seed is None else spec.validation_seed


def as_prompt(text: str) -> dict[str, Any] | None:
    """Parse `{prompt: a cat, seed: 3}`, so that one string can hold several settings.

    None if the string is not such a mapping.
    """
    value = as_mapping(text)
    return value if value is not None and "prompt" in value else None


def read_prompts(value: Any) -> Any:
    """Read a list of strings or mappings, a single one, or comma-separated strings."""
    if isinstance(value, str):
        value = [value] if _is_one(value) else as_list(value)
    if isinstance(value, (dict, ValidationPrompt)):
        value = [value]
    if not isinstance(value, (list, tuple)):
        return value
    return [_entry(entry) for entry in value]


def _is_one(text: str) -> bool:
    """Return whether a string is a single prompt: with settings, or starting with `[trigger]`."""
    marked = text.strip().startswith("[") and not any(mark in text for mark in "\"',{")
    return marked or as_prompt(text) is not None


def _entry(entry: Any) -> Any:
    if isinstance(entry, str):
        mapping = as_prompt(entry)
        if mapping is None:
            return {"prompt": entry}
        entry = mapping
    if isinstance(entry, dict):
        named = {normal_key(str(key)): value for key, value in entry.items() if value is not None}
        return {_STOCK_NAMES.get(key, key): value for key, value in named.items()}
    return entry


def _request(entry: ValidationPrompt, spec: DataPlanKeys) -> SampleRequest:
    def chosen(own: Any, default: Any) -> Any:
        return default if own is None else own

    family = FAMILIES.get(spec.model_family)
    default = chosen(spec.validation_resolution, largest_resolution(spec))
    width, height = size_of(chosen(entry.resolution, default), latent_step_of(spec))
    negative = chosen(entry.negative_prompt, spec.validation_negative_prompt)
    guidance = chosen(entry.guidance, spec.validation_guidance)
    true_scale = chosen(entry.true_cfg_scale, spec.validation_true_cfg_scale)
    kind = family.guidance_of(spec.model_flavour) if family is not None else "embedded"
    if family is not None and kind == "classifier_free":
        guided = guidance > family.guided_above
        negative = chosen(negative, "") if guided else negative
    else:
        able = family is None or (kind == "embedded" and family.true_cfg_of(spec.model_flavour))
        guided = able and negative is not None and true_scale > 1
    length = chosen(entry.num_frames, chosen(spec.validation_num_frames, spec.num_frames or 1))
    return SampleRequest(
        prompt=entry.prompt,
        negative_prompt=negative,
        width=width,
        height=height,
        steps=chosen(entry.steps, spec.validation_num_inference_steps),
        guidance=guidance,
        true_cfg_scale=true_scale,
        seed=chosen(entry.seed, validation_seed_of(spec)),
        guided=guided,
        frames=frames_of(length, spec.model_family),
        conditioning=tuple(entry.conditioning_image or ()),
        roles=entry.roles if takes_control_videos(spec) else (),
        layers=layers_of(spec),
    )


def layers_of(spec: InputKeys) -> int:
    """Return how many layers a job's samples have, at most; 0 if its model makes none."""
    if not makes_layers(spec):
        return 0
    return max((entry.references for entry in spec.datasets or []), default=0) or _LAYERS


def frames_of(length: int, family: str) -> int:
    """Return the closest number of frames, at most `length`, that a family supports."""
    return FAMILIES[family].frames_of(length) if family in FAMILIES else 1


def size_of(resolution: int | str, step: int) -> tuple[int, int]:
    """Return width and height in multiples of `step`, at most as requested."""
    width, _, height = str(resolution).partition("x")
    sides = (int(width), int(height or width))
    return max(step, sides[0] // step * step), max(step, sides[1] // step * step)
