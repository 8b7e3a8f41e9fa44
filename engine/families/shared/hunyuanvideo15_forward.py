"""HunyuanVideo 1.5's forward as training needs it (diffusers 0.42)."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoAttnProcessor2_0
from diffusers.models.transformers.transformer_hunyuan_video15 import (
    HunyuanVideo15AttnProcessor2_0,
)
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from engine.families.shared.function_window import window
from engine.families.shared.hunyuanvideo_forward import refine_unmasked

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


class _Whole(_Unsorted):
    """The same for texts of which nothing is masked: blocks get no mask."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.stack and _is_mask(args[0][0]):
            return None
        return super().__torch_function__(func, types, args, kwargs)


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype is torch.bool


class SeenKeys(HunyuanVideoAttnProcessor2_0):
    """Attention in which every token, padding too, attends to the tokens that are not masked.

    The model's own makes a mask of tokens times tokens in every block, where nothing is padded
    too: 2.5 GB at 50,000 tokens, and a bias of twice as much for attention. This one is as wide as
    the tokens. It differs in what padding makes of its own, which no other token sees. All else is
    as in HunyuanVideo, whose processor takes the mask that it is given.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        """As of the model's own; `attention_mask` is that of texts `(B, L)`, or None."""
        if attention_mask is not None:
            before = (hidden_states.shape[1], 0)  # all of the video's
            seen = functional.pad(attention_mask.bool(), before, value=True)
            attention_mask = seen[:, None, None]  # (B, 1, 1, tokens)
        return super().__call__(
            attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
        )


def attend_to_seen(transformer: Any) -> None:
    """Give a model's blocks `SeenKeys`, with the kernel that was chosen."""
    for block in transformer.transformer_blocks:
        own = block.attn.processor
        if type(own) is HunyuanVideo15AttnProcessor2_0:
            processor = SeenKeys()
            processor.__dict__.update(vars(own))
            block.attn.set_processor(processor)


@contextmanager
def without_waiting(transformer: Any, *, refined: bool, masked: bool) -> Iterator[None]:
    """Keep forwards from waiting for the GPU, their times exact, and masks where they are needed.

    Diffusers sorts each sample's tokens by its masks, which asks the GPU how many there are, a
    dozen times a sample. Text tokens have no places and attention has the masks, so that their
    order changes nothing. From the embedding of images, after which that happens, to the first
    block, functions are intercepted.

    And diffusers computes the embedding of times in the precision of the times themselves: in bf16,
    963 would be 964. Here they are cast once they are embedded.

    Args:
        transformer: The model.
        refined: Whether the text of Qwen2.5-VL has padding.
        masked: Whether any text has some.
    """
    attend_to_seen(transformer)
    with ExitStack() as stack:
        mode = _Unsorted if masked else _Whole
        begins = transformer.image_embedder.register_forward_hook
        stack.enter_context(window(begins, transformer.transformer_blocks[0], mode))
        embedder = transformer.time_embed.timestep_embedder
        hooks = [embedder.register_forward_pre_hook(_as_weights)]
        if not refined:
            refiner = transformer.context_embedder
            hooks.append(refiner.register_forward_pre_hook(refine_unmasked))
        for hook in hooks:
            stack.callback(hook.remove)
        yield


def _as_weights(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return times in the precision of the layer that they go into."""
    times, *others = args
    return times.to(module.linear_1.weight.dtype), *others
