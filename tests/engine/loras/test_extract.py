"""A LoRA of the difference of two models: the truncated SVD, under names that fit the model."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from diffusers import FluxPipeline
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file

from engine.exports.recipe import Recipe
from engine.loras.extract import nearest
from engine.model.adapters.lora_file import read_lora
from tests.support.engine.exports import export_alone
from tests.support.engine.families import Case, quiet, toys_root
from tests.support.engine.loras import assert_close, deltas_of, exported, tool

if TYPE_CHECKING:
    from pathlib import Path

WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("flux", toys_root(tmp_path_factory))


@pytest.fixture(scope="module")
def tuned(case: Case, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The toy with a LoRA of rank 3 and another bias, and what each layer's weight changed by."""
    root = tmp_path_factory.mktemp("tuned") / "model"
    directory, deltas = exported(case, root.with_name("lora"))
    del directory
    shutil.copytree(case.paths.model, root)
    weights = load_file(root / "transformer" / WEIGHTS)
    for name, delta in deltas.items():
        weights[f"{name}.weight"] += delta
    weights["proj_out.bias"] += 1
    save_file(weights, root / "transformer" / WEIGHTS, {"format": "pt"})
    return root, deltas


def test_what_a_lora_changed_is_extracted_again(
    case: Case, tuned: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: Any
) -> None:
    """And stock diffusers loads it."""
    root, deltas = tuned
    out = tmp_path / "x.safetensors"
    words = ["extract", root, case.paths.model, "--rank=3", "--dtype=fp32", f"--output={out}"]
    status, answer, error = tool(capsys, *words)
    assert (status, error) == (0, "")
    found = {name.removeprefix("transformer."): delta for name, delta in deltas_of(out).items()}
    assert_close(found, deltas, 1e-4)
    assert json.loads(answer)["left_out"] == 1
    _, header = read_lora(out)
    assert header["modelspec.architecture"] == "flux-1/lora"
    assert (header["modelspec.implementation"], header["modelspec.title"]) == ("diffusers", "x")
    assert header["modelspec.hash_sha256"] != "0x" + 64 * "0"
    assert json.loads(answer)["kept"]["least"] > 0.9999
    pipeline = FluxPipeline.from_pretrained(case.paths.model)
    with quiet():
        pipeline.load_lora_weights(tmp_path, weight_name=out.name)
    loaded = {
        name: module.get_delta_weight(next(iter(module.scaling)))
        for name, module in pipeline.transformer.named_modules()
        if isinstance(module, LoraLayer)
    }
    assert_close(loaded, deltas, 1e-4)


def test_a_lower_rank_is_the_truncated_svd(
    case: Case, tuned: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: Any
) -> None:
    root, deltas = tuned
    out = tmp_path / "x.safetensors"
    words = ["extract", root / "transformer", case.paths.model / "transformer", "--rank=2"]
    assert tool(capsys, *words, "--dtype=fp32", f"--output={out}")[0] == 0
    expected = {}
    for name, delta in deltas.items():
        left, values, right = torch.linalg.svd(delta.double(), full_matrices=False)
        expected[f"transformer.{name}"] = (left[:, :2] * values[:2] @ right[:2]).float()
    assert_close(deltas_of(out), expected, 1e-3)


