"""`python -m engine.doctor`: what torch is and which GPUs it sees, as lines of JSON.

Each line is complete by itself, so that what is known before a driver hangs is not lost. No memory
is taken on any GPU.
"""

from __future__ import annotations

import json
import time
from typing import Any

from engine.start.command import OneLineParser, run_command


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    OneLineParser(prog="python -m engine.doctor", description=__doc__).parse_args(arguments)
    begun = time.monotonic()
    import torch

    _say(build(seconds=time.monotonic() - begun))
    if torch.version.cuda is None:
        return 0
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # no driver, or an incompatible one
        _say({"cuda_error": str(error)})
        return 0
    _say({"devices": [device(index) for index in range(torch.cuda.device_count())]})
    _say({"apart": apart()})
    return 0


def build(seconds: float) -> dict[str, Any]:
    """Report what this torch was built for; `seconds` is how long its import took."""
    import torch
    import torch.distributed as dist

    has_nccl = dist.is_available() and dist.is_nccl_available()
    return {
        "torch": torch.__version__,
        "seconds": round(seconds, 2),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "nccl": list(torch.cuda.nccl.version()) if has_nccl and torch.version.cuda else None,
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "architectures": torch.cuda.get_arch_list() if torch.version.cuda else [],
    }


def device(index: int) -> dict[str, Any]:
    """Describe the GPU with this torch index."""
    import torch

    properties = torch.cuda.get_device_properties(index)
    return {
        "uuid": f"GPU-{properties.uuid}",
        "name": properties.name,
        "memory": properties.total_memory,
        "capability": [properties.major, properties.minor],
    }


def apart() -> list[list[int]]:
    """Return pairs of torch indices of which the first GPU has no peer access to the second."""
    import torch

    count = torch.cuda.device_count()
    return [
        [first, other]
        for first in range(count)
        for other in range(count)
        if first != other and not torch.cuda.can_device_access_peer(first, other)
    ]


def _say(facts: dict[str, Any]) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    run_command(main)
