"""ai-toolkit: its examples and the jobs that its web page makes, read by its own classes."""

from __future__ import annotations

import ast
import copy
import json
import re
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import MagicMock

import yaml

from jobs.imports.imported import import_ai_toolkit
from tests.bench.import_sources.real import Real, base_of, files_in, literal, parse_source, word_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobs.imports.imported import Imported

_PARTS: Final = {
    "train": "TrainConfig",
    "save": "SaveConfig",
    "network": "NetworkConfig",
    "sample": "SampleConfig",
    "model": "ModelConfig",
}
_TIMESTEPS: Final = {
    "sigmoid": "logit_normal",
    "linear": "uniform",
    "weighted": "uniform",
    **dict.fromkeys(("shift", "flux_shift", "lumina2_shift"), "uniform_shift"),
}
_DENOISING: Final = ("sd1", "sd15", "sd2", "sdxl", "pixart_sigma", "ssd", "vega")
# Its optimizers, of the libraries that it takes them from: weight decay where none is set.
_DECAYS: Final = {"adamw": 1e-2, "adamw8bit": 1e-2}
_LOSSES: Final = {"mse": "mse"}


def read_all(checkout: Path, paths: list[Path], own: bool) -> Iterator[Real]:
    """Its examples, a job of its web page for each architecture, and others' configurations."""
    source = checkout / "toolkit" / "config_modules.py"
    classes, defaults = _classes(source), _defaults(source)
    examples = sorted((checkout / "config" / "examples").rglob("*.y*ml")) if own else []
    for path in [*examples, *files_in(paths, ".yaml", ".yml")]:
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError):
            values = None  # the import refuses it
        yield _real(path.name, values, classes, defaults, path)
    for name, values in _of_page(checkout) if own else []:
        yield _real(f"web page: {name}", values, classes, defaults, None)


def _real(
    name: str, values: Any, classes: SimpleNamespace, defaults: dict[str, Any], path: Path | None
) -> Real:
    def read() -> Imported:
        return import_ai_toolkit(path) if path is not None else _import(values)

    real = Real(name, read, content=repr(values))
    try:
        process = copy.deepcopy(values["config"]["process"][0])
        real.values = _values(process, classes)
    except (KeyError, TypeError, IndexError, AttributeError, ValueError):
        return real  # the import refuses it
    real.spelled_out = lambda: _spelled_out(values, defaults)
    return real


def _import(values: Any) -> Imported:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.yaml"
        path.write_text(json.dumps(values), encoding="utf-8")
        return import_ai_toolkit(path)