def test_an_energy_chooses_each_layers_rank(
    case: Case, tuned: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "x.safetensors"
    words = ["extract", tuned[0], case.paths.model, "--energy=0.8", f"--output={out}"]
    assert tool(capsys, *words)[0] == 0
    for name, delta in tuned[1].items():
        values = torch.linalg.svdvals(delta.double()).square()
        rank = int((values.cumsum(0) < 0.8 * values.sum()).sum()) + 1
        assert len(load_file(out)[f"transformer.{name}.lora_A.weight"]) == rank


@pytest.mark.parametrize("shape", [(7, 4), (4, 7), (5, 5)])
def test_nearest_is_the_svds(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    for rank in range(1, min(shape) + 1):
        down, up, share = nearest(matrix, rank)
        expected = (left[:, :rank] * values[:rank] @ right[:rank]).float()
        assert torch.allclose(up @ down, expected, atol=1e-6)
        assert share == pytest.approx(float(values[:rank].square().sum() / values.square().sum()))
        assert torch.allclose(up.norm(dim=0), down.norm(dim=1), atol=1e-5)


@pytest.mark.parametrize("prefix", ["model.diffusion_model.", ""])
def test_files_of_the_authors_layers_give_comfyuis_names(
    tmp_path: Path, capsys: Any, prefix: str
) -> None:
    draw = torch.Generator().manual_seed(4)
    base = {
        f"{prefix}double_blocks.0.img_attn.qkv.weight": torch.randn(12, 4, generator=draw),
        f"{prefix}input_blocks.0.0.weight": torch.randn(4, 3, 3, 3, generator=draw),
        f"{prefix}norm.weight": torch.ones(4),
    }
    change = torch.outer(torch.randn(12, generator=draw), torch.randn(4, generator=draw))
    qkv, conv, _ = base
    save_file(base, tmp_path / "base.safetensors")
    kernel = torch.outer(torch.randn(4, generator=draw), torch.randn(27, generator=draw))
    save_file(
        base | {qkv: base[qkv] + change, conv: base[conv] + kernel.view(4, 3, 3, 3)},
        tmp_path / "tuned.safetensors",
    )
    out = tmp_path / "x.safetensors"
    words = ["extract", tmp_path / "tuned.safetensors", tmp_path / "base.safetensors"]
    assert tool(capsys, *words, "--rank=1", "--dtype=fp32", f"--output={out}")[0] == 0
    assert_close(
        deltas_of(out),
        {
            "diffusion_model.double_blocks.0.img_attn.qkv": change,
            "diffusion_model.input_blocks.0.0": kernel,
        },
        1e-5,
    )
    down = load_file(out)["diffusion_model.input_blocks.0.0.lora_A.weight"]
    assert down.shape == (1, 3, 3, 3)
    assert not any(name.startswith("modelspec.") for name in read_lora(out)[1])


def test_a_unets_lora_is_called_unet(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, capsys: Any
) -> None:
    case = Case("sdxl", toys_root(tmp_path_factory))
    root = tmp_path / "unet"
    shutil.copytree(case.paths.model / "unet", root)
    weights = load_file(root / WEIGHTS)
    weights["conv_in.weight"] += 1
    save_file(weights, root / WEIGHTS, {"format": "pt"})
    out = tmp_path / "x.safetensors"
    words = ["extract", root, case.paths.model, "--rank=1", f"--output={out}"]
    status, _, error = tool(capsys, *words)
    assert (status, error) == (0, "")
    assert list(deltas_of(out)) == ["unet.conv_in"]


@pytest.mark.parametrize("single", [False, True])
def test_text_encoders_are_extracted_too(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, capsys: Any, single: bool
) -> None:
    """Of a directory and of a checkpoint, where query, key and value of one are one tensor."""
    case = Case("sdxl", toys_root(tmp_path_factory))
    base, tuned, merged = (tmp_path / name for name in ("base", "tuned", "merged"))
    if single:
        model = case.family.transformer_class().from_pretrained(case.paths.model, subfolder="unet")
        spec = case.spec(model_type="full")
        recipe = Recipe(spec, case.family, case.paths.model, 4, ema=False, single_file=True)
        base = export_alone(model, recipe, base).path / "sdxl.safetensors"
        merged, weights = tmp_path / "merged.safetensors", load_file(base)
        first, second = "conditioner.embedders.0.transformer.", "conditioner.embedders.1.model."
        changed = [
            f"{first}text_model.encoder.layers.0.self_attn.q_proj.weight",
            f"{second}transformer.resblocks.0.attn.in_proj_weight",
        ]
        left_out = [f"{first}text_model.embeddings.token_embedding.weight"]
        left_out += [f"{second}text_projection", "first_stage_model.encoder.conv_in.weight"]
        tuned = tmp_path / "tuned.safetensors"
        save_file({n: t + (n in changed + left_out) for n, t in weights.items()}, tuned)
    else:
        shutil.copytree(case.paths.model, base)
        shutil.copytree(case.paths.model, tuned)
        left_out = ["token_embedding.weight"]
        for part in ("text_encoder", "text_encoder_2"):
            (file,) = (tuned / part).glob("*.safetensors")
            weights = load_file(file)
            for name, tensor in weights.items():
                if name.endswith(("layers.0.self_attn.q_proj.weight", *left_out)):
                    weights[name] = tensor + 1
                elif name.endswith("layers.0.self_attn.v_proj.weight"):  # of another rank
                    weights[name] = tensor + torch.eye(len(tensor))
            save_file(weights, file)
        left_out *= 2
    out = tmp_path / "x.safetensors"
    words = ["extract", tuned, base, "--energy=0.9999", "--dtype=fp32", f"--output={out}"]
    status, answer, error = tool(capsys, *words)
    assert (status, error) == (0, "")
    layer = "text_model.encoder.layers.0.self_attn"
    parts = ("q", "qkv") if single else ("qv", "qv")
    expected = {f"text_encoder.{layer}.{part}_proj" for part in parts[0]}
    expected |= {f"text_encoder_2.{layer}.{part}_proj" for part in parts[1]}
    assert deltas_of(out).keys() == expected
    assert json.loads(answer)["left_out"] == len(left_out)
    if not single:
        pipeline = case.stock()
        with quiet():
            pipeline.load_lora_weights(tmp_path, weight_name=out.name)
        for encoder in (pipeline.text_encoder, pipeline.text_encoder_2):
            found = {
                name.rpartition(".")[2]: module.get_delta_weight(next(iter(module.scaling)))
                for name, module in encoder.named_modules()
                if isinstance(module, LoraLayer)
            }
            eye = torch.eye(len(found["v_proj"]))
            assert_close(found, {"q_proj": torch.ones_like(eye), "v_proj": eye}, 0.02)
    words = ["merge", out, "--weight=1", f"--into={base}", f"--output={merged}"]
    assert tool(capsys, *words)[::2] == (0, "")
    words = ["extract", merged, base, "--rank=1", f"--output={tmp_path / 'again'}"]
    again = json.loads(tool(capsys, *words)[1])
    assert (again["modules"], again["left_out"]) == (len(expected), 0)


REFUSED = {
    "the models do not differ": (lambda tuned, base: (base, base)),
    "there is no model at": (lambda tuned, base: (tuned / "gone", base)),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_extracted_is_one_sentence(
    case: Case, tuned: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: Any, why: str
) -> None:
    models = REFUSED[why](tuned[0], case.paths.model)
    status, _, error = tool(capsys, "extract", *models, "--rank=1", f"--output={tmp_path / 'x'}")
    assert (status, why in error) == (2, True)
