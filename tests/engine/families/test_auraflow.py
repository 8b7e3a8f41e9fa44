"""What is particular to AuraFlow: a table of positions that ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from diffusers import AuraFlowTransformer2DModel

from engine.families import load
from engine.toy import write_toy
from jobs.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path


@torch.no_grad()
def test_pictures_beyond_the_table_of_positions_are_refused(tmp_path: Path) -> None:
    """The model itself would read other places' rows."""
    root = write_toy(tmp_path, "auraflow", pictures=1).model
    transformer = AuraFlowTransformer2DModel.from_pretrained(root / "transformer")
    family = load("auraflow", None, root)
    condition = {"prompt_embeds": torch.zeros(1, 4, transformer.config.joint_attention_dim)}
    level = torch.tensor([0.5])
    largest = torch.zeros(1, 4, 32, 2)  # 16 patches of 2x2
    assert family.predict(transformer, largest, level, condition, 1.0).isfinite().all()
    with pytest.raises(UserError, match=r"16x272 exceed .* ends at 256 pixels"):
        family.predict(transformer, torch.zeros(1, 4, 34, 2), level, condition, 1.0)
