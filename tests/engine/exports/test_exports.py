"""Exports of one rank: what stock diffusers makes of them, and what happens when one fails."""

from __future__ import annotations

import errno
import json
import os
import shutil
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from safetensors import safe_open
from safetensors.torch import load_file

from engine.diffusion.random_numbers import keyed_generator
from engine.exports import model as whole_model
from engine.exports import writing
from engine.exports.readback import DamagedError, VerifiedFile
from engine.exports.recipe import describe
from engine.exports.stock import copy_or_link, files_of, read_index
from engine.families import load
from engine.families.shared.lora_names import Layout
from engine.model.adapters import lora
from jobs.errors import NotFiniteError, UserError
from jobs.run.export_places import export_facts
from jobs.run.rundir import read_json
from tests.support.engine.exports import bytes_of, export_alone, recipe_of, trained_model
from tests.support.engine.toy_jobs import toy_spec

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

flux = load("flux")

# Diffusers' converter of kohya's names knows single blocks only in the published width: the toy's
# have no adapter here. Of each fused layer of a double block some members are missing.
DOUBLE_BLOCKS = [
    f"transformer_blocks.{number}.{part}"
    for number in range(2)
    for part in (
        "attn.to_q",
        "attn.to_v",
        "attn.add_v_proj",
        "attn.to_out.0",
        "ff.net.2",
        "norm1.linear",
    )
]


def picture(pipeline: FluxPipeline) -> NDArray[Any]:
    """What a stock pipeline makes of one prompt, seed and number of steps."""
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        prompt="a red circle",
        height=64,
        width=64,
        num_inference_steps=2,
        guidance_scale=3.5,
        max_sequence_length=16,
        generator=keyed_generator(0),
        output_type="np",
    ).images[0]


# -- LoRA ----------------------------------------------------------------------------------


def test_an_exported_lora_gives_the_picture_of_the_trained_model(toy: Path, tmp_path: Path) -> None:
    """With an alpha of its own; the directory has kohya's file too."""
    spec = toy_spec(toy, lora_rank=3, lora_alpha=5)
    model = trained_model(spec, toy / "model")
    with torch.no_grad():
        trained = picture(FluxPipeline.from_pretrained(toy / "model", transformer=model))
    made = export_alone(model, recipe_of(spec, toy / "model"), tmp_path / "export")
    pipeline = FluxPipeline.from_pretrained(toy / "model")
    plain = picture(pipeline)
    pipeline.load_lora_weights(made.path)
    assert abs(picture(pipeline) - trained).max() < 1e-5
    assert abs(plain - trained).max() > 1e-2
    assert made.warnings == ()
    names = {"pytorch_lora_weights.safetensors", "t-kohya.safetensors", "export.json"}
    assert {path.name for path in made.path.iterdir()} == names


def test_an_older_checkpoints_adapters_of_layers_without_a_loss_are_left_out(
    toy: Path, tmp_path: Path
) -> None:
    """As it was saved before such layers had no adapter; nothing warns of them."""
    spec = toy_spec(toy, lora_rank=2, export_formats=["diffusers"])
    made = []
    for number, without in enumerate(("", r"\.ff\.")):
        recipe = recipe_of(spec, toy / "model")
        recipe.family.without_gradient = lambda model, spec, names=without: names  # type: ignore[method-assign]
        with warnings.catch_warnings():
            warnings.filterwarnings("error", module="peft")
            exported = export_alone(
                trained_model(spec, toy / "model"), recipe, tmp_path / f"{number}/export"
            )
        made.append(load_file(exported.path / "pytorch_lora_weights.safetensors"))
    every, fewer = made
    assert {name for name in every if ".ff." not in name} == fewer.keys() < every.keys()
    assert all(torch.equal(tensor, every[name]) for name, tensor in fewer.items())


def test_kohyas_names_give_the_same_picture(toy: Path, tmp_path: Path) -> None:
    spec = toy_spec(toy, lora_rank=3, lora_alpha=5, lora_target_modules=DOUBLE_BLOCKS)
    model = trained_model(spec, toy / "model")
    with torch.no_grad():
        trained = picture(FluxPipeline.from_pretrained(toy / "model", transformer=model))
    made = export_alone(model, recipe_of(spec, toy / "model"), tmp_path / "export")
    for name in ("pytorch_lora_weights.safetensors", "t-kohya.safetensors"):
        pipeline = FluxPipeline.from_pretrained(toy / "model")
        pipeline.load_lora_weights(made.path, weight_name=name)
        assert abs(picture(pipeline) - trained).max() < 1e-5, name


