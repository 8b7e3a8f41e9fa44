"""What is particular to Stable Diffusion 1 and 2: the checker, PNDM's forwards, names of LoRAs."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
import torch
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint
from safetensors.torch import save_file

from engine import families
from engine.blocks.build import on_meta
from engine.exports.stock import files_of, read_index
from engine.exports.writing import Writing
from engine.toy.components.weights import one_thread
from jobs.errors import UserError
from jobs.models.model_config import find_target
from tests.support.engine.exports import recipe_of
from tests.support.engine.families import Case, quiet

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RANK = 3


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def layers_of(flavour: str) -> tuple[UNet2DConditionModel, dict[str, torch.Tensor]]:
    """Every linear layer and convolution of the published U-Net, a tenth as wide, adapted."""
    narrow = {"block_out_channels": (32,) * 4, "attention_head_dim": 2, "cross_attention_dim": 32}
    with on_meta():
        model = UNet2DConditionModel.from_config(
            find_target("stable_diffusion", flavour).config | narrow
        )
    layers, generator = {}, torch.Generator().manual_seed(1)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            shapes = (RANK, module.in_features), (module.out_features, RANK)
        elif isinstance(module, torch.nn.Conv2d):
            shapes = (
                (RANK, module.in_channels, *module.kernel_size),
                (module.out_channels, RANK, 1, 1),
            )
        else:
            continue
        for part, shape in zip("AB", shapes, strict=True):
            layers[f"{name}.lora_{part}.weight"] = torch.randn(shape, generator=generator)
    return model, layers


@pytest.mark.parametrize("flavour", ["1.5", "2.1"])
def test_comfyuis_keys_are_those_of_the_published_checkpoint(flavour: str) -> None:
    """Diffusers reads a checkpoint whose weights are the adapters' ups as the layers' ups."""
    model, layers = layers_of(flavour)
    style = families.load("stable_diffusion", flavour).COMFYUI
    assert style is not None
    tensors = style.convert(layers)
    assert len(tensors) == len(layers)
    checkpoint = {
        name.replace("diffusion_model.", "model.diffusion_model.", 1).replace(
            ".lora_B.weight", ".weight"
        ): tensor
        for name, tensor in tensors.items()
        if name.endswith(".lora_B.weight")
    }
    # What has no adapter is read too: its keys are those that the authors' file has besides.
    for _ in range(1000):
        try:
            read = convert_ldm_unet_checkpoint(dict(checkpoint), dict(model.config))
            break
        except KeyError as missing:
            checkpoint["model.diffusion_model." + missing.args[0]] = torch.zeros(1)
    ups = {n.replace(".lora_B", ""): t for n, t in layers.items() if ".lora_B." in n}
    assert all(torch.equal(read[name], tensor) for name, tensor in ups.items())


def test_kohyas_keys_are_read_by_diffusers(tmp_path: Path) -> None:
    """Linear layers, as its scripts adapt them; `lora_unet_` and the modules of diffusers."""
    style = families.load("stable_diffusion").KOHYA
    assert style is not None
    model, every = layers_of("1.5")
    layers = {name: t for name, t in every.items() if ".transformer_blocks." in name}
    tensors = style.convert(layers)
    name = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_out_0"
    assert tensors[f"{name}.alpha"].item() == RANK
    save_file(tensors, tmp_path / "a.safetensors")
    read, alphas = StableDiffusionPipeline.lora_state_dict(
        tmp_path, weight_name="a.safetensors", unet_config=model.config
    )
    found = {
        "_".join(name.removeprefix("unet.").replace(".processor", "").split("."))
        .replace("_lora_down_", "_lora_A_")
        .replace("_lora_up_", "_lora_B_")
        .replace("to_out_lora", "to_out_0_lora"): tensor
        for name, tensor in read.items()
    }
    assert found.keys() == {name.replace(".", "_") for name in layers}
    assert all(torch.equal(found[name.replace(".", "_")], t) for name, t in layers.items())
    assert len(alphas) == len(layers) / 2


@pytest.mark.parametrize(
    ("name", "per_step"), [("PNDMScheduler", (10, 11)), ("DDIMScheduler", (10, 10))]
)
def test_forwards_are_the_schedulers(
    name: str, per_step: tuple[int, int], tmp_path: Path, toy: Case
) -> None:
    steps, forwards = per_step
    root = tmp_path / "model"
    shutil.copytree(toy.paths.model / "scheduler", root / "scheduler")
    shutil.copy(toy.paths.model / "model_index.json", root)
    index = root / "model_index.json"
    written = {"scheduler": ["diffusers", name]}  # the settings are still those of another class
    index.write_text(json.dumps(json.loads(index.read_text()) | written))
    family = families.load("stable_diffusion", "1.5", root)
    assert family.forwards_of(toy.request(steps=steps)) == forwards
    guided = toy.request(steps=steps, guidance=7.5)
    assert family.forwards_of(guided) == forwards, "both prompts are one batch"
    with quiet():
        scheduler = family.sampling_pipeline(root, None, None).scheduler
    scheduler.set_timesteps(steps)
    assert (type(scheduler).__name__, len(scheduler.timesteps)) == (name, forwards)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("stable_diffusion", tmp_path_factory.getbasetemp().parent / "families")


def test_a_models_safety_checker_is_not_loaded(toy: Case, tmp_path: Path) -> None:
    """Published models bring one, of 1.2 GB; without it texts are encoded and samples made."""
    root = with_a_checker(toy, tmp_path / "model")
    family = families.load("stable_diffusion", "1.5", root)
    with quiet():
        text = family.load_text_pipeline(root, torch.float32)
        vae = family.load_vae(root, torch.float32)
        sampling = family.sampling_pipeline(root, None, vae)
    assert text.safety_checker is None
    assert text.unet is None
    assert sampling.safety_checker is None
    assert sampling.config.requires_safety_checker is False


def with_a_checker(toy: Case, root: Path) -> Path:
    """The toy with a checker in its index, whose files were not downloaded."""
    shutil.copytree(toy.paths.model, root)
    index = root / "model_index.json"
    checker = {
        "safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"],
        "feature_extractor": ["transformers", "CLIPImageProcessor"],
        "requires_safety_checker": True,
    }
    index.write_text(json.dumps(json.loads(index.read_text()) | checker))
    return root


def test_a_checker_that_was_not_downloaded_is_not_in_exports(toy: Case, tmp_path: Path) -> None:
    root = with_a_checker(toy, tmp_path / "model")
    recipe = recipe_of(toy.spec(model_type="full"), root)
    with quiet(), Writing(recipe, {}, tmp_path / "export") as writing:
        exported = writing.finish()
    assert exported.warnings == (
        "the base model lacks safety_checker and feature_extractor: the export has none",
    )
    with quiet():
        pipeline = StableDiffusionPipeline.from_pretrained(exported.path)
    assert pipeline.safety_checker is None
    assert pipeline.feature_extractor is None
    assert pipeline.config.requires_safety_checker is False


def test_a_checker_without_its_extractor_is_an_incomplete_model(toy: Case, tmp_path: Path) -> None:
    """Pipelines would not load."""
    root = with_a_checker(toy, tmp_path / "model")
    (root / "safety_checker").mkdir()
    with pytest.raises(UserError, match="lacks feature_extractor"):
        files_of(root, read_index(root), {"unet"})
