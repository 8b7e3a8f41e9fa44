"""Read and write LoRA files: one layer at a time, scaled, under the file's own names."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import tempfile
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from peft import LoraConfig
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError, safe_open

from engine.exports.readback import VerifiedFile
from engine.exports.recipe import HASH, PREFIX, UNKNOWN_HASH, date_of
from engine.exports.source import read_stored
from engine.model.adapters import lokr_file
from engine.model.adapters.adapter_config import read_adapter_config
from engine.model.adapters.lora_file import CANNOT, check_sizes, split_name
from engine.model.files.weight_files import read_header
from jobs import units
from jobs.errors import UserError
from jobs.models.find_model import find_lora
from jobs.run.rundir import sync, write_atomic

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from engine.exports.source import Fact
    from engine.model.files.weight_files import StoredTensor


# -- output ---------------------------------------------------------------------------------
# Output files are complete or absent: they are written under a temporary name, read back, and then
# renamed.


_SPARE_BYTES: Final = 16 * 2**20  # for headers, JSON and file system overhead


def check_room(output: Path, needed: int) -> None:
    """Reject an output that already exists or for which the disk has no space.

    Args:
        output: The file or directory.
        needed: Bytes.

    Raises:
        UserError: The output cannot be written.
    """
    if os.path.lexists(output):
        raise UserError(f"{output} exists", "choose another --output, or remove it")
    if not output.parent.is_dir():
        raise UserError(f"{output.parent} is not a directory")
    with as_user_errors(output), tempfile.TemporaryFile(dir=output.parent):
        free = shutil.disk_usage(output.parent).free
    if needed + _SPARE_BYTES > free:
        raise UserError(
            f"{output} takes {units.size(needed)}, and {units.size(free)} are free",
            "free some space, or choose an --output elsewhere",
        )


@contextmanager
def aside_file(
    output: Path, facts: Mapping[str, Fact], header: Mapping[str, str]
) -> Iterator[VerifiedFile]:
    """Open a file under a temporary name; at the end it is checked and renamed, or removed.

    Raises:
        UserError: It cannot be written.
    """
    aside = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    with as_user_errors(output):
        file = VerifiedFile(aside, facts, header)
        try:
            yield file
            file.close()
            file.check()
            os.rename(aside, output)
            sync(output.parent)
        finally:
            file.abandon()
            aside.unlink(missing_ok=True)


@contextmanager
def as_user_errors(output: Path) -> Iterator[None]:
    """Turn an `OSError` into a `UserError` about the output."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise UserError(
            f"cannot write {output} ({error.strerror or error})",
            "free some space, or choose an --output elsewhere" if full else None,
        ) from error


# -- lora file ------------------------------------------------------------------------------


Parts = dict[str, torch.Tensor]
"""Tensors of an adapter by part: `down`, `up`, `lengths`, or a part of a LoKr."""

# Prefixes of module names, and the naming style that they belong to.
STYLES: Final = {
    "diffusion_model.": "comfyui",
    "lora_unet_": "kohya",
    "lora_te": "kohya",
    "lora_transformer_": "kohya",
    "lycoris_": "kohya",
    "base_model.model.": "peft",
    "transformer.": "diffusers",
    "transformer_2.": "diffusers",
    "unet.": "diffusers",
    "text_encoder.": "diffusers",
    "text_encoder_2.": "diffusers",
    "text_encoder_3.": "diffusers",
}
COMPONENT: Final = "fsdp_tui.component"
"""The header key that names the denoiser of a LoRA, for models with two."""
TEXT: Final = ("text_encoder", "lora_te")
_BARE: Final = "diffusers without a prefix"
_ENDS: Final = {
    "comfyui": ("lora_A.weight", "lora_B.weight"),
    "kohya": ("lora_down.weight", "lora_up.weight"),
}
# Header entries that stay true of a file made from files that agree on them. All others are
# dropped: hashes would refer to other tensors, and kohya's scripts write caption tags into headers.
_KEPT: Final = (
    COMPONENT,
    *("ss_base_model_version", "ss_network_module", "fsdp_tui.base_model"),
    *("fsdp_tui.model_family", "fsdp_tui.model_flavour", "fsdp_tui.model_type"),
    *(
        f"{PREFIX}{name}"
        for name in (
            *("sai_model_spec", "architecture", "implementation", "resolution"),
            *("prediction_type", "timestep_range", "license", "author", "encoder_layer"),
        )
    ),
)


