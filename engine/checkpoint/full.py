"""The full layout: whole tensors in safetensors files that any tool opens.

Written by rank 0 while all ranks gather one tensor after the other, so that no host ever holds the
model; read by all, each its own rows, so that no rank ever reads more than its part.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

import torch

from engine.checkpoint.together import OutOfStepError
from engine.model.files.safetensors_writer import SafetensorsWriter
from engine.model.files.weight_files import read_header
from engine.model.files.weight_reader import read_all
from engine.model.files.weights import reading_of
from engine.parallel.gather import gather
from jobs.errors import UserError
from jobs.run.rundir import read_json, write_atomic

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from engine.checkpoint.contents import Contents

OTHERS: Final = "optimizer.json"  # what an optimizer's state has besides tensors


def write_tensors(contents: Contents, directory: Path, *, main: bool) -> None:
    """Write the tensors into an empty directory; a collective of the ranks that shard them.

    Args:
        contents: With live tensors, not a copy: gathering needs the ranks' own devices.
        directory: Where to.
        main: Whether this rank writes.

    Raises:
        OutOfStepError: This rank could not gather a tensor, which the others still wait for.
        Exception: It could not write. It has taken part in all gathering nevertheless.
    """
    failure: Exception | None = None
    for part, values in contents.tensors.items():
        try:
            _write_part(_tensors(values), directory / f"{part}.safetensors", main=main)
        except OutOfStepError:
            raise
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure
    if main:
        others = {
            name: value
            for name, value in contents.tensors["optimizer"].items()
            if not isinstance(value, torch.Tensor)
        }
        write_atomic(directory / OTHERS, json.dumps(others, indent=1) + "\n", durable=True)


def read_tensors(tensors: dict[str, Any], directory: Path) -> None:
    """Fill tensors from a directory, each rank its own rows; no collective.

    Raises:
        UserError: The checkpoint lacks a tensor, or has it in another shape.
    """
    for part, values in tensors.items():
        stored = {t.name: t for t in read_header(directory / f"{part}.safetensors")}
        readings = []
        for name, target in _tensors(values).items():
            place = stored.get(name)
            if place is None or tuple(place.shape) != tuple(target.shape):
                has = f"has it as {tuple(place.shape)}" if place else "does not have it"
                raise UserError(
                    f"{name} of {part} is {tuple(target.shape)} here, but the checkpoint "
                    f"{directory.name} {has}"
                )
            readings.append(reading_of(name, place, target))
        read_all(readings, lambda done: None)
    others = read_json(directory / OTHERS) or {}
    optimizer = tensors["optimizer"]
    optimizer.update({name: others[name] for name in optimizer if name in others})


def own_files(directory: Path, rank: int) -> list[Path]:
    """Return the files that a rank has written."""
    return sorted(path for path in directory.iterdir() if path.is_file()) if rank == 0 else []


def _tensors(values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def _write_part(tensors: dict[str, torch.Tensor], path: Path, *, main: bool) -> None:
    """Gather and write the tensors of one file.

    All ranks have the same names in the same order, and keep gathering whatever error rank 0 meets:
    if it stopped, it would leave the others in a collective.
    """
    writer: SafetensorsWriter | None = None
    failure: Exception | None = None
    try:
        if main:
            facts = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
            writer = SafetensorsWriter(path, facts)
    except Exception as error:
        failure = error
    with writer or nullcontext():
        for name, tensor in tensors.items():
            try:
                whole = gather(tensor)
            except Exception as error:
                raise OutOfStepError(name) from error
            if writer is not None and failure is None:
                try:
                    writer.add(name, whole)
                except Exception as error:
                    failure = error
            del whole
        if failure is not None:
            raise failure
