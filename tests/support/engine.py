"""What the engine's tests share: jobs on the toy model, and what they trained."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import socket
import time
from typing import TYPE_CHECKING, Any, Final

import torch
from diffusers import FluxTransformer2DModel

from engine import adapters, families, weights
from engine.draws import keyed_generator
from engine.world import World
from jobs.specfile import load_spec

PATIENCE: Final = 1500.0  # seconds; a slow machine under load, not an expectation

# What a forkserver imports once, so that the ranks it forks have no need to. Modules of the tests
# are not found there. Nothing of this computes, so no thread is lost in a fork.
PRELOADED: Final = [
    "engine.run",
    "engine.families.flux",
    "diffusers.pipelines.flux.pipeline_flux",
    "diffusers.loaders.lora_pipeline",
    "transformers.models.clip.modeling_clip",
    "transformers.models.clip.tokenization_clip",
    "transformers.models.t5.modeling_t5",
    "transformers.models.t5.tokenization_t5",
]

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch.multiprocessing.spawn import ProcessContext

    from engine.training import Training
    from jobs.rundir import RunDir
    from jobs.spec import JobSpec


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def start_ranks(target: Callable[..., None], ranks: int, *words: Any) -> ProcessContext:
    """Fork `target(rank, ranks, *words)` from a server that has imported the libraries."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    context = torch.multiprocessing.start_processes(
        target, (ranks, *words), nprocs=ranks, start_method="forkserver", join=False
    )
    assert context is not None
    return context


def join_ranks(context: ProcessContext, patience: float = PATIENCE) -> None:
    """Wait until all ranks have left, for so many seconds.

    Raises:
        torch.multiprocessing.spawn.ProcessException: One of them failed; the others are ended.
    """
    deadline = time.monotonic() + patience
    while not context.join(timeout=1):
        assert time.monotonic() < deadline, "ranks hang"


def toy_values(toy: Path, **changes: Any) -> dict[str, Any]:
    """A small job on the toy, in fp32 on CPU ranks."""
    return {
        "name": "t",
        "pretrained_model_name_or_path": str(toy / "model"),
        "dataset": str(toy / "data"),
        "device": "cpu",
        "resolution": 64,
        "max_sequence_length": 16,
        "mixed_precision": "no",
        "lora_rank": 4,
        "learning_rate": 1e-3,
        "max_train_steps": 4,
        "checkpointing_steps": 0,
        **changes,
    }


def toy_spec(toy: Path, **changes: Any) -> JobSpec:
    return load_spec(None, toy_values(toy, **changes))


def trained_digest(model: torch.nn.Module) -> str:
    """A hash of the trained tensors of an unsharded model."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            digest.update(name.encode())
            digest.update(parameter.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def save_checkpoint(training: Training, spec: JobSpec, run_dir: RunDir) -> Path:
    """A checkpoint of the present step, as a job of one rank writes it; its directory."""
    from engine import checkpoint
    from engine.world import World

    alone = World(rank=0, size=1, device=torch.device("cpu"), strategy="single", token="t")
    path = run_dir.checkpoint(training.step)
    checkpoint.write(checkpoint.collect(training, spec, 1), path, alone)
    return path


ALONE = World(rank=0, size=1, device=torch.device("cpu"), strategy="single", token="t")


def build(toy: Path, spec: JobSpec) -> torch.nn.Module:
    """The transformer as a single rank builds it."""
    directory = toy / "model" / "transformer"
    model, stored = weights.build_on_meta(FluxTransformer2DModel, directory, spec)
    if spec.model_type == "lora":
        adapters.add_lora(model, spec, families.load("flux").LORA_TARGETS)
    weights.materialise(model, ALONE.device)
    weights.stream(model, stored, names=adapters.adapted_name(model).__getitem__)
    if spec.model_type == "lora":
        adapters.initialise(model, spec.seed)
    return model


def inputs(toy: Path) -> dict[str, Any]:
    config = json.loads((toy / "model" / "transformer" / "config.json").read_text())
    draw = keyed_generator(1)
    return {
        "noisy": torch.randn(2, config["in_channels"] // 4, 8, 12, generator=draw),
        "level": torch.tensor([0.25, 0.9]),
        "condition": {
            "prompt_embeds": torch.randn(2, 7, config["joint_attention_dim"], generator=draw),
            "pooled_prompt_embeds": torch.randn(2, config["pooled_projection_dim"], generator=draw),
        },
        "guidance": 3.5,
    }


def parameter(*values: float) -> torch.nn.Parameter:
    """What is trained, of a model of a few numbers."""
    return torch.nn.Parameter(torch.tensor(values))


class Line(torch.nn.Module):
    """Predicts `weight · noisy`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(2.0)

    def forward(self, noisy: torch.Tensor) -> torch.Tensor:
        return self.weight * noisy
