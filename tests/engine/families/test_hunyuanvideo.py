"""HunyuanVideo: its tokenizer, its template, and texts of several lengths in one batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from engine.toy.components.weights import one_thread
from tests.support.engine.families import PROMPT, Case, batch_of

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("hunyuanvideo", tmp_path_factory.mktemp("hunyuanvideo"))


def test_words_stay_words(case: Case) -> None:
    """The class that the model names for its tokenizer loses spaces in transformers 5."""
    tokens = case.text.tokenizer.tokenize(PROMPT)
    assert "".join(tokens).replace("Ġ", " ") == PROMPT
    assert len(tokens) == len(PROMPT.split())


@pytest.mark.parametrize(("prompt", "words"), [(PROMPT, 7), ("a star", 2), ("", 0)])
def test_a_text_is_as_long_as_its_prompt(case: Case, prompt: str, words: int) -> None:
    """Without template and filling; with the sign that ends a turn."""
    text = case.encoded(prompt)
    assert text["prompt_embeds"].shape == (words + 1, 64)
    assert text["prompt_attention_mask"].tolist() == [1] * (words + 1)
    assert text["pooled_prompt_embeds"].shape == (32,)


@torch.no_grad()
def test_filling_a_text_up_changes_nothing(case: Case) -> None:
    """Also against the stock pipeline's own, which fills up with what the encoder makes of it."""
    transformer = case.stock().transformer
    noisy = torch.randn(2, 16, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    levels = torch.tensor([0.4, 0.7])
    short, empty = case.encoded("a star"), case.encoded("")
    embeds, pooled, mask = case.text.encode_prompt(["a star", ""], max_sequence_length=64)
    filled = {
        "prompt_embeds": embeds,
        "pooled_prompt_embeds": pooled,
        "prompt_attention_mask": mask,
    }
    found = case.family.predict(transformer, noisy, levels, batch_of(short, empty), 3.0)
    expected = case.family.predict(transformer, noisy, levels, filled, 3.0)
    assert torch.allclose(found, expected, atol=1e-5)
    other = case.family.predict(transformer, noisy, levels, batch_of(empty, empty), 3.0)
    assert not torch.allclose(found[0], other[0], atol=1e-3), "the text matters"


@torch.no_grad()
def test_guidance_is_an_input(case: Case) -> None:
    transformer, text = case.stock().transformer, batch_of(case.encoded(PROMPT))
    noisy = torch.randn(1, 16, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    weak, strong = (
        case.family.predict(transformer, noisy, torch.tensor([0.5]), text, scale)
        for scale in (1.0, 6.0)
    )
    assert not torch.allclose(weak, strong, atol=1e-4)
