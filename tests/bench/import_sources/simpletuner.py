"""SimpleTuner: its examples and the configurations in its documentation, with its defaults."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from jobs.imports.common.table import translation
from jobs.imports.imported import import_simpletuner
from tests.bench.import_sources.real import (
    Real,
    base_of,
    files_in,
    keywords,
    literal,
    parse_source,
    word_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jobs.imports.imported import Imported

_FENCE: Final = re.compile(r"^ *```\w*\n(.*?)^ *```", re.S | re.M)
_TRANSLATED: Final = re.compile(r"\.[a-z]{2}(-[A-Z]{2})?\.md$")
_OURS: Final = {
    "checkpoint_step_interval": "checkpointing_steps",
    "validation_step_interval": "validation_steps",
}
# Of a LoRA of peft: LyCORIS's adapters take theirs from a file of their own.
_PEFT: Final = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules")
_KEYS: Final = (
    *("learning_rate", "train_batch_size", "gradient_accumulation_steps", "lr_scheduler"),
    *("lr_warmup_steps", "max_train_steps", "max_grad_norm", "lora_rank", "lora_alpha"),
    *("lora_dropout", "gradient_checkpointing", "caption_dropout_probability", "loss_type"),
    *("mixed_precision", "use_ema", "ema_decay", "snr_gamma", "validation_step_interval"),
    *("validation_num_inference_steps", "validation_guidance", "validation_resolution"),
    *("validation_seed", "seed", "checkpoint_step_interval", "checkpoints_total_limit"),
    "model_type",
)


class Tool(NamedTuple):
    """What its source says.

    Attributes:
        registry: Key → default.
        optimizers: Optimizer → its own settings.
        models: Family → flavour → hub id; the flavour "" is where none is named.
        targets: Family → layers that get an adapter.
        schedule: Its function that reads `lr_scheduler`.
        folder: Where configurations can be written, with its examples where it looks for them.
    """

    registry: dict[str, Any]
    optimizers: dict[str, dict[str, Any]]
    models: dict[str, dict[str, str]]
    targets: dict[str, list[str]]
    schedule: Callable[[Any, Any], Any]
    folder: Path


def read_all(checkout: Path, paths: list[Path], own: bool) -> Iterator[Real]:
    """Its examples, configurations in its documentation, and others'."""
    with tempfile.TemporaryDirectory() as folder:
        tool = _tool(checkout / "simpletuner", Path(folder))
        if own:
            yield from _of_checkout(checkout, Path(folder), tool)
        for path in files_in(paths, ".json"):
            values = _parse(path.read_text(encoding="utf-8", errors="replace"))
            if values is not None and _is_config(values):
                yield _real(f"{path.parent.name}/{path.name}", values, path, tool)


def _of_checkout(checkout: Path, folder: Path, tool: Tool) -> Iterator[Real]:
    # Configurations name their datasets from the folder that the tool is started in.
    (folder / "config").mkdir()
    (folder / "config" / "examples").symlink_to((checkout / "simpletuner" / "examples").absolute())
    for path in sorted((folder / "config" / "examples").glob("*/config.json")):
        values = _parse(path.read_text(encoding="utf-8"))
        yield _real(path.parent.name, values or {}, path, tool)
    template = checkout / "config" / "config.json.example"
    blocks = [("config.json.example", template.read_text())] if template.is_file() else []
    for path in sorted((checkout / "documentation").rglob("*.md")):
        if not _TRANSLATED.search(path.name):
            texts = _FENCE.findall(path.read_text(encoding="utf-8"))
            blocks += [(f"{path.name}#{number}", text) for number, text in enumerate(texts)]
    for number, (name, text) in enumerate(blocks):
        values = _parse(text)
        if values is not None and _is_config(values):
            path = folder / "config" / str(number) / "config.json"
            path.parent.mkdir()
            path.write_text(text, encoding="utf-8")
            yield _real(name, values, path, tool)


def _parse(text: str) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError):
        values = json.loads(text)
        return values if isinstance(values, dict) else None
    return None


