"""Compiled blocks: how many graphs a job makes, what they compute, what is said at the limit."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

import pytest
import torch
import torch._dynamo
from PIL import Image
from torch._dynamo.utils import counters

from engine.families import load
from engine.model import compiled
from engine.model.activation_checkpointing import checkpoint_activations
from engine.model.adapters.lora import add_lora, lora_parameters
from engine.model.compiled import compile_blocks, uncompiled
from engine.model.packing import round_rows
from engine.ranks.telemetry import Telemetry
from engine.toy.families.flux import FluxSizes, build_transformer
from jobs.run.eventlog import EventLog
from jobs.run.rundir import RunDir
from jobs.spec.job_spec import JobSpec
from tests.support.engine.ranks.compiled import train
from tests.support.engine.toy_jobs import start_ranks, toy_values
from tests.support.engine.toys import write_small_toy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COMPILED: Final = {"torch_compile": True, "torch_compile_backend": "eager"}
SELECTIVE: Final = {"gradient_checkpointing": True, "gradient_checkpointing_policy": "selective"}
# Adapters are much of what is traced: in each block one layer has one, and the others none.
ONE_LAYER: Final = {"lora_target_modules": [r".*attn\.to_q"]}
SIDES: Final = ((8, 8), (8, 12), (12, 8), (4, 6), (10, 6))


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    limits = {"recompile_limit": 8, "accumulated_recompile_limit": 256}
    with torch._dynamo.config.patch(limits):
        yield
    torch._dynamo.reset()


def adapted(**values: Any) -> tuple[Any, JobSpec]:
    """FLUX.1's toy with an adapter that has learned something, and its job."""
    spec = JobSpec(lora_rank=2, mixed_precision="no", **values)
    model = build_transformer(FluxSizes(layers=2, single_layers=2), seed=0).requires_grad_(False)
    if spec.gradient_checkpointing:
        checkpoint_activations(model, spec)
    add_lora(model, spec, load("flux").LORA_TARGETS)
    drawn = torch.Generator().manual_seed(1)
    for parameter in lora_parameters(model).values():
        torch.nn.init.normal_(parameter, std=0.1, generator=drawn)
    return model.train(), spec


def step(model: Any, height: int = 8, width: int = 8, batch: int = 1) -> list[torch.Tensor]:
    """The velocity, and without `no_grad` the adapter's gradients."""
    drawn = torch.Generator().manual_seed(2)
    noisy = torch.randn(batch, 16, height, width, generator=drawn)
    config = model.config
    condition = {
        "prompt_embeds": torch.randn(batch, 8, config.joint_attention_dim, generator=drawn),
        "pooled_prompt_embeds": torch.randn(batch, config.pooled_projection_dim, generator=drawn),
    }
    velocity = load("flux").predict(model, noisy, torch.full((batch,), 0.5), condition, 1.0)
    if not torch.is_grad_enabled():
        return [velocity]
    model.zero_grad()
    velocity.square().mean().backward()
    gradients = [parameter.grad for parameter in lora_parameters(model).values()]
    assert noisy.grad is None
    return [velocity.detach(), *gradients]


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.parametrize(
    ("sizes", "values"),
    [
        (SIDES, ONE_LAYER),
        (SIDES[:1], {"gradient_checkpointing": True} | ONE_LAYER),
        (SIDES[:1], SELECTIVE | ONE_LAYER),  # several sizes below, in the job that trains all
    ],
    ids=["five sizes", "checkpointing", "selective"],
)
def test_a_step_makes_few_graphs(
    sizes: tuple[tuple[int, int], ...], values: dict[str, Any]
) -> None:
    said: list[str] = []
    model, spec = adapted(**COMPILED, **values)
    compile_blocks(model, spec, said.append)
    for number, size in enumerate(sizes):
        step(model, *size)
        # One for each class of blocks, and one for all other sizes.
        assert graphs() == (4 if number else 2)
    expected = graphs()
    with torch.no_grad(), uncompiled(spec):  # samples and validation
        step(model.eval(), 14, 6)
        step(model, batch=2)
    model.train()
    for size in sizes:
        step(model, *size)
    assert graphs() == expected
    assert not counters["graph_break"]
    assert not said


@pytest.mark.parametrize(
    ("batch", "values"),
    [
        (1, {}),
        pytest.param(2, {"gradient_checkpointing": True}, marks=pytest.mark.slow),
    ],
    ids=["", "recomputed"],
)
def test_a_compiled_model_learns_the_same(batch: int, values: dict[str, Any]) -> None:
    plain, _ = adapted(**COMPILED, **values)  # with peft's layers, which are compiled
    model, spec = adapted(**COMPILED, **values)
    compile_blocks(model, spec)
    for size in SIDES[:2]:
        for one, other in zip(step(plain, *size, batch), step(model, *size, batch), strict=True):
            assert torch.equal(one, other)


@pytest.mark.slow
def test_blocks_in_front_of_all_that_is_trained_need_no_gradient() -> None:
    """Backward ends where it would without compilation."""
    model, spec = adapted(**COMPILED)
    model.transformer_blocks[0].requires_grad_(False)
    compile_blocks(model, spec)
    needs: list[bool] = []
    for block in model.transformer_blocks:
        block.register_forward_hook(lambda _, __, out: needs.extend(x.requires_grad for x in out))
    step(model)
    assert needs == [False, False, True, True]


