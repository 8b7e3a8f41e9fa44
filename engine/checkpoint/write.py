"""Make a checkpoint complete: written aside by all ranks, hashed, synced, then renamed."""

from __future__ import annotations

import json
import os
import shutil
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from engine.checkpoint import full, sharded
from engine.checkpoint.contents import SCHEMA
from engine.checkpoint.together import together
from jobs.run.checkpoint_files import STATE_FILE, delete, sha256
from jobs.run.fence import check_fence
from jobs.run.rundir import MANIFEST, sync, write_atomic

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from pathlib import Path

    import torch.distributed as dist

    from engine.checkpoint.contents import Contents
    from engine.ranks.world import World

    Hashes = dict[str, tuple[int, str]]  # file name → bytes and SHA-256


def write(
    contents: Contents, final: Path, world: World, group: dist.ProcessGroup | None = None
) -> int:
    """Write a checkpoint and rename it into place; a collective of `group`.

    Every rank hashes and syncs what it wrote itself.

    Args:
        contents: What is in it.
        final: Its directory, in which there is no complete checkpoint.
        world: The ranks.
        group: All ranks, over gloo; default: the default group.

    Returns:
        The bytes of all its files.

    Raises:
        SaveError: It could not be written, on whichever rank; raised on all of them, and nothing
            is left of it.
    """
    aside = aside_of(final)
    try:
        together(lambda: _begin(aside, world), world, group)
        hashes = together(lambda: _write_own(contents, aside, world, group), world, group)
        sizes = together(
            lambda: _complete(contents, aside, final, hashes) if world.main else 0, world, group
        )
    except BaseException:
        if world.main:
            shutil.rmtree(aside, ignore_errors=True)  # it may be what fills the disk
        raise
    return int(sizes[0])


def aside_of(final: Path) -> Path:
    """Return the path of a checkpoint that is being written."""
    return final.with_name(f".{final.name}.tmp")


def keep_newest(
    checkpoints: Iterable[tuple[int, Path]], limit: int | None, best: Collection[int] = ()
) -> None:
    """Delete all complete checkpoints but the newest and, by step, the best ones (one rank)."""
    for step, path in list(checkpoints)[:-limit] if limit is not None else []:
        with suppress(Exception):  # someone else may be deleting it; the new one is complete
            if step not in best:
                delete(path)


def _begin(aside: Path, world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)  # a thread begins on GPU 0, whatever the process uses
    if world.main:
        shutil.rmtree(aside, ignore_errors=True)  # of an attempt that was killed
        aside.mkdir(parents=True)


def _write_own(
    contents: Contents, aside: Path, world: World, group: dist.ProcessGroup | None
) -> Hashes:
    """Write and sync this rank's files; their hashes."""
    if contents.layout == "full":
        full.write_tensors(contents, aside, main=world.main)
        own = full.own_files(aside, world.rank)
    else:
        sharded.write_tensors(contents, aside, group)
        own = sharded.own_files(aside, world.rank)
    for path in own:
        sync(path)
    return {path.name: (path.stat().st_size, sha256(path)) for path in own}


def _complete(contents: Contents, aside: Path, final: Path, hashes: list[Hashes]) -> int:
    """Write state and manifest, rename (one rank); the bytes of all files."""
    state = aside / STATE_FILE
    write_atomic(state, json.dumps(contents.state, indent=1) + "\n", durable=True)
    files = {state.name: (state.stat().st_size, sha256(state))}
    for each in hashes:
        files |= each
    if set(files) != {path.name for path in aside.iterdir()}:
        odd = sorted(set(files) ^ {path.name for path in aside.iterdir()})
        raise RuntimeError(f"{aside} has files that no rank wrote, or lacks some: {odd}")
    size = sum(number for number, _ in files.values())
    manifest = {
        "schema": SCHEMA,
        "step": contents.step,
        "layout": contents.layout,
        "world_size": contents.world_size,
        "ema": "ema" in contents.tensors,
        "time": time.time(),
        "bytes": size,
        "files": {n: {"bytes": b, "sha256": h} for n, (b, h) in sorted(files.items())},
    }
    write_atomic(aside / MANIFEST, json.dumps(manifest, indent=1) + "\n", durable=True)
    sync(aside)
    check_fence(final.parent.parent)
    shutil.rmtree(final, ignore_errors=True)  # of an attempt that was cut off before its manifest
    os.replace(aside, final)
    sync(final.parent)
    return size
