"""Determine what changes when a job resumes from a checkpoint that a different job wrote."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from jobs.errors import SpecError, UserError
from jobs.models.find_model import find_index, find_model
from jobs.run.rundir import read_json
from jobs.spec.families import FAMILIES
from jobs.spec.job_spec import JobSpec, key_facts
from jobs.spec.keys.groups import DATA
from jobs.spec.rules.buckets import bucket_step
from jobs.spec.rules.lora_conflicts import may_scale, modulation_of
from jobs.spec.rules.no_effect import counts
from jobs.spec.rules.steps import global_batch_size, length_in_words, total_steps
from jobs.spec.values.datasets import datasets_of
from jobs.spec.values.field import facts_of
from jobs.spec.values.resolutions import all_resolutions

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from jobs.spec.job_spec import DataPlanKeys, InputKeys, RecipeKeys
    from jobs.spec.keys.job import JobKeys
    from jobs.spec.keys.noise import NoiseKeys
    from jobs.spec.keys.training import TrainingKeys
    from jobs.spec.keys.validation import ValidationKeys


# -- resume conflicts -----------------------------------------------------------------------
# Compare the job that wrote a checkpoint with the one that resumes from it.
#
# Pure except for checking where models are. A setting may leave the result unchanged (how ranks
# share the work), change it (the learning rate), or make the checkpoint unusable (the adapter's
# rank).


# Version of the assignment of samples to steps (`engine.data.index.batch_plan`). Checkpoints
# without a number have version 1, which padded every bucket to a global batch.
PLAN_VERSION: Final = 2


@dataclass(frozen=True)
class ResumeConflicts:
    """The consequences of resuming from a checkpoint.

    Attributes:
        impossible: Why it is impossible, one sentence each with a remedy; empty if it is possible.
        changes: Why the result will differ from an uninterrupted run, one line each.
    """

    impossible: list[str] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)


def find_resume_conflicts(
    before: Mapping[str, Any], spec: JobSpec, *, done: int = 0
) -> ResumeConflicts:
    """Compare the job that wrote a checkpoint with the one that resumes from it.

    Checks whether models are where they were, so among ranks only one calls this.

    Args:
        before: The checkpoint's `spec`, of any version: unknown keys are ignored, missing ones have
            their default. If empty, the checkpoint has none and nothing is compared.
        spec: The job as it will run.
        done: Optimizer steps of the checkpoint; a completed warm-up cannot change.
    """
    conflicts = ResumeConflicts()
    if not before:
        return conflicts
    old, unreadable = _read(before)
    for key in JobSpec.model_fields:
        effect = key_facts(key).resume
        if effect in ("same", "ruled"):
            continue
        was = unreadable.get(key, getattr(old, key))
        now = getattr(spec, key)
        if was == now or not (counts(key, old) or counts(key, spec)):
            continue
        if effect == "impossible":
            conflicts.impossible.append(_refusal(key, was, now))
        else:
            conflicts.changes.append(_line(key, was, now))
    for rule in _RULES:
        rule(old, spec, done, conflicts)
    return conflicts


def compare_plans(state: Mapping[str, Any], name: str, *, own: bool) -> list[str]:
    """Check whether the checkpoint's run assigned samples to steps like this version does.

    Args:
        state: The training state in the checkpoint.
        name: The checkpoint's name.
        own: Whether the same run continues, which must be exact.

    Raises:
        UserError: It cannot continue exactly.
    """
    facts = state.get("data")
    if not isinstance(facts, dict) or not facts or facts.get("plan", 1) == PLAN_VERSION:
        return []
    if own:
        raise UserError(
            f"cannot resume from {name}: it was saved by a version of fsdp-tui that gave steps "
            "other samples, so the run would not continue as it began",
            f"start a new job from it: --resume_from_checkpoint with the path of {name}",
        )
    return [
        "the data plan: another version of fsdp-tui saved it, so steps train on different samples"
    ]


def _read(values: Mapping[str, Any]) -> tuple[JobSpec, dict[str, Any]]:
    """Parse the job of an older version; also return the values that are invalid today."""
    readable = {key: value for key, value in values.items() if key in JobSpec.model_fields}
    try:
        return JobSpec.model_validate(readable), {}
    except ValidationError as error:
        bad = {str(problem["loc"][0]) for problem in error.errors() if problem["loc"]}
    rest = {key: value for key, value in readable.items() if key not in bad}
    return JobSpec.model_validate(rest), {key: readable[key] for key in bad & readable.keys()}


def _is_second_denoiser(spec: JobKeys) -> bool:
    """Return whether the job trains the second of a family's two denoisers."""
    family = FAMILIES.get(spec.model_family)
    return family is not None and family.component_of(spec.model_flavour) != family.component


