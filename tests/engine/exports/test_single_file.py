"""A full model as one file: what diffusers' own converters make of it is the model again."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import diffusers
import pytest
import torch
from diffusers.loaders import single_file_utils
from safetensors.torch import load_file

from engine.blocks.build import on_meta
from engine.exports.recipe import Recipe
from engine.exports.single_file import PARTS, RENAMES, UNET, Fused, authors_layout, fits_8_bits
from engine.families import load
from jobs.errors import UserError
from jobs.run.export_places import export_facts
from jobs.spec.families import FAMILIES
from tests.support.engine.exports import export_alone, recipe_of, trained_model
from tests.support.engine.families import Case, toys_root
from tests.support.engine.toy_jobs import toy_spec

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# Published config, changes to have one block of each kind, and diffusers' converter.
PUBLISHED = {
    "flux": (
        "black-forest-labs--FLUX.1-dev",
        {"num_layers": 2, "num_single_layers": 2},
        "convert_flux_transformer_checkpoint_to_diffusers",
    ),
    "flux schnell": (
        "black-forest-labs--FLUX.1-dev",
        {"num_layers": 1, "num_single_layers": 1, "guidance_embeds": False},
        "convert_flux_transformer_checkpoint_to_diffusers",
    ),
    "qwen_image": ("Qwen--Qwen-Image", {"num_layers": 1}, None),
    "z_image": (
        "Tongyi-MAI--Z-Image",
        {"n_layers": 2, "n_refiner_layers": 1},
        "convert_z_image_transformer_checkpoint_to_diffusers",
    ),
    "wan": (
        "Wan-AI--Wan2.1-I2V-14B-480P-Diffusers",
        {"num_layers": 2},
        "convert_wan_transformer_to_diffusers",
    ),
    "wan 2.2": (
        "Wan-AI--Wan2.2-TI2V-5B-Diffusers",
        {"num_layers": 1},
        "convert_wan_transformer_to_diffusers",
    ),
}


def narrow(name: str) -> dict[str, torch.Tensor]:
    """A model's tensors with all their rows, but few inputs: none is converted by those."""
    config, changes, _ = PUBLISHED[name]
    path = files("jobs") / "models" / "published" / f"{config}.json"
    values = json.loads(path.read_text(encoding="utf-8")) | changes
    family = name.partition(" ")[0]
    with on_meta():
        model = getattr(diffusers, FAMILIES[family].transformer).from_config(values)
    draw = torch.Generator().manual_seed(1)
    return {
        key: torch.randn([t.shape[0], *(min(n, 2) for n in t.shape[1:])], generator=draw)
        for key, t in model.named_parameters()
    }


@pytest.mark.parametrize("name", PUBLISHED)
def test_diffusers_reads_the_model_back(name: str) -> None:
    tensors = narrow(name)
    family = load(name.partition(" ")[0])
    layout = authors_layout(family, {key: tuple(t.shape) for key, t in tensors.items()})
    written = {key: made.make(tensors) for key, made in layout.items()}
    assert sum(t.numel() for t in written.values()) == sum(t.numel() for t in tensors.values())
    converter = PUBLISHED[name][2]
    read = getattr(single_file_utils, converter)(written) if converter else written
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[key], tensor) for key, tensor in tensors.items())
    assert not converter or not written, "diffusers has no place for some"


WIDE = {
    "flux": (
        *("img_in", "txt_in", "time_in.in_layer", "time_in.out_layer", "vector_in.in_layer"),
        *("vector_in.out_layer", "guidance_in.in_layer", "guidance_in.out_layer"),
        *("final_layer.linear", "final_layer.adaLN_modulation.1"),
    ),
    "qwen_image": (
        *("img_in", "txt_in", "norm_out.linear", "proj_out"),
        *(f"time_text_embed.timestep_embedder.linear_{number}" for number in (1, 2)),
    ),
    "z_image": (
        *("x_embedder", "cap_embedder.1", "t_embedder.mlp.0", "t_embedder.mlp.2"),
        *("final_layer.linear", "final_layer.adaLN_modulation.1"),
    ),
    "wan": (
        *("patch_embedding", "text_embedding.0", "text_embedding.2", "time_embedding.0"),
        *("time_embedding.2", "time_projection.1", "img_emb.proj.1", "img_emb.proj.3", "head.head"),
    ),
    "sdxl": (
        *("input_blocks.0.0", "time_embed.0", "time_embed.2", "label_emb.0.0", "label_emb.0.2"),
        "out.2",
    ),
}


