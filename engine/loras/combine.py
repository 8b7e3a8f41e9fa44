"""Make LoRAs from LoRAs: merge several into one, or reduce the rank of one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from engine.loras.kinds import check_together
from engine.loras.lora_file import LoraWriter, header_of, modules_of
from jobs.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from engine.loras.lora_file import LoraFile

Pair = tuple[torch.Tensor, torch.Tensor]
"""Down `(rank, in, …)` and up `(out, rank, …)` in fp32, whose product is the weight update."""


def merge(
    files: list[LoraFile],
    weights: list[float],
    output: Path,
    *,
    rank: int | None,
    dtype: torch.dtype,
    progress: Callable[[int, int], None],
) -> dict[str, Any]:
    """Write one LoRA with the combined effect of several.

    Concatenate their matrices along the rank, so that ranks add up and the sum is exact. If a rank
    is given, write the best approximation of that rank (truncated SVD) instead.

    Args:
        files: LoRAs for the same model, with the same naming.
        weights: The factor of each file.
        output: The file to write.
        rank: The largest rank; None for the sum of all ranks.
        dtype: The dtype to store.
        progress: Called with the modules done and their total.

    Returns:
        The ranks and modules that were written, and how many were truncated to a lower rank.

    Raises:
        UserError: The files do not fit together, or are not plain LoRAs.
    """
    for file in files:
        _check_plain(file, "merged into a LoRA")
    check_together(files)
    weight_of = dict(zip(map(id, files), weights, strict=True))

    def pairs() -> Iterator[tuple[str, Pair]]:
        for module, having in modules_of(files):
            downs, ups = [], []
            for file in having:
                parts, first = file.read(module), having[0].modules[module]
                rank = parts["down"].shape[0]
                downs.append(parts["down"].reshape(rank, *first["down"].shape[1:]))
                up = parts["up"] * weight_of[id(file)]
                ups.append(up.reshape(up.shape[0], rank, *first["up"].shape[2:]))
            yield module, (torch.cat(downs), torch.cat(ups, dim=1))

    shapes = {}
    for module, having in modules_of(files):
        places = [file.modules[module] for file in having]
        total = sum(place["down"].shape[0] for place in places)
        shapes[module] = (places[0]["down"].shape, places[0]["up"].shape, total)
    return _write(pairs(), shapes, header_of(files, output), output, rank, None, dtype, progress)


def resize(
    file: LoraFile,
    output: Path,
    *,
    rank: int | None,
    energy: float | None,
    dtype: torch.dtype,
    progress: Callable[[int, int], None],
) -> dict[str, Any]:
    """Write the best approximation of a LoRA at a lower rank: the truncated SVD of each layer.

    If an energy is given, all layers are held in memory.

    Args:
        file: The LoRA.
        output: The file to write.
        rank: The largest rank of a layer.
        energy: Instead of a rank, the fraction of each layer's squared singular values to keep.
        dtype: The dtype to store.
        progress: Called with the modules done and their total.

    Returns:
        The ranks that were written, how many modules were truncated, and the fractions of the
        squared norms that they keep.

    Raises:
        UserError: The file is not a plain LoRA.
    """
    _check_plain(file, "resized")

    def pairs() -> Iterator[tuple[str, Pair]]:
        for module in file.modules:
            parts = file.read(module)
            yield module, (parts["down"], parts["up"])

    shapes = {
        module: (parts["down"].shape, parts["up"].shape, parts["down"].shape[0])
        for module, parts in file.modules.items()
    }
    made = _write(pairs(), shapes, header_of([file], output), output, rank, energy, dtype, progress)
    if not made["cut"]:
        made["warnings"] = [f"{file.path} has no layer of a higher rank: nothing was cut"]
    return made


def _check_plain(file: LoraFile, what: str) -> None:
    """Reject LoKr, which has no rank, and DoRA, whose magnitudes depend on the base weights.

    Raises:
        UserError: The file is one of these.
    """
    if file.is_lokr or file.is_dora:
        kind = "LoKr" if file.is_lokr else "DoRA"
        raise UserError(
            f"{file.path.name} is a {kind}, which cannot be {what} exactly",
            "merge it --into a model",
        )


def _write(
    pairs: Iterator[tuple[str, Pair]],
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]],
    header: dict[str, str],
    output: Path,
    rank: int | None,
    energy: float | None,
    dtype: torch.dtype,
    progress: Callable[[int, int], None],
) -> dict[str, Any]:
    """Write a LoRA from a stream of layers, truncated if a rank or an energy is given.

    Args:
        pairs: Its layers.
        shapes: Per module, the shapes of down and up, and the rank before truncation.
        header: Strings for the header.
        output: The file.
        rank: The largest rank.
        energy: The fraction of the squared singular values to keep.
        dtype: The dtype to store.
        progress: Called with the modules done and their total.
    """
    if energy is None:
        ranks = {
            module: _at_most(rank, down, up, total) for module, (down, up, total) in shapes.items()
        }
        made = _pairs_of(pairs, ranks)
    else:  # the header needs all ranks first; LoRAs fit into memory
        ranked = list(_by_energy(pairs, energy))
        ranks = {module: down.shape[0] for module, (down, _), _ in ranked}
        made = iter(ranked)
    facts = {
        module: ((ranks[module], *down[1:]), (up[0], ranks[module], *up[2:]))
        for module, (down, up, _) in shapes.items()
    }
    shares = []
    with LoraWriter(output, facts, dtype, header) as writer:
        for done, (module, (down, up), share) in enumerate(made, 1):
            writer.add(module, down, up)
            shares.append(share)
            progress(done, len(shapes))
    return {
        "path": str(output),
        "modules": len(facts),
        "ranks": sorted(set(ranks.values())),
        "cut": sum(rank < shapes[module][2] for module, rank in ranks.items()),
        "kept": {"least": min(shares), "mean": sum(shares) / len(shares)},
    }


def _at_most(rank: int | None, down: tuple[int, ...], up: tuple[int, ...], total: int) -> int:
    return total if rank is None else min(rank, total, up[0], math.prod(down[1:]))


def _pairs_of(
    pairs: Iterator[tuple[str, Pair]], ranks: dict[str, int]
) -> Iterator[tuple[str, Pair, float]]:
    for module, (down, up) in pairs:
        if ranks[module] == down.shape[0]:
            yield module, (down, up), 1.0
        else:
            left, values, right = factors(down, up)
            yield module, *_truncated(left, values, right, ranks[module], down, up)


def _by_energy(
    pairs: Iterator[tuple[str, Pair]], energy: float
) -> Iterator[tuple[str, Pair, float]]:
    for module, (down, up) in pairs:
        left, values, right = factors(down, up)
        yield module, *_truncated(left, values, right, rank_of(values, energy), down, up)


def factors(down: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the SVD of a product without forming it, through QR of its factors, in fp64.

    Args:
        down: `(rank, in, …)`.
        up: `(out, rank, …)`.

    Returns:
        Left vectors `(out, k)`, singular values `(k,)` and right vectors `(k, in)`, where k is at
        most the rank, and smaller for small layers.
    """
    left, upper = torch.linalg.qr(up.flatten(1).double())
    right, lower = torch.linalg.qr(down.flatten(1).double().T)
    inner, values, outer = torch.linalg.svd(upper @ lower.T, full_matrices=False)
    return left @ inner, values, outer @ right.T


def rank_of(values: torch.Tensor, energy: float) -> int:
    """Return the lowest rank that keeps a fraction of the squared singular values, at least 1."""
    squares = values.square().cumsum(0)
    if not squares[-1]:
        return 1
    return min(len(values), int((squares < energy * squares[-1]).sum()) + 1)


def _truncated(
    left: torch.Tensor,
    values: torch.Tensor,
    right: torch.Tensor,
    rank: int,
    down: torch.Tensor,
    up: torch.Tensor,
) -> tuple[Pair, float]:
    """Return the best product of a given rank, and the fraction of the squared norm that it keeps.

    Both matrices are scaled by the square root of the singular values, so that rounding affects
    them equally.
    """
    roots, squares = values[:rank].sqrt(), values.square()
    share = float(squares[:rank].sum() / squares.sum()) if squares.any() else 1.0
    new_down = (roots[:, None] * right[:rank]).float().reshape(rank, *down.shape[1:])
    new_up = (left[:, :rank] * roots).float().reshape(up.shape[0], rank, *up.shape[2:])
    return (new_down, new_up), share