def _is_config(values: dict[str, Any]) -> bool:
    """Whether it says which model is trained, and how."""
    keys = {str(key).lstrip("-") for key in values}
    how = {"model_type", "learning_rate", "max_train_steps", "data_backend_config", "optimizer"}
    return bool(keys & {"model_family", "pretrained_model_name_or_path"}) and len(keys & how) >= 2


def _real(name: str, values: dict[str, Any], path: Path, tool: Tool) -> Real:
    config = {str(key).lstrip("-"): value for key, value in values.items()}
    real = Real(name, lambda: import_simpletuner(path))
    real.content = json.dumps(config, sort_keys=True)
    if config:
        real.values = _values(config, tool)
        real.spelled_out = lambda: _spelled_out(config, path, tool)
    return real


def _values(config: dict[str, Any], tool: Tool) -> dict[str, tuple[str, Any]]:
    """Our key → its key and the value that it has for it."""

    def get(key: str) -> Any:
        value = config.get(key)
        return tool.registry.get(key) if value in (None, "", "None") else value

    values: dict[str, tuple[str, Any]] = {}
    for theirs in _KEYS:
        value, ours = get(theirs), _OURS.get(theirs, theirs)
        if theirs.endswith("_interval") and theirs not in config:
            value = config.get(ours, value)
        if theirs == "lora_alpha" and value is None:
            value = get("lora_rank")
        if theirs == "lr_scheduler":
            value = tool.schedule(value, get("lr_warmup_steps"))
        if theirs == "loss_type":
            value = {"l2": "mse"}.get(value, value)
        if theirs == "mixed_precision":
            value = word_of("precision", value)
        if theirs == "max_train_steps" and not value:
            continue  # epochs; what they are follows from the data
        values[ours] = (theirs, value)
    values["base_precision"] = ("base_model_precision", base_of(get("base_model_precision")))
    values |= _of_optimizer(str(get("optimizer")), get("optimizer_config"), get, tool)
    family = str(config.get("model_family")).lower().replace("-", "_")
    path, place = config.get("pretrained_model_name_or_path"), "pretrained_model_name_or_path"
    if path in (None, "", "None"):
        place = "model_flavour"
        flavours = tool.models.get(family, {})
        path = flavours.get(str(config.get("model_flavour") or flavours.get("")))
    if path:
        values["pretrained_model_name_or_path"] = (place, path)
    if family in tool.targets and family != "flux" and get("peft_lora_target_modules") is None:
        values["lora_target_modules"] = ("flux_lora_target", tool.targets[family])
    if str(get("lora_type")).lower() == "lycoris":
        values = {ours: value for ours, value in values.items() if ours not in _PEFT}
    return values


def _of_optimizer(
    name: str, extra: Any, get: Callable[[str], Any], tool: Tool
) -> dict[str, tuple[str, Any]]:
    """The settings of the optimizer: its own, and those of `optimizer_config` and of two keys."""
    settings = dict(tool.optimizers.get(name, {}))
    for part in str(extra or "").split(","):
        key, _, value = part.partition("=")
        settings[key.strip()] = value
    betas = get("optimizer_beta1"), get("optimizer_beta2")
    betas = betas if None not in betas else settings.get("betas") or (0.9, 0.999)
    values = {"optimizer": ("optimizer", word_of("optimizer", name))}
    if translation("optimizer", name.replace("-", "_")) is None:
        return values  # another one is used, whose settings are its own
    values |= {
        "adam_beta1": ("optimizer_beta1", betas[0]),
        "adam_beta2": ("optimizer_beta2", betas[1]),
        "adam_epsilon": ("optimizer_config", settings.get("eps")),
        "weight_decay": ("optimizer_config", settings.get("weight_decay")),
    }
    if "lr" in settings:
        values["learning_rate"] = ("learning_rate", settings["lr"])
    return values


def _spelled_out(config: dict[str, Any], path: Path, tool: Tool) -> tuple[Imported, list[str]]:
    """The configuration with the tool's defaults written into it, and their keys."""
    added = {
        key: value
        for key, value in tool.registry.items()
        if value not in (None, "", "==SUPPRESS==") and key not in config
    }
    for key, ours in _OURS.items():
        if ours in config or key in config:
            added = {name: value for name, value in added.items() if name not in (key, ours)}
    if config.get("max_train_steps"):
        added.pop("num_train_epochs", None)
    # Beside links to the files that the configuration may name; another's has none of the tool's.
    own = path.is_relative_to(tool.folder)
    folder = tool.folder / "config" if own else tool.folder.with_name(f"{tool.folder.name}-others")
    folder /= "spelled-out"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for other in path.parent.iterdir():
        if other.name != "config.json":
            (folder / other.name).symlink_to(other.absolute())
    full = folder / "config.json"
    full.write_text(json.dumps(config | added), encoding="utf-8")
    return import_simpletuner(full), list(added)


