"""What is particular to Krea 2: text without the padding that its pipeline puts into it, and Turbo.

Its predictions and losses were compared with the authors' own model (`mmdit.py` of
krea-ai/krea-2), given padded texts and masks, on the same tensors: equal to 1e-5.
"""

from __future__ import annotations

import json
import math
import re
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from diffusers import Krea2Pipeline, Krea2Transformer2DModel

from engine import families
from engine.blocks.build import on_meta
from engine.toy.components.weights import one_thread
from jobs.imports.imported import import_file, import_kohya
from jobs.models.find_model import plain_index
from jobs.spec.job_spec import JobSpec
from jobs.spec.keys.prompts import requests_of
from tests.support.engine.exports import export_alone, recipe_of, trained_model
from tests.support.engine.families import NEGATIVE, PROMPT, Case, quiet, toys_root

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("krea2", toys_root(tmp_path_factory))


def stock(root: Path) -> Any:
    with quiet():
        pipeline = Krea2Pipeline.from_pretrained(root)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_diffusers_own_pipeline_makes_of_an_export_what_ours_makes(
    kind: str, case: Case, tmp_path: Path
) -> None:
    """Of texts, which it pads and masks; here they have their own lengths and no masks."""
    spec = case.spec(model_type=kind, lora_rank=2)
    recipe, model = recipe_of(spec, case.paths.model), trained_model(spec, case.paths.model)
    made = export_alone(model, recipe, tmp_path / "export")
    theirs = stock(made.path if kind == "full" else case.paths.model)
    if kind == "lora":
        theirs.load_lora_weights(made.path, weight_name="pytorch_lora_weights.safetensors")
    request = case.request(resolution="96x64", guidance=3.0, negative_prompt=NEGATIVE, seed=3)
    expected = case.run(theirs, request)
    texts = case.encoded(PROMPT), case.encoded(NEGATIVE, negative=True)
    assert len(texts[0]["prompt_embeds"]) != len(texts[1]["prompt_embeds"])
    ours = case.family.sampling_pipeline(case.paths.model, theirs.transformer, theirs.vae)
    ours.set_progress_bar_config(disable=True)
    arguments = case.family.sample_arguments(request, *texts)
    image = ours(
        **arguments,
        width=96,
        height=64,
        num_inference_steps=request.steps,
        generator=torch.Generator("cpu").manual_seed(3),
    )[0][0]
    assert np.abs(np.asarray(expected[0], int) - np.asarray(image, int)).max() <= 1


@pytest.mark.slow
@torch.no_grad()
def test_a_text_is_the_template_without_padding(case: Case) -> None:
    """As ai-toolkit encodes it (`text_encoder.py`); the pipeline pads before the end."""
    pipeline = case.text
    for prompt in (PROMPT, ""):
        whole = "".join(
            (pipeline.prompt_template_encode_prefix, prompt, pipeline.prompt_template_encode_suffix)
        )
        ids = pipeline.tokenizer(whole, return_tensors="pt").input_ids
        states = pipeline.text_encoder(ids, output_hidden_states=True).hidden_states
        expected = torch.stack([states[n][0] for n in pipeline.text_encoder_select_layers], dim=1)
        found = case.encoded(prompt)
        assert found["prompt_embeds_mask"].all()
        expected = expected[pipeline.prompt_template_encode_start_idx :]
        assert torch.allclose(found["prompt_embeds"], expected, atol=1e-5)


@pytest.mark.slow
def test_diffusers_wants_masks_and_one_length_still(case: Case) -> None:
    """Once it does not, `WholeTextPipeline` can go (docs/upstream.md)."""
    pipeline, long, short = stock(case.paths.model), case.encoded(PROMPT), case.encoded("a star")
    given = {"width": 64, "height": 64, "num_inference_steps": 1, "output_type": "latent"}
    given |= {"prompt_embeds": long["prompt_embeds"][None]}
    with pytest.raises(ValueError, match="prompt_embeds_mask"):
        pipeline(**given, guidance_scale=0.0)
    given |= {"prompt_embeds_mask": long["prompt_embeds_mask"][None]}
    negative = {f"negative_{name}": tensor[None] for name, tensor in short.items()}
    with pytest.raises(RuntimeError, match="size of tensor"):
        pipeline(**given, **negative, guidance_scale=1.0)


def test_turbo_is_shifted_alike_at_every_size(tmp_path: Path) -> None:
    """And Raw by its scheduler, as the authors' `timesteps` does from 256 to 1280 pixels."""
    line = {"base_shift": 0.5, "max_shift": 1.15}
    line |= {"use_dynamic_shifting": True, "base_image_seq_len": 256, "max_image_seq_len": 6400}
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler" / "scheduler_config.json").write_text(json.dumps(line))
    for flavour, expected in (("turbo", (1.15, 1.15)), ("raw", (0.5, 1.15))):
        index = {"_class_name": "Krea2Pipeline", "is_distilled": flavour == "turbo"}
        (tmp_path / "model_index.json").write_text(json.dumps(index))
        family = families.load("krea2", flavour, tmp_path)
        for side, mu in zip((32, 160), expected, strict=True):
            assert math.log(family.shift_of(side, side)) == pytest.approx(mu)
            assert math.log(family.sampler_shift_of(side, side)) == pytest.approx(mu)


def test_raw_is_guided_by_default_and_turbo_is_not() -> None:
    for flavour, steps, guided in (("raw", 52, True), ("turbo", 8, False)):
        spec = JobSpec(model_family="krea2", model_flavour=flavour, validation_prompts=[PROMPT])
        (request,) = requests_of(spec)
        assert (request.steps, request.guided) == (steps, guided)


def test_other_tools_adapt_as_many_layers_as_there(tmp_path: Path) -> None:
    """All 264 says musubi-tuner's `networks/lora_krea2.py`; here it is those of the blocks, 256.

    Diffusion-pipe's have the projections of text too (`models/krea2.py`).
    """
    command = "krea2_train_network.py --dit raw.safetensors --network_module networks.lora_krea2"
    toml = tmp_path / "config.toml"
    toml.write_text('[model]\ntype = "krea2"\n[adapter]\ntype = "lora"\nrank = 4\n')
    config = (files("jobs") / "models" / "published" / "krea--Krea-2-Raw.json").read_text()
    with on_meta():
        model = Krea2Transformer2DModel.from_config(json.loads(config))
    linear = {name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)}
    for targets, count in (
        (import_kohya(command.split()).spec.lora_target_modules, 264),
        (import_file(toml).spec.lora_target_modules, 259),
        ([families.load("krea2").LORA_TARGETS], 256),
    ):
        (pattern,) = targets
        assert len({name for name in linear if re.fullmatch(pattern, name)}) == count


def test_its_numbers_of_layers_are_no_component() -> None:
    """Its index has them in a list, as it has the library and class of each component."""
    index = {"vae": ["diffusers", "AutoencoderKLQwenImage"], "text_encoder_select_layers": [2, 5]}
    assert [n for n, entry in plain_index(index).items() if isinstance(entry, list)] == ["vae"]