# -- rules ----------------------------------------------------------------------------------


def _model(old: JobKeys, spec: JobKeys, done: int, conflicts: ResumeConflicts) -> None:
    """Reject another base model, but not the same one at another path."""
    key = "pretrained_model_name_or_path"
    was, now = old.pretrained_model_name_or_path, spec.pretrained_model_name_or_path
    before, after = place_of(was), place_of(now)
    if was == now or (before is not None and before == after):
        return
    moved = before is None and PurePath(was).name == PurePath(now).name
    copied = before is not None and after is not None and looks_same(before, after)
    if moved or copied:
        conflicts.changes.append(
            f"{key}: {was} → {now}, assumed to be the same model in a new place"
        )
    elif was:
        conflicts.impossible.append(
            f"{key}: the checkpoint was trained on {was}, not on {now}; use that model, or start "
            "a job without the checkpoint"
        )


def _flavour(old: JobKeys, spec: JobKeys, done: int, conflicts: ResumeConflicts) -> None:
    """Check the flavour, which matters only if it selects one of two denoisers."""
    was, now = old.model_flavour, spec.model_flavour
    if was != now and (_is_second_denoiser(old) or _is_second_denoiser(spec)):
        conflicts.impossible.append(_refusal("model_flavour", was, now))


def _validation_seed(
    old: ValidationKeys, spec: ValidationKeys, done: int, conflicts: ResumeConflicts
) -> None:
    """Check the validation seed, if it selects the validation set."""
    was, now = old.validation_seed, spec.validation_seed
    if was != now and (old.validation_fraction or spec.validation_fraction):
        conflicts.changes.append(_line("validation_seed", was, now))


def _class_images(old: JobSpec, spec: JobSpec, done: int, conflicts: ResumeConflicts) -> None:
    """Check class images, which are sampled with the settings of validation prompts."""
    if not (old.num_class_images and spec.num_class_images):
        return
    for key in _OF_CLASS_IMAGES:
        was, now = getattr(old, key), getattr(spec, key)
        if was != now:
            conflicts.changes.append(f"{_line(key, was, now)}: other class images")


_OF_CLASS_IMAGES: Final = (
    "validation_num_inference_steps",
    "validation_guidance",
    "validation_true_cfg_scale",
    "validation_negative_prompt",
)


def _targets(old: JobSpec, spec: JobSpec, done: int, conflicts: ResumeConflicts) -> None:
    family, own = FAMILIES.get(spec.model_family), spec.lora_target_modules
    # With sound, more is trained: all of the model, or an adapter of more layers of LTX-2.
    full = spec.model_type == "full"
    more = family is not None and (family.sound if full else family.sound_layers and not own)
    if more and old.train_audio != spec.train_audio:
        conflicts.impossible.append(_refusal("train_audio", old.train_audio, spec.train_audio))
    if spec.model_type != "lora" or old.model_type != "lora":
        return
    for key in ("lora_target_modules", "lora_exclude_modules"):
        was, now = getattr(old, key), getattr(spec, key)
        if (was and sorted(set(was))) != (now and sorted(set(now))):
            conflicts.impossible.append(_refusal(key, was, now))
    if not own and family is not None and family.experts and old.lora_experts != spec.lora_experts:
        conflicts.impossible.append(_refusal("lora_experts", old.lora_experts, spec.lora_experts))


