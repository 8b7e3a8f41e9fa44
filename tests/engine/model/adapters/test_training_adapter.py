"""A frozen LoRA that takes part in training alone."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import families
from engine.diffusion.random_numbers import keyed_generator
from engine.model.adapters import lora
from engine.model.adapters.training_adapter import (
    TrainingAdapter,
    add_training_adapter,
    without_training_adapter,
)
from engine.model.packing import Packing
from engine.model.precision import narrow_inputs
from engine.model.quantized_linear import replace_layers
from engine.ranks.telemetry import Telemetry
from engine.run_job import run_job
from engine.toy.components.weights import one_thread
from jobs.errors import UserError
from jobs.run.rundir import RunDir
from jobs.spec.job_spec import JobSpec
from tests.support.engine.parity import OPTIMIZERS, TOLERANCE
from tests.support.engine.toy_jobs import ALONE, toy_spec
from tests.support.engine.training_adapters import merge_training_adapter, write_training_adapter

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FLUX = families.load("flux")
CPU = torch.device("cpu")
RANK = 2
WIDTH = 64


class Block(torch.nn.Module):
    """The names of a block of FLUX.1; only its query is trained."""

    def __init__(self) -> None:
        super().__init__()
        block, attn = torch.nn.Module(), torch.nn.Module()
        for name in ("to_q", "to_k", "to_v"):
            setattr(attn, name, torch.nn.Linear(WIDTH, WIDTH))
        block.attn = attn
        self.transformer_blocks = torch.nn.ModuleList([block])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attn: Any = self.transformer_blocks[0].attn
        return attn.to_q(x) * attn.to_k(x) + attn.to_v(x)


def filled(model: torch.nn.Module) -> torch.nn.Module:
    """The same numbers in every parameter, whatever wraps it."""
    names = [*dict(model.named_parameters())]
    with torch.no_grad():
        for number, name in enumerate(sorted(n.replace(".base_layer.", ".") for n in names)):
            actual = name if name in names else name.replace("to_q.", "to_q.base_layer.")
            draw = keyed_generator(number)
            parameter = model.get_parameter(actual)
            parameter.copy_(torch.randn(parameter.shape, generator=draw) / 8)
    return model


def spec_of(file: Path | None = None, **values: Any) -> JobSpec:
    own = {"lora_rank": 4, "mixed_precision": "no", "training_adapter": file and str(file)}
    return JobSpec(**own | values)


def adapted(spec: JobSpec) -> torch.nn.Module:
    model = Block()
    lora.add_lora(model, spec, r".*to_q")
    return filled(model)


def qkv(fused: bool = True) -> dict[str, torch.Tensor]:
    """A file's tensors for all three layers: as kohya's scripts name them, or as diffusers does."""
    draw = keyed_generator(7)
    down, up = (
        torch.randn(RANK, WIDTH, generator=draw),
        torch.randn(3 * WIDTH, RANK, generator=draw),
    )
    if fused:
        key = "lora_unet_double_blocks_0_img_attn_qkv"
        parts = {f"{key}.lora_down.weight": down, f"{key}.lora_up.weight": up}
        return parts | {f"{key}.alpha": torch.tensor(0.5)}
    scaled = (0.5 / RANK * up).chunk(3)
    return {
        f"transformer.transformer_blocks.0.attn.to_{name}.lora_{part}.weight": tensor.contiguous()
        for name, ups in zip("qkv", scaled, strict=True)
        for part, tensor in (("A", down), ("B", ups))
    }


def written(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    file = tmp_path / "a.safetensors"
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, file)
    return file


def merged(spec: JobSpec) -> torch.nn.Module:
    """The model with the file's product in its weights."""
    model = adapted(spec)
    tensors = qkv()
    down, up, _ = tensors.values()
    deltas = (0.25 * up @ down).chunk(3)
    attn: Any = model.transformer_blocks[0].attn  # type: ignore[union-attr, index]
    layers = (attn.to_q.base_layer, attn.to_k, attn.to_v)
    with torch.no_grad():
        for layer, delta in zip(layers, deltas, strict=True):
            layer.weight += delta
    return model


