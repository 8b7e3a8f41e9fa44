"""`fsdp-tui lora`: what it prints, and what it refuses in one sentence each."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.loras.__main__ import main
from jobs.errors import UserError
from jobs.service import loras

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.tui.shell import Shell

QKV = "diffusion_model.double_blocks.0.img_attn.qkv"
FLUX_MODEL = "double_blocks.0.img_attn.qkv.weight"


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The tool runs in this process; the export's tests start a real one."""

    def ask(module: str, words: list[str], answer: Any, on_line: Any, cancelled: Any) -> Any:
        assert module == "engine.loras"
        capsys.readouterr()
        status = main(words)
        out, err = capsys.readouterr()
        for line in err.splitlines():
            on_line(line)
        if status:
            raise UserError(err.splitlines()[-1].removeprefix("fsdp-tui: "))
        return json.loads(out)

    monkeypatch.setattr(loras, "ask", ask)


@dataclass
class Result:
    """What the command printed, and its exit status."""

    status: int
    out: str
    err: str


def run(shell: Shell, *words: object) -> Result:
    return Result(*shell("lora", *map(str, words)))


def lora_file(path: Path, key: str = QKV, rank: int = 2, wide: int = 4, **more: Any) -> Path:
    """Write a LoRA of one layer of 6 outputs."""
    ends = ("lora_down.weight", "lora_up.weight")
    ends = ends if key.startswith("lora_") else ("lora_A.weight", "lora_B.weight")
    draw = torch.Generator().manual_seed(rank)
    shapes = dict(zip(ends, ((rank, wide), (6, rank)), strict=True))
    tensors = {f"{key}.{end}": torch.randn(s, generator=draw) for end, s in shapes.items()}
    save_file(tensors | {f"{key}.{end}": value for end, value in more.items()}, path)
    return path


def test_it_says_what_was_made(tmp_path: Path, shell: Shell) -> None:
    first, second = (lora_file(tmp_path / f"{n}.safetensors", rank=n) for n in (1, 2))
    out = tmp_path / "m.safetensors"
    made = run(shell, "merge", f"{first}=0.5", second, "--output", out)
    assert (made.status, made.out) == (0, f"{out}\n")
    assert made.err.splitlines()[-1] == "fsdp-tui: 1 modules of rank 3"
    small = run(shell, "resize", out, "--rank=1", "--output", tmp_path / "r", "--json")
    assert json.loads(small.out)["ranks"] == [1]
    shown = run(shell, "info", out)
    assert "rank       3" in shown.out
    assert "names of comfyui" in shown.out
    assert "flux" in shown.out
    base = tmp_path / "base.safetensors"
    save_file({FLUX_MODEL: torch.zeros(6, 4), "x.bias": torch.zeros(3)}, base)
    tuned = run(shell, "merge", out, "--into", base, "--output", tmp_path / "t.safetensors")
    assert "1 layers changed" in tuned.err
    weights = load_file(tmp_path / "t.safetensors")
    save_file(weights | {"x.bias": torch.ones(3)}, tmp_path / "t.safetensors")
    words = ["extract", tmp_path / "t.safetensors", base, "--rank=2"]
    back = run(shell, *words, "--output", tmp_path / "x.safetensors")
    assert back.status == 0
    assert "1 other tensors differ" in back.err


def test_what_has_no_effect_is_said(tmp_path: Path, shell: Shell) -> None:
    files = [lora_file(tmp_path / f"{name}.safetensors") for name in "ab"]
    made = run(shell, "merge", files[0], f"{files[1]}=0", "--output", tmp_path / "m")
    assert f"warning: {files[1]} has weight 0 and adds nothing" in made.err
    words = ["resize", files[0], "--rank=64", "--output", tmp_path / "r"]
    made = run(shell, *words)
    assert f"warning: {files[0]} has no layer of a higher rank: nothing was cut" in made.err
    assert (made.status, "keep" in made.err) == (0, False)
    cut = run(shell, "resize", files[0], "--rank=1", "--output", tmp_path / "s")
    assert ("warning" in cut.err, "modules of rank 1 keep " in cut.err) == (False, True)


def test_pefts_configuration_is_shown_in_json_alone(tmp_path: Path, shell: Shell) -> None:
    file = lora_file(tmp_path / "a.safetensors", "transformer.x")
    out = tmp_path / "m.safetensors"
    assert run(shell, "merge", file, "--output", out).status == 0
    assert "lora_adapter_metadata" not in run(shell, "info", out).out
    assert "lora_adapter_metadata" in json.loads(run(shell, "info", out, "--json").out)["header"]


def bad_alpha(root: Path, alpha: float = 0.0) -> list[Any]:
    key = QKV.replace("diffusion_model.", "lora_unet_").replace(".blocks", "_blocks")
    return ["info", lora_file(root / "a.safetensors", key, alpha=torch.tensor(alpha))]


