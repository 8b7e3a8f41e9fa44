"""Data settings that cannot run; a part of `jobs.spec.rules.conflicts`."""

from __future__ import annotations

import itertools
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from jobs.errors import Problem
from jobs.spec.families import (
    FAMILIES,
    latent_step_of,
    needs_first_frame,
    needs_last_frame,
    noun_of_references,
    references_of,
    takes_control_videos,
    takes_first_frame,
    takes_keyframes,
    widened_of,
)
from jobs.spec.families.references import NOUNS
from jobs.spec.keys.prompts import requests_of
from jobs.spec.rules.strategy import world_size
from jobs.spec.values.datasets import CONDITIONING, regularizes, roles_of, sources_of
from jobs.spec.values.hub_names import why_refused
from jobs.spec.values.resolutions import all_resolutions, has_several

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from jobs.spec.families import Family, References
    from jobs.spec.job_spec import DataPlanKeys, InputKeys, JobSpec, RecipeKeys
    from jobs.spec.keys.data import DataKeys
    from jobs.spec.values.datasets import Role


_FINEST: Final = 16  # minimum bucket step in pixels


@dataclass(frozen=True)
class Conflict(Problem):
    """A combination that cannot run."""

    @property
    def message(self) -> str:
        """Return the complete sentence."""
        return str(self)


def no_dataset(spec: InputKeys) -> Conflict | None:
    if spec.datasets is not None and not spec.datasets:
        return Conflict("datasets", "datasets is an empty list")
    if spec.datasets and spec.dataset:
        return Conflict("datasets", "dataset and datasets cannot be combined; keep one")
    if spec.datasets or spec.dataset:
        return None
    return Conflict("dataset", "dataset is missing")


def stores(spec: InputKeys) -> Conflict | None:
    key = "datasets" if spec.datasets else "dataset"
    why = next((why for text in sources_of(spec) if (why := why_refused(text))), None)
    return Conflict(key, why, named=True) if why else None


def datasets(spec: InputKeys) -> Conflict | None:
    if stores(spec):
        return None  # what carries a secret is repeated in no message
    entries = spec.datasets or []
    paths = [(entry.path, entry.split) for entry in entries]
    if twice := next((path for path in paths if paths.count(path) > 1), None):
        return Conflict("datasets", f"datasets names {twice[0]} twice; use repeats instead")
    if unweighted := [entry.path for entry in entries if entry.weight is None]:
        if len(unweighted) < len(entries):
            return Conflict(
                "datasets",
                f"{unweighted[0]} has no weight but others do; set it for all or none",
                named=True,
            )
    elif repeated := [entry.path for entry in entries if entry.repeats > 1]:
        return Conflict("datasets", f"{repeated[0]} has a weight and repeats; keep one", named=True)
    return None


def captions(key: str, spec: JobSpec) -> Conflict | None:
    if getattr(spec, key) == type(spec).model_fields[key].default or spec.shuffle_captions:
        return None
    return Conflict(key, f"{key} needs shuffle_captions: true")


def crops(spec: JobSpec) -> Conflict | None:
    if (
        spec.crop != "random"
        and spec.crop_variants != type(spec).model_fields["crop_variants"].default
    ):
        return Conflict("crop_variants", "crop_variants needs crop: random")
    return None


def square(spec: JobSpec) -> Conflict | None:
    ratio = type(spec).model_fields["max_bucket_aspect_ratio"].default
    if spec.crop == "square" and spec.max_bucket_aspect_ratio != ratio:
        return Conflict(
            "max_bucket_aspect_ratio",
            "max_bucket_aspect_ratio and crop: square contradict; keep one",
        )
    return None


def bucket_step(spec: DataPlanKeys) -> Conflict | None:
    step, key, least = spec.bucket_step, "bucket_step", latent_step_of(spec)
    if not step:
        return None
    side = min(all_resolutions(spec))
    fits = [n for n in range(least, 129, least) if n >= _FINEST and n <= side]
    near = [*[n for n in fits if n < step][-1:], *[n for n in fits if n > step][:1]]
    instead = f"use {' or '.join(map(str, near))}" if near else "use 0"
    if step < _FINEST:
        return Conflict(key, f"{key} {step} is less than {_FINEST} pixels; {instead}")
    if step % least:
        return Conflict(
            key,
            f"{key} {step} is not a multiple of {least} pixels, as sides of images must be for "
            f"{FAMILIES[spec.model_family].title}; {instead}",
        )
    if step > side:
        return Conflict(key, f"{key} {step} is more than resolution {side}; {instead}")
    return None


