"""Answers for what a fake tensor cannot say: it has a shape, and no numbers."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN: Final = torch.ops.aten
_OVER_MASKS: Final = (_ATEN.all.default, _ATEN.all.dim)


class Assume(TorchDispatchMode):
    """Within, conditions hold, masks are true everywhere, and numbers are 1.

    Args:
        all_true: Whether `mask.all()` is, which lets models do without a mask.
    """

    def __init__(self, *, all_true: bool = True) -> None:
        super().__init__()
        self._all_true = all_true

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        try:
            result = func(*args, **(kwargs or {}))
            if func in _OVER_MASKS:
                result.assumed = self._all_true
            return result
        except DataDependentOutputException:
            return self._number(func, args)
        except DynamicOutputShapeException:
            return _everywhere(func, args)

    def _number(self, func: Any, args: tuple[Any, ...]) -> Any:
        assumed = getattr(args[0], "assumed", True)
        if func is not _ATEN._local_scalar_dense.default or args[0].dtype is torch.bool:
            return assumed
        return 0.5 if args[0].dtype.is_floating_point else 1


def _everywhere(func: Any, args: tuple[Any, ...]) -> Any:
    """Return the result of an operation whose mask is true everywhere.

    Raises:
        NotImplementedError: It is not known here.
    """
    if func is _ATEN.nonzero.default:
        return torch.stack(_places(args[0]), dim=1)
    if func is _ATEN.masked_select.default:
        return args[0].flatten()
    if func in (_ATEN.index.Tensor, _ATEN.index_put_.default, _ATEN.index_put.default):
        indices: list[torch.Tensor | None] = []
        for index in args[1]:
            masks = index is not None and index.dtype in (torch.bool, torch.uint8)
            indices += _places(index) if masks else [index]
        return func(args[0], indices, *args[2:])
    raise NotImplementedError(f"{func} of a tensor without numbers")


def _places(mask: torch.Tensor) -> list[torch.Tensor]:
    """Return the indices of all elements of a mask, one vector for each dim."""
    count = mask.numel()
    return [torch.empty(count, dtype=torch.int64, device=mask.device) for _ in mask.shape]
