"""What is particular to Anima: blocks without a stock pipeline, no torchvision, 512 tokens of text.

Its text, predictions and losses were compared with sd-scripts' own model and adapter
(`library/anima_models.py`) on the same tensors: equal to 1e-5.
"""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from diffusers import CosmosTransformer3DModel, ModularPipeline
from diffusers.models.transformers import transformer_cosmos
from torch.nn import functional

from engine.toy.components.weights import one_thread
from jobs.errors import UserError
from jobs.models.find_model import find_index
from jobs.models.model_files import check_model
from tests.support.engine.exports import export_alone, recipe_of, trained_model
from tests.support.engine.families import NEGATIVE, PROMPT, Case, quiet, toys_root

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow  # its toy is written for all of its tests


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("anima", toys_root(tmp_path_factory))


@pytest.fixture
def _resizing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the stock transformer takes from torchvision, which may be missing here."""

    def resize(mask: torch.Tensor, size: list[int], interpolation: Any) -> torch.Tensor:
        return functional.interpolate(mask, size)

    transforms = SimpleNamespace(
        functional=SimpleNamespace(resize=resize), InterpolationMode=SimpleNamespace(NEAREST=0)
    )
    monkeypatch.setattr(transformer_cosmos, "transforms", transforms, raising=False)


def stock(root: Path) -> Any:
    """The pipeline as diffusers' documentation loads it."""
    with quiet():
        pipeline = ModularPipeline.from_pretrained(root)
        pipeline.load_components(local_files_only=True)
    return pipeline


def picture(pipeline: Any) -> Any:
    given = {"prompt": PROMPT, "negative_prompt": NEGATIVE, "num_inference_steps": 2}
    draw = torch.Generator("cpu").manual_seed(3)
    (image,) = pipeline(**given, height=64, width=96, generator=draw, output="images")
    return np.asarray(image, int)


@pytest.mark.usefixtures("_resizing")
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_diffusers_own_pipeline_makes_of_an_export_what_ours_makes(
    kind: str, case: Case, tmp_path: Path
) -> None:
    spec = case.spec(model_type=kind, lora_rank=2)
    recipe, model = recipe_of(spec, case.paths.model), trained_model(spec, case.paths.model)
    made = export_alone(model, recipe, tmp_path / "export")
    theirs = stock(made.path if kind == "full" else case.paths.model)
    assert type(theirs.transformer) is CosmosTransformer3DModel
    before = picture(theirs)
    ours = case.stock(made.path if kind == "full" else None)
    if kind == "lora":
        case.family.load_lora(ours, made.path)
        theirs.load_lora_weights(made.path, weight_name="pytorch_lora_weights.safetensors")
    request = case.request(resolution="96x64", guidance=4.0, negative_prompt=NEGATIVE, seed=3)
    image = np.asarray(case.run(ours, request)[0], int)
    assert np.abs(picture(theirs) - image).max() == 0
    assert kind == "full" or np.abs(before - image).max() > 1


@pytest.mark.usefixtures("_resizing")
@torch.no_grad()
def test_without_torchvision_the_transformer_is_the_stock_one(case: Case) -> None:
    folder = case.paths.model / "transformer"
    ours = case.family.transformer_class().from_pretrained(folder)
    theirs = CosmosTransformer3DModel.from_pretrained(folder)
    assert {n: p.shape for n, p in ours.named_parameters()} == {
        n: p.shape for n, p in theirs.named_parameters()
    }
    inputs = {
        "hidden_states": torch.randn(2, 16, 1, 8, 12),
        "timestep": torch.tensor([0.2, 0.9]),
        "encoder_hidden_states": torch.randn(2, 512, ours.config.text_embed_dim),
        "padding_mask": torch.zeros(1, 1, 64, 96),
        "return_dict": False,
    }
    assert torch.equal(ours(**inputs)[0], theirs(**inputs)[0])


@torch.no_grad()
def test_a_text_is_as_long_as_its_trainers_pad_it_and_says_the_same(case: Case) -> None:
    """sd-scripts and diffusion-pipe pad the tokens of both, and mask them (`strategy_anima.py`)."""
    pipeline = case.text
    for prompt in (PROMPT, ""):
        text = case.encoded(prompt)["prompt_embeds"]
        words, ids = (
            tokenizer(prompt, padding="max_length", max_length=64, return_tensors="pt")
            for tokenizer in (pipeline.tokenizer, pipeline.t5_tokenizer)
        )
        states = pipeline.text_encoder(**words).last_hidden_state
        padded = pipeline.text_conditioner(
            states * words.attention_mask[..., None],
            ids.input_ids,
            ids.attention_mask,
            words.attention_mask,
        )
        assert text.shape == (512, pipeline.text_conditioner.config.target_dim)
        assert torch.allclose(padded[0], text, atol=1e-5)
        assert not text[int(ids.attention_mask.sum()) :].any()
        assert text[: int(ids.attention_mask.sum())].any(), "an empty text has an end"
    with pytest.raises(UserError, match="512 tokens"):
        case.family.encode(pipeline, PROMPT, 513)


def test_training_shifts_nothing_and_samples_by_the_scheduler(case: Case) -> None:
    assert case.family.shift_of(128, 128) == 1.0
    assert case.family.sampler_shift_of(128, 128) == 3.0


def test_the_guider_is_off_where_nothing_guides(case: Case) -> None:
    """At any scale but 1 it would need a negative prompt."""
    request = case.request(guidance=0.5)
    arguments = case.family.sample_arguments(request, case.encoded(PROMPT), None)
    assert not request.guided
    assert arguments["guidance_scale"] == 1.0


def test_components_come_from_the_models_own_directory(case: Case, tmp_path: Path) -> None:
    """Its index names where it was published, and its classes may be nowhere else in it."""
    root = tmp_path / "model"
    shutil.copytree(case.paths.model, root)
    path = root / "modular_model_index.json"
    index = json.loads(path.read_text())
    for entry in index.values():
        if isinstance(entry, list):
            assert entry[2]["pretrained_model_name_or_path"].startswith("circlestone-labs/")
            entry[:2] = [None, None]
    path.write_text(json.dumps(index))
    assert (find_index(root) or {})["vae"] == ["diffusers", "AutoencoderKLQwenImage"]
    assert check_model(case.spec(pretrained_model_name_or_path=str(root)), settings=True) == root
    with quiet():
        text = case.family.load_text_pipeline(root, torch.float32)
    assert text.transformer is None
    assert text.text_encoder.config._name_or_path.startswith(str(root))
    shutil.rmtree(root / "text_encoder")
    with pytest.raises(ValueError, match="text_encoder"), quiet():
        case.family.load_text_pipeline(root, torch.float32)
