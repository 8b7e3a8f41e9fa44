"""`python tests/bench/memory.py`: predicted memory against a full trace of real FSDP2.

The reference runs the whole model, every block of it, on fake tensors among fake ranks: torch's own
`fully_shard` on a fake process group, so that what it gathers, reduces and frees is not ours. Both
count the bytes of live storages. Prints a row for each case, and the largest difference.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from engine.memory.predicting.predict import predict
from engine.memory.tracing.shape import shape_of
from engine.memory.tracing.trace import trace_model
from jobs.spec.file.load import load_spec
from tests.support.engine.memory import reference, with_layers

if TYPE_CHECKING:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=list(MODELS))
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)))
    parser.add_argument("--types", default="lora,full")
    parser.add_argument("--checkpointing", default="on,off")
    parser.add_argument("--layers", type=int, help="of each kind, instead of all: much faster")
    parser.add_argument("--base-precision", default="none", help="of the LoRAs")
    asked = parser.parse_args()
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


if __name__ == "__main__":
    main()