# -- its source --------------------------------------------------------------------------------


def _tool(source: Path, folder: Path) -> Tool:
    registry: dict[str, Any] = {}
    for path in source.rglob("field_registry/sections/*.py"):
        for call in ast.walk(parse_source(path)):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "ConfigField":
                words = keywords(call)
                registry[str(words["name"])] = words.get("default_value")
    helpers = source / "helpers"
    models, targets = _models(helpers / "models")
    return Tool(
        registry,
        _optimizers(helpers / "training" / "optimizer_param.py"),
        models,
        targets,
        _function(helpers / "configuration" / "cli_utils.py", "normalize_lr_scheduler_value"),
        folder,
    )


def _optimizers(path: Path) -> dict[str, dict[str, Any]]:
    """Optimizer → `default_settings`, wherever in the file it is listed."""
    optimizers: dict[str, dict[str, Any]] = {}
    for node in ast.walk(parse_source(path)):
        if not isinstance(node, ast.Dict):
            continue
        for key, value in zip(node.keys, node.values, strict=True):
            name = literal(key) if key is not None else None
            if isinstance(name, str) and isinstance(value, ast.Dict):
                inner = {literal(k): v for k, v in zip(value.keys, value.values, strict=True) if k}
                settings = inner.get("default_settings")
                if isinstance(settings, ast.Dict):
                    optimizers[name] = {
                        str(literal(k)): literal(v)
                        for k, v in zip(settings.keys, settings.values, strict=True)
                        if k
                    }
    return optimizers


def _models(folder: Path) -> tuple[dict[str, dict[str, str]], dict[str, list[str]]]:
    """Family → its published models; family → the layers that get an adapter."""
    models: dict[str, dict[str, str]] = {}
    targets: dict[str, list[str]] = {}
    for path in folder.glob("*/model.py"):
        tree = parse_source(path)
        names = {
            call.args[1].id: str(literal(call.args[0]))
            for call in ast.walk(tree)
            if isinstance(call, ast.Call)
            and ast.unparse(call.func) == "ModelRegistry.register"
            and isinstance(call.args[1], ast.Name)
        }
        for node in tree.body:
            if not isinstance(node, ast.ClassDef) or node.name not in names:
                continue
            facts = _class_values(node)
            family = names[node.name].replace("-", "_")
            flavours = facts.get("HUGGINGFACE_PATHS")
            if isinstance(flavours, ast.Dict):
                keys, values = flavours.keys, flavours.values
                models[family] = {
                    str(literal(k)): str(literal(v))
                    for k, v in zip(keys, values, strict=True)
                    if k is not None and literal(v)
                }
                usual = facts.get("DEFAULT_MODEL_FLAVOUR")
                models[family][""] = str(literal(usual)) if usual is not None else ""
            layers = facts.get("DEFAULT_LORA_TARGET")
            if layers is not None and isinstance(literal(layers), list):
                targets[family] = literal(layers)
    return models, targets


def _class_values(node: ast.ClassDef) -> dict[str, ast.expr]:
    facts: dict[str, ast.expr] = {}
    for line in node.body:
        if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name):
            facts[line.targets[0].id] = line.value
        elif isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.value:
            facts[line.target.id] = line.value
    return facts


def _function(path: Path, name: str) -> Callable[[Any, Any], Any]:
    """A function of its source that needs nothing else; one that changes nothing if it is gone."""
    if path.is_file():
        for node in parse_source(path).body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                names: dict[str, Any] = {}
                future = ast.parse("from __future__ import annotations").body
                exec(compile(ast.Module([*future, node], []), str(path), "exec"), names)
                function: Callable[[Any, Any], Any] = names[name]
                return function
    return lambda value, _: value
