"""Check that modules which are no longer needed have left memory."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Final
from weakref import ref

import psutil
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from engine.model.files.weights import local_part

if TYPE_CHECKING:
    from collections.abc import Mapping

STILL_HELD: Final = "still in memory though no longer needed"
_NAMED: Final = 3  # modules or tensors that a warning names


@dataclass(frozen=True)
class Released:
    """This rank's memory around the lifetime of some modules, in bytes.

    Attributes:
        measure: What is measured: `allocated` on a GPU, `rss` on CPU ranks (as in
            `engine.ranks.telemetry`).
        before: Before they were loaded.
        loaded: While loaded, after their last use.
        after: After they were freed.
        held: Bytes of their parameters and buffers on this rank.
        left: Names what was not freed, "" if everything was.
    """

    measure: str
    before: int
    loaded: int
    after: int
    held: int
    left: str = ""


class Watch:
    """Tracks modules, their parameters and buffers, and their memory, by weak references.

    A tensor can outlive its Python object (C++ may hold it), and its memory can outlive the tensor
    (a view may hold it). Therefore, all three are tracked.
    """

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        self._modules: list[tuple[str, ref[torch.nn.Module]]] = []
        self._tensors: list[tuple[str, ref[torch.Tensor]]] = []
        self._storages: dict[StorageWeakRef, str] = {}
        self.held = 0
        for root, whole in modules.items():
            for name, module in whole.named_modules(prefix=root):
                self._modules.append((name, ref(module)))
            for name, tensor in chain(
                whole.named_parameters(prefix=root), whole.named_buffers(prefix=root)
            ):
                self._tensors.append((name, ref(tensor)))
                storage = local_part(tensor.detach()).untyped_storage()
                memory = StorageWeakRef(storage)
                if memory not in self._storages:
                    self._storages[memory] = name
                    self.held += storage.nbytes()

    def still_held(self) -> str:
        """Collect garbage, and name what is still in memory though no longer needed, "" if nothing.

        This is not an error: the run continues with less memory, since a library may keep the
        reference.
        """
        gc.collect()
        modules = [name for name, module in self._modules if module() is not None]
        tensors = [name for name, tensor in self._tensors if tensor() is not None]
        storages = [name for memory, name in self._storages.items() if not memory.expired()]
        kinds = ("modules", modules), ("tensors", tensors), ("blocks of tensor memory", storages)
        left = [
            f"{len(names)} {kind} ({', '.join(names[:_NAMED])}{' …' * (len(names) > _NAMED)})"
            for kind, names in kinds
            if names
        ]
        return f"{STILL_HELD}: {', '.join(left)}" if left else ""


def memory_in_use(device: torch.device) -> int:
    """Return the bytes that torch has allocated on a GPU, or the resident set of a CPU rank."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    rss: int = psutil.Process().memory_info().rss
    return rss


def give_back(device: torch.device) -> None:
    """Return free memory to the driver or to the system."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    # glibc keeps memory that was freed between live blocks. Other C libraries have no such call;
    # there, the process reuses the memory, even if it does not return it.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
