"""Recompute activations in backward instead of keeping them, block by block."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from jobs.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jobs.spec.keys.training import TrainingKeys

_ATEN: Final = torch.ops.aten
# Matrix products and attention: most of the time of a forward, a small part of its memory.
_KEPT: Final = (
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN._scaled_mm_v2.default,
    _ATEN.bmm.default,
    _ATEN.baddbmm.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
)


def checkpoint_activations(model: Any, spec: TrainingKeys) -> None:
    """Have the model's own blocks run under `torch.utils.checkpoint`.

    Diffusers' models call the function they are given around each block, so neither names nor
    classes of modules change. FSDP's hooks run inside of it and know recomputation when they see
    it: weights are gathered once for recomputation and backward together.

    Args:
        model: A diffusers model; changed in place.
        spec: The job; `gradient_checkpointing_policy` says what is kept of a block,
            `gradient_checkpointing_interval` of which blocks all is kept.

    Raises:
        UserError: The model does not support it.
    """
    kept = _kept_blocks(model, spec.gradient_checkpointing_interval)
    try:
        model.enable_gradient_checkpointing(Recompute(_options(spec), kept))
    except ValueError:
        raise UserError(
            f"gradient_checkpointing: {type(model).__name__} does not support it", "turn it off"
        ) from None


@dataclass(frozen=True)
class Recompute:
    """Calls a block.

    Attributes:
        options: For `torch.utils.checkpoint`.
        kept: Blocks that are not recomputed.
    """

    options: dict[str, Any]
    kept: frozenset[torch.nn.Module] = field(default_factory=frozenset)

    def __call__(self, block: torch.nn.Module, *inputs: Any) -> Any:
        """Run a block, recomputing its activations in backward unless it is kept."""
        if block in self.kept or isinstance(vars(block).get("forward"), _Compiled):
            return block(*inputs)
        return checkpoint(block.__call__, *inputs, **self.options)


def _kept_blocks(model: torch.nn.Module, interval: int) -> frozenset[torch.nn.Module]:
    """All blocks but the first, and each `interval`-th after it, of their class."""
    counts: Counter[type[torch.nn.Module]] = Counter()
    kept = set()
    for block in _listed(model):
        if counts[type(block)] % interval:
            kept.add(block)
        counts[type(block)] += 1
    return frozenset(kept)


def _listed(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the items of a model's module lists, its blocks among them."""
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList):
            yield from module


def compile_checkpoints(model: Any, spec: TrainingKeys) -> list[torch.nn.Module]:
    """Compile repeated blocks together with their recomputation, as a selective policy needs.

    To a checkpoint, a compiled block is a single operation: it would be recomputed as a whole.
    Compiled around it, its policy decides what the compiler keeps (torch 2.13). FSDP's hooks stay
    outside. Equal blocks share a compilation, since the block is an argument of what is compiled.

    Args:
        model: A diffusers model that names its repeated blocks; changed in place.
        spec: The job.

    Returns:
        Which blocks.
    """
    options = _options(spec)

    def compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
        def recomputed(block: torch.nn.Module, *inputs: Any, **more: Any) -> Any:
            return checkpoint(partial(forward, block), *inputs, **options, **more)

        return torch.compile(recomputed, backend=spec.torch_compile_backend)

    shared: dict[type[torch.nn.Module], Callable[..., Any]] = {}
    kept = _kept_blocks(model, spec.gradient_checkpointing_interval)
    blocks = [
        block
        for block in _listed(model)
        if type(block).__name__ in model._repeated_blocks and block not in kept
    ]
    for block in blocks:
        kind = type(block)
        if kind not in shared:
            shared[kind] = compiled(kind.forward)
        block.forward = _Compiled(shared[kind], block)
    return blocks


class _Compiled(partial[Any]):
    """A block's forward that recomputes by itself."""


def _options(spec: TrainingKeys) -> dict[str, Any]:
    """For `torch.utils.checkpoint`."""
    options: dict[str, Any] = {"use_reentrant": False}
    if spec.gradient_checkpointing_policy == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, list(_KEPT))
    return options
