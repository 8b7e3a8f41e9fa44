"""What of a job's conditioning images cannot be; a part of `jobs.spec.rules.conflicts`."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING

from jobs.spec.families import (
    FAMILIES,
    needs_first_frame,
    references_of,
    takes_first_frame,
    widened_of,
)
from jobs.spec.rules.data_conflicts import Conflict
from jobs.spec.values.datasets import CONDITIONING

if TYPE_CHECKING:
    from collections.abc import Collection

    from jobs.spec.families import Family
    from jobs.spec.job_spec import DataPlanKeys, InputKeys, JobSpec, RecipeKeys
    from jobs.spec.keys.data import DataKeys

_WITH_FRAME = 512  # tokens, where Wan 2.1's image-to-video looks for the end of its text


def _not_taken(spec: DataPlanKeys) -> Conflict | None:
    family, takes = FAMILIES.get(spec.model_family), references_of(spec)
    if family is None or takes is not None:
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
                "frame of each video"
                if always
                else f"{family.title} takes no {named}; to train from the first frame of each "
                "video, set first_frame: true instead",
                named=True,
            )
        if given and not framed:
            what = f"{family.title} {spec.model_flavour}" if spec.model_flavour else family.title
            text = f"{what} takes no conditioning images{_which_take(family)}"
            return Conflict(key, text, named=True)
    return None


def _which_take(family: Family) -> str:
    names = [name for name in family.flavours if family.references_of(name) is not None]
    return f"; choose model_flavour: {' or '.join(names)}" if names else ""


def _first_frame(spec: DataPlanKeys) -> Conflict | None:
    family = FAMILIES.get(spec.model_family)
    if family is None or takes_first_frame(spec):
        several = [
            entry for entry in spec.validation_prompts if len(entry.conditioning_image or ()) > 1
        ]
        if several and family is not None:
            return Conflict(
                "validation_prompts",
                f'"{several[0].prompt}" has '
                f"{len(several[0].conditioning_image or ())} conditioning images; the model takes "
                "only one",
                named=True,
            )
        return None
    if not any(entry.first_frame for entry in spec.datasets or []):
        return None
    names = [name for name in family.flavours if family.takes_first_frame(name)]
    which = f"; choose model_flavour: {' or '.join(names)}" if names else ""
    what = f"{family.title} {spec.model_flavour}" if spec.model_flavour else family.title
    return Conflict("datasets", f"{what} cannot be trained with first_frame{which}", named=True)


def _one_place(spec: DataKeys) -> Conflict | None:
    for entry in spec.datasets or []:
        named = [key for key in CONDITIONING if getattr(entry, key)]
        if len(named) > 1:
            return Conflict(
                "datasets", f"{entry.path} has {' and '.join(named)}; keep one", named=True
            )
    return None


def _needs(spec: DataPlanKeys) -> Conflict | None:
    """Of models that make nothing without a conditioning image."""
    takes = references_of(spec)
    if not needs_first_frame(spec) and (takes is None or not takes.required):
        return None
    if spec.num_class_images:
        return Conflict(
            "num_class_images",
            "the model makes no images without a conditioning image; use a "
            "dataset with regularization: true",
            named=True,
        )
    bare = [entry for entry in spec.validation_prompts if not entry.conditioning_image]
    if bare:
        return Conflict(
            "validation_prompts",
            f'"{bare[0].prompt}" has no conditioning image, which the model '
            "needs; set conditioning_image",
            named=True,
        )
    return None


def _longest_text(spec: InputKeys) -> Conflict | None:
    family = FAMILIES.get(spec.model_family)
    flavour = family.flavours.get(spec.model_flavour or "") if family is not None else None
    if (
        family is None
        or flavour is None
        or not flavour.sees_first_frame
        or spec.max_sequence_length <= _WITH_FRAME
    ):
        return None
    return Conflict(
        "max_sequence_length",
        f"{family.title} {spec.model_flavour} takes at most {_WITH_FRAME} "
        f"text tokens; use {_WITH_FRAME} or fewer",
        named=True,
    )


def _count(spec: DataPlanKeys) -> Conflict | None:
    takes = references_of(spec)
    if takes is None:
        return None
    counts = [("datasets", entry.path, entry.references) for entry in spec.datasets or []]
    counts = counts or [("dataset", spec.dataset, 0)]
    counts += [
        ("validation_prompts", f'"{entry.prompt}"', len(entry.conditioning_image or ()))
        for entry in spec.validation_prompts
    ]
    for key, what, count in counts:
        if count > takes.most:
            limit = f"at most {takes.most}" if takes.most > 1 else "only one"
            return Conflict(
                key, f"{what} has {count} conditioning images; the model takes {limit}", named=True
            )
        if not count and takes.required:
            return Conflict(
                key,
                f"{what} has no conditioning image, which the model needs; set one of "
                f"{', '.join(CONDITIONING)} in datasets",
                named=True,
            )
    return None


def _split(spec: JobSpec) -> Conflict | None:
    given = any(entry.references or entry.first_frame for entry in spec.datasets or [])
    given = given or needs_first_frame(spec)
    given = given or any(prompt.conditioning_image for prompt in spec.validation_prompts)
    if not given or spec.context_parallel_size == 1:
        return None
    return Conflict(
        "context_parallel_size", "conditioning images cannot be split over ranks; use 1", named=True
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
    """Whether a layer is among those that names or regular expressions stand for."""
    with suppress(re.error):  # which another rule says
        return any(re.fullmatch(rf"(?:.*\.)?(?:{pattern})", layer) for pattern in patterns)
    return True


CONDITIONING_RULES = (
    _not_taken,
    _first_frame,
    _one_place,
    _needs,
    _count,
    _longest_text,
    _split,
    _widened,
)
