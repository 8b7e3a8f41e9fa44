"""`python tests/bench/memory.py`: predicted memory against a full trace of real FSDP2.

The reference runs the whole model, every block of it, on fake tensors among fake ranks: torch's own
`fully_shard` on a fake process group, so that what it gathers, reduces and frees is not ours. Both
count the bytes of live storages. Prints a row for each case, and the largest difference.

`--real` runs what toys hide instead: a LoRA on a Stable Diffusion 1.5 of the real size (860 million
random weights in fp32) on two CPU ranks, with the C library's allocator as it is and as jobs are
launched (`jobs.launch.HOST_ALLOCATOR`). Prints the highest resident memory of a rank beside
the prediction, what it holds between steps, and processor seconds a step.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil
import torch
import yaml
from diffusers import StableDiffusionPipeline, UNet2DConditionModel

from engine.memory.estimator import Estimator
from engine.memory.predict import predict
from engine.memory.tracing.model import shape_of
from engine.memory.tracing.trace import trace_model
from engine.toy.components import parts
from engine.toy.components.clip_and_t5 import build_clip
from engine.toy.components.parts import build_four_channel_vae
from engine.toy.components.tokenizers import build_clip_tokenizer, save_clip_vocabulary
from engine.toy.families.stable_diffusion import build_scheduler
from engine.toy.images import write_pictures
from jobs.launch import HOST_ALLOCATOR, build_launch, full_environment
from jobs.run.eventlog import EventLog
from jobs.run.rundir import RunDir
from jobs.spec.file.load import dump_spec, load_spec
from tests.support.engine.memory import reference, with_layers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.spec.job_spec import JobSpec

MODELS: Final = {
    "sd3": "stabilityai/stable-diffusion-3.5-large",
    "flux": "black-forest-labs/FLUX.1-dev",
    "flux2": "black-forest-labs/FLUX.2-dev",
    "qwen_image": "Qwen/Qwen-Image",
    "z_image": "Tongyi-MAI/Z-Image",
    "wan": "Wan-AI/Wan2.1-T2V-14B-Diffusers",
    "hunyuanvideo": "hunyuanvideo-community/HunyuanVideo",
    "sdxl": "stabilityai/stable-diffusion-xl-base-1.0",
}
RANKS: Final = (2, 8, 64)
ROOT: Final = Path(__file__).resolve().parents[2]
PUBLISHED: Final = ROOT / "jobs" / "models" / "published"
REAL: Final = "stable-diffusion-v1-5/stable-diffusion-v1-5"
RANKS_OF_REAL: Final = 2
EVERY: Final = 0.05  # seconds between two looks at the ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=list(MODELS))
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)))
    parser.add_argument("--types", default="lora,full")
    parser.add_argument("--checkpointing", default="on,off")
    parser.add_argument("--layers", type=int, help="of each kind, instead of all: much faster")
    parser.add_argument("--base-precision", default="none", help="of the LoRAs")
    parser.add_argument("--real", action="store_true", help="needs 10 GB of memory, 4 GB of disk")
    parser.add_argument("--strategies", nargs="+", default=["fsdp2", "ddp"], help="with --real")
    parser.add_argument("--steps", type=int, default=4, help="with --real")
    asked = parser.parse_args()
    if asked.real:
        with tempfile.TemporaryDirectory(prefix="bench-memory-") as scratch:
            run_real(Path(scratch), asked.strategies, asked.steps)
        return
    torch.set_num_threads(1)
    print(
        f"{'case':44}{'ranks':>6}{'phase':>10}{'predicted':>11}{'traced':>11}{'diff':>8}"
        f"{'s':>7}{'s':>7}",
        flush=True,
    )
    worst = 0.0
    for family in asked.families:
        for kind in asked.types.split(","):
            for checkpointing in asked.checkpointing.split(","):
                case = (family, kind, checkpointing == "on")
                spec = job(*case, asked.base_precision)
                worst = max(worst, report(*case, spec, asked.ranks, asked.layers))
    print(f"largest difference {worst:.2%}")


def report(
    family: str, kind: str, checkpointing: bool, spec: JobSpec, ranks: str, layers: int | None
) -> float:
    """The rows of a model and its settings; the largest difference."""
    shape = shape_of(spec, sharded=True)
    assert shape is not None
    if layers is not None:
        shape = replace(shape, config=with_layers(shape.config, layers))
    begun = time.perf_counter()
    trace = trace_model(shape)
    traced = time.perf_counter() - begun
    worst = 0.0
    for count in map(int, ranks.split(",")):
        begun = time.perf_counter()
        expected = reference(shape, spec, count)
        seconds = time.perf_counter() - begun
        found = predict(trace, spec, count, "fsdp2")
        for phase in ("forward", "backward"):
            mine = found.phase(phase)
            assert mine is not None
            # The reference has made no step of the optimizer yet.
            peak = mine.peak - mine.parts.optimizer
            difference = peak / expected[phase] - 1
            worst = max(worst, abs(difference))
            name = f"{family} {kind}{' checkpointed' if checkpointing else ''}"
            print(
                f"{name:44}{count:6}{phase:>10}{peak / 2**30:11.3f}"
                f"{expected[phase] / 2**30:11.3f}{difference:8.2%}{traced:7.1f}{seconds:7.1f}",
                flush=True,
            )
        gc.collect()
    return worst


def job(family: str, kind: str, checkpointing: bool, base_precision: str) -> JobSpec:
    return load_spec(
        None,
        {
            "name": "bench",
            "dataset": "/tmp",
            "model_family": family,
            "pretrained_model_name_or_path": MODELS[family],
            "model_type": kind,
            "gradient_checkpointing": checkpointing,
            "base_precision": base_precision,
            **({"num_frames": 17, "resolution": 512} if family in ("wan", "hunyuanvideo") else {}),
        },
    )


# -- a real size -------------------------------------------------------------------------------


def run_real(scratch: Path, strategies: Sequence[str], steps: int) -> None:
    write_real(scratch)
    print(
        f"{'strategy':10}{'allocator':12}{'predicted GB':>14}{'peak GB':>10}{'held GB':>10}"
        f"{'processor s':>13}",
        flush=True,
    )
    for strategy in strategies:
        spec = real_job(scratch, strategy, steps)
        predicted = Estimator().estimate(spec, RANKS_OF_REAL, strategy).host["least"]
        for own in (False, True):
            found = launched(spec, scratch / f"{strategy}-{own}", own=own)
            peak, held, seconds = (max(column) for column in zip(*found, strict=True))
            print(
                f"{strategy:10}{'ours' if own else 'as it is':12}{predicted / 1e9:14.2f}"
                f"{peak / 1e9:10.2f}{held / 1e9:10.2f}{seconds:13.1f}",
                flush=True,
            )


def write_real(directory: Path) -> None:
    """Stable Diffusion 1.5's UNet, with a small VAE and a short text encoder of its width."""
    config = json.loads((PUBLISHED / f"{REAL.replace('/', '--')}.json").read_text())
    clip = build_clip_tokenizer(parts.captions())
    pipeline = StableDiffusionPipeline(
        vae=build_four_channel_vae(0),
        text_encoder=build_clip(clip, config["cross_attention_dim"], seed=0),
        tokenizer=clip,
        unet=UNet2DConditionModel.from_config(config),
        scheduler=build_scheduler("1.5"),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    parts.save(pipeline, directory / "model", "float32")
    save_clip_vocabulary(clip, directory / "model" / "tokenizer")
    write_pictures(directory / "data", count=8, size=256, seed=0)


def real_job(directory: Path, strategy: str, steps: int) -> JobSpec:
    return load_spec(
        None,
        {
            "name": "bench",
            "model_family": "stable_diffusion",
            "pretrained_model_name_or_path": str(directory / "model"),
            "dataset": str(directory / "data"),
            "cache_dir": str(directory / "cache"),
            "resolution": 256,
            "crop": "square",
            "mixed_precision": "no",
            "device": "cpu",
            "num_processes": RANKS_OF_REAL,
            "strategy": strategy,
            "max_train_steps": steps,
            "checkpointing_steps": 0,
        },
    )


def launched(spec: JobSpec, root: Path, *, own: bool) -> list[tuple[float, float, float]]:
    """Of each rank: most resident bytes, the least within steps, processor seconds of a step."""
    run_dir = RunDir(root)
    run_dir.create()
    run_dir.job_file.write_text(dump_spec(spec))
    launch = build_launch(spec, run_dir, gpus=(), run_id="bench")
    run_dir.accelerate_file.write_text(yaml.safe_dump(launch.config))
    environment = full_environment(launch) | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if not own:
        for name in HOST_ALLOCATOR:
            environment.pop(name, None)
    looks: dict[int, list[tuple[float, int, float]]] = {}  # time, resident bytes, processor seconds
    peaks: dict[int, int] = {}
    with (root / "log").open("w") as log:
        child = subprocess.Popen(launch.command, env=environment, cwd=root, stdout=log, stderr=log)
        while child.poll() is None:
            for status in run_dir.rank_statuses():
                with suppress(psutil.Error, OSError, LookupError):
                    process = psutil.Process(status.pid)
                    used = process.cpu_times()
                    look = (time.time(), process.memory_info().rss, used.user + used.system)
                    looks.setdefault(status.pid, []).append(look)
                    peaks[status.pid] = highest(status.pid)
            time.sleep(EVERY)
    if child.returncode:
        sys.exit((root / "log").read_text()[-4000:])
    ends = [step.t for step in EventLog(run_dir.events).read_all().steps]
    found: list[tuple[float, float, float]] = []
    for pid, rows in looks.items():
        within = [row for row in rows if ends[0] <= row[0] <= ends[-1]]
        seconds = (within[-1][2] - within[0][2]) / (len(ends) - 1)
        found.append((peaks[pid], min(row[1] for row in within), seconds))
    return found


def highest(pid: int) -> int:
    """The most bytes that a process had resident."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.split("VmHWM:")[1].split()[0]) * 1024


if __name__ == "__main__":
    main()