def resolutions(spec: JobSpec) -> Conflict | None:
    default = type(spec).model_fields["resolution_mode"].default
    if spec.resolution_mode != default and not has_several(spec):
        return Conflict("resolution_mode", "resolution_mode needs several resolutions")
    return None


def regularization(spec: JobSpec) -> Conflict | None:
    entries = spec.datasets or []
    regularizing = [entry for entry in entries if entry.regularization]
    if regularizing and len(regularizing) == len(entries):
        return Conflict("datasets", "all are regularization; at least one must not be", named=True)
    if spec.num_class_images and not spec.class_prompt:
        return Conflict("class_prompt", "num_class_images needs class_prompt")
    if spec.num_class_images and any(entry.weight is not None for entry in entries):
        return Conflict(
            "num_class_images",
            "num_class_images cannot be combined with weight in datasets; remove the weights, or "
            "add the images as a dataset",
        )
    if spec.num_class_images and spec.swap_blocks:
        return Conflict(
            "num_class_images",
            "num_class_images needs the full base on the GPU, without swap_blocks; make the images "
            "in another job first",
        )
    return None


def no_class_images(key: str, spec: JobSpec) -> Conflict | None:
    if regularizes(spec) or getattr(spec, key) == type(spec).model_fields[key].default:
        return None
    return Conflict(key, f"{key} needs num_class_images, or a dataset with regularization: true")


def preservation(spec: DataKeys) -> Conflict | None:
    for key in ("preservation_class", "preservation_weight"):
        default = type(spec).model_fields[key].default
        if spec.preservation == "none" and getattr(spec, key) != default:
            return Conflict(key, f"{key} needs preservation: class or blank")
    if spec.preservation != "class":
        return None
    if not spec.preservation_class:
        return Conflict("preservation_class", "preservation: class needs preservation_class")
    if not (spec.trigger_word or any(entry.trigger_word for entry in spec.datasets or [])):
        return Conflict("trigger_word", "preservation: class needs a trigger_word to replace")
    return None


def masks(spec: DataKeys) -> Conflict | None:
    if spec.unmasked_weight and spec.masked_loss == "none":
        return Conflict("unmasked_weight", "unmasked_weight needs masked_loss: alpha or file")
    with_path = next((entry for entry in spec.datasets or [] if entry.mask_path), None)
    if with_path and spec.masked_loss != "file":
        return Conflict(
            "datasets", f"mask_path of {with_path.path} needs masked_loss: file", named=True
        )
    return None


def videos(spec: InputKeys) -> Conflict | None:
    family = FAMILIES.get(spec.model_family)
    if family is None:
        return None
    if not family.frame_step:
        if spec.num_frames is not None:
            return Conflict("num_frames", f"{family.title} trains on images", named=True)
        return None
    if (
        spec.num_frames is not None
        and (lower := family.frames_of(spec.num_frames)) < spec.num_frames
    ):
        longer = next(n for n in itertools.count(spec.num_frames) if family.frames_of(n) == n)
        near = " or ".join(str(n) for n in (lower, longer) if n >= family.frame_rest)
        return Conflict(
            "num_frames",
            f"{family.title} takes {family.lengths} frames, such as {near}",
            named=True,
        )
    return None


def text_encoders(spec: JobSpec) -> Conflict | None:
    if spec.shard_text_encoders and world_size(spec) == 1:
        return Conflict(
            "shard_text_encoders", "shard_text_encoders needs two or more ranks; remove it"
        )
    return None


def sound(spec: JobSpec) -> Conflict | None:
    """Check what decides on the loss of a video alone."""
    family = FAMILIES.get(spec.model_family)
    if not spec.train_audio or family is None or not family.sound:
        return None
    for key, usual in (("loss_type", "mse"), ("masked_loss", "none"), ("preservation", "none")):
        if getattr(spec, key) != usual:
            text = f"{getattr(spec, key)} is not supported with train_audio; use {usual}"
            return Conflict(key, text, named=True)
    if spec.regularization_target == "base" and regularizes(spec):
        text = "base is not supported with train_audio; use images"
        return Conflict("regularization_target", text, named=True)
    return None


