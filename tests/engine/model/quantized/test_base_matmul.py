"""Products in fp8: their numbers, and who is given them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn import functional

from engine.model import base_matmul
from engine.model.adapters import lora
from engine.model.base_matmul import set_scaled, settle_matmul
from engine.model.packing import Packing, round_rows
from engine.model.quantized_linear import QuantizedLinear
from engine.ranks.world import World
from jobs.errors import UserError
from jobs.spec.job_spec import JobSpec
from tests.support.engine.weights import CPU

if TYPE_CHECKING:
    from jobs.spec.values.value_types import BasePrecision

ALONE = World(0, 1, CPU, "single", "t")


def some_layer(scheme: BasePrecision = "fp8_scaled", columns: int = 192) -> QuantizedLinear:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(32, columns, generator=generator) * 0.02
    weight *= torch.logspace(-1, 1, 32).unsqueeze(1)
    layer = QuantizedLinear(torch.nn.Linear(columns, 32), Packing(scheme), torch.float32)
    packed, scale = layer.packing.pack(weight)
    layer.weight.copy_(packed)
    if scale is not None:
        assert layer.weight_scale is not None
        layer.weight_scale.copy_(scale)
    return layer.requires_grad_(False)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", ["fp8", "fp8_scaled"])
def test_a_product_in_fp8_is_that_of_the_weight_but_for_its_rounded_inputs(
    scheme: BasePrecision, dtype: torch.dtype
) -> None:
    """And backward computes with the weight, and keeps no more than before."""
    layer = some_layer(scheme)
    sizes = torch.logspace(-4, 4, 10).view(2, 5, 1)
    x = torch.randn(2, 5, 192, generator=torch.Generator().manual_seed(1)) * sizes
    found = []
    for scaled in (False, True):
        assert set_scaled(layer, scaled=scaled) == scaled
        leaf = x.to(dtype).clone().requires_grad_()
        kept: list[torch.Tensor] = []

        def keep(tensor: torch.Tensor, kept: list[torch.Tensor] = kept) -> torch.Tensor:
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = layer(leaf)
        assert {t.dtype for t in kept} <= {torch.uint8, torch.float32}
        assert sum(t.numel() for t in kept) < 33 * 193
        out.backward(torch.ones_like(out))
        found.append((out.detach(), leaf.grad))
    (whole, exact), (rounded, gradient) = found
    assert torch.equal(gradient, exact)
    assert rounded.dtype is dtype
    assert 0.005 < error(rounded - layer.bias, whole - layer.bias) < 0.04
    inputs, scale = round_rows(x.to(dtype).view(-1, 192))
    weight = layer.packing.unpack(layer.weight, layer.weight_scale, None, torch.float32)
    wanted = functional.linear(inputs.float() * scale, weight, layer.bias).view(2, 5, 32)
    assert error(rounded, wanted) < (1e-6 if dtype is torch.float32 else 5e-3)


def test_rows_are_rounded_apart_by_powers_of_two() -> None:
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    x[1], x[2], x[3, 5], x[4, 5] = 0, x[2] * 2.0**-120, torch.nan, torch.inf
    rounded, scale = round_rows(x)
    assert torch.equal(scale, 2.0 ** scale.log2().round())
    alone = [round_rows(row.unsqueeze(0)) for row in x]
    assert torch.equal(scale, torch.cat([one for _, one in alone]))
    back = rounded.float() * scale
    assert torch.equal(back[[0, 1, 2, 5]].isfinite().all(1), torch.ones(4).bool())
    assert not back[1].any()
    assert not back[[3, 4]].isfinite().all(1).any(), "what is not finite shows"
    assert error(back[[0, 5]], x[[0, 5]]) < 0.04


def test_an_adapter_beside_a_product_in_fp8_learns_as_beside_the_weight() -> None:
    found = []
    for scaled in (False, True):
        model = torch.nn.Sequential(some_layer())
        lora.add_lora(model, JobSpec(lora_rank=4, mixed_precision="no"), "0")
        generator = torch.Generator().manual_seed(3)
        for parameter in lora.lora_parameters(model).values():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
        set_scaled(model, scaled=scaled)
        model(torch.randn(3, 192, generator=generator)).sum().backward()
        found.append([p.grad for p in lora.lora_parameters(model).values()])
    for exact, rounded in zip(*found, strict=True):
        assert torch.equal(rounded, exact), "gradients of a sum do not know the output"


def test_what_does_not_divide_by_sixteen_is_dequantized() -> None:
    model = torch.nn.Sequential(some_layer(), some_layer(columns=200))
    assert set_scaled(model, scaled=True) == 1
    assert [layer.packing.scaled for layer in model] == [True, False]


class Log:
    """What a rank says."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.warned: list[str] = []
        self.say, self.warn = self.said.append, self.warned.append


