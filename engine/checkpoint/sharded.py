"""The sharded layout: `torch.distributed.checkpoint`, every rank its own file."""

from __future__ import annotations

import errno
import os
import shutil
from typing import TYPE_CHECKING, Any, Final

from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from engine.checkpoint.dcp_reader import INDEX, Planner, Reader
from engine.train.optimizer import explain_load_failure
from jobs.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    import torch.distributed as dist

    from engine.checkpoint.contents import Contents

_NEXT_TO_NOTHING: Final = 64 * 2**20  # bytes; what a writer that failed has left over


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
        cause = next(filter(None, (_of_the_disk(failure, directory) for failure in failures)), None)
        raise cause or error from None


def _of_the_disk(failure: BaseException, directory: Path) -> OSError | None:
    """Return the file-system error behind a failure.

    Torch's writer says of most short writes only that it is not where it expected to be.
    """
    seen: BaseException | None = failure
    while seen is not None:
        if isinstance(seen, OSError):
            return seen
        seen = seen.__cause__ or seen.__context__
    if not isinstance(failure, RuntimeError) or "inline_container" not in str(failure):
        return None
    full = shutil.disk_usage(directory).free < _NEXT_TO_NOTHING
    code = errno.ENOSPC if full else errno.EIO
    return OSError(code, os.strerror(code))


def read_tensors(tensors: dict[str, Any], directory: Path, world_size: int) -> None:
    """Fill tensors from a directory, however many ranks wrote it; a collective.

    Raises:
        UserError: The optimizer's state cannot be cut for this number of ranks, or the files are
            damaged, or would run code.
    """
    reader = Reader(directory)
    reader.read_metadata()  # here, since torch only logs why it cannot be read
    try:
        state_dict_loader.load(
            tensors, storage_reader=reader, planner=Planner(), no_dist=world_size == 1
        )
    except CheckpointException as error:
        ours = (failure for failure, _ in error.failures.values() if isinstance(failure, UserError))
        raise next(ours, None) or explain_load_failure(error) or error from None


def own_files(directory: Path, rank: int) -> list[Path]:
    """Return the files that a rank has written; rank 0's has the index too."""
    files = sorted(directory.glob(f"__{rank}_*"))
    return [*files, directory / INDEX] if rank == 0 else files
