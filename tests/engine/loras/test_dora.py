"""A DoRA in a model's weights, where a row has no direction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.engine.loras import tool

if TYPE_CHECKING:
    from pathlib import Path


def test_a_row_of_zeros_stays_one_in_a_dora(tmp_path: Path, capsys: Any) -> None:
    """It has no direction that could be given a length."""
    key = "double_blocks.0.img_attn.qkv"
    up = torch.tensor([[1.0], [0.0]])
    parts = {"lora_A.weight": torch.ones(1, 3), "lora_B.weight": up, "dora_scale": torch.ones(2, 1)}
    save_file({f"diffusion_model.{key}.{end}": t for end, t in parts.items()}, tmp_path / "dora")
    save_file({f"{key}.weight": torch.zeros(2, 3)}, tmp_path / "base")
    out = tmp_path / "merged"
    words = ["merge", tmp_path / "dora", "--weight=1", f"--into={tmp_path / 'base'}"]
    assert tool(capsys, *words, f"--output={out}")[0] == 0
    rows = load_file(out)[f"{key}.weight"]
    assert torch.allclose(rows, torch.tensor([[3**-0.5] * 3, [0.0] * 3]))