def nan_alpha(root: Path) -> list[Any]:
    return bad_alpha(root, float("nan"))


def a_text(root: Path) -> list[Any]:
    (root / "notes.txt").write_text("a text that is no LoRA")
    return ["info", root / "notes.txt"]


def unwritable(root: Path) -> list[Any]:
    return ["resize", lora_file(root / "a.safetensors"), "--rank=1", "--output", "/proc/x"]


def no_alpha(root: Path) -> list[Any]:
    tensors = load_file(lora_file(root / "b.safetensors", "lora_unet_y"))
    tensors |= load_file(lora_file(root / "a.safetensors", "lora_unet_x", alpha=torch.tensor(2.0)))
    save_file(tensors, root / "a.safetensors")
    return ["info", root / "a.safetensors"]


def other_family(root: Path) -> list[Any]:
    one = lora_file(root / "a.safetensors")
    other = lora_file(root / "b.safetensors", "diffusion_model.joint_blocks.0.x_block.attn.qkv")
    return ["merge", one, other, "--output", root / "m"]


def other_denoiser(root: Path) -> list[Any]:
    one = lora_file(root / "a.safetensors", "transformer.blocks.0.attn1.to_q")
    other = lora_file(root / "b.safetensors", "transformer_2.blocks.0.attn1.to_q")
    return ["merge", one, other, "--output", root / "m"]


def other_names(root: Path) -> list[Any]:
    one = lora_file(root / "a.safetensors")
    other = lora_file(root / "b.safetensors", "lora_unet_double_blocks_0_img_attn_qkv")
    return ["merge", one, other, "--output", root / "m"]


def other_size(root: Path) -> list[Any]:
    one = lora_file(root / "a.safetensors")
    return ["merge", one, lora_file(root / "b.safetensors", wide=8), "--output", root / "m"]


def unknown_layer(root: Path) -> list[Any]:
    save_file({"single_blocks.0.linear1.weight": torch.zeros(6, 4)}, root / "base.safetensors")
    words = ["merge", lora_file(root / "a.safetensors"), "--into", root / "base.safetensors"]
    return [*words, "--output", root / "m"]


def wrong_layer(root: Path) -> list[Any]:
    save_file({FLUX_MODEL: torch.zeros(6, 5)}, root / "base.safetensors")
    words = ["merge", lora_file(root / "a.safetensors"), "--into", root / "base.safetensors"]
    return [*words, "--output", root / "m"]


def wrong_converted(root: Path) -> list[Any]:
    """A LoRA of diffusers' names for a model of another width in its authors' layout."""
    save_file(
        {"double_blocks.0.img_attn.proj.weight": torch.zeros(6, 5)}, root / "base.safetensors"
    )
    key = "transformer.transformer_blocks.0.attn.to_out.0"
    words = ["merge", lora_file(root / "a.safetensors", key), "--into", root / "base.safetensors"]
    return [*words, "--output", root / "m"]


def wrong_rank(root: Path) -> list[Any]:
    tensors = load_file(lora_file(root / "a.safetensors"))
    tensors[f"{QKV}.lora_B.weight"] = torch.ones(6, 3)
    save_file(tensors, root / "a.safetensors")
    return ["resize", root / "a.safetensors", "--rank=1", "--output", root / "m"]


def half_a_lokr(root: Path) -> list[Any]:
    save_file({f"{QKV}.lokr_w1": torch.ones(2, 2)}, root / "a.safetensors")
    return ["info", root / "a.safetensors"]


def packed(root: Path) -> list[Any]:
    narrow = torch.zeros(6, 4).to(torch.float8_e4m3fn)
    save_file({FLUX_MODEL: narrow}, root / "base.safetensors")
    words = ["merge", lora_file(root / "a.safetensors"), "--into", root / "base.safetensors"]
    return [*words, "--output", root / "m"]


def exists(root: Path) -> list[Any]:
    file = lora_file(root / "a.safetensors")
    return ["resize", file, "--rank=1", "--output", file]


def no_folder(root: Path) -> list[Any]:
    file = lora_file(root / "a.safetensors")
    return ["resize", file, "--rank=1", "--output", root / "gone" / "b"]


def empty(root: Path) -> list[Any]:
    (root / "a.safetensors").touch()
    return ["info", root / "a.safetensors"]


def loha(root: Path) -> list[Any]:
    save_file({"lycoris_x.hada_w1_a": torch.ones(2, 2)}, root / "a.safetensors")
    return ["info", root / "a.safetensors"]


def dora_of_inputs(root: Path) -> list[Any]:
    return ["info", lora_file(root / "a.safetensors", dora_scale=torch.ones(1, 4))]


def dora_resized(root: Path) -> list[Any]:
    file = lora_file(root / "a.safetensors", dora_scale=torch.ones(6, 1))
    return ["resize", file, "--rank=1", "--output", root / "m"]


