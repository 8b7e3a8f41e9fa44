"""Pairs of other tools: taken over by models that train on them here, and else not passed over."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from jobs.imports.common.import_report import Kind
from jobs.imports.imported import (
    import_ai_toolkit,
    import_file,
    import_script,
    import_simpletuner,
)
from jobs.spec.keys.prompts import requests_of

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.imports.imported import Imported


def kinds(imported: Imported, ending: str) -> set[Kind]:
    found = {one.kind for one in imported.report.entries if one.key.endswith(ending)}
    assert found, ending
    return found


def ai_toolkit(folder: Path, arch: str, **dataset: Any) -> Imported:
    process = {
        "type": "sd_trainer",
        "model": {"name_or_path": "m", "arch": arch},
        "datasets": [{"folder_path": "d", "resolution": 768} | dataset],
        "sample": {"prompts": ["one --ctrl_img /x/a.png", "two"]},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({"job": "extension", "config": {"process": [process]}}))
    return import_ai_toolkit(path)


def test_ai_toolkit(tmp_path: Path) -> None:
    (tmp_path / "before").mkdir()
    spec = ai_toolkit(tmp_path, "flux_kontext", control_path="before").spec
    (entry,) = spec.datasets or []
    assert entry.conditioning_path == [str(tmp_path / "before")]
    assert spec.conditioning_resolution == 768, "there, as large as the picture beside it"
    assert [one.conditioning for one in requests_of(spec)] == [("/x/a.png",), ()]
    several = ai_toolkit(tmp_path, "flux2", control_path_1="a", control_path_2="b").spec
    (entry,) = several.datasets or []
    assert entry.references == 2
    assert several.conditioning_resolution is None
    edit = ai_toolkit(tmp_path, "qwen_image_edit_plus", control_path_1="a", control_path_2="b")
    assert edit.spec.model_flavour == "edit-2509"
    assert [one.references for one in edit.spec.datasets or []] == [2]
    for tag, flavour in (("2511", "edit-2511"), ("2509", "edit-2509")):
        tagged = ai_toolkit(tmp_path, f"qwen_image_edit_plus:{tag}", control_path_1="a")
        assert tagged.spec.model_flavour == flavour
    assert any('"two" has no conditioning image' in line for line in edit.report.to_fill_in)
    video = ai_toolkit(tmp_path, "wan22_14b_i2v", do_i2v=True).spec
    assert video.model_flavour == "2.2-i2v-a14b-high"
    assert requests_of(video)[0].conditioning == ("/x/a.png",)
    for arch in ("ltx2.3", "minimax_h3"):
        heard = ai_toolkit(tmp_path, arch, do_i2v=True, do_audio=True).spec
        assert [one.first_frame for one in heard.datasets or []] == [True]
        assert heard.train_audio
    plain = ai_toolkit(tmp_path, "flux", control_path="before")
    assert plain.spec.dataset
    assert kinds(plain, "control_path") == kinds(plain, "ctrl_img") == {Kind.UNSUPPORTED}
    many = ai_toolkit(tmp_path, "flux_kontext", control_path=["a", "b"])
    assert kinds(many, "control_path") == {Kind.UNSUPPORTED}


@pytest.mark.parametrize(
    ("family", "flavour", "kind", "taken"),
    [
        ("flux", "kontext", "reference_strict", True),
        ("flux", "kontext", "mask", False),
        ("flux", "dev", "reference_strict", False),
        ("qwen_image", "edit-v1", "reference_strict", True),
    ],
)
def test_simpletuner(tmp_path: Path, family: str, flavour: str, kind: str, taken: bool) -> None:
    backends = [
        {"id": "after", "instance_data_dir": "after", "conditioning_data": "before"},
        {
            "id": "before",
            "dataset_type": "conditioning",
            "conditioning_type": kind,
            "instance_data_dir": "before",
        },
    ]
    (tmp_path / "data.json").write_text(json.dumps(backends))
    config = tmp_path / "config.json"
    values = {"model_family": family, "model_flavour": flavour, "data_backend_config": "data.json"}
    config.write_text(json.dumps(values))
    imported = import_simpletuner(config)
    entries = imported.spec.datasets or []
    assert [one.conditioning_path for one in entries] == ([["before"]] if taken else [])
    told = kinds(imported, "conditioning_data")
    assert (Kind.UNSUPPORTED in told) is not taken


@pytest.mark.parametrize(
    ("script", "family", "flavour"),
    [
        ("train_dreambooth_lora_flux_kontext.py", "flux", "kontext"),
        ("train_dreambooth_lora_flux2_img2img.py", "flux2", None),
    ],
)
def test_a_script_of_diffusers(script: str, family: str, flavour: str | None) -> None:
    flags = "--dataset_name=d --image_column=after --cond_image_column=before --resolution=768"
    imported = import_script(["accelerate", "launch", script, *flags.split()])
    spec = imported.spec
    assert (spec.model_family, spec.model_flavour) == (family, flavour)
    (entry,) = spec.datasets or []
    assert (entry.image_column, entry.conditioning_column) == ("after", ["before"])
    assert spec.conditioning_resolution == 768
    assert not imported.report.to_fill_in or "script" not in str(imported.report.to_fill_in)
    words = "--dataset_name=d --conditioning_image_column=edges --lora_layers=attn.to_q"
    control = import_script(["accelerate", "launch", "train_control_lora_flux.py", *words.split()])
    (entry,) = control.spec.datasets or []
    assert (control.spec.model_flavour, entry.conditioning_column) == ("control", ["edges"])
    assert control.spec.lora_target_modules == ["attn.to_q", "x_embedder"]
    assert control.spec.conditioning_resolution is None
    plain = import_script(["accelerate", "launch", "train_dreambooth_lora_flux.py", *flags.split()])
    assert kinds(plain, "cond_image_column") == {Kind.UNSUPPORTED}


def test_musubis_layers(tmp_path: Path) -> None:
    """`cat_0.png` and so on are beside `cat.png`; only their names say how many there are."""
    config = '[[datasets]]\nimage_directory = "d"\nmultiple_target = true\n'
    (tmp_path / "data.toml").write_text(config)
    command = "qwen_image_train_network.py --dit a --dataset_config data.toml --model_version "
    script = tmp_path / "train.sh"
    script.write_text(f"{command}layered")
    assert kinds(import_file(script), "multiple_target") == {Kind.UNSUPPORTED}
    (tmp_path / "d").mkdir()
    for name in ("cat", "cat_0", "cat_10", "cat_9", "a_dog"):
        (tmp_path / "d" / f"{name}.png").touch()
    imported = import_file(script)
    assert imported.spec.model_flavour == "layered"
    assert kinds(imported, "multiple_target") == {Kind.TRANSLATED}
    assert [entry.conditioning_suffix for entry in imported.spec.datasets or []] == [
        ["_0", "_9", "_10"]
    ]
    script.write_text(f"{command}original")
    assert kinds(import_file(script), "multiple_target") == {Kind.UNSUPPORTED}
