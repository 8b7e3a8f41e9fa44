"""`python tests/bench/gpu.py`: a step of each family at its published size, beside the prediction.

On one GPU that nothing else uses. Weights and data are random, so no files are needed. The memory
is what torch allocates at most; a step is the median of three after two others. The predictions of
all cases are made first, on the CPU, which takes minutes.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from engine.memory.tracing.model import build, shape_of
from engine.memory.tracing.trace import batch_of, objective_of
from engine.model.activation_checkpointing import checkpoint_activations
from engine.model.compiled import compile_blocks
from engine.model.files import weights
from engine.model.kernels import choose_backends
from engine.model.quantized_linear import quantized_layers, weights_per_element
from engine.parallel.block_swap import swap_blocks
from engine.ranks.telemetry import Peaks
from engine.ranks.world import World
from engine.run_job import start_training
from engine.train.optimizer_step import Stepper
from jobs.memory.calibration import Calibration
from jobs.memory.estimate import Estimate, place_of
from jobs.memory.predicted import Predicted
from jobs.memory.question import Server
from jobs.models.published_sizes import by_size
from jobs.spec.families import FAMILIES
from jobs.spec.job_spec import JobSpec
from jobs.spec.rules.steps import accumulation_steps, preserves, trains_to_base
from jobs.spec.rules.strategy import checkpoints_activations

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.data.loader import MicroBatch

GIB: Final = 1 << 30
USUAL: Final[dict[str, Any]] = {"mixed_precision": "bf16", "gradient_checkpointing": True}
VIDEO: Final[dict[str, Any]] = {"resolution": 480, "num_frames": 25}
FRAMES: Final = {"minimax_h3": 22}  # 17 n + 5
WARM: Final = 2
STEPS: Final = 3
FLUX: Final[dict[str, Any]] = {"model_family": "flux"}
MORE: Final[dict[str, dict[str, Any]]] = {
    "flux, 20 blocks swapped": FLUX | {"swap_blocks": 20},
    "flux, 50 blocks swapped": FLUX | {"swap_blocks": 50},
    "flux, nf4": FLUX | {"base_precision": "nf4"},
    "flux, int8": FLUX | {"base_precision": "int8"},
    "flux, batch 4": FLUX | {"resolution": 512, "train_batch_size": 4},
    "flux, preservation": FLUX
    | {"preservation": "class", "preservation_class": "dog", "trigger_word": "sks"},
    "sdxl, full": {"model_family": "sdxl", "model_type": "full"},
    "flux, compiled": FLUX | {"torch_compile": True},
}


def cases() -> dict[str, dict[str, Any]]:
    """Return the keys of each case: the first flavour of each size of each family, and more."""
    found: dict[str, dict[str, Any]] = {}
    for name, family in FAMILIES.items():
        for flavour, *_ in by_size(family).values():
            keys = {"model_family": name, "model_flavour": flavour}
            video = VIDEO | {"num_frames": FRAMES.get(name, VIDEO["num_frames"])}
            found[f"{name} {flavour}"] = keys | (video if family.frame_step else {})
    return found | MORE


def measure(spec: JobSpec, device: torch.device) -> tuple[int, float]:
    """Return the bytes that torch allocated at most, and the seconds of a step."""
    gc.collect()
    torch.cuda.empty_cache()
    choose_backends(spec)
    world = World(rank=0, size=1, device=device, strategy="single", token="bench")
    shape = shape_of(spec, sharded=False)
    assert shape is not None
    built = build(shape)
    if checkpoints_activations(spec):
        checkpoint_activations(built.model, spec)
    compile_blocks(built.model, spec)
    swapped = swap_blocks(built.model, spec, built.family, world)
    weights.materialise(built.model, device, hosts=swapped.hosts if swapped else None)
    fill(built.model, device)
    if swapped:
        swapped.start()
    built.model.train()

    def make(size: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        if dtype.is_floating_point:
            return torch.rand(size, device=device).to(dtype)
        return torch.ones(size, device=device, dtype=dtype)  # masks that mask nothing

    batch = batch_of(built, shape, spec.train_batch_size, make)
    to_base = trains_to_base(spec) or preserves(spec)
    kept = batch.condition if preserves(spec) else None
    batch = replace(batch, to_base=trains_to_base(spec), asks_base=to_base, preserved=kept)
    training = start_training(spec, built.model, world)
    loader: Any = Loader(batch, accumulation_steps(spec))
    peaks = Peaks(device)
    objective = objective_of(built, shape)
    stepper = Stepper(spec, built.family, objective, training, loader, world, peaks, late=False)
    seconds = []
    for _ in range(WARM + STEPS):
        began = time.perf_counter()
        stepper.run(lambda result: None)
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return max(peaks.phases.values()), statistics.median(seconds[WARM:])


class Loader:
    """Stands in for `engine.data.loader.Loader`: the same batch for all forwards."""

    def __init__(self, batch: MicroBatch, forwards: int) -> None:
        self.batch, self.forwards = batch, forwards

    def step(self, step: int) -> Iterator[MicroBatch]:
        for _ in range(self.forwards):
            yield self.batch


@torch.no_grad()
def fill(model: torch.nn.Module, device: torch.device) -> None:
    """Draw weights of the usual size, and pack those that are packed."""
    packed = weights_per_element(model)
    for parameter in model.parameters():
        if id(parameter) not in packed:  # some are in host memory
            drawn = torch.randn(parameter.shape, device=device, dtype=torch.bfloat16)
            parameter.copy_(drawn.mul_(0.02))
    for layer in quantized_layers(model).values():
        size = (layer.out_features, layer.in_features)
        weight, scale = layer.packing.pack(torch.randn(size, device=device).bfloat16() * 0.02)
        layer.weight.copy_(weight)
        if scale is not None:
            layer.weight_scale.copy_(scale)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help="their names begin so; default: all")
    parser.add_argument("--card", default="h200", help="as of `fsdp-tui estimate --card`")
    asked = parser.parse_args()
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    server = Server(patience=1800)
    specs = {
        name: JobSpec.model_validate(USUAL | keys | {"dataset": ".", "on_nonfinite": "skip"})
        for name, keys in cases().items()
        if name.startswith(tuple(asked.cases or [""]))
    }
    said: dict[str, tuple[Predicted, Any]] = {}
    for name, spec in specs.items():
        estimate = Estimate(spec, place_of(spec, (), card=asked.card), server, Calibration())
        predicted = estimate.predict("single", 1)
        if isinstance(predicted, Predicted):
            said[name] = predicted, estimate.seconds(predicted, spec)
    server.close()
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}")
    print(f"{'':34}{'GiB said':>10}{'GiB':>8}{'s said':>16}{'s':>8}")
    for name, (predicted, seconds) in said.items():
        try:
            peak, step = measure(specs[name], device)
        except Exception as error:  # the next one may work: a family that is too large, say
            print(f"{name:34}{type(error).__name__}: {' '.join(str(error).split())[:100]}")
            continue
        band = seconds if isinstance(seconds, str) else f"{seconds.low:.2f} to {seconds.high:.2f}"
        row = f"{name:34}{predicted.peak / GIB:10.2f}{peak / GIB:8.2f}{band:>16}{step:8.2f}"
        print(row, flush=True)


if __name__ == "__main__":
    main()
