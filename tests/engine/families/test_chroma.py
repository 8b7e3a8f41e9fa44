"""What is particular to Chroma: the mask of its padding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from engine.model.activation_checkpointing import checkpoint_activations
from engine.model.adapters import add_lora
from tests.support.engine.families import PROMPT, Case, batch_of, quiet

if TYPE_CHECKING:
    from collections.abc import Mapping


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("chroma", tmp_path_factory.getbasetemp().parent / "families")


def test_padding_is_masked_but_for_its_first_token(case: Case) -> None:
    text = case.encoded(PROMPT)
    tokens = len(case.text.tokenizer(PROMPT).input_ids)
    mask = text["prompt_attention_mask"].bool()
    assert len(mask) == len(text["prompt_embeds"]) == 64
    assert mask[: tokens + 1].all()
    assert not mask[tokens + 1 :].any()


def gradients(
    case: Case, condition: Mapping[str, torch.Tensor], policy: str | None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The prediction and the gradients of a LoRA, with gradient checkpointing or without."""
    with quiet():
        model = case.family.transformer_class().from_pretrained(
            case.paths.model, subfolder="transformer"
        )
    spec = case.spec(lora_rank=4)
    if policy is not None:
        spec = case.spec(
            lora_rank=4, gradient_checkpointing=True, gradient_checkpointing_policy=policy
        )
        checkpoint_activations(model, spec)
    model.requires_grad_(False)
    add_lora(model, spec, case.family.LORA_TARGETS)
    trained = [p for p in model.parameters() if p.requires_grad]
    drawn = torch.Generator().manual_seed(1)
    for parameter in trained:
        torch.nn.init.normal_(parameter, std=0.1, generator=drawn)
    noisy = torch.randn(2, 16, 8, 8, generator=torch.Generator().manual_seed(2))
    levels = torch.tensor([0.3, 0.8])
    prediction = case.family.predict(model.train(), noisy, levels, dict(condition), 1.0)
    prediction.square().mean().backward()
    return prediction.detach(), [p.grad for p in trained if p.grad is not None]


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_gradient_checkpointing_keeps_the_mask(case: Case, policy: str) -> None:
    """Diffusers (0.42) leaves it out there, in single-stream blocks."""
    condition = batch_of(case.encoded("a star"), case.encoded(PROMPT))
    plain, expected = gradients(case, condition, None)
    # Attention without the mask would be quite another.
    seen = {name: torch.ones_like(t) if "mask" in name else t for name, t in condition.items()}
    assert not torch.allclose(gradients(case, seen, None)[0], plain, atol=1e-4)

    prediction, found = gradients(case, condition, policy)
    assert torch.allclose(prediction, plain, atol=1e-6)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-7)