def test_headers_say_what_was_trained_and_no_home(toy: Path, tmp_path: Path) -> None:
    spec = toy_spec(toy, trigger_word="sks cat", model_flavour="dev", lora_alpha=8)
    model = trained_model(spec, toy / "model")
    made = export_alone(model, recipe_of(spec, toy / "model", step=7), tmp_path / "export")
    with safe_open(made.path / "pytorch_lora_weights.safetensors", framework="pt") as file:
        header = file.metadata()
    assert header["fsdp_tui.base_model"] == "model"
    assert header["fsdp_tui.step"] == "7"
    assert header["fsdp_tui.trigger_word"] == "sks cat"
    assert header["fsdp_tui.model_flavour"] == "dev"
    job = json.loads(header["fsdp_tui.job"])
    assert (job["lora_rank"], job["lora_alpha"]) == (4, 8.0)
    assert header["fsdp_tui.version"].startswith("fsdp-tui")
    _, config = FluxPipeline.lora_state_dict(made.path, return_lora_metadata=True)
    assert (config["transformer.r"], config["transformer.lora_alpha"]) == (4, 4)
    with safe_open(made.path / "t-kohya.safetensors", framework="pt") as file:
        names = file.metadata()
    assert names["ss_network_module"] == "networks.lora_flux"
    assert (names["ss_network_dim"], names["ss_network_alpha"]) == ("4", "4.0")
    assert "modelspec.trigger_phrase" not in names
    for text in (*header.values(), *names.values()):
        assert str(toy) not in text


def test_only_the_formats_and_the_precision_that_were_asked_for(toy: Path, tmp_path: Path) -> None:
    spec = toy_spec(toy, export_formats="kohya", export_dtype="bfloat16")
    model = trained_model(spec, toy / "model")
    made = export_alone(model, recipe_of(spec, toy / "model"), tmp_path / "export")
    (file,) = made.path.glob("*.safetensors")
    kinds = {t.dtype for n, t in load_file(file).items() if not n.endswith(".alpha")}
    assert (file.name, kinds) == ("t-kohya.safetensors", {torch.bfloat16})


def test_an_adapter_that_changes_nothing_is_told_of_unless_nothing_was_trained(
    toy: Path, tmp_path: Path
) -> None:
    spec = toy_spec(toy, lora_target_modules=["transformer_blocks.0.attn.to_q"])
    model = trained_model(spec, toy / "model")
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.data.zero_()
    before = export_alone(model, recipe_of(spec, toy / "model", step=0), tmp_path / "a")
    assert before.warnings == ()
    after = export_alone(model, recipe_of(spec, toy / "model", step=2), tmp_path / "b")
    assert ["every B is zero" in warning for warning in after.warnings] == [True]
    for name, parameter in model.named_parameters():
        if ".lora_A." in name:
            parameter.data.zero_()
    with pytest.raises(DamagedError, match="incomplete"):
        export_alone(model, recipe_of(spec, toy / "model"), tmp_path / "c")


