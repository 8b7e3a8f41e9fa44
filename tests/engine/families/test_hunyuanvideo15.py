"""HunyuanVideo 1.5: its template, two texts with a mask each, its guider, and its forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from diffusers import HunyuanVideo15Pipeline

from engine.families.hunyuanvideo15 import _cut
from engine.families.shared.collate import collate
from engine.toy.components.weights import one_thread
from jobs.spec.values.quoted_text import quoted_tokens
from tests.support.engine.families import NEGATIVE, PROMPT, Case, batch_of, toys_root

if TYPE_CHECKING:
    from collections.abc import Iterator

SIGN = 'a red sign with "OPEN" and “late” on it'


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("hunyuanvideo15", toys_root(tmp_path_factory))


@pytest.mark.parametrize(("prompt", "words"), [(PROMPT, 7), ("a star", 2), ("", 1)])
def test_a_text_is_as_long_as_its_prompt(case: Case, prompt: str, words: int) -> None:
    """Without template and filling; behind it, an answer begins: five tokens."""
    text = case.encoded(prompt)
    assert text["prompt_embeds"].shape == (words + 5, 64)
    assert text["prompt_embeds_mask"].tolist() == [True] * (words + 5)
    assert text["prompt_embeds_2"].shape == (1, 32)
    assert text["prompt_embeds_mask_2"].tolist() == [False], "nothing in quotes"


def test_byt5_encodes_what_is_in_quotes(case: Case) -> None:
    text = case.encoded(SIGN)
    glyphs = 'Text "OPEN". Text "late". '
    assert text["prompt_embeds_2"].shape == (len(glyphs) + 1, 32), "bytes, and an end"
    assert text["prompt_embeds_mask_2"].all()
    assert len(text["prompt_embeds_2"]) == quoted_tokens(SIGN), "as `estimate` counts it"


def test_a_text_is_cut_at_its_most_tokens(case: Case) -> None:
    with torch.no_grad():
        text = case.family.encode(case.text, PROMPT, 4)
        whole = case.family.encode(case.text, PROMPT, 64)
    assert text["prompt_embeds"].shape == (4, 64)
    assert torch.allclose(text["prompt_embeds"], whole["prompt_embeds"][:4], atol=1e-5)


def test_each_text_of_a_batch_is_padded_to_its_own_longest(case: Case) -> None:
    batch = batch_of(case.encoded(SIGN), case.encoded(PROMPT))
    assert batch["prompt_embeds"].shape[:2] == batch["prompt_embeds_mask"].shape
    assert batch["prompt_embeds_2"].shape[:2] == batch["prompt_embeds_mask_2"].shape == (2, 27)
    assert batch["prompt_embeds_mask_2"].sum(1).tolist() == [27, 0]


def test_texts_of_equal_lengths_are_told_apart() -> None:
    """By the number at the end of their names."""
    equal = {
        "prompt_embeds": torch.ones(3, 2),
        "prompt_embeds_mask": torch.ones(3),
        "prompt_embeds_2": torch.ones(3, 1),
        "prompt_embeds_mask_2": torch.ones(3),
    }
    longer = equal | {"prompt_embeds": torch.ones(5, 2), "prompt_embeds_mask": torch.ones(5)}
    batch = collate([equal, longer])
    assert batch["prompt_embeds"].shape == (2, 5, 2)
    assert batch["prompt_embeds_mask"].sum(1).tolist() == [3, 5]
    assert batch["prompt_embeds_2"].shape == (2, 3, 1)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_samples_are_those_of_the_pipeline_with_its_guider_set(case: Case, guidance: float) -> None:
    """The stock class, with texts for both encoders and the scale where it has it."""
    request = case.request(
        prompt=SIGN, negative_prompt=NEGATIVE, num_frames=5, seed=2, guidance=guidance
    )
    assert request.guided is (guidance > 1)
    parts: dict[str, Any] = case.stock().components
    stock = HunyuanVideo15Pipeline(**parts)
    stock.set_progress_bar_config(disable=True)
    stock.guider.guidance_scale = guidance
    size = {"width": 64, "height": 64, "num_inference_steps": 2, "output_type": "latent"}
    expected = stock(
        SIGN,
        NEGATIVE,
        num_frames=5,
        generator=torch.Generator().manual_seed(2),
        **size,
    )[0]
    parts = case.stock().components
    bare = case.family.sampling_pipeline(case.paths.model, parts["transformer"], parts["vae"])
    bare.set_progress_bar_config(disable=True)
    negative = case.encoded(NEGATIVE) if request.guided else None
    found = bare(
        **case.family.sample_arguments(request, case.encoded(SIGN), negative),
        generator=torch.Generator().manual_seed(2),
        **size,
    )[0]
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_forward_is_that_of_diffusers_with_both_texts(case: Case) -> None:
    """Which sorts tokens by their masks, and has masked ones of an image besides."""
    transformer = case.stock().transformer
    noisy = torch.randn(2, 16, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    levels = torch.tensor([0.4, 0.7])
    texts = batch_of(case.encoded(SIGN), case.encoded("a star"))
    found = case.family.predict(transformer, noisy, levels, texts, 1.0)
    expected = transformer(
        hidden_states=torch.cat([noisy, torch.zeros(2, 17, 2, 4, 4)], dim=1),
        timestep=levels * 1000,
        encoder_hidden_states=texts["prompt_embeds"],
        encoder_attention_mask=texts["prompt_embeds_mask"],
        encoder_hidden_states_2=texts["prompt_embeds_2"],
        encoder_attention_mask_2=texts["prompt_embeds_mask_2"],
        image_embeds=torch.zeros(2, 9, 32),
        return_dict=False,
    )[0]
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
    bare = texts | {"prompt_embeds_mask_2": torch.zeros_like(texts["prompt_embeds_mask_2"])}
    other = case.family.predict(transformer, noisy, levels, bare, 1.0)
    assert not torch.allclose(found[0], other[0], atol=1e-3), "what is in quotes matters"
    assert torch.allclose(found[1], other[1], atol=1e-5)
    gone = case.family.arrange(bare)
    assert gone["prompt_embeds_2"].shape == (2, 0, 32)
    again = case.family.predict(transformer, noisy, levels, gone, 1.0)
    assert torch.allclose(other, again, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_no_mask_is_read_in_a_forward(case: Case) -> None:
    """Tensors without numbers go through it: nothing waits for a GPU to count tokens."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    transformer = case.stock().transformer
    with FakeTensorMode(allow_non_fake_inputs=True):
        found = case.family.predict(
            transformer,
            torch.empty(2, 16, 2, 4, 4),
            torch.empty(2),
            {
                "prompt_embeds": torch.empty(2, 9, 64),
                "prompt_embeds_mask": torch.empty(2, 9, dtype=torch.bool),
                "prompt_embeds_2": torch.empty(2, 5, 32),
                "prompt_embeds_mask_2": torch.empty(2, 5, dtype=torch.bool),
            },
            1.0,
        )
    assert found.shape == (2, 16, 2, 4, 4)


