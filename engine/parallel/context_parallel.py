"""Split the tokens of each sample over a group of ranks, by diffusers' own context parallelism.

Diffusers' plan for a model splits its inputs and gathers its output; in between, attention alone
communicates. So every rank of a group sees the same sample, and computes the same loss from the
whole output. In backward a rank gets the gradient of its own tokens only: the gather hands back
the rank's chunk, whatever the other ranks do. Parts of a gradient add up over a group, where FSDP
and `engine.train.gradients` take the mean over all ranks. Therefore the loss is multiplied by the
size of the group before `backward`, which makes both right, sharded parameters and replicated ones.

Some tokens are on every rank: text that video attends to, and LTX-2's sound. Their layers get a
part of their gradient on each rank as well. For an output that every rank computes in full, that
part is an equal share.

What diffusers calls `ulysses_anything` and `ring_anything` (lengths that do not divide) has no
backward, so lengths must divide here.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig, attention_backend
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from diffusers.models.attention_dispatch import TemplatedRingAttention

from engine.ranks.mesh import RING, ULYSSES
from jobs.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed.device_mesh import DeviceMesh

# Torch 2.13 has new names for these collectives; diffusers 0.42 uses the old ones, and so do we.
warnings.filterwarnings(
    "ignore", message=r"`torch\.distributed\..*_tensor` is deprecated", category=FutureWarning
)

# Ring attention merges partial results, for which it needs the softmax's normaliser. Plain
# attention does not return it; torch's flash attention does, in bf16 and fp16.
_RING_BACKEND: Final = "_native_flash"
_ULYSSES_BACKEND: Final = "native"

# The last modules that queries and keys pass before attention, in all of `MODELS`.
_NORMS: Final = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")

_ROWS: Final = ContextParallelInput(split_dim=1, expected_dims=3)  # (B, tokens, D)
_GATHERED: Final = ContextParallelOutput(gather_dim=1, expected_dims=3)


@dataclass(frozen=True)
class Split:
    """How a model's tokens are split. Layers are named by the end of their names.

    Attributes:
        plan: Returns diffusers' plan for a model's config; None where its class has one that can
            train. With diffusers 0.42, LTX's attention to text fails in backward, where it takes
            keys to be as many as queries, and Helios's gathers inside of each block, which loses
            gradients in silence.
        whole: Attention layers whose keys are not split, or are gathered.
        gathered: Layers whose outputs all ranks need of all tokens.
        repeated: Layers whose outputs are the same on all ranks.
        shares_rows: Whether its class has attention of its own for rows that ranks share.
        levels: Whether noise levels, `timestep`, may be those of tokens, `(B, tokens)`. A plan
            would warn of others.
    """

    plan: Callable[[Any], dict[str, Any]] | None = None
    whole: tuple[str, ...] = ()
    gathered: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()
    levels: bool = False
    shares_rows: bool = False


def _plan_of_vace(_: Any) -> dict[str, Any]:
    """Return Wan's plan with the control blocks, which are all given the video's tokens."""
    rotation = ContextParallelInput(split_dim=1, expected_dims=4, split_output=True)
    return {
        "rope": {0: rotation, 1: rotation},
        "vace_blocks.0": {"control_hidden_states": _ROWS},
        "vace_blocks.*": {"hidden_states": _ROWS},
        "blocks.0": {"hidden_states": _ROWS},
        "proj_out": _GATHERED,
    }


def _plan_of_ltx(_: Any) -> dict[str, Any]:
    """Return diffusers' plan without text."""
    rotation = ContextParallelInput(split_dim=1, expected_dims=3, split_output=True)
    return {
        "": {"hidden_states": _ROWS},
        "rope": {0: rotation, 1: rotation},
        "proj_out": _GATHERED,
    }


def _plan_of_ltx2(config: Any) -> dict[str, Any]:
    """Return a plan for the video's tokens.

    Diffusers' own splits rotations of `rope_type: interleaved`, `(B, tokens, D)`; published models
    have `split`, `(B, heads, tokens, D)`. Positions `(B, 3, tokens, 2)` are the same for both.
    """
    by_heads = config.rope_type == "split"
    rotation = ContextParallelInput(split_dim=1 + by_heads, expected_dims=3 + by_heads)
    return {
        "": {"hidden_states": _ROWS},
        "rope": {"coords": ContextParallelInput(split_dim=2, expected_dims=4)},
        # Of the rotations that join video and sound, keys of the video need all.
        "transformer_blocks.*.audio_to_video_attn": {"query_rotary_emb": [rotation, rotation]},
        "proj_out": _GATHERED,
    }


