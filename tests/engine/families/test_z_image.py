"""What is particular to Z-Image: its scale of guidance, and texts in lists."""

from __future__ import annotations

import pytest
import torch

from jobs.spec.job_spec import JobSpec
from jobs.spec.keys.prompts import requests_of
from jobs.spec.rules.validation_conflicts import validation_warnings
from tests.support.engine.families import NEGATIVE, PROMPT, Case, batch_of


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("z_image", tmp_path_factory.getbasetemp().parent / "families")


@pytest.mark.parametrize(("guidance", "guided"), [(0.0, False), (0.5, True), (1.0, True)])
def test_any_guidance_above_zero_guides(guidance: float, guided: bool, case: Case) -> None:
    """As in its pipeline, which adds so much of the difference to the prediction."""
    request = case.request(guidance=guidance)
    assert request.guided is guided
    assert request.negative_prompt == ("" if guided else None)
    pipeline = case.stock()
    pipeline._guidance_scale = guidance
    assert pipeline.do_classifier_free_guidance is guided


def test_a_negative_prompt_without_guidance_is_told_of() -> None:
    spec = JobSpec(
        model_family="z_image",
        model_flavour="turbo",
        validation_prompts=[{"prompt": PROMPT, "negative_prompt": NEGATIVE}],
    )
    (request,) = requests_of(spec)
    assert (request.guidance, request.steps, request.guided) == (0.0, 9, False)
    assert "without a guidance above 0" in validation_warnings(spec)[0]


def test_what_a_batch_is_filled_up_with_is_not_sampled(case: Case) -> None:
    short, long = case.encoded("a star"), case.encoded(PROMPT)
    filled = {name: tensor[0] for name, tensor in batch_of(short, long).items()}
    assert len(filled["prompt_embeds"]) > len(short["prompt_embeds"])
    (text,) = case.family.sample_arguments(case.request(), filled, None)["prompt_embeds"]
    assert torch.equal(text, short["prompt_embeds"])