@torch.no_grad()
def test_the_autoencoder_takes_one_video_at_a_time(case: Case) -> None:
    """Of itself it fails with two (docs/upstream.md); as it is loaded here, it does not."""
    vae = case.family.load_vae(case.paths.model, torch.float32).eval()
    pixels = torch.randn(2, 3, 5, 32, 32, generator=torch.Generator().manual_seed(0))
    together = case.family.encode_pictures(vae, pixels)
    assert torch.allclose(together[1:], case.family.encode_pictures(vae, pixels[1:]), atol=1e-5)
    vae.disable_slicing()
    with pytest.raises(RuntimeError, match="broadcast"):
        vae.encode(pixels)


@torch.no_grad()
@pytest.mark.parametrize("embedder", ["timestep_embedder", "timestep_embedder_r"])
def test_times_are_exact_in_bf16(case: Case, embedder: str) -> None:
    """In bf16 itself 963 and 964 are one number. Step-distilled models take a second time."""
    transformer = case.stock().transformer
    config = dict(transformer.config) | {"use_meanflow": embedder.endswith("_r")}
    transformer = type(transformer).from_config(config).bfloat16()
    seen: list[torch.Tensor] = []
    hook = getattr(transformer.time_embed, embedder).register_forward_hook(
        lambda *given: seen.append(given[1][0])
    )
    texts = {
        n: t.bfloat16() if t.is_floating_point() else t
        for n, t in batch_of(case.encoded(PROMPT)).items()
    }
    for level in (0.963, 0.964):
        noisy = torch.zeros(1, 16, 1, 4, 4, dtype=torch.bfloat16)
        found = case.family.predict(transformer, noisy, torch.tensor([level]), texts, 1.0)
        assert found.dtype is torch.bfloat16
    hook.remove()
    assert seen[0].dtype is torch.bfloat16
    assert not torch.equal(*seen)


def test_a_mask_in_the_texts_precision_is_counted_exactly() -> None:
    mask = (torch.arange(512) < 301)[None].to(torch.bfloat16)
    cut = _cut("text", "mask", torch.zeros(1, 512, 4), mask)
    assert cut["text"].shape == (301, 4)
    assert cut["mask"].tolist() == [True] * 301
