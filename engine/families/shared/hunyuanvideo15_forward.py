"""Adapt HunyuanVideo 1.5's forward to training (diffusers 0.42)."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import partial
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
    """Keeps the tokens of texts in place, masked or not.

    `tokens[mask]` returns all of them, and `tokens[~mask]` none.

    Args:
        image: Whether a first frame is given.
    """

    def __init__(self, *, image: bool) -> None:
        super().__init__()
        self._image = image

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.__bool__:  # checks whether no image is given
            return not self._image
        if func is torch.Tensor.__invert__:
            return args[0][:0]
        if func is torch.Tensor.__getitem__ and _is_mask(args[1]):
            return args[0][: len(args[1])]
        return func(*args, **(kwargs or {}))


class _Whole(_Unsorted):
    """The same for texts without masked tokens: blocks get no mask."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.stack and _is_mask(args[0][0]):
            return None
        return super().__torch_function__(func, types, args, kwargs)


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype is torch.bool


class KeyMaskAttention(HunyuanVideoAttnProcessor2_0):
    """Attention in which every token, including padding, attends to all unmasked tokens.

    The model's own attention creates a mask of tokens × tokens in every block, even if nothing is
    padded: 2.5 GB at 50,000 tokens, and a bias of twice that size. This mask is only as wide as the
    tokens. Results differ only for padding tokens, which no other token sees. Everything else is as
    in HunyuanVideo, whose processor uses the mask that it is given.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        """Call the processor; `attention_mask` is that of texts `(B, L)`, or None."""
        if attention_mask is not None:
            before = (hidden_states.shape[1], 0)  # all tokens of the video
            seen = functional.pad(attention_mask.bool(), before, value=True)
            attention_mask = seen[:, None, None]  # (B, 1, 1, tokens)
        return super().__call__(
            attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
        )


def use_key_masks(transformer: Any) -> None:
    """Give a model's blocks `KeyMaskAttention`, keeping the selected kernel."""
    for block in transformer.transformer_blocks:
        own = block.attn.processor
        if type(own) is HunyuanVideo15AttnProcessor2_0:
            processor = KeyMaskAttention()
            processor.__dict__.update(vars(own))
            block.attn.set_processor(processor)


@contextmanager
def without_waiting(
    transformer: Any, *, refined: bool, masked: bool, image: bool = False
) -> Iterator[None]:
    """Make forwards run without GPU synchronization, with exact times and masks only if needed.

    Diffusers sorts each sample's tokens by its masks, which reads their number from the GPU a dozen
    times per sample. Text tokens have no positions and attention has the masks, so their order does
    not matter. Functions are intercepted between the embedding of images, after which diffusers
    does that, and the first block.

    Diffusers also embeds times in their own precision: in bf16, 963 would become 964. Here, times
    are cast after they are embedded.

    Args:
        transformer: The model.
        refined: Whether the text of Qwen2.5-VL has padding.
        masked: Whether any text has padding.
        image: Whether a first frame is given.
    """
    use_key_masks(transformer)
    with ExitStack() as stack:
        mode = partial(_Unsorted if masked else _Whole, image=image)
        begins = transformer.image_embedder.register_forward_hook
        stack.enter_context(window(begins, transformer.transformer_blocks[0], mode))
        times = transformer.time_embed
        embedders = (times.timestep_embedder, times.timestep_embedder_r)
        hooks = [e.register_forward_pre_hook(_as_weights) for e in embedders if e is not None]
        if not refined:
            refiner = transformer.context_embedder
            hooks.append(refiner.register_forward_pre_hook(refine_unmasked))
        for hook in hooks:
            stack.callback(hook.remove)
        yield


def _as_weights(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Cast times to the dtype of the layer that takes them, in a forward pre-hook."""
    times, *others = args
    return times.to(module.linear_1.weight.dtype), *others
