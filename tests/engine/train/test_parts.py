"""The small parts of a step on one rank: average, peaks, loss scale, kernels, checkpoints."""

from __future__ import annotations

import mmap
import sys
from collections import Counter
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from diffusers import FluxTransformer2DModel, ModelMixin
from torch.nn.attention import current_flash_attention_impl, restore_flash_attention_impl

from engine import checkpoint
from engine.model.activation_checkpointing import checkpoint_activations
from engine.model.compiled import compile_blocks
from engine.model.kernels import activate_flash3, choose_attention, choose_backends
from engine.ranks.mesh import build_mesh
from engine.ranks.telemetry import Peaks
from engine.ranks.world import World
from engine.run_job import start_training
from jobs.errors import UserError
from jobs.run.rundir import RunDir
from jobs.spec.job_spec import JobSpec
from tests.support.engine.toy_jobs import Line, parameter, toy_spec
from tests.support.engine.toy_jobs import save_checkpoint as save

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from engine.train.train_state import TrainState

ALONE = World(rank=0, size=1, device=torch.device("cpu"), strategy="single", token="t")


# -- peaks of memory ---------------------------------------------------------------------------


def test_each_phase_has_a_peak_of_its_own() -> None:
    peaks = Peaks(torch.device("cpu"))
    # Of the system: what an allocator is given back, it may keep.
    with peaks.phase("large"), mmap.mmap(-1, 120 << 20) as held:
        held.write(b"x" * len(held))
    with peaks.phase("small"):
        pass
    assert peaks.measure == "rss"
    assert peaks.phases["large"] - peaks.phases["small"] > 100 << 20
    with peaks.phase("large"):
        pass
    assert peaks.phases["large"] - peaks.phases["small"] > 100 << 20, "the largest run counts"


# -- what a checkpoint holds beside weights ----------------------------------------------------


def trained(toy: Path, **changes: Any) -> tuple[TrainState, JobSpec]:
    spec = toy_spec(toy, use_ema=True, mixed_precision="fp16", **changes)
    model = Line()
    training = start_training(spec, model, ALONE)
    for _ in range(2):
        model(torch.ones(1)).square().sum().backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.step += 1
        assert training.ema is not None
        training.ema.update(training.step)
    assert training.scaler is not None
    training.scaler.scale(torch.ones(()))
    training.scaler.update(1024.0)
    return training, spec


def test_average_and_loss_scale_are_saved_and_restored(toy: Path, tmp_path: Path) -> None:
    training, spec = trained(toy)
    path = save(training, spec, RunDir(tmp_path))
    resumed = start_training(spec, Line(), ALONE)
    checkpoint.load(resumed, path, ALONE)
    assert resumed.ema is not None
    assert training.ema is not None
    assert torch.equal(resumed.ema.shadow["weight"], training.ema.shadow["weight"])
    assert resumed.ema.shadow["weight"].item() != resumed.trained()["weight"].item()
    assert resumed.scaler is not None
    assert resumed.scaler.get_scale() == 1024.0


def test_a_layer_that_the_model_never_uses_keeps_no_checkpoint_from_loading(
    toy: Path, tmp_path: Path
) -> None:
    """It has no gradient, and so no optimizer state of its own; Qwen-Image's LoRA has one."""
    spec = toy_spec(toy)
    straight = start_training(spec, with_idle(), ALONE)

    def step(training: TrainState) -> None:
        training.model(torch.ones(1)).square().sum().backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.step += 1

    step(straight)
    resumed = start_training(spec, with_idle(), ALONE)
    checkpoint.load(resumed, save(straight, spec, RunDir(tmp_path)), ALONE)
    for training in (straight, resumed):
        step(training)
    for mine, theirs in zip(
        resumed.optimizer.state.values(), straight.optimizer.state.values(), strict=True
    ):
        assert {n: float(v) for n, v in mine.items()} == {n: float(v) for n, v in theirs.items()}
    found = {name: p.item() for name, p in resumed.trained().items()}
    assert found == {name: p.item() for name, p in straight.trained().items()}
    assert found["idle"] == 1.0