DATA_RULES = (
    no_dataset,
    stores,
    datasets,
    partial(captions, "caption_shuffles"),
    partial(captions, "keep_tags"),
    crops,
    square,
    bucket_step,
    resolutions,
    regularization,
    partial(no_class_images, "prior_loss_weight"),
    partial(no_class_images, "class_prompt"),
    partial(no_class_images, "regularization_target"),
    preservation,
    masks,
    videos,
    sound,
    text_encoders,
)


# -- conditioning conflicts -----------------------------------------------------------------
# Invalid conditioning images; a part of `jobs.spec.rules.conflicts`.


_BOTH_FRAMES = 2  # conditioning images of a prompt whose model takes a first and a last frame
_WITH_MASK = 2  # conditioning images of a prompt whose model fills in a part of the first


def _not_taken(spec: DataPlanKeys) -> Conflict | None:
    family, takes = FAMILIES.get(spec.model_family), references_of(spec)
    if family is None or (takes is not None and takes.layers):
        return None
    what = f"{family.title} {spec.model_flavour}" if spec.model_flavour else family.title
    if any(entry.named_layers for entry in spec.datasets or []):
        text = f"{what} makes no layers{_which_take(family, layers=True)}"
        return Conflict("datasets", text, named=True)
    if takes is not None:
        return None
    framed = takes_first_frame(spec)
    for key, given in (
        ("datasets", any(entry.references for entry in spec.datasets or [])),
        ("validation_prompts", any(entry.conditioning_image for entry in spec.validation_prompts)),
    ):
        if given and framed and key == "datasets":
            named = next(k for e in spec.datasets or [] for k in CONDITIONING if getattr(e, k))
            always = needs_first_frame(spec)
            return Conflict(
                "datasets",
                f"{family.title} takes no {named}; remove it: the model trains from the first "
                f"{'and the last ' if needs_last_frame(spec) else ''}frame of each video"
                if always
                else f"{family.title} takes no {named}; to train from the first frame of each "
                "video, set first_frame: true instead",
                named=True,
            )
        if given and not framed:
            text = f"{what} takes no conditioning images{_which_take(family)}"
            return Conflict(key, text, named=True)
    return None


def _which_take(family: Family, *, layers: bool = False) -> str:
    names = [
        name
        for name in family.flavours
        if (takes := family.references_of(name)) is not None and takes.layers == layers
    ]
    return f"; choose model_flavour: {' or '.join(names)}" if names else ""


def _first_frame(spec: DataPlanKeys) -> Conflict | None:
    family = FAMILIES.get(spec.model_family)
    if family is None or takes_first_frame(spec):
        if needs_last_frame(spec):
            return None  # see `_needs`
        most = 1 + takes_keyframes(spec)
        several = [
            entry for entry in spec.validation_prompts if len(entry.conditioning_image or ()) > most
        ]
        if several and family is not None:
            return Conflict(
                "validation_prompts",
                f'"{several[0].prompt}" has '
                f"{len(several[0].conditioning_image or ())} conditioning images; the model takes "
                + ("a first frame and a last one" if most > 1 else "only one"),
                named=True,
            )
        return None
    if not any(entry.first_frame for entry in spec.datasets or []):
        return None
    names = [name for name in family.flavours if family.takes_first_frame(name)]
    which = f"; choose model_flavour: {' or '.join(names)}" if names else ""
    what = f"{family.title} {spec.model_flavour}" if spec.model_flavour else family.title
    return Conflict("datasets", f"{what} cannot be trained with first_frame{which}", named=True)


def _last_frame(spec: DataPlanKeys) -> Conflict | None:
    given = [entry for entry in spec.datasets or [] if entry.last_frame]
    family = FAMILIES.get(spec.model_family)
    if not given or family is None:
        return None
    if not takes_keyframes(spec):
        what = f"{family.title} {spec.model_flavour}" if spec.model_flavour else family.title
        more = _who_has_both(spec, family)
        text = f"{what} cannot be trained with last_frame; remove it{more}"
        return Conflict("datasets", text, named=True)
    if alone := next((entry for entry in given if not entry.first_frame), None):
        return Conflict(
            "datasets",
            f"{alone.path} has a last_frame and no first_frame; set first_frame: true, or a share",
            named=True,
        )
    return None


