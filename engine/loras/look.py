"""What a LoRA file is: for `fsdp-tui lora info`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from engine.loras.kinds import families_of
from engine.loras.lora_file import TEXT

if TYPE_CHECKING:
    from engine.loras.lora_file import LoraFile, Parts

_LARGEST: Final = 5  # modules that are named with their norms
_LONGEST: Final = 400  # characters of a header's text


def info(file: LoraFile) -> dict[str, Any]:
    """Return what a LoRA is, with the norms of what it adds to each weight.

    Returns:
        JSON values. `alphas` are those that scale as the file says, so of rsLoRA not its own.

    Raises:
        UserError: An alpha is zero, or a value is not finite.
    """
    ranks: Counter[int] = Counter()
    alphas: Counter[float] = Counter()
    norms: dict[str, float] = {}
    for module, parts in file.modules.items():
        if "down" in parts:
            rank = file.rank(module)
            ranks[rank] += 1
            alphas[round(file.scale(module) * rank, 4)] += 1
        norms[module] = norm(file.read(module))
    dtypes = Counter(
        str(place.dtype).removeprefix("torch.")
        for parts in file.modules.values()
        for part, place in parts.items()
        if part != "alpha"
    )
    largest = sorted(norms, key=lambda module: -norms[module])[:_LARGEST]
    return {
        "path": str(file.path),
        "bytes": file.path.stat().st_size,
        "families": sorted(families_of(file.modules, file.header)),
        "names": file.style,
        "kind": "LoKr" if file.is_lokr else "DoRA" if file.is_dora else "LoRA",
        "modules": len(file.modules),
        "text_modules": sum(module.startswith(TEXT) for module in file.modules),
        "ranks": {str(rank): count for rank, count in sorted(ranks.items())},
        "alphas": {f"{alpha:g}": count for alpha, count in sorted(alphas.items())},
        "dtypes": dict(sorted(dtypes.items())),
        "norm": {
            "mean": sum(norms.values()) / len(norms),
            "largest": {module: norms[module] for module in largest},
        },
        "header": {
            name: text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
            for name, text in sorted(file.header.items())
        },
    }


def norm(parts: Parts) -> float:
    """Return the Frobenius norm of what an adapter adds, without making the product.

    ‖up · down‖² is the sum of (upᵀ up) ∘ (down downᵀ), and a Kronecker product's norm the product
    of its factors' norms. DoRA's lengths are not counted: they need the base's weights.
    """
    if "lokr_w1" in parts:
        return float(parts["lokr_w1"].norm() * parts["lokr_w2"].norm())
    up, down = parts["up"].flatten(1).double(), parts["down"].flatten(1).double()
    return float(((up.T @ up) * (down @ down.T)).sum().clamp_min(0).sqrt())
