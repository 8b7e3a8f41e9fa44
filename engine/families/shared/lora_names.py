"""Names of LoRAs outside of diffusers: kohya's scripts and ComfyUI use the authors' module names.

Some of the authors' layers are split in diffusers: query, key and value of attention, and related
ones. Concatenated, their adapters are an exact adapter of the fused layer: the downs are stacked,
and the ups form a block-diagonal matrix, so that each only sees its own down.
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
    """Naming of a family's LoRAs by a tool other than diffusers."""

    @property
    def METADATA(self) -> dict[str, str]:
        """Return entries for the header of such files."""
        ...

    def convert(self, layers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the same adapter under those names.

        Args:
            layers: `<module>.lora_A.weight` (rank, in) and `.lora_B.weight` (out, rank), whose
                product is the weight update: no alpha scales it.
        """
        ...


@dataclass(frozen=True)
class Layout:
    """The authors' module names of a model; # is a block's number.

    Attributes:
        same: The authors' module for each of diffusers'.
        fused: Per fused module of the authors, the diffusers modules in it, in order, each with its
            outputs per input.
    """

    same: Mapping[str, str]
    fused: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def rename(self, adapters: Mapping[str, Adapter]) -> dict[str, Adapter]:
        """Convert adapters from diffusers' module names to the authors'.

        Raises:
            UserError: A module has no counterpart.
        """
        owners = {member: fused for fused, members in self.fused.items() for member in members}
        renamed: dict[str, Adapter] = {}
        parts: dict[str, dict[str, Adapter]] = {}  # of fused modules
        for module, adapter in adapters.items():
            # Replace only the block's number: `to_out.0` keeps its own.
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
    """Keep the names, for models whose authors use the same names as diffusers."""
    return dict(adapters)


@dataclass(frozen=True)
class Kohya:
    """Names of kohya's scripts: sd-scripts and musubi-tuner.

    Attributes:
        rename: Converts diffusers' module names to the authors'.
        METADATA: Entries that the scripts write into a file's header.
    """

    rename: Callable[[Mapping[str, Adapter]], Mapping[str, Adapter]]
    METADATA: dict[str, str]

    def convert(self, layers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return `lora_unet_<module>.lora_down.weight`, `.lora_up.weight` and `.alpha`, the rank.

        An alpha equal to the rank has no effect; sd-scripts does not read files without alphas.
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
    """Names that ComfyUI reads for any model: those of its own modules, with dots.

    Attributes:
        rename: Converts diffusers' module names to the authors'.
        METADATA: Empty.
        lokr: Prefix of a LoKr's names if modules fuse several of diffusers': diffusers' names
            follow, with underscores if it ends with one; None if ComfyUI does not read those.
    """

    rename: Callable[[Mapping[str, Adapter]], Mapping[str, Adapter]]
    METADATA: dict[str, str] = field(default_factory=dict)
    lokr: str | None = "lycoris_"

    def convert(self, layers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return `diffusion_model.<module>.lora_A.weight` and `.lora_B.weight`.

        No alphas: InvokeAI ignores them with these names, and diffusers rejects them.
        """
        tensors: dict[str, torch.Tensor] = {}
        for module, (down, up) in self.rename(adapters_of(layers)).items():
            key = f"diffusion_model.{module}"
            tensors[f"{key}.lora_A.weight"] = down
            tensors[f"{key}.lora_B.weight"] = up
        return tensors


def adapters_of(layers: Mapping[str, torch.Tensor]) -> dict[str, Adapter]:
    """Return each module's adapter, from `<module>.lora_A.weight` and `<module>.lora_B.weight`."""
    suffix = ".lora_A.weight"
    return {
        name.removesuffix(suffix): (down, layers[name.replace(".lora_A.", ".lora_B.")])
        for name, down in layers.items()
        if name.endswith(suffix)
    }


def named_singly(style: LoraStyle, shapes: Mapping[str, torch.Size]) -> dict[str, str]:
    """Return a tool's names of modules, for adapters that cannot be fused or split.

    Converting a LoRA whose ups hold row numbers shows where each row ends up.

    Args:
        style: The tool's naming.
        shapes: Weight shape by diffusers' module name.

    Returns:
        The tool's name prefix by diffusers' module name.

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
    """Combine adapters into one of a fused layer. Members without an adapter get zero rows.

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
