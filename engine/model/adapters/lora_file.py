"""Initialize from a LoRA file with the names of diffusers, ComfyUI or kohya's scripts.

Names of other tools are derived from the export: an adapter whose up matrices hold row numbers
instead of weights is exported, which shows where each row of each layer ends up. Layers that other
tools fuse are therefore split by the same code that fuses them.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError, safe_open

from engine.model.adapters import lokr_file, lora, text_lora
from engine.model.adapters.adapter_config import read_adapter_config
from jobs.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

    from engine.families import Family

# Suffixes of tensor names, and the adapter part that they denote.
_ENDS: Final = {
    "lora_A.weight": "down",
    "lora_down.weight": "down",
    "lora.down.weight": "down",
    "lora_B.weight": "up",
    "lora_up.weight": "up",
    "lora.up.weight": "up",
    "lora_magnitude_vector": "lengths",
    "lora_magnitude_vector.weight": "lengths",
    "dora_scale": "lengths",
    "alpha": "alpha",
    **{part: part for part in lokr_file.PARTS},
}
_END: Final = re.compile(rf"(?P<module>.+)\.(?P<end>{'|'.join(map(re.escape, _ENDS))})")
_TEXT: Final = ("text_encoder", "lora_te", "text_model")
CANNOT: Final = "init_lora: cannot begin from "

# Prefixes that a file may add to diffusers' module names.
_DOTTED: Final = ("", "base_model.model.", "diffusion_model.")
_UNDERSCORED: Final = ("lora_unet_", "lora_transformer_", "lycoris_")


@dataclass(frozen=True)
class Layer:
    """An adapted layer of the model.

    Attributes:
        parts: Parameters of its adapter: down (rank, in), up (out, rank), and DoRA's magnitudes.
        scale: The factor of the product.
        first: Number of its first row, counting the rows of all layers from 1.
    """

    parts: Mapping[str, torch.nn.Parameter]
    scale: float
    first: int

    @property
    def rank(self) -> int:
        return self.parts["down"].shape[0]

    @property
    def outputs(self) -> int:
        return self.parts["up"].shape[0]


@torch.no_grad()
def begin_from(model: torch.nn.Module, file: Path, family: Family, without: str = "") -> list[str]:
    """Set a model's adapter to the content of a file; every rank reads it, and keeps its own rows.

    Args:
        model: With an adapter; sharded or not.
        file: A safetensors file.
        family: The model's family.
        without: As of `lora.add_lora`.

    Returns:
        The file's names of layers that have no adapter, since the loss does not depend on them.

    Raises:
        UserError: The file is not a LoRA, or does not match these layers and ranks.
    """
    stored, header = read_lora(file)
    unused = _unused_in(stored, model, family, without)
    for key in unused:
        del stored[key]
    if any(part in parts for parts in stored.values() for part in lokr_file.PARTS):
        _begin_from_lokr(model, file, family, stored, header)
        return unused
    if _is_lokr(model):
        raise refusal(file, "it is a LoRA", "set lora_variant: lora")
    layers = _layers_of(model)
    texts = {name: layer for name, layer in layers.items() if text_lora.is_text(name, family)}
    others = {name: layer for name, layer in layers.items() if name not in texts}
    named = naming(stored, others, family) | naming_of_texts(stored, texts, family)
    if odd := sorted(stored.keys() - named.keys()):
        if odd[0].startswith(_TEXT) and not texts:
            hint = "set text_encoder_lora_rank" if family.facts.text_lora else None
            raise refusal(file, "it also trains a text encoder, and the job does not", hint)
        raise refusal(
            file,
            f"it adapts {odd[0]}, and the job does not",
            "of text encoders, only the projections of attention are adapted here"
            if odd[0].startswith(_TEXT)
            else "set lora_target_modules to what the file adapts",
        )
    if missing := sorted(named.keys() - stored.keys()):
        raise refusal(
            file,
            f"it does not adapt {missing[0]}, and the job does",
            "remove text_encoder_lora_rank"
            if missing[0].startswith(_TEXT)
            else "set lora_target_modules to what the file adapts",
        )
    scale_of = scales_in(file, header, stored, family)
    for key, rows in named.items():
        for name, part in parted(file, key, stored[key], rows, layers):
            layer = layers[name]
            _check(file, name, part, layer)
            scale = float(stored[key].get("alpha", torch.nan)) / len(stored[key]["down"])
            if math.isnan(scale):
                scale = scale_of(name, layer.rank)
            part["up"] = part["up"] * (scale / layer.scale)
            for kind, parameter in layer.parts.items():
                lora.fill(parameter, part[kind].reshape(parameter.shape).float())
    return unused


def _unused_in(
    stored: Mapping[str, Any], model: torch.nn.Module, family: Family, without: str
) -> list[str]:
    """Return the file's modules that adapt nothing but layers that the loss does not depend on."""
    layers, first = {}, 1
    for name, module in lora.unused_layers(model, without).items():
        weight = module.get_parameter("weight")
        down, up = torch.empty(1, *weight.shape[1:]), torch.empty(weight.shape[0], 1)
        parts = {"down": torch.nn.Parameter(down), "up": torch.nn.Parameter(up)}
        layers[name] = Layer(parts, 1.0, first)
        first += layers[name].outputs
    named = naming(stored, layers, family) if layers else {}
    return sorted(key for key in stored.keys() & named.keys() if named[key].all())