def _values(process: dict[str, Any], classes: SimpleNamespace) -> dict[str, tuple[str, Any]]:
    """Our key → its key and the value that its classes have for it."""
    train, save, sample, model = (
        getattr(classes, _PARTS[part])(**(process.get(part) or {}))
        for part in ("train", "save", "sample", "model")
    )
    params = train.optimizer_params
    place = "train.optimizer_params"
    optimizer = str(train.optimizer).lower()
    adam = optimizer.startswith(("adam", "prodigy"))
    rate = float(train.unet_lr)
    warm_up = train.lr_scheduler_params.get("num_warmup_steps")
    if train.lr_scheduler == "constant_with_warmup" and warm_up is None:
        warm_up = 1000
    flow = str(model.arch) not in _DENOISING
    values = {
        "learning_rate": ("train.lr", 1.0 if "prodigy" in optimizer and rate < 0.1 else rate),
        "train_batch_size": ("train.batch_size", train.batch_size),
        "max_train_steps": ("train.steps", train.steps),
        "max_grad_norm": ("train.max_grad_norm", train.max_grad_norm),
        "gradient_checkpointing": ("train.gradient_checkpointing", train.gradient_checkpointing),
        "gradient_accumulation_steps": (
            "train.gradient_accumulation",
            max(train.gradient_accumulation, train.gradient_accumulation_steps),
        ),
        "snr_gamma": ("train.min_snr_gamma", train.min_snr_gamma or train.snr_gamma),
        "optimizer": ("train.optimizer", word_of("optimizer", optimizer)),
        "lr_scheduler": ("train.lr_scheduler", word_of("schedule", train.lr_scheduler)),
        "lr_warmup_steps": ("train.lr_scheduler_params.num_warmup_steps", warm_up or 0),
        "mixed_precision": ("train.dtype", word_of("precision", train.dtype)),
        "adam_beta1": (f"{place}.betas", (params.get("betas") or (0.9, 0.999))[0]),
        "adam_beta2": (f"{place}.betas", (params.get("betas") or (0.9, 0.999))[1]),
        "adam_epsilon": (f"{place}.eps", params.get("eps", 1e-6 if adam else 1e-8)),
        "weight_decay": (
            f"{place}.weight_decay",
            params.get("weight_decay", _DECAYS.get(optimizer, 0.0)),
        ),
        "loss_type": ("train.loss_type", _LOSSES.get(train.loss_type, train.loss_type)),
        "use_ema": ("train.ema_config.use_ema", train.ema_config.use_ema),
        "ema_decay": ("train.ema_config.ema_decay", train.ema_config.ema_decay),
        "checkpointing_steps": ("save.save_every", save.save_every),
        "checkpoints_total_limit": ("save.max_step_saves_to_keep", save.max_step_saves_to_keep),
        "export_dtype": ("save.dtype", {"float16": "fp16", "bfloat16": "bf16"}.get(save.dtype)),
        "validation_steps": ("sample.sample_every", sample.sample_every),
        "validation_guidance": ("sample.guidance_scale", sample.guidance_scale),
        "validation_num_inference_steps": ("sample.sample_steps", sample.sample_steps),
        "validation_seed": ("sample.seed", sample.seed),
        "validation_resolution": ("sample.width", f"{sample.width}x{sample.height}"),
        "pretrained_model_name_or_path": ("model.name_or_path", model.name_or_path),
        "base_precision": ("model.quantize", base_of(model.qtype) if model.quantize else "none"),
    }
    if values["export_dtype"][1] is None:
        values["export_dtype"] = ("save.dtype", save.dtype)
    if flow:
        drawn = _TIMESTEPS.get(train.timestep_type, train.timestep_type)
        values["timestep_sampling"] = ("train.timestep_type", drawn)
    if isinstance(process.get("network"), dict):
        network = classes.NetworkConfig(**process["network"])
        values |= {
            "lora_rank": ("network.linear", network.linear),
            "lora_alpha": ("network.linear_alpha", network.linear_alpha),
            "lora_dropout": ("network.dropout", network.dropout),
        }
    return values | _of_datasets(process, classes)


def _of_datasets(process: dict[str, Any], classes: SimpleNamespace) -> dict[str, tuple[str, Any]]:
    """What its datasets ask for that ours, or the job, have too."""
    entries = process.get("datasets") or []
    datasets = [classes.DatasetConfig(**entry) for entry in entries if isinstance(entry, dict)]
    if not datasets:
        return {}
    sides = [one.resolution for one in datasets]
    flat = [side for one in sides for side in (one if isinstance(one, list) else [one])]
    first = datasets[0]
    crop = "square" if first.square_crop else "random" if first.random_crop else "center"
    return {
        "resolution": ("datasets.resolution", sorted({int(side) for side in flat})),
        "repeats": ("datasets.num_repeats", [one.num_repeats for one in datasets]),
        "crop": ("datasets.random_crop", crop),
        "random_flip": ("datasets.flip_x", first.flip_x),
        "shuffle_captions": ("datasets.shuffle_tokens", first.shuffle_tokens),
        "caption_dropout_probability": (
            "datasets.caption_dropout_rate",
            max(one.caption_dropout_rate for one in datasets),
        ),
        "num_frames": ("datasets.num_frames", max(one.num_frames for one in datasets)),
    }


def _classes(path: Path) -> SimpleNamespace:
    """Its classes of configurations, run without the libraries that the file imports."""
    torch = MagicMock()
    torch.backends.mps.is_available.return_value = False
    names: dict[str, Any] = {"__name__": "config_modules"}
    body = []
    for node in parse_source(path).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            source = getattr(node, "module", None) or node.names[0].name
            if source.partition(".")[0] not in sys.stdlib_module_names:
                for name in node.names:
                    names[name.asname or name.name] = torch
                continue
        body.append(node)
    exec(compile(ast.Module(body, []), str(path), "exec"), names)
    return SimpleNamespace(**{key: value for key, value in names.items() if key[0] != "_"})


def _defaults(path: Path) -> dict[str, dict[str, Any]]:
    """Class → key → default, of its `kwargs.get(key, default)` with a value as default."""
    defaults: dict[str, dict[str, Any]] = {}
    for node in parse_source(path).body:
        if isinstance(node, ast.ClassDef):
            own = defaults.setdefault(node.name, {})
            for call in ast.walk(node):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "kwargs.get":
                    key, default = (*map(literal, call.args), None)[:2]
                    if default is not None:
                        own.setdefault(str(key), default)
    return defaults


