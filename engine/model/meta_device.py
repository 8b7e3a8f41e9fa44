"""Build models on the meta device: parameters without memory, and initializers skipped."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_RANDOM: Final = (torch.Tensor.uniform_, torch.Tensor.normal_)


class NoInitialValues(TorchFunctionMode):
    """Skips initializers on the meta device, where they have no effect but take half the time."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _RANDOM or getattr(func, "__module__", None) == "torch.nn.init":
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put every parameter that a module registers in this context on the meta device.

    Buffers are real. `accelerate.init_empty_weights` does that too, but creates a new parameter at
    each registration, so that a parameter shared by two modules would become two.
    """
    made = WeakIdKeyDictionary()

    def on_meta(
        module: torch.nn.Module, name: str, parameter: torch.nn.Parameter
    ) -> torch.nn.Parameter:
        if parameter.is_meta:
            return parameter
        if parameter not in made:
            made[parameter] = torch.nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        return made[parameter]

    hook = register_module_parameter_registration_hook(on_meta)  # type: ignore[arg-type]
    try:
        with NoInitialValues():
            yield
    finally:
        hook.remove()
