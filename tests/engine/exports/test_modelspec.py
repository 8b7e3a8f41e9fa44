"""What exported files say of themselves: ModelSpec 1.0.1's keys, in every file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from engine import families
from engine.exports.recipe import _ARCHITECTURES, _IMPLEMENTATIONS, Recipe, model_spec
from jobs.spec.families import FAMILIES
from jobs.spec.job_spec import JobSpec
from tests.support.engine.exports import export_alone, recipe_of, trained_model
from tests.support.engine.toy_jobs import toy_spec

MUST = ("sai_model_spec", "architecture", "implementation", "title", "resolution")
# Finetunes and experts that are called as another model; all others have names of their own.
SHARED = {
    *("krea", "control", "2.2-t2v-a14b-low", "2.2-i2v-a14b-low", "1.6b-bf16"),
    *("v0.2", "base", "720p-t2v", "2512", "600m-512", "flash", "720p-i2v"),
    *("2.2-flf2v-a14b-high", "2.2-flf2v-a14b-low", "2.2-vace-fun-a14b-low"),
    *("480p-t2v-distilled", "480p-i2v-distilled", "720p-i2v-distilled", "480p-i2v-step-distilled"),
}


def recipe(family: str, flavour: str | None = None, root: Path | None = None, **own: str) -> Recipe:
    values = {"model_family": family, "model_flavour": flavour, "name": "t"}
    spec = JobSpec.model_validate(values | {"model_type": "lora", "resolution": 768} | own)
    return Recipe(spec, families.load(family, flavour, root), root or Path(), 4, ema=False)


def read(file: Path) -> tuple[dict[str, str], str]:
    """A file's header texts, and the hash of its tensors by the standard's own recipe."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])["__metadata__"]
    return header, "0x" + hashlib.sha256(content[8 + length :]).hexdigest()


def test_every_flavour_has_a_name_and_few_share_one() -> None:
    assert {n: {"", *f.flavours} for n, f in FAMILIES.items()} == {
        name: set(flavours) for name, flavours in _ARCHITECTURES.items()
    }
    for names in _ARCHITECTURES.values():
        own = [n for f, n in names.items() if f and f not in SHARED]
        assert len(own) == len(set(own))
    assert set(_IMPLEMENTATIONS) == FAMILIES.keys() - {"sana"}  # which has diffusers' names alone


@pytest.mark.parametrize(
    ("family", "flavour", "name"),
    [
        ("flux", "schnell", "flux-1-schnell/lora"),
        ("flux", "dev", "flux-1-dev/lora"),
        ("flux", "control", "flux-1-dev/control-lora"),
        ("flux", None, "flux-1/lora"),
        ("stable_diffusion", "2.1", "stable-diffusion-v2-768-v/lora"),
    ],
)
def test_a_flavour_is_called_as_itself(family: str, flavour: str | None, name: str) -> None:
    assert model_spec(recipe(family, flavour))["modelspec.architecture"] == name


def test_a_model_says_its_flavour_where_the_job_does_not() -> None:
    schnell = {"pretrained_model_name_or_path": "black-forest-labs/FLUX.1-schnell"}
    found = model_spec(recipe("flux", **schnell))
    assert found["modelspec.architecture"] == "flux-1-schnell/lora"


def test_names_of_diffusers_are_said_to_be_diffusers() -> None:
    flux, older = recipe("flux"), recipe("stable_diffusion")
    theirs = "https://github.com/black-forest-labs/flux"
    styles = ("diffusers", "kohya", "comfyui")
    found = [model_spec(flux, style)["modelspec.implementation"] for style in styles]
    assert found == ["diffusers", theirs, theirs]
    assert model_spec(older, "kohya")["modelspec.implementation"] == "diffusers"


def test_predictions_and_timesteps_are_said_where_there_are_others(tmp_path: Path) -> None:
    scheduler = tmp_path / "scheduler"
    scheduler.mkdir()
    (scheduler / "scheduler_config.json").write_text('{"prediction_type": "v_prediction"}')
    assert model_spec(recipe("sdxl", root=tmp_path))["modelspec.prediction_type"] == "v"
    assert "modelspec.prediction_type" not in model_spec(recipe("flux", root=tmp_path))
    (tmp_path / "model_index.json").write_text('{"boundary_ratio": 0.875}')
    low = model_spec(recipe("wan", "2.2-t2v-a14b-low", tmp_path))
    assert low["modelspec.timestep_range"] == "0,875"
    assert "modelspec.timestep_range" not in model_spec(recipe("wan", "2.1-t2v-14b"))


@pytest.mark.parametrize("model_type", ["lora", "full"])
def test_every_file_has_the_keys_and_the_hash_of_its_tensors(
    toy: Path, tmp_path: Path, model_type: str
) -> None:
    formats = ["diffusers", "kohya", "comfyui"]
    spec = toy_spec(
        toy,
        model_type=model_type,
        model_flavour="schnell",
        trigger_word="sks cat",
        export_formats=formats if model_type == "lora" else None,
    )
    model = trained_model(spec, toy / "model")
    done = recipe_of(spec, toy / "model", time=1_700_000_000.0)
    made = export_alone(model, done, tmp_path / "export")
    place = made.path if model_type == "lora" else made.path / "transformer"
    files = sorted(place.glob("*.safetensors"))
    assert len(files) == (3 if model_type == "lora" else 1)
    for file in files:
        header, found = read(file)
        assert all(header[f"modelspec.{name}"] for name in MUST)
        assert header["modelspec.hash_sha256"] == found
        assert header["modelspec.date"] == "2023-11-14"
        assert header["modelspec.architecture"].startswith("flux-1-schnell")
        assert not any("sks" in text for n, text in header.items() if n.startswith("modelspec."))