def results(model: torch.nn.Module, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """An output, and the gradients of the input and of what is trained."""
    x = torch.randn(2, 5, WIDTH, generator=keyed_generator(1)).requires_grad_()
    out = model(x.to(dtype))
    out.float().square().mean().backward()
    trained = [p.grad for p in lora.lora_parameters(model).values()]
    return [tensor.float() for tensor in (out.detach(), x.grad, *trained) if tensor is not None]


@pytest.mark.parametrize("variant", ["lora", "rslora"])
@pytest.mark.parametrize("fused", [True, False])
def test_it_computes_what_a_merged_base_does(tmp_path: Path, fused: bool, variant: str) -> None:
    spec = spec_of(written(tmp_path, qkv(fused)), lora_variant=variant)
    model = adapted(spec)
    note = add_training_adapter(model, spec, FLUX, CPU)
    assert note.startswith("3 layers have the training adapter")
    mine, expected = results(model), results(merged(spec))
    assert len(mine) == len(expected) == 4
    for value, other in zip(mine, expected, strict=True):
        assert torch.allclose(value, other, rtol=1e-4, atol=1e-5)


def test_without_it_the_base_is_what_it_was(tmp_path: Path) -> None:
    """Bit for bit, and with it nothing more is trained or saved than before."""
    spec = spec_of(written(tmp_path, qkv()))
    plain, model = adapted(spec), adapted(spec)
    add_training_adapter(model, spec, FLUX, CPU)
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert dict(model.named_parameters()).keys() == dict(plain.named_parameters()).keys()
    with without_training_adapter(model):
        off = results(model)
    assert all(map(torch.equal, off, results(plain)))
    model.zero_grad()
    assert not torch.equal(results(model)[0], off[0])


def test_compiled_blocks_see_that_it_is_off(tmp_path: Path) -> None:
    spec = spec_of(written(tmp_path, qkv()), torch_compile=True)
    plain, model = adapted(spec), adapted(spec)
    add_training_adapter(model, spec, FLUX, CPU)
    on = results(model)[0]
    with without_training_adapter(model):
        off = results(model)[0]
    assert torch.equal(off, results(plain)[0])
    model.compile(backend="eager")
    for _ in range(2):
        assert torch.equal(results(model)[0], on)
        with without_training_adapter(model):
            assert torch.equal(results(model)[0], off)


@pytest.mark.parametrize("scheme", ["none", "int8", "nf4"])
def test_it_is_beside_a_base_in_half_precision_or_packed(tmp_path: Path, scheme: str) -> None:
    """What it adds is the same, whatever precision the base is rounded to."""
    spec = spec_of(written(tmp_path, qkv()), mixed_precision="bf16", base_precision=scheme)
    model = filled(Block()).bfloat16()
    if scheme != "none":
        packing = Packing(spec.base_precision)
        names = [f"transformer_blocks.0.attn.to_{part}" for part in "qkv"]
        for name in names:
            weight = model.get_submodule(name).weight
            packed, scale = packing.pack(weight.detach())
            replace_layers(model, {name: packing}, torch.bfloat16)
            layer: Any = model.get_submodule(name)
            with torch.no_grad():
                layer.weight.copy_(packed)
                if scale is not None:
                    layer.weight_scale.copy_(scale)
    lora.add_lora(model, spec, r".*to_q")
    lora.initialise(model, 0)
    narrow_inputs(model, torch.bfloat16)
    add_training_adapter(model, spec, FLUX, CPU)
    present = [module for module in model.modules() if isinstance(module, TrainingAdapter)]
    assert {buffer.dtype for module in present for buffer in module.buffers()} == {torch.bfloat16}
    layer = model.get_submodule("transformer_blocks.0.attn.to_q")
    x = torch.randn(3, WIDTH, generator=keyed_generator(2)).bfloat16()
    with torch.no_grad():
        on = layer(x)
        with without_training_adapter(model):
            off = layer(x)
    down, up, _ = qkv().values()
    expected = x.float() @ (0.25 * up[:WIDTH] @ down).T
    assert on.dtype is torch.bfloat16
    assert torch.allclose(
        (on.float() - off.float()), expected, atol=0.04 * float(expected.abs().max())
    )


KEY = "transformer.transformer_blocks.0.attn.to_q"
REFUSED: list[tuple[dict[str, tuple[int, ...]], str]] = [
    (
        {f"{KEY}x.lora_A.weight": (2, WIDTH), f"{KEY}x.lora_B.weight": (WIDTH, 2)},
        "it adapts .*to_qx",
    ),
    ({f"{KEY}.lora_A.weight": (2, 5)}, "to_q has another size"),
    ({f"{KEY}.lora_B.weight": (7, 2)}, "to_q has another size"),
    ({f"{KEY}.lora_magnitude_vector": (WIDTH,)}, "to_q is no plain LoRA"),
    ({f"{KEY}.diff": (3,)}, "diff is no part of a LoRA"),
]


@pytest.mark.parametrize(("change", "why"), REFUSED, ids=[why for _, why in REFUSED])
def test_what_is_no_adapter_of_the_model_is_refused(
    tmp_path: Path, change: dict[str, tuple[int, ...]], why: str
) -> None:
    tensors = qkv(fused=False) | {name: torch.ones(size) for name, size in change.items()}
    spec = spec_of(written(tmp_path, tensors))
    with pytest.raises(UserError, match=f"^training_adapter: cannot use a.safetensors: .*{why}"):
        add_training_adapter(adapted(spec), spec, FLUX, CPU)


def test_one_that_is_gone_is_refused_and_full_training_needs_none(tmp_path: Path) -> None:
    spec = spec_of(tmp_path / "gone.safetensors")
    with pytest.raises(UserError, match="training_adapter: there is no LoRA at"):
        add_training_adapter(adapted(spec), spec, FLUX, CPU)
    full = spec.model_copy(update={"model_type": "full"})
    assert add_training_adapter(Block(), full, FLUX, CPU) == ""


# -- jobs ----------------------------------------------------------------------------------


@pytest.fixture
def train(toy: Path, toy_cache: Path, tmp_path: Path) -> Callable[..., tuple[RunDir, list[float]]]:
    def run(name: str, **changes: Any) -> tuple[RunDir, list[float]]:
        """A job on one rank, and its losses."""
        run_dir = RunDir(tmp_path / name)
        run_dir.create()
        telemetry = Telemetry(run_dir, 0)
        settings = OPTIMIZERS["sgd"] | {"cache_dir": str(toy_cache), "max_grad_norm": 0.05}
        spec = toy_spec(toy, **settings | changes)
        with one_thread():
            run_job(spec, run_dir, ALONE, telemetry)
        telemetry.close()
        events = [json.loads(line) for line in run_dir.events.read_text().splitlines()]
        return run_dir, [event["loss"] for event in events if event["kind"] == "step"]

    return run


def exported(run_dir: RunDir) -> dict[str, torch.Tensor]:
    return load_file(run_dir.root / "export" / "pytorch_lora_weights.safetensors")


def test_a_job_trains_as_on_a_merged_base_and_samples_as_without(
    toy: Path, tmp_path: Path, train: Callable[..., tuple[RunDir, list[float]]]
) -> None:
    file = write_training_adapter(toy)
    sampled = {
        "validation_prompts": ["a red circle"],
        "validation_num_inference_steps": 1,
        "validation_on_startup": True,
    }
    shutil.copytree(toy / "model", tmp_path / "merged")
    merge_training_adapter(tmp_path / "merged", file)
    mine, losses = train("mine", training_adapter=str(file), **sampled)
    other, expected = train("merged", pretrained_model_name_or_path=str(tmp_path / "merged"))
    plain, without = train("plain", **sampled)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses != pytest.approx(without, rel=1e-3)
    trained, like = exported(mine), exported(other)
    assert trained.keys() == like.keys() == exported(plain).keys()
    for name, tensor in trained.items():
        difference = (tensor - like[name]).abs().max()
        assert difference <= 10 * TOLERANCE * like[name].abs().max(), name
    first, last = ("step-0/00.png", "step-4/00.png")
    assert (mine.samples / first).read_bytes() == (plain.samples / first).read_bytes()
    assert (mine.samples / last).read_bytes() != (mine.samples / first).read_bytes()


def test_a_job_resumes_with_it_bit_for_bit(
    toy: Path, train: Callable[..., tuple[RunDir, list[float]]]
) -> None:
    adapter = {"training_adapter": str(write_training_adapter(toy)), "checkpointing_steps": 2}
    whole, losses = train("whole", **adapter)
    again, rest = train("again", **adapter, resume_from_checkpoint=str(whole.checkpoint(2)))
    assert rest == losses[2:]
    first, second = exported(whole), exported(again)
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
