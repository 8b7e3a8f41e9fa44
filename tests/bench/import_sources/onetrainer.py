"""OneTrainer: its presets and others' configurations, read by its own `TrainConfig`."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import math
import re
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jobs.errors import UserError
from jobs.imports.imported import import_onetrainer
from jobs.imports.onetrainer.config import DATA
from tests.bench.import_sources.real import Real, files_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobs.imports.imported import Imported

_ENCODERS: Final = ("text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4")
_OPTIMIZERS: Final = {
    **dict.fromkeys(("ADAM", "ADAMW"), "adamw"),
    **dict.fromkeys(("ADAM_8BIT", "ADAMW_8BIT"), "adamw_8bit"),
    **dict.fromkeys(("LION", "LION_8BIT"), "lion"),
    **{name: name.lower() for name in ("PRODIGY", "ADAFACTOR", "SGD")},
    "SCHEDULE_FREE_ADAMW": "adamw_schedule_free",
}
_SCHEDULES: Final = {
    "CONSTANT": "constant_with_warmup",
    "LINEAR": "linear",
    "COSINE": "cosine",
    "COSINE_WITH_HARD_RESTARTS": "cosine_with_restarts",
}
_BASES: Final = {
    **dict.fromkeys(("FLOAT_8", "FLOAT_W8A8"), "fp8_scaled"),
    **dict.fromkeys(("INT_8", "INT_W8A8"), "int8"),
    "NFLOAT_4": "nf4",
}
_DTYPES: Final = {"FLOAT_32": "fp32", "FLOAT_16": "fp16", "BFLOAT_16": "bf16"}
_PRECISIONS: Final = {"FLOAT_16": "fp16", "BFLOAT_16": "bf16", "FLOAT_32": "no", "TFLOAT_32": "no"}
_DECAYED: Final = ("ADAMW", "ADAMW_8BIT", "SCHEDULE_FREE_ADAMW")
_FLOWS: Final = ("stable_diffusion", "sdxl", "pixart_sigma")
_TABLES: Final = ("FLUX_DEV_1", "FLUX_2", "Z_IMAGE", "QWEN")


def read_all(checkout: Path, paths: list[Path], own: bool) -> Iterator[Real]:
    """Its presets, and others' configurations."""
    sys.path.insert(0, str(checkout))
    from modules.util.config.TrainConfig import TrainConfig

    presets = sorted((checkout / "training_presets").rglob("*.json")) if own else []
    for path in [*presets, *files_in(paths, ".json")]:
        try:
            values = json.loads(path.read_text(encoding="utf-8-sig"))
        except ValueError:
            continue
        if isinstance(values, dict) and "training_method" in values:
            yield _real(path, values, TrainConfig)


def _real(path: Path, values: dict[str, Any], tool: Any) -> Real:
    real = Real(
        f"{path.parent.name}/{path.name}",
        lambda: import_onetrainer(path),
        content=json.dumps(values, sort_keys=True),
    )
    if values.get("training_method") not in ("LORA", "FINE_TUNE"):
        return real
    # Presets are of the newest version without saying so, and are not migrated.
    preset = "__version" not in values
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            config = tool.default_values().from_dict(copy.deepcopy(values), migrate=not preset)
        except (KeyError, ValueError, TypeError):
            return real
    known = str(config.model_type) == values.get("model_type", "STABLE_DIFFUSION_15")
    if known and str(config.model_type).lower() in DATA["models"]:
        real.values = _values(config)
        if "prior" not in values and values.get("__version", 11) == 11:
            real.spelled_out = lambda: _spelled_out(path, values, config)
    return real


