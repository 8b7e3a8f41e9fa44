"""diffusion-pipe: its examples, those in its documentation, and others' configurations."""

from __future__ import annotations

import ast
import contextlib
import copy
import json
import re
import tempfile
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jobs.imports.diffusion_pipe.config import DATA
from jobs.imports.imported import import_diffusion_pipe
from tests.bench.import_sources.real import Real, files_in, literal, parse_source

if TYPE_CHECKING:
    from collections.abc import Iterator

_FENCE: Final = re.compile(r"^ *```\w*\n(.*?)^ *```", re.S | re.M)
_WORDS: Final = {
    **dict.fromkeys(("adamw", "adamw_optimi", "offload", "stableadamw"), "adamw"),
    **dict.fromkeys(("adamw8bit", "adamw8bitkahan"), "adamw_8bit"),
}
_DTYPES: Final = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
# Betas, epsilon and weight decay of the classes that its train.py takes, in torch, bitsandbytes,
# torch-optimi and pytorch_optimizer of August 2026.
_OPTIMIZERS: Final = {
    **dict.fromkeys(("adamw", "adamw8bit", "adamw8bitkahan", "offload"), (0.9, 0.999, 1e-8, 1e-2)),
    **dict.fromkeys(("adamw_optimi", "stableadamw"), (0.9, 0.99, 1e-6, 1e-2)),
    "lion": (0.9, 0.99, 1e-8, 0.0),
}
_PRECISIONS: Final = {"bfloat16": "bf16", "float16": "fp16", "float32": "no"}


def read_all(checkout: Path, paths: list[Path], own: bool) -> Iterator[Real]:
    """Its examples, the models of its documentation put into one, and others'."""
    defaults = _defaults(checkout / "train.py")
    examples = sorted((checkout / "examples").glob("*.toml")) if own else []
    for path in [*examples, *files_in(paths, ".toml")]:
        values = None
        with contextlib.suppress(ValueError):
            values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        if isinstance(values, dict) and isinstance(values.get("model"), dict):
            yield _real(f"{path.parent.name}/{path.name}", path, values, defaults)
    if not own:
        return
    main = tomllib.loads((checkout / "examples" / "main_example.toml").read_text(encoding="utf-8"))
    guide = (checkout / "docs" / "supported_models.md").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        for number, text in enumerate(_FENCE.findall(guide)):
            if not text.startswith("[model]"):
                continue
            whole = _written({key: v for key, v in main.items() if key != "model"}) + text
            path = Path(folder) / f"{number}.toml"
            path.write_text(whole, encoding="utf-8")
            yield _real(f"supported_models.md#{number}", path, tomllib.loads(whole), defaults)


def _defaults(source: Path) -> dict[str, Any]:
    """Key → default of its `config.get(key, default)` and `config.setdefault(key, default)`."""
    found: dict[str, Any] = {}
    for call in ast.walk(parse_source(source)):
        if isinstance(call, ast.Call) and re.fullmatch(
            r"config\.(get|setdefault)", ast.unparse(call.func)
        ):
            key, default = (*map(literal, call.args), None)[:2]
            found[str(key)] = default
    return found


def _written(values: dict[str, Any]) -> str:
    """Plain keys and tables of them as TOML."""
    plain = [f"{k} = {_toml(v)}\n" for k, v in values.items() if not isinstance(v, dict)]
    tables = [
        f"[{name}]\n" + "".join(f"{k} = {_toml(v)}\n" for k, v in table.items())
        for name, table in values.items()
        if isinstance(table, dict)
    ]
    return "".join([*plain, *tables])


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k} = {_toml(v)}' for k, v in value.items())}}}"
    return json.dumps(value)


