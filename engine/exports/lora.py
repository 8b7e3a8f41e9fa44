"""Write a LoRA as stock diffusers loads it, and under the names of ComfyUI and kohya's scripts."""

from __future__ import annotations

import json
import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import torch
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from peft import get_peft_model_state_dict
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME

from engine.exports.readback import DamagedError, VerifiedFile
from engine.exports.recipe import describe
from engine.exports.stock import PEFT_PREFIX, check_lora, loads_loras
from engine.families.shared.lora_names import ComfyUI, named_singly
from engine.model.adapters import lora, text_lora
from engine.model.meta_device import parameters_on_meta
from jobs.errors import UserError
from jobs.spec.families import denoiser_config
from jobs.spec.rules.lora_conflicts import trains_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from engine.exports.recipe import Recipe
    from engine.exports.source import Fact
    from engine.families import LoraStyle
    from jobs.spec.keys.lora import LoraKeys


class LoraOutput:
    """Collects an adapter's tensors and writes them in each format.

    Args:
        recipe: Describes the export.
        facts: The adapter's parameters that will be added, as peft names them in the model.
        directory: An empty directory.

    Attributes:
        bytes: Lower bound of the disk space needed.
        pieces: Number of tensors that are checked at the end.
        warnings: Messages for the user about the export.

    Raises:
        UserError: The parameters are not those of the job's adapter.
    """

    def __init__(self, recipe: Recipe, facts: Mapping[str, Fact], directory: Path) -> None:
        self._recipe = recipe
        self._directory = directory
        self._whole: dict[str, torch.Tensor] = {}
        self.warnings: list[str] = []
        self._lokr = recipe.spec.lora_variant == "lokr"
        self._model = _adapted(recipe)
        unused: tuple[str, ...] = ()
        if without := recipe.family.without_gradient(self._model, recipe.spec):
            # Of a checkpoint from before such layers had no adapter: without effect.
            unused = tuple(f"{name}." for name in lora.unused_layers(self._model, without))
        self._left_out = {name for name in facts if name.startswith(unused)}
        facts = {name: fact for name, fact in facts.items() if name not in self._left_out}
        expected = {n: tuple(p.shape) for n, p in lora.lora_parameters(self._model).items()}
        if odd := [n for n in expected | dict(facts) if expected.get(n) != _shape(facts, n)]:
            raise UserError(
                f"the adapter does not fit the job: {odd[0]} is {_shape(facts, odd[0])} in the "
                f"checkpoint and {expected.get(odd[0])} by lora_rank and lora_target_modules"
            )
        self._formats = _formats(recipe, self.warnings.append)
        self.pieces = len(facts) * len(self._formats)
        sizes = [dtype.itemsize * torch.Size(shape).numel() for dtype, shape in facts.values()]
        self.bytes = sum(sizes) * len(self._formats)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add one tensor."""
        if name not in self._left_out:
            self._whole[name] = tensor

    def finish(self, checked: Callable[[], None]) -> None:
        """Write the files, read them back, and have stock diffusers load them.

        Args:
            checked: Called after each tensor that was read back.

        Raises:
            DamagedError: The files on disk differ from the adapter.
            UserError: The adapter has values that cannot be exported.
            OSError: The files cannot be written.
        """
        everything = get_peft_model_state_dict(
            self._model, state_dict=self._whole, adapter_name=lora.ADAPTER
        )
        self._check_zeros(everything)
        folded = _folded(everything, lora.scales_of(self._model))
        layers, texts = text_lora.parted(folded, self._recipe.family)
        if "diffusers" in self._formats:
            if loads_loras(self._recipe.family.pipeline_class()):
                self._write_diffusers(layers, texts, checked)
            else:
                self._write_peft(layers, checked)
        for name, style in _styles(self._recipe).items():
            if name in self._formats:
                self._write_named(name, style, layers, texts, checked)

    def abandon(self) -> None:
        """Do nothing, since no file stays open between calls."""

    def _check_zeros(self, layers: Mapping[str, torch.Tensor]) -> None:
        """Reject a broken adapter: A is never zero, and B stops being zero with the first step."""
        zeros = [n for n, t in layers.items() if not t.any()]
        if empty := [n for n in zeros if not lora.starts_at_zero(n)]:
            raise DamagedError(f"the adapter is incomplete: {empty[0]} is zero")
        if self._recipe.step and all(n in zeros for n in layers if lora.starts_at_zero(n)):
            every = "second matrix" if self._lokr else "B"
            self.warnings.append(
                f"after {self._recipe.step} steps the adapter still has no effect: every {every} "
                "is zero; check the learning rate and warm-up"
            )

    def _write_diffusers(
        self,
        layers: Mapping[str, torch.Tensor],
        texts: Mapping[str, dict[str, torch.Tensor]],
        checked: Callable[[], None],
    ) -> None:
        family = self._recipe.family
        config = self._config()
        if config["exclude_modules"]:  # the file's names say what is adapted, or peft warns
            modules = {re.split(r"\.lo(?:ra|kr)_", name)[0] for name in layers}
            config |= {"exclude_modules": None, "target_modules": modules}
        configs = {family.lora_prefix: config}
        for name in texts:
            configs[name] = _unscaled(text_lora.config_of(self._recipe.spec).to_dict())
        written: list[VerifiedFile] = []

        def write(tensors: dict[str, torch.Tensor], path: str) -> None:
            header = describe(self._recipe) | _as_diffusers(configs)
            written.append(self._write(self._directory / path, tensors, header))

        # The stock function chooses the names of the file and the tensors. With a custom save
        # function, it leaves the header to the caller.
        parts = {family.lora_prefix: dict(layers), **texts}
        named = {f"{name}_lora_layers": tensors for name, tensors in parts.items()}
        # Diffusers loads one transformer at a time, by the same names: two experts are two files.
        weight_name = f"{self._recipe.spec.name}-diffusers.safetensors"
        family.pipeline_class().save_lora_weights(
            self._directory,
            **named,
            weight_name=weight_name if self._recipe.partner else None,
            save_function=write,
        )
        for file in written:
            file.check(checked)
            self._check_loads(file, layers, texts)

    def _write_peft(self, layers: Mapping[str, torch.Tensor], checked: Callable[[], None]) -> None:
        """Write peft's own format, for `PeftModel.from_pretrained(pipeline.transformer, …)`.

        Diffusers has no LoRA functions for this pipeline.
        """
        config = self._config() | {"inference_mode": True}
        text = json.dumps(_sorted(config), indent=2, sort_keys=True) + "\n"
        (self._directory / CONFIG_NAME).write_text(text, encoding="utf-8")
        named = {PEFT_PREFIX + name: tensor for name, tensor in layers.items()}
        path = self._directory / SAFETENSORS_WEIGHTS_NAME
        # Include a header too, so that a different adapter_config.json next to the file cannot
        # rescale it.
        own = _as_diffusers({self._recipe.family.lora_prefix: config})
        file = self._write(path, named, describe(self._recipe) | own)
        file.check(checked)
        self._check_loads(file, layers)

    def _config(self) -> dict[str, Any]:
        """Return peft's configuration of the written adapter."""
        return _unscaled(self._model.peft_config[lora.ADAPTER].to_dict())

    def _check_loads(
        self,
        file: VerifiedFile,
        layers: Mapping[str, torch.Tensor],
        texts: Mapping[str, Mapping[str, torch.Tensor]] = MappingProxyType({}),
    ) -> None:
        empty = _adapted(self._recipe, empty=True)
        check_lora(self._recipe, file.path, layers, lora.scales_of(self._model), empty, texts)

    def _write_named(
        self,
        name: str,
        style: LoraStyle,
        layers: Mapping[str, torch.Tensor],
        texts: Mapping[str, Mapping[str, torch.Tensor]],
        checked: Callable[[], None],
    ) -> None:
        """Write a file under the names of another tool."""
        spec = self._recipe.spec
        try:
            tensors = named(style, layers) if self._lokr else _named(style, layers)
        except UserError as error:
            if "diffusers" not in self._formats:
                raise
            self.warnings.append(f"no file for {name}: {error}")
            return
        # ComfyUI reads text encoders by kohya's names.
        encoders = text_lora.as_kohya(texts, self._recipe.family)
        if name == "comfyui":
            encoders = {n: t for n, t in encoders.items() if not n.endswith(".alpha")}
        tensors |= encoders
        facts = {
            "ss_network_dim": str(spec.lora_rank),
            "ss_network_alpha": str(float(spec.lora_rank)),
            "ss_output_name": spec.name,
            "ss_steps": str(self._recipe.step),
        }
        own = style.METADATA | (lokr_header(spec) if self._lokr else {})
        header = describe(self._recipe, name) | own | facts
        self._write(self._directory / f"{spec.name}-{name}.safetensors", tensors, header).check(
            checked
        )

    def _write(
        self, path: Path, tensors: Mapping[str, torch.Tensor], header: Mapping[str, str]
    ) -> VerifiedFile:
        facts = {
            # Alphas are scalars, which readers expect in their original precision.
            name: (self._recipe.lora_dtype(t.dtype) if t.dim() else t.dtype, tuple(t.shape))
            for name, t in tensors.items()
        }
        file = VerifiedFile(path, facts, header)
        try:
            for name, tensor in tensors.items():
                file.add(name, tensor)
            file.close()
        finally:
            file.abandon()
        return file


