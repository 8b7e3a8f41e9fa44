"""Recompute activations in backward instead of keeping them, block by block."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from jobs.errors import UserError

if TYPE_CHECKING:
    from jobs.spec import JobSpec

_ATEN: Final = torch.ops.aten
# Matrix products and attention: most of the time of a forward, a small part of its memory.
_KEPT: Final = (
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN.bmm.default,
    _ATEN.baddbmm.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
)


def checkpoint_activations(model: Any, spec: JobSpec) -> None:
    """Have the model's own blocks run under `torch.utils.checkpoint`.

    Diffusers' models call the function they are given around each block, so neither names nor
    classes of modules change. FSDP's hooks run inside of it and know recomputation when they see
    it: weights are gathered once for recomputation and backward together.

    Args:
        model: A diffusers model; changed in place.
        spec: The job; its `gradient_checkpointing_policy` says what is kept.

    Raises:
        UserError: The model does not support it.
    """
    if not model._supports_gradient_checkpointing:
        raise UserError(
            f"gradient_checkpointing: {type(model).__name__} does not support it", "turn it off"
        )
    options: dict[str, Any] = {"use_reentrant": False}
    if spec.gradient_checkpointing_policy == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, list(_KEPT))

    def run(block: torch.nn.Module, *inputs: Any) -> Any:
        return checkpoint(block.__call__, *inputs, **options)

    model.enable_gradient_checkpointing(run)