def dora_weighted(root: Path) -> list[Any]:
    save_file({FLUX_MODEL: torch.zeros(6, 4)}, root / "base.safetensors")
    file = lora_file(root / "a.safetensors", dora_scale=torch.ones(6, 1))
    return ["merge", f"{file}=0.5", "--into", root / "base.safetensors", "--output", root / "m"]


def text_layers(root: Path) -> list[Any]:
    save_file({FLUX_MODEL: torch.zeros(6, 4)}, root / "base.safetensors")
    file = lora_file(root / "a.safetensors", "lora_te1_text_model_encoder_layers_0_mlp_fc1")
    return ["merge", file, "--into", root / "base.safetensors", "--output", root / "m"]


REFUSED: dict[str, Callable[[Path], list[Any]]] = {
    "the alpha of lora_unet_double_blocks.0.img_attn.qkv is 0, which some tools": bad_alpha,
    "qkv is not a finite number": nan_alpha,
    "is damaged (its header exceeds the file); give a LoRA in a safetensors file": a_text,
    "cannot write /proc/x (": unwritable,
    "lora_unet_y has no alpha, and other modules have one": no_alpha,
    "a.safetensors is for flux, chroma": other_family,
    "a.safetensors is for transformer and ": other_denoiser,
    "a.safetensors has names of comfyui and ": other_names,
    f"{QKV} has other sizes in ": other_size,
    f"a.safetensors changes {QKV}, which": unknown_layer,
    f"a.safetensors: {QKV} has another size than the model's layer": wrong_layer,
    "a.safetensors also changes text encoders, and": text_layers,
    "a.safetensors: diffusion_model.double_blocks.0.img_attn.proj has another": wrong_converted,
    f"a.safetensors: the matrices of {QKV} do not": wrong_rank,
    f"the matrices of {QKV} do not fit each other": half_a_lokr,
    "is stored as float8_e4m3fn; merge into the bf16": packed,
    "a.safetensors exists; choose another --output": exists,
    "gone is not a directory": no_folder,
    "a.safetensors is empty": empty,
    "cannot use a.safetensors: it is a LoHa": loha,
    "has a length for each input, not for each output": dora_of_inputs,
    "a.safetensors is a DoRA, which cannot be resized exactly": dora_resized,
    "a DoRA can only be merged alone and at weight 1": dora_weighted,
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_done_is_one_sentence(tmp_path: Path, shell: Shell, why: str) -> None:
    words = REFUSED[why](tmp_path)
    before = {path.name for path in tmp_path.iterdir()}
    result = run(shell, *words)
    assert result.status == 2
    assert why.replace("flux, chroma", "chroma or flux") in result.err
    assert len(result.err.splitlines()) == 1
    assert {path.name for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["merge", "a.safetensors=nan", "--output", "m"], "nan is no weight"),
        (["merge", "a.safetensors=x", "--output", "m"], "x is no weight"),
        (["merge", "a.safetensors", "--output", "m"], "there is no LoRA at"),
        (["merge", "a", "--into", "b", "--rank=2", "--output", "m"], "--rank and --dtype are for"),
        (["merge", "a", "--component=transformer", "--output", "m"], "give it --into"),
        (["resize", "a", "--output", "m"], "give either --rank or --energy"),
        (["resize", "a", "--energy=nan", "--output", "m"], "--energy is a share of all"),
        (["extract", "a", "b", "--rank=1", "--energy=0.5", "--output", "m"], "give either"),
    ],
)
def test_words_that_make_no_sense_are_refused(shell: Shell, words: list[str], why: str) -> None:
    result = run(shell, *words)
    assert (result.status, why in result.err) == (2, True)


@pytest.mark.parametrize("name", ["a" * 300, "~/style=b.safetensors", "shut/a=x.safetensors"])
def test_a_place_that_cannot_be_read_is_one_sentence(
    tmp_path: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A path with = in it is one where there is such a file, also below a home directory."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    lora_file(tmp_path / "style=b.safetensors")

    def shut(path: Path) -> bool:
        if "shut" in path.parts:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return os.path.exists(path)

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.exists", shut)
        result = run(shell, "merge", name, "--output", tmp_path / "m.safetensors")
    assert result.status == (0 if name.startswith("~") else 2)
    assert result.err.splitlines()[-1].startswith("fsdp-tui: ")


def test_a_full_disk_leaves_nothing(
    tmp_path: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is seen before, or while writing."""
    file = lora_file(tmp_path / "a.safetensors")
    words = ["resize", file, "--rank=1", "--output", tmp_path / "m.safetensors"]

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(
            "engine.loras.lora_file.shutil.disk_usage", lambda _: type("", (), {"free": 9})
        )
        before = run(shell, *words)
    monkeypatch.setattr("engine.model.files.safetensors_writer.os.pwrite", full)
    during = run(shell, *words)
    assert "takes 40 B, and 9 B are free; free some space" in before.err
    assert "No space left on device" in during.err
    assert (before.status, during.status) == (2, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]
