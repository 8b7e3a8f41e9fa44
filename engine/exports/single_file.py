"""A trained transformer as one file with its authors' layers, which ComfyUI and Forge load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from engine.exports.authors_layout import authors_layout, fits_8_bits
from engine.exports.model import check_fit
from engine.exports.readback import VerifiedFile
from engine.exports.recipe import describe
from engine.exports.sdxl_layout import PARTS
from engine.exports.source import read_stored
from engine.model.files import weights
from jobs.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from engine.exports.recipe import Recipe
    from engine.exports.source import Fact

_FP8: Final = torch.float8_e4m3fn


class SingleFileOutput:
    """Takes a transformer's tensors one by one, and writes them under the authors' names.

    Text encoders and the autoencoder are in SDXL's alone: of others, both tools load them from
    files of their own. Only parts of layers that are one there are kept until all have come.

    Args:
        recipe: What is exported.
        facts: What will come, by the names in the model. What does not come, because it was not
            trained, is taken from the base model.
        directory: An empty one.

    Attributes:
        bytes: The room it takes on the disk.
        pieces: How many tensors are checked at the end.
        warnings: Nothing.

    Raises:
        UserError: It is a LoRA, or the family has no such file.
        OSError: The file cannot be written.
    """

    def __init__(self, recipe: Recipe, facts: Mapping[str, Fact], directory: Path) -> None:
        if recipe.spec.model_type == "lora":
            raise UserError(
                "a single file is for a full model, and the job trains a LoRA",
                "remove --as; `fsdp-tui lora merge --into` puts a LoRA into a model's file",
            )
        self.warnings: list[str] = []
        model, self._stored = weights.build_on_meta(
            recipe.family.transformer_class(), recipe.root / recipe.family.component, recipe.spec
        )
        check_fit(model, facts)
        if recipe.spec.model_family == "sdxl":
            for part in PARTS:
                tensors = weights.stored_tensors(recipe.root / part)
                self._stored = self._stored | {f"{part}/{name}": t for name, t in tensors.items()}
        shapes = {name: place.shape for name, place in self._stored.items()}
        self._layout = authors_layout(recipe.family, shapes)
        self._owners = {
            member: name for name, made in self._layout.items() for member in made.members
        }
        planned: dict[str, Fact] = {}
        for name, made in self._layout.items():
            first = made.members[0]
            trained = facts[first][0] if first in facts else self._stored[first].dtype
            shape = made.shape(shapes)
            if recipe.dtype == "fp8":
                narrow = fits_8_bits(recipe.spec.model_family, name, shape)
                planned[name] = (_FP8 if narrow else torch.bfloat16, shape)
            else:
                base = self._stored[first].dtype
                planned[name] = (recipe.model_dtype(trained, base, keep_fp32=False), shape)
        self._waiting: dict[str, dict[str, torch.Tensor]] = {}
        self._missing = set(self._owners)
        self.bytes = sum(
            dtype.itemsize * torch.Size(shape).numel() for dtype, shape in planned.values()
        )
        self.pieces = len(planned)
        path = directory / f"{recipe.spec.name}.safetensors"
        self._file = VerifiedFile(path, planned, describe(recipe, "comfyui"))

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take one tensor, and write the layer that it completes."""
        if name not in self._missing:
            return  # another name of one that came under its first
        self._missing.discard(name)
        owner = self._owners[name]
        parts = self._waiting.setdefault(owner, {})
        parts[name] = tensor
        if len(parts) == len(self._layout[owner].members):
            self._file.add(owner, self._layout[owner].make(self._waiting.pop(owner)))

    def finish(self, checked: Callable[[], None]) -> None:
        """Add what was not trained, and read the file back.

        Args:
            checked: Called after each tensor that was read back.

        Raises:
            DamagedError: What lies on the disk is not the model.
            UserError: The base model cannot be read.
            OSError: The file cannot be written.
        """
        for made in self._layout.values():
            for member in made.members:
                if member in self._missing:
                    self.add(member, read_stored(self._stored[member]))
        self._file.close()
        self._file.check(checked)

    def abandon(self) -> None:
        """Close what is open."""
        self._file.abandon()