def _values(config: Any) -> dict[str, tuple[str, Any]]:
    """Our key → its key and the value that its own class has for it."""
    family = DATA["models"][str(config.model_type).lower()].partition(" ")[0]
    part = "unet" if family in ("stable_diffusion", "sdxl") else "transformer"
    denoiser, optimizer = getattr(config, part), config.optimizer
    name = str(optimizer.optimizer)
    lora = str(config.training_method) == "LORA"
    scale = config.learning_rate_scaler.get_scale(
        config.batch_size, config.gradient_accumulation_steps
    )
    rate = denoiser.learning_rate if denoiser.learning_rate is not None else config.learning_rate
    warm_up = config.learning_rate_warmup_steps
    sides = [int(side) for side in re.split(r"\D", config.resolution) if side]
    decay = optimizer.weight_decay
    values: dict[str, tuple[str, Any]] = {
        "pretrained_model_name_or_path": ("base_model_name", config.base_model_name),
        "model_type": ("training_method", "lora" if lora else "full"),
        "learning_rate": ("learning_rate", rate * math.sqrt(scale)),
        "train_batch_size": ("batch_size", config.batch_size),
        "gradient_accumulation_steps": (
            "gradient_accumulation_steps",
            config.gradient_accumulation_steps,
        ),
        "num_train_epochs": ("epochs", config.epochs / max(1, len(set(sides)))),
        "max_grad_norm": ("clip_grad_norm", config.clip_grad_norm or 0),
        "lr_scheduler": (
            "learning_rate_scheduler",
            _SCHEDULES.get(str(config.learning_rate_scheduler), config.learning_rate_scheduler),
        ),
        "lr_warmup_steps": (
            "learning_rate_warmup_steps",
            int(warm_up / config.gradient_accumulation_steps) if warm_up > 1 else warm_up,
        ),
        "optimizer": ("optimizer.optimizer", _OPTIMIZERS.get(name, name)),
        "weight_decay": (
            "optimizer.weight_decay",
            decay if decay is not None else 1e-2 if name in _DECAYED else 0.0,
        ),
        "adam_beta1": ("optimizer.beta1", optimizer.beta1 or 0.9),
        "adam_beta2": ("optimizer.beta2", optimizer.beta2 or (0.99 if name == "LION" else 0.999)),
        "adam_epsilon": ("optimizer.eps", optimizer.eps or 1e-8),
        "mixed_precision": ("train_dtype", _PRECISIONS.get(str(config.train_dtype))),
        "export_dtype": ("output_dtype", _DTYPES.get(str(config.output_dtype))),
        "gradient_checkpointing": (
            f"{part}.gradient_checkpointing",
            denoiser.gradient_checkpointing,
        ),
        "base_precision": (
            f"{part}.weight_dtype",
            _BASES.get(str(denoiser.weight_dtype).removesuffix("_COMPRESSED"), "none"),
        ),
        "resolution": ("resolution", sides),
        "use_ema": ("ema", str(config.ema) != "OFF"),
        "ema_decay": ("ema_decay", config.ema_decay),
        "torch_compile": ("compile", config.compile),
        "masked_loss": ("masked_training", "file" if config.masked_training else "none"),
    }
    if config.masked_training:
        values["unmasked_weight"] = ("unmasked_weight", config.unmasked_weight)
    if lora:
        values |= {
            "lora_rank": ("lora_rank", config.lora_rank),
            "lora_alpha": ("lora_alpha", config.lora_alpha),
            "lora_dropout": ("dropout_probability", config.dropout_probability),
        }
        if str(config.peft_type) == "LOKR":
            values["lora_rank"] = ("lokr_dim", config.lokr_dim)
    trained = [
        name for name in _ENCODERS[: DATA["encoders"].get(family, 1)] if getattr(config, name).train
    ]
    values["text_encoder_lora_rank"] = ("text_encoder.train", config.lora_rank if trained else 0)
    return values | _noise(config, family)


def _noise(config: Any, family: str) -> dict[str, tuple[str, Any]]:
    word = str(config.loss_weight_fn)
    gamma = config.loss_weight_strength if word == "MIN_SNR_GAMMA" else None
    if family in _FLOWS:
        return {"snr_gamma": ("loss_weight_fn", gamma)}
    dynamic = config.dynamic_timestep_shifting and str(config.model_type) in _TABLES
    moves = dynamic or config.timestep_shift != 1
    drawn = {
        "UNIFORM": "uniform_shift" if moves else "uniform",
        "LOGIT_NORMAL": "shift" if moves else "logit_normal",
        "HEAVY_TAIL": "mode",
    }
    how = str(config.timestep_distribution)
    values = {"timestep_sampling": ("timestep_distribution", drawn.get(how, how))}
    if moves and not dynamic:
        values["flow_shift"] = ("timestep_shift", config.timestep_shift)
    if how == "LOGIT_NORMAL":
        values["logit_mean"] = ("noising_bias", config.noising_bias)
        values["logit_std"] = ("noising_weight", config.noising_weight + 1)
    return values


def _spelled_out(path: Path, values: dict[str, Any], config: Any) -> tuple[Imported, list[str]]:
    """The configuration with the tool's defaults written into it, and their keys."""
    full = json.loads(json.dumps(config.to_dict(), default=str))
    full.pop("secrets", None)
    full |= {key: values.get(key) for key in ("concepts", "samples")}
    added = [key for key in full if key not in values]
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / path.name
        written.write_text(json.dumps(full), encoding="utf-8")
        try:
            return import_onetrainer(written), added
        except UserError as error:
            raise AssertionError(f"{path}: {error}") from error
