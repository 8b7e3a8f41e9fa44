"""Packed weights: the schemes, the layer that computes with them, and how they are filled."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from diffusers import FluxTransformer2DModel
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import load_file, save_file
from torch.nn import functional

from engine import families
from engine.memory.tracing.model import build, shape_of
from engine.model import packing
from engine.model.adapters import lora
from engine.model.base_matmul import set_scaled
from engine.model.files import weight_reader, weights
from engine.model.packing import NF4_CODES, Packing
from engine.model.quantized_linear import (
    quantize_layers,
    quantized_layers,
)
from jobs.errors import UserError
from jobs.spec.job_spec import JobSpec
from tests.support.engine.quantized import layer_of, some_weight
from tests.support.engine.toy_jobs import toy_spec
from tests.support.engine.weights import CPU

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.spec.values.value_types import BasePrecision

SCHEMES: tuple[BasePrecision, ...] = ("fp8", "fp8_scaled", "int8", "nf4")


def unpacked(scheme: BasePrecision, weight: torch.Tensor) -> torch.Tensor:
    how = Packing(scheme)
    return how.unpack(*how.pack(weight), how.code_table(torch.float32), torch.float32)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


# The schemes


@pytest.mark.parametrize(
    ("scheme", "most"), [("fp8", 0.04), ("fp8_scaled", 0.03), ("int8", 0.012), ("nf4", 0.1)]
)
def test_a_weight_comes_back_within_the_rounding_of_its_scheme(
    scheme: BasePrecision, most: float
) -> None:
    weight = some_weight()
    once = unpacked(scheme, weight)
    assert most / 4 < error(once, weight) < most
    assert error(unpacked(scheme, once), once) < 1e-6, "a value that the scheme has is kept"
    packed, scale = Packing(scheme).pack(weight)
    wanted = Packing(scheme).shapes(*weight.shape)
    assert (tuple(packed.shape), scale if scale is None else tuple(scale.shape)) == wanted
    assert packed.dtype is torch.uint8


@pytest.mark.parametrize("scheme", SCHEMES)
def test_zeros_stay_zeros_and_nothing_overflows(scheme: BasePrecision) -> None:
    weight = torch.zeros(2, 64)
    weight[1, :2] = torch.tensor([3e4, -3e4])
    found = unpacked(scheme, weight)
    assert found.isfinite().all()
    assert not found[0].any()
    if scheme != "fp8":  # without a scale it ends at 448
        assert torch.allclose(found, weight, rtol=1e-6)


def test_nf4_takes_the_nearest_code_of_each_block_high_bits_first() -> None:
    weight = some_weight(2, 128)
    weight[0, 64:] *= 100
    packed, scale = Packing("nf4").pack(weight)
    assert scale is not None
    blocks = weight.view(2, 2, 64)
    assert torch.equal(scale, blocks.abs().amax(2))
    codes = torch.tensor(NF4_CODES)
    nearest = (blocks[..., None] / scale[..., None, None] - codes).abs().argmin(-1).view(2, 128)
    assert torch.equal(packed >> 4, nearest[:, ::2].to(torch.uint8))
    assert torch.equal(packed & 15, nearest[:, 1::2].to(torch.uint8))


def test_rows_that_are_unpacked_apart_are_those_unpacked_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = some_weight()
    together = unpacked("nf4", weight)
    monkeypatch.setattr(packing, "_AT_ONCE", 7 * 192 // 2)
    assert torch.equal(unpacked("nf4", weight), together)


# The layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_it_computes_with_the_unpacked_weight_and_keeps_the_packed_one(
    scheme: BasePrecision, dtype: torch.dtype
) -> None:
    layer, weight = layer_of(scheme, some_weight(), dtype)
    x = torch.randn(2, 5, 192).to(dtype).requires_grad_()
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = layer(x)
    assert torch.equal(out, functional.linear(x, weight, layer.bias))
    assert not [t for t in kept if t.is_floating_point() and t.numel() >= weight.numel()]
    out.float().square().sum().backward()
    again = x.detach().requires_grad_()
    functional.linear(again, weight, layer.bias).float().square().sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, again.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", ["fp8", "nf4"])
def test_an_adapter_on_it_learns_what_pefts_does_on_the_unpacked_weight(
    scheme: BasePrecision, dtype: torch.dtype
) -> None:
    layer, weight = layer_of(scheme, some_weight(), dtype)
    dense = torch.nn.Linear(192, 24, dtype=dtype)
    with torch.no_grad():
        dense.weight.copy_(weight)
        dense.bias.copy_(layer.bias)
    models = [torch.nn.Sequential(layer), torch.nn.Sequential(dense)]
    half = "bf16" if dtype is torch.bfloat16 else "no"
    lora.add_lora(models[0], JobSpec(lora_rank=4, lora_alpha=6, mixed_precision=half), "0")
    config = LoraConfig(r=4, lora_alpha=6, target_modules=["0"])
    inject_adapter_in_model(config, models[1].requires_grad_(False))
    found = []
    x = torch.randn(3, 192, generator=torch.Generator().manual_seed(1)).to(dtype)
    for model in models:
        torch.manual_seed(2)
        for parameter in lora.lora_parameters(model).values():
            parameter.data = torch.randn(parameter.shape)
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype, enabled=model is models[1] and half == "bf16"):
            out = model(leaf)
        out.float().square().mean().backward()
        gradients = [p.grad for p in lora.lora_parameters(model).values()]
        found.append([out.detach(), leaf.grad, *gradients])
    for mine, theirs in zip(*found, strict=True):
        assert error(mine, theirs) < (1e-6 if dtype is torch.float32 else 0.02)


# In a model


def packed_flux(toy: Path, **changes: Any) -> tuple[Any, JobSpec]:
    spec = toy_spec(toy, mixed_precision="no", **changes)
    family = families.load("flux")
    model: Any
    model, stored = weights.build_on_meta(
        FluxTransformer2DModel, toy / "model" / "transformer", spec
    )
    note = quantize_layers(model, spec, family)
    assert " are quantized to " in note
    assert f" {spec.base_precision} (" in note
    lora.add_lora(model, spec, family.LORA_TARGETS)
    weights.materialise(model, CPU)
    read = weights.stream(model, stored, names=lora.adapted_name(model).__getitem__)
    assert read == sum(place.elements * place.dtype.itemsize for place in stored.values())
    weights.check_precision(model, spec)
    return model, spec


@pytest.mark.parametrize("scheme", SCHEMES)
def test_layers_of_blocks_are_packed_as_they_are_read(
    toy: Path, scheme: BasePrecision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside nf4, modulation in 8 bits; some of the rows that are read at a time, then fewer."""
    monkeypatch.setitem(weight_reader._PACKED_BYTES, "cpu", (4 * 128 * 12, 4 * 128 * 5))
    model, _ = packed_flux(toy, base_precision=scheme)
    stock = FluxTransformer2DModel.from_pretrained(toy / "model" / "transformer")
    layers = quantized_layers(model)
    blocks = [n for n, m in stock.named_modules() if type(m) is torch.nn.Linear and "blocks" in n]
    names = {name.removesuffix(".base_layer") for name in layers}
    assert names == {name for name in blocks if ".norm" not in name or scheme == "nf4"}
    for name, layer in layers.items():
        assert layer.packing.scheme == ("int8" if ".norm" in name else scheme)
        whole = stock.get_submodule(name.removesuffix(".base_layer")).weight
        packed, scale = layer.packing.pack(whole.detach())
        assert torch.equal(layer.weight, packed), name
        assert (scale is None) == (layer.weight_scale is None)
        assert scale is None or torch.equal(layer.weight_scale, scale), name


