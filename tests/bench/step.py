"""`python tests/bench/step.py`: the engine's step against a bare `fully_shard` loop.

Both train the same model on the same batches on two CPU ranks, in one process each, taking turns:
some steps of one, some of the other, so that whatever else the machine does meets both. The bare
loop is what one would write by hand: draw noise, forward, loss, backward, clip, AdamW, and print
the loss. The figure is the median over rounds of the ratio of their times.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from PIL import Image

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT: Final = Path(__file__).resolve().parents[2]
GOAL: Final = 1.03


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden_scale", type=int, default=3, help="width of the toy")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4, help="pictures per rank")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3, help="of each kind in a round")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank_of:
        rank(asked.rank_of, json.loads(os.environ["BENCH"]))
        return
    print(f"{'training':10}{'engine s':>10}{'bare s':>10}{'ratio':>8}   spread of the ratio")
    with tempfile.TemporaryDirectory(prefix="bench-step-") as scratch:
        write_toy(Path(scratch), asked.hidden_scale)
        for model_type in ("full", "lora"):
            report(model_type, measure(model_type, asked, Path(scratch)))


def write_toy(directory: Path, hidden_scale: int) -> None:
    command = [sys.executable, "-m", "engine.toy", str(directory), "--pictures=96", "--size=128"]
    command.append(f"--hidden_scale={hidden_scale}")
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    # Square ones only: all batches have the shape of the one that the bare loop repeats.
    for path in (directory / "data").glob("*.png"):
        with Image.open(path) as picture:
            square = picture.width == picture.height
        if not square:
            path.unlink()


def measure(model_type: str, asked: argparse.Namespace, scratch: Path) -> dict[str, list[float]]:
    """Seconds per step of both, a number for each round."""
    results = scratch / f"{model_type}.json"
    settings = {
        "model_type": model_type,
        "batch": asked.batch,
        "rounds": asked.rounds,
        "steps": asked.steps,
        "device": asked.device,
        "ranks": asked.ranks,
        "toy": str(scratch),
    }
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "BENCH": json.dumps(settings),
    }
    if asked.device == "cpu":
        environment |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={asked.ranks}", __file__, f"--rank-of={results}"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, cwd=scratch
    )
    if done.returncode:
        sys.exit(done.stderr[-4000:])
    found: dict[str, list[float]] = json.loads(results.read_text())
    return found


def report(model_type: str, seconds: dict[str, list[float]]) -> None:
    ratios = [e / b for e, b in zip(seconds["engine"], seconds["bare"], strict=True)]
    middle = statistics.median(ratios)
    low, _, high = statistics.quantiles(ratios, n=4)
    engine, bare = (statistics.median(seconds[name]) for name in ("engine", "bare"))
    verdict = "" if middle <= GOAL else f"   more than {GOAL}"
    spread = f"{low:.3f} to {high:.3f}"
    print(f"{model_type:10}{engine:10.4f}{bare:10.4f}{middle:8.3f}   {spread}{verdict}", flush=True)


# -- on the ranks ------------------------------------------------------------------------------


def rank(results: Path, settings: dict[str, Any]) -> None:
    """Time both on this rank; rank 0 writes what it found."""
    import torch

    from engine.ranks.world import leave_world, start_world
    from jobs.spec.file.load import load_spec

    toy = Path(settings["toy"])
    spec = load_spec(
        None,
        {
            "pretrained_model_name_or_path": str(toy / "model"),
            "dataset": str(toy / "data"),
            "model_type": settings["model_type"],
            "device": settings["device"],
            "resolution": 128,
            "num_processes": settings["ranks"],
            "strategy": "fsdp2",
            "mixed_precision": "no",
            "train_batch_size": settings["batch"],
            "max_sequence_length": 64,
            "lora_rank": 16,
            "lora_placement": "sharded",
            "cache_dir": str(toy / "cache"),
            "max_train_steps": 1_000_000,
        },
    )
    world = start_world(spec)
    engine, latents, condition = engine_steps(spec, world, toy)
    bare = bare_steps(spec, world, toy, latents, condition)
    seconds: dict[str, list[float]] = {"engine": [], "bare": []}
    for number in range(settings["rounds"] + 1):
        pair = [("engine", engine), ("bare", bare)]
        for name, step in pair if number % 2 else pair[::-1]:
            world.barrier()
            begun = time.perf_counter()
            for _ in range(settings["steps"]):
                step()
            if world.device.type == "cuda":
                torch.cuda.synchronize()
            if number:  # the first round warms up
                seconds[name].append((time.perf_counter() - begun) / settings["steps"])
    if world.main:
        results.write_text(json.dumps(seconds))
    leave_world()


def engine_steps(spec: Any, world: Any, toy: Path) -> tuple[Callable[[], Any], Any, Any]:
    """The engine's step, and a batch for the other."""
    from engine import families
    from engine.data.loader import Loader
    from engine.data.prepare import prepare
    from engine.diffusion.objective import build_objective
    from engine.ranks.telemetry import Peaks, Telemetry
    from engine.run_job import build_model, start_training
    from engine.train.optimizer_step import Stepper
    from jobs.run.rundir import RunDir
    from tests.support.engine.run_context import run_context

    run_dir = RunDir(toy / f"run-{spec.model_type}")
    run_dir.create()
    telemetry = Telemetry(run_dir, world.rank)
    family = families.load("flux")
    model_root = toy / "model"
    run = run_context(spec, run_dir, world, telemetry, family=family, model_root=model_root)
    data = prepare(run)
    training = start_training(spec, build_model(run), world)
    objective = build_objective(spec, family, model_root)
    loader = Loader(spec, data, world, family, objective)
    batch = next(iter(loader.step(0)))
    stepper = Stepper(spec, family, objective, training, loader, world, Peaks(world.device))
    return lambda: stepper.run(lambda result: None), batch.latents, batch.condition


def bare_steps(spec: Any, world: Any, toy: Path, latents: Any, condition: Any) -> Callable[[], Any]:
    """A loop by hand: the same model, sharded the same way, on one batch again and again."""
    import torch
    from diffusers import FluxTransformer2DModel
    from peft import LoraConfig
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from engine import families

    flux = families.load("flux")
    model = FluxTransformer2DModel.from_pretrained(toy / "model", subfolder="transformer")
    model.to(world.device)
    if spec.model_type == "lora":
        model.requires_grad_(False)
        model.add_adapter(LoraConfig(r=spec.lora_rank, target_modules=flux.LORA_TARGETS))
    mesh = init_device_mesh(world.device.type, (world.size,))
    for block in [*model.transformer_blocks, *model.single_transformer_blocks]:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    model.train()

    def step() -> float:
        noise = torch.randn_like(latents)
        sigma = torch.rand(len(latents), device=latents.device)
        mix = sigma.view(-1, 1, 1, 1)
        velocity = flux.predict(
            model, (1 - mix) * latents + mix * noise, sigma, condition, spec.train_guidance
        )
        loss = torch.nn.functional.mse_loss(velocity, noise - latents)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


if __name__ == "__main__":
    main()
