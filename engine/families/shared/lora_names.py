"""The names of LoRAs outside of diffusers: kohya's scripts and ComfyUI name modules as the models'
authors did.

Some of the authors' layers are several in diffusers: query, key and value of attention, and what
goes with them. Side by side their adapters are one adapter of the fused layer, exactly: the downs
are stacked, and the ups are the blocks of a diagonal, so that each sees only its own down.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

import torch

from jobs.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Adapter = tuple[torch.Tensor, torch.Tensor]
"""Down (rank, in) and up (out, rank)."""

_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.)")


class LoraStyle(Protocol):
    """How others than diffusers name a family's LoRAs."""

    @property
    def METADATA(self) -> dict[str, str]:
        """What stands in the header of such files."""
        ...

    def convert(self, layers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the same adapter under those names.

        Args:
            layers: `<module>.lora_A.weight` (rank, in) and `.lora_B.weight` (out, rank), whose
                product is the change of the weight: no alpha scales it.
        """
        ...


@dataclass(frozen=True)
class Layout:
    """The modules of a model as its authors named them; # is a block's number.

    Attributes:
        same: Module of diffusers → module of the authors.
        fused: Module of the authors → modules of diffusers that it holds, in order, each with its
            outputs per input.
    """

    same: Mapping[str, str]
    fused: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def rename(self, adapters: Mapping[str, Adapter]) -> dict[str, Adapter]:
        """Return module of diffusers → adapter, as module of the authors → adapter.

        Raises:
            UserError: A module has no counterpart.
        """
        owners = {member: fused for fused, members in self.fused.items() for member in members}
        renamed: dict[str, Adapter] = {}
        parts: dict[str, dict[str, Adapter]] = {}  # of fused modules
        for module, adapter in adapters.items():
            # Only the block's number: `to_out.0` keeps its own.
            number = match[0] if (match := _NUMBER.search(module)) else "#"
            pattern = _NUMBER.sub("#", module, count=1)
            if pattern in self.same:
                renamed[self.same[pattern].replace("#", number)] = adapter
            elif pattern in owners:
                owner = owners[pattern].replace("#", number)
                parts.setdefault(owner, {})[pattern] = adapter
            else:
                raise unnamed(module)
        for owner, members in parts.items():
            renamed[owner] = _fuse(self.fused[_NUMBER.sub("#", owner, count=1)], members)
        return renamed


def as_in_diffusers(adapters: Mapping[str, Adapter]) -> dict[str, Adapter]:
    """Return the names of models whose authors' names are those of diffusers."""
    return dict(adapters)


@dataclass(frozen=True)
class Kohya:
    """Names of kohya's scripts: sd-scripts and musubi-tuner.

    Attributes:
        rename: Modules of diffusers → modules of the authors.
        METADATA: What the scripts write into a file's header.
    """

    rename: Callable[[Mapping[str, Adapter]], Mapping[str, Adapter]]
    METADATA: dict[str, str]

    def convert(self, layers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return `lora_unet_<module>.lora_down.weight`, `.lora_up.weight` and `.alpha`, the rank.

        An alpha that equals the rank scales nothing; sd-scripts reads no file without alphas.
        """
        tensors: dict[str, torch.Tensor] = {}
        for module, (down, up) in self.rename(adapters_of(layers)).items():
            key = "lora_unet_" + module.replace(".", "_")
            tensors[f"{key}.lora_down.weight"] = down
            tensors[f"{key}.lora_up.weight"] = up
            tensors[f"{key}.alpha"] = torch.tensor(float(down.shape[0]))
        return tensors


@dataclass(frozen=True)
class ComfyUI:
    """The names that ComfyUI reads for any model: those of its own modules, with dots.

    Attributes:
        rename: Modules of diffusers → modules of the authors.
        METADATA: Nothing.
        lokr: What names of a LoKr begin with where its modules hold several of diffusers': names of
            diffusers follow, with underscores after one; None where it does not read those.
    """

    rename: Callable[[Mapping[str, Adapter]], Mapping[str, Adapter]]
    METADATA: dict[str, str] = field(default_factory=dict)
    lokr: str | None = "lycoris_"

    def convert(self, layers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return `diffusion_model.<module>.lora_A.weight` and `.lora_B.weight`.

        No alphas: InvokeAI ignores them beside these names, and diffusers refuses them.
        """
        tensors: dict[str, torch.Tensor] = {}
        for module, (down, up) in self.rename(adapters_of(layers)).items():
            key = f"diffusion_model.{module}"
            tensors[f"{key}.lora_A.weight"] = down
            tensors[f"{key}.lora_B.weight"] = up
        return tensors


def adapters_of(layers: Mapping[str, torch.Tensor]) -> dict[str, Adapter]:
    """Return module → its adapter, of `<module>.lora_A.weight` and `<module>.lora_B.weight`."""
    suffix = ".lora_A.weight"
    return {
        name.removesuffix(suffix): (down, layers[name.replace(".lora_A.", ".lora_B.")])
        for name, down in layers.items()
        if name.endswith(suffix)
    }


def named_singly(style: LoraStyle, shapes: Mapping[str, torch.Size]) -> dict[str, str]:
    """Name modules as a tool does, for adapters that cannot be joined or cut.

    A LoRA whose ups hold the numbers of their rows says which of them stand where.

    Args:
        style: The tool's.
        shapes: Module of diffusers → shape of its weight.

    Returns:
        Module of diffusers → what its names begin with there.

    Raises:
        UserError: A module has no counterpart, or one with other rows.
    """
    probe: dict[str, torch.Tensor] = {}
    owners: dict[int, str] = {}
    first = 1
    for module, shape in shapes.items():
        rows = torch.arange(first, first + shape[0], dtype=torch.float64)
        probe[f"{module}.lora_A.weight"] = torch.zeros(1, *shape[1:])
        probe[f"{module}.lora_B.weight"] = rows.reshape(-1, *[1] * (len(shape) - 1))
        owners[first] = module
        first += shape[0]
    names: dict[str, str] = {}
    for key, up in style.convert(probe).items():
        if not key.endswith((".lora_up.weight", ".lora_B.weight")):
            continue
        rows = up.flatten()
        module = owners.get(int(rows[0]), "")
        whole = probe.get(f"{module}.lora_B.weight")
        if whole is None or not torch.equal(rows, whole.flatten()):
            raise UserError(
                f"export_formats: {key.rsplit('.lora_', 1)[0]} has other rows there than the "
                "layers of diffusers, and a Kronecker product has no parts"
            )
        names[module] = key.rsplit(".lora_", 1)[0]
    return names


def unnamed(module: str) -> UserError:
    """Build the error about a module that only diffusers has."""
    return UserError(
        f"export_formats: there is no name for {module} outside diffusers",
        "remove it from lora_target_modules, or export for diffusers only",
    )


def _fuse(layout: Mapping[str, float], members: Mapping[str, Adapter]) -> Adapter:
    """One adapter of a fused layer; what has no adapter gets nothing added.

    Args:
        layout: The fused modules in order, each with its outputs per input.
        members: The adapters of those that have one.
    """
    present = [members[name] for name in layout if name in members]
    width = present[0][0].shape[1]
    rank = sum(down.shape[0] for down, _ in present)
    heights = [
        members[name][1].shape[0] if name in members else round(per_input * width)
        for name, per_input in layout.items()
    ]
    fused = present[0][1].new_zeros(sum(heights), rank)
    row = column = 0
    for name, height in zip(layout, heights, strict=True):
        if name in members:
            up = members[name][1]
            fused[row : row + height, column : column + up.shape[1]] = up
            column += up.shape[1]
        row += height
    return torch.cat([down for down, _ in present]), fused
