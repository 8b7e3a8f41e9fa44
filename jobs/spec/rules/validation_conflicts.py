"""Settings of samples and of the validation loss that cannot run or have no effect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from jobs.run.judging import LOSS
from jobs.spec.families import FAMILIES, latent_step_of, takes_first_frame, token_parts
from jobs.spec.keys.prompts import frames_of, requests_of, size_of
from jobs.spec.rules.data_conflicts import Conflict
from jobs.spec.values.datasets import TRIGGER

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs.spec.families import Family, Guidance
    from jobs.spec.job_spec import DataPlanKeys, JobSpec
    from jobs.spec.keys.prompts import SampleRequest

_USUAL_LENGTH: Final = 81  # frames of a sampled video, at most, that a warning proposes


def shared_tokens(spec: JobSpec) -> Conflict | None:
    """Check that the tokens of samples can be split evenly over context-parallel ranks."""
    ranks, family = token_parts(spec), FAMILIES.get(spec.model_family)
    if ranks == 1 or family is None:
        return None
    step = latent_step_of(spec)
    for request in requests_of(spec):
        tokens = (request.width // step) * (request.height // step)
        if tokens % ranks:
            return Conflict(
                "validation_prompts"
                if spec.validation_resolution is None
                else "validation_resolution",
                f"context_parallel_size {ranks} does not divide the {tokens} tokens of samples of "
                f"{request.width}x{request.height}; change one",
            )
    return None


def unmeasured_scores(spec: DataPlanKeys) -> Conflict | None:
    """Check that there is something to compare samples with."""
    to_images = {"clip_i", "dino_i"} & set(spec.validation_scores)
    if not (spec.validation_prompts and to_images) or spec.validation_fraction:
        return None
    return Conflict(
        "validation_scores",
        "validation_scores: clip_i and dino_i compare samples with held-out images; set "
        "validation_fraction (0.05 is a twentieth), or keep only clip_t",
    )


def unmeasured_criterion(spec: JobSpec) -> Conflict | None:
    """Check that a score by which checkpoints are judged is measured."""
    by = spec.checkpoints_best_by
    if by == LOSS or (by in spec.validation_scores and spec.validation_prompts):
        return None
    missing = "validation_prompts" if by in spec.validation_scores else f"validation_scores: {by}"
    return Conflict("checkpoints_best_by", f"{by} is not measured; set {missing}", named=True)


VALIDATION_RULES = (shared_tokens, unmeasured_scores, unmeasured_criterion)


def validation_warnings(spec: JobSpec) -> list[str]:
    """List the settings that work, but perhaps not as the user expects; one sentence each."""
    texts = (warning(spec) for warning in _WARNINGS)
    return [text for text in texts if text]


def _trigger(spec: DataPlanKeys) -> str:
    if spec.trigger_word is None and any(TRIGGER in p.prompt for p in spec.validation_prompts):
        return f"validation_prompts: {TRIGGER} is not replaced without a trigger_word"
    return ""


def _negative_prompts(spec: DataPlanKeys) -> str:
    """Warn about ignored negative prompts: as in stock pipelines, they need a scale above 1."""
    requests, family = requests_of(spec), FAMILIES.get(spec.model_family)
    kind = family.guidance_of(spec.model_flavour) if family is not None else "embedded"
    if family is not None and (
        kind == "none" or (kind == "embedded" and not family.true_cfg_of(spec.model_flavour))
    ):
        return _takes_no_negatives(requests, family, kind)
    if (
        family is not None
        and not family.text_negatives
        and any(r.negative_prompt for r in requests)
    ):
        return f"validation_prompts: negative prompts have no effect with {family.title}"
    if family is not None and kind == "classifier_free":
        if unguided := _guides_distilled(spec, family, requests):
            return unguided
        if any(request.true_cfg_scale > 1 for request in requests):
            return (
                f"validation_prompts: true_cfg_scale has no effect with {family.title}, which "
                "uses classifier-free guidance; set validation_guidance"
            )
        if any(r.negative_prompt is not None and not r.guided for r in requests):
            return (
                "validation_prompts: a negative prompt has no effect without a guidance above "
                f"{family.guided_above:g}"
            )
        return ""
    asked = [request for request in requests if not request.guided]
    if any(request.negative_prompt is not None for request in asked):
        return (
            "validation_prompts: a negative prompt has no effect without a true_cfg_scale above 1"
        )
    if any(request.true_cfg_scale > 1 for request in asked):
        return (
            "validation_prompts: true_cfg_scale has no effect without a negative_prompt; set "
            'negative_prompt: "" for an empty one'
        )
    return ""


def _guides_distilled(spec: DataPlanKeys, family: Family, requests: list[SampleRequest]) -> str:
    """Warn about guidance of a model that is distilled to need none."""
    flavour = family.flavours.get(spec.model_flavour or "")
    if flavour is None or flavour.undistilled is None:
        return ""
    usual = flavour.defaults.get("validation_guidance", family.guided_above + 1)
    guided = next((r.guidance for r in requests if r.guidance > family.guided_above), None)
    if usual > family.guided_above or guided is None:
        return ""
    return (
        f"validation_guidance: {family.title} {spec.model_flavour} is distilled to run without "
        f"guidance, and {guided:g} makes its samples worse and slower; use {usual:g}"
    )


def _takes_no_negatives(requests: list[SampleRequest], family: Family, kind: Guidance) -> str:
    """Warn about settings ignored by pipelines that make only one prediction per step."""
    if any(r.negative_prompt is not None or r.true_cfg_scale > 1 for r in requests):
        return (
            "validation_prompts: negative prompts and true_cfg_scale have no effect with this "
            f"model of {family.title}"
        )
    if kind == "none" and any(request.guidance > 1 for request in requests):
        return (
            "validation_guidance: no effect with this model of "
            f"{family.title}, which is distilled to run without guidance"
        )
    return ""


def _sizes(spec: DataPlanKeys) -> str:
    """Warn about sides that are not multiples of the family's step, which are reduced."""
    if spec.model_family not in FAMILIES:
        return ""
    for entry in spec.validation_prompts:
        resolution = entry.resolution or spec.validation_resolution
        if resolution is None:
            continue
        width, height = size_of(resolution, latent_step_of(spec))
        if str(resolution) not in (f"{width}x{height}", str(width)):
            step = latent_step_of(spec)
            return (
                f"validation_resolution: {resolution} is not a multiple of {step}; samples "
                f"are {width}x{height}"
            )
    return ""