@pytest.mark.parametrize(
    ("asked", "before", "on", "lacks", "chosen", "says"),
    [
        ("auto", None, "cuda", "", "scaled", "1 layers of the base multiply in fp8"),
        ("auto", None, "cuda", "needs Ada", "dequantize", "scaled needs Ada)"),
        ("auto", None, "cpu", "", "dequantize", "scaled is no faster on a CPU)"),
        ("auto", "dequantize", "cuda", "", "dequantize", "scaled would change the result"),
        ("auto", "scaled", "cuda", "", "scaled", "multiply in fp8 (base_matmul: auto)"),
        ("auto", "scaled", "cpu", "", "scaled", "multiply in fp8 (base_matmul: auto)"),
        ("auto", "scaled", "cuda", "needs Ada", "dequantize", "scaled needs Ada)"),
        ("dequantize", "scaled", "cuda", "", "dequantize", "product (base_matmul: dequantize)"),
        ("scaled", "dequantize", "cpu", "", "scaled", "multiply in fp8 (base_matmul: scaled)"),
    ],
)
def test_auto_multiplies_in_fp8_where_all_can_and_goes_on_as_it_began(
    asked: str,
    before: str | None,
    on: str,
    lacks: str,
    chosen: str,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(base_matmul, "_lacks", lambda world, dtype: lacks)
    spec = JobSpec.model_validate({"base_precision": "fp8_scaled", "base_matmul": asked})
    layer, log = some_layer(), Log()
    world = World(0, 1, torch.device(on), "single", "t")
    settled = settle_matmul(spec, layer, world, log, before)  # type: ignore[arg-type]
    assert settled.base_matmul == chosen
    assert layer.packing.scaled == (chosen == "scaled")
    assert says in log.said[0]
    lost = asked == "auto" and before == "scaled" and chosen == "dequantize"
    assert log.warned == (["changed since the checkpoint: base_matmul: scaled needs Ada"] * lost)


def test_scaled_is_refused_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = JobSpec(base_precision="fp8", base_matmul="scaled", mixed_precision="bf16")
    log: Any = Log()
    assert settle_matmul(spec, some_layer(), ALONE, log, None).base_matmul == "scaled"
    monkeypatch.setattr(base_matmul, "_WRONG", 1e-9)
    with pytest.raises(UserError, match="base_matmul: scaled computes wrong numbers on this GPU"):
        settle_matmul(spec, some_layer(), ALONE, log, None)
    other = JobSpec(base_precision="int8")
    assert settle_matmul(other, some_layer("int8"), ALONE, log, None) is other


@pytest.mark.parametrize(
    ("capability", "torch_version", "dtype", "lacks"),
    [
        ((8, 0), "2.13.0", torch.bfloat16, "needs a GPU of compute capability 8.9"),
        ((8, 9), "2.11.0", torch.bfloat16, "needs torch 2.12 on this GPU"),
        ((8, 9), "2.12.1", torch.bfloat16, ""),
        ((9, 0), "2.11.0", torch.bfloat16, ""),
        ((9, 0), "2.13.0", torch.float16, "needs mixed_precision: bf16"),
    ],
)
def test_what_a_gpu_lacks(
    capability: tuple[int, int],
    torch_version: str,
    dtype: torch.dtype,
    lacks: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(torch_version))
    monkeypatch.setattr(base_matmul, "_is_right", lambda device, dtype: True)
    found = base_matmul._lacks_here(torch.device("cuda", 0), dtype)
    assert found.startswith(lacks)
    assert bool(found) == bool(lacks)


def test_a_kernel_that_fails_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> bool:
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED when calling\n`cublasLtMatmul`")

    monkeypatch.setattr(base_matmul, "_is_right", fails)
    found = base_matmul._lacks_here(CPU, torch.bfloat16)
    assert found == "fails on this GPU (CUBLAS_STATUS_NOT_SUPPORTED when calling)"
