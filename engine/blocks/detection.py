"""The facts about a model, as JSON values that `jobs.models.blocks.detection` reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.blocks.recommend import recommend, score
from engine.blocks.walk import walk
from jobs.models.blocks.parts import BlockClass

if TYPE_CHECKING:
    import torch

    from engine.blocks.walk import Kind


def report(model: torch.nn.Module) -> dict[str, Any]:
    """Walk a model, and say what its classes are: recommended ones first, then the likeliest."""
    kinds, parts = walk(model)
    no_split = _names(model, "_no_split_modules")
    repeated = _names(model, "_repeated_blocks")
    chosen = recommend(kinds, parts, no_split, repeated)
    total = parts.total()

    def rank(kind: Kind) -> tuple[bool, bool, float, str]:
        blocks = kind.repeated > 1 and kind.composite
        return kind.name not in chosen, not blocks, -score(kind, total), kind.name

    classes = [
        BlockClass(
            class_name=kind.name,
            count=kind.count,
            params_each=kind.each,
            params_total=kind.total,
            share=kind.total / total if total else 0.0,
            recommended=kind.name in chosen,
            in_no_split_modules=kind.name in no_split,
            in_repeated_blocks=kind.name in repeated,
            sample_paths=kind.paths,
        )
        for kind in sorted(kinds.values(), key=rank)
        if kind.callable and kind.total and kind.count + (kind.name in {*chosen, *no_split}) > 1
    ]
    return {
        "model_class": type(model).__name__,
        "total_params": total,
        "no_split_modules": no_split,
        "classes": [vars(block_class) for block_class in classes],
        "parts": parts.to_dict(),
    }


def _names(model: torch.nn.Module, attribute: str) -> list[str]:
    """Class names that a model class lists; transformers has a set, diffusers a list or None."""
    listed = getattr(model, attribute, None) or ()
    if isinstance(listed, str):
        listed = [listed]
    names = map(str, listed)
    return list(dict.fromkeys(sorted(names) if isinstance(listed, set) else names))
