"""Which encoder of a pipeline returns values that are not finite."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from engine.model.encoders.text_encoders import models_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_SHARD: Final = "FSDP"  # what `fully_shard` puts before the name of a class


@contextmanager
def watched(pipeline: Any) -> Iterator[Callable[[], str]]:
    """Keep the extremes of what each encoder returns within; on the device, without waiting.

    Args:
        pipeline: From `engine.model.encoders.text_encoders`.

    Yields:
        Names the encoders whose output was not finite, with their classes; all if that is not
        known of any.
    """
    encoders = models_of(pipeline)
    extremes: dict[str, list[torch.Tensor]] = {}

    def note(name: str, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        # The first output comes from the last layer, which passes on the NaNs of those before it.
        # The outputs themselves are not kept: hidden states of all layers are hundreds of MB.
        first = output if isinstance(output, torch.Tensor) else output[0]
        extremes.setdefault(name, []).append(torch.stack(first.detach().aminmax()))

    def broken() -> str:
        names = [name for name, each in extremes.items() if not torch.stack(each).isfinite().all()]
        return " and ".join(
            f"{name} ({type(encoders[name]).__name__.removeprefix(_SHARD)})"
            for name in names or encoders
        )

    hooks = [model.register_forward_hook(partial(note, name)) for name, model in encoders.items()]
    try:
        yield broken
    finally:
        for hook in hooks:
            hook.remove()