class _InPlace(torch.nn.Module):
    """A block that changes its input, which is what the one before it keeps for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(4))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states.add_(1).mul(self.factor).exp()


def test_a_block_that_changes_its_input_is_refused_as_without_compilation() -> None:
    blocks = torch.nn.ModuleList([_InPlace(), _InPlace()])
    compiled._take_alike(blocks)
    hidden = torch.zeros(1, 4)
    for block in blocks:
        hidden = block(hidden)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        hidden.sum().backward()


def test_a_limit_that_is_reached_is_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    model, spec = adapted(**COMPILED, **ONE_LAYER)
    with (
        patch.object(compiled, "_GRAPHS", 1),
        torch._dynamo.config.patch(recompile_limit=1, automatic_dynamic_shapes=False),
    ):
        compile_blocks(model, spec, said.append)
        torch.compiler.config.recompile_limit = 1
        for size in SIDES[:3]:
            step(model, *size)
    assert len(said) == 2  # a class of blocks each
    assert all("runs uncompiled" in text and "transformer_flux.py" in text for text in said)
    assert all("has made 1 graphs" in text for text in said)


def test_the_limits_hold_in_each_thread_that_computes() -> None:
    """On a GPU, blocks are recomputed in a thread of autograd's."""
    model, spec = adapted(**COMPILED)
    compile_blocks(model, spec)
    limits: list[int] = []

    def compute() -> None:
        with torch.no_grad(), uncompiled(spec):  # graphs are no matter here
            step(model)
        limits.extend(getattr(torch.compiler.config, limit) for limit in compiled._LIMITS)

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert limits == [2 * compiled._GRAPHS, 256]


class _Rounded(torch.autograd.Function):
    """What a packed layer's forward does with its input, in it, before a product in fp8."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        rounded, scale = round_rows(x.reshape(-1, x.shape[-1]))
        return (rounded.to(x.dtype) * scale).view(x.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def test_dynamo_cannot_trace_a_product_in_fp8_still() -> None:
    """Once it can, `scaled_product` need not be taken whole."""
    twice = torch.compile(
        lambda x: _Rounded.apply(x) + _Rounded.apply(x), backend="eager", dynamic=True
    )
    with pytest.raises(AssertionError, match="lift_tracked_freevar_to_input"):
        twice(torch.randn(2, 3, 16, requires_grad=True))


def test_what_any_rank_says_is_an_event_once(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.create()
    main, other = Telemetry(run_dir, 0), Telemetry(run_dir, 1)
    try:
        other.pass_on("slow")
        main._emit_warnings()
        main.pass_on("slow")
        other.pass_on("slow")
        main._emit_warnings()
    finally:
        main.close()
        other.close()
    assert EventLog(run_dir.events).read_all().warnings == ["slow"]


# Buckets, samples and validation together: what used up the limit.
ALL: Final = {
    "validation_prompts": ["a", {"prompt": "b", "resolution": [96, 64]}],
    "validation_steps": 3,
    "validation_num_inference_steps": 1,
    "validation_fraction": 0.25,
    "validation_on_startup": True,
}
SCALED: Final = {"base_precision": "fp8_scaled", "base_matmul": "scaled"} | ONE_LAYER
BASES: Final[dict[str, dict[str, Any]]] = {
    "bf16": {},
    "fp8": SCALED,
    "nf4": {"base_precision": "nf4"} | ONE_LAYER,
}
# No graph fewer is possible, so what is tried together adds none by itself either.
ALONE: Final[dict[str, dict[str, Any]]] = {
    **{name: values | ALL for name, values in BASES.items()},
    "int8, swapped, without samples": {"base_precision": "int8", "swap_blocks": 2} | ONE_LAYER,
}
SHARDED: Final[dict[str, dict[str, Any]]] = {
    # Hooks unshard outside of what is compiled, whatever the packing and the adapters.
    **{name: BASES[name] | ALL | ONE_LAYER | {"strategy": "fsdp2"} for name in ("bf16", "fp8")},
    "full": ALL | SELECTIVE | {"strategy": "fsdp2", "model_type": "full"},
}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_job_makes_few_graphs(ranks: int, tmp_path: Path) -> None:
    """However many buckets, samples and measurements there are, and however its base is packed."""
    toy = tmp_path / "toy"
    write_small_toy(toy, pictures=12)
    pictures = sorted((toy / "data").glob("*.png"))
    assert len(pictures) == 12
    for number, path in enumerate(pictures):
        Image.open(path).resize([(64, 64), (96, 48), (48, 96)][number % 3]).save(path)
    cases = {
        name: toy_values(toy, num_processes=ranks, max_train_steps=6, mixed_precision="bf16")
        | COMPILED
        | values
        for name, values in (ALONE if ranks == 1 else SHARDED).items()
    }
    start_ranks(train, ranks, cases, str(tmp_path)).join()
    for rank in range(ranks):
        counts = json.loads((tmp_path / f"graphs-{ranks}-{rank}.json").read_text())
        # Two classes of blocks, each in its first size and in any other.
        assert counts == {name: [4, 0] for name in cases}


@pytest.mark.slow
def test_inductor_computes_the_same() -> None:
    """With one class of blocks: a C++ compiler takes seconds for each graph."""
    plain, _ = adapted(torch_compile=True)
    model, spec = adapted(torch_compile=True)
    for each in (plain, model):
        del each.transformer_blocks[:]
    compile_blocks(model, spec)
    for _ in range(2):
        for one, other in zip(step(plain), step(model), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
        with torch.no_grad(), uncompiled(spec):  # between steps
            torch.testing.assert_close(step(model), step(plain), rtol=1e-3, atol=1e-5)
    assert graphs() == 1
