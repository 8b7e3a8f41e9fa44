"""Lumina-Image 2.0: what its text is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from jobs.errors import UserError
from tests.support.engine.families import PROMPT, Case, batch_of, quiet

if TYPE_CHECKING:
    from pathlib import Path

BATCHES = [(PROMPT,), ("a star", "a star"), (PROMPT, "a star")]


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


def load(case: Case) -> Any:
    with quiet():
        return case.family.transformer_class().from_pretrained(
            case.paths.model, subfolder="transformer"
        )


def draw(case: Case, prompts: tuple[str, ...]) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Noisy latents, levels, and collated prompts."""
    noisy = torch.randn(len(prompts), 16, 8, 12, generator=torch.Generator().manual_seed(0))
    return noisy, torch.linspace(0.3, 0.8, len(prompts)), batch_of(*map(case.encoded, prompts))


@pytest.mark.parametrize("prompts", BATCHES)
def test_a_forward_and_its_gradients_are_those_of_diffusers(
    case: Case, prompts: tuple[str, ...]
) -> None:
    """Which counts tokens on the device, and masks texts where nothing is padded."""
    noisy, level, texts = draw(case, prompts)
    found = []
    for arranged in (texts, case.family.arrange(texts)):
        model = load(case).train()
        if arranged is texts:
            velocity = -model(
                hidden_states=noisy,
                timestep=1 - level,
                encoder_hidden_states=texts["prompt_embeds"],
                encoder_attention_mask=texts["prompt_attention_mask"],
                return_dict=False,
            )[0]
        else:
            velocity = case.family.predict(model, noisy, level, arranged, 1.0)
        velocity.square().mean().backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found.append(gradients | {"": velocity.detach()})
    wanted, got = found
    assert wanted.keys() == got.keys()
    for name, tensor in wanted.items():
        limit = 1e-6 * max(1.0, float(tensor.abs().max()))
        assert torch.allclose(got[name], tensor, rtol=1e-5, atol=limit), name


@pytest.mark.parametrize("prompts", BATCHES)
def test_a_forward_reads_nothing_from_the_device(case: Case, prompts: tuple[str, ...]) -> None:
    """Tensors without numbers go through it; through diffusers' own they do not (0.42)."""
    noisy, level, texts = draw(case, prompts)
    model = load(case).to("meta")
    noisy, level = noisy.to("meta"), level.to("meta")
    arranged = {n: text.to("meta") for n, text in case.family.arrange(texts).items()}
    assert case.family.predict(model, noisy, level, arranged, 1.0).shape == noisy.shape
    assert {table.device.type for table in model.rope_embedder.freqs_cis} == {"meta"}, "once"
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        model(
            noisy,
            level,
            texts["prompt_embeds"].to("meta"),
            texts["prompt_attention_mask"].to("meta"),
        )
