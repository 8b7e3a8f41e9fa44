"""HunyuanVideo 1.5's forward as training needs it (diffusers 0.42)."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Unsorted(TorchFunctionMode):
    """Leave the tokens of texts where they are, masked or not.

    `tokens[mask]` is all of them, and `tokens[~mask]` is none.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.__bool__:  # whether no image is given
            return True
        if func is torch.Tensor.__invert__:
            return args[0][:0]
        if func is torch.Tensor.__getitem__ and _is_mask(args[1]):
            return args[0][: len(args[1])]
        return func(*args, **(kwargs or {}))


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype is torch.bool


@contextmanager
def without_waiting(transformer: Any) -> Iterator[None]:
    """Keep a forward from waiting for the GPU, and its times exact.

    Diffusers sorts each sample's tokens by its masks, which asks the GPU how many there are, a
    dozen times a sample. Text tokens have no places and attention has the masks, so that their
    order changes nothing. From the embedding of images, after which that happens, to the first
    block, functions are intercepted.

    And diffusers computes the embedding of times in the precision of the times themselves: in bf16,
    963 would be 964. Here they are cast once they are embedded.
    """
    with ExitStack() as stack:
        sorting = stack.enter_context(ExitStack())

        def begin(*_: Any) -> None:
            sorting.enter_context(_Unsorted())

        def end(*_: Any) -> None:
            sorting.close()

        embedder = transformer.time_embed.timestep_embedder
        for hook in (
            transformer.image_embedder.register_forward_hook(begin),
            # Before the hooks of FSDP.
            transformer.transformer_blocks[0].register_forward_pre_hook(end, prepend=True),
            embedder.register_forward_pre_hook(_as_weights),
        ):
            stack.callback(hook.remove)
        yield


def _as_weights(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Times in the precision of the layer that they go into."""
    times, *others = args
    return times.to(module.linear_1.weight.dtype), *others