def _alpha(old: RecipeKeys, spec: JobSpec, done: int, conflicts: ResumeConflicts) -> None:
    """Check alpha, which scales the weights trained so far."""
    if not counts("lora_alpha", spec):
        return
    if spec.model_type != "lora" or old.model_type != "lora" or old.lora_rank != spec.lora_rank:
        return
    was = float(old.lora_alpha or old.lora_rank)
    now = float(spec.lora_alpha or spec.lora_rank)
    if was != now:
        conflicts.changes.append(
            f"lora_alpha: {was:g} → {now:g}, so the adapter becomes {now / was:.3g} times as strong"
        )


def _batch(old: RecipeKeys, spec: RecipeKeys, done: int, conflicts: ResumeConflicts) -> None:
    """Check batch sizes, which determine the samples of a step; the number of ranks does not."""
    was, now = global_batch_size(old), global_batch_size(spec)
    if was != now:
        conflicts.changes.append(
            f"the global batch: {was} → {now}, so steps train on different samples"
        )
    elif old.train_batch_size != spec.train_batch_size:
        line = _line("train_batch_size", old.train_batch_size, spec.train_batch_size)
        conflicts.changes.append(f"{line}, so steps train on different samples")


def _schedule(old: JobSpec, spec: JobSpec, done: int, conflicts: ResumeConflicts) -> None:
    """Check the learning-rate factor at every remaining step."""
    if _rates(old, done) == _rates(spec, done):
        return
    named = [
        _line(key, getattr(old, key), getattr(spec, key))
        for key in _OF_SCHEDULES
        if getattr(old, key) != getattr(spec, key) and (counts(key, old) or counts(key, spec))
    ]
    if _decays(spec) and _decays(old) and (bent := _stretched(old, spec)):
        named.append(f"{bent} the {spec.lr_scheduler} schedule")
    conflicts.changes.extend(named)


_OF_SCHEDULES: Final = ("lr_scheduler", "lr_warmup_steps", "lr_end", "lr_num_cycles", "lr_power")


def _rates(spec: JobSpec, done: int) -> tuple[object, ...]:
    """Return the values that determine the schedule after a step."""
    if _decays(spec):
        bends = [getattr(spec, key) for key in _OF_SCHEDULES if counts(key, spec)]
        return (*bends, total_steps(spec) or length_in_words(spec))
    return ("constant", spec.lr_warmup_steps if done < spec.lr_warmup_steps else 0)


def _stretched(old: RecipeKeys, spec: RecipeKeys) -> str:
    """Describe how a new length changes a schedule, in steps or in the jobs' own units.

    "" if it does not.
    """
    was, now = total_steps(old), total_steps(spec)
    if was is None or now is None:
        before, after = length_in_words(old), length_in_words(spec)
        return f"{before} → {after}, which changes" if before != after else ""
    line = f"{_line('max_train_steps', was, now)}, which"
    return "" if was == now else f"{line} {'stretches' if now > was else 'shortens'}"


def with_known_length(spec: JobSpec, state: Mapping[str, Any]) -> JobSpec:
    """Set the length in steps if a checkpoint's state contains the samples per epoch.

    Args:
        spec: The job as it will run.
        state: The checkpoint's state, with its job and facts about its data.
    """
    draws = (state.get("data") or {}).get("draws_per_epoch")
    if spec.max_train_steps is not None or not isinstance(draws, int | float):
        return spec
    old, _ = _read(state.get("spec") or {})
    if any(getattr(old, key) != getattr(spec, key) for key in _OF_EPOCHS):
        return spec
    return spec.model_copy(update={"max_train_steps": total_steps(spec, draws)})


_OF_EPOCHS: Final = (
    *(
        key
        for key, facts in facts_of(JobSpec).items()
        if facts.group.name == DATA.name and facts.resume != "same"
    ),
    *("model_family", "model_flavour", "dataset", "resolution", "validation_fraction"),
)
"""Keys that may change how many samples an epoch draws."""


def _decays(spec: TrainingKeys) -> bool:
    return spec.lr_scheduler not in ("constant", "constant_with_warmup")