def _folded(
    layers: Mapping[str, torch.Tensor], scales: Mapping[str, float]
) -> dict[str, torch.Tensor]:
    """Multiply each adapter's scale into its up matrix (for LoKr, into its first), in fp32.

    Loaders disagree about where to read an alpha: ComfyUI and InvokeAI ignore headers, and peft
    scales a LoKr in cases where LyCORIS does not. With the scale folded in, all of them agree.

    Args:
        layers: `<module>.lora_A.weight`, `<module>.lokr_w1` and so on.
        scales: The factor of each module's product: alpha / rank, for rsLoRA alpha / √rank.
    """
    folded = dict(layers)
    for module, scale in scales.items():
        for name in (f"{module}.lora_B.weight", f"{module}.lokr_w1"):
            if name in folded and scale != 1:
                folded[name] = folded[name].float() * scale
    return folded


def _unscaled(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return peft's configuration for such weights: every alpha equals its rank."""
    own = {"alpha": config["r"]} if "alpha" in config else {"lora_alpha": config["r"]}
    own |= {"use_rslora": False} if "use_rslora" in config else {}
    return dict(config) | own | {"alpha_pattern": config["rank_pattern"]}


def _named(style: LoraStyle, layers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return an adapter under the names of another tool.

    DoRA's magnitudes become the `dora_scale` of LyCORIS, `(out, 1)`.

    Raises:
        UserError: The tool cannot represent the adapter.
    """
    plain: dict[str, torch.Tensor] = {}
    magnitudes: dict[str, torch.Tensor] = {}
    for name, tensor in layers.items():
        module, _, part = name.rpartition(".lora_")
        if part.startswith("magnitude_vector"):
            # Pass them as the ups of rank-1 adapters, so that they move along with their layers'
            # rows.
            magnitudes[f"{module}.lora_A.weight"] = layers[f"{module}.lora_A.weight"][:1]
            magnitudes[f"{module}.lora_B.weight"] = tensor.reshape(-1, 1)
        else:
            plain[name] = tensor
    converted = style.convert(plain)
    for name, tensor in style.convert(magnitudes).items() if magnitudes else ():
        module, _, part = name.rpartition(".lora_")
        if part not in ("up.weight", "B.weight"):
            continue
        rows = tensor.sum(1)
        if not rows.all():
            raise UserError(f"DoRA needs all parts of {module} to have an adapter")
        converted[f"{module}.dora_scale"] = rows.reshape(-1, *[1] * (converted[name].dim() - 1))
    return converted


def _adapted(recipe: Recipe, *, empty: bool = False) -> Any:
    """Return the base model on the meta device, with the job's adapter unless `empty`."""
    model_class, root = recipe.family.transformer_class(), recipe.family.denoiser_of(recipe.root)
    with parameters_on_meta():
        config = model_class.load_config(root)
        if not empty:
            config = denoiser_config(recipe.spec, config)
        model = model_class.from_config(config)
    if not empty:
        spec, family = recipe.spec, recipe.family
        unused = family.without_gradient(model, spec)
        lora.add_lora(model, spec, family.lora_targets(spec), unused)
        if trains_text(recipe.spec):
            encoders = text_lora.on_meta(recipe.family, recipe.root)
            text_lora.attach(model, text_lora.adapted_encoders(encoders, recipe.spec))
    return model


def _styles(recipe: Recipe) -> dict[str, LoraStyle]:
    """Return the naming styles, apart from diffusers', that a family's LoRAs have."""
    styles = {"kohya": recipe.family.KOHYA, "comfyui": recipe.family.COMFYUI}
    return {name: style for name, style in styles.items() if style is not None}


def _formats(recipe: Recipe, warn: Callable[[str], None]) -> list[str]:
    """Return the formats to write; at least one, since this may be the end of days of training."""
    available = ("diffusers", *_styles(recipe))
    usual: Sequence[str] = recipe.family.lora_formats
    if recipe.spec.lora_variant == "lokr":  # kohya's own scripts do not train LoKr
        usual = [name for name in available if name != "kohya"]
    formats = recipe.formats or usual
    for name in formats:
        if name not in available:
            warn(f"{recipe.spec.model_family} has no {name} names: this is for diffusers only")
    return [name for name in formats if name in available] or ["diffusers"]


def _shape(facts: Mapping[str, Fact], name: str) -> tuple[int, ...] | None:
    return tuple(facts[name][1]) if name in facts else None


def _as_diffusers(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return a diffusers header with peft's configurations of the pipeline's components."""
    values = {
        f"{prefix}.{key}": value
        for prefix, config in configs.items()
        for key, value in _sorted(config).items()
    }
    return {LORA_ADAPTER_METADATA_KEY: json.dumps(values, indent=2, sort_keys=True)}


def _sorted(config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert sets to sorted lists."""
    return {
        key: sorted(value) if isinstance(value, set) else value for key, value in config.items()
    }


# -- lokr -----------------------------------------------------------------------------------
# Write a LoKr under the names of LyCORIS, which ComfyUI reads, and as peft and diffusers load it.


HEADER: Final = {"ss_network_module": "lycoris.kohya"}
"""The network module with which kohya's scripts load such files."""


def named(style: LoraStyle, layers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a LoKr under the names of another tool, with alphas that have no effect.

    Args:
        style: How the tool names LoRAs.
        layers: `<module>.lokr_w1`, `.lokr_w2` and so on, with the scale folded in.

    Raises:
        UserError: The tool has no name for a module.
    """
    shapes = _shapes(layers)
    try:
        names = named_singly(style, shapes)
    except UserError:
        prefix = style.lokr if isinstance(style, ComfyUI) else None
        if prefix is None:
            raise
        flat = prefix.endswith("_")
        names = {m: prefix + (m.replace(".", "_") if flat else m) for m in shapes}
    converted: dict[str, torch.Tensor] = {}
    for name, tensor in layers.items():
        module, _, part = name.rpartition(".")
        converted[f"{names[module]}.{part}"] = tensor
        if part == "lokr_w2_b":
            converted[f"{names[module]}.alpha"] = torch.tensor(float(tensor.shape[0]))
        elif part == "lokr_w2":  # neither matrix is factorized: no tool scales them
            converted[f"{names[module]}.alpha"] = torch.tensor(float(max(tensor.shape[:2])))
    return converted


def lokr_header(spec: LoraKeys) -> dict[str, str]:
    """Return the entries that LyCORIS writes into a file's header."""
    arguments = {"algo": "lokr", "factor": str(spec.lokr_factor)}
    if spec.lokr_full_matrix:
        arguments["full_matrix"] = "True"
    return HEADER | {"ss_network_args": json.dumps(arguments, sort_keys=True)}


def _shapes(layers: Mapping[str, torch.Tensor]) -> dict[str, torch.Size]:
    """Return the shape of each module's weight update."""
    shapes: dict[str, torch.Size] = {}
    for name, left in layers.items():
        module, _, part = name.rpartition(".")
        if part != "lokr_w1":
            continue
        whole = layers.get(f"{module}.lokr_w2")
        if whole is not None:
            rows, columns, kernel = whole.shape[0], whole.shape[1], whole.shape[2:]
        else:
            rows = len(layers[f"{module}.lokr_w2_a"])
            columns, kernel = layers[f"{module}.lokr_w2_b"].shape[1], torch.Size()
        shapes[module] = torch.Size([left.shape[0] * rows, left.shape[1] * columns, *kernel])
    return shapes
