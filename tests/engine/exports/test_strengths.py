"""Exported LoRAs act everywhere at the strength they were trained, whatever alpha was.

Diffusers and peft load the files for real. What the other loaders look at is written down below,
from their sources.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file

from engine.exports.recipe import Recipe
from engine.exports.stock import loads_loras
from engine.families.shared.lora_names import Kohya
from engine.model.adapters import lora
from engine.toy.components.weights import one_thread
from jobs.spec.families import FAMILIES
from tests.support.engine.exports import export_alone
from tests.support.engine.families import Case, chosen, quiet, toys_root

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from engine.families import LoraStyle

Deltas = dict[str, torch.Tensor]
"""A loader's module → what it adds to the weight, `(out, in)` in fp64."""


@dataclass(frozen=True)
class Loader:
    """What a tool makes of a LoRA's tensors; none of these reads a header.

    Attributes:
        alphas: The ends of the down matrices beside which it looks for `.alpha`: the product is
            scaled by alpha / rank there, and by nothing where it looks for none or finds none.
        needed: Whether it fails without alphas.
        diffusers: The families whose file with diffusers' names it takes.
        kohya: The families whose file with kohya's names it takes; None for all.
        comfyui: Whether it takes files with ComfyUI's names.
    """

    alphas: tuple[str, ...]
    needed: bool = False
    diffusers: frozenset[str] = frozenset()
    kohya: frozenset[str] | None = None
    comfyui: bool = False


DOWN: Final = {"lora_A.weight": "lora_B.weight", "lora_down.weight": "lora_up.weight"}
LOADERS: Final = {
    # comfy/lora.py (load_lora, model_lora_keys_unet) and comfy/weight_adapter/lora.py
    # (LoRAAdapter.load, calculate_weight) of Comfy-Org/ComfyUI at 17358c8.
    "ComfyUI": Loader(
        tuple(DOWN),
        diffusers=frozenset(
            (
                "flux",
                "chroma",
                "sd3",
                "auraflow",
                "pixart_sigma",
                "qwen_image",
                "hidream",
                "z_image",
            )
        ),
        comfyui=True,
    ),
    # packages_3rdparty/comfyui_lora_collection/lora.py (load_lora) of
    # lllyasviel/stable-diffusion-webui-forge at 00f1cd3.
    "Forge": Loader(
        tuple(DOWN),
        diffusers=frozenset(("flux",)),
        kohya=frozenset(("flux", "chroma", "sdxl", "stable_diffusion", "sd3")),
    ),
    # networks/lora.py and lora_flux.py (create_network_from_weights, LoRAModule) of
    # kohya-ss/sd-scripts at 48d368f, networks/lora.py of kohya-ss/musubi-tuner at 30c658c.
    "sd-scripts and musubi-tuner": Loader(("lora_down.weight",), needed=True),
    # backend/patches/layers/lora_layer_base.py (scale) and the lora_conversions of
    # invoke-ai/InvokeAI at 8e71a8a: of A and B no alpha is read.
    "InvokeAI": Loader(
        ("lora_down.weight",),
        diffusers=frozenset(("flux", "flux2", "qwen_image", "z_image")),
        kohya=frozenset(("flux", "sdxl", "stable_diffusion", "qwen_image", "wan")),
    ),
}

