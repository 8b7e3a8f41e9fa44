"""`python -m engine.doctor.allreduce FOLDER`: one rank that measures all-reduce and all-gather.

Started by `jobs.doctor.processes` as a job's ranks are, so that it meets what a job would meet.
FOLDER is a run directory of its own: each rank keeps its status there, rank 0 leaves what was
measured.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from engine.ranks.failure import record_failure
from engine.ranks.telemetry import Telemetry
from engine.start.command import OneLineParser
from jobs.doctor.agreed import RESULT
from jobs.run.rundir import RunDir, write_atomic

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    import torch

_GPU_SIZES: Final = (8, 1 << 16, 1 << 20, 1 << 24, 1 << 26, 1 << 28)  # bytes
_CPU_SIZES: Final = (8, 1 << 16, 1 << 20, 1 << 24)
_WARM_UP: Final = 3
_MOST: Final = 2000  # repetitions of one size
_SELF_DESTRUCT: Final = 20.0  # seconds after the limit, in case no parent process kills this one
_FLOAT: Final = 4  # bytes


def main(arguments: list[str] | None = None) -> int:
    """Run one rank."""
    options = _parse(arguments)
    # This uses a thread in C, so it works while CUDA or gloo holds the GIL.
    faulthandler.dump_traceback_later(options.limit + _SELF_DESTRUCT, exit=True)
    run_dir, rank = RunDir(options.folder), int(os.environ.get("RANK", "0"))
    telemetry = Telemetry(run_dir, rank)
    try:
        device = join(options.device, options.limit, run_dir.root.absolute())
        telemetry.moved()
        sizes = _CPU_SIZES if device.type == "cpu" else _GPU_SIZES
        measured = list(measure(sizes, options.seconds, device, telemetry.moved))
        gathered = measure_gather(sizes[-1], options.seconds / len(sizes), device, telemetry.moved)
        if rank == 0:
            write_atomic(
                run_dir.root / RESULT, json.dumps({"sizes": measured, "gathered": gathered})
            )
        leave()
    except BaseException as error:
        record_failure(run_dir, rank, error, telemetry)
        os._exit(1)  # at once: the others may be in a collective
    telemetry.close()
    return 0


def join(kind: str, limit: float, folder: Path) -> torch.device:
    """Join the process group in the way a job's ranks do, and return this rank's device.

    Raises:
        RuntimeError: Torch does not see the GPU.
    """
    import torch
    import torch.distributed as dist

    world = {
        "rank": int(os.environ.get("RANK", "0")),
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
    }
    options: dict[str, Any] = {"timeout": timedelta(seconds=limit), **world}
    if world["world_size"] == 1:  # a launcher of one process opens no port
        options["init_method"] = f"file://{folder / 'store'}"
    if kind == "cpu":
        dist.init_process_group("gloo", **options)
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= torch.cuda.device_count():
        raise RuntimeError(f"torch sees {torch.cuda.device_count()} GPUs, but needs {local + 1}")
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device, **options)  # as jobs do
    dist.all_reduce(torch.ones(1))  # through gloo, like requests and checkpoints
    return device


def measure(
    sizes: tuple[int, ...], seconds: float, device: torch.device, moved: Callable[..., None]
) -> Iterator[dict[str, Any]]:
    """All-reduce messages of each size for an equal part of the time. Collectives.

    Args:
        sizes: Message sizes in bytes.
        seconds: Time for all sizes together.
        device: The device of the messages.
        moved: Called after each repetition, and with the number of sizes that are done.

    Raises:
        RuntimeError: A sum is wrong.
    """
    import torch
    import torch.distributed as dist

    for place, size in enumerate(sizes, 1):
        check_sums(max(1, size // _FLOAT), device, size)
        message = torch.zeros(max(1, size // _FLOAT), device=device)
        reduce = partial(dist.all_reduce, message)
        once = timed(reduce, _WARM_UP, device, moved)
        each = timed(reduce, _repetitions(once, seconds / len(sizes), device), device, moved)
        moved(place)
        yield {"bytes": size, "seconds": each, "bus": bus_bandwidth(size, each)}


def measure_gather(
    size: int, seconds: float, device: torch.device, moved: Callable[..., None]
) -> dict[str, Any]:
    """All-gather one size, as FSDP does before each unit. Collective.

    Args:
        size: Bytes on each rank after gathering.
        seconds: Approximate duration.
        device: The device of the shards.
        moved: Called after each repetition.
    """
    import torch
    import torch.distributed as dist

    ranks = dist.get_world_size()
    shard = torch.zeros(max(1, size // _FLOAT // ranks), device=device)
    whole = torch.empty(shard.numel() * ranks, device=device)

    def gather() -> None:
        dist.all_gather_into_tensor(whole, shard)

    once = timed(gather, _WARM_UP, device, moved)
    each = timed(gather, _repetitions(once, seconds, device), device, moved)
    return {"bytes": size, "seconds": each, "bus": (ranks - 1) / ranks * size / each}


def check_sums(count: int, device: torch.device, size: int) -> None:
    """Check that every value arrives, since some machines silently lose data between GPUs.

    Raises:
        RuntimeError: A value did not.
    """
    import torch
    import torch.distributed as dist

    ranks, rank = dist.get_world_size(), dist.get_rank()
    message = torch.full((count,), float(rank + 1), device=device)
    dist.all_reduce(message)
    # Count correct values rather than wrong ones, so that a device that computes nothing fails.
    wrong = count - int((message == ranks * (ranks + 1) / 2).sum())
    if wrong:
        raise RuntimeError(
            f"{wrong} of {count} sums arrived wrong in a message of {size} bytes; "
            "data is damaged between devices (often: PCIe ACS or IOMMU)"
        )


def timed(
    collective: Callable[[], None], times: int, device: torch.device, moved: Callable[..., None]
) -> float:
    """Return the mean seconds per collective of several in a row; the mean differs by rank."""
    import torch.distributed as dist

    dist.barrier()
    _wait(device)
    begun = time.perf_counter()
    for _ in range(times):
        collective()
        moved()
    _wait(device)
    return (time.perf_counter() - begun) / times


def bus_bandwidth(size: int, seconds: float) -> float:
    """Return bytes per second over each rank's link; see nccl-tests' PERFORMANCE.md."""
    import torch.distributed as dist

    ranks = dist.get_world_size()
    return 2 * (ranks - 1) / ranks * size / seconds


def leave() -> None:
    """Leave together, so that no rank closes connections that another's last all-reduce needs."""
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()


def _repetitions(once: float, seconds: float, device: torch.device) -> int:
    """Return the slowest rank's number of repetitions, since all must repeat equally often."""
    import torch
    import torch.distributed as dist

    slowest = torch.tensor([once], device=device, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return max(1, min(_MOST, int(seconds / max(float(slowest), 1e-7))))


def _wait(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(prog="python -m engine.doctor.allreduce", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds to measure")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds until exit")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
