"""Ranks forked from the test's own process, which has imported all that they need."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def on_ranks(work: Callable[[int], Any], ranks: int, shared: Path) -> list[Any]:
    """Call `work(rank)` on ranks that form a gloo group; what each returned, by rank.

    Nothing may run `backward` there: on a machine with GPUs, autograd's threads do not survive a
    fork.

    Args:
        work: Any function, also a nested one; its result must be what `torch.save` takes.
        ranks: How many.
        shared: An existing directory of the test's own.

    Raises:
        torch.multiprocessing.spawn.ProcessRaisedException: A rank failed; with its traceback.
    """
    torch.multiprocessing.start_processes(
        _rank, (work, ranks, shared), nprocs=ranks, start_method="fork"
    )
    return [torch.load(shared / f"rank{rank}.pt") for rank in range(ranks)]


def _rank(rank: int, work: Callable[[int], Any], ranks: int, shared: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{shared}/meeting", rank=rank, world_size=ranks)
    torch.save(work(rank), shared / f"rank{rank}.pt")
    dist.destroy_process_group()
