"""Lumina-Image 2.0: what its text is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from jobs.errors import UserError
from tests.support.engine.families import PROMPT, Case

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    root: Path = tmp_path_factory.getbasetemp().parent / "families"
    return Case("lumina2", root)


def test_only_prompts_follow_the_system_prompt(case: Case) -> None:
    """What guidance leads away from has none, and neither has a dropped caption."""
    ids = case.text.tokenizer(PROMPT).input_ids
    assert len(case.encoded(PROMPT, negative=True)["prompt_attention_mask"]) == len(ids)
    assert len(case.encoded(PROMPT)["prompt_attention_mask"]) > len(ids) + 10
    assert len(case.encoded("", negative=True)["prompt_attention_mask"]) == 1


def test_encoded_texts_are_as_the_pipeline_has_them(case: Case) -> None:
    with torch.no_grad():
        prompt, mask, negative, negative_mask = case.text.encode_prompt(
            PROMPT, negative_prompt=[PROMPT], max_sequence_length=64
        )
    for embeds, attended, found in (
        (prompt, mask, case.encoded(PROMPT)),
        (negative, negative_mask, case.encoded(PROMPT, negative=True)),
    ):
        assert torch.equal(found["prompt_embeds"], embeds[0, attended[0].bool()])
        assert bool(found["prompt_attention_mask"].all())


def test_more_text_than_the_model_has_positions_for_is_refused(case: Case) -> None:
    with pytest.raises(UserError, match="300 is more than the model's 299 text positions"):
        case.family.encode(case.text, PROMPT, 300)
    assert case.family.encode(case.text, PROMPT, 299)
