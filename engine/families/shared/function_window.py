"""A part of a model's forward in which calls of torch's functions are intercepted."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.nn import Module
    from torch.overrides import TorchFunctionMode


@contextmanager
def window(
    begins: Callable[[Callable[..., None]], Any], before: Module, mode: type[TorchFunctionMode]
) -> Iterator[None]:
    """Within this context, a part of every forward runs under a mode.

    For what diffusers does between two of its modules, where it has no hook. Blocks must be
    outside: what is recomputed in backward, or compiled, must not depend on a mode.

    Args:
        begins: Registers its argument as the hook that begins the window, such as
            `module.register_forward_hook`.
        before: The module whose forward ends it; before the hooks of FSDP.
        mode: Intercepts functions meanwhile.
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