def _real(name: str, path: Path, values: dict[str, Any], defaults: dict[str, Any]) -> Real:
    real = Real(name, lambda: import_diffusion_pipe(path), content=path.read_text(encoding="utf-8"))
    model = values["model"]
    if model.get("type") not in DATA["families"]:
        return real
    values = defaults | copy.deepcopy(values)
    optimizer = values.get("optimizer") or {}
    kind = str(optimizer.get("type", "")).lower()
    first, second, epsilon, decay = _OPTIMIZERS.get(kind, (0.9, 0.999, 1e-8, 0.0))
    betas = optimizer.get("betas", [first, second])
    adapter = values.get("adapter")
    warm, how = values["warmup_steps"], values["lr_scheduler"]
    batch = values["micro_batch_size_per_gpu"]
    dtype = values.get("save_dtype", model.get("dtype"))
    base = str(model.get("transformer_dtype") or model.get("diffusion_model_dtype") or "none")
    moves = model.get("shift") or model.get("flux_shift") or model.get("lumina_shift")
    sampling = model.get("timestep_sample_method", "logit_normal")
    drawn = {"logit_normal": "shift", "uniform": "uniform_shift"} if moves else {}
    real.values = {
        "model_type": ("adapter", "full" if adapter is None else "lora"),
        "learning_rate": (
            "optimizer.lr",
            values.get("force_constant_lr", model.get("unet_lr", optimizer.get("lr"))),
        ),
        "train_batch_size": ("micro_batch_size_per_gpu", batch),
        "gradient_accumulation_steps": (
            "gradient_accumulation_steps",
            values["gradient_accumulation_steps"],
        ),
        "max_grad_norm": ("gradient_clipping", values["gradient_clipping"]),
        "lr_scheduler": (
            "lr_scheduler",
            "constant_with_warmup" if how == "constant" and warm else how,
        ),
        "lr_warmup_steps": ("warmup_steps", warm),
        "optimizer": ("optimizer.type", _WORDS.get(kind, kind)),
        "adam_beta1": ("optimizer.betas", betas[0]),
        "adam_beta2": ("optimizer.betas", betas[-1]),
        "adam_epsilon": ("optimizer.eps", optimizer.get("eps", epsilon)),
        "weight_decay": ("optimizer.weight_decay", optimizer.get("weight_decay", decay)),
        "gradient_checkpointing": (
            "activation_checkpointing",
            bool(values["activation_checkpointing"]),
        ),
        "mixed_precision": ("model.dtype", _PRECISIONS.get(str(model.get("dtype")))),
        "export_dtype": ("save_dtype", _DTYPES.get(str(dtype))),
        "base_precision": (
            "model.transformer_dtype",
            "fp8" if base.startswith("float8") else base if base == "nf4" else "none",
        ),
        "swap_blocks": ("blocks_to_swap", values.get("blocks_to_swap") or 0),
        "torch_compile": ("compile", values.get("compile", False)),
        "max_train_steps": ("max_steps", values.get("max_steps")),
        "caption_dropout_probability": ("uncond_fraction", values.get("uncond_fraction") or 0),
    }
    if values.get("max_steps") is None:
        real.values["num_train_epochs"] = ("epochs", values.get("epochs"))
        del real.values["max_train_steps"]
    if adapter is not None and adapter.get("rank") is not None:
        real.values["lora_rank"] = ("adapter.rank", adapter["rank"])
        real.values["lora_alpha"] = ("adapter.alpha", adapter["rank"])
        real.values["lora_dropout"] = ("adapter.dropout", adapter.get("dropout", 0.0))
    if model["type"] == "sdxl":
        real.values["snr_gamma"] = ("model.min_snr_gamma", model.get("min_snr_gamma"))
    else:
        real.values["timestep_sampling"] = (
            "model.timestep_sample_method",
            drawn.get(sampling, sampling),
        )
        real.values["logit_std"] = ("model.sigmoid_scale", model.get("sigmoid_scale", 1.0))
        if model.get("shift"):
            real.values["flow_shift"] = ("model.shift", model["shift"])
    return real
