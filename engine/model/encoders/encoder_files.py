"""Which text encoders a model has, and what they take, from its files alone."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final

from engine.model.encoders.sharded_encoder import UNPACKED
from engine.model.files.weights import stored_tensors
from jobs.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from engine.model.files.weight_files import StoredTensor
    from engine.model.quantized.packing import Packing

_POSITIONS: Final = "relative_attention_bias"
_NAME: Final = re.compile(r"text_encoder(_\d+)?")


def encoder_names(root: Path) -> list[str]:
    """Return the text encoders that a model has, by their names in the pipeline.

    Raises:
        UserError: There is no model_index.json, or it cannot be read.
    """
    return list(read_entries(root))


def encoder_bytes(root: Path, dtype: torch.dtype, packing: Packing | None = None) -> int:
    """Bytes of all text encoders in a precision, from their files' headers.

    What an encoder keeps in fp32 all the same (T5 a third, under fp16) is not known from there.
    """
    return sum(
        kept_bytes(place, dtype, packing)
        for name in encoder_names(root)
        for place in stored_tensors(root / name).values()
    )


def kept_bytes(place: StoredTensor, dtype: torch.dtype, packing: Packing | None) -> int:
    """Bytes of an encoder's tensor, by its name and shape.

    Linear layers of blocks are those that have a number in their names, but for T5's `wo` and its
    table of relative positions.
    """
    *parts, layer, leaf = ["", *place.name.split(".")]
    linear = leaf == "weight" and len(place.shape) == 2 and any(part.isdigit() for part in parts)
    if packing and linear and layer not in (UNPACKED, _POSITIONS) and packing.fits(place.shape[1]):
        return packing.bytes_of(*place.shape)
    width = (dtype if place.dtype.is_floating_point else place.dtype).itemsize
    return place.elements * width


def read_entries(root: Path) -> dict[str, tuple[str, str]]:
    """Text encoder → library and class, as model_index.json has them; absent ones are null.

    One that it does not name was put there by the person (HiDream is published without Llama).

    Raises:
        UserError: There is no model_index.json, or it cannot be read.
    """
    path = root / "model_index.json"
    try:
        index = json.loads(path.read_text())
        supplied = {
            config.parent.name: ("transformers", json.loads(config.read_text())["architectures"][0])
            for config in root.glob("text_encoder*/config.json")
            if config.parent.name not in index
        }
        return {
            name: (str(entry[0]), str(entry[1]))
            for name, entry in sorted((supplied | index).items())
            if _NAME.fullmatch(name) and entry and entry[0] and entry[1]
        }
    except (OSError, ValueError, AttributeError, LookupError, TypeError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error})", "download the model again") from None
