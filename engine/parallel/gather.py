"""Whole tensors from their shards."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor


@torch.no_grad()
def gather(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a possibly sharded tensor, on the device where its ranks compute; a collective.

    With CPU offload the shards are in host memory while their ranks talk on GPUs.
    """
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    sharded: Any = tensor.to(tensor.device_mesh.device_type)
    whole: torch.Tensor = sharded.full_tensor()
    return whole
