"""Sana: what its text is, and what its adapters reach."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
import torch

from tests.support.engine.families import PROMPT, Case

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    root: Path = tmp_path_factory.getbasetemp().parent / "families"
    return Case("sana", root)


def test_only_prompts_follow_the_instruction(case: Case) -> None:
    """Of which the pipeline cuts off all but the end; the prompt has read all of it."""
    asked, plain = case.encoded(PROMPT), case.encoded(PROMPT, negative=True)
    assert len(plain["prompt_embeds"]) == len(case.text.tokenizer(PROMPT).input_ids)
    assert len(asked["prompt_embeds"]) - len(plain["prompt_embeds"]) <= 1
    assert not torch.allclose(asked["prompt_embeds"][-1], plain["prompt_embeds"][-1], atol=1e-2)
    assert len(case.encoded("", negative=True)["prompt_embeds"]) == 1


def test_a_long_prompt_is_cut_off_where_the_pipeline_does(case: Case) -> None:
    assert case.encoded(f"{PROMPT} " * 40)["prompt_embeds"].shape[0] == 64


def test_adapters_reach_every_layer_of_the_blocks_but_the_depthwise(case: Case) -> None:
    transformer = case.stock().transformer
    layers = {
        name
        for name, module in transformer.transformer_blocks.named_modules(
            prefix="transformer_blocks"
        )
        if isinstance(module, (torch.nn.Linear, torch.nn.Conv2d))
    }
    reached = {name for name in layers if re.fullmatch(case.family.LORA_TARGETS, name)}
    assert {name.rpartition(".")[2] for name in layers - reached} == {"conv_depth"}
