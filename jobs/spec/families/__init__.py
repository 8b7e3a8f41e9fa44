"""Facts about model families that need no torch, one small module for each.

The engine's side of a family (how it is encoded, packed and called) is `engine/families/<name>.py`.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from jobs.errors import Problem, SpecError
from jobs.spec.families.base import Family, Flavour, Guidance, Objective
from jobs.spec.families.references import NOUNS, References
from jobs.spec.values.spellings import did_you_mean
from jobs.spec.values.value_types import read_family

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from jobs.spec.job_spec import RecipeKeys
    from jobs.spec.keys.job import JobKeys

__all__ = [
    "FAMILIES",
    "Family",
    "Flavour",
    "Guidance",
    "Objective",
    "References",
    "compares_losses",
    "component_of",
    "default_values",
    "denoiser_config",
    "experts_of",
    "flavour_of",
    "frames_beside",
    "get_family",
    "latent_step_of",
    "makes_layers",
    "needs_first_frame",
    "needs_last_frame",
    "noun_of_references",
    "references_of",
    "sees_images",
    "takes_control_videos",
    "takes_first_frame",
    "takes_keyframes",
    "token_parts",
    "widened_of",
    "wrapped_classes",
]

_NAMES = (
    "flux",
    "flux2",
    "flux3",
    "qwen_image",
    "z_image",
    "sd3",
    "sdxl",
    "stable_diffusion",
    "chroma",
    "lumina2",
    "sana",
    "auraflow",
    "pixart_sigma",
    "hidream",
    "anima",
    "krea2",
    "ideogram4",
    "wan",
    "minimax_h3",
    "ltxvideo",
    "ltx2",
    "hunyuanvideo",
    "hunyuanvideo15",
)

FAMILIES: dict[str, Family] = {
    name: import_module(f"jobs.spec.families.{name}").FAMILY for name in _NAMES
}


def get_family(name: str, flavour: str | None = None) -> Family:
    """Look a family up, and check that it has the flavour.

    Raises:
        SpecError: Unknown family or flavour; the message lists all and names the nearest.
    """
    if name not in FAMILIES:
        raise _unknown("model_family", name, FAMILIES)
    family = FAMILIES[name]
    if flavour and flavour not in family.flavours:
        raise _unknown("model_flavour", flavour, family.flavours, f" of {family.name}")
    return family


def _unknown(key: str, value: str, choices: Collection[str], of: str = "") -> SpecError:
    meant = did_you_mean(value, choices)
    text = f'unknown {key} "{value}"{of}{meant}; known: {", ".join(choices)}'
    return SpecError(text, problems=[Problem(key, text)])


def default_values(name: object, flavour: object) -> dict[str, Any]:
    """Return the defaults of a family's flavour that differ from a job's; {} if unknown."""
    family = FAMILIES.get(str(read_family(name)))
    return family.defaults_of(str(flavour)) if family is not None else {}


def flavour_of(family: object, name_or_path: object) -> str | None:
    """Return the flavour that a model's name says: a hub id, or a directory of that name.


    None where it says none, or where one published model is several flavours; that a model gets new
    inputs is no matter of its name.
    """
    names = _named_flavours(family, name_or_path)
    return names[0] if len(names) == 1 else None


def _named_flavours(family: object, name_or_path: object) -> list[str]:
    """Return the flavors that are published under a model's name."""
    entry = FAMILIES.get(str(read_family(family)))
    parts = [part.casefold() for part in PurePath(str(name_or_path)).parts]
    if entry is None or not parts:
        return []
    # The hub's cache keeps a model in models--ORG--NAME/snapshots/REVISION.
    cached = parts[-3] if parts[-2:-1] == ["snapshots"] and len(parts) > 2 else ""
    last, names = parts[-1].partition("@")[0], []  # without a revision
    for name, flavour in entry.flavours.items():
        owner, _, repository = flavour.hub_id.casefold().partition("/")
        if flavour.widened:
            continue
        if last == repository or cached == f"models--{owner}--{repository}":
            names.append(name)
    return names


def experts_of(spec: JobKeys) -> tuple[str, str] | None:
    """Return the flavors of a job's model that train its two experts, the one for high noise first.

    None where the model has one denoiser, or where the job does not say which model it trains.
    """
    entry = FAMILIES.get(spec.model_family)
    flavours = entry.flavours if entry is not None else {}
    if own := flavours.get(spec.model_flavour or ""):
        inputs = {name: (each.hub_id, each.last_frame) for name, each in flavours.items()}
        both = [name for name in inputs if inputs[name] == (own.hub_id, own.last_frame)]
    else:
        both = _named_flavours(spec.model_family, spec.pretrained_model_name_or_path)
    return (both[0], both[1]) if len({flavours[name].component for name in both}) == 2 else None


