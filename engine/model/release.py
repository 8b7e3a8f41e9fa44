"""Prove that modules which are no longer needed have left memory."""

from __future__ import annotations

import ctypes
import gc
import sys
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from traceback import walk_stack
from types import CellType, FrameType
from typing import TYPE_CHECKING, Final
from weakref import ref

import psutil
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from engine.model.weights import local_part

if TYPE_CHECKING:
    from collections.abc import Mapping

_NAMED: Final = 3  # how many of what is left, and of those who hold it, an error names


@dataclass(frozen=True)
class Released:
    """This rank's memory around modules that came and went, in bytes.

    Attributes:
        measure: What is counted: `allocated` on a GPU, `rss` on CPU ranks (as in
            `engine.ranks.peaks`).
        before: Before they were loaded.
        loaded: With them, after their last use.
        after: When they were gone.
        held: What their parameters and buffers took on this rank.
    """

    measure: str
    before: int
    loaded: int
    after: int
    held: int


class Watch:
    """Remembers modules, their parameters and buffers, and the memory of these, but holds nothing.

    A tensor can outlive its Python object (C++ may hold it), and its memory can outlive the tensor
    (a view may hold it). So all three are watched.
    """

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        self._modules: list[tuple[str, ref[torch.nn.Module]]] = []
        self._tensors: list[tuple[str, ref[torch.Tensor]]] = []
        self._storages: dict[int, tuple[str, StorageWeakRef]] = {}
        self.held = 0
        for root, whole in modules.items():
            for name, module in whole.named_modules(prefix=root):
                self._modules.append((name, ref(module)))
            for name, tensor in chain(
                whole.named_parameters(prefix=root), whole.named_buffers(prefix=root)
            ):
                self._tensors.append((name, ref(tensor)))
                storage = local_part(tensor.detach()).untyped_storage()
                if storage._cdata not in self._storages:
                    self._storages[storage._cdata] = (name, StorageWeakRef(storage))
                    self.held += storage.nbytes()

    def check(self) -> None:
        """Prove that all of it is gone, after a collection of cycles.

        Raises:
            RuntimeError: Something is left; names it and who refers to it.
        """
        gc.collect()
        modules = [name for name, module in self._modules if module() is not None]
        tensors = [name for name, tensor in self._tensors if tensor() is not None]
        storages = [name for name, memory in self._storages.values() if not memory.expired()]
        if not (modules or tensors or storages):
            return
        left = [
            f"{len(names)} {kind} ({', '.join(names[:_NAMED])}{' …' * (len(names) > _NAMED)})"
            for kind, names in (
                ("modules", modules),
                ("tensors", tensors),
                ("blocks of tensor memory", storages),
            )
            if names
        ]
        holders = self._holders() or ["nothing that Python's collector knows of"]
        raise RuntimeError(
            f"still in memory although no longer needed: {', '.join(left)}; the first is referred "
            f"to by {', '.join(holders[:_NAMED])}"
        )

    def _holders(self) -> list[str]:
        """Who refers to the first thing that is left."""
        gc.unfreeze()  # modules, which may be who; see `engine.start.lean_imports`
        for _, module in self._modules:
            if (thing := module()) is not None:
                return _referrers(thing)
        for _, tensor in self._tensors:
            if (left := tensor()) is not None:
                return _referrers(left)
        addresses = {key for key, (_, memory) in self._storages.items() if not memory.expired()}
        for view in _tensors_at(addresses):
            if (last := view()) is not None and (holders := _referrers(last)):
                return [f"a tensor of shape {tuple(last.shape)}, and that by {holders[0]}"]
        return []


def memory_in_use(device: torch.device) -> int:
    """What torch has allocated on a GPU, or the resident set of a CPU rank; bytes."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    rss: int = psutil.Process().memory_info().rss
    return rss


def give_back(device: torch.device) -> None:
    """Give free memory back to the driver or to the system."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    # glibc keeps what was freed between live blocks. Other C libraries have no such call, and
    # there the memory is reused, if not given back.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _tensors_at(addresses: set[int]) -> list[ref[torch.Tensor]]:
    """The tensors whose memory is one of these."""
    found = []
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            # Sparse and other wrapped tensors have no memory of their own.
            with suppress(RuntimeError, NotImplementedError):
                if local_part(thing.detach()).untyped_storage()._cdata in addresses:
                    found.append(ref(thing))
    return found


def _referrers(thing: object) -> list[str]:
    """Who refers to something, in words."""
    found = []
    # The collector does not know the variables of functions that are running.
    for frame in sys._current_frames().values():
        for function, _ in walk_stack(frame):
            if function.f_code.co_filename != __file__:
                names = [name for name, value in function.f_locals.items() if value is thing]
                found += [f"{name} in {function.f_code.co_qualname}" for name in names]
    for holder in gc.get_referrers(thing):
        if isinstance(holder, FrameType | CellType):
            continue  # one of the variables above
        if isinstance(holder, dict):
            keys = [key for key, value in holder.items() if value is thing]
            where = f"module {holder['__name__']}" if "__name__" in holder else "a dict"
            found.append(f"{', '.join(map(repr, keys[:_NAMED]))} of {where}")
        elif isinstance(holder, list | tuple | set):
            found.append(f"a {type(holder).__name__} of {len(holder)}")
        else:
            found.append(f"a {type(holder).__qualname__}")
    return found
