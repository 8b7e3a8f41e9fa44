"""The linear layer with its adapter against peft's: the same numbers, in fewer operations."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from engine.model.activation_checkpointing import _KEPT
from engine.model.adapters.lora import (
    add_lora,
    initialise,
    lora_parameters,
    without_adapter,
)
from engine.model.adapters.lora_layer import LoraConv2d, LoraLinear
from engine.model.precision import narrow_inputs
from jobs.spec.job_spec import JobSpec
from tests.support.engine.adapted_block import Block, X, error, fill


def ours(dtype: torch.dtype = torch.float32, **values: Any) -> torch.nn.Module:
    half = dtype is torch.bfloat16
    spec = JobSpec(
        **{"lora_rank": 4, "lora_alpha": 6, "mixed_precision": "bf16" if half else "no"} | values
    )
    model = Block().to(dtype)
    add_lora(model, spec, r"up|down|conv")
    return fill(model)


def pefts(dtype: torch.dtype = torch.float32, dropout: float = 0.0) -> torch.nn.Module:
    model = Block().to(dtype)
    targets = ["up", "down", "conv"]
    config = LoraConfig(r=4, lora_alpha=6, target_modules=targets, lora_dropout=dropout)
    inject_adapter_in_model(config, model.requires_grad_(False))
    for parameter in lora_parameters(model).values():
        parameter.data = parameter.data.float()
    return fill(model)


def train(model: torch.nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Output and gradients, of the input too."""
    x = x.clone().requires_grad_()
    torch.manual_seed(1)  # for dropout
    out = model(x)
    out.float().square().mean().backward()
    assert x.grad is not None
    gradients = {n: p.grad for n, p in lora_parameters(model).items() if p.grad is not None}
    assert len(gradients) == len(lora_parameters(model)) in (6, 9)
    assert all(gradient.dtype is torch.float32 for gradient in gradients.values())
    return {"out": out.detach(), "x": x.grad} | gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"lora_dropout": 0.5},
        {"lora_variant": "dora"},
        {"lora_variant": "lokr", "lora_rank": 2},
        {"torch_compile": True},
    ],
    ids=str,
)
def test_without_its_adapter_a_model_is_its_base(
    values: dict[str, Any], dtype: torch.dtype
) -> None:
    """To the last bit; and afterwards it is what it was before, and learns."""
    model = ours(dtype, **values)
    base = Block().to(dtype)
    weights = {name.replace(".base_layer", ""): p for name, p in model.named_parameters()}
    base.load_state_dict({name: weights[name] for name in base.state_dict()})
    x = X.to(dtype)
    with torch.no_grad():
        with without_adapter(model):
            assert model(x).equal(base(x))
        assert not model.eval()(x).equal(base(x))
    assert all(parameter.requires_grad for parameter in lora_parameters(model).values())
    model.train()(x).float().square().mean().backward()
    assert all(parameter.grad is not None for parameter in lora_parameters(model).values())


def test_it_computes_and_learns_what_pefts_does() -> None:
    model = ours()
    assert isinstance(model.up, LoraLinear)
    assert isinstance(model.conv, LoraConv2d)
    mine, theirs = train(model, X), train(pefts(), X)
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        assert error(mine[name], value) < 1e-6, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dora_computes_and_learns_what_pefts_does(dtype: torch.dtype) -> None:
    """Peft's makes the whole weights to measure their rows; of a convolution, so do we."""
    model = Block()
    config = LoraConfig(r=4, lora_alpha=6, target_modules=["up", "down", "conv"], use_dora=True)
    inject_adapter_in_model(config, model.requires_grad_(False))
    theirs = train(fill(model), X)
    mine = train(ours(dtype, lora_variant="dora"), X.to(dtype))
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        assert error(mine[name], value) < (2e-6 if dtype is torch.float32 else 0.04), name


def test_dora_begins_without_any_effect() -> None:
    torch.manual_seed(0)
    model = Block()
    with torch.no_grad():
        plain = model(X)
        add_lora(model, JobSpec(lora_variant="dora", mixed_precision="no"), r"up|down|conv")
        initialise(model, 0)
        assert error(model(X), plain) < 1e-6


def test_in_bf16_it_is_no_further_from_fp32_than_pefts_under_autocast() -> None:
    exact = train(pefts(), X)
    mine = train(ours(torch.bfloat16), X.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        theirs = train(pefts(torch.bfloat16), X.bfloat16())
    assert mine["out"].dtype is torch.bfloat16
    for name, value in exact.items():
        assert error(mine[name], value) < 1.2 * error(theirs[name], value) + 1e-3, name


def test_under_autocast_it_is_the_same_as_without() -> None:
    plain = train(ours(torch.bfloat16), X.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        within = train(ours(torch.bfloat16), X.bfloat16())
    for name, value in plain.items():
        assert torch.equal(within[name], value), name


class Casts(TorchDispatchMode):
    """Counts operations that change the precision of something."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


def test_adapters_are_cast_together_and_anew_in_every_forward() -> None:
    model = ours(torch.bfloat16, lora_target_modules=["up", "down"])
    x = X.bfloat16()
    before = model(x)
    with Casts() as casts:
        model(x)
    assert casts.count == 0
    with torch.no_grad():
        model.up.lora_B["default"].weight += 1.0
    assert not torch.equal(model(x), before)


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_recomputation_finds_what_was_computed(policy: str) -> None:
    values = {"gradient_checkpointing": True, "gradient_checkpointing_policy": policy}
    plain = train(ours(torch.bfloat16), X.bfloat16())
    model = ours(torch.bfloat16, **values)
    options: dict[str, Any] = {}
    if policy == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, list(_KEPT))
    inner, forwards = model.forward, []

    def forward(x: torch.Tensor) -> torch.Tensor:
        forwards.append(1)
        return inner(x)

    model.forward = lambda x: checkpoint(forward, x, use_reentrant=False, **options)  # type: ignore[method-assign]
    found = train(model, X.bfloat16())
    assert len(forwards) == 2
    for name, value in plain.items():
        assert torch.equal(found[name], value), name


def test_with_dropout_it_is_pefts_under_autocast() -> None:
    mine = train(ours(torch.bfloat16, lora_dropout=0.5), X.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        theirs = train(pefts(torch.bfloat16, dropout=0.5), X.bfloat16())
    for name, value in theirs.items():
        assert error(mine[name], value) < 0.02, name


def test_compiled_blocks_keep_pefts_layers() -> None:
    assert not isinstance(ours(torch.bfloat16, torch_compile=True).up, LoraLinear)


def test_what_must_be_exact_is_not_cast() -> None:
    given: list[dict[str, Any]] = []

    class Model(torch.nn.Module):
        def forward(
            self, hidden_states: Any, timestep: Any, *, img_ids: Any, encoder_hidden_states: Any
        ) -> None:
            given.append(locals())

    model = Model()
    narrow_inputs(model, torch.bfloat16)
    one = torch.ones(1)
    model([one, one], one, img_ids=one, encoder_hidden_states=one)
    (seen,) = given
    assert [t.dtype for t in seen["hidden_states"]] == [torch.bfloat16] * 2
    assert seen["encoder_hidden_states"].dtype is torch.bfloat16
    assert seen["timestep"] is seen["img_ids"] is one
    with torch.autocast("cpu", torch.bfloat16):
        model(one, one, img_ids=one, encoder_hidden_states=one)
    assert given[1]["hidden_states"] is one, "autocast casts by itself"