@dataclass(frozen=True)
class LoraFile:
    """A LoRA on disk.

    Attributes:
        path: The file.
        header: Strings of its header.
        modules: Location of each adapter part, by module name as stored and part.
    """

    path: Path
    header: Mapping[str, str]
    modules: Mapping[str, Mapping[str, StoredTensor]]

    @property
    def style(self) -> str:
        """Return the naming style of the modules, judged by those of the denoiser."""
        styles = [style_of(module) for module in self.modules if not module.startswith(TEXT)]
        return (styles or [style_of(next(iter(self.modules)))])[0]

    @property
    def is_lokr(self) -> bool:
        return any(part in parts for parts in self.modules.values() for part in lokr_file.PARTS)

    @property
    def is_dora(self) -> bool:
        return any("lengths" in parts for parts in self.modules.values())

    def rank(self, module: str) -> int:
        """Return the rank of a module's adapter, which must not be a LoKr."""
        return self.modules[module]["down"].shape[0]

    def shapes(self, module: str) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a module's adapter by part."""
        return {part: place.shape for part, place in self.modules[module].items()}

    def scale(self, module: str) -> float:
        """Return the factor of a module's product.

        Raises:
            UserError: Its alpha is zero, which tools interpret differently, or cannot be read.
        """
        parts = self.modules[module]
        if "alpha" in parts:
            alpha = float(read_stored(parts["alpha"]))
            if not math.isfinite(alpha):
                raise UserError(f"{self.path.name}: the alpha of {module} is not a finite number")
            if not alpha:
                raise UserError(
                    f"{self.path.name}: the alpha of {module} is 0, which some tools take for no "
                    "effect and some for the rank"
                )
            if self.is_lokr:
                parted = parts.get("lokr_w2_b", parts.get("lokr_w1_b"))
                return 1.0 if parted is None else alpha / parted.shape[0]
            return alpha / self.rank(module)
        prefix = next((prefix for prefix in STYLES if module.startswith(prefix)), "")
        part = "transformer" if prefix == "base_model.model." else prefix.rstrip(".")
        config = self._config(part)
        name = module.removeprefix(prefix)
        if self.is_lokr:
            rank, alpha = _of(config, "r", name, 1), _of(config, "alpha", name, None)
            return 1.0 if alpha is None else alpha / rank
        rank = self.rank(module)
        alpha = _of(config, "lora_alpha", name, rank)
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        if not scale:
            raise UserError(f"{self.path.name}: lora_alpha is 0: the file has no effect")
        return float(scale)

    def read(self, module: str) -> Parts:
        """Read a module's adapter in fp32, with its scale multiplied into `up` or `lokr_w1`.

        Raises:
            UserError: A value is not finite, or the file cannot be read.
        """
        parts = {
            part: read_stored(place).float()
            for part, place in self.modules[module].items()
            if part != "alpha"
        }
        if not all(tensor.isfinite().all() for tensor in parts.values()):
            raise UserError(f"{self.path.name}: {module} has values that are not finite")
        scale = self.scale(module)
        if "lokr_w1_a" in parts:
            parts["lokr_w1"] = parts.pop("lokr_w1_a") @ parts.pop("lokr_w1_b")
        if "lokr_w2_a" in parts:
            parts["lokr_w2"] = parts.pop("lokr_w2_a") @ parts.pop("lokr_w2_b").flatten(1)
        scaled = "lokr_w1" if "lokr_w1" in parts else "up"
        parts[scaled] = parts[scaled] * scale
        return parts

    def _config(self, part: str) -> dict[str, Any]:
        try:
            return read_adapter_config(self.path, self.header, self.modules, part)
        except UserError as error:
            raise UserError(f"{self.path.name}: {error.message}") from None


def _of(config: Mapping[str, Any], key: str, name: str, default: Any) -> Any:
    """Return a layer's rank or alpha from peft's configuration."""
    patterns = config.get("rank_pattern" if key == "r" else "alpha_pattern") or {}
    return patterns.get(get_pattern_key(list(patterns), name), config.get(key, default))


