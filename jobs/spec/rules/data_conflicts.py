"""Combinations of the data's settings that cannot run; a part of `jobs.spec.rules.conflicts`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from jobs.errors import Problem
from jobs.spec.families import FAMILIES, latent_step_of
from jobs.spec.rules.strategy import world_size
from jobs.spec.values.resolutions import all_resolutions, has_several

if TYPE_CHECKING:
    from jobs.spec.job_spec import DataPlanKeys, InputKeys, JobSpec
    from jobs.spec.keys.data import DataKeys

_FINEST: Final = 16  # pixels between buckets, where a job says a number


@dataclass(frozen=True)
class Conflict(Problem):
    """A combination that cannot run."""

    @property
    def message(self) -> str:
        """The whole sentence."""
        return str(self)


def no_dataset(spec: InputKeys) -> Conflict | None:
    if spec.datasets is not None and not spec.datasets:
        return Conflict("datasets", "datasets is an empty list")
    if spec.datasets and spec.dataset:
        return Conflict("datasets", "dataset and datasets cannot be combined; keep one")
    if spec.datasets or spec.dataset:
        return None
    return Conflict("dataset", "dataset is missing")


def datasets(spec: DataKeys) -> Conflict | None:
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
    regularized = spec.num_class_images or any(
        entry.regularization for entry in spec.datasets or []
    )
    if regularized or getattr(spec, key) == type(spec).model_fields[key].default:
        return None
    return Conflict(key, f"{key} needs num_class_images, or a dataset with regularization: true")


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
    step = family.frame_step
    if spec.num_frames is not None and (spec.num_frames - 1) % step:
        lower = (spec.num_frames - 1) // step * step + 1
        return Conflict(
            "num_frames",
            f"{family.title} takes {step}n + 1 frames, such as {lower} or {lower + step}",
            named=True,
        )
    return None


def text_encoders(spec: JobSpec) -> Conflict | None:
    if spec.shard_text_encoders and world_size(spec) == 1:
        return Conflict(
            "shard_text_encoders", "shard_text_encoders needs two or more ranks; remove it"
        )
    return None


DATA_RULES = (
    no_dataset,
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
    masks,
    videos,
    text_encoders,
)
