"""What is particular to Qwen-Image: texts of any length, and guidance by another name."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from engine.families import qwen_image
from engine.families.shared.collate import collate
from engine.families.shared.references import REFERENCE
from jobs.spec.job_spec import JobSpec
from jobs.spec.rules.conflicts import find_conflicts
from tests.support.engine.families import NEGATIVE, PROMPT, Case, quiet


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("qwen_image", tmp_path_factory.getbasetemp().parent / "families")


def latents(case: Case, pipeline: Any, arguments: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad(), quiet():
        made: torch.Tensor = pipeline(
            **arguments,
            width=64,
            height=64,
            num_inference_steps=2,
            output_type="latent",
            generator=torch.Generator().manual_seed(0),
        )[0]
    return made


def test_texts_that_are_filled_up_make_the_same_pictures(case: Case) -> None:
    """So that ranks that share a sample's tokens can have as many each."""
    pipeline = case.stock()
    request = case.request(guidance=4.0, negative_prompt=NEGATIVE)
    texts = [case.encoded(PROMPT), case.encoded(NEGATIVE)]
    filled = [{n: t[0] for n, t in collate([text], multiple=32).items()} for text in texts]
    assert len(texts[0]["prompt_embeds"]) % 32
    assert not filled[0]["prompt_embeds_mask"].all()
    plain = latents(case, pipeline, case.family.sample_arguments(request, *texts))
    found = latents(case, pipeline, case.family.sample_arguments(request, *filled))
    assert torch.allclose(found, plain, rtol=1e-4, atol=1e-5)


class Moved(TorchFunctionMode):
    """Counts the numbers that are moved to a device."""

    count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += func in (torch.as_tensor, torch.tensor) and "device" in (kwargs or {})
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("edits", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_forward_moves_no_number_to_the_device(
    case: Case, monkeypatch: pytest.MonkeyPatch, edits: bool
) -> None:
    """Without `filled_numbers` diffusers does; once it does not, that function can go.

    Of masked texts it moves their length, and of 2511 which tokens are a conditioning image's.
    """
    text = collate([case.encoded(PROMPT)] * 2, multiple=1 if edits else 32)
    assert text["prompt_embeds_mask"].all() == edits
    if edits:
        case = Case("qwen_image:edit-2511", case.root)
        text = case.family.arrange(text)
    transformer = case.stock().transformer
    channels, generator = transformer.config.in_channels // 4, torch.Generator().manual_seed(0)
    noisy = torch.randn(2, channels, 8, 8, generator=generator)
    if edits:
        text[f"{REFERENCE}0"] = torch.randn(2, channels, 8, 4, generator=generator)
    arguments = (transformer, noisy, torch.tensor([0.5, 0.7]), text, 1.0)
    with torch.no_grad():
        with Moved() as bent:
            found = case.family.predict(*arguments)
        assert not transformer.pos_embed._forward_pre_hooks
        monkeypatch.setattr(qwen_image, "filled_numbers", nullcontext)
        with Moved() as plain:
            assert torch.equal(case.family.predict(*arguments), found)
    assert (bent.count, plain.count) == (0, 1)


@pytest.mark.parametrize("rows", [[[0, 0, 1], [0, 1, 1]], [[1, 1]], [[0]], [[0, 1, 0]], [[2, 0]]])
def test_what_is_filled_is_what_was_asked_for(rows: list[list[int]]) -> None:
    expected = torch.tensor(rows, device="cpu", dtype=torch.int)
    with qwen_image._Filled():
        found = torch.tensor(rows, device="cpu", dtype=torch.int)
    assert torch.equal(found, expected)
    assert found.dtype == expected.dtype


def test_a_long_text_is_not_cut_when_it_is_sampled(case: Case) -> None:
    """The pipeline cuts at 512 tokens, also what it is given encoded."""
    with torch.no_grad():
        text = case.family.encode(case.text, f"{PROMPT}, " * 100, 700)
    assert len(text["prompt_embeds"]) == 700
    pipeline, seen = case.stock(), []
    pipeline.transformer.register_forward_pre_hook(
        lambda _, args, named: seen.append(named["encoder_hidden_states"].shape[1]),
        with_kwargs=True,
    )
    request = case.request()
    assert not request.guided
    latents(case, pipeline, case.family.sample_arguments(request, text, None))
    assert set(seen) == {700}


def test_a_longest_text_is_kept_to(case: Case) -> None:
    with torch.no_grad():
        text = case.family.encode(case.text, PROMPT, 6)
    assert {name: len(tensor) for name, tensor in text.items()} == {
        "prompt_embeds": 6,
        "prompt_embeds_mask": 6,
    }


@pytest.mark.parametrize(("strategy", "refused"), [("allgather", True), ("alltoall", False)])
def test_flash_attention_in_a_ring_takes_no_masked_texts(strategy: str, refused: bool) -> None:
    spec = JobSpec(
        model_family="qwen_image",
        pretrained_model_name_or_path="m",
        dataset="d",
        gpus=2,
        num_processes=2,
        strategy="fsdp2",
        context_parallel_size=2,
        context_parallel_comm_strategy=strategy,
    )
    found = [c for c in find_conflicts(spec) if c.key == "context_parallel_comm_strategy"]
    assert bool(found) is refused
    if refused:
        assert "Qwen-Image masks padded captions" in found[0].message
