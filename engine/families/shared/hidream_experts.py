"""HiDream's experts and sizes, with little waiting for the GPU (diffusers 0.42)."""

from __future__ import annotations

from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from diffusers.models.transformers.transformer_hidream_image import MOEFeedForwardSwiGLU
from torch.overrides import TorchFunctionMode

from engine.families.shared.function_window import window

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def call_every_expert(transformer: torch.nn.Module) -> None:
    """Have a model send its tokens to experts as below, whatever mode it is in.

    By itself it leaves out an expert that no token was sent to while it samples, when another rank
    may be waiting for its weights; with `force_inference_output` nothing would be learned from
    their output; and in training it asks the GPU eight times a block which tokens are whose.
    """
    for module in transformer.modules():
        if not isinstance(module, MOEFeedForwardSwiGLU):
            continue
        if "forward" in vars(module):
            return  # and so have all others: each forward begins here
        # A bound method: a copy of the model gets one of its own.
        module.forward = MethodType(_forward, module)
        module.gate.alpha = 0.0  # of a loss that the model computes and leaves out


def _forward(experts: MOEFeedForwardSwiGLU, x: torch.Tensor) -> torch.Tensor:
    """Return what the shared and the chosen experts make of tokens `(B, L, D)`.

    Tokens are sorted by expert once. How many each expert has is read once a block, since a block
    chooses by what the one before it made. While the host waits for that, the GPU has the shared
    experts to compute, so that it does not run dry; backward waits for nothing.

    What would need no reading costs more. Every expert on every token, with a weight of zero for
    most, is 1.6 times the products of a block of HiDream-I1. `grouped_mm` takes the weights of all
    experts in one tensor: each forward would copy 0.4 GB a block, and it knows neither adapters nor
    packed weights nor FSDP's units.
    """
    chosen, weights, _ = experts.gate(x)  # (B * L, k) each
    tokens = x.reshape(-1, 1, x.shape[-1]).expand(-1, chosen.shape[1], -1).flatten(0, 1)
    ordered, order = chosen.flatten().sort(stable=True)
    firsts = torch.arange(1, len(experts.experts), device=x.device)
    read_bounds = _read_later(torch.searchsorted(ordered, firsts, out_int32=True))
    shared = experts.shared_experts(x)

    numbers = torch.arange(len(order), device=x.device)
    places = torch.empty_like(order).scatter_(0, order, numbers)
    parts = _moved(tokens, places).tensor_split(read_bounds())
    # An expert without tokens is called too: its weights may be a unit that all ranks gather.
    made = [expert(part) for expert, part in zip(experts.experts, parts, strict=True)]
    back = _moved(torch.cat(made).to(x.dtype), order)
    routed = (back.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)
    return routed.view_as(x).to(x.dtype) + shared


def _moved(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Each row of `(N, D)` at its place `(N,)`, all different; the gradient is gathered back."""
    return torch.empty_like(rows).index_copy_(0, places, rows)


def _read_later(numbers: torch.Tensor) -> Callable[[], list[int]]:
    """Begin to copy integers `(N,)` to the host; what is returned waits for them alone."""
    if not numbers.is_cuda:
        return numbers.tolist
    host = numbers.to("cpu", non_blocking=True)  # into pinned memory
    copied = torch.cuda.Event()
    copied.record()

    def read() -> list[int]:
        copied.synchronize()
        bounds: list[int] = host.tolist()
        return bounds

    return read


class _SizesOnHost(TorchFunctionMode):
    """Leave the size of an image, in tokens, in host memory: it is only read there."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and isinstance(args[0], list) and "device" in kwargs:
            kwargs = kwargs | {"device": "cpu"}
        return func(*args, **kwargs)


@contextmanager
def sizes_on_host(transformer: Any) -> Iterator[None]:
    """Within this context, no forward copies an image's size to the GPU, which waits for it.

    In evaluation, diffusers reads it back as well. It is made before anything is embedded.
    """
    with window(transformer.register_forward_pre_hook, transformer.x_embedder, _SizesOnHost):
        yield
