"""What the tests of exports share: models that look trained, and ways to export them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from engine import families
from engine.diffusion.random_numbers import keyed_generator
from engine.exports.live import export
from engine.exports.recipe import Recipe
from engine.model.adapters import lora
from engine.model.files import weights
from engine.ranks.team import FileBarrier
from engine.ranks.world import World
from jobs.run.rundir import RunDir

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.spec.job_spec import JobSpec

ALONE = World(rank=0, size=1, device=torch.device("cpu"), strategy="single", token="t")


def trained_model(spec: JobSpec, root: Path, *, seed: int = 3) -> Any:
    """The transformer as a rank builds it, with what is trained moved away from its start."""
    family = families.load(spec.model_family)
    model, stored = weights.build_on_meta(family.transformer_class(), root / "transformer", spec)
    if spec.model_type == "lora":
        lora.add_lora(model, spec, family.LORA_TARGETS)
    weights.materialise(model, ALONE.device)
    weights.stream(model, stored, names=lora.adapted_name(model).__getitem__)
    draw = keyed_generator(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                # A LoRA is set; whole weights are nudged.
                change = torch.randn(parameter.shape, generator=draw)
                if spec.model_type == "lora":
                    parameter.copy_(0.2 * change)
                else:
                    parameter.add_(0.01 * change)
    return model


def recipe_of(spec: JobSpec, root: Path, *, step: int = 4, **changes: Any) -> Recipe:
    """What the end of a job exports."""
    family = families.load(spec.model_family)
    return Recipe(
        spec,
        family,
        root,
        step,
        **{"ema": False, "dtype": spec.export_dtype, "formats": spec.export_formats, **changes},
    )


def export_alone(model: Any, recipe: Recipe, target: Path) -> Any:
    """Export on a single rank."""
    barrier = FileBarrier(RunDir(target.parent / "run"), "t", 0, 1)
    return export(model, recipe, target, ALONE, barrier)


def bytes_of(directory: Path) -> dict[str, bytes]:
    """Relative name → contents of every file."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
