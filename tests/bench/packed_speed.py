"""`python tests/bench/packed_speed.py`: what a packed base costs or saves in time, on a GPU.

A LoRA on a base of the shapes of FLUX.2 (or `--model`), with fewer blocks and random weights, on
one GPU: images a second of forward and backward, and the peak of allocated memory, for each
`base_precision` and `base_matmul`. No files are needed. The last row of an fp8 base sums as fast as
the GPU can (`use_fast_accum`), which the engine does not: it says what exact sums cost.

`--unpack` instead times the unpacking of one weight alone, by Triton and by torch: the bytes that
each has to move, and what that is in GB/s.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch.nn import functional

from engine.memory.tracing.inputs import caption_shapes, latents_shape
from engine.memory.tracing.model import build, shape_of
from engine.model.activation_checkpointing import checkpoint_activations
from engine.model.adapters import lora
from engine.model.base_matmul import set_scaled
from engine.model.files import weights
from engine.model.packing import Packing, unpacked_by
from engine.model.quantized_linear import quantized_layers, weights_per_element
from jobs.spec.file.load import load_spec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from engine.memory.tracing.model import Built, Shape
    from jobs.spec.values.value_types import BasePrecision

CASES: Final = (
    ("none", ""),
    ("int8", "dequantize"),
    ("fp8_scaled", "dequantize"),
    ("fp8_scaled", "scaled"),
    ("fp8_scaled", "scaled, fast sums"),
    ("fp8", "dequantize"),
    ("fp8", "scaled"),
    ("nf4", "dequantize"),
)


# Bytes that a weight in bf16 costs; see docs/training.md.
MOVED: Final[dict[BasePrecision, dict[str, float]]] = {
    "nf4": {"torch": 10.56, "Triton": 2.56},
    "int8": {"torch": 7, "Triton": 3},
    "fp8_scaled": {"torch": 7, "Triton": 3},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", default="flux2")
    parser.add_argument("--model", default="", help="hub id or directory; only its config is read")
    parser.add_argument("--layers", type=int, default=2, help="of each kind")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--resolution", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--unpack", action="store_true")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    if device.type == "cuda":
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if asked.unpack:
        time_unpacking(device)
        return
    print(f"{'base_precision':16}{'base_matmul':22}{'images/s':>10}{'peak GiB':>10}", flush=True)
    for precision, matmul in CASES:
        try:
            pace, peak = measure(asked, precision, matmul, device)
        except RuntimeError as error:  # a GPU without fp8, or too small
            print(f"{precision:16}{matmul:22}  {str(error).splitlines()[0]}", flush=True)
            continue
        print(f"{precision:16}{matmul:22}{pace:10.3f}{peak / 2**30:10.2f}", flush=True)


def time_unpacking(device: torch.device) -> None:
    """Print how fast a weight of FLUX.1's size becomes bf16, by each of the two."""
    rows, columns, times = 12288, 3072, 50
    print(f"{'base_precision':16}{'by':8}{'bytes a weight':>16}{'ms':>10}{'GB/s':>10}")
    for scheme, moved in MOVED.items():
        how = Packing(scheme)
        packed, scale = how.pack(torch.randn(rows, columns, device=device))
        codes = how.code_table(torch.bfloat16)
        given = packed, scale, codes if codes is None else codes.to(device), torch.bfloat16
        for by, run in (("torch", how.unpack_by_torch), ("Triton", how.unpack)):
            for _ in range(3):
                run(*given)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(times):
                run(*given)
            end.record()
            end.synchronize()
            ms = begin.elapsed_time(end) / times
            speed = moved[by] * rows * columns / ms / 1e6
            print(f"{scheme:16}{by:8}{moved[by]:16.2f}{ms:10.3f}{speed:10.0f}", flush=True)
    print(f"Triton: {unpacked_by(device)}")


def measure(
    asked: argparse.Namespace, precision: str, matmul: str, device: torch.device
) -> tuple[float, int]:
    """Images a second, and the most bytes that were allocated."""
    spec = load_spec(
        None,
        {
            "name": "bench",
            "dataset": "/tmp",
            "model_family": asked.family,
            "model_type": "lora",
            "mixed_precision": "bf16",
            "base_precision": precision,
            "resolution": asked.resolution,
            "gradient_checkpointing": asked.checkpointing,
            **({"pretrained_model_name_or_path": asked.model} if asked.model else {}),
        },
    )
    shape = shape_of(spec, sharded=False)
    assert shape is not None
    shape = fewer_layers(shape, asked.layers)
    built = build(shape)
    if asked.checkpointing:
        checkpoint_activations(built.model, spec)
    weights.materialise(built.model.train(), device)
    fill(built.model, device)
    set_scaled(built.model, scaled=matmul.startswith("scaled"))
    inputs = batch_of(shape, asked.batch, device)
    with fast_sums() if matmul.endswith("fast sums") else nullcontext():
        return paced(partial(step, built, inputs), asked, device)


def fewer_layers(shape: Shape, layers: int) -> Shape:
    """The same blocks, and fewer of them."""
    config: dict[str, Any] = dict(shape.config)
    for name, value in config.items():
        if name.endswith(("num_layers", "num_single_layers", "n_layers", "num_refiner_layers")):
            config[name] = min(value, layers)
    return replace(shape, config=config)


@torch.no_grad()
def fill(model: torch.nn.Module, device: torch.device) -> None:
    """Draw weights, and pack those that are packed."""
    torch.manual_seed(0)
    packed = weights_per_element(model)
    for parameter in model.parameters():
        if id(parameter) not in packed:
            parameter.normal_(std=0.02)
    for layer in quantized_layers(model).values():
        drawn = torch.randn(layer.out_features, layer.in_features, device=device) * 0.02
        weight, scale = layer.packing.pack(drawn)
        layer.weight.copy_(weight)
        if scale is not None and layer.weight_scale is not None:
            layer.weight_scale.copy_(scale)


def batch_of(shape: Shape, count: int, device: torch.device) -> tuple[Any, ...]:
    """Latents, levels and captions."""
    latents = torch.randn(
        count, *latents_shape(shape.spec, shape.config, shape.size), device=device
    )
    texts = {
        name: torch.ones(count, *size, dtype=dtype, device=device)
        for name, (size, dtype) in caption_shapes(shape.spec, shape.config).items()
    }
    return latents, torch.full((count,), 0.5, device=device), texts


def step(built: Built, inputs: tuple[Any, ...]) -> None:
    """A forward and a backward."""
    latents, levels, texts = inputs
    family = built.family
    said = family.predict(built.model, latents, levels, family.arrange(texts), 2.0)
    said.float().square().mean().backward()
    for parameter in lora.lora_parameters(built.model).values():
        parameter.grad = None


def paced(
    run: Callable[[], None], asked: argparse.Namespace, device: torch.device
) -> tuple[float, int]:
    on_gpu = device.type == "cuda"
    for _ in range(2):
        run()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    for _ in range(asked.steps):
        run()
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begun
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    return asked.steps * asked.batch / seconds, peak


@contextmanager
def fast_sums() -> Iterator[None]:
    """Products in fp8 whose sums are as fast as the GPU can."""
    exact = functional.scaled_mm

    def fast(*args: Any, **kwargs: Any) -> torch.Tensor:
        return exact(*args, **kwargs | {"use_fast_accum": True})

    with patch.object(functional, "scaled_mm", fast):
        yield


if __name__ == "__main__":
    main()
