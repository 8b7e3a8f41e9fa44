"""What only a GPU can show. Skipped where there is none."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.families import load
from engine.model import base_matmul, packing
from engine.model.files import weights
from engine.model.packing import Packing, round_rows
from engine.toy import write_toy
from jobs.launch import build_launch, full_environment
from jobs.run.checkpoint_files import find_damage, list_checkpoints
from jobs.run.eventlog import EventLog, read_report
from jobs.run.rundir import RunDir, write_atomic
from jobs.spec.families import FAMILIES
from jobs.spec.file.load import load_spec
from tests.support.engine.toy_jobs import toy_spec, toy_values

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.spec.job_spec import JobSpec
    from jobs.spec.values.value_types import BasePrecision

flux = load("flux")

PATIENCE = 600.0  # seconds; a slow machine under load, not an expectation
WORKSPACES = 2 * 64 * 2**20  # bytes; of cuBLAS and cuBLASLt, on the GPUs that want the most

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


def build(toy: Path, spec: JobSpec) -> torch.nn.Module:
    model, stored = weights.build_on_meta(
        flux.transformer_class(), toy / "model" / "transformer", spec
    )
    weights.materialise(model, torch.device("cuda", 0))
    weights.stream(model, stored)
    return model


def test_weights_arrive_on_the_gpu_as_they_are_in_the_file(toy: Path) -> None:
    stock = flux.transformer_class().from_pretrained(toy / "model" / "transformer")
    expected = stock.state_dict()
    for name, tensor in build(toy, toy_spec(toy, model_type="full")).state_dict().items():
        assert tensor.is_cuda
        assert torch.equal(tensor.cpu(), expected[name]), name


def test_a_bf16_base_is_cast_on_the_way(toy: Path) -> None:
    expected = flux.transformer_class().from_pretrained(toy / "model" / "transformer").state_dict()
    for name, tensor in build(toy, toy_spec(toy, mixed_precision="bf16")).state_dict().items():
        if tensor.is_floating_point():
            assert torch.equal(tensor.cpu(), expected[name].to(tensor.dtype)), name


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9,
    reason="torch prefers cuDNN's attention on Hopper GPUs only",
)
def test_cudnn_attention_has_nan_gradients_still() -> None:
    # See docs/upstream.md. The toy's and FLUX.1's attention at 1024 px, laid out as its blocks do;
    # large ones fail now and then, small ones nearly always.
    draws = torch.Generator("cuda").manual_seed(0)
    for trial in range(60):
        shape = ((1, 192, 4, 32), (1, 320, 4, 32), (2, 32, 4, 32), (1, 4608, 24, 128))[trial % 4]
        used = torch.full((2**28,), math.nan, device="cuda", dtype=torch.bfloat16)
        del used  # what is allocated from here on holds NaN
        q, k, v, gradient = (
            torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=draws).transpose(1, 2)
            for _ in range(4)
        )
        leaves = [x.requires_grad_() for x in (q, k, v)]
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            result = torch.nn.functional.scaled_dot_product_attention(*leaves)
            found = torch.autograd.grad(result, leaves, gradient)
        if not all(torch.isfinite(x).all() for x in found):
            return
    pytest.fail("finite: measure cuDNN's attention again, then let torch choose it")


@pytest.mark.parametrize("rows", [1, 77, 4608])
def test_products_in_fp8_are_those_of_dequantized_weights(rows: int) -> None:
    gpu = torch.device("cuda", 0)
    if lacks := base_matmul._lacks_here(gpu, torch.bfloat16):
        pytest.skip(f"base_matmul: scaled {lacks}")
    generator = torch.Generator(gpu).manual_seed(0)
    x = torch.randn(rows, 3072, device=gpu, generator=generator).bfloat16()
    bias = torch.randn(12288, device=gpu, generator=generator).bfloat16()
    weight = torch.randn(12288, 3072, device=gpu, generator=generator) * 0.02
    for how in (Packing("fp8"), Packing("fp8_scaled")):
        packed, scale = how.pack(weight)
        whole = how.product(x, packed, scale, None, bias).float()
        found = replace(how, scaled=True).product(x, packed, scale, None, bias).float()
        rounded, scale_x = round_rows(x)
        exact = rounded.float() * scale_x
        wanted = exact @ how.unpack(packed, scale, None, torch.float32).t() + bias.float()
        assert (found - wanted).norm() < 0.005 * wanted.norm(), "the same factors"
        assert 0.005 * whole.norm() < (found - whole).norm() < 0.04 * whole.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", ["nf4", "int8", "fp8_scaled"])
def test_weights_are_unpacked_in_one_launch_as_by_torch(
    scheme: BasePrecision, dtype: torch.dtype
) -> None:
    """Bit for bit; of other layouts, and of rows that no vector divides, as well."""
    kernel, why_not = packing.find_kernel(0)
    if kernel is None:
        pytest.skip(f"Triton {why_not}")
    how = Packing(scheme)
    codes = how.code_table(dtype)
    codes = codes if codes is None else codes.cuda()
    generator = torch.Generator("cuda").manual_seed(0)
    for rows, columns in ((1, 64), (77, 3072), (3072, 12288), (5, 1088 if codes is None else 1024)):
        shape, of_scale = how.shapes(rows, columns - (scheme != "nf4"))
        assert of_scale is not None
        packed = torch.randint(0, 256, shape, device="cuda", generator=generator).to(torch.uint8)
        scale = torch.randn(of_scale, device="cuda", generator=generator)
        expected = how.unpack_by_torch(packed, scale, codes, dtype)
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = how.unpack(packed, scale, codes, dtype)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for one in (found, kernel(packed, scale, codes, dtype, scheme)):
            assert torch.equal(one.nan_to_num(1.0), expected.nan_to_num(1.0))


def test_an_fp8_base_trains_with_products_in_fp8(toy: Path, tmp_path: Path) -> None:
    fp8 = {"mixed_precision": "bf16", "base_precision": "fp8_scaled"}
    losses = {}
    for matmul in ("dequantize", "auto"):
        run_dir = run(toy, tmp_path, 1, **fp8, base_matmul=matmul)
        losses[matmul] = [step.loss for step in EventLog(run_dir.events).read_all().steps]
    assert losses["auto"] == pytest.approx(losses["dequantize"], rel=0.05)


def run(toy: Path, root: Path, ranks: int, **changes: Any) -> RunDir:
    """Train on this many GPUs, started as the supervisor starts it: a single rank otherwise."""
    run_dir = RunDir(root / f"run-{len(list(root.iterdir()))}")
    run_dir.create()
    values = toy_values(
        toy,
        device="auto",
        num_processes=ranks,
        max_train_steps=10,
        max_grad_norm=0.05,
        cache_dir=str(root / "cache"),
    )
    spec = load_spec(None, values | changes)
    run_dir.job_file.write_text(yaml.safe_dump(spec.to_dict()))
    gpus = [f"GPU-{torch.cuda.get_device_properties(number).uuid}" for number in range(ranks)]
    launch = build_launch(spec, run_dir, gpus=gpus, run_id=run_dir.root.name)
    write_atomic(run_dir.accelerate_file, yaml.safe_dump(launch.config, sort_keys=False))
    done = subprocess.run(
        launch.command,
        env=full_environment(launch),
        cwd=run_dir.root,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, (run_dir.rank_errors(), done.stderr[-4000:])
    return run_dir


@pytest.mark.parametrize("model_type", ["lora", "full"])
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_one_gpu_trains_and_its_memory_is_recorded(
    toy: Path, tmp_path: Path, model_type: str, precision: str
) -> None:
    run_dir = run(toy, tmp_path, 1, model_type=model_type, mixed_precision=precision)
    steps = EventLog(run_dir.events).read_all().steps
    assert [step.step for step in steps] == list(range(1, 11))
    assert all(math.isfinite(step.loss) for step in steps)
    report = read_report(run_dir)
    assert report.measure == "allocated"
    assert report.peaks["backward"][0] > report.peaks["load"][0] > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_saves_and_samples(tmp_path: Path, family: str) -> None:
    write_toy(tmp_path / "toy", family, pictures=4, size=64)
    (tmp_path / "runs").mkdir()
    run_dir = run(
        tmp_path / "toy",
        tmp_path / "runs",
        1,
        model_family=family,
        max_train_steps=2,
        mixed_precision="bf16",
        validation_prompts=["a red circle"],
        validation_steps=2,
        validation_num_inference_steps=2,
    )
    assert [one.step for one in list_checkpoints(run_dir)] == [2]
    assert list((run_dir.samples / "step-2").iterdir())


@pytest.mark.parametrize("behind", [True, False])
def test_what_is_saved_from_a_gpu_goes_on_there(toy: Path, tmp_path: Path, behind: bool) -> None:
    straight = run(
        toy, tmp_path, 1, model_type="full", checkpointing_steps=3, checkpointing_async=behind
    )
    found = list_checkpoints(straight)
    assert [one.step for one in found] == [3, 6, 9, 10]
    assert [find_damage(one.path) for one in found] == [None] * 4
    resumed = run(
        toy, tmp_path, 1, model_type="full", resume_from_checkpoint=str(straight.checkpoint(6))
    )
    losses, wanted = (
        [step.loss for step in EventLog(one.events).read_all().steps] for one in (resumed, straight)
    )
    assert losses == pytest.approx(wanted[6:], rel=1e-4)


def test_text_encoders_leave_the_gpu(toy: Path, tmp_path: Path) -> None:
    events = run(toy, tmp_path, 1).events.read_text().splitlines()
    (freed,) = [event for line in events if (event := json.loads(line))["kind"] == "freed"]
    assert freed["measure"] == "allocated"
    assert freed["loaded"] >= freed["before"] + freed["held"] > freed["before"]
    # What stays are the workspaces of cuBLAS, which the training uses too.
    assert freed["loaded"] - freed["after"] >= freed["held"]
    assert freed["after"] - freed["before"] <= WORKSPACES


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_sharded_text_encoders_encode_the_same_on_gpus(toy: Path, tmp_path: Path) -> None:
    for name, sharded in (("whole", False), ("sharded", True)):
        root = tmp_path / name
        root.mkdir()
        run(toy, root, 2, strategy="fsdp2", shard_text_encoders=sharded)
    files = [
        {p.name: load_file(p) for p in (tmp_path / name / "cache/text").rglob("*.safetensors")}
        for name in ("whole", "sharded")
    ]
    assert files[0].keys() == files[1].keys()
    for name, tensors in files[0].items():
        for key, tensor in tensors.items():
            assert torch.allclose(tensor, files[1][name][key], atol=1e-4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
@pytest.mark.parametrize(
    "layout",
    [
        {"strategy": "ddp"},
        {"strategy": "fsdp2"},
        {"strategy": "fsdp2", "fsdp_cpu_offload": True},
        {
            "strategy": "fsdp2",
            "context_parallel_size": 2,
            "train_batch_size": 4,
            "context_parallel_comm_strategy": "alltoall",
        },
    ],
    ids=["ddp", "fsdp2", "cpu offload", "alltoall"],
)
def test_two_gpus_train_what_one_would(toy: Path, tmp_path: Path, layout: dict[str, Any]) -> None:
    # One size of pictures, whose 64 tokens two ranks can share.
    for picture in (data := shutil.copytree(toy, tmp_path / "toy") / "data").glob("*.png"):
        Image.open(picture).resize((128, 128)).save(picture)
    common = {
        "model_type": "full",
        "optimizer": "sgd",
        "learning_rate": 2.0,
        "allow_tf32": False,
        "resolution": 128,
        "dataset": str(data),
    }
    # A forward has as many samples on both: the plan of the data is made of forwards.
    forwards = 4 // layout.get("train_batch_size", 2)
    one = run(
        toy,
        tmp_path,
        1,
        **common,
        train_batch_size=4 // forwards,
        gradient_accumulation_steps=forwards,
    )
    two = run(toy, tmp_path, 2, **{"train_batch_size": 2} | common | layout)
    mine, expected = (
        [step.loss for step in EventLog(run_dir.events).read_all().steps] for run_dir in (two, one)
    )
    assert mine == pytest.approx(expected, rel=1e-4)