_OTHER_NAMES: Final = {
    "rank": ("linear",),
    "alpha": ("linear_alpha",),
    "caption_type": ("caption_ext",),
    "gradient_accumulation_steps": ("gradient_accumulation",),
}


def _spelled_out(values: Any, defaults: dict[str, Any]) -> tuple[Imported, list[str]]:
    """The configuration with the tool's defaults written into it, and their keys."""
    values, added = copy.deepcopy(values), []
    process = values["config"]["process"][0]
    for part, name in _PARTS.items():
        if not isinstance(process.get(part), dict):
            continue
        given = process[part]
        for key, default in defaults[name].items():
            other = _OTHER_NAMES.get(key, ())
            if key in given or any(one in given for one in other) or key == "prompts":
                continue
            given[key] = default
            added.append(f"{part}.{key}")
    for number, entry in enumerate(process.get("datasets") or []):
        # Frames are counted at fps only if a video is not shrunk to them.
        shrinks = entry.get("shrink_video_to_frames", True)
        for key, default in defaults["DatasetConfig"].items():
            if key == "fps" and shrinks:
                continue
            if key not in entry and key not in _OTHER_NAMES:
                entry[key] = default
                added.append(f"datasets[{number}].{key}")
    return _import(values), added


# -- the jobs of its web page ------------------------------------------------------------------


def _of_page(checkout: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The job of each architecture, as its page writes it before anything is changed."""
    page = checkout / "ui" / "src" / "app" / "jobs" / "new"
    if not (page / "options.tsx").is_file():
        return
    usual = (page / "jobConfig.ts").read_text(encoding="utf-8")
    samples = (checkout / "ui/src/helpers/defaultSamples.ts").read_text(encoding="utf-8")
    names = {
        "defaultDatasetConfig": _object(usual, "defaultDatasetConfig: DatasetConfig = "),
        "defaultSampleConfig": _object(samples, "defaultSampleConfig: SampleConfig = "),
    }
    job = _named(_object(usual, "defaultJobConfig: JobConfig = "), names)
    options = (page / "options.tsx").read_text(encoding="utf-8")
    for entry in re.split(r"\n  \{\n(?=    name: )", options)[1:]:
        name = re.match(r"\s*name: '([^']+)'", entry)
        if name is None or "defaults: {" not in entry:
            continue
        values = copy.deepcopy(job)
        values["config"]["process"][0]["model"]["arch"] = name[1]
        values["config"]["process"][0]["datasets"][0]["folder_path"] = "images"
        for place, (value, *_) in _object(entry, "defaults: ").items():
            _put(values, place.replace("[x]", "[0]"), _named(value, names))
        yield name[1], values


def _object(text: str, before: str) -> Any:
    """An object literal of TypeScript, which is YAML but for its comments and its names."""
    start = text.index("{", text.index(before) + len(before) - 1)
    text = re.sub(r"^\s*//.*$", "", text[start:], flags=re.M)
    text = re.sub(r"(?<=[,{\[])\s*//.*$", "", text, flags=re.M)
    depth, end = 0, 0
    for end, sign in enumerate(text):  # noqa: B007
        depth += {"{": 1, "}": -1}.get(sign, 0)
        if not depth:
            break
    return _without_undefined(yaml.safe_load(text[: end + 1].replace("\t", " ")))


def _without_undefined(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_undefined(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_undefined(inner) for inner in value]
    return None if value == "undefined" else value


def _named(value: Any, names: dict[str, Any]) -> Any:
    """A value in which names of constants are what they stand for."""
    if isinstance(value, dict):
        return {key: _named(inner, names) for key, inner in value.items()}
    if isinstance(value, list):
        return [_named(inner, names) for inner in value]
    return copy.deepcopy(names[value]) if isinstance(value, str) and value in names else value


def _put(values: Any, place: str, value: Any) -> None:
    """Set the value at a place such as `config.process[0].train.lr`."""
    *above, last = re.findall(r"[^.\[\]]+", place)
    for key in above:
        values = values[int(key)] if isinstance(values, list) else values.setdefault(key, {})
    if value is None:
        values.pop(last, None)
    else:
        values[last] = value
