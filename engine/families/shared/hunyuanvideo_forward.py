"""Run HunyuanVideo's forward without masks, for texts without padding (diffusers 0.42)."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

from diffusers import HunyuanVideoPipeline

from engine.families.shared.function_window import NoMask, window
from engine.families.shared.text_masks import fill_masks

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def without_masks(transformer: Any) -> Iterator[None]:
    """While active, the model treats all tokens of its texts as unmasked.

    Diffusers always creates masks, which rule out flash attention. The inputs of blocks are
    determined before the blocks, so that recomputation in backward gets the same.
    """
    with ExitStack() as stack:
        hook = transformer.context_embedder.register_forward_pre_hook(refine_unmasked)
        stack.callback(hook.remove)
        begins = transformer.context_embedder.register_forward_hook
        stack.enter_context(window(begins, transformer.transformer_blocks[0], NoMask))
        yield


def refine_unmasked(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Drop the optional mask from a token refiner's inputs, as a forward pre-hook."""
    texts, times, _ = args
    return texts, times, None


class WholeTextPipeline(HunyuanVideoPipeline):
    """The stock pipeline, which also takes encoded prompts without masks, as having no padding."""

    # Keep the docstring and signature of the stock pipeline.
    @wraps(HunyuanVideoPipeline.__call__)
    def __call__(self, *words: Any, **names: Any) -> Any:
        if words or not fill_masks(names, {"prompt_attention_mask": "prompt_embeds"}, guided=False):
            return super().__call__(*words, **names)
        with without_masks(self.transformer):
            return super().__call__(*words, **names)
