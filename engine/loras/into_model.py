"""Add LoRAs to a model's weights, tensor by tensor: summed in fp32 and rounded once."""

from __future__ import annotations

import os
import shutil
import time
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors import safe_open

from engine.exports.readback import VerifiedFile
from engine.exports.recipe import HASH, PREFIX, UNKNOWN_HASH, date_of
from engine.exports.source import read_stored
from engine.exports.stock import bytes_to_copy, copy_or_link, files_of
from engine.loras.lora_file import as_user_errors, aside_file, check_room
from engine.loras.placing import updates_of
from jobs.errors import UserError
from jobs.run.rundir import sync

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from engine.loras.lora_file import LoraFile
    from engine.loras.models import Component, Model
    from engine.loras.placing import Update
    from engine.model.files.weight_files import StoredTensor

_STALE: Final = ("sshs_", f"{PREFIX}hash_")


def merge_into(
    files: list[LoraFile],
    weights: list[float],
    model: Model,
    output: Path,
    *,
    component: str | None,
    progress: Callable[[int, int], None],
) -> dict[str, Any]:
    """Write a model with LoRAs added to its weights.

    Args:
        files: The LoRAs.
        weights: The factor of each LoRA.
        model: The model, which is only read.
        output: The directory or file to write; must not exist.
        component: The denoiser that they are for, if the model has two.
        progress: Called with the tensors done and their total.

    Returns:
        The number of changed layers.

    Raises:
        UserError: A LoRA does not fit this model, or the output cannot be written.
    """
    if any(file.is_dora for file in files) and (len(files) > 1 or weights != [1.0]):
        raise UserError("a DoRA can only be merged alone and at weight 1: it sets lengths")
    updates: dict[str, dict[str, list[Update]]] = {}
    for file, weight in zip(files, weights, strict=True):
        for name, of_layers in updates_of(file, weight, model, component).items():
            mine = updates.setdefault(name, {})
            for layer, some in of_layers.items():
                mine.setdefault(layer, []).extend(some)
    _check_precision(model, updates)
    changed = {name: model.components[name] for name in updates}
    total = sum(len(component.tensors) for component in changed.values())
    done = 0

    def more() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    if model.root.is_file():
        (only,) = changed.values()
        size = sum(_bytes(tensor) for tensor in only.tensors.values())
        check_room(output, size)
        facts = {name: (place.dtype, place.shape) for name, place in only.tensors.items()}
        header = _header(model.root, files, output)
        with aside_file(output, facts, header) as written:
            _write(only.tensors, updates[only.name], written, more)
    else:
        _write_directory(model, changed, updates, files, output, more)
    layers = sum(len(of_layers) for of_layers in updates.values())
    return {"path": str(output), "layers": layers, "components": sorted(filter(None, updates))}


def _check_precision(model: Model, updates: Mapping[str, Mapping[str, Any]]) -> None:
    """Reject weights in which the sum would be lost to rounding.

    Raises:
        UserError: A weight is quantized or has 8 bits.
    """
    for name, of_tensors in updates.items():
        component = model.components[name]
        for layer in of_tensors:
            dtype = component.tensors[layer].dtype
            if not dtype.is_floating_point or dtype.itemsize < 2:
                raise UserError(
                    f"{layer} of {model.root} is stored as {str(dtype).removeprefix('torch.')}",
                    "merge into the bf16, fp16 or fp32 model",
                )


