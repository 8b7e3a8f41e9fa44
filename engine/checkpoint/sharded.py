"""The sharded layout: `torch.distributed.checkpoint`, every rank its own file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from engine.optim import explain_load_failure

if TYPE_CHECKING:
    from pathlib import Path

    import torch.distributed as dist

    from engine.checkpoint.contents import Contents


def write_tensors(contents: Contents, directory: Path, group: dist.ProcessGroup | None) -> None:
    """Write the tensors into an empty directory; a collective of `group`.

    Raises:
        OSError: A rank could not write; raised on all of them.
        CheckpointException: Something else failed on some rank; raised on all.
    """
    try:
        state_dict_saver.save(
            contents.tensors,
            checkpoint_id=directory,
            process_group=group,
            no_dist=contents.world_size == 1,
        )
    except CheckpointException as error:
        # Torch has gathered what went wrong from all ranks, so all of them are here.
        failures = [failure for failure, _ in error.failures.values()]
        raise next((f for f in failures if isinstance(f, OSError)), error) from None


def read_tensors(tensors: dict[str, Any], directory: Path, world_size: int) -> None:
    """Fill tensors from a directory, however many ranks wrote it; a collective.

    Raises:
        UserError: The optimizer's state cannot be cut for this number of ranks.
    """
    try:
        state_dict_loader.load(tensors, checkpoint_id=directory, no_dist=world_size == 1)
    except CheckpointException as error:
        raise explain_load_failure(error) or error from None


def own_files(directory: Path, rank: int) -> list[Path]:
    """The files that a rank has written; rank 0's has the index too."""
    found = sorted(directory.glob(f"__{rank}_*"))
    return [*found, directory / ".metadata"] if rank == 0 else found
