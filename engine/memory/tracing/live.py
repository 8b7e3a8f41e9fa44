"""Count the bytes of tensors that are alive while code runs on fake tensors."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from engine.memory.tracing.work import Counter

BLOCK: Final = 512
"""Granularity of CUDA's caching allocator, in bytes."""


def rounded(size: int) -> int:
    """Round bytes up to the allocator's granularity."""
    return -(-size // BLOCK) * BLOCK


class Live(TorchDispatchMode):
    """While active, counts every storage that an operation creates, until it is freed.

    Existing storages are not counted. Gradients of parameters are counted separately, from the
    moment that they are attached.

    Attributes:
        activations: Bytes alive now, except for attached gradients.
        gradients: Bytes of gradients attached to parameters.
        most: Peak of the sum of both since `reset`.
        most_activations: Peak of `activations` since `reset`.
        temporary: Returns the bytes that an operation takes only while it runs, from its function
            and arguments.
        work: Counts the operations, if given.
    """

    def __init__(
        self,
        temporary: Callable[[Any, Any], int] = lambda function, given: 0,
        work: Counter | None = None,
    ) -> None:
        super().__init__()
        self.activations = 0
        self.gradients = 0
        self.most = 0
        self.most_activations = 0
        self.temporary = temporary
        self.work = work
        self._sizes: dict[int, tuple[weakref.ref[Any], int, bool]] = {}
        self._silent = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.work is not None:
            self.work.count(func, args, kwargs, result)
        if extra := self.temporary(func, args):
            self.simulate(extra)
        for leaf in tree_iter(result):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        return result

    # -- counting --------------------------------------------------------------------------

    def add(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage (for a wrapper, the wrapped tensors') unless already counted."""
        flatten = getattr(tensor, "__tensor_flatten__", None)
        if flatten is not None:  # a `DTensor` reports its full size
            for name in flatten()[0]:
                inner = getattr(tensor, name)
                if isinstance(inner, torch.Tensor):  # skip its mesh
                    self.add(inner)
            return
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._sizes:
            return
        size = rounded(storage.nbytes())
        reference = weakref.ref(storage, lambda _: self._forget(key))
        self._sizes[key] = (reference, size, False)
        self.activations += size
        self._update_peaks()

    def ignore(self, tensor: torch.Tensor) -> None:
        """Never count a tensor's storage, because it is counted elsewhere."""
        storage = tensor.untyped_storage()
        key = id(storage)
        self._sizes[key] = (weakref.ref(storage, lambda _: self._forget(key)), 0, False)

    def attach(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage as a gradient from now on."""
        self.add(tensor)
        key = id(tensor.untyped_storage())
        reference, size, attached = self._sizes[key]
        if not attached:
            self._sizes[key] = (reference, size, True)
            self.activations -= size
            self.gradients += size

    def resized(self, storage: Any) -> None:
        """Recount a storage whose size was changed in place."""
        key = id(storage)
        if key in self._sizes:
            reference, before, attached = self._sizes[key]
            size = rounded(storage.nbytes())
            self._sizes[key] = (reference, size, attached)
            self.activations += size - before
            self._update_peaks()

    def drop(self, keys: set[int]) -> None:
        """Stop counting these storages, although they are alive."""
        for key in keys:
            self._forget(key)

    def alive(self) -> set[int]:
        """Return the storages that are counted now."""
        return set(self._sizes)

    def size(self, key: int) -> int:
        """Return the bytes counted for a storage; 0 if it is not counted."""
        return self._sizes[key][1] if key in self._sizes else 0

    def _forget(self, key: int) -> None:
        allocation = self._sizes.pop(key, None)
        if allocation is None:
            return
        _, size, attached = allocation
        if attached:
            self.gradients -= size
        else:
            self.activations -= size

    # -- peaks -----------------------------------------------------------------------------

    def reset(self) -> None:
        """Restart the peaks at the current values."""
        self.most = self.activations + self.gradients
        self.most_activations = self.activations

    def simulate(self, activations: int, together: int | None = None) -> None:
        """Record a momentary increase: of activations, and of activations plus gradients."""
        self.most_activations = max(self.most_activations, self.activations + activations)
        together = activations if together is None else together
        self.most = max(self.most, self.activations + self.gradients + together)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Ignore new peaks inside this context."""
        self._silent += 1
        try:
            yield
        finally:
            self._silent -= 1

    def _update_peaks(self) -> None:
        if not self._silent:
            self.most = max(self.most, self.activations + self.gradients)
            self.most_activations = max(self.most_activations, self.activations)


def storage_of(tensor: torch.Tensor) -> int:
    """Return an identifier of a tensor's storage, valid while it is alive."""
    return id(tensor.untyped_storage())