def _write_directory(
    model: Model,
    changed: Mapping[str, Component],
    updates: Mapping[str, Mapping[str, list[Update]]],
    files: list[LoraFile],
    output: Path,
    more: Callable[[], None],
) -> None:
    """Write a directory like the model's, with the same file names."""
    own = {tensor.file for c in changed.values() for tensor in c.tensors.values()}
    size = sum(_bytes(tensor) for c in changed.values() for tensor in c.tensors.values())
    copies = []
    if model.index is not None:
        first, *others = changed
        copies = [
            copy
            for copy in files_of(model.root, dict(model.index), {first})
            if not copy.name.startswith(tuple(f"{name}/" for name in others))
            or (copy.name.endswith(".json") and ".index." not in copy.name)
        ]
        size += bytes_to_copy(copies, output.absolute().parent)
    check_room(output, size)
    aside = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    with as_user_errors(output):
        try:
            aside.mkdir()
            for copy in copies:
                copy_or_link(copy, aside)
            for component in changed.values():
                place = aside / component.directory.relative_to(model.root)
                place.mkdir(parents=True, exist_ok=True)
                _copy_descriptions(component, place)
                for file in sorted(own):
                    tensors = {n: t for n, t in component.tensors.items() if t.file == file}
                    if not tensors:
                        continue
                    facts = {name: (t.dtype, t.shape) for name, t in tensors.items()}
                    written = VerifiedFile(place / file.name, facts, _header(file, files, output))
                    try:
                        _write(tensors, updates[component.name], written, more)
                        written.close()
                        written.check()
                    finally:
                        written.abandon()
            for directory in [*(path for path in aside.rglob("*") if path.is_dir()), aside]:
                sync(directory)
            os.rename(aside, output)
            sync(output.absolute().parent)
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def _copy_descriptions(component: Component, place: Path) -> None:
    """Copy a component's config, and the index of the weights that are written."""
    sources = {tensor.file.name for tensor in component.tensors.values()}
    for path in component.directory.glob("*.json"):
        # If the directory has several sets of weights, only one is written, so skip the others'
        # indices.
        if ".index." in path.name and not any(name in path.read_text() for name in sources):
            continue
        if not (place / path.name).exists():
            shutil.copyfile(path, place / path.name)


def _write(
    tensors: Mapping[str, StoredTensor],
    updates: Mapping[str, list[Update]],
    written: VerifiedFile,
    more: Callable[[], None],
) -> None:
    """Write tensors one by one, adding their updates."""
    for name, place in sorted(tensors.items(), key=lambda item: item[1].start):
        tensor, mine = read_stored(place), updates.get(name, [])
        written.add(name, changed_weight(tensor, mine) if mine else tensor)
        more()


@torch.no_grad()
def changed_weight(weight: torch.Tensor, updates: list[Update]) -> torch.Tensor:
    """Return a weight plus the updates of adapters, in its own precision.

    Args:
        weight: `(out, in, …)`; may be changed in place.
        updates: The adapters to apply.
    """
    wide = weight if weight.dtype is torch.float64 else weight.float()
    flat = wide.flatten(1)
    for use in updates:
        parts = {name: part.to(flat.dtype) for name, part in use.source.read(use.module).items()}
        mine = use.rows >= 0
        rows = use.rows[mine]
        first = int(rows[0])
        if "up" in parts and "lengths" not in parts and _in_order(rows):
            up, down = parts["up"].flatten(1)[mine], parts["down"].flatten(1)
            flat[first : first + len(rows)].addmm_(up, down, alpha=use.weight)
            continue
        if "lokr_w1" in parts:
            delta = torch.kron(parts["lokr_w1"], parts["lokr_w2"].flatten(1))[mine]
        else:
            delta = parts["up"].flatten(1)[mine] @ parts["down"].flatten(1)
        if "lengths" in parts:
            whole = flat[rows] + delta
            lengths = parts["lengths"].flatten()[mine]
            norms = torch.linalg.vector_norm(whole, dim=1)
            whole *= torch.where(norms > 0, lengths / norms, 0)[:, None]  # zero rows stay zero
            delta = whole - flat[rows]
        flat.index_add_(0, rows, delta, alpha=use.weight)
    return flat.view(weight.shape).to(weight.dtype)


def _in_order(rows: torch.Tensor) -> bool:
    """Return whether rows are consecutive, so that they can be updated without a copy."""
    return torch.equal(rows, torch.arange(int(rows[0]), int(rows[0]) + len(rows)))


def _header(source: Path, files: list[LoraFile], output: Path) -> dict[str, str]:
    """Return the header entries of a weights file that also hold for the merged one."""
    with safe_open(source, framework="pt") as opened:
        before: dict[str, str] = opened.metadata() or {}
    header = {"format": "pt"} | {n: t for n, t in before.items() if not n.startswith(_STALE)}
    if f"{PREFIX}architecture" in header:
        base = header.get(f"{PREFIX}title") or source.stem
        titles = [base, *(f.header.get(f"{PREFIX}title") or f.path.stem for f in files)]
        header |= {
            f"{PREFIX}title": output.stem,
            f"{PREFIX}date": date_of(time.time()),
            f"{PREFIX}merged_from": ", ".join(titles),
            HASH: UNKNOWN_HASH,
        }
    return header


def _bytes(tensor: StoredTensor) -> int:
    return tensor.elements * tensor.dtype.itemsize
