"""ltx-trainer: the configurations of its repository, and others'."""

from __future__ import annotations

import ast
import contextlib
import copy
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from jobs.imports.imported import import_ltx_trainer
from tests.bench.import_sources.real import Real, files_in, keywords, literal, parse_source, word_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobs.imports.imported import Imported

# Where each part of a configuration is described.
_PARTS: Final = {
    "model": "ModelConfig",
    "lora": "LoraConfig",
    "optimization": "OptimizationConfig",
    "acceleration": "AccelerationConfig",
    "validation": "ValidationConfig",
    "checkpoints": "CheckpointsConfig",
    "flow_matching": "FlowMatchingConfig",
    "": "LtxTrainerConfig",
}
_SCHEDULES: Final = {"linear": "polynomial", "polynomial": "linear"}
_DRAWS: Final = {"shifted_logit_normal": "stretched"}
_BASES: Final = {"int8-quanto": "int8", "int4-quanto": "nf4", "int2-quanto": "nf4"}
_DTYPES: Final = {"bfloat16": "bf16", "float32": "fp32"}


def read_all(checkout: Path, paths: list[Path], own: bool) -> Iterator[Real]:
    """Its configurations and others'.

    Args:
        checkout: Of Lightricks/LTX-2, or its `packages/ltx-trainer`.
        paths: Files and folders of others.
        own: Whether to read its own.
    """
    inside = checkout / "packages" / "ltx-trainer"
    trainer = inside if inside.is_dir() else checkout
    source = trainer / "src" / "ltx_trainer"
    classes = _defaults(source / "config.py")
    defaults = {part: classes[name] for part, name in _PARTS.items()}
    strategies = source / "training_strategies"
    defaults["training_strategy"] = _defaults(strategies / "text_to_video.py")["TextToVideoConfig"]
    for path in [
        *(sorted((trainer / "configs").glob("*.yaml")) if own else []),
        *files_in(paths, ".yaml", ".yml", ".json"),
    ]:
        values = None
        with contextlib.suppress(yaml.YAMLError, ValueError):
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        if isinstance(values, dict) and isinstance(values.get("model"), dict):
            yield _real(path, values, defaults)


def _defaults(source: Path) -> dict[str, dict[str, Any]]:
    """Class → field → default, of pydantic's models in a file."""
    found: dict[str, dict[str, Any]] = {}
    for node in parse_source(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        fields = found.setdefault(node.name, {})
        for line in node.body:
            if isinstance(line, ast.AnnAssign) and line.value is not None:
                called = isinstance(line.value, ast.Call)
                value = keywords(line.value).get("default") if called else literal(line.value)
                fields[ast.unparse(line.target)] = value
    return found


def _spelled_out(
    path: Path, theirs: dict[str, Any], defaults: dict[str, dict[str, Any]], *, old: bool
) -> tuple[Imported, list[str]]:
    """Import a configuration with the defaults of its parts written out."""
    full, added = copy.deepcopy(theirs), []
    for part, fields in defaults.items():
        if part == "training_strategy" and not old:  # these are of another strategy
            continue
        target = full.setdefault(part, {}) if part else full
        for name, value in fields.items():
            if value is not None and isinstance(target, dict) and name not in target:
                target[name] = value
                added.append(f"{part}.{name}" if part else name)
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / path.name
        written.write_text(yaml.safe_dump(full), encoding="utf-8")
        return import_ltx_trainer(written), added


def _real(path: Path, theirs: dict[str, Any], defaults: dict[str, dict[str, Any]]) -> Real:
    def part(name: str) -> dict[str, Any]:
        given = theirs if not name else theirs.get(name)
        return {**defaults[name], **(given if isinstance(given, dict) else {})}

    optimization, validation, strategy = (
        part(name) for name in ("optimization", "validation", "training_strategy")
    )
    lora, acceleration, checkpoints = part("lora"), part("acceleration"), part("checkpoints")
    steps, schedule = optimization["steps"], optimization["scheduler_type"]
    flexible = strategy.get("name") == "flexible"
    video, sound = strategy.get("video") or {}, strategy.get("audio") or {}
    shares = [
        condition.get("probability", 1.0)
        for condition in video.get("conditions") or []
        if condition.get("type") == "first_frame"
    ]
    width, height, frames = validation["video_dims"]
    quantization = acceleration["quantization"]
    real = Real(path.name, lambda: import_ltx_trainer(path), content=path.read_text("utf-8"))
    real.spelled_out = lambda: _spelled_out(path, theirs, defaults, old=not flexible)
    real.values = {
        "model_type": ("model.training_mode", part("model")["training_mode"]),
        "train_audio": (
            "training_strategy.audio.is_generated",
            sound.get("is_generated", False) if flexible else strategy["with_audio"],
        ),
        "first_frame": (
            "training_strategy.video.conditions",
            sum(shares) if flexible else strategy["first_frame_conditioning_p"],
        ),
        "learning_rate": ("optimization.learning_rate", optimization["learning_rate"]),
        "max_train_steps": ("optimization.steps", steps),
        "train_batch_size": ("optimization.batch_size", optimization["batch_size"]),
        "gradient_accumulation_steps": (
            "optimization.gradient_accumulation_steps",
            optimization["gradient_accumulation_steps"],
        ),
        "max_grad_norm": ("optimization.max_grad_norm", optimization["max_grad_norm"]),
        "optimizer": (
            "optimization.optimizer_type",
            word_of("optimizer", optimization["optimizer_type"]),
        ),
        # Of torch's AdamW, which it gives a rate alone.
        "weight_decay": ("optimization.optimizer_type", 0.01),
        "adam_beta2": ("optimization.optimizer_type", 0.999),
        "lr_scheduler": ("optimization.scheduler_type", _SCHEDULES.get(schedule, schedule)),
        "gradient_checkpointing": (
            "optimization.enable_gradient_checkpointing",
            optimization["enable_gradient_checkpointing"],
        ),
        "mixed_precision": (
            "acceleration.mixed_precision_mode",
            acceleration["mixed_precision_mode"],
        ),
        "base_precision": (
            "acceleration.quantization",
            _BASES.get(quantization, "fp8_scaled") if quantization else "none",
        ),
        "timestep_sampling": (
            "flow_matching.timestep_sampling_mode",
            _DRAWS.get(*[part("flow_matching")["timestep_sampling_mode"]] * 2),
        ),
        "fps": ("validation.frame_rate", validation["frame_rate"]),
        "validation_resolution": ("validation.video_dims", f"{width}x{height}"),
        "validation_num_frames": ("validation.video_dims", frames),
        "validation_num_inference_steps": (
            "validation.inference_steps",
            validation["inference_steps"],
        ),
        "validation_guidance": ("validation.video_cfg_scale", validation["video_cfg_scale"]),
        "validation_steps": ("validation.interval", validation["interval"]),
        "validation_seed": ("validation.seed", validation["seed"]),
        "checkpointing_steps": ("checkpoints.interval", checkpoints["interval"]),
        "export_dtype": ("checkpoints.precision", _DTYPES.get(checkpoints["precision"])),
        "seed": ("seed", part("")["seed"]),
        "lora_rank": ("lora.rank", lora["rank"]),
        "lora_alpha": ("lora.alpha", lora["alpha"]),
        "lora_dropout": ("lora.dropout", lora["dropout"]),
    }
    return real
