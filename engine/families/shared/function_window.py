"""Intercept calls of torch functions in a part of a model's forward."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.nn import Module


class NoMask(TorchFunctionMode):
    """Makes the mask of all tokens None, so that blocks pass no mask to attention.

    Diffusers builds it as `(B, tokens)` or `(B, tokens, tokens)` and adds a dimension for heads.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.unsqueeze and args[0].dtype is torch.bool and args[0].dim() == 3:
            return None
        return func(*args, **(kwargs or {}))


@contextmanager
def window(
    begins: Callable[[Callable[..., None]], Any],
    before: Module,
    mode: Callable[[], TorchFunctionMode],
) -> Iterator[None]:
    """While active, run a part of every forward under a function mode.

    This is for code in diffusers between two modules, where there is no hook. Blocks must be
    outside of the window: recomputed or compiled code must not depend on a mode.

    Args:
        begins: Registers its argument as the hook that opens the window, such as
            `module.register_forward_hook`.
        before: The module whose forward closes the window, before the hooks of FSDP.
        mode: Makes the mode that intercepts functions.
    """
    with ExitStack() as stack:
        entered = stack.enter_context(ExitStack())

        def begin(*_: Any) -> None:
            entered.enter_context(mode())

        def end(*_: Any) -> None:
            entered.close()

        for hook in (begins(begin), before.register_forward_pre_hook(end, prepend=True)):
            stack.callback(hook.remove)
        yield