def test_a_module_without_a_name_in_kohyas_style_costs_only_that_file(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = toy_spec(toy, lora_target_modules=["transformer_blocks.0.attn.to_out.0"])
    model = trained_model(spec, toy / "model")
    monkeypatch.setattr("engine.families.shared.flux_kohya.LAYOUT", Layout({}))
    made = export_alone(model, recipe_of(spec, toy / "model"), tmp_path / "a")
    assert [path.name for path in made.path.glob("*.safetensors")] == [
        "pytorch_lora_weights.safetensors"
    ]
    assert "no name for transformer_blocks.0.attn.to_out.0" in made.warnings[0]
    with pytest.raises(UserError, match="there is no name"):
        export_alone(model, recipe_of(spec, toy / "model", formats=["kohya"]), tmp_path / "b")


def test_formats_that_do_not_fit_cost_no_export(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are noticed when the training is done."""
    full = toy_spec(toy, model_type="full", export_formats="kohya")
    model = trained_model(full, toy / "model")
    made = export_alone(model, recipe_of(full, toy / "model"), tmp_path / "full")
    assert (made.path / "model_index.json").exists()
    assert "other tools' names are for LoRAs" in made.warnings[0]
    monkeypatch.setattr(type(flux), "KOHYA", None)
    spec = toy_spec(toy, export_formats="kohya", lora_target_modules=DOUBLE_BLOCKS)
    trained = trained_model(spec, toy / "model")
    made = export_alone(trained, recipe_of(spec, toy / "model"), tmp_path / "lora")
    assert [path.name for path in made.path.glob("*.safetensors")] == [
        "pytorch_lora_weights.safetensors"
    ]
    assert "flux has no kohya names" in made.warnings[0]


# -- whole models --------------------------------------------------------------------------


def test_a_full_export_is_a_pipeline_with_the_forward_of_the_trained_model(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several files, whose names and index are those of `save_pretrained`."""
    monkeypatch.setattr(whole_model, "LARGEST_FILE", 3_000_000)
    spec = toy_spec(toy, model_type="full")
    model = trained_model(spec, toy / "model")
    with torch.no_grad():
        trained = picture(FluxPipeline.from_pretrained(toy / "model", transformer=model))
    made = export_alone(model, recipe_of(spec, toy / "model"), tmp_path / "export")
    pipeline = FluxPipeline.from_pretrained(made.path)
    weights = pipeline.transformer.state_dict()
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weights[n], tensor) for n, tensor in model.state_dict().items())
    # Some processors round by where in memory a tensor begins, which in a mapped file is anywhere.
    assert np.abs(picture(pipeline) - trained).max() < 1e-5
    model.save_pretrained(tmp_path / "stock", max_shard_size=3_000_000)
    ours = {p.name for p in (made.path / "transformer").iterdir()}
    assert ours == {p.name for p in (tmp_path / "stock").iterdir()}
    index = "diffusion_pytorch_model.safetensors.index.json"
    assert read_json(made.path / "transformer" / index) == read_json(tmp_path / "stock" / index)
    assert len(ours) > 3
    for file in (tmp_path / "stock").glob("*.safetensors"):
        mine = load_file(made.path / "transformer" / file.name)
        assert {n: t.shape for n, t in mine.items()} == {
            n: t.shape for n, t in load_file(file).items()
        }


@pytest.mark.parametrize(
    ("stored", "asked", "expected"),
    [
        ("bfloat16", "auto", torch.bfloat16),
        ("bfloat16", "fp32", torch.float32),
        ("float32", "auto", torch.float32),
        ("float32", "fp16", torch.float16),
    ],
)
def test_whole_weights_are_stored_like_the_base_or_as_asked(
    toy: Path, tmp_path: Path, stored: str, asked: str, expected: torch.dtype
) -> None:
    root = tmp_path / "base"
    shutil.copytree(toy / "model", root)
    transformer = FluxTransformer2DModel.from_pretrained(toy / "model" / "transformer")
    transformer.to(getattr(torch, stored)).save_pretrained(root / "transformer")
    spec = toy_spec(
        toy, model_type="full", export_dtype=asked, pretrained_model_name_or_path=str(root)
    )
    model = trained_model(spec, root)
    made = export_alone(model, recipe_of(spec, root), tmp_path / "export")
    (file,) = (made.path / "transformer").glob("*.safetensors")
    for name, tensor in load_file(file).items():
        assert tensor.dtype is expected
        assert torch.equal(tensor, model.get_parameter(name).to(expected)), name


def test_what_was_not_trained_comes_from_the_base(toy: Path, tmp_path: Path) -> None:
    spec = toy_spec(toy, model_type="full")
    recipe = recipe_of(spec, toy / "model")
    model = trained_model(spec, toy / "model")
    some = {n: p.detach() for n, p in model.named_parameters() if "single" in n}
    facts = {name: (t.dtype, tuple(t.shape)) for name, t in some.items()}
    with writing.Writing(recipe, facts, tmp_path / "export") as export:
        for name, tensor in some.items():
            export.add(name, tensor)
        export.finish()
    base = FluxTransformer2DModel.from_pretrained(toy / "model" / "transformer")
    made = FluxTransformer2DModel.from_pretrained(tmp_path / "export" / "transformer")
    for name, parameter in made.named_parameters():
        assert torch.equal(parameter, some.get(name, base.get_parameter(name))), name