def _who_has_both(spec: DataPlanKeys, family: Family) -> str:
    """Return which models of a family have a last frame without asking for it; "" if none has."""
    if needs_last_frame(spec):
        return ": the model trains from the first and the last frame of each video"
    names = [name for name in family.flavours if family.needs_last_frame(name)]
    if not names:
        return ""
    return f", or choose model_flavour: {' or '.join(names)}, which always has both frames"


def _one_place(spec: DataKeys) -> Conflict | None:
    for entry in spec.datasets or []:
        named = [key for key in CONDITIONING if getattr(entry, key)]
        if len(named) > 1:
            return Conflict(
                "datasets", f"{entry.path} has {' and '.join(named)}; keep one", named=True
            )
    return None


def _roles(spec: DataPlanKeys) -> Conflict | None:
    """Check what conditioning images are said to be."""
    for key, what, named, count in _with_roles(spec):
        if named and not takes_control_videos(spec):
            return Conflict(
                key,
                f"{what} has conditioning_roles, which only models with control videos have; "
                "remove it",
                named=True,
            )
        if named and len(named) != count:
            images = f"{count or 'no'} conditioning image{'s' * (count != 1)}"
            return Conflict(
                key,
                f"{what} has {images} and {len(named)} in conditioning_roles; name one for each",
                named=True,
            )
        roles = roles_of(named, count)
        for role in ("control", "fill_mask"):
            if roles.count(role) > 1:
                return Conflict(
                    key, f"{what} has several {NOUNS[role]}s; the model takes one", named=True
                )
        if key == "validation_prompts" and "fill_mask" in roles and "control" not in roles:
            return Conflict(
                key,
                f"{what} has a fill mask and no control video, a part of which is filled in; "
                "add it to conditioning_image",
                named=True,
            )
    return None


def _with_roles(spec: DataPlanKeys) -> Iterator[tuple[str, str, Sequence[Role] | None, int]]:
    """Yield key, name, `conditioning_roles` and number of images of each dataset and prompt."""
    for entry in spec.datasets or []:
        yield "datasets", entry.path, entry.conditioning_roles, entry.references
    for prompt in spec.validation_prompts:
        count = len(prompt.conditioning_image or ())
        yield "validation_prompts", f'"{prompt.prompt}"', prompt.conditioning_roles, count


def _needs(spec: DataPlanKeys) -> Conflict | None:
    """Check models that require a conditioning image."""
    takes = references_of(spec)
    if not needs_first_frame(spec) and (takes is None or not takes.required):
        return None
    noun = noun_of_references(spec, of_prompts=True)
    if spec.num_class_images:
        return Conflict(
            "num_class_images",
            f"the model makes no images without a {noun}; use a dataset with regularization: true",
            named=True,
        )
    if needs_last_frame(spec):
        for request in requests_of(spec):
            if len(request.conditioning) != _BOTH_FRAMES:
                return Conflict(
                    "validation_prompts",
                    f'"{request.prompt}" needs a first and a last frame; '
                    "set conditioning_image: [FIRST, LAST]",
                    named=True,
                )
            if request.frames == 1:
                return Conflict(
                    "validation_num_frames",
                    f'"{request.prompt}" is sampled as one frame, and the model makes videos from '
                    "a first to a last one; set validation_num_frames, or num_frames, to more",
                    named=True,
                )
    bare = [entry for entry in spec.validation_prompts if not entry.conditioning_image]
    if bare and not (takes and takes.masks):  # which need two images, see `_count`
        return Conflict(
            "validation_prompts",
            f'"{bare[0].prompt}" has no {noun}, which the model needs; set conditioning_image',
            named=True,
        )
    return None


def _longest_text(spec: InputKeys) -> Conflict | None:
    family = FAMILIES.get(spec.model_family)
    flavour = family.flavours.get(spec.model_flavour or "") if family is not None else None
    longest = flavour.longest_text if flavour is not None else None
    if family is None or longest is None or spec.max_sequence_length <= longest:
        return None
    return Conflict(
        "max_sequence_length",
        f"{family.title} {spec.model_flavour} takes at most {longest} "
        f"text tokens; use {longest} or fewer",
        named=True,
    )