@pytest.mark.parametrize("modulation", ["none", "int8", "nf4"])
def test_modulation_has_a_precision_of_its_own(toy: Path, modulation: BasePrecision) -> None:
    model, _ = packed_flux(toy, base_precision="nf4", modulation_precision=modulation)
    layers = quantized_layers(model)
    found = {layer.packing.scheme for name, layer in layers.items() if ".norm" in name}
    assert found == {modulation} - {"none"}
    assert {layer.packing.scheme for name, layer in layers.items() if ".norm" not in name} == {
        "nf4"
    }
    everything, _ = packed_flux(
        toy, base_precision="nf4", modulation_precision=modulation, keep_in_full_precision=[]
    )
    assert {layer.packing.scheme for layer in quantized_layers(everything).values()} == {"nf4"}


def test_modulation_in_int8_does_not_multiply_in_fp8(toy: Path) -> None:
    model, _ = packed_flux(toy, base_precision="fp8_scaled", modulation_precision="int8")
    count = set_scaled(model, scaled=True)
    scaled = {name for name, layer in quantized_layers(model).items() if layer.packing.scaled}
    assert 0 < count == len(scaled)
    assert not any(".norm" in name for name in scaled)


def test_the_job_chooses_what_stays(toy: Path) -> None:
    model, spec = packed_flux(toy, base_precision="int8", keep_in_full_precision=["attn", "ff"])
    assert {name.split(".")[2] for name in quantized_layers(model)} == {
        "norm1",
        "norm1_context",
    } | {
        "norm",
        "proj_mlp",
        "proj_out",
    }
    everything = JobSpec.model_validate(spec.to_dict() | {"keep_in_full_precision": ["blocks"]})
    with pytest.raises(UserError, match="int8 quantizes no layer of this model"):
        quantize_layers(model, everything, families.load("flux"))