def test_the_other_components_are_the_base_models_files(toy: Path, tmp_path: Path) -> None:
    """Through the links of a hub cache, without what pipelines do not load."""
    blobs, root = tmp_path / "blobs", tmp_path / "snapshot"
    shutil.copytree(toy / "model", root)
    blobs.mkdir()
    weights = root / "text_encoder" / "model.safetensors"
    big = blobs / "0123"
    weights.rename(big)
    with big.open("ab") as file:
        file.truncate(max(big.stat().st_size, 2**20))  # large enough to be linked
    weights.symlink_to("../../blobs/0123")
    (root / "text_encoder" / "pytorch_model.bin").write_bytes(b"the same, pickled")
    (root / "LICENSE.md").write_text("for science only")
    (root / "flux1-dev.safetensors").write_bytes(b"the same model in one file")
    out = tmp_path / "out"
    for copy in files_of(root, read_index(root), {"transformer"}):
        copy_or_link(copy, out)
    found = out / "text_encoder" / "model.safetensors"
    assert not found.is_symlink()
    assert found.read_bytes() == big.read_bytes()
    names = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert {"LICENSE.md", "model_index.json", "transformer/config.json"} <= names
    assert {"tokenizer/vocab.json", "scheduler/scheduler_config.json"} <= names
    assert not any(name.endswith(".bin") or name.startswith("flux1") for name in names)
    assert "transformer/diffusion_pytorch_model.safetensors" not in names


# -- nothing counts before it was read back --------------------------------------------------


@pytest.fixture
def full(toy: Path) -> tuple[Any, Any]:
    """A trained model, and how it is exported."""
    spec = toy_spec(toy, model_type="full")
    return trained_model(spec, toy / "model"), recipe_of(spec, toy / "model")


