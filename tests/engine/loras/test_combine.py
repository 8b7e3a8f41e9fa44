"""LoRAs made of LoRAs: exact sums, and truncated SVDs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from diffusers import FluxPipeline
from peft.tuners.lora import LoraLayer
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from engine.loras.combine import factors, rank_of
from engine.model.adapters.lora_file import read_lora
from tests.support.engine.families import Case, toys_root
from tests.support.engine.loras import assert_close, deltas_of, exported, tool

if TYPE_CHECKING:
    from pathlib import Path

FILES = {
    "diffusers": "pytorch_lora_weights.safetensors",
    "kohya": "flux-kohya.safetensors",
    "comfyui": "flux-comfyui.safetensors",
}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("flux", toys_root(tmp_path_factory))


@pytest.fixture(scope="module")
def two(case: Case, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two LoRAs, of other ranks, and one with fewer layers."""
    root = tmp_path_factory.mktemp("two")
    first, _ = exported(case, root / "a")
    other = {"lora_rank": 2, "lora_variant": "rslora", "lora_target_modules": ["to_q", "to_k"]}
    second, _ = exported(case, root / "b", seed=2, **other)
    return first, second


@pytest.mark.parametrize("names", FILES)
def test_a_merged_lora_adds_what_all_add(
    two: tuple[Path, Path], tmp_path: Path, capsys: Any, names: str
) -> None:
    files, out = [each / FILES[names] for each in two], tmp_path / "m.safetensors"
    status, answer, error = tool(
        capsys, "merge", *files, "--weight=0.8", "--weight=-0.5", f"--output={out}"
    )
    assert (status, error) == (0, "")
    first, second = (deltas_of(file) for file in files)
    expected = {name: 0.8 * delta for name, delta in first.items()}
    for name, delta in second.items():
        expected[name] = expected[name] - 0.5 * delta
    assert_close(deltas_of(out), expected)
    assert json.loads(answer)["modules"] == len(expected)
    stored, header = read_lora(out)
    assert stored.keys() == expected.keys()
    assert header["modelspec.merged_from"] == "flux, flux"
    assert header["modelspec.hash_sha256"] != "0x" + 64 * "0"
    assert not any("alpha" in parts for parts in stored.values()) or names == "kohya"
    assert "fsdp_tui.job" not in header


@pytest.mark.parametrize(
    ("key", "first", "second"),
    [
        ("fsdp_tui.component", "transformer", "transformer_2"),
        ("modelspec.timestep_range", "875,1000", "0,875"),
        ("fsdp_tui.model_flavour", "2.2-t2v-a14b-high", "2.2-t2v-a14b-low"),
    ],
)
def test_loras_of_two_denoisers_are_not_merged_into_one(
    tmp_path: Path, capsys: Any, key: str, first: str, second: str
) -> None:
    """Also where a file between them does not say which it is for."""
    tensors = {
        "diffusion_model.blocks.0.self_attn.q.lora_A.weight": torch.ones(2, 4),
        "diffusion_model.blocks.0.self_attn.q.lora_B.weight": torch.ones(4, 2),
    }
    headers = {"x": None, "a": {key: first}, "b": {key: second}}
    for name, header in headers.items():
        save_file(tensors, tmp_path / name, header)
    words = ["--weight=1", "--weight=1", f"--output={tmp_path / 'm'}"]
    files = {name: tmp_path / name for name in headers}
    status, _, error = tool(capsys, "merge", *files.values(), "--weight=1", *words)
    assert (status, "which are two denoisers; keep a file for each" in error) == (2, True)
    assert tool(capsys, "merge", files["x"], files["b"], *words)[0] == 0


