"""Compile a model's repeated blocks into few graphs, and say so where one runs uncompiled.

Dynamo makes a graph for each set of sizes, strides, `requires_grad` and modes of its inputs, up to
a limit; what needs one more runs uncompiled, with nothing but a line in that rank's log. So here
what differs without need is made alike, samples and validation take no graphs (`uncompiled`), and
reaching the limit is reported.
"""

from __future__ import annotations

import logging
import threading
from contextlib import nullcontext
from inspect import signature
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final

import torch

from engine.model.activation_checkpointing import compile_checkpoints
from engine.model.packing import scaled_product
from jobs.errors import UserError
from jobs.spec.rules.strategy import checkpoints_activations

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from contextlib import AbstractContextManager

    from jobs.spec.job_spec import RecipeKeys

# For each class of blocks; most need one or two. Blocks that are not alike need more: in UNets,
# where an adapter is on some, with modulation in other bits.
_GRAPHS: Final = 16
_LIMITS: Final = ("recompile_limit", "accumulated_recompile_limit")


def compile_blocks(model: Any, spec: RecipeKeys, warn: Callable[[str], None] | None = None) -> None:
    """Compile each repeated block in place; equal blocks share one compilation.

    Only what a block computes: hooks (of FSDP, swapping, windows) stay outside. The first size that
    is met has a graph of its own, and all others share one in which what has changed is a symbol:
    with everything a symbol from the start, one graph takes longer to make than those two.

    Args:
        model: A diffusers model, adapted, with what is trained requiring gradients.
        spec: The job.
        warn: Called with a sentence where a block has needed more graphs than are made.

    Raises:
        UserError: Diffusers names no repeated blocks for this model.
    """
    if not spec.torch_compile:
        return
    names = getattr(model, "_repeated_blocks", None) or ()
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        raise UserError(
            f"torch_compile: diffusers names no repeated blocks of {type(model).__name__}",
            "turn it off",
        )
    # Dynamo cannot trace it: see docs/upstream.md.
    torch.compiler.allow_in_graph(scaled_product)
    _allow(_GRAPHS * len({type(block) for block in blocks}), blocks)
    if warn is not None:
        _hear(warn)
    inside: Collection[torch.nn.Module] = ()
    if checkpoints_activations(spec) and spec.gradient_checkpointing_policy == "selective":
        inside = compile_checkpoints(model, spec)
    for block in blocks:
        if block not in inside:
            block.forward = torch.compile(block.forward, backend=spec.torch_compile_backend)
    _take_alike(blocks)


def uncompiled(spec: RecipeKeys) -> AbstractContextManager[object]:
    """Within, compiled blocks run as they are written, and make no graphs."""
    # Only if needed: a stance imports the compiler.
    return torch.compiler.set_stance("force_eager") if spec.torch_compile else nullcontext()


def _allow(graphs: int, blocks: Iterable[torch.nn.Module]) -> None:
    """Raise dynamo's limits to a number of graphs; a higher limit stays.

    A value that is set holds in its thread alone (torch 2.13), and on a GPU it is a thread of
    autograd's that recomputes blocks in backward. So each thread sets it before its first block.
    """
    config, raised = torch.compiler.config, threading.local()

    def allow(*_: Any) -> None:
        if not hasattr(raised, "here"):
            raised.here = True
            for limit in _LIMITS:
                setattr(config, limit, max(getattr(config, limit), graphs))

    allow()
    for block in blocks:
        block.register_forward_pre_hook(allow)


def _hear(warn: Callable[[str], None]) -> None:
    """Have `warn` called when dynamo reaches a limit, which it says in its log and nowhere else."""
    log = logging.getLogger("torch._dynamo")
    for handler in [h for h in log.handlers if isinstance(h, _AtLimit)]:
        log.removeHandler(handler)  # of another job of this process
    log.addHandler(_AtLimit(warn))


class _AtLimit(logging.Handler):
    """Warn once per function that has reached dynamo's graph limit."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._warn = warn
        self._warned: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Pass on a line of dynamo's; others are none of ours."""
        limit, *others = record.args if isinstance(record.args, tuple) and record.args else ("",)
        if limit not in _LIMITS:
            return
        graphs, function, *_ = [*others, "", ""]  # function: 'name' (file:line)
        name, _, place = str(function).replace("'", "").partition(" ")
        text = (
            f"torch_compile: {name} ({PurePath(place.strip('()')).name}) has made {graphs} graphs; "
            "what needs another one runs uncompiled, which is slower"
        )
        if text not in self._warned:
            self._warned.add(text)
            self._warn(text)


def _take_alike(blocks: Iterable[torch.nn.Module]) -> None:
    """Have equal blocks be given inputs that are alike, for which one graph suffices.

    The first block of a LoRA's model is given what needs no gradient, all others what does. It
    takes its own as if it did, and computes a gradient that nobody reads: of its first products
    alone, in 1 block of 57 of FLUX.1. Other blocks differ in the stride of a batch of one, which
    means nothing, or in the tensor that their input was cut out of.
    """
    anchor = torch.empty(0, requires_grad=True)
    kinds: dict[type[torch.nn.Module], list[torch.nn.Module]] = {}
    for block in blocks:
        if any(parameter.requires_grad for parameter in block.parameters()):
            kinds.setdefault(type(block), []).append(block)
    for kind, trained in kinds.items():
        if len(trained) > 1:
            for block in trained:
                block.register_forward_pre_hook(_alike(_streams(kind), anchor), with_kwargs=True)


def _streams(kind: type[torch.nn.Module]) -> dict[str, int]:
    """Name → place of the arguments that a block passes on to the next one."""
    described = signature(kind.forward)
    names = list(described.parameters)[1:]
    streams = {names[0]: 0}
    if "tuple" in str(described.return_annotation).lower() and "encoder_hidden_states" in names:
        streams["encoder_hidden_states"] = names.index("encoder_hidden_states")
    return streams


def _alike(streams: dict[str, int], anchor: torch.Tensor) -> Callable[..., Any]:
    def made_alike(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        alike: torch.Tensor = _Alike.apply(value, anchor)
        return alike

    def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled():
            return None
        places = set(streams.values())
        return (
            tuple(made_alike(v) if place in places else v for place, v in enumerate(args)),
            {name: made_alike(v) if name in streams else v for name, v in kwargs.items()},
        )

    return hook


class _Alike(torch.autograd.Function):
    """The same numbers as an input that needs a gradient and is no view of another tensor."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        """Return a tensor in the memory of `value (B, …)`; `anchor` is what needs a gradient."""
        ctx.reads = value.requires_grad
        if not value.requires_grad:  # a model's first, which may be a transposed image
            value = value.contiguous()
        # A view of a batch of one has the stride of that; a tensor that was cut out has not. What
        # is detached is no view, and counts changes in place with `value`: autograd sees them.
        return value.view_as(value).detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] if ctx.reads else None, None