VARIANTS: Final[dict[str, dict[str, Any]]] = {
    "alpha": {"lora_rank": 4, "lora_alpha": 2},
    "rslora": {"lora_rank": 3, "lora_alpha": 5, "lora_variant": "rslora"},
    "mixed": {
        "lora_rank": 4,
        "lora_alpha": 6,
        "lora_rank_pattern": {"to_q": 2},
        "lora_alpha_pattern": {"to_k": 1},
    },
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module", params=chosen(FAMILIES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, toys_root(tmp_path_factory))


def read(loader: Loader, tensors: Mapping[str, torch.Tensor]) -> Deltas:
    """Apply a loader's rule; every key is claimed, or the test fails."""
    deltas, claimed = {}, set()
    for name, down in tensors.items():
        end = next((end for end in DOWN if name.endswith(f".{end}")), None)
        if end is None:
            continue
        module = name.removesuffix(f".{end}")
        keys = {name, f"{module}.{DOWN[end]}"}
        scale, alpha = 1.0, f"{module}.alpha"
        assert not loader.needed or alpha in tensors
        if end in loader.alphas and alpha in tensors:
            keys.add(alpha)
            scale = tensors[alpha].item() / len(down)
        up = tensors[f"{module}.{DOWN[end]}"].double().flatten(1)
        deltas[module] = scale * up @ down.double().flatten(1)
        claimed |= keys
    assert claimed == tensors.keys()
    return deltas


def named(style: LoraStyle, adapters: Mapping[str, Any]) -> Deltas:
    """The trained products under a tool's names."""
    ours: Any = style
    prefix, flat = ("lora_unet_", "_") if isinstance(style, Kohya) else ("diffusion_model.", ".")
    return {
        prefix + module.replace(".", flat): up @ down
        for module, (down, up) in ours.rename(adapters).items()
    }


def loaded(case: Case, directory: Path) -> Deltas:
    """What stock diffusers, or else peft, adds to each weight."""
    stock = case.stock()
    if loads_loras(case.family.pipeline_class()):
        with quiet():
            case.family.load_lora(stock, directory)
        model = getattr(stock, case.family.component)
    else:
        model = PeftModel.from_pretrained(stock.transformer, directory).base_model.model
    return {
        name: module.get_delta_weight(next(iter(module.scaling))).double().flatten(1)
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }


def assert_equal(found: Deltas, expected: Deltas, what: str) -> None:
    assert found.keys() == expected.keys(), what
    for name, delta in expected.items():
        error = (found[name] - delta).norm() / delta.norm()
        assert error < 1e-6, (what, name, float(error))


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_every_loader_adds_what_was_trained(case: Case, variant: str, tmp_path: Path) -> None:
    formats = [*case.family.lora_formats]
    if case.family.COMFYUI is not None and "comfyui" not in formats:
        formats.append("comfyui")
    spec = case.spec(**VARIANTS[variant], export_formats=formats)
    component = case.family.component
    model = case.family.transformer_class().from_pretrained(case.paths.model, subfolder=component)
    unused = case.family.without_gradient(model, spec)
    lora.add_lora(model, spec, case.family.lora_targets(spec), unused)
    draw = torch.Generator().manual_seed(1)
    for parameter in lora.lora_parameters(model).values():
        parameter.normal_(generator=draw)
    scales = lora.scales_of(model)
    assert 1.0 not in scales.values()
    parts = {name: p.double() for name, p in lora.lora_parameters(model).items()}
    adapters = {
        name: (
            parts[f"{name}.lora_A.default.weight"].flatten(1),
            scale * parts[f"{name}.lora_B.default.weight"].flatten(1),
        )
        for name, scale in scales.items()
    }
    recipe = Recipe(spec, case.family, case.paths.model, 4, ema=False, formats=formats)  # type: ignore[arg-type]
    made = export_alone(model, recipe, tmp_path / "export")
    assert made.warnings == ()

    products = {name: up @ down for name, (down, up) in adapters.items()}
    assert_equal(loaded(case, made.path), products, "diffusers or peft")
    styles = {"kohya": case.family.KOHYA, "comfyui": case.family.COMFYUI}
    for name, loader in LOADERS.items():
        if case.facts.name in loader.diffusers:
            (file,) = (*made.path.glob("pytorch_lora*"), *made.path.glob("adapter_m*.safetensors"))
            prefix = f"{case.family.lora_prefix}."
            prefix = prefix if file.name.startswith("pytorch") else "base_model.model."
            expected = {prefix + module: product for module, product in products.items()}
            assert_equal(read(loader, load_file(file)), expected, f"{name}, {file.name}")
        taken = {"kohya": loader.kohya is None or case.facts.name in loader.kohya}
        taken["comfyui"] = loader.comfyui
        for kind, style in styles.items():
            if style is not None and taken[kind]:
                tensors = load_file(made.path / f"{spec.name}-{kind}.safetensors")
                # Beside A and B, InvokeAI ignores alphas and diffusers refuses them.
                assert kind == "kohya" or not any(n.endswith(".alpha") for n in tensors)
                assert_equal(read(loader, tensors), named(style, adapters), f"{name}, {kind}")
