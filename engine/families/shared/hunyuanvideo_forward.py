"""HunyuanVideo's forward without masks, for texts of which nothing is padded (diffusers 0.42)."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from diffusers import HunyuanVideoPipeline
from torch.overrides import TorchFunctionMode

from engine.families.shared.function_window import window
from engine.families.shared.text_masks import fill_masks

if TYPE_CHECKING:
    from collections.abc import Iterator


class _NoMask(TorchFunctionMode):
    """Have the mask of all tokens be None, for which blocks pass none to attention.

    Diffusers makes it of the lengths of texts, `(B, tokens)`, and then `(B, 1, 1, tokens)`.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.unsqueeze and args[0].dtype is torch.bool and args[0].dim() == 3:
            return None
        return func(*args, **(kwargs or {}))


@contextmanager
def without_masks(transformer: Any) -> Iterator[None]:
    """Within this context, the model takes all tokens of its texts to be seen.

    Diffusers always makes masks, and with one, attention can use no flash kernel. What blocks get
    is decided before them, so that what is recomputed in backward gets the same.
    """
    with ExitStack() as stack:
        hook = transformer.context_embedder.register_forward_pre_hook(refine_unmasked)
        stack.callback(hook.remove)
        begins = transformer.context_embedder.register_forward_hook
        stack.enter_context(window(begins, transformer.transformer_blocks[0], _NoMask))
        yield


def refine_unmasked(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a forward pre-hook of a text's token refiner, which can do without a mask."""
    texts, times, _ = args
    return texts, times, None


class WholeTextPipeline(HunyuanVideoPipeline):
    """The stock pipeline that also takes encoded prompts without masks, as having no padding."""

    # Docstring and signature are those of the stock pipeline.
    @wraps(HunyuanVideoPipeline.__call__)
    def __call__(self, *words: Any, **names: Any) -> Any:
        if words or not fill_masks(names, {"prompt_attention_mask": "prompt_embeds"}, guided=False):
            return super().__call__(*words, **names)
        with without_masks(self.transformer):
            return super().__call__(*words, **names)
