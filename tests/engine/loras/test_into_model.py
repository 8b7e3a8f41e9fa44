"""LoRAs in a model's weights: as peft and diffusers merge them, whatever the files' names are."""

from __future__ import annotations

import filecmp
import json
import shutil
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from peft import get_peft_model_state_dict
from peft.tuners.lokr import LoKrLayer
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from engine.exports.single_file import sdxl_layout
from engine.families.shared import flux_kohya
from engine.loras import into_model
from engine.model.adapters import lora
from engine.model.adapters.lora_file import begin_from
from tests.support.engine.families import Case, quiet, toys_root
from tests.support.engine.loras import assert_close, exported, tool

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ("diffusers", "kohya", "comfyui")


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("flux", toys_root(tmp_path_factory))


@pytest.fixture(scope="module")
def one(case: Case, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A LoRA, and what it adds to each layer."""
    return exported(case, tmp_path_factory.mktemp("one") / "a")


def file_of(directory: Path, names: str) -> Path:
    pattern = "pytorch_lora*" if names == "diffusers" else f"*-{names}.safetensors"
    (file,) = directory.glob(pattern)
    return file


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    (file,) = directory.glob("diffusion_pytorch_model.safetensors")
    return load_file(file)


def authors_file(weights: dict[str, torch.Tensor], file: Path, prefix: str) -> None:
    """Write a toy's layers as BFL named them: a weight is a product with the identity."""
    adapters = {}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        known = module.startswith(("transformer_blocks", "single_transformer_blocks"))
        if known and weight.dim() == 2:
            adapters[module] = torch.eye(weight.shape[1]), weight.float()
    named = flux_kohya.rename(adapters)
    tensors = {f"{prefix}{m}.weight": up @ down for m, (down, up) in named.items()}
    save_file(tensors | {"vae.decoder.weight": torch.ones(2, 2)}, file, {"sshs_model_hash": "old"})


@pytest.mark.parametrize("names", NAMES)
def test_a_pipeline_gets_what_the_lora_adds(
    case: Case, one: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: Any, names: str
) -> None:
    """All other files are the model's own; the stock pipeline's own fusing makes the same."""
    directory, deltas = one
    out = tmp_path / "merged"
    status, answer, error = tool(
        capsys,
        *("merge", file_of(directory, names), "--weight=0.7"),
        *(f"--into={case.paths.model}", f"--output={out}"),
    )
    assert (status, error) == (0, "")
    assert json.loads(answer)["layers"] == len(deltas)
    before, after = weights_of(case.paths.model / "transformer"), weights_of(out / "transformer")
    changes = {name: after[name] - before[name] for name in before}
    expected = {f"{name}.weight": 0.7 * delta for name, delta in deltas.items()}
    assert_close({n: t for n, t in changes.items() if n in expected}, expected, 1e-4)
    assert not any(t.any() for n, t in changes.items() if n not in expected)
    stock = FluxPipeline.from_pretrained(case.paths.model)
    with quiet():
        stock.load_lora_weights(directory, weight_name="pytorch_lora_weights.safetensors")
    stock.fuse_lora(lora_scale=0.7)
    stock.unload_lora_weights()
    fused = {n.replace(".base_layer", ""): t for n, t in stock.transformer.state_dict().items()}
    assert_close(after, fused, 1e-6)
    FluxPipeline.from_pretrained(out)


def test_several_are_summed_up_in_fp32_and_rounded_once(
    case: Case, one: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: Any
) -> None:
    """Each by itself is too small for bf16 to see."""
    root, out = tmp_path / "base", tmp_path / "merged"
    model = FluxTransformer2DModel.from_pretrained(case.paths.model / "transformer")
    model.to(torch.bfloat16).save_pretrained(root)
    before = weights_of(root)
    file, deltas = file_of(one[0], "diffusers"), one[1]
    words = ["merge", *[file] * 20, *["--weight=0.001"] * 20, f"--into={root}"]
    assert tool(capsys, *words, f"--output={out}")[0] == 0
    after = weights_of(out)
    for name, delta in deltas.items():
        exact = (before[f"{name}.weight"].float() + 0.02 * delta).bfloat16()
        same = (after[f"{name}.weight"] == exact).float().mean()
        assert same > 0.999, name  # sums of twenty round apart in few places
    config = {path.name for path in out.iterdir()}
    assert config == {"config.json", "diffusion_pytorch_model.safetensors"}


@pytest.mark.parametrize("prefix", ["model.diffusion_model.", ""])
@pytest.mark.parametrize("names", NAMES)
def test_a_file_of_the_authors_layers_gets_the_same(
    case: Case,
    one: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    capsys: Any,
    names: str,
    prefix: str,
) -> None:
    weights = weights_of(case.paths.model / "transformer")
    changed = {
        name: tensor + one[1].get(name.removesuffix(".weight"), torch.zeros(()))
        for name, tensor in weights.items()
    }
    authors_file(weights, tmp_path / "base.safetensors", prefix)
    authors_file(changed, tmp_path / "expected.safetensors", prefix)
    out = tmp_path / "merged.safetensors"
    words = ["merge", file_of(one[0], names), "--weight=1"]
    words += [f"--into={tmp_path / 'base.safetensors'}", f"--output={out}"]
    status, _, error = tool(capsys, *words)
    assert (status, error) == (0, "")
    assert_close(load_file(out), load_file(tmp_path / "expected.safetensors"), 1e-6)
    with safe_open(out, framework="pt") as opened:
        header = opened.metadata()
    assert not any(name.startswith("sshs_") for name in header)


@pytest.mark.parametrize("variant", ["dora", "lokr"])
def test_dora_and_lokr_are_merged_as_peft_does(
    case: Case, tmp_path: Path, capsys: Any, variant: str
) -> None:
    values = {"lora_variant": variant, "lora_rank": 2, "lora_alpha": 3, "export_formats": None}
    directory, _ = exported(case, tmp_path / "a", **values)
    spec = case.spec(**values)
    model = FluxTransformer2DModel.from_pretrained(case.paths.model / "transformer")
    lora.add_lora(model, spec, case.family.lora_targets(spec))
    begin_from(model, file_of(directory, "diffusers"), case.family)
    expected = {}
    for name, module in model.named_modules():
        if hasattr(module, "base_layer") and hasattr(module, "scaling"):
            with torch.no_grad():
                if isinstance(module, LoKrLayer):
                    delta = module.get_delta_weight("default")
                    expected[name] = module.base_layer.weight + delta
                else:
                    module.merge()
                    expected[name] = module.base_layer.weight.clone()
    assert expected
    assert get_peft_model_state_dict(model, adapter_name="default")
    for names in ("diffusers", "kohya") if variant == "dora" else ("diffusers", "comfyui"):
        out = tmp_path / names
        words = ["merge", file_of(directory, names), "--weight=1"]
        words += [f"--into={case.paths.model}", f"--output={out}"]
        status, _, error = tool(capsys, *words)
        assert (status, error) == (0, "")
        after = weights_of(out / "transformer")
        assert_close({name: after[f"{name}.weight"] for name in expected}, expected, 1e-5)


def test_one_tensor_of_the_model_is_held_at_a_time(
    case: Case,
    one: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most, stock = 0, into_model.read_stored

    def read(place: Any) -> torch.Tensor:
        nonlocal most
        tensor = stock(place)
        alive.add(tensor)
        most = max(most, len(alive))
        return tensor

    monkeypatch.setattr(into_model, "read_stored", read)
    words = ["merge", file_of(one[0], "kohya"), "--weight=1", f"--into={case.paths.model}"]
    assert tool(capsys, *words, f"--output={tmp_path / 'm'}")[0] == 0
    assert 1 <= most <= 2


def test_text_encoders_get_theirs(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, capsys: Any
) -> None:
    case = Case("sdxl", toys_root(tmp_path_factory))
    place = case.paths.model / "text_encoder_2"
    (stored,) = place.glob("*.safetensors")
    name = next(
        n for n in sorted(load_file(stored)) if n.endswith("layers.0.self_attn.q_proj.weight")
    )
    module = name.removesuffix(".weight").removeprefix("text_model.")
    weight = load_file(stored)[name]
    down, up = torch.randn(2, weight.shape[1]), torch.randn(weight.shape[0], 2)
    flat = f"lora_te2_text_model_{module.replace('.', '_')}"
    files = {
        "kohya": {
            f"{flat}.lora_down.weight": down,
            f"{flat}.lora_up.weight": up,
            f"{flat}.alpha": torch.tensor(1.0),
        },
        "diffusers": {
            f"text_encoder_2.text_model.{module}.lora_A.weight": down,
            f"text_encoder_2.text_model.{module}.lora_B.weight": up / 2,
        },
    }
    for names, tensors in files.items():
        file, out = tmp_path / f"{names}.safetensors", tmp_path / names
        save_file(tensors, file)
        words = ["merge", file, "--weight=1", f"--into={case.paths.model}", f"--output={out}"]
        status, _, error = tool(capsys, *words)
        assert (status, error) == (0, "")
        after = load_file(out / "text_encoder_2" / stored.name)
        assert torch.allclose(after[name], weight + up @ down / 2, atol=1e-6)
        for path in (case.paths.model / "unet").iterdir():
            assert filecmp.cmp(out / "unet" / path.name, path, shallow=False), path.name


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, Path]:
    """Wan 2.2 with its two experts, and a LoRA of the one for low noise."""
    case = Case("wan:2.2-t2v-a14b-low", toys_root(tmp_path_factory))
    directory, _ = exported(case, tmp_path_factory.mktemp("wan") / "a")
    return case, directory


def changed_experts(case: Case, out: Path) -> list[str]:
    names = ["transformer", "transformer_2"]
    return [
        name
        for name in names
        if any(
            not torch.equal(tensor, weights_of(case.paths.model / name)[key])
            for key, tensor in weights_of(out / name).items()
        )
    ]


@pytest.mark.slow
@pytest.mark.parametrize("names", ["diffusers", "kohya"])
def test_a_model_of_two_experts_needs_to_know_which(
    wan: tuple[Case, Path], tmp_path: Path, capsys: Any, names: str
) -> None:
    """Our files say it; of others, `transformer_2.` or the person does."""
    case, directory = wan
    into = f"--into={case.paths.model}"
    file = file_of(directory, names)
    words = ["merge", file, "--weight=1", into]
    assert tool(capsys, *words, f"--output={tmp_path / 'own'}")[0] == 0
    assert changed_experts(case, tmp_path / "own") == ["transformer_2"]
    silent = tmp_path / "silent.safetensors"
    save_file(load_file(file), silent)
    words[1] = silent
    status, _, error = tool(capsys, *words, f"--output={tmp_path / 'no'}")
    assert status == 2
    assert "silent.safetensors does not say which one it is for" in error
    save_file(load_file(file), silent, {"modelspec.timestep_range": "0,875"})
    assert tool(capsys, *words, f"--output={tmp_path / 'range'}")[0] == 0
    assert changed_experts(case, tmp_path / "range") == ["transformer_2"]
    words.append("--component=transformer")
    assert tool(capsys, *words, f"--output={tmp_path / 'asked'}")[0] == 0
    assert changed_experts(case, tmp_path / "asked") == ["transformer"]
    if names == "diffusers":
        tensors = load_file(file)
        second = {"transformer_2." + n.partition(".")[2]: t.clone() for n, t in tensors.items()}
        save_file(tensors | second, tmp_path / "both.safetensors")
        words = ["merge", tmp_path / "both.safetensors", "--weight=1", into]
        assert tool(capsys, *words, f"--output={tmp_path / 'two'}")[0] == 0
        assert changed_experts(case, tmp_path / "two") == ["transformer", "transformer_2"]


@pytest.mark.slow
def test_an_extracted_lora_says_which_expert_it_is_for(
    wan: tuple[Case, Path], tmp_path: Path, capsys: Any
) -> None:
    case, directory = wan
    into, tuned = f"--into={case.paths.model}", tmp_path / "tuned"
    words = ["merge", file_of(directory, "kohya"), "--weight=1", into, f"--output={tuned}"]
    assert tool(capsys, *words)[0] == 0
    out = tmp_path / "x.safetensors"
    words = ["extract", tuned, case.paths.model, "--rank=3", f"--output={out}"]
    assert "the models have two denoisers" in tool(capsys, *words)[2]
    assert tool(capsys, *words, "--component=transformer_2")[0] == 0
    words = ["merge", out, "--weight=1", into, f"--output={tmp_path / 'again'}"]
    assert tool(capsys, *words)[0] == 0
    assert changed_experts(case, tmp_path / "again") == ["transformer_2"]


def test_several_files_stay_several(
    case: Case, one: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: Any
) -> None:
    """With an index, and through the links of a hub cache."""
    root, blobs = tmp_path / "base", tmp_path / "blobs"
    model = FluxTransformer2DModel.from_pretrained(case.paths.model / "transformer")
    model.save_pretrained(blobs, max_shard_size=300_000)
    root.mkdir()
    for path in blobs.iterdir():
        (root / path.name).symlink_to(path)
    assert len([*root.glob("*.safetensors")]) > 2
    words = ["merge", file_of(one[0], "kohya"), "--weight=1", f"--into={root}"]
    assert tool(capsys, *words, f"--output={tmp_path / 'out'}")[0] == 0
    assert {p.name for p in (tmp_path / "out").iterdir()} == {p.name for p in root.iterdir()}
    merged = FluxTransformer2DModel.from_pretrained(tmp_path / "out")
    before = model.state_dict()
    changes = {name: tensor - before[name] for name, tensor in merged.state_dict().items()}
    expected = {f"{name}.weight": delta for name, delta in one[1].items()}
    assert_close({name: t for name, t in changes.items() if t.any()}, expected, 1e-4)


def test_one_of_several_sets_of_weights_is_written(
    case: Case, one: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: Any
) -> None:
    """What is not merged would be another model under the same roof."""
    root, out = tmp_path / "base", tmp_path / "out"
    shutil.copytree(case.paths.model, root)
    place = root / "transformer"
    shutil.copy(
        place / "diffusion_pytorch_model.safetensors",
        place / "diffusion_pytorch_model.fp16.safetensors",
    )
    (root / "flux1-dev.safetensors").write_bytes(b"the same in one file")
    words = ["merge", file_of(one[0], "comfyui"), "--weight=1", f"--into={root}"]
    assert tool(capsys, *words, f"--output={out}")[0] == 0
    assert {path.name for path in (out / "transformer").iterdir()} == {
        "config.json",
        "diffusion_pytorch_model.safetensors",
    }
    assert not (out / "flux1-dev.safetensors").exists()


@pytest.mark.parametrize("names", ["diffusers", "kohya"])
def test_an_sdxl_checkpoint_gets_what_its_unet_does(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, capsys: Any, names: str
) -> None:
    case = Case("sdxl", toys_root(tmp_path_factory))
    directory, deltas = exported(case, tmp_path / "a")
    weights = {n: tuple(t.shape) for n, t in weights_of(case.paths.model / "unet").items()}
    layout = sdxl_layout(weights)
    files = {}
    for name, change in (("base", 0.0), ("expected", 1.0)):
        tensors = dict(weights_of(case.paths.model / "unet"))
        for module, delta in deltas.items():
            weight = tensors[f"{module}.weight"]
            tensors[f"{module}.weight"] = weight + change * delta.view(weight.shape)
        files[name] = tmp_path / f"{name}.safetensors"
        made = {key: part.make(tensors).contiguous() for key, part in layout.items()}
        save_file({key: tensor.clone() for key, tensor in made.items()}, files[name])
    out = tmp_path / "out.safetensors"
    words = ["merge", file_of(directory, names), "--weight=1", f"--into={files['base']}"]
    status, _, error = tool(capsys, *words, f"--output={out}")
    assert (status, error) == (0, "")
    assert_close(load_file(out), load_file(files["expected"]), 1e-6)


def test_an_sdxl_checkpoints_text_encoders_get_theirs(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, capsys: Any
) -> None:
    """Of the second, query, key and value are one layer there."""
    case = Case("sdxl", toys_root(tmp_path_factory))
    root, tensors = case.paths.model, {}
    for part in ("vae", "text_encoder", "text_encoder_2"):
        (file,) = (root / part).glob("*.safetensors")
        tensors |= {f"{part}/{name}": tensor for name, tensor in load_file(file).items()}
    layout = sdxl_layout({name: tuple(tensor.shape) for name, tensor in tensors.items()})
    before = {name: part.make(tensors).clone() for name, part in layout.items()}
    base, out = tmp_path / "base.safetensors", tmp_path / "out.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in before.items()}, base)
    first = (
        "conditioner.embedders.0.transformer.text_model.encoder.layers.0.self_attn.q_proj.weight"
    )
    (block,) = {
        name.partition("attn.")[0]
        for name in before
        if name.endswith("resblocks.0.attn.in_proj_weight")
    }
    wide = before[f"{block}attn.in_proj_weight"].shape[1]
    targets = {
        "lora_te1_text_model_encoder_layers_0_self_attn_q_proj": (first, slice(None)),
        "lora_te2_text_model_encoder_layers_0_self_attn_k_proj": (
            f"{block}attn.in_proj_weight",
            slice(wide, 2 * wide),
        ),
        "lora_te2_text_model_encoder_layers_0_mlp_fc2": (f"{block}mlp.c_proj.weight", slice(None)),
    }
    lora_tensors, expected = {}, {name: tensor.clone() for name, tensor in before.items()}
    for module, (name, rows) in targets.items():
        height, width = before[name][rows].shape
        down, up = torch.randn(2, width), torch.randn(height, 2)
        lora_tensors[f"{module}.lora_down.weight"] = down
        lora_tensors[f"{module}.lora_up.weight"] = up
        lora_tensors[f"{module}.alpha"] = torch.tensor(4.0)
        expected[name][rows] += 2 * up @ down
    save_file(lora_tensors, tmp_path / "te.safetensors")
    words = ["merge", tmp_path / "te.safetensors", "--weight=1", f"--into={base}"]
    status, _, error = tool(capsys, *words, f"--output={out}")
    assert (status, error) == (0, "")
    assert_close(load_file(out), expected, 1e-6)