def open_lora(place: str) -> LoraFile:
    """Open a LoRA, reading only its header.

    Args:
        place: The file, or a directory with one.

    Raises:
        UserError: There is no such file, or it is damaged, empty or not a LoRA.
    """
    path = find_lora(place)
    if path is None:
        raise UserError(f"there is no LoRA at {place}")
    if not path.stat().st_size:
        raise UserError(f"{path} is empty")
    modules: dict[str, dict[str, StoredTensor]] = {}
    try:
        tensors = read_header(path)
    except UserError as error:
        again = "model" in (error.hint or "")  # the hint is about models
        hint = "give a LoRA in a safetensors file" if again else error.hint
        raise UserError(error.message, hint) from None
    try:
        for tensor in tensors:
            module, part = split_name(path, tensor.name)
            modules.setdefault(module, {})[part] = tensor
        for module, parts in modules.items():
            check_sizes(path, module, {part: tensor.shape for part, tensor in parts.items()})
    except UserError as error:
        raise rephrase(error) from None
    if not modules:
        raise UserError(f"{path} holds no tensors")
    for module, parts in modules.items():
        if not _fits({part: tensor.shape for part, tensor in parts.items()}):
            raise UserError(f"{path.name}: the matrices of {module} do not fit each other")
    alphas = {"alpha" in parts for parts in modules.values()}
    if len(alphas) > 1:
        module = next(module for module, parts in modules.items() if "alpha" not in parts)
        raise UserError(f"{path.name}: {module} has no alpha, and other modules have one")
    try:
        with safe_open(path, framework="pt") as opened:
            return LoraFile(path, opened.metadata() or {}, modules)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path.name} cannot be read ({error})") from None


