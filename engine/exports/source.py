"""Read the tensors to export, from the model in training or from a checkpoint."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from engine.checkpoint.dcp_reader import Planner, Reader
from engine.model.files.weight_files import read_header
from engine.model.files.weight_reader import Reading, read_all
from engine.model.files.weights import local_part, rows_of, stream, targets_of
from engine.parallel.gather import gather
from jobs.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from engine.model.files.weight_files import StoredTensor
    from engine.model.quantized_linear import QuantizedLinear
    from jobs.run.checkpoint_files import Checkpoint

# Torch warns whenever a checkpoint is read without a collective, which is what is wanted here.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

_PACKED: Final = 2**20  # weights that are packed at a time, which takes ten times their memory

Fact = tuple[torch.dtype, tuple[int, ...]]  # dtype and shape


class Source(Protocol):
    """Trained tensors, by their names in the model, read one at a time.

    Attributes:
        facts: Dtype and shape by name; the same on all ranks, in the same order.
    """

    @property
    def facts(self) -> Mapping[str, Fact]:
        """Return the dtype and shape of each readable tensor."""
        ...

    def read(self, name: str) -> torch.Tensor | None:
        """Return the full tensor on the CPU, or None on ranks that do not write.

        May be a collective.
        """
        ...


class LiveModel:
    """The tensors of a model in memory, sharded or not. Reading is a collective.

    Args:
        tensors: Parameters and buffers by name, in the same order on all ranks.
        keep: Whether this rank writes.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, keep: bool) -> None:
        self._tensors = tensors
        self._keep = keep
        self.facts = {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}

    def read(self, name: str) -> torch.Tensor | None:
        """Gather the full tensor. All ranks must call this."""
        whole = gather(self._tensors[name])
        return whole.cpu() if self._keep else None


class ShardedCheckpoint:
    """A checkpoint of `torch.distributed.checkpoint`, written by any number of ranks.

    Args:
        checkpoint: Its manifest.
        ema: Whether to read the moving average of tensors that have one.
    """

    def __init__(self, checkpoint: Checkpoint, *, ema: bool) -> None:
        self._reader = Reader(checkpoint.path)
        stored = {
            name: fact
            for name, fact in self._reader.read_metadata().state_dict_metadata.items()
            if isinstance(fact, TensorStorageMetadata)
        }
        self._names = _chosen(stored, ema=ema)
        self.facts = {
            name: (stored[key].properties.dtype, tuple(stored[key].size))
            for name, key in self._names.items()
        }

    def read(self, name: str) -> torch.Tensor:
        """Read all ranks' parts of a tensor and assemble it."""
        dtype, shape = self.facts[name]
        tensor = torch.empty(shape, dtype=dtype)
        self._load(name, tensor)
        return tensor

    def fill(self, model: torch.nn.Module, moved: Callable[[], None]) -> None:
        """Fill a model, sharded or not, in its own precision; each rank reads its own rows.

        What the model packs is read as a whole into host memory, one tensor at a time.

        Args:
            model: It has all these tensors.
            moved: Called after each tensor.
        """
        targets, packed = targets_of(model)
        for name in self.facts:
            if layer := packed.get(name):
                _pack(layer, self.read(name))
            else:
                self._load(name, targets[name])
            moved()

    def _load(self, name: str, tensor: torch.Tensor) -> None:
        try:
            # This reads only the required parts of the files: one rank's part of this tensor at a
            # time.
            state_dict_loader.load(
                {self._names[name]: tensor},
                storage_reader=self._reader,
                planner=Planner(),
                no_dist=True,
            )
        except CheckpointException as error:
            raise next(failure for failure, _ in error.failures.values()) from None


class FullCheckpoint:
    """A checkpoint of unsharded tensors in safetensors files.

    Args:
        checkpoint: Its manifest.
        ema: Whether to read the moving average of tensors that have one.
    """

    def __init__(self, checkpoint: Checkpoint, *, ema: bool) -> None:
        parts = [part for part in ("model", "ema") if f"{part}.safetensors" in checkpoint.files]
        stored = {
            f"{part}.{tensor.name}": tensor
            for part in parts
            for tensor in read_header(checkpoint.path / f"{part}.safetensors")
        }
        self._places = {name: stored[key] for name, key in _chosen(stored, ema=ema).items()}
        self.facts = {name: (t.dtype, t.shape) for name, t in self._places.items()}

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor."""
        return read_stored(self._places[name])

    def fill(self, model: torch.nn.Module, moved: Callable[[], None]) -> None:
        """Fill a model; see `ShardedCheckpoint.fill`."""
        stream(model, self._places, progress=lambda done: moved())


def _pack(layer: QuantizedLinear, whole: torch.Tensor) -> None:
    """Fill this rank's rows of a packed layer, some at a time, on their device."""
    own, scales = local_part(layer.weight.detach()), layer.weight_scale
    own_scales = None if scales is None else local_part(scales.detach())
    rows = whole[rows_of(layer.weight)] if isinstance(layer.weight, DTensor) else whole
    step = max(1, _PACKED // rows.shape[1])
    for first in range(0, len(own), step):
        part = slice(first, first + step)
        packed, scale = layer.packing.pack(rows[part].to(own.device))
        own[part].copy_(packed)
        if own_scales is not None and scale is not None:
            own_scales[part].copy_(scale)


def open_checkpoint(checkpoint: Checkpoint, *, ema: bool) -> ShardedCheckpoint | FullCheckpoint:
    """Return the tensors of a checkpoint of either layout.

    Raises:
        UserError: The checkpoint has no trained tensors.
    """
    kind = FullCheckpoint if checkpoint.layout == "full" else ShardedCheckpoint
    source = kind(checkpoint, ema=ema)
    if not source.facts:
        raise UserError(f"the checkpoint {checkpoint.path} has no trained tensors")
    return source


def read_stored(place: StoredTensor) -> torch.Tensor:
    """Return one tensor of a safetensors file, without mapping the file."""
    tensor = torch.empty(place.shape, dtype=place.dtype)
    read_all([Reading(place, 0, tensor)], lambda done: None)
    return tensor


def _chosen(stored: Mapping[str, Any], *, ema: bool) -> dict[str, str]:
    """Map each tensor's name in the model to its name in the checkpoint."""
    names = [name.removeprefix("model.") for name in stored if name.startswith("model.")]
    return {
        name: f"ema.{name}" if ema and f"ema.{name}" in stored else f"model.{name}"
        for name in names
    }
