"""Select the kernels that torch may use, for the process and for the model's attention."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

import torch
from diffusers import attention_backend
from torch.nn.attention import activate_flash_attention_impl

from jobs.errors import UserError

if TYPE_CHECKING:
    from jobs.spec.keys.training import TrainingKeys

# Diffusers' names for torch's own kernels. `auto` leaves the choice to torch.
_DIFFUSERS_NAMES: Final = {
    "flash": "_native_flash",
    "flash3": "_native_flash",  # see `activate_flash3`
    "efficient": "_native_efficient",
    "cudnn": "_native_cudnn",
    "math": "_native_math",
}


def choose_backends(spec: TrainingKeys) -> None:
    """Set TF32, determinism and cuDNN's attention as the job says. Call before any computation.

    Raises:
        UserError: The job selects a kernel that this rank's GPU does not have.
    """
    if spec.attention_backend == "flash3":
        _require_hopper()
    torch.set_float32_matmul_precision("high" if spec.allow_tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = spec.allow_tf32
    # Torch prefers cuDNN's attention on Hopper GPUs, whose backward may read uninitialized memory:
    # NaN gradients, for FLUX.1 at 1024 px in every step (H200, torch 2.11, cuDNN 9.19). See
    # docs/upstream.md.
    torch.backends.cuda.enable_cudnn_sdp(spec.attention_backend == "cudnn")
    if spec.deterministic:
        # cuBLAS reads this when its first handle is created.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
        # Weights are read into newly allocated memory; filling it with NaN first would write it
        # twice.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(spec.deterministic)


def _require_hopper() -> None:
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    seen = torch.cuda.is_available() and rank < torch.cuda.device_count()
    if seen and torch.cuda.get_device_capability(rank)[0] != 9:
        name = torch.cuda.get_device_name(rank)
        raise UserError(
            f"attention_backend: flash3 runs on Hopper GPUs (H100, H200), not on {name}",
            "set attention_backend: auto",
        )


def activate_flash3(spec: TrainingKeys) -> None:
    """Make torch's flash attention use FlashAttention 3, forward and backward, from now on.

    Diffusers' own backend of that name (0.42) has no backward. Text encoders and VAE, whose heads
    and masks FlashAttention 3 does not support, have already run by this time.

    Raises:
        UserError: The package is missing or broken, or was built for another torch.
    """
    if spec.attention_backend != "flash3":
        return
    try:
        activate_flash_attention_impl("FA3")
    except (ImportError, OSError, RuntimeError) as error:
        raise UserError(
            f"attention_backend: flash3 cannot be used ({error})",
            "install flash_attn_3 for this torch, or set attention_backend: auto",
        ) from None


def choose_attention(model: Any, spec: TrainingKeys) -> None:
    """Make the model's attention use one kernel, and fail rather than fall back to another.

    Set it per model, through diffusers: text encoders and VAE have head sizes that flash does not
    support.

    Raises:
        UserError: The model's attention has no setting for the kernel.
    """
    if spec.attention_backend == "auto":
        return
    name = _DIFFUSERS_NAMES[spec.attention_backend]
    # Setting it on a model also changes the global default, which the context restores.
    with attention_backend(name):
        model.set_attention_backend(name)
    processors = [getattr(module, "processor", None) for module in model.modules()]
    if not any(getattr(p, "_attention_backend", None) == name for p in processors):
        raise UserError(
            f"attention_backend: {type(model).__name__} does not support choosing a kernel",
            "set attention_backend: auto",
        )