def _fits(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether an adapter's parts are complete and can be multiplied."""
    pairs = [("up", "down")]
    if "down" not in shapes:
        whole = {"lokr_w1", "lokr_w2"} - shapes.keys()
        pairs = [(f"{part}_a", f"{part}_b") for part in whole]
    return all(
        left in shapes and right in shapes and math.prod(shapes[left][1:]) == shapes[right][0]
        for left, right in pairs
    )


def rephrase(error: UserError) -> UserError:
    """Rephrase an error of the `init_lora` readers for these tools."""
    if not error.message.startswith(CANNOT):
        return error
    return UserError(f"cannot use {error.message.removeprefix(CANNOT)}")


def style_of(module: str) -> str:
    """Return the naming style of a module's name."""
    return next((style for prefix, style in STYLES.items() if module.startswith(prefix)), _BARE)


class LoraWriter:
    """Writes a LoRA, one module at a time, and renames it into place once it has been read back.

    Args:
        output: The file; must not exist.
        modules: Shapes of down and up by module.
        dtype: The dtype of the matrices.
        header: Strings for the header.

    Raises:
        UserError: The file exists already, or the disk has no space for it.
    """

    def __init__(
        self,
        output: Path,
        modules: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]],
        dtype: torch.dtype,
        header: Mapping[str, str],
    ) -> None:
        self._modules = modules
        self._output = output
        facts: dict[str, Any] = {}
        for module, shapes in modules.items():
            for name, shape in zip(self._names(module), shapes, strict=True):
                facts[name] = (dtype, shape)
            if style_of(module) == "kohya":
                facts[f"{module}.alpha"] = (torch.float32, ())
        size = sum(kind.itemsize * math.prod(shape) for kind, shape in facts.values())
        check_room(output, size)
        self._config: Path | None = None
        if output.name == SAFETENSORS_WEIGHTS_NAME:  # peft expects its config next to it
            config = output.with_name(CONFIG_NAME)
            if config.exists():
                raise UserError(f"{config} exists, and {output.name} needs its own")
            plain = {style_of(module) for module in modules}.isdisjoint(_ENDS)
            self._config = config if plain and len(_configs(modules)) == 1 else None
        self._opened = aside_file(output, facts, dict(header) | _header(modules))
        self._file = self._opened.__enter__()

    def add(self, module: str, down: torch.Tensor, up: torch.Tensor) -> None:
        """Write a module's matrices, whose product is the weight update."""
        for name, tensor in zip(self._names(module), (down, up), strict=True):
            self._file.add(name, tensor)
        if style_of(module) == "kohya":
            self._file.add(f"{module}.alpha", torch.tensor(float(down.shape[0])))

    def __enter__(self) -> LoraWriter:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Finish the file, or remove it after an exception."""
        if kind is not None or self._config is None:
            self._opened.__exit__(kind, error, trace)
            return
        (config,) = _configs(self._modules).values()
        text = json.dumps(config | {"inference_mode": True}, indent=2, sort_keys=True)
        try:
            with ExitStack() as weights:  # rename last: useless without the config
                weights.push(self._opened)
                write_atomic(self._config, text + "\n", durable=True)
        except BaseException:
            self._config.unlink(missing_ok=True)
            raise

    @staticmethod
    def _names(module: str) -> tuple[str, str]:
        down, up = _ENDS.get(style_of(module), _ENDS["comfyui"])
        return f"{module}.{down}", f"{module}.{up}"


def header_of(files: list[LoraFile], output: Path) -> dict[str, str]:
    """Return the header entries that files agree on and that hold for a file made from them.

    Args:
        files: The source files.
        output: The file.
    """
    first = files[0].header
    header = {
        name: first[name]
        for name in _KEPT
        if name in first and all(file.header.get(name) == first[name] for file in files)
    }
    if f"{PREFIX}architecture" not in header:  # the standard requires an architecture
        return {name: text for name, text in header.items() if not name.startswith(PREFIX)}
    header |= {f"{PREFIX}title": output.stem, f"{PREFIX}date": date_of(time.time())}
    header[HASH] = UNKNOWN_HASH
    if len(files) > 1:
        titles = [file.header.get(f"{PREFIX}title") or file.path.stem for file in files]
        header[f"{PREFIX}merged_from"] = ", ".join(titles)
    return header


def _header(modules: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]) -> dict[str, str]:
    """Return the header entries for ranks, in every place where readers look for alphas."""
    ranks = [down[0] for down, _ in modules.values()]
    most = max(ranks, key=ranks.count)
    header = {"format": "pt"}
    if style_of(next(iter(modules))) == "kohya":
        header |= {"ss_network_dim": str(most), "ss_network_alpha": str(float(most))}
    # Also store peft's names, so that an adapter_config.json of another file cannot rescale this
    # one.
    values = {
        f"{part}.{key}" if part else key: value
        for part, config in _configs(modules).items()
        for key, value in config.items()
    }
    if values:
        header[LORA_ADAPTER_METADATA_KEY] = json.dumps(values, indent=2, sort_keys=True)
    return header


def _configs(
    modules: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]],
) -> dict[str, dict[str, Any]]:
    """Return peft's configuration of each pipeline component, if the names are diffusers'."""
    parts: dict[str, dict[str, int]] = {}
    for module, (down, _) in modules.items():
        if style_of(module) in ("kohya", "comfyui"):
            continue
        prefix = next((prefix for prefix in STYLES if module.startswith(prefix)), "")
        part = "transformer" if prefix == "base_model.model." else prefix.rstrip(".")
        name = module.removeprefix(prefix).removeprefix("text_model.")  # gone in transformers 5
        parts.setdefault(part, {})[name] = down[0]
    configs = {}
    for part, ranks in parts.items():
        most = max(ranks.values(), key=list(ranks.values()).count)
        # Peft also matches a pattern after a dot, so anchor it to match a single module.
        start = r"^(text_model\.)?" if part.startswith(TEXT) else "^"
        pattern = {start + name: rank for name, rank in sorted(ranks.items()) if rank != most}
        config = LoraConfig(
            r=most,
            lora_alpha=most,
            rank_pattern=pattern,
            alpha_pattern=dict(pattern),
            target_modules=sorted(ranks),
        ).to_dict()
        config["target_modules"] = sorted(ranks)
        configs[part] = {
            key: sorted(value) if isinstance(value, set) else value for key, value in config.items()
        }
    return configs


def modules_of(files: list[LoraFile]) -> Iterator[tuple[str, list[LoraFile]]]:
    """Yield every module of some files, with the files that contain it."""
    for module in dict.fromkeys(module for file in files for module in file.modules):
        yield module, [file for file in files if module in file.modules]