def _begin_from_lokr(
    model: torch.nn.Module,
    file: Path,
    family: Family,
    stored: Mapping[str, dict[str, torch.Tensor]],
    header: Mapping[str, str],
) -> None:
    """Set a model's adapter to the content of a LoKr file, whose layers are never fused.

    Raises:
        UserError: The job's adapter is not a LoKr, or has other layers or shapes.
    """
    if not _is_lokr(model):
        raise refusal(file, "it is a LoKr", "set lora_variant: lokr")

    def rename(modules: list[str]) -> list[dict[str, str]]:
        plain = [{p + m: m for m in modules} for p in (*_DOTTED, f"{family.lora_prefix}.")]
        flat = [{p + m.replace(".", "_"): m for m in modules} for p in _UNDERSCORED]
        return plain + flat + lokr_file.single_names(model, modules, family)

    try:
        scale_of = lokr_file.scales_in(file, header, stored, family.lora_prefix)
        lokr_file.set_adapter(model, stored, rename, scale_of)
    except UserError as error:
        raise refusal(file, error.message, error.hint) from None


def _is_lokr(model: torch.nn.Module) -> bool:
    return any(".lokr_" in name for name in lora.lora_parameters(model))


def _layers_of(model: torch.nn.Module) -> dict[str, Layer]:
    parts: dict[str, dict[str, torch.nn.Parameter]] = {}
    for name, parameter in lora.lora_parameters(model).items():
        module, _, part = name.rpartition(".lora_")
        kind = {"A": "down", "B": "up"}.get(part[0], "lengths")
        parts.setdefault(module, {})[kind] = parameter
    scales, first = lora.scales_of(model), 1
    layers = {}
    for module, some in parts.items():
        layers[module] = Layer(some, scales[module], first)
        first += layers[module].outputs
    return layers


def read_lora(file: Path) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, str]]:
    """Return the tensors by module name as stored and part, and the strings of the header.

    Raises:
        UserError: The file cannot be read, or contains a tensor that is not part of a LoRA.
    """
    stored: dict[str, dict[str, torch.Tensor]] = {}
    try:
        with safe_open(file, framework="pt") as opened:
            header = opened.metadata() or {}
            for key in opened.keys():  # noqa: SIM118 (it is no mapping)
                module, part = split_name(file, key)
                tensor = opened.get_tensor(key)
                if tensor.dtype.itemsize == 1:  # fp8 supports few operations
                    tensor = tensor.float()
                stored.setdefault(module, {})[part] = tensor
    except (SafetensorError, OSError) as error:
        raise refusal(file, f"it cannot be read ({error})") from None
    for module, parts in stored.items():
        check_sizes(file, module, {part: tuple(tensor.shape) for part, tensor in parts.items()})
        if "alpha" in parts and not parts["alpha"].isfinite().all():
            raise refusal(file, f"the alpha of {module} is not a finite number")
    return stored, header


