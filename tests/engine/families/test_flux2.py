"""What is particular to FLUX.2: three kinds of guidance, batch norm, its own shift, Mistral."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

from engine import families
from jobs.spec.families import get_family
from jobs.spec.job_spec import JobSpec
from jobs.spec.keys.prompts import requests_of
from jobs.spec.rules.validation_conflicts import validation_warnings
from tests.support.engine.families import NEGATIVE, PROMPT, Case, quiet

if TYPE_CHECKING:
    from jobs.spec.keys.prompts import SampleRequest


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    root = tmp_path_factory.getbasetemp().parent / "families"
    names = {"dev": "flux2", "base": "flux2:klein-base-4b", "distilled": "flux2:klein-4b"}
    return {kind: Case(name, root) for kind, name in names.items()}


def spec_of(flavour: str | None, **prompt: Any) -> JobSpec:
    return JobSpec(
        model_family="flux2", model_flavour=flavour, validation_prompts=[{"prompt": "a"} | prompt]
    )


def test_flavours_differ_in_their_guidance() -> None:
    family = get_family("flux2")
    kinds = {name: family.guidance_of(name) for name in family.flavours}
    assert kinds == {
        "dev": "embedded",
        "klein-base-4b": "classifier_free",
        "klein-base-9b": "classifier_free",
        "klein-4b": "none",
        "klein-9b": "none",
    }
    assert family.guidance_of(None) == "embedded"


@pytest.mark.parametrize(
    ("flavour", "prompt", "guided", "warning"),
    [
        ("dev", {}, False, ""),
        ("dev", {"negative_prompt": "b", "true_cfg_scale": 4}, False, "have no effect with this"),
        ("klein-base-4b", {}, True, ""),
        ("klein-base-4b", {"negative_prompt": "b"}, True, ""),
        ("klein-base-4b", {"guidance": 1}, False, ""),
        ("klein-base-4b", {"guidance": 1, "negative_prompt": "b"}, False, "guidance above 1"),
        ("klein-4b", {}, False, ""),
        ("klein-4b", {"guidance": 4}, False, "validation_guidance: no effect"),
        ("klein-4b", {"negative_prompt": "b"}, False, "have no effect with this"),
    ],
)
def test_what_a_negative_prompt_does(
    flavour: str, prompt: dict[str, Any], guided: bool, warning: str
) -> None:
    spec = spec_of(flavour, **prompt)
    (request,) = requests_of(spec)
    assert request.guided is guided
    found = validation_warnings(spec)
    assert warning in found[0] if warning else not found


@torch.no_grad()
def test_latents_are_normed_as_the_pipeline_norms_pictures(toys: dict[str, Case]) -> None:
    case = toys["base"]
    pipeline = case.stock()
    pixels = torch.rand(1, 3, 64, 96, generator=torch.Generator().manual_seed(0)) * 2 - 1
    expected = pipeline._encode_vae_image(pixels, None)
    found = case.family.encode_pictures(pipeline.vae, pixels)
    assert found.shape == (1, 128, 4, 6)
    assert torch.allclose(found, expected, atol=1e-6)


def test_the_shift_is_that_of_the_pipelines_sigmas(toys: dict[str, Case]) -> None:
    case = toys["base"]
    scheduler = case.stock().scheduler
    steps, height, width = 50, 48, 64
    before = np.linspace(1.0, 1 / steps, steps)
    mu = compute_empirical_mu(height * width, steps)
    scheduler.set_timesteps(sigmas=before, mu=mu)
    shift = case.family.sampler_shift_of(height, width)
    after = shift * before / (1 + (shift - 1) * before)
    assert np.allclose(after, scheduler.sigmas[:-1].numpy(), atol=1e-6)
    assert shift != pytest.approx(
        super(type(case.family), case.family).sampler_shift_of(height, width)
    )


def sampled(case: Case, family: families.Family, request: SampleRequest, negative: bool) -> int:
    """Sample as the engine does, without text encoders; the forwards that a step made."""
    text = case.encoded(NEGATIVE) if negative else None
    with quiet():
        transformer = family.transformer_class().from_pretrained(
            case.paths.model, subfolder=family.component
        )
        vae = family.load_vae(case.paths.model, torch.float32)
        pipeline = family.sampling_pipeline(case.paths.model, transformer, vae)
        pipeline.set_progress_bar_config(disable=True)
        made: list[int] = []
        transformer.register_forward_hook(lambda *_: made.append(1))
        with torch.no_grad():
            pipeline(
                **family.sample_arguments(request, case.encoded(PROMPT), text),
                width=request.width,
                height=request.height,
                num_inference_steps=request.steps,
                output_type="latent",
            )
    assert len(made) == request.steps * family.forwards_per_step(request)
    return len(made) // request.steps


@pytest.mark.parametrize(
    ("kind", "said", "forwards"),
    [
        ("base", None, 1),  # no negative prompt was encoded, and no encoder is there any more
        ("base", "dev", 1),
        ("base", "klein-4b", 1),
        ("distilled", "klein-base-4b", 1),
        ("dev", "klein-base-9b", 1),
        ("base", "klein-base-9b", 2),
    ],
)
def test_a_model_is_sampled_as_what_it_is_whatever_the_job_says(
    kind: str, said: str | None, forwards: int, toys: dict[str, Case]
) -> None:
    case = toys[kind]
    (request,) = requests_of(
        JobSpec(
            model_family="flux2",
            model_flavour=said,
            validation_prompts=[{"prompt": PROMPT, "resolution": 64, "steps": 2, "guidance": 4}],
        )
    )
    family = families.load("flux2", said, case.paths.model)
    assert sampled(case, family, request, request.guided) == forwards


def test_an_encoder_that_is_there_already_is_taken(toys: dict[str, Case]) -> None:
    case = toys["dev"]
    encoder = case.text.text_encoder
    with quiet():
        pipeline = case.family.load_text_pipeline(
            case.paths.model, torch.float32, text_encoder=encoder
        )
    assert pipeline.text_encoder is encoder


def test_the_tokenizer_alone_makes_the_template_of_the_processor(toys: dict[str, Case]) -> None:
    """A system message, and a start that the chat template writes: none is added to it."""
    tokenizer = toys["dev"].text.tokenizer
    talk = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
    made = tokenizer.apply_chat_template([talk], tokenize=True, return_dict=True)
    words = tokenizer.convert_ids_to_tokens(made["input_ids"][0])
    assert words[:2] == ["<s>", "[INST]"]
    assert words.count("<s>") == 1