def test_a_prediction_counts_packed_bytes_and_whole_weights(toy: Path) -> None:
    plain, packed = (
        build(shape)
        for precision in ("none", "nf4")
        if (shape := shape_of(toy_spec(toy, base_precision=precision), sharded=True))
    )
    model, _ = packed_flux(toy, base_precision="nf4")
    weights_of = [[w for unit in built.units for w in unit.weights] for built in (plain, packed)]
    counts = [sum(w.numel * w.per_element for w in found) for found in weights_of]
    assert counts[0] == counts[1]
    held = sum(w.numel * w.stored for w in weights_of[1])
    assert held == sum(p.numel() * p.element_size() for p in model.parameters())


# Models that were published packed


def published(toy: Path, root: Path, pack: Any, config: dict[str, Any]) -> Path:
    """The toy's transformer with its attention packed by `pack`, which names what it writes."""
    source = toy / "model" / "transformer"
    tensors = load_file(source / "diffusion_pytorch_model.safetensors")
    for name in [n for n in tensors if ".attn.to_" in n and n.endswith(".weight")]:
        tensors |= {f"{name[:-6]}{leaf}": t for leaf, t in pack(tensors[name]).items()}
    root.mkdir()
    save_file(tensors, root / "diffusion_pytorch_model.safetensors")
    known = json.loads((source / "config.json").read_text())
    (root / "config.json").write_text(json.dumps(known | config))
    return root


def as_fp8(weight: torch.Tensor, *, rows: bool) -> dict[str, torch.Tensor]:
    scale = weight.abs().amax(1, keepdim=True) if rows else weight.abs().max()
    return {
        "weight": (weight / (scale / 448)).to(torch.float8_e4m3fn),
        "scale_weight": scale / 448,
        "scale_input": torch.ones(()),
    }


