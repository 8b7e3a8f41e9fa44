"""What is particular to Qwen-Image: texts of any length, and guidance by another name."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from engine.families import qwen_image
from engine.families.shared.collate import collate
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
        self.count += func is torch.as_tensor and "device" in (kwargs or {})
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("bent", "moved"), [(True, 0), (False, 1)])
def test_a_forward_with_masked_texts_moves_no_number_to_the_device(
    case: Case, monkeypatch: pytest.MonkeyPatch, bent: bool, moved: int
) -> None:
    """Without `filled_numbers` diffusers does; once it does not, that function can go."""
    text = collate([case.encoded(PROMPT)], multiple=32)
    transformer = case.stock().transformer
    noisy = torch.randn(
        1, transformer.config.in_channels // 4, 8, 8, generator=torch.Generator().manual_seed(0)
    )
    arguments = (transformer, noisy, torch.tensor([0.5]), text, 1.0)
    with torch.no_grad():
        expected = case.family.predict(*arguments)
        if not bent:
            monkeypatch.setattr(qwen_image, "filled_numbers", nullcontext)
        with Moved() as seen:
            assert torch.equal(case.family.predict(*arguments), expected)
    assert seen.count == moved
    assert not transformer.pos_embed._forward_pre_hooks


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