def compares_losses(flavours: Iterable[str | None]) -> bool:
    """Return whether jobs of these flavors see the same noise levels, as two experts do not."""
    named = set(flavours)
    entries = (item for family in FAMILIES.values() for item in family.flavours.items())
    return len({flavour.component for name, flavour in entries if name in named}) < 2


def component_of(spec: JobKeys) -> str:
    """Return the directory, and the name in the pipeline, of the denoiser that a job trains."""
    return get_family(spec.model_family).component_of(spec.model_flavour)


def latent_step_of(spec: JobKeys) -> int:
    """Sides of a job's images are multiples of this, in pixels; 1 if its family is unknown."""
    family = FAMILIES.get(spec.model_family)
    return family.latent_step_of(spec.model_flavour) if family is not None else 1


def token_parts(spec: RecipeKeys) -> int:
    """Return what the number of an image's tokens must divide by, for ranks that share them."""
    family = FAMILIES.get(spec.model_family)
    return 1 if family is not None and family.fills_up else spec.context_parallel_size


def references_of(spec: JobKeys) -> References | None:
    """How a job's model takes conditioning images; None if it takes none."""
    family = FAMILIES.get(spec.model_family)
    return family.references_of(spec.model_flavour) if family is not None else None


def noun_of_references(
    spec: JobKeys, *, of_prompts: bool = False, roles: Iterable[str] = ()
) -> str:
    """Return what messages call a conditioning image of a job's samples, or of its prompts.

    Args:
        spec: The job.
        of_prompts: Whether it is a prompt's.
        roles: What it may be, for models that take videos.
    """
    takes = references_of(spec) or References(None)
    if takes.videos and (named := dict.fromkeys(roles)):
        return " or ".join(NOUNS[role] for role in named)
    return takes.noun_of_prompts if of_prompts else takes.noun


def takes_control_videos(spec: JobKeys) -> bool:
    """Whether a job's model makes videos from control videos and reference images."""
    takes = references_of(spec)
    return takes is not None and takes.videos


def makes_layers(spec: JobKeys) -> bool:
    """Whether a job's model splits an image into layers with transparency."""
    family = FAMILIES.get(spec.model_family)
    return family is not None and family.makes_layers(spec.model_flavour)


def widened_of(spec: JobKeys) -> str:
    """Return the layer of a job's model that takes conditioning images; "" if none does."""
    family = FAMILIES.get(spec.model_family)
    return family.widened_of(spec.model_flavour) if family is not None else ""


def denoiser_config(spec: JobKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a denoiser's config as the job trains it, with any channels that it adds."""
    if not widened_of(spec):
        return dict(config)
    channels = config.get("out_channels") or config["in_channels"]
    return {**config, "in_channels": 2 * channels, "out_channels": channels}


def takes_first_frame(spec: JobKeys) -> bool:
    """Whether a job's model also makes videos from their first frame."""
    family = FAMILIES.get(spec.model_family)
    return family is not None and family.takes_first_frame(spec.model_flavour)


def needs_first_frame(spec: JobKeys) -> bool:
    """Whether a job's model requires a first frame."""
    family = FAMILIES.get(spec.model_family)
    return family is not None and family.needs_first_frame(spec.model_flavour)


def needs_last_frame(spec: JobKeys) -> bool:
    """Whether a job's model requires a last frame as well."""
    family = FAMILIES.get(spec.model_family)
    return family is not None and family.needs_last_frame(spec.model_flavour)


def takes_keyframes(spec: JobKeys) -> bool:
    """Whether a job's model takes a first and a last frame beside the video."""
    family = FAMILIES.get(spec.model_family)
    return family is not None and family.takes_keyframes(spec.model_flavour)


def frames_beside(spec: JobKeys, frames: int) -> int:
    """Return the frames in the channels of a required first frame: with gray ones, or it alone."""
    family = FAMILIES.get(spec.model_family)
    flavour = family.flavours.get(spec.model_flavour or "") if family is not None else None
    return frames if flavour is None or flavour.gray_frames else 1


def sees_images(spec: JobKeys) -> bool:
    """Whether a job's texts are encoded together with what they are conditioned on."""
    family = FAMILIES.get(spec.model_family)
    return family is not None and family.sees_images(spec.model_flavour)


def wrapped_classes(spec: RecipeKeys) -> list[str]:
    """Return the block classes that become FSDP units: those of the job, else the family's."""
    own = get_family(spec.model_family).blocks_of(spec.model_flavour)
    return spec.fsdp_transformer_layer_cls_to_wrap or list(own)