def as_bitsandbytes(weight: torch.Tensor, *, nested: bool) -> dict[str, torch.Tensor]:
    packed, scale = Packing("nf4").pack(weight)
    assert scale is not None
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "shape": list(weight.shape)}
    parts = {
        "weight": packed.view(-1, 1),
        "weight.absmax": scale.flatten(),
        "weight.quant_map": torch.tensor(NF4_CODES),
    }
    if nested:
        state |= {"nested_blocksize": 256, "nested_offset": float(scale.mean())}
        codes = torch.linspace(-1, 1, 256)
        blocks = functional.pad(scale.flatten() - scale.mean(), (0, -scale.numel() % 256))
        most = blocks.view(-1, 256).abs().amax(1)
        each = most.repeat_interleave(256)[: scale.numel()]
        near = ((scale.flatten() - scale.mean()) / each)[:, None] - codes
        parts |= {
            "weight.absmax": near.abs().argmin(1).to(torch.uint8),
            "weight.nested_absmax": most,
            "weight.nested_quant_map": codes,
        }
    content = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return parts | {"weight.quant_state.bitsandbytes__nf4": content}


BITSANDBYTES = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}


@pytest.mark.parametrize(
    ("scheme", "pack", "config", "most"),
    [
        ("fp8_scaled", partial(as_fp8, rows=True), {}, 1e-6),
        ("fp8_scaled", partial(as_fp8, rows=False), {}, 0.05),
        ("nf4", partial(as_bitsandbytes, nested=False), BITSANDBYTES, 1e-6),
        ("nf4", partial(as_bitsandbytes, nested=True), BITSANDBYTES, 0.02),
    ],
    ids=["fp8 by rows", "fp8 by tensor", "nf4", "nf4 with packed scales"],
)
def test_what_is_published_packed_is_read_as_it_is(
    toy: Path, tmp_path: Path, scheme: BasePrecision, pack: Any, config: Any, most: float
) -> None:
    directory = published(toy, tmp_path / "transformer", pack, config)
    spec = toy_spec(toy, mixed_precision="no", base_precision=scheme)
    model: Any
    model, stored = weights.build_on_meta(FluxTransformer2DModel, directory, spec)
    quantize_layers(model, spec, families.load("flux"), stored)
    weights.materialise(model, CPU)
    weights.stream(model, stored)
    weights.check_precision(model, spec)
    stock = FluxTransformer2DModel.from_pretrained(toy / "model" / "transformer")
    layers = quantized_layers(model)
    assert layers
    assert all(".attn.to_" in name for name in layers), "nothing else is packed"
    for name, layer in layers.items():
        whole = stock.get_submodule(name).weight.detach()
        assert torch.equal(layer.weight.view(-1), pack(whole)["weight"].view(torch.uint8).view(-1))
        found = layer.packing.unpack(layer.weight, layer.weight_scale, layer.codes, torch.float32)
        assert error(found, unpacked(scheme, whole)) < most, name
    # A prediction finds the same layers packed.
    like = toy_spec(toy, base_precision=scheme, pretrained_model_name_or_path=str(tmp_path))
    shape = shape_of(like, sharded=True)
    assert shape is not None
    predicted = {n.replace(".base_layer", "") for n in quantized_layers(build(shape).model)}
    assert predicted == layers.keys()
    for other in ("none", "int8"):
        values = spec.to_dict() | {"base_precision": other}
        with pytest.raises(UserError, match=f"is quantized to {scheme}") as refused:
            weights.build_on_meta(FluxTransformer2DModel, directory, JobSpec.model_validate(values))
        assert f"set base_precision: {scheme} to train" in refused.value.hint


def test_another_way_of_packing_is_refused(toy: Path, tmp_path: Path) -> None:
    def pack(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = as_bitsandbytes(weight, nested=False)
        return parts | {"weight.quant_map": torch.linspace(-1, 1, 16)}

    directory = published(toy, tmp_path / "transformer", pack, BITSANDBYTES)
    spec = toy_spec(toy, base_precision="nf4")
    with pytest.raises(UserError, match="cannot be read: its codes are not those of nf4"):
        weights.build_on_meta(FluxTransformer2DModel, directory, spec)