def split_name(file: Path, key: str) -> tuple[str, str]:
    """Split a tensor's name into its module and the adapter part that it is.

    Returns:
        The module name as stored, and `down`, `up`, `lengths`, `alpha` or a part of a LoKr.

    Raises:
        UserError: The tensor is not part of a LoRA.
    """
    match = _END.fullmatch(key)
    if match is None:
        loha = re.search(r"\.hada_[wt]\d", key)
        raise refusal(file, "it is a LoHa" if loha else f"{key} is no part of a LoRA")
    return match["module"], _ENDS[match["end"]]


def check_sizes(file: Path, module: str, parts: Mapping[str, tuple[int, ...]]) -> None:
    """Reject sizes that no adapter can have, independent of the model.

    Args:
        file: The file.
        module: One of its modules.
        parts: Shapes of its adapter by part.

    Raises:
        UserError: An alpha is not a single number, a part is empty or not a matrix, or a part is
            missing.
    """
    for part, shape in parts.items():
        count = math.prod(shape)
        if part == "alpha":
            if count != 1:
                raise refusal(file, f"the alpha of {module} is not a finite number")
        elif count == 0 or (part != "lengths" and len(shape) < 2):
            raise refusal(file, f"the {part} weights of {module} are {shape}")
        elif part == "lengths" and len(shape) > 1 and shape[0] == 1 < shape[1]:
            raise refusal(
                file, f"the DoRA of {module} has a length for each input, not for each output"
            )
    if not parts.keys() & {*lokr_file.PARTS} and (absent := {"down", "up"} - parts.keys()):
        raise refusal(file, f"{module} has no {sorted(absent)[0]} weights")


def naming(
    stored: Mapping[str, Any], layers: Mapping[str, Layer], family: Family | None
) -> dict[str, torch.Tensor]:
    """Return, per module of the file, the row number of each output, `(out,)`; 0 for no row.

    Of all naming conventions, use the one that matches most modules of the file.

    Args:
        stored: The file's modules.
        layers: The model's layers, by their names in it.
        family: The model's family; None for a model outside of diffusers' layout, whose layers have
            their authors' names.
    """
    prefixes = ("transformer.", "unet.") if family is None else (f"{family.lora_prefix}.",)
    styles = () if family is None else (family.KOHYA, family.COMFYUI)
    own = {n: torch.arange(a.first, a.first + a.outputs) for n, a in layers.items()}
    ways = [{prefix + name: rows for name, rows in own.items()} for prefix in (*_DOTTED, *prefixes)]
    ways += [
        {prefix + name.replace(".", "_"): rows for name, rows in own.items()}
        for prefix in _UNDERSCORED
    ]
    probe: dict[str, torch.Tensor] = {}
    for name, layer in layers.items():
        down = layer.parts["down"]
        ups = own[name].double().reshape(-1, *[1] * (down.dim() - 1))
        probe[f"{name}.lora_A.weight"] = torch.zeros(1, *down.shape[1:])
        probe[f"{name}.lora_B.weight"] = ups
    for style in styles:
        if style is None:
            continue
        try:
            converted = style.convert(probe)
        except UserError:  # the tool does not have this layer
            continue
        ways.append(
            {
                match["module"]: rows.flatten(1).sum(1).long()
                for key, rows in converted.items()
                if (match := _END.fullmatch(key)) and _ENDS[match["end"]] == "up"
            }
        )
    return max(ways, key=lambda way: len(way.keys() & stored.keys()))


def naming_of_texts(
    stored: Mapping[str, Any], layers: Mapping[str, Layer], family: Family
) -> dict[str, torch.Tensor]:
    """Return the same for text encoders, by the names of diffusers or of kohya's scripts."""
    rows = {n: torch.arange(a.first, a.first + a.outputs) for n, a in layers.items()}
    ways = [rows, {text_lora.kohya_name(name, family): own for name, own in rows.items()}]
    return max(ways, key=lambda way: len(way.keys() & stored.keys()))


