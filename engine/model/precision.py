"""Define the precision of storage and computation."""

from __future__ import annotations

import re
from contextlib import nullcontext
from inspect import signature
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from engine.ranks.world import World
    from jobs.spec.job_spec import RecipeKeys
    from jobs.spec.keys.training import TrainingKeys

# Arguments of diffusers' denoisers that are not cast; `Z-Image` passes lists of tensors.
_EXACT: Final = re.compile(r"^t$|time|guidance|_ids$|coords|mask|scale|rope|rotary")
_COMPUTE: Final = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def compute_dtype(spec: TrainingKeys) -> torch.dtype:
    """Return the precision of matrix products."""
    return _COMPUTE[spec.mixed_precision]


def storage_dtype(spec: RecipeKeys, *, keep_fp32: bool) -> torch.dtype:
    """Return the precision in which a base parameter is kept, independent of its file.

    Full training keeps fp32 masters. A frozen base is kept in the compute precision, since no
    operation mixes precisions. Modules that the model lists as needing fp32 are kept in fp32 (like
    in `from_pretrained`).

    Args:
        spec: The job.
        keep_fp32: Whether the model lists this module as one that needs fp32.
    """
    return torch.float32 if spec.model_type == "full" or keep_fp32 else compute_dtype(spec)


def computes_alone(spec: RecipeKeys, *, sharded: bool) -> bool:
    """Return whether a model in training computes in bf16 by itself, without autocast.

    Its weights must be in bf16: a LoRA's frozen base is kept in bf16
    (`engine.model.adapters.lora_layer` casts the adapters), and FSDP gathers full training's
    masters in bf16. Modules that the model lists as needing fp32 stay fp32, and the model's own
    code casts around them, as in the stock pipelines. Autocast would instead compute all norms and
    the operations after them in fp32: a third more kernels, and more than a third more bytes kept
    for backward. Compiled blocks use autocast, since Inductor fuses its casts.
    """
    if spec.mixed_precision != "bf16" or spec.torch_compile:
        return False
    return spec.model_type == "lora" or sharded


def narrow_inputs(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Make a model cast its inputs to `dtype`, except for those that must be exact.

    These are noise levels, guidance, sizes and positions: in bf16, row 257 of an image equals row
    256.
    """
    names = list(signature(model.forward).parameters)

    def cast(value: Any) -> Any:
        if isinstance(value, list):
            return [cast(item) for item in value]
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        return value if torch.is_autocast_enabled(value.device.type) else value.to(dtype)

    def narrow(
        module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        placed = zip(names, args, strict=False)
        return (
            tuple(value if _EXACT.search(name) else cast(value) for name, value in placed),
            {n: value if _EXACT.search(n) else cast(value) for n, value in kwargs.items()},
        )

    model.register_forward_pre_hook(narrow, with_kwargs=True)


def autocast(spec: TrainingKeys, device: torch.device) -> AbstractContextManager[object]:
    """Return autocast in the job's precision, or a null context for fp32."""
    if compute_dtype(spec) is torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype=compute_dtype(spec))


def computing(spec: RecipeKeys, world: World) -> AbstractContextManager[object]:
    """Enter the precision that a model computes in; see `computes_alone`."""
    if computes_alone(spec, sharded=world.shards):
        return nullcontext()
    return autocast(spec, world.device)