def with_idle() -> torch.nn.Module:
    model = Line()
    model.idle = parameter(1.0)
    return model


def test_an_average_wanted_only_now_begins_with_the_resumed_weights(
    toy: Path, tmp_path: Path
) -> None:
    training, spec = trained(toy)
    training.ema = None
    path = save(training, spec, RunDir(tmp_path))
    resumed = start_training(spec, Line(), ALONE)
    checkpoint.load(resumed, path, ALONE)
    assert resumed.ema is not None
    assert resumed.ema.shadow["weight"].item() == training.trained()["weight"].item()


# -- meshes --------------------------------------------------------------------------------------


def test_a_strategy_that_shards_nothing_has_no_mesh() -> None:
    for strategy in ("single", "ddp"):
        assert build_mesh(JobSpec(), strategy, 4, "cpu") is None


# -- kernels -----------------------------------------------------------------------------------


@pytest.fixture
def flux(toy: Path) -> FluxTransformer2DModel:
    return FluxTransformer2DModel.from_pretrained(toy / "model" / "transformer")


@pytest.fixture
def _switches() -> Iterator[None]:
    precision = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.enable_cudnn_sdp(True)


@pytest.mark.usefixtures("_switches")
def test_switches_are_those_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    choose_backends(JobSpec(allow_tf32=False, deterministic=True))
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.are_deterministic_algorithms_enabled()
    choose_backends(JobSpec(attention_backend="cudnn"))
    assert torch.backends.cuda.cudnn_sdp_enabled()
    choose_backends(JobSpec())
    assert torch.get_float32_matmul_precision() == "high"
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cuda.cudnn_sdp_enabled(), "torch would prefer it on Hopper GPUs"


def test_attention_uses_the_kernel_of_the_job(flux: FluxTransformer2DModel) -> None:
    choose_attention(flux, JobSpec())
    assert flux.transformer_blocks[0].attn.processor._attention_backend is None
    choose_attention(flux, JobSpec(attention_backend="math"))
    chosen = flux.transformer_blocks[0].attn.processor._attention_backend
    assert chosen == "_native_math"


@pytest.mark.usefixtures("_switches")
def test_flash_attention_3_is_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = (9, 0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda rank: capability)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda rank: "NVIDIA A100")
    spec = JobSpec(attention_backend="flash3")
    choose_backends(spec)
    capability = (8, 0)
    with pytest.raises(UserError, match=r"runs on Hopper GPUs .*, not on NVIDIA A100"):
        choose_backends(spec)


def test_flash_attention_3_takes_the_place_of_torchs_flash_attention(
    flux: FluxTransformer2DModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot compute here: a package that has its operations is enough to be activated."""
    spec = JobSpec(attention_backend="flash3")
    choose_attention(flux, spec)
    assert flux.transformer_blocks[0].attn.processor._attention_backend == "_native_flash"
    with pytest.raises(UserError, match=r"flash3 cannot be used .*flash_attn_interface"):
        activate_flash3(spec)
    library = torch.library.Library("flash_attn_3", "DEF")
    library.define("fwd(Tensor q) -> Tensor")
    library.define("bwd(Tensor q) -> Tensor")
    monkeypatch.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))
    activate_flash3(JobSpec(attention_backend="flash"))
    assert current_flash_attention_impl() is None
    activate_flash3(spec)
    try:
        assert current_flash_attention_impl() == "FA3"
    finally:
        restore_flash_attention_impl()


def test_one_models_attention_is_not_everybodys(flux: FluxTransformer2DModel) -> None:
    """Diffusers' own call sets the default of the process, which text encoders and VAE have."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as registry

    choose_attention(flux, JobSpec(attention_backend="math"))
    assert registry.get_active_backend()[0] != "_native_math"


def test_a_model_without_such_a_choice_is_refused() -> None:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=8,
        block_out_channels=(32,),
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
    )
    with pytest.raises(UserError, match="does not support choosing a kernel"):
        choose_attention(model, JobSpec(attention_backend="math"))
    with pytest.raises(UserError, match="torch_compile"):
        compile_blocks(model, JobSpec(torch_compile=True))