def parted(
    file: Path,
    key: str,
    tensors: Mapping[str, torch.Tensor],
    rows: torch.Tensor,
    layers: Mapping[str, Layer],
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Yield name and adapter parts of each layer that a module of the file consists of.

    Raises:
        UserError: The module has another size, or adapts a layer that the job does not.
    """
    up, down = tensors["up"], tensors["down"]
    lengths = tensors.get("lengths", rows)
    if len(up) != len(rows) or up.flatten(1).shape[1] != len(down) or lengths.numel() != len(rows):
        raise refusal(file, f"{key} has another size than the model's layer")
    if up[rows == 0].any():
        raise refusal(file, f"it adapts a part of {key} that the job does not")
    names = list(layers)
    firsts = torch.tensor([layer.first for layer in layers.values()])
    owners = torch.bucketize(rows, firsts, right=True) - 1
    members = [names[int(owner)] for owner in owners[rows > 0].unique_consecutive()]
    at, total = 0, sum(layers[name].rank for name in members)
    for name in members:
        layer = layers[name]
        mine = (rows >= layer.first) & (rows < layer.first + layer.outputs)
        order = rows[mine] - layer.first
        part = {"up": torch.empty_like(up[mine]).index_copy_(0, order, up[mine]), "down": down}
        if len(members) > 1 and len(down) == total and layer.rank != total:
            # The adapters are concatenated: each layer has its own rows of down, and other layers'
            # ups are zero.
            columns = slice(at, at + layer.rank)
            others = part["up"].clone()
            others[:, columns] = 0
            if others.any():
                raise _wrong_rank(file, name, total, layer.rank)
            part = {"up": part["up"][:, columns], "down": down[columns]}
        if "lengths" in tensors:
            lengths = tensors["lengths"].flatten()[mine]
            part["lengths"] = torch.empty_like(lengths).index_copy_(0, order, lengths)
        at += layer.rank
        yield name, part


def _check(file: Path, name: str, part: Mapping[str, torch.Tensor], layer: Layer) -> None:
    """Compare a layer with the parts that a file has for it.

    Raises:
        UserError: Rank or size differ, a value is not finite, or only one of them is DoRA.
    """
    if len(part["down"]) != layer.rank:
        raise _wrong_rank(file, name, len(part["down"]), layer.rank)
    if part.keys() != layer.parts.keys():
        has, variant = ("DoRA", "dora") if "lengths" in part else ("no DoRA", "lora")
        raise refusal(file, f"it is {has}", f"set lora_variant: {variant}")
    for kind, parameter in layer.parts.items():
        if part[kind].numel() != parameter.numel():
            raise refusal(file, f"{name} has another size than the model's layer")
        if not part[kind].isfinite().all():
            raise refusal(file, f"{name} has values that are not finite")


def scales_in(
    file: Path, header: Mapping[str, str], modules: Collection[str], family: Family
) -> Any:
    """Return a function that gives scales from the file's diffusers or peft configuration.

    Args:
        file: The file.
        header: Strings of its header.
        modules: Its module names as stored.
        family: The model's family.

    Returns:
        Takes a layer's name and rank and returns the factor of its product; 1 if nothing sets it.

    Raises:
        UserError: The configuration cannot be read.
    """
    parts = (family.lora_prefix, *family.facts.text_lora)
    try:
        configs = {part: read_adapter_config(file, header, modules, part) for part in parts}
    except UserError as error:
        raise refusal(file, error.message) from None

    def scale(name: str, rank: int) -> float:
        part = family.lora_prefix
        if text_lora.is_text(name, family):
            part, _, name = name.partition(".")
        config = configs[part]
        alphas = config.get("alpha_pattern") or {}
        alpha = alphas.get(get_pattern_key(list(alphas), name), config.get("lora_alpha", rank))
        return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)

    return scale


def _wrong_rank(file: Path, name: str, rank: int, expected: int) -> UserError:
    key = "text_encoder_lora_rank" if name.startswith(_TEXT) else "lora_rank"
    return refusal(
        file, f"{name} has rank {rank} there and {expected} here", f"set {key} to the file's"
    )


def refusal(file: Path, why: str, hint: str | None = None) -> UserError:
    return UserError(f"{CANNOT}{file.name}: {why}", hint)
