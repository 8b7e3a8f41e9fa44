"""What is particular to Chroma: the mask of its padding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from diffusers import attention_backend
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers import transformer_flux
from diffusers.models.transformers.transformer_flux import FluxAttention

from engine.model.activation_checkpointing import checkpoint_activations
from engine.model.adapters.lora import add_lora
from tests.support.engine.families import PROMPT, Case, batch_of, quiet

if TYPE_CHECKING:
    from collections.abc import Mapping


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("chroma", tmp_path_factory.getbasetemp().parent / "families")


def test_padding_is_masked_but_for_its_first_token(case: Case) -> None:
    text = case.encoded(PROMPT)
    tokens = len(case.text.tokenizer(PROMPT).input_ids)
    mask = text["prompt_attention_mask"]
    assert mask.dtype is torch.bool, "numbers would be added to attention's scores"
    assert len(mask) == len(text["prompt_embeds"]) == 64
    assert mask[: tokens + 1].all()
    assert not mask[tokens + 1 :].any()


@torch.no_grad()
def test_masked_padding_changes_nothing_and_is_left_out(case: Case) -> None:
    batch = batch_of(case.encoded(PROMPT), case.encoded("a star"))
    mask = batch["prompt_attention_mask"]
    other = batch | {"prompt_embeds": torch.where(mask[..., None], batch["prompt_embeds"], 9.0)}
    model = case.stock().transformer
    seen = []
    for module in model.modules():
        if isinstance(module, FluxAttention):
            module.register_forward_pre_hook(
                lambda module, args, names: seen.append(names["attention_mask"]), with_kwargs=True
            )
    noisy = torch.randn(2, 16, 8, 8, generator=torch.Generator().manual_seed(2))
    conditions = (batch, other, case.family.arrange(other))
    plain, *found = (
        case.family.predict(model, noisy, torch.tensor([0.3, 0.8]), condition, 1.0)
        for condition in conditions
    )
    for prediction in found:
        assert torch.allclose(prediction, plain, rtol=1e-4, atol=1e-5)
    assert {mask.dtype for mask in seen} == {torch.bool}
    assert seen[-1].shape[-1] < seen[0].shape[-1], "nobody sees the end of the texts"
    assert case.family.arrange(batch_of(case.encoded(PROMPT))).keys() == {"prompt_embeds"}


@pytest.mark.parametrize("kernel", [None, "_native_math"])
def test_no_token_is_left_without_anything_to_attend_to(case: Case, kernel: str | None) -> None:
    """Some kernels have NaN for that. The kernel that was chosen stays."""
    model = case.stock().transformer
    if kernel:
        with attention_backend(kernel):
            model.set_attention_backend(kernel)
    masks = []

    def spied(*words: object, **names: Any) -> torch.Tensor:
        masks.append((names["attn_mask"], names["backend"] and names["backend"].value))
        return dispatch_attention_fn(*words, **names)

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer_flux, "dispatch_attention_fn", spied)
        case.family.predict(
            model,
            torch.zeros(2, 16, 8, 8),
            torch.tensor([0.3, 0.8]),
            batch_of(case.encoded(PROMPT), case.encoded("a star")),
            1.0,
        )
    assert masks
    for mask, backend in masks:
        assert mask.any(dim=-1).all()
        assert backend == kernel


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


@pytest.mark.parametrize("masked", [False, True])
def test_guidance_is_embedded_where_it_is_needed(case: Case, masked: bool) -> None:
    """Diffusers (0.42) embeds it on the host, and waits until that is copied."""
    with quiet():
        model = case.family.transformer_class().from_pretrained(
            case.paths.model, subfolder="transformer"
        )
    model.to("meta")
    made: list[str] = []
    module = model.time_text_embed.guidance_proj
    module.register_forward_hook(lambda *given: made.append(given[2].device.type))
    prompts = (PROMPT, "a star") if masked else (PROMPT,)
    condition = case.family.arrange(batch_of(*map(case.encoded, prompts)))
    condition = {name: text.to("meta") for name, text in condition.items()}
    assert len(condition) == 1 + masked
    noisy = torch.empty(len(prompts), 16, 8, 8, device="meta")
    level = torch.empty(len(prompts), device="meta")
    case.family.predict(model, noisy, level, condition, 1.0)
    assert made == ["meta"]
    model.time_text_embed(level)
    assert made == ["meta", "cpu"], "once it is made there, `_guided_on_device` can go"