def test_diffusers_loads_a_merged_lora_like_two_adapters(
    case: Case, two: tuple[Path, Path], tmp_path: Path, capsys: Any
) -> None:
    """Layers of several ranks: each pattern is of one module only."""
    files, out = [each / FILES["diffusers"] for each in two], tmp_path / "m.safetensors"
    assert tool(capsys, "merge", *files, "--weight=1", "--weight=2", f"--output={out}")[0] == 0
    own = {m.removeprefix("transformer."): delta for m, delta in deltas_of(out).items()}
    pipeline = FluxPipeline.from_pretrained(case.paths.model)
    pipeline.load_lora_weights(tmp_path, weight_name=out.name)
    found = {
        name: module.get_delta_weight(next(iter(module.scaling)))
        for name, module in pipeline.transformer.named_modules()
        if isinstance(module, LoraLayer)
    }
    assert_close(found, own)
    with safe_open(out, framework="pt") as opened:
        config = json.loads(opened.metadata()["lora_adapter_metadata"])
    assert config["transformer.target_modules"] == sorted(own)
    assert all(key.startswith("^") for key in config["transformer.rank_pattern"])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_resized_lora_is_the_truncated_svd(
    two: tuple[Path, Path], tmp_path: Path, capsys: Any, dtype: str
) -> None:
    file, out = two[0] / FILES["comfyui"], tmp_path / "r.safetensors"
    status, answer, _ = tool(
        capsys, "resize", file, "--rank=2", f"--dtype={dtype}", f"--output={out}"
    )
    assert status == 0
    expected, kept = {}, []
    for name, delta in deltas_of(file).items():
        left, values, right = torch.linalg.svd(delta.double(), full_matrices=False)
        expected[name] = (left[:, :2] * values[:2] @ right[:2]).float()
        kept.append(float(values[:2].square().sum() / values.square().sum()))
    assert_close(deltas_of(out), expected, 1e-5 if dtype == "fp32" else 1e-2)
    assert json.loads(answer)["kept"]["least"] == pytest.approx(min(kept))
    assert {tensor.dtype for tensor in load_file(out).values()} == {
        torch.float32 if dtype == "fp32" else torch.bfloat16
    }


def test_merging_with_a_rank_is_the_svd_of_the_sum(
    two: tuple[Path, Path], tmp_path: Path, capsys: Any
) -> None:
    files, out = [each / FILES["diffusers"] for each in two], tmp_path / "m.safetensors"
    words = ["merge", *files, "--weight=1", "--weight=1", "--rank=4", f"--output={out}"]
    assert tool(capsys, *words)[0] == 0
    first, second = (deltas_of(file) for file in files)
    expected = {}
    for name, delta in first.items():
        whole = (delta + second.get(name, torch.zeros_like(delta))).double()
        left, values, right = torch.linalg.svd(whole, full_matrices=False)
        expected[name] = (left[:, :4] * values[:4] @ right[:4]).float()
    assert_close(deltas_of(out), expected)


def test_an_energy_keeps_the_least_rank_that_has_it(
    two: tuple[Path, Path], tmp_path: Path, capsys: Any
) -> None:
    file, out = two[0] / FILES["kohya"], tmp_path / "r.safetensors"
    status, answer, _ = tool(capsys, "resize", file, "--energy=0.7", f"--output={out}")
    assert status == 0
    assert json.loads(answer)["kept"]["least"] >= 0.7
    for name, delta in deltas_of(file).items():
        values = torch.linalg.svdvals(delta.double()).square()
        rank = int((values.cumsum(0) < 0.7 * values.sum()).sum()) + 1
        assert load_file(out)[f"{name}.lora_down.weight"].shape[0] == rank


def test_factors_are_those_of_the_product_where_the_rank_exceeds_the_layer() -> None:
    draw = torch.Generator().manual_seed(1)
    up, down = torch.randn(4, 9, generator=draw), torch.randn(9, 6, generator=draw)
    left, values, right = factors(down, up)
    assert torch.allclose((left * values) @ right, (up @ down).double(), atol=1e-5)
    assert torch.allclose(values, torch.linalg.svdvals((up @ down).double()), atol=1e-5)
    assert rank_of(torch.zeros(3), 0.9) == 1


