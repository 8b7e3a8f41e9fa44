"""What the engine's tests share: jobs on the toy model, and what they trained."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, Final

import torch
from diffusers import FluxTransformer2DModel
from torch.distributed import TCPStore

from engine import families
from engine.diffusion.random_numbers import keyed_generator
from engine.model.adapters import lora
from engine.model.files import weights
from engine.ranks.world import World
from jobs.spec.file.load import load_spec
from tests.support.forks import client

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from engine.train.train_state import TrainState
    from jobs.run.rundir import RunDir
    from jobs.spec.job_spec import JobSpec
    from tests.support.forks.client import Ranks


def start_ranks(target: Callable[..., None], ranks: int, *words: Any) -> Ranks:
    """Fork `target(rank, ranks, *words)` from a server that has imported the libraries.

    Ranks find each other as those of a real launch do: through a store that this process, in place
    of elastic's agent, keeps on a port that nobody else can take meanwhile.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    each = [str(rank) for rank in range(ranks)]
    alike = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "ACCELERATE_USE_CPU": "true",
    }
    started = client.start(
        target,
        [(ranks, *words)] * ranks,
        RANK=each,
        LOCAL_RANK=each,
        **{name: [value] * ranks for name, value in alike.items()},
    )
    started.keep = store
    return started


CARDS: Final = (16, 24, 24, 48)  # GB, of each rank


def pretend_cards() -> None:
    """Give the CPU ranks of this process GPUs of several sizes, as far as their size matters."""
    World.gpu = lambda world: ("pretended", CARDS[world.rank] << 30)  # type: ignore[method-assign]


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


def save_checkpoint(training: TrainState, spec: JobSpec, run_dir: RunDir) -> Path:
    """A checkpoint of the present step, as a job of one rank writes it; its directory."""
    from engine import checkpoint
    from engine.ranks.world import World

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
        lora.add_lora(model, spec, families.load("flux").LORA_TARGETS)
    weights.materialise(model, ALONE.device)
    weights.stream(model, stored, names=lora.adapted_name(model).__getitem__)
    if spec.model_type == "lora":
        lora.initialise(model, spec.seed, spec.lora_init)
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