MODELS: Final = {
    "FluxTransformer2DModel": Split(),
    "Flux2Transformer2DModel": Split(),
    "QwenImageTransformer2DModel": Split(),
    "WanTransformer3DModel": Split(),
    "WanVACETransformer3DModel": Split(_plan_of_vace),
    "LTXVideoTransformer3DModel": Split(_plan_of_ltx, whole=("attn2",), levels=True),
    # A second of sound is 25 tokens, so each rank has them all.
    "LTX2VideoTransformer3DModel": Split(
        _plan_of_ltx2,
        whole=(
            *("attn2", "audio_attn1", "audio_attn2"),
            *("audio_to_video_attn", "video_to_audio_attn"),
        ),
        gathered=("video_to_audio_attn.norm_k", "video_to_audio_attn.to_v"),
        repeated=("audio_proj_out",),
        levels=True,
    ),
    # A sequence is as long as its captions, and of several samples.
    "MiniMaxH3Transformer": Split(whole=("attn",), shares_rows=True),
}
"""Models whose gradients are those of one process, as tests show, by class."""


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
    name = type(model).__name__.removeprefix("FSDP")
    check_model(name, model.config.num_attention_heads, ulysses)
    split = MODELS[name]
    # Named in any case: the default can be changed by an environment variable. Setting a model's
    # sets everybody's default as well, which the context takes back.
    backend = _RING_BACKEND if ring > 1 else _ULYSSES_BACKEND
    with attention_backend(backend):
        model.set_attention_backend(backend)
    if ring > 2:
        _mend_ring()
    for module in _named(model, _NORMS):
        module.register_forward_hook(_cast_as_autocast)
    group = mesh[RING if ring > 1 else ULYSSES].get_group()
    for module in _named(model, split.gathered):
        module.register_forward_hook(partial(_gather, group))
    if split.levels:
        model.register_forward_pre_hook(partial(_split_levels, group), with_kwargs=True)
    for module in _named(model, split.repeated):
        module.register_forward_hook(partial(_share, ring * ulysses))
    model.enable_parallelism(
        config=ContextParallelConfig(
            ring_degree=ring, ulysses_degree=ulysses, mesh=mesh[RING, ULYSSES]
        ),
        cp_plan=split.plan(model.config) if split.plan is not None else None,
    )
    for module in _named(model, split.whole):
        # A new one is not told of parallelism.
        module.set_processor(type(module.processor)())
    if split.shares_rows:
        model.share_rows(partial(_gathered, group), group.rank(), group.size())
    for module in _named(model, split.whole):
        module.set_attention_backend(_ULYSSES_BACKEND)


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
    if heads % ulysses and not MODELS[class_name].shares_rows:
        raise UserError(
            f"context_parallel_size {ulysses} does not divide the {heads} attention heads of "
            f"{class_name}",
            "choose a divisor, or context_parallel_comm_strategy: allgather, which needs none",
        )


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


def _named(model: torch.nn.Module, ends: tuple[str, ...]) -> Iterator[Any]:
    """Yield the modules whose names end with one of some names."""
    for name, module in model.named_modules():
        if f".{name}".endswith(tuple(f".{end}" for end in ends)):
            yield module


class _Gather(torch.autograd.Function):
    """Gather tokens of all ranks; in backward, gradients of all ranks add up."""

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Return all tokens, `(B, N, D)`, of `mine (B, N / ranks, D)`. A collective."""
        ctx.group, ctx.ranks = group, group.size()
        parts = mine.new_empty(ctx.ranks, *mine.shape)
        dist.all_gather_into_tensor(parts.flatten(0, 1), mine.contiguous(), group=group)
        return parts.transpose(0, 1).flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient of this rank's tokens. A collective."""
        parts = grad.unflatten(1, (ctx.ranks, -1)).transpose(0, 1).contiguous()
        mine = torch.empty_like(parts[0])
        dist.reduce_scatter_tensor(mine, parts.flatten(0, 1), group=ctx.group)
        return mine, None


def _gather(
    group: dist.ProcessGroup, module: torch.nn.Module, args: Any, output: torch.Tensor
) -> torch.Tensor:
    return _gathered(group, output)


def _gathered(group: dist.ProcessGroup, mine: torch.Tensor) -> torch.Tensor:
    return _Gather.apply(mine, group)


def _split_levels(
    group: dist.ProcessGroup, module: torch.nn.Module, args: Any, names: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    levels = names["timestep"]
    if levels.dim() == 2 and levels.shape[1] > 1:
        names["timestep"] = levels.chunk(group.size(), dim=1)[group.rank()]
    return args, names


def _share(ranks: int, module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
    """Have a rank compute its share of the gradient of what all ranks have computed."""
    if output.requires_grad:
        output.register_hook(lambda grad: grad / ranks)


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
