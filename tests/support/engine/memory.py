"""What tests and the benchmark of `engine.memory` share: a full trace of the real thing."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from engine.memory.tracing import fakes
from engine.memory.tracing.fakes import Assume
from engine.memory.tracing.live import Live, storage_of
from engine.memory.tracing.model import build, on_fake
from engine.memory.tracing.timeline import Mark, Recorder
from engine.memory.tracing.trace import _train
from engine.model.activation_checkpointing import checkpoint_activations
from engine.parallel.sharding import shard
from engine.ranks.mesh import build_mesh
from engine.ranks.world import World
from engine.run_job import kept_whole
from jobs.spec.rules.strategy import checkpoints_activations

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from engine.memory.tracing.model import Shape
    from jobs.spec.job_spec import JobSpec


def small_toy(root: Path, **sizes: int) -> Path:
    """The toy with a block of each kind and one more: what takes time here is their number.

    Args:
        root: An empty directory.
        sizes: Others of `engine.toy.families.flux.FluxSizes`.
    """
    from engine.toy import write_toy
    from engine.toy.families.flux import FluxSizes, write_flux

    write_toy(root, "flux", pictures=4, size=64)
    shutil.rmtree(root / "model")
    write_flux(root / "model", seed=0, sizes=FluxSizes(layers=1, single_layers=2, **sizes))
    return root


def with_layers(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """A denoiser's config with the same blocks, and fewer of them."""
    counts = ("num_layers", "num_single_layers", "n_layers", "num_refiner_layers")
    fewer = {
        name: min(value, layers) if name.endswith(counts) and isinstance(value, int) else value
        for name, value in config.items()
    }
    if isinstance(each := fewer.get("transformer_layers_per_block"), list):  # SDXL's
        fewer["transformer_layers_per_block"] = [min(count, layers) for count in each]
    if "llama_layers" in fewer:  # HiDream's: one for each block
        blocks = fewer["num_layers"] + fewer["num_single_layers"]
        fewer["llama_layers"] = fewer["llama_layers"][:blocks]
    return fewer


def resizes(live: Live) -> Any:
    """Count what FSDP2 frees and allocates by resizing, which no operation tells of."""
    original = torch.UntypedStorage.resize_

    def resize(storage: Any, size: int) -> Any:
        result = original(storage, size)
        live.resized(storage)
        return result

    return patch.object(torch.UntypedStorage, "resize_", resize)


def reference(shape: Shape, spec: JobSpec, ranks: int) -> dict[str, int]:
    """Phase → peak bytes of rank 0, in a full trace of torch's own FSDP2 among fake ranks.

    Args:
        shape: What is trained.
        spec: The job; how it shards.
        ranks: World size.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        return _traced(shape, spec.model_copy(update={"num_processes": ranks}), ranks)
    finally:
        dist.destroy_process_group()


def _traced(shape: Shape, spec: JobSpec, ranks: int) -> dict[str, int]:
    shape = replace(shape, spec=spec)
    built = build(shape)
    strategy = "hsdp" if spec.strategy == "hsdp" else "fsdp2"
    with patch("engine.ranks.mesh._set_timeout"):  # the fake backend knows no timeout
        mesh = build_mesh(spec, strategy, ranks, "cpu")
    world = World(0, ranks, torch.device("cpu"), strategy, "", mesh=mesh)
    on_cuda = spec.device != "cpu"
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        on_fake(built, replace(shape, sharded=False))
        if checkpoints_activations(spec):
            checkpoint_activations(built.model, spec)
        stack.enter_context(Assume(all_true=spec.train_batch_size == 1))
        live = stack.enter_context(Live(fakes.temporary if on_cuda else lambda *_: 0))
        stack.enter_context(resizes(live))
        for parameter in built.model.parameters():
            live.ignore(parameter)  # whole ones, which a rank never has
        whole = set(kept_whole(built.model, spec))
        shard(built.model, spec, world, replicated=whole)
        if on_cuda:
            stack.enter_context(fakes.AsOnCuda())
        for buffer in built.model.buffers():
            live.add(buffer)
        for parameter in built.model.parameters():
            if parameter in whole:
                live.drop({storage_of(parameter)})
            live.add(parameter.detach())
        held = live.activations
        recorder = Recorder(live)
        built.model.train()
        _train(built, shape, recorder)
    return peaks_of(recorder, held)


def peaks_of(recorder: Recorder, held: int) -> dict[str, int]:
    """Phase → the most bytes in it, with what was held before."""
    peaks: dict[str, int] = {}
    phase = ""
    for entry in recorder.entries:
        if isinstance(entry, Mark):
            phase = {"begin": entry.name, "end": ""}.get(entry.kind, phase)
        elif phase:
            peaks[phase] = max(peaks.get(phase, 0), entry.most + held)
    return peaks
