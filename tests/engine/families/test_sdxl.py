"""What is particular to SDXL: zeros without a negative prompt, sizes as inputs, v-prediction."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from diffusers import DDPMScheduler, EulerDiscreteScheduler

from engine import families
from engine.data.encode.tensor_cache import TensorCache
from engine.data.encode.texts import NO_TEXT, TextKeys
from engine.data.index.data_index import Sample
from engine.data.index.views import View, shown
from engine.diffusion.objective import build_objective
from engine.diffusion.random_numbers import keyed_generator
from engine.toy.components.weights import one_thread
from tests.support.engine.families import PROMPT, Case, batch_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("sdxl", tmp_path_factory.getbasetemp().parent / "families")


def test_only_a_negative_prompt_that_is_empty_is_zeros(case: Case) -> None:
    assert case.family.NEGATIVES_APART
    for tensor in case.encoded("", negative=True).values():
        assert not tensor.any()
    for words, negative in (("", False), ("blurry", True), (PROMPT, False)):
        assert all(t.any() for t in case.encoded(words, negative=negative).values()), words


def test_a_model_may_ask_for_an_empty_text_in_their_place(case: Case) -> None:
    case.text.register_to_config(force_zeros_for_empty_prompt=False)
    try:
        empty = case.encoded("", negative=True)
    finally:
        case.text.register_to_config(force_zeros_for_empty_prompt=True)
    assert all(torch.equal(t, case.encoded("")[name]) for name, t in empty.items())


def test_zeros_take_as_many_forwards_of_the_encoders_as_a_text(case: Case) -> None:
    """Where they are sharded, ranks that encode other texts would wait for them."""
    made: list[str] = []
    encoders = {n: m for n, m in case.text.components.items() if isinstance(m, torch.nn.Module)}
    hooks = [
        model.register_forward_hook(lambda *_, name=name: made.append(name))
        for name, model in encoders.items()
    ]
    case.encoded(PROMPT)
    with_text = sorted(made)
    made.clear()
    case.encoded("", negative=True)
    for hook in hooks:
        hook.remove()
    assert sorted(made) == with_text == ["text_encoder", "text_encoder_2"]


@torch.no_grad()
def test_without_a_negative_prompt_samples_are_those_of_the_stock_pipeline(case: Case) -> None:
    request = case.request(guidance=5.0)
    assert request.guided
    pipeline = case.stock()
    size: dict[str, Any] = {
        "height": 64,
        "width": 96,
        "num_inference_steps": 2,
        "output_type": "latent",
    }
    expected = pipeline(
        PROMPT, guidance_scale=5.0, generator=torch.Generator().manual_seed(1), **size
    ).images
    arguments = case.family.sample_arguments(
        request, case.encoded(PROMPT), case.encoded("", negative=True)
    )
    found = pipeline(**arguments, generator=torch.Generator().manual_seed(1), **size).images
    assert torch.allclose(found, expected, atol=1e-5)


@torch.no_grad()
def test_the_size_of_a_picture_matters(case: Case) -> None:
    unet = case.stock().unet
    seen = []
    hook = unet.register_forward_pre_hook(
        lambda _, __, kwargs: seen.append(kwargs["added_cond_kwargs"]["time_ids"]), with_kwargs=True
    )
    condition = {n: torch.stack([t, t]) for n, t in case.encoded(PROMPT).items()}
    case.family.predict(unet, torch.randn(2, 4, 8, 12), torch.tensor([5, 9]), condition, 1.0)
    hook.remove()
    assert seen[0].tolist() == [[64, 96, 0, 0, 64, 96]] * 2


@torch.no_grad()
def test_a_v_prediction_model_is_trained_on_v(case: Case, tmp_path: Path) -> None:
    """Also one whose schedule ends without any signal, as such models have it."""
    root = tmp_path / "model"
    shutil.copytree(case.paths.model / "scheduler", root / "scheduler")
    file = root / "scheduler" / "scheduler_config.json"
    changes = {
        "prediction_type": "v_prediction",
        "rescale_betas_zero_snr": True,
        "timestep_spacing": "trailing",
    }
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    latents = torch.randn(2, 4, 8, 8, generator=keyed_generator(1))
    objective = build_objective(case.spec(), case.family, root)
    drawn = objective.draw(latents, [keyed_generator(2), keyed_generator(3)])
    problem = objective.add_noise(latents, drawn)
    alphas = EulerDiscreteScheduler.from_pretrained(root, subfolder="scheduler").alphas_cumprod
    schedule = DDPMScheduler.from_pretrained(root, subfolder="scheduler")
    assert torch.allclose(schedule.alphas_cumprod[:-1], alphas[:-1])
    signal = alphas[problem.level].sqrt().view(-1, 1, 1, 1)
    noise = (problem.noisy - signal * latents) / (1 - signal**2).sqrt()
    assert torch.allclose(
        problem.target, signal * noise - (1 - signal**2).sqrt() * latents, atol=1e-4
    )


def test_models_that_zero_empty_prompts_and_others_share_no_cached_texts(
    case: Case, tmp_path: Path
) -> None:
    cache = TensorCache(tmp_path, "text")
    index = case.paths.model / "model_index.json"
    written = index.read_text()
    keys = []
    for zeroed in (True, False):
        content = json.loads(written) | {"force_zeros_for_empty_prompt": zeroed}
        index.write_text(json.dumps(content))
        family = families.load("sdxl", "base-1.0", case.paths.model)
        keys.append(TextKeys(case.spec(), family, cache, case.paths.model)(NO_TEXT))
    index.write_text(written)
    assert keys[0] != keys[1]


def test_it_is_told_each_pictures_size_and_where_it_was_cut(case: Case) -> None:
    """As diffusers' script tells it; and as its pipeline does for whole pictures of the size."""
    sample = Sample("a", "a", 0, (), 300, 150, "x", (64, 64))
    views = [View((64, 64)), View((64, 64), centre=0.0, flip=True), View((64, 64), centre=1.0)]
    pictures = [shown(sample, view) for view in views]
    told = case.family.sizes(case.spec(), pictures)["time_ids"]
    # Scaled to 128x64: 64 pixels are beyond the sides, and none above.
    assert told.tolist() == [
        [150, 300, 0, 32, 64, 64],
        [150, 300, 0, 64, 64, 64],
        [150, 300, 0, 64, 64, 64],
    ]
    assert case.family.sizes(case.spec(size_conditioning="target"), pictures) == {}

    unet = case.stock().unet
    text = batch_of(case.encoded(PROMPT))
    noisy = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    whole = shown(Sample("b", "b", 0, (), 64, 64, "y", (64, 64)), View((64, 64)))
    with torch.no_grad():
        plain, same, cut = (
            case.family.predict(unet, noisy, torch.tensor([500]), text | sizes, 1.0)
            for sizes in (
                {},
                case.family.sizes(case.spec(), [whole]),
                case.family.sizes(case.spec(), pictures[:1]),
            )
        )
    assert torch.allclose(same, plain, atol=1e-6)
    assert not torch.allclose(cut, plain, atol=1e-4)