def test_a_peft_file_gets_its_own_configuration(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside an old one, peft and we would scale by that. Both files are there, or none is."""
    names = "base_model.model.transformer_blocks.0.attn1.to_q"
    tensors = {
        f"{names}.lora_A.weight": torch.ones(2, 4),
        f"{names}.lora_B.weight": torch.ones(4, 2),
    }
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"r": 2, "lora_alpha": 4}')
    out = tmp_path / "r.safetensors"
    words = ["resize", tmp_path / "adapter_model.safetensors", "--rank=1"]
    assert tool(capsys, *words, f"--output={out}")[0] == 0
    assert_close(deltas_of(out), {names: torch.full((4, 4), 4.0)})
    answer = tool(capsys, "info", out)[1]
    assert json.loads(answer)["alphas"] == {"1": 1}
    other = tmp_path / "new"
    other.mkdir()
    whole = other / "adapter_model.safetensors"
    with monkeypatch.context() as patch:
        patch.setattr("engine.loras.lora_file.os.rename", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            tool(capsys, *words, f"--output={whole}")
    assert list(other.iterdir()) == []
    assert tool(capsys, *words, f"--output={whole}")[0] == 0
    assert json.loads((other / "adapter_config.json").read_text())["lora_alpha"] == 1
    assert "modelspec.hash_sha256" not in read_lora(whole)[1]
    whole.unlink()
    comfyui = {
        name.replace("base_model.model", "diffusion_model"): t for name, t in tensors.items()
    }
    save_file(comfyui, tmp_path / "comfyui.safetensors")
    (tmp_path / "bare").mkdir()
    bare = tmp_path / "bare" / whole.name
    more = ["resize", tmp_path / "comfyui.safetensors", "--rank=1", f"--output={bare}"]
    assert tool(capsys, *more)[0] == 0
    assert list(bare.parent.iterdir()) == [bare], "these names need none"
    assert "adapter_config.json exists" in tool(capsys, *words, f"--output={whole}")[2]


def test_info_says_what_a_file_is(two: tuple[Path, Path], capsys: Any) -> None:
    for names, file in FILES.items():
        status, answer, _ = tool(capsys, "info", two[0] / file)
        found = json.loads(answer)
        deltas = deltas_of(two[0] / file)
        assert (status, found["names"], found["kind"]) == (0, names, "LoRA")
        assert found["families"] == ["flux"]
        assert found["modules"] == len(deltas)
        assert sum(found["ranks"].values()) == len(deltas)
        assert found["alphas"] == found["ranks"]
        largest = max(float(delta.norm()) for delta in deltas.values())
        assert max(found["norm"]["largest"].values()) == pytest.approx(largest, rel=1e-5)


@pytest.mark.parametrize("kernel", [(), (1, 1)])
def test_a_convolution_of_1x1_may_be_a_linear_layer(
    tmp_path: Path, capsys: Any, kernel: tuple[int, ...]
) -> None:
    """In either file, and in the model."""
    draw, key = torch.Generator().manual_seed(3), "lora_unet_input_blocks_4_1_proj_in"
    files, weights = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"], []
    for file, shape in zip(files, (kernel, (1, 1)[len(kernel) :]), strict=True):
        down = torch.randn(2, 4, *shape, generator=draw)
        up = torch.randn(6, 2, *shape, generator=draw)
        tensors = {f"{key}.lora_down.weight": down, f"{key}.lora_up.weight": up}
        save_file(tensors | {f"{key}.alpha": torch.tensor(2.0)}, file)
        weights.append(up.flatten(1) @ down.flatten(1))
    out = tmp_path / "m.safetensors"
    words = ["merge", *files, "--weight=1", "--weight=2"]
    assert tool(capsys, *words, f"--output={out}")[0] == 0
    expected = weights[0] + 2 * weights[1]
    assert_close(deltas_of(out), {key: expected})
    assert load_file(out)[f"{key}.lora_down.weight"].shape == (4, 4, *kernel)
    name = "model.diffusion_model.input_blocks.4.1.proj_in.weight"
    for shape in ((6, 4), (6, 4, 1, 1)):
        base, merged = tmp_path / f"base{len(shape)}", tmp_path / f"out{len(shape)}"
        save_file({name: torch.zeros(shape)}, base)
        assert tool(capsys, *words, f"--into={base}", f"--output={merged}")[0] == 0
        assert_close(load_file(merged), {name: expected.view(shape)})