def _lengths(spec: DataPlanKeys) -> str:
    """Warn about impossible lengths: videos have n steps plus one frames, images have one."""
    family = FAMILIES.get(spec.model_family)
    if family is None:
        return ""
    for entry in spec.validation_prompts:
        asked = entry.num_frames or spec.validation_num_frames
        if asked is None or (made := frames_of(asked, spec.model_family)) == asked:
            continue
        if not family.frame_step:
            return f"validation_num_frames: no effect, {family.title} samples images"
        return f"validation_num_frames: {asked} is not {family.lengths}; samples have {made}"
    return ""


def _stills(spec: DataPlanKeys) -> str:
    """Warn about samples of one frame, by default, of what is trained as video only."""
    family = FAMILIES.get(spec.model_family)
    if family is None or spec.num_frames or spec.validation_num_frames:
        return ""
    entries = [entry for entry in spec.validation_prompts if entry.num_frames is None]
    framed = takes_first_frame(spec) and any(entry.conditioning_image for entry in entries)
    if not framed and not (entries and family.sound and spec.train_audio):
        return ""
    length = family.frames_of(_USUAL_LENGTH)
    return (
        "validation_prompts: samples are single images, without motion and sound; to sample "
        f"videos, set validation_num_frames, such as {length}"
    )


_WARNINGS: tuple[Callable[[JobSpec], str], ...] = (
    _trigger,
    _negative_prompts,
    _sizes,
    _lengths,
    _stills,
)
