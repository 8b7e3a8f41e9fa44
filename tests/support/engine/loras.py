"""What the tests of LoRA tools share: files of random LoRAs, and what they add to each weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from engine.exports.recipe import Recipe
from engine.loras.__main__ import main
from engine.model.adapters import lora
from tests.support.engine.exports import export_alone

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from tests.support.engine.families import Case

Deltas = dict[str, torch.Tensor]


def exported(case: Case, place: Path, *, seed: int = 1, **values: Any) -> tuple[Any, Deltas]:
    """Export a random LoRA of a toy under all names.

    Returns:
        The directory, and module → what it adds to the weight, `(out, in)` in fp32.
    """
    formats = [name for name in ("kohya", "comfyui") if getattr(case.family, name.upper())]
    spec = case.spec(
        **{"lora_rank": 3, "lora_alpha": 2, "export_formats": ["diffusers", *formats]} | values
    )
    model = case.family.transformer_class().from_pretrained(
        case.paths.model, subfolder=case.family.component
    )
    unused = case.family.without_gradient(model, spec)
    lora.add_lora(model, spec, case.family.lora_targets(spec), unused)
    draw = torch.Generator().manual_seed(seed)
    parts = lora.lora_parameters(model)
    with torch.no_grad():
        for name, parameter in parts.items():
            parameter.normal_(std=0.1, generator=draw)
            if "magnitude" in name:
                parameter.abs_().add_(1)
    scales = lora.scales_of(model)
    deltas = {}
    if spec.lora_variant != "lokr":
        for name, scale in scales.items():
            up = parts[f"{name}.lora_B.default.weight"].detach().flatten(1)
            down = parts[f"{name}.lora_A.default.weight"].detach().flatten(1)
            deltas[name] = scale * up @ down
    recipe = Recipe(spec, case.family, case.paths.model, 4, ema=False, formats=spec.export_formats)
    return export_alone(model, recipe, place).path, deltas


def deltas_of(file: Path) -> Deltas:
    """Module, as a file names it → what it adds to the weight by ComfyUI's rule."""
    tensors, found = load_file(file), {}
    for name, down in tensors.items():
        for a, b in (("lora_A", "lora_B"), ("lora_down", "lora_up")):
            if name.endswith(f".{a}.weight"):
                module = name.removesuffix(f".{a}.weight")
                up = tensors[f"{module}.{b}.weight"].float().flatten(1)
                alpha = float(tensors.get(f"{module}.alpha", torch.tensor(len(down))))
                found[module] = alpha / len(down) * up @ down.float().flatten(1)
    return found


def assert_close(found: Deltas, expected: Deltas, error: float = 1e-5) -> None:
    """Same names, and each within a share of its norm."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        difference = (found[name].float() - tensor.float()).norm()
        assert difference <= error * tensor.float().norm(), (name, float(difference))


def tool(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Run the tool in this process; its status, output and last line of errors."""
    capsys.readouterr()
    try:
        status = main([str(word) for word in words])
    except SystemExit as caught:
        status = int(caught.code or 0)
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if not line.startswith("lora ")]
    return status, out, lines[-1] if lines else ""