def test_only_repeated_blocks_are_compiled(flux: FluxTransformer2DModel) -> None:
    compile_blocks(flux, JobSpec())
    assert "forward" not in vars(flux.transformer_blocks[0])
    compile_blocks(flux, JobSpec(torch_compile=True, torch_compile_backend="eager"))
    compiled = [m for m in flux.modules() if "forward" in vars(m)]
    assert compiled == [*flux.transformer_blocks, *flux.single_transformer_blocks]


def saved_bytes(model: Any, values: dict[str, Any]) -> int:
    """Bytes that autograd keeps between forward and backward, each storage once."""
    from engine.families import load

    family = load("flux")

    draw = torch.Generator().manual_seed(0)
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    if values:
        checkpoint_activations(model, JobSpec(**values))
        compile_blocks(model, JobSpec(**values))
    noisy = torch.randn(1, 16, 16, 16, generator=draw)
    condition = {
        "prompt_embeds": torch.randn(1, 16, model.config.joint_attention_dim, generator=draw),
        "pooled_prompt_embeds": torch.randn(1, model.config.pooled_projection_dim, generator=draw),
    }
    model.train()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = family.predict(model, noisy, torch.tensor([0.5]), condition, 1.0)
    out.sum().backward()
    return sum(kept.values())


def test_checkpointing_keeps_less_for_backward(flux: FluxTransformer2DModel) -> None:
    everything = saved_bytes(flux, {})
    full = saved_bytes(flux, {"gradient_checkpointing": True})
    assert full < everything / 2


def test_every_nth_block_of_a_kind_is_recomputed(flux: FluxTransformer2DModel) -> None:
    ran: list[torch.nn.Module] = []
    blocks = [*flux.transformer_blocks, *flux.single_transformer_blocks]
    for block in blocks:
        block.register_forward_pre_hook(lambda block, *_: ran.append(block))
    saved_bytes(flux, {"gradient_checkpointing": True, "gradient_checkpointing_interval": 2})
    again = [block for block, times in Counter(ran).items() if times == 2]
    assert again == [*flux.transformer_blocks[::2], *flux.single_transformer_blocks[::2]]
    assert len(again) < len(blocks)


@pytest.mark.slow
def test_a_selective_policy_holds_in_compiled_blocks(flux: FluxTransformer2DModel) -> None:
    """It keeps more than a full one and less than none, and changes no gradient."""
    # What inductor keeps, without its kernels, which take a compiler many seconds.
    torch._dynamo.reset()
    del flux.transformer_blocks[:]  # one kind of block, and one compilation
    everything = saved_bytes(flux, {})
    expected = [weight.grad for weight in flux.parameters()]
    flux.zero_grad()
    full = saved_bytes(flux, {"gradient_checkpointing": True})
    flux.zero_grad()
    selective = saved_bytes(
        flux,
        {
            "gradient_checkpointing": True,
            "gradient_checkpointing_policy": "selective",
            "torch_compile": True,
            "torch_compile_backend": "aot_eager_decomp_partition",
        },
    )
    assert full < selective < everything
    for weight, gradient in zip(flux.parameters(), expected, strict=True):
        limit = 1e-4 * float(gradient.abs().max())
        torch.testing.assert_close(weight.grad, gradient, rtol=0, atol=limit)


def test_a_model_that_cannot_recompute_is_refused() -> None:
    class Plain(ModelMixin):
        pass

    with pytest.raises(UserError, match="Plain does not support it"):
        checkpoint_activations(Plain(), JobSpec(gradient_checkpointing=True))
