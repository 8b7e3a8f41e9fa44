"""How a job computes with a base in fp8: weights dequantized, or products in fp8 themselves.

Products in fp8 (`torch.nn.functional.scaled_mm`, a scale for each row) are of forward alone. In
backward a weight's scales lie along the sum, where no such product can take them, so weights are
dequantized there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch
from torch.nn import functional

from engine.model.packing import Packing, round_rows
from engine.model.precision import compute_dtype
from engine.model.quantized_linear import quantized_layers
from jobs.errors import UserError
from jobs.spec.rules.lora_conflicts import may_scale

if TYPE_CHECKING:
    from engine.ranks.telemetry import Telemetry
    from engine.ranks.world import World
    from jobs.spec.job_spec import JobSpec


_SIDE: Final = 16  # of which a product in fp8 needs multiples
_FIRST: Final = (8, 9)  # compute capability of Ada
_WRONG: Final = 0.02  # relative; sums of the same numbers differ by the rounding of bf16 (0.002)


def settle_matmul(
    spec: JobSpec, model: torch.nn.Module, world: World, telemetry: Telemetry, before: str | None
) -> JobSpec:
    """Have the model compute as the job asks, alike on all ranks; a collective.

    Args:
        spec: The job.
        model: With its packed layers.
        world: The ranks.
        telemetry: This rank's.
        before: `base_matmul` of the checkpoint that the run starts from: `auto` keeps it,
            since the other one would change the result.

    Returns:
        The job, with what was chosen in the place of `auto`.

    Raises:
        UserError: `scaled` is asked for where it cannot run.
    """
    if not may_scale(spec):
        return spec
    asked, lacks = spec.base_matmul, ""
    if asked == "auto" and before == "dequantize":
        lacks = "would change the result of a run that began without it"
    elif asked == "auto" and before in (None, "auto") and world.device.type == "cpu":
        lacks = "is no faster on a CPU"
    elif asked != "dequantize":
        lacks = _lacks(world, compute_dtype(spec))
    if lacks and asked == "scaled":
        raise UserError(f"base_matmul: scaled {lacks}", "set base_matmul: auto")
    scaled = not lacks and asked != "dequantize"
    count = set_scaled(model, scaled=scaled)
    if lacks and before == "scaled":
        telemetry.warn(f"changed since the checkpoint: base_matmul: scaled {lacks}")
    telemetry.say(
        (
            f"{count} layers of the base multiply in fp8"
            if scaled
            else "weights of the base are dequantized for each product"
        )
        + f" (base_matmul: {asked}{lacks and f'; scaled {lacks}'})"
    )
    return spec.model_copy(update={"base_matmul": "scaled" if scaled else "dequantize"})


def set_scaled(model: torch.nn.Module, *, scaled: bool) -> int:
    """Choose for all packed layers whose sides allow it.

    Returns:
        How many compute in fp8 now.
    """
    count = 0
    for layer in quantized_layers(model).values():
        able = layer.packing.scheme in ("fp8", "fp8_scaled")  # modulation may be in other bits
        sides = layer.in_features % _SIDE == 0 and layer.out_features % _SIDE == 0
        layer.packing = replace(layer.packing, scaled=scaled and able and sides)
        count += layer.packing.scaled
    return count


def _lacks(world: World, dtype: torch.dtype) -> str:
    """Why some rank cannot multiply in fp8; "" where all can. A collective."""
    return next((reason for reason in world.gather(_lacks_here(world.device, dtype)) if reason), "")


def _lacks_here(device: torch.device, dtype: torch.dtype) -> str:
    """Say what keeps this rank from multiplying in fp8, as a text after "scaled ".

    Rows have scales of their own from Ada on. Torch 2.11 launches that kernel on the wrong stream
    there (pytorch/pytorch#177651), and other pairs of GPU and cuBLAS fail when it is called
    (pytorch/pytorch#192707): only trying tells.
    """
    # A row's scale may be too small for fp16.
    if dtype is torch.float16 or (device.type == "cuda" and dtype is not torch.bfloat16):
        return "needs mixed_precision: bf16"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if torch.version.hip or capability < _FIRST:
            return "needs a GPU of compute capability 8.9 (Ada) or later"
        if capability == _FIRST and torch.__version__ < "2.12":
            return "needs torch 2.12 on this GPU"
    try:
        return "" if _is_right(device, dtype) else "computes wrong numbers on this GPU"
    except RuntimeError as error:
        return f"fails on this GPU ({str(error).splitlines()[0][:200]})"


def _is_right(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a product in fp8 equals the product of its rounded factors."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(272, 512, generator=generator).to(device, dtype)
    bias = torch.randn(256, generator=generator).to(device, dtype)
    packing = Packing("fp8_scaled", scaled=True)
    packed, scale = packing.pack(torch.randn(256, 512, generator=generator).to(device))
    product = packing.product(x, packed, scale, None, bias).float()
    rounded, scale_x = round_rows(x)
    weight = packing.unpack(packed, scale, None, torch.float32)
    expected = functional.linear(rounded.float() * scale_x, weight, bias.float())
    return bool((product - expected).norm() <= _WRONG * expected.norm())
