"""What is particular to Ideogram 4: a second transformer that guides, and layers of text in a call.

Its predictions, losses and noise levels were compared with musubi-tuner's model and sampler
(`ideogram4_model.py`, `timesteps.py`) on the same tensors: equal to 1e-5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from diffusers import Ideogram4Pipeline

from engine import families
from engine.toy.components.weights import one_thread
from jobs.imports.imported import import_kohya
from jobs.spec.job_spec import JobSpec
from jobs.spec.rules.validation_conflicts import validation_warnings
from tests.support.engine.exports import export_alone, recipe_of, trained_model
from tests.support.engine.families import PROMPT, Case, quiet, toys_root

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("ideogram4", toys_root(tmp_path_factory))


def stock(root: Path) -> Any:
    with quiet():
        pipeline = Ideogram4Pipeline.from_pretrained(root)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_diffusers_own_pipeline_makes_of_an_export_what_ours_makes(
    kind: str, case: Case, tmp_path: Path
) -> None:
    """Of a text, which it pads to a length of its own and masks; here it has none."""
    spec = case.spec(model_type=kind, lora_rank=2)
    recipe, model = recipe_of(spec, case.paths.model), trained_model(spec, case.paths.model)
    made = export_alone(model, recipe, tmp_path / "export")
    theirs = stock(made.path if kind == "full" else case.paths.model)
    if kind == "lora":
        theirs.load_lora_weights(made.path, weight_name="pytorch_lora_weights.safetensors")
    request = case.request(resolution="96x64", guidance=3.0, seed=3)
    expected = case.run(theirs, request)
    ours = case.family.sampling_pipeline(
        case.paths.model,
        theirs.transformer,
        theirs.vae,
        unconditional_transformer=theirs.unconditional_transformer,
    )
    ours.set_progress_bar_config(disable=True)
    image = ours(
        **case.family.sample_arguments(request, case.encoded(PROMPT), None),
        width=96,
        height=64,
        num_inference_steps=request.steps,
        generator=torch.Generator("cpu").manual_seed(3),
    )[0][0]
    assert np.abs(np.asarray(expected[0], int) - np.asarray(image, int)).max() <= 1


@pytest.mark.slow
@torch.no_grad()
def test_a_text_is_the_pipelines_without_padding(case: Case) -> None:
    """Though the encoder is called as a whole, which is what gathers shards of it."""
    stock_encode = Ideogram4Pipeline.encode_prompt
    for prompt in (PROMPT, ""):
        expected = stock_encode(case.text, prompt, 0, 0, 64, torch.device("cpu"))[0][0]
        found = case.encoded(prompt)["prompt_embeds"]
        assert torch.allclose(found, expected[-len(found) :], atol=1e-5)
        assert not expected[: -len(found)].any()


@pytest.mark.slow
def test_diffusers_masks_samples_without_padding_still(case: Case) -> None:
    """Once it does not, `_called` has less to do (docs/upstream.md)."""
    pipeline, masks = stock(case.paths.model), []
    pipeline.unconditional_transformer.layers[0].register_forward_pre_hook(
        lambda _, inputs: masks.append(inputs[1])
    )
    case.run(pipeline, case.request(), output_type="latent")
    assert len(masks) == 2
    assert all(mask.all() for mask in masks)


@pytest.mark.slow
def test_a_long_prompt_is_cut_and_keeps_the_end_of_its_template(case: Case) -> None:
    found = _encoded_ids(case, " ".join([PROMPT] * 20))
    ends = case.text.tokenizer("<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    assert 60 < len(found) <= 64
    assert found[-len(ends) :] == ends


def _encoded_ids(case: Case, prompt: str) -> list[int]:
    """Return the tokens that the encoder gets of a prompt."""
    seen: list[torch.Tensor] = []
    hook = case.text.text_encoder.register_forward_pre_hook(
        lambda _, __, names: seen.append(names["input_ids"]), with_kwargs=True
    )
    with torch.no_grad():
        case.family.encode(case.text, prompt, 64)
    hook.remove()
    return seen[0][0].tolist()


@pytest.mark.parametrize(("side", "shift"), [(32, 1.0), (64, 2.0), (128, 4.0)])
def test_noise_grows_with_the_side_of_an_image(side: int, shift: float) -> None:
    """At 512, 1024 and 2048 pixels; the logit's deviation is 1.5, as in diffusers' script."""
    assert families.load("ideogram4").shift_of(side, side) == pytest.approx(shift)


def test_musubi_tuner_draws_as_here() -> None:
    command = "ideogram4_train_network.py --dit a --network_module networks.lora_ideogram4"
    spec = import_kohya(command.split()).spec
    assert (spec.timestep_sampling, spec.logit_std, spec.flow_shift) == ("shift", 1.5, None)


def test_a_negative_prompt_is_told_of() -> None:
    """The transformer that guides sees no text."""
    entry = {"prompt": PROMPT, "negative_prompt": "a star"}
    spec = JobSpec(model_family="ideogram4", validation_prompts=[entry])
    assert "no effect with Ideogram 4" in validation_warnings(spec)[0]
    without = JobSpec(model_family="ideogram4", validation_prompts=[PROMPT])
    assert not any("no effect" in text for text in validation_warnings(without))