def _average(old: NoiseKeys, spec: NoiseKeys, done: int, conflicts: ResumeConflicts) -> None:
    if old.use_ema != spec.use_ema:
        what = (
            "the moving average starts from the checkpoint's weights"
            if spec.use_ema
            else "the moving average stops; samples and exports use the raw weights"
        )
        conflicts.changes.append(f"{_line('use_ema', old.use_ema, spec.use_ema)}: {what}")


def _data(old: InputKeys, spec: InputKeys, done: int, conflicts: ResumeConflicts) -> None:
    """Check the datasets; a list of one dataset equals that dataset."""
    if not old.dataset and not old.datasets:
        return  # the checkpoint does not contain it
    was, now = datasets_of(old), datasets_of(spec)
    if was == now:
        return
    if len(was) == len(now) == 1 and was[0].path != now[0].path:
        conflicts.changes.append(_line("dataset", was[0].path, now[0].path))
    elif [entry.path for entry in was] == [entry.path for entry in now]:
        conflicts.changes.append("datasets: same datasets, other settings")
    else:
        conflicts.changes.append(
            _line("datasets", [entry.path for entry in was], [entry.path for entry in now])
        )


def _buckets(old: InputKeys, spec: DataPlanKeys, done: int, conflicts: ResumeConflicts) -> None:
    """Report a bucket step only if it effectively differs; one value can be written in two ways."""
    if any(bucket_step(side, old) != bucket_step(side, spec) for side in all_resolutions(spec)):
        conflicts.changes.append(_line("bucket_step", old.bucket_step, spec.bucket_step))


def _matmul(old: RecipeKeys, spec: RecipeKeys, done: int, conflicts: ResumeConflicts) -> None:
    """Check base_matmul: an older checkpoint's `auto` was `dequantize`; a new `auto` keeps it."""
    was = "dequantize" if old.base_matmul == "auto" else old.base_matmul
    if may_scale(old) and may_scale(spec) and spec.base_matmul not in ("auto", was):
        conflicts.changes.append(_line("base_matmul", was, spec.base_matmul))


def _modulation(old: JobSpec, spec: JobSpec, done: int, conflicts: ResumeConflicts) -> None:
    key = "modulation_precision"
    was, now = modulation_of(old), modulation_of(spec)
    if was != now and counts(key, old) and counts(key, spec):
        conflicts.changes.append(_line(key, was, now))


_RULES: Final = (
    _model,
    _flavour,
    _validation_seed,
    _class_images,
    _matmul,
    _modulation,
    _targets,
    _batch,
    _schedule,
    _average,
    _alpha,
    _data,
    _buckets,
)


# -- words ----------------------------------------------------------------------------------


def _line(key: str, was: object, now: object) -> str:
    return f"{key}: {_word(was)} → {_word(now)}"


def _refusal(key: str, was: object, now: object) -> str:
    why = key_facts(key).mismatch
    return (
        f"{key}: the checkpoint was written with {_word(was)}, not with {_word(now)}: {why}; "
        f"set {key} to {_word(was)}, or start a job without the checkpoint"
    )


def _word(value: object) -> str:
    """Format a value as in a job file."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_word, value)) or "none"
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


_DENOISERS: Final = ("transformer", "unet")


def place_of(model: str) -> Path | None:
    """Return the directory of a model; None if it is not on this machine."""
    try:
        return find_model(model).resolve() if model else None
    except (SpecError, OSError, ValueError):
        return None


def looks_same(first: Path, other: Path) -> bool:
    """Return whether two models have the same pipeline, and denoisers with equal configs and files.

    This holds for a copy on a faster disk. It is not proof: the files of a model that was trained
    further have other sizes only if its precision changed, so callers report the assumption.
    """
    if find_index(first) != find_index(other):
        return False
    parts = [part for part in _DENOISERS if (first / part).is_dir() or (other / part).is_dir()]
    return bool(parts) and all(
        read_json(first / part / "config.json") == read_json(other / part / "config.json")
        and _files(first / part) == _files(other / part)
        for part in parts
    )


def _files(directory: Path) -> dict[str, int]:
    """Return name → bytes of the weight files."""
    try:
        return {path.name: path.stat().st_size for path in directory.glob("*.safetensors")}
    except OSError:
        return {}
