"""Split the tokens of each sample over a group of ranks, by diffusers' own context parallelism.

Diffusers' plan for a model splits its inputs and gathers its output; in between, attention alone
communicates. So every rank of a group sees the same sample, and computes the same loss from the
whole output. In backward a rank gets the gradient of its own tokens only: the gather hands back
the rank's chunk, whatever the other ranks do. Parts of a gradient add up over a group, where FSDP
and `engine.train.gradients` take the mean over all ranks. Therefore the loss is multiplied by the
size of the group before `backward`, which makes both right, sharded parameters and replicated ones.

What diffusers calls `ulysses_anything` and `ring_anything` (lengths that do not divide) has no
backward, so lengths must divide here.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig, attention_backend
from diffusers.models.attention_dispatch import TemplatedRingAttention

from engine.ranks.mesh import RING, ULYSSES
from jobs.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Torch 2.13 has new names for these collectives; diffusers 0.42 uses the old ones, and so do we.
warnings.filterwarnings(
    "ignore", message=r"`torch\.distributed\..*_tensor` is deprecated", category=FutureWarning
)

# Models whose gradients under diffusers' plan are those of one process, as tests show. Other plans
# were made for inference. With diffusers 0.42, LTX's fails in backward, where it takes keys to be
# as many as queries, and Helios's gathers inside of each block, which loses gradients in silence.
MODELS: Final = (
    "FluxTransformer2DModel",
    "Flux2Transformer2DModel",
    "QwenImageTransformer2DModel",
    "WanTransformer3DModel",
)

# Ring attention merges partial results, for which it needs the softmax's normaliser. Plain
# attention does not return it; torch's flash attention does, in bf16 and fp16.
_RING_BACKEND: Final = "_native_flash"
_ULYSSES_BACKEND: Final = "native"

# The last modules that queries and keys pass before attention, in all of `MODELS`.
_NORMS: Final = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")


def require_cuda(device: torch.device) -> None:
    """Refuse devices on which diffusers cannot set its groups up.

    Raises:
        UserError: The device is not a CUDA GPU.
    """
    if device.type != "cuda":
        raise UserError(
            f"Context parallelism runs on CUDA GPUs only, but the ranks run on {device.type}",
            "set context_parallel_size: 1",
        )


def enable_context_parallel(model: Any, mesh: DeviceMesh) -> None:
    """Make a model take whole inputs and give whole outputs, but compute on this rank's tokens.

    To be called on a diffusers model, on the meta device or not, after adapters are added: one on
    the last layer belongs inside of the gather. Deep copies made later would run the original.

    Args:
        model: Changed in place.
        mesh: All ranks, with the dims `RING` and `ULYSSES`; one of them has size 1.

    Raises:
        UserError: The model has no usable plan, or its heads do not divide.
    """
    ring, ulysses = mesh[RING].size(), mesh[ULYSSES].size()
    check_model(
        type(model).__name__.removeprefix("FSDP"), model.config.num_attention_heads, ulysses
    )
    # Named in any case: the default can be changed by an environment variable. Setting a model's
    # sets everybody's default as well, which the context takes back.
    backend = _RING_BACKEND if ring > 1 else _ULYSSES_BACKEND
    with attention_backend(backend):
        model.set_attention_backend(backend)
    if ring > 2:
        _mend_ring()
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in _NORMS:
            module.register_forward_hook(_cast_as_autocast)
    model.enable_parallelism(
        config=ContextParallelConfig(
            ring_degree=ring, ulysses_degree=ulysses, mesh=mesh[RING, ULYSSES]
        )
    )


def check_model(class_name: str, heads: int, ulysses: int) -> None:
    """Refuse models that cannot be split.

    Args:
        class_name: The transformer's class.
        heads: Its attention heads.
        ulysses: Ranks over which `alltoall` spreads heads; 1 for `allgather`.

    Raises:
        UserError: No usable plan, or the heads do not divide.
    """
    if class_name not in MODELS:
        raise UserError(
            f"diffusers has no context-parallel plan for {class_name} that can train",
            f"models with one: {', '.join(MODELS)}; or set context_parallel_size: 1",
        )
    if heads % ulysses:
        raise UserError(
            f"context_parallel_size {ulysses} does not divide the {heads} attention heads of "
            f"{class_name}",
            "choose a divisor, or context_parallel_comm_strategy: allgather, which needs none",
        )


def splits_text(model: Any) -> bool:
    """Whether text tokens are split too, so that their number must divide (Wan: they are not)."""
    return any("encoder_hidden_states" in split for split in _splits(model))


def check_tokens(tokens: int, size: int, what: str) -> None:
    """Refuse a sequence that cannot be split evenly.

    Args:
        tokens: Its length.
        size: `context_parallel_size`.
        what: What it is the length of, such as `pictures of 1024x1024` or `max_sequence_length`.

    Raises:
        UserError: `size` does not divide it.
    """
    if tokens % size:
        raise UserError(
            f"context_parallel_size {size} does not divide the {tokens} tokens of {what}",
            "change one of them",
        )


def _splits(model: Any) -> list[dict[str | int, Any]]:
    """Return the parts of a model's plan that split something, as name of input → how."""
    return [entry for entry in model._cp_plan.values() if isinstance(entry, dict)]


def _cast_as_autocast(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    """Give queries and keys the precision that autocast would give them inside of attention.

    Norms leave fp32 under autocast, and values are not normed. Plain attention is cast by autocast
    as a whole. Diffusers' (0.42) has its own backward, which calls attention again, outside of
    autocast, where mixed precisions raise.
    """
    kind = output.device.type
    return output.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else output


def _mend_ring() -> None:
    """Replace the backward of diffusers' ring attention (0.42), wrong for three ranks or more.

    There, rank r works on the chunk of rank r + i in round i, and hands its sum of that chunk's
    gradients to rank r + 1, which is then busy with the chunk of rank r + i + 2: gradients of keys
    and values end up on the wrong ranks, in silence. Two ranks cannot tell the two ways around.
    """
    TemplatedRingAttention.backward = staticmethod(_ring_backward)


def _ring_backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
    """Gradients of ring attention, from what diffusers' forward kept.

    Args:
        ctx: With this rank's query, key and value, and with the whole output and its normaliser.
        grad: Of the output of this rank's queries, `(B, L, H, D)`.

    Returns:
        Of query, key and value, each `(B, L, H, D)`; None for all other arguments of forward.
    """
    config = ctx._parallel_config.context_parallel_config
    group, ranks = config._ring_mesh.get_group(), config.ring_degree
    query, key, value, *_ = ctx.saved_tensors
    mine = torch.stack([key, value])  # (2, B, L, H, D)
    whole = mine.new_empty(2 * ranks, *key.shape)  # key, value, key, value, … by rank
    dist.all_gather_into_tensor(whole, mine, group=group)
    grad_query = torch.zeros_like(query, dtype=torch.float32)
    grad_whole = torch.empty_like(whole, dtype=torch.float32)
    for place in range(0, 2 * ranks, 2):
        parts = ctx.backward_op(
            ctx,
            grad,
            query=query,
            key=whole[place],
            value=whole[place + 1],
            out=ctx.ring_out,
            lse=ctx.ring_lse,
        )
        grad_query += parts[0]
        grad_whole[place], grad_whole[place + 1] = parts[1], parts[2]
    grad_mine = torch.empty_like(mine, dtype=torch.float32)
    dist.reduce_scatter_tensor(grad_mine, grad_whole, group=group)
    gradients = (part.to(grad.dtype) for part in (grad_query, *grad_mine))
    return (*gradients, *[None] * 9)