@pytest.mark.parametrize("name", WIDE)
def test_fp8_is_for_the_matrices_of_repeated_blocks(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """All of them, and nothing else: no embedding, no first or last layer, no norm."""
    if name == "sdxl":
        case = Case("sdxl", toys_root(tmp_path_factory))
        unet = case.family.transformer_class().from_pretrained(case.paths.model, subfolder="unet")
        shapes = {key: tuple(t.shape) for key, t in unet.named_parameters()}
        shapes["vae/encoder.conv_in.weight"] = (4, 3, 3, 3)
    else:
        shapes = {key: tuple(t.shape) for key, t in narrow(name).items()}
    prefix = UNET if name == "sdxl" else ""
    layout = authors_layout(load(name), shapes)
    found = {target: made.shape(shapes) for target, made in layout.items()}
    wide = {t for t, shape in found.items() if not fits_8_bits(name, t, shape)}
    matrices = {t for t, shape in found.items() if len(shape) > 1 and t.endswith(".weight")}
    others = {"first_stage_model.encoder.conv_in.weight"} if prefix else set()
    assert wide & matrices - others == {f"{prefix}{module}.weight" for module in WIDE[name]}
    assert found.keys() - matrices <= wide


def test_other_families_are_refused() -> None:
    assert set(RENAMES) == {name.partition(" ")[0] for name in PUBLISHED}
    with pytest.raises(UserError, match="sana has no single-file export"):
        authors_layout(load("sana"), {})
    with pytest.raises(UserError, match=r"file of flux has no place for new\.weight"):
        authors_layout(load("flux"), {"new.weight": (4, 4)})


def test_an_sdxl_checkpoint_holds_the_whole_pipeline(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """Trained U-Net, autoencoder and text encoders, as diffusers' converters read them."""
    case = Case("sdxl", toys_root(tmp_path_factory))
    root, spec = case.paths.model, case.spec(model_type="full")
    model = case.family.transformer_class().from_pretrained(root, subfolder="unet")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    recipe = Recipe(spec, case.family, root, 4, ema=False, single_file=True)
    made = export_alone(model, recipe, tmp_path / "export")
    written = load_file(made.path / "sdxl.safetensors")
    unet = single_file_utils.convert_ldm_unet_checkpoint(dict(written), dict(model.config))
    assert_same(unet, dict(model.named_parameters()))
    stock = case.stock()
    vae = single_file_utils.convert_ldm_vae_checkpoint(dict(written), dict(stock.vae.config))
    assert_same(vae, dict(stock.vae.named_parameters()))
    prefix = "conditioner.embedders.0.transformer."
    clip = single_file_utils.convert_ldm_clip_checkpoint(dict(written), remove_prefix=prefix)
    assert_same(clip, stored(root / "text_encoder"))
    prefix = "conditioner.embedders.1.model."
    big = single_file_utils.convert_open_clip_checkpoint(
        stock.text_encoder_2, dict(written), prefix=prefix
    )
    assert_same(big, stored(root / "text_encoder_2"))
    assert len(PARTS) == 3
    assert sum(name.startswith(UNET) for name in written) == len(unet)


def stored(directory: Path) -> dict[str, torch.Tensor]:
    """A text encoder's tensors, by the names that every version of transformers reads."""
    (file,) = directory.glob("*.safetensors")
    return {
        name if name.startswith("text_") else f"text_model.{name}": tensor
        for name, tensor in load_file(file).items()
    }


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_tensor_is_joined_turned_and_given_a_kernel() -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(1, 3)}
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    for made in (Fused(("a", "b")), Fused(("a",), transposed=True), Fused(("a",), kernel=True)):
        assert tuple(made.make(tensors).shape) == made.shape(shapes)
    assert torch.equal(Fused(("a",), transposed=True).make(tensors), tensors["a"].T)


@pytest.mark.parametrize("dtype", ["auto", "fp16", "fp8"])
def test_an_export_is_one_file_of_the_trained_model(toy: Path, tmp_path: Path, dtype: str) -> None:
    spec = toy_spec(toy, model_type="full", name="cats", model_flavour="schnell")
    model = trained_model(spec, toy / "model")
    recipe = recipe_of(spec, toy / "model", dtype=dtype, single_file=True)
    made = export_alone(model, recipe, tmp_path / "export")
    assert {path.name for path in made.path.iterdir()} == {"cats.safetensors", "export.json"}
    assert (export_facts(made.path) or {})["single_file"] is True
    found = load_file(made.path / "cats.safetensors")
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    layout = authors_layout(recipe.family, {n: tuple(t.shape) for n, t in tensors.items()})
    assert found.keys() == layout.keys()
    assert "double_blocks.0.img_attn.norm.query_norm.scale" in found
    usual: dict[str, Any] = {"auto": torch.float32, "fp16": torch.float16, "fp8": torch.bfloat16}
    for name, part in layout.items():
        whole = part.make(tensors)
        layer = dtype == "fp8" and fits_8_bits("flux", name, tuple(whole.shape))
        expected = whole.to(torch.float8_e4m3fn if layer else usual[dtype])
        assert found[name].dtype is expected.dtype
        assert torch.equal(found[name].float(), expected.float()), name


def test_a_lora_is_refused(toy: Path, tmp_path: Path) -> None:
    spec = toy_spec(toy)
    model = trained_model(spec, toy / "model")
    with pytest.raises(UserError, match="a single file is for a full model"):
        export_alone(model, recipe_of(spec, toy / "model", single_file=True), tmp_path / "export")
