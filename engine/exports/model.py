"""Write a trained transformer as part of a full pipeline, streamed into files of limited size."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import torch
from diffusers.utils import SAFETENSORS_WEIGHTS_NAME
from huggingface_hub import split_state_dict_into_shards_factory

from engine.exports import stock
from engine.exports.readback import VerifiedFile
from engine.exports.recipe import describe
from engine.exports.source import read_stored
from engine.model.files import weights
from jobs.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from engine.exports.recipe import Recipe
    from engine.exports.source import Fact

LARGEST_FILE: Final = 5 * 10**9  # bytes, the limit of the hub's tools


class ModelOutput:
    """Receives a transformer's tensors one by one, and writes a full pipeline around them.

    Args:
        recipe: Describes the export.
        facts: The tensors that will be added, by the names in the model. Untrained tensors are
            copied from the base model.
        directory: An empty directory.

    Attributes:
        bytes: Lower bound of the disk space needed.
        pieces: Number of tensors and files that are written or checked at the end.
        warnings: Messages for the user about the export.

    Raises:
        UserError: The tensors are not those of this model, or the base model is incomplete.
        OSError: The files cannot be written.
    """

    def __init__(self, recipe: Recipe, facts: Mapping[str, Fact], directory: Path) -> None:
        self._recipe = recipe
        self._directory = directory
        self.warnings: list[str] = []
        if recipe.formats is not None and recipe.formats != ["diffusers"]:
            # Only warn: this may be the end of days of training.
            self.warnings.append("other tools' names are for LoRAs: this is a diffusers pipeline")
        model, self._stored = weights.build_on_meta(
            recipe.family.transformer_class(), recipe.family.denoiser_of(recipe.root), recipe.spec
        )
        check_fit(model, facts)
        self._missing = set(self._stored)
        planned = {
            place.name: (_stored_in(recipe, model, name, facts, place.dtype), place.shape)
            for name, place in self._stored.items()
        }
        self._split = split_state_dict_into_shards_factory(
            planned,
            get_storage_size=_bytes,
            filename_pattern=SAFETENSORS_WEIGHTS_NAME.replace(".", "{suffix}."),
            max_shard_size=LARGEST_FILE,
        )
        self._index = stock.read_index(recipe.root)
        trained = {recipe.family.component, recipe.partner}
        leads = recipe.leads
        places = {recipe.family.component: recipe.family.denoiser_of(recipe.root)}
        self._others = stock.files_of(recipe.root, self._index, trained, places) if leads else []
        self._absent = stock.absent_checks(recipe.root, self._index) if leads else []
        if self._absent:
            names = " and ".join(self._absent)
            self.warnings.append(f"the base model lacks {names}: the export has none")
        self.bytes = self._split.metadata["total_size"] + stock.bytes_to_copy(
            self._others, directory.parent
        )
        self.pieces = len(planned) + len(self._others)
        (directory / recipe.family.component).mkdir(exist_ok=True)
        self._files = {
            name: VerifiedFile(
                directory / recipe.family.component / name,
                {n: planned[n] for n in names},
                describe(recipe),
            )
            for name, names in self._split.filename_to_tensors.items()
        }

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor without keeping it."""
        place = self._stored.get(name)
        if place is None:
            return  # an alias of a tensor that is written under its first name
        self._missing.discard(name)
        self._files[self._split.tensor_to_filename[place.name]].add(place.name, tensor)

    def finish(self, checked: Callable[[], None]) -> None:
        """Complete the pipeline, read it back, and have stock diffusers check it.

        Args:
            checked: Called after each tensor that was read back, and each file copied or linked.

        Raises:
            DamagedError: The files on disk differ from the model.
            UserError: The base model cannot be read.
            OSError: The files cannot be written.
        """
        for name in sorted(self._missing):  # not trained
            self.add(name, read_stored(self._stored[name]))
        for copy in self._others:
            stock.copy_or_link(copy, self._directory)
            checked()
        if self._absent:
            stock.write_index_without(self._absent, self._index, self._directory)
        if self._recipe.leads and self._recipe.family.changes_schedule:
            stock.write_schedule(
                self._recipe.family.read_schedule(self._recipe.root), self._directory
            )
        if len(self._files) > 1:
            self._write_index()
        for file in self._files.values():
            file.close()
        for file in self._files.values():
            file.check(checked)
        stock.check_model(self._recipe, self._directory)

    def abandon(self) -> None:
        """Close and remove unfinished files."""
        for file in self._files.values():
            file.abandon()

    def _write_index(self) -> None:
        index = {"metadata": self._split.metadata, "weight_map": self._split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        directory = self._directory / self._recipe.family.component
        path = directory / f"{SAFETENSORS_WEIGHTS_NAME}.index.json"
        path.write_text(text, encoding="utf-8")


def check_fit(model: torch.nn.Module, facts: Mapping[str, Fact]) -> None:
    """Reject tensors that the base model does not have in this shape.

    Raises:
        UserError: Names the first such tensor.
    """
    has = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name, (_, shape) in facts.items():
        if has.get(name) != tuple(shape):
            there = f"has it as {has[name]}" if name in has else "does not have it"
            raise UserError(
                f"the trained weights do not fit the base model: {name} is {tuple(shape)}, but "
                f"the base model's transformer {there}",
                "is pretrained_model_name_or_path still the model that was trained?",
            )


def _stored_in(
    recipe: Recipe, model: Any, name: str, facts: Mapping[str, Fact], base: torch.dtype
) -> torch.dtype:
    trained = facts[name][0] if name in facts else base
    listed = getattr(model, "_keep_in_fp32_modules", None) or ()
    keep = set([listed] if isinstance(listed, str) else listed) & set(name.split("."))
    return recipe.model_dtype(trained, base, keep_fp32=bool(keep))


def _bytes(fact: Fact) -> int:
    dtype, shape = fact
    return torch.Size(shape).numel() * dtype.itemsize