def _count(spec: DataPlanKeys) -> Conflict | None:
    takes = references_of(spec)
    if takes is None:
        return None
    counts = [("datasets", entry.path, entry.references) for entry in spec.datasets or []]
    counts = counts or [("dataset", spec.dataset, 0)]
    prompts = [
        ("validation_prompts", f'"{entry.prompt}"', len(entry.conditioning_image or ()))
        for entry in spec.validation_prompts
    ]
    if takes.masks:
        for key, what, count in prompts:
            if count != _WITH_MASK:
                return Conflict(
                    key,
                    f"{what} needs an image and its mask; set conditioning_image: [IMAGE, MASK]",
                    named=True,
                )
        counts, prompts = [each for each in counts if each[2]], []
    if takes.layers:
        return _layers(takes, counts, prompts)
    counts += prompts
    for key, what, count in counts:
        if count > takes.most:
            limit = f"at most {takes.most}" if takes.most > 1 else "only one"
            noun = "conditioning image" if takes.videos else takes.noun
            return Conflict(key, f"{what} has {count} {noun}s; the model takes {limit}", named=True)
        if not count and takes.required and key != "validation_prompts":  # see `_needs`
            return Conflict(
                key,
                f"{what} has no {takes.noun}, which the model needs; set one of "
                f"{', '.join(CONDITIONING)} in datasets",
                named=True,
            )
    return None


def _layers(
    takes: References, samples: list[tuple[str, str, int]], prompts: list[tuple[str, str, int]]
) -> Conflict | None:
    """Check the layers of samples and the images of prompts: key, name and number of each."""
    for key, what, count in samples:
        if not 1 <= count <= takes.most:
            return Conflict(
                key,
                f"{what} has {count or 'no'} layers for each image, and the model is trained with "
                f"1 to {takes.most}; set layer_suffix, layer_path or layer_column in datasets",
                named=True,
            )
    for key, what, count in prompts:
        if count > 1:
            text = f"{what} has {count} conditioning images; the model splits only one"
            return Conflict(key, text, named=True)
    return None


def _split(spec: JobSpec) -> Conflict | None:
    """Refuse conditioning images in tokens of their own, whose number need not divide."""
    takes = references_of(spec)
    if takes is None or (takes.fit is None and not takes.layers):
        return None
    given = any(entry.references for entry in spec.datasets or [])
    given = given or any(prompt.conditioning_image for prompt in spec.validation_prompts)
    if not given or spec.context_parallel_size == 1:
        return None
    noun = noun_of_references(spec, of_prompts=True)
    return Conflict(
        "context_parallel_size",
        f"{noun}s are tokens that ranks cannot share evenly; use 1",
        named=True,
    )


def _widened(spec: RecipeKeys) -> Conflict | None:
    """Check the new inputs of a widened layer, which only an adapter trains."""
    layer = widened_of(spec)
    if not layer:
        return None
    what = f"model_flavour: {spec.model_flavour}"
    if spec.model_type != "lora":
        return Conflict("model_type", f"{what} trains a LoRA only", named=True)
    if spec.lora_variant in ("dora", "lokr"):
        return Conflict(
            "lora_variant",
            f"{what} is not supported with {spec.lora_variant}; use lora or rslora",
            named=True,
        )
    chosen, left_out = spec.lora_target_modules, spec.lora_exclude_modules or ()
    for key, adapted in (
        ("lora_target_modules", chosen is None or _any_names(chosen, layer)),
        ("lora_exclude_modules", not _any_names(left_out, layer)),
    ):
        if not adapted:
            return Conflict(
                key,
                f"{what} sees its conditioning images through {layer}; adapt it too",
                named=True,
            )
    return None


def _any_names(patterns: Collection[str], layer: str) -> bool:
    """Return whether any of these names or regular expressions matches a layer."""
    with suppress(re.error):  # reported by another rule
        return any(re.fullmatch(rf"(?:.*\.)?(?:{pattern})", layer) for pattern in patterns)
    return True


CONDITIONING_RULES = (
    _not_taken,
    _first_frame,
    _last_frame,
    _one_place,
    _roles,
    _needs,
    _count,
    _longest_text,
    _split,
    _widened,
)
