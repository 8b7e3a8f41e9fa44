"""Arrange the ranks as a grid: replicas × shards × context-parallel groups."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Final

from torch.distributed.device_mesh import init_device_mesh

from jobs.spec.rules.strategy import SHARDING, replicas_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from jobs.spec.job_spec import JobSpec
    from jobs.spec.keys.running import RunningKeys

REPLICATE, SHARD, RING, ULYSSES = "dp_replicate", "dp_shard", "ring", "ulysses"
_FLAT = "dp_shard_cp"
_HEAD_START: Final = 60.0  # seconds for the supervisor to end a job that makes no progress


def build_mesh(spec: JobSpec, strategy: str, ranks: int, device_type: str) -> DeviceMesh | None:
    """Return all ranks as `(dp_replicate, dp_shard)`, with two more dims for context parallelism.

    The innermost dims vary fastest: ranks of one machine share shards and context, which need fast
    links, and replicas span machines. Diffusers expects a dim for each kind of context parallelism;
    the unused one has size 1.

    Returns:
        The mesh; None for strategies that do not shard.
    """
    if strategy not in SHARDING:
        return None
    replicas = replicas_of(spec, strategy)
    context = spec.context_parallel_size
    shape = [replicas, ranks // (replicas * context)]
    names = [REPLICATE, SHARD]
    if context > 1:
        ring = context if spec.context_parallel_comm_strategy == "allgather" else 1
        shape += [ring, context // ring]
        names += [RING, ULYSSES]
    mesh = init_device_mesh(device_type, tuple(shape), mesh_dim_names=tuple(names))
    for name in names:
        _set_timeout(mesh[name], collective_timeout(spec))
    if context > 1:
        _set_timeout(_flat(mesh), collective_timeout(spec))
    return mesh


def collective_timeout(spec: RunningKeys) -> timedelta:
    """Return how long a collective may take before torch aborts its rank.

    If both timeouts are equal, the supervisor's must come first: it knows which rank is late, and
    records where all ranks are.
    """
    seconds = spec.distributed_timeout_seconds
    if 0 < spec.hang_timeout <= seconds:
        seconds = max(seconds, spec.hang_timeout + _HEAD_START)
    return timedelta(seconds=seconds)


def sharding_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh over which `fully_shard` works: 1-D, or 2-D `(replicate, shard)` for HSDP.

    Weights are also sharded over context-parallel ranks, since these hold the same model.
    """
    names = mesh.mesh_dim_names or ()
    replicated = mesh.size(0) > 1
    if RING not in names:
        return mesh if replicated else mesh[SHARD]
    flat = _flat(mesh)
    return mesh[REPLICATE, _FLAT] if replicated else flat


def _flat(mesh: DeviceMesh) -> DeviceMesh:
    """Return a replica's ranks as a 1-D mesh, the same object on every call."""
    return mesh[SHARD, RING, ULYSSES]._flatten(_FLAT)


def _set_timeout(mesh: DeviceMesh, timeout: timedelta) -> None:
    """Set the job's timeout on a 1-D mesh's group, since a new group has torch's default (2.15)."""
    mesh.get_group().set_timeout(timeout)
