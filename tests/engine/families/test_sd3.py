"""What is particular to Stable Diffusion 3: second attentions, and T5 that a model may lack."""

from __future__ import annotations

import json
import re
import shutil
from typing import TYPE_CHECKING

import pytest
import torch
from diffusers import SD3Transformer2DModel

from engine.blocks.build import on_meta
from engine.families import load
from engine.toy import write_toy
from jobs.errors import UserError
from jobs.models.model_config import find_target

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(("flavour", "second"), [("3.5-medium", 13), ("3.5-large", 0)])
def test_the_second_attentions_of_a_model_get_adapters(flavour: str, second: int) -> None:
    with on_meta():
        model = SD3Transformer2DModel.from_config(find_target("sd3", flavour).config)
    linear = [name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    chosen = [name for name in linear if re.fullmatch(load("sd3").LORA_TARGETS, name)]
    assert sum(".attn2." in name for name in chosen) == 4 * second
    # Nothing of the blocks is left out but what makes shifts, scales and gates of the time.
    left = {n for n in linear if n.startswith("transformer_blocks.")} - set(chosen)
    assert left
    assert all(re.search(r"\.norm1(_context)?\.linear$", name) for name in left)


def test_a_model_without_t5_is_refused_in_words(tmp_path: Path) -> None:
    root = write_toy(tmp_path, "sd3", pictures=1).model
    index = json.loads((root / "model_index.json").read_text())
    index |= {"text_encoder_3": [None, None], "tokenizer_3": [None, None]}
    (root / "model_index.json").write_text(json.dumps(index))
    shutil.rmtree(root / "text_encoder_3")
    with pytest.raises(UserError, match=r"has no T5 \(text_encoder_3\)"):
        load("sd3", None, root).load_text_pipeline(root, torch.float32)
