"""Run HiDream's experts and sizes with little waiting for the GPU (diffusers 0.42)."""

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
    """Make a model route its tokens to experts with `_forward`, in training and evaluation.

    The original skips experts without tokens in evaluation, while another rank may be waiting for
    their weights. With `force_inference_output`, their output would carry no gradient. In training,
    it asks the GPU eight times per block which tokens belong to which expert.
    """
    for module in transformer.modules():
        if not isinstance(module, MOEFeedForwardSwiGLU):
            continue
        if "forward" in vars(module):
            return  # already done, since each forward calls this
        # Use a bound method, so that a copy of the model gets its own.
        module.forward = MethodType(_forward, module)
        module.gate.alpha = 0.0  # of a loss that the model computes but does not use


def _forward(experts: MOEFeedForwardSwiGLU, x: torch.Tensor) -> torch.Tensor:
    """Return the output of the shared and the selected experts for tokens `(B, L, D)`.

    Tokens are sorted by expert once. Their count per expert is read once per block, since routing
    depends on the previous block's output. While the host waits for that, the GPU computes the
    shared experts, so that it does not go idle. Backward does not wait.

    Alternatives without reading cost more. Running every expert on every token, mostly with weight
    zero, takes 1.6 times the matrix products of a HiDream-I1 block. `grouped_mm` needs the weights
    of all experts in one tensor: each forward would copy 0.4 GB per block, and it supports neither
    adapters nor packed weights nor FSDP units.
    """
    chosen, weights, _ = experts.gate(x)  # (B * L, k) each
    tokens = x.reshape(-1, 1, x.shape[-1]).expand(-1, chosen.shape[1], -1).flatten(0, 1)
    ordered, order = chosen.flatten().sort(stable=True)
    firsts = torch.arange(1, len(experts.experts), device=x.device)
    read_bounds = _read_later(torch.searchsorted(ordered, firsts, out_int32=True))
    shared = experts.shared_experts(x)

    numbers = torch.arange(len(order), device=x.device)
    places = torch.empty_like(order).scatter_(0, order, numbers)
    parts = _permuted(tokens, places).tensor_split(read_bounds())
    # Call experts without tokens too: their weights may be a unit that all ranks gather.
    made = [expert(part) for expert, part in zip(experts.experts, parts, strict=True)]
    back = _permuted(torch.cat(made).to(x.dtype), order)
    routed = (back.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)
    return routed.view_as(x).to(x.dtype) + shared


def _permuted(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Permute rows `(N, D)` to distinct places `(N,)`; backward gathers the gradient."""
    return torch.empty_like(rows).index_copy_(0, places, rows)


def _read_later(numbers: torch.Tensor) -> Callable[[], list[int]]:
    """Start copying integers `(N,)` to the host; return a function that waits for this copy."""
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
    """Keeps an image's size in tokens in host memory, where it is read."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and isinstance(args[0], list) and "device" in kwargs:
            kwargs = kwargs | {"device": "cpu"}
        return func(*args, **kwargs)


@contextmanager
def sizes_on_host(transformer: Any) -> Iterator[None]:
    """While active, no forward copies an image's size to the GPU, which would wait for it.

    In evaluation, diffusers also reads it back. The size is computed before anything is embedded.
    """
    with window(transformer.register_forward_pre_hook, transformer.x_embedder, _SizesOnHost):
        yield