def test_a_byte_that_changed_on_the_disk_is_found(
    tmp_path: Path, full: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "export"
    export_alone(*full, target)
    before = bytes_of(target)
    stock = VerifiedFile.close

    def damage(file: VerifiedFile) -> None:
        stock(file)
        with file.path.open("r+b") as stream:
            stream.seek(-1, os.SEEK_END)
            last = stream.read(1)
            stream.seek(-1, os.SEEK_END)
            stream.write(bytes([last[0] ^ 1]))

    monkeypatch.setattr(VerifiedFile, "close", damage)
    with pytest.raises(DamagedError, match="differs from memory"):
        export_alone(*full, target)
    assert bytes_of(target) == before
    assert [path.name for path in tmp_path.iterdir() if "export" in path.name] == ["export"]


def test_a_full_disk_is_a_sentence_and_the_old_export_stays(
    tmp_path: Path, full: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "export"
    export_alone(*full, target)
    before = bytes_of(target)
    stock, written = os.pwrite, 0

    def pwrite(file: int, data: Any, at: int) -> int:
        nonlocal written
        written += len(data)
        if written > 1_000_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return stock(file, data, at)

    monkeypatch.setattr("os.pwrite", pwrite)
    with pytest.raises(UserError, match=r"cannot write the export.*No space left.*fsdp-tui export"):
        export_alone(*full, target)
    assert bytes_of(target) == before
    assert [path.name for path in tmp_path.iterdir() if "export" in path.name] == ["export"]


def test_too_little_room_is_noticed_before_anything_is_written(
    tmp_path: Path, full: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = shutil.disk_usage(tmp_path)._replace(free=20_000_000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: free)
    with pytest.raises(UserError, match=r"takes 0.01 GB, and 0.02 GB are free"):
        export_alone(*full, tmp_path / "export")
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize(
    ("value", "asked", "words", "kind"),
    [
        (float("nan"), "auto", "non-finite values: training has diverged", NotFiniteError),
        (1e30, "fp16", "too large for float16; export in bf16", UserError),
    ],
)
def test_numbers_that_nobody_can_use_are_refused(
    toy: Path, tmp_path: Path, value: float, asked: str, words: str, kind: type[UserError]
) -> None:
    spec = toy_spec(toy, model_type="full", export_dtype=asked)
    model = trained_model(spec, toy / "model")
    model.proj_out.bias.data[3] = value
    with pytest.raises(UserError, match=f"proj_out.bias contains .*{words}") as error:
        export_alone(model, recipe_of(spec, toy / "model"), tmp_path / "export")
    assert error.type is kind


def test_a_place_that_cannot_be_is_a_sentence(tmp_path: Path, full: tuple[Any, Any]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write the export to .*file/x \("):
        writing.Writing(full[1], {}, tmp_path / "file" / "x")


def test_what_does_not_fit_is_named(toy: Path, tmp_path: Path, full: tuple[Any, Any]) -> None:
    wrong = {"proj_out.bias": (torch.float32, (3,))}
    with pytest.raises(UserError, match=r"proj_out.bias is \(3,\), but the .* has it as \(64,\)"):
        writing.Writing(full[1], wrong, tmp_path / "export")
    with pytest.raises(UserError, match=r"other is .* base model's transformer does not have it"):
        writing.Writing(full[1], {"other": wrong["proj_out.bias"]}, tmp_path / "export")
    spec = toy_spec(toy, lora_rank=8)
    facts = {
        name: (p.dtype, tuple(p.shape))
        for name, p in lora.lora_parameters(trained_model(spec, toy / "model")).items()
    }
    with pytest.raises(
        UserError, match=r"does not fit the job: .*lora_A.* is \(8, 128\) in the checkpoint"
    ):
        writing.Writing(recipe_of(toy_spec(toy), toy / "model"), facts, tmp_path / "export")
    assert list(tmp_path.iterdir()) == []


def test_another_steps_export_is_kept_under_its_step(toy: Path, tmp_path: Path) -> None:
    spec = toy_spec(toy, lora_target_modules=["transformer_blocks.0.attn.to_q"])
    model, target = trained_model(spec, toy / "model"), tmp_path / "export"
    for step in (2, 3, 3):
        export_alone(model, recipe_of(spec, toy / "model", step=step), target)
    assert (export_facts(target) or {})["step"] == 3
    assert (export_facts(tmp_path / "export-step-2") or {})["step"] == 2
    facts = export_facts(target) or {}
    assert facts["job"] == "t"
    assert facts["files"]["pytorch_lora_weights.safetensors"] > 1000


def test_a_killed_export_leaves_nothing_that_the_next_one_does_not_tidy(tmp_path: Path) -> None:
    target = tmp_path / "export"
    (tmp_path / ".export.77.tmp").mkdir()
    (tmp_path / ".export.old").mkdir()  # killed between two renames
    (tmp_path / ".export.old" / "x").touch()
    with writing.aside_of(target) as mine, writing.aside_of(tmp_path / "other"):
        assert mine.is_dir()
        writing._tidy(target)
        assert mine.is_dir(), "someone is writing there"
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    assert (target / "x").exists()


def test_the_same_step_is_the_same_bytes(toy: Path, tmp_path: Path) -> None:
    spec = toy_spec(toy)
    model, recipe = trained_model(spec, toy / "model"), recipe_of(spec, toy / "model")
    for name in ("a", "b"):
        export_alone(model, recipe, tmp_path / name)
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b")
    assert describe(recipe) == describe(recipe_of(spec, toy / "model"))


@pytest.mark.parametrize("swaps", [True, False])
def test_an_export_of_the_same_step_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swaps: bool
) -> None:
    """At once where the file system can; else with two renames."""
    exchange = writing._exchange
    calls = []

    def seen(aside: Path, target: Path) -> bool:
        calls.append((aside / "x").read_text() + (target / "x").read_text())
        return exchange(aside, target) if swaps else False

    monkeypatch.setattr(writing, "_exchange", seen)
    for text in ("first", "second"):
        with writing.aside_of(tmp_path / "export") as aside:
            (aside / "x").write_text(text)
            writing.install(aside, tmp_path / "export", {"step": 4})
    assert calls == ["secondfirst"]
    assert (tmp_path / "export" / "x").read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_an_export_that_has_its_name_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> None:
        if path == tmp_path:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(writing, "sync", fail)
    with writing.aside_of(tmp_path / "export") as aside:
        writing.install(aside, tmp_path / "export", {"step": 4})
    assert (tmp_path / "export" / "export.json").exists()
