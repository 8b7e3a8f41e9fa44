"""Prove that what runs is what was asked: every base parameter a shard of the right size."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from engine.model.quantized_linear import weights_per_element
from engine.ranks.mesh import sharding_mesh
from jobs.run.events import Sharding

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from engine.ranks.world import World


class ShardingSummary(Sharding):
    """What sharding did on this rank, in words for its log."""

    def __str__(self) -> str:
        units = ", ".join(f"{count} {name}" for name, count in self.units.items())
        share = self.local_parameters / self.parameters
        wrapped = self.wrapped_parameters / self.parameters
        groups = f" in each of {self.replicas} replicas" if self.replicas > 1 else ""
        text = (
            f"sharded: {self.tensors} base tensors are DTensors over {self.ranks} ranks{groups}; "
            f"{self.local_parameters:,} of {self.parameters:,} parameters here "
            f"({share:.4f}, {_mebibytes(self.local_bytes)}); units: {units}; "
            f"{wrapped:.1%} wrapped, "
            f"the largest unit gathers {_mebibytes(self.largest_unit_bytes)}; "
            f"{1 - wrapped:.1%} in the root ({_mebibytes(self.root_bytes)})"
        )
        if self.replicated_parameters:
            text += f"; {self.replicated_parameters:,} trained parameters replicated on every rank"
        return text


def check_sharding(
    model: torch.nn.Module,
    world: World,
    units: list[str],
    *,
    replicated: Iterable[torch.nn.Parameter] = (),
    offloaded: bool = False,
    gathered_in: torch.dtype | None = None,
) -> ShardingSummary:
    """Prove that every base parameter is a `DTensor` that holds just this rank's share.

    Args:
        model: Sharded, its weights in place.
        world: The ranks.
        units: What `engine.parallel.sharding.shard` returned.
        replicated: Parameters that are whole by intention.
        offloaded: Shards belong in host memory.
        gathered_in: The precision in which weights are gathered, if not in their own.

    Raises:
        RuntimeError: A parameter is whole, its local shape is not that of a dim-0 shard, or it is
            not where it belongs. This ends the job: it would otherwise run, unsharded, at
            several times the memory.
    """
    if world.mesh is None:
        raise RuntimeError(f"{world.strategy} does not shard")
    mesh = sharding_mesh(world.mesh)
    ranks, replicas = mesh.size(-1), world.replicas
    here = "cpu" if offloaded else world.device.type
    whole = {id(parameter) for parameter in replicated}
    packed = weights_per_element(model)
    tensors = parameters = local = local_bytes = replicated_count = 0
    for name, parameter in model.named_parameters():
        if id(parameter) in whole:
            replicated_count += parameter.numel()
            continue
        if not isinstance(parameter, DTensor):
            raise RuntimeError(f"{name} is not sharded, although strategy is {world.strategy}")
        expected_placements = (Replicate(), Shard(0)) if replicas > 1 else (Shard(0),)
        if parameter.placements != expected_placements:
            raise RuntimeError(
                f"{name} is placed {parameter.placements}, not {expected_placements}"
            )
        expected = _rows_of_rank(parameter.shape[0], mesh.get_local_rank(mesh.ndim - 1), ranks)
        shard_here = parameter.to_local()
        if shard_here.shape != (expected, *parameter.shape[1:]):
            raise RuntimeError(
                f"{name}: the local shard is {tuple(shard_here.shape)}, expected {expected} of "
                f"{parameter.shape[0]} rows"
            )
        if shard_here.device.type != here:
            raise RuntimeError(f"{name} is on {shard_here.device}, expected {here}")
        tensors += 1
        each = packed.get(id(parameter), 1)
        parameters += parameter.numel() * each
        local += shard_here.numel() * each
        local_bytes += shard_here.numel() * shard_here.element_size()
    if tensors == 0:
        raise RuntimeError("the model has no sharded parameter at all")
    units_hold = [[p for p in own if id(p) not in whole] for own in _parameters_of_units(model)]
    gathered = [sum(_bytes(p, gathered_in) for p in own) for own in units_hold]
    return ShardingSummary(
        ranks=ranks,
        replicas=replicas,
        units=dict(Counter(units)),
        tensors=tensors,
        parameters=parameters,
        local_parameters=local,
        wrapped_parameters=parameters
        - sum(p.numel() * packed.get(id(p), 1) for p in units_hold[0]),
        local_bytes=local_bytes,
        largest_unit_bytes=max(gathered[1:], default=0),
        root_bytes=gathered[0],
        replicated_parameters=replicated_count,
    )


def _parameters_of_units(root: torch.nn.Module) -> list[list[torch.nn.Parameter]]:
    """Return the parameters that each FSDP unit gathers, the root's first."""
    units = [module for module in root.modules() if isinstance(module, FSDPModule)]
    by_unit: list[list[torch.nn.Parameter]] = []
    taken: set[int] = set()
    for unit in reversed(units):  # inner units come after those around them
        own = [p for p in unit.parameters() if id(p) not in taken]
        taken |= {id(p) for p in own}
        by_unit.append(own)
    return by_unit[::-1]


def _rows_of_rank(rows: int, rank: int, size: int) -> int:
    """How many of `rows` a rank holds: chunks of ceil(rows / size), the last ones shorter."""
    chunk = -(-rows // size)
    return max(0, min(chunk, rows - chunk * rank))


def _bytes(parameter: torch.nn.Parameter, gathered_in: torch.dtype | None) -> int:
    return parameter.numel() * (gathered_in or parameter.dtype).itemsize


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
