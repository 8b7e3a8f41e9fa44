"""Configurations of other tools as jobs: what becomes of each key, and that none is forgotten."""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING, Any, Final

import pytest
import yaml

from jobs.errors import UserError
from jobs.imports.ai_toolkit import config as ai_toolkit
from jobs.imports.common.command_line import read_command
from jobs.imports.common.draft import Draft
from jobs.imports.common.import_report import Kind, shown
from jobs.imports.common.models import guess_family
from jobs.imports.diffusers import script as diffusers_script
from jobs.imports.diffusion_pipe import config as diffusion_pipe
from jobs.imports.imported import (
    Imported,
    import_ai_toolkit,
    import_diffusion_pipe,
    import_file,
    import_ltx_trainer,
    import_onetrainer,
    import_script,
    import_simpletuner,
)
from jobs.imports.onetrainer import config as onetrainer
from jobs.imports.simpletuner import config as simpletuner
from jobs.imports.simpletuner import data as data_rules
from jobs.spec.families import FAMILIES
from jobs.spec.file.load import load_spec
from jobs.spec.rules.steps import total_steps
from jobs.untrusted.files import LARGEST_TEXT
from tests.support.jobs.imported import ODD, check, entries, entry
from tests.support.paths import IMPORT_EXAMPLES, ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


EXAMPLES: Final = IMPORT_EXAMPLES
TABLES: Final = sorted((ROOT / "jobs" / "imports").glob("*/table.yaml"))
SECRETS: Final = (
    "hf_AbCdEf",
    "0123456789abcdef",
    "AKIAEXAMPLE",
    "not-a-real-secret",
    "example.org",
)
SIMPLETUNER: Final = ("flux-lora", "sdxl-full-fsdp2", "wan-lora")
AI_TOOLKIT: Final = ("flux-lora", "lumina-full", "wan22-lora")
SCRIPTS: Final = ("flux-lora.sh", "sdxl-full.sh", "sd3-lora.txt")

Lost = Kind.UNSUPPORTED
Needless = Kind.UNNEEDED


def example(tool: str, name: str) -> Imported:
    if tool == "simpletuner":
        return import_simpletuner(EXAMPLES / tool / name / "config.json")
    if tool == "ai-toolkit":
        return import_ai_toolkit(EXAMPLES / tool / f"{name}.yaml")
    return import_script([str(EXAMPLES / "diffusers-script" / name)])


ALL: Final = [
    *(("simpletuner", name) for name in SIMPLETUNER),
    *(("ai-toolkit", name) for name in AI_TOOLKIT),
    *(("diffusers-script", name) for name in SCRIPTS),
]


# -- the examples ----------------------------------------------------------------------------


def leaves(value: Any, name: str = "") -> Iterator[str]:
    """Names of all values below the mappings of a configuration, as reports write them."""
    if isinstance(value, dict) and value:
        for key, one in value.items():
            yield from leaves(one, f"{name}.{key}" if name else str(key).lstrip("-"))
    elif (
        isinstance(value, list)
        and any(isinstance(one, dict) for one in value)
        and ("datasets" in name or name.endswith(".json"))
    ):
        for number, one in enumerate(value):
            yield from leaves(one, f"{name}[{number}]")
    else:
        yield name


def keys_of(tool: str, name: str) -> list[str]:
    """Every key of an example, as its report should call it."""
    if tool == "simpletuner":
        folder = EXAMPLES / tool / name
        backends = json.loads((folder / "multidatabackend.json").read_text())
        config = json.loads((folder / "config.json").read_text())
        return [*leaves(config), *leaves(backends, "multidatabackend.json")]
    if tool == "ai-toolkit":
        values = yaml.safe_load((EXAMPLES / tool / f"{name}.yaml").read_text())
        process = values["config"].pop("process")[0]
        return [*leaves(values), *leaves(process)]
    text = (EXAMPLES / tool / name).read_text()
    words = text[text.index("accelerate launch") :].split("\necho")[0]
    flags = re.findall(r"(?<=\s)--([a-z_0-9]+)", words)
    split = flags.index("pretrained_model_name_or_path")
    return [*(f"accelerate launch --{flag}" for flag in flags[:split]), *flags[split:]]


@pytest.mark.parametrize(("tool", "name"), ALL)
def test_every_key_ends_in_exactly_one_class(tool: str, name: str) -> None:
    """A key of its own, or one that stands for all below it."""
    reported = [entry.key for entry in example(tool, name).report.entries]
    for key in keys_of(tool, name):
        above = [key[:at] for at in range(len(key) + 1) if at == len(key) or key[at] in ".["]
        found = [one for one in reported if one in above]
        assert len(found) == 1, (key, found)


@pytest.mark.parametrize(("tool", "name"), ALL)
def test_what_is_written_is_the_job_and_can_be_read(
    tool: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # so that no path of the example is there
    imported = example(tool, name)
    path = tmp_path / "job.yaml"
    path.write_text(imported.to_yaml())
    conflicts = ("pretrained_model_name_or_path", "dataset", "optimizer")
    read = load_spec(path, ignoring=conflicts)
    assert read == imported.spec
    assert "null" not in imported.to_yaml()


@pytest.mark.parametrize(("tool", "name"), ALL)
def test_no_secret_leaves_a_configuration(tool: str, name: str) -> None:
    imported = example(tool, name)
    told = imported.to_yaml() + json.dumps(imported.report.to_dict())
    assert not [secret for secret in SECRETS if secret in told]


@pytest.mark.parametrize(("tool", "name"), ALL)
def test_what_is_missing_is_said(tool: str, name: str) -> None:
    imported = example(tool, name)
    missing = "\n".join(imported.report.to_fill_in)
    assert "fsdp-tui fetch" in missing  # the model
    assert "no such folder: " in missing or "dataset is missing" in missing


def test_simpletuner_flux_lora() -> None:
    imported = example("simpletuner", "flux-lora")
    job = imported.to_dict()
    assert job["pretrained_model_name_or_path"] == "black-forest-labs/FLUX.1-dev"
    assert job["datasets"] == [
        {"path": "/data/pottery/bowls", "repeats": 5},
        {"path": "/data/pottery/vases", "resolution": 512, "trigger_word": "p0tt3r style"},
        {"path": "s3://pottery", "repeats": 2},
    ]
    assert (job["crop"], job["max_bucket_aspect_ratio"]) == ("random", 1.0)
    assert (job["timestep_sampling"], job["flow_shift"]) == ("shift", 3.0)
    assert (job["lr_scheduler"], job["lr_warmup_steps"]) == ("polynomial", 100)
    assert (job["weight_decay"], job["lora_dropout"], job["max_grad_norm"]) == (0.01, 0.1, 2.0)
    prompts = job["validation_prompts"]
    assert prompts == [
        "a stoneware bowl, celadon glaze, on a wooden table",
        "a teapot, copper red glaze",
        "a shelf of cups, late light",
    ]
    assert imported.spec.resolution == 1024
    assert [e.key for e in imported.report.of(Kind.UNKNOWN)] == ["potters_own_key"]
    assert "(not shown)" in [e.value for e in imported.report.entries]
    assert {e.key for e in imported.report.assumed} == {
        "aspect_bucket_alignment",
        "ema_decay",
        "ema_validation",
        "lora_dropout",
        "lr_end",
        "lr_power",
        "max_grad_norm",
        "model_card_private",
        "optimizer_config",
        "multidatabackend.json[0].disable_multiline_split",
        "multidatabackend.json[3].disable_multiline_split",
    }


def test_a_bucket_becomes_its_address_without_its_keys(tmp_path: Path) -> None:
    theirs = {"type": "aws", "aws_bucket_name": "pottery", "aws_secret_access_key": "word"}
    more = {"instance_data_dir": "", "aws_data_prefix": "/bowls/", "aws_endpoint_url": "http://a"}
    imported = backend(tmp_path, {"id": "a"} | theirs | more, {"id": "b"} | theirs)
    paths = [entry["path"] for entry in imported.to_dict()["datasets"]]
    assert paths == ["s3://pottery/bowls", "s3://pottery"]
    assert not imported.report.of(Kind.UNKNOWN)
    assert not any("word" in str(entry) for entry in imported.report.entries)
    (lost,) = (entry for entry in imported.report.entries if "endpoint" in entry.key)
    assert (lost.kind, "AWS_ENDPOINT_URL" in lost.why) == (Kind.UNSUPPORTED, True)


def test_simpletuner_full_training_on_eight_ranks() -> None:
    imported = example("simpletuner", "sdxl-full-fsdp2")
    job = imported.to_dict()
    assert (job["model_type"], job["model_family"]) == ("full", "sdxl")
    assert job["fsdp_transformer_layer_cls_to_wrap"] == ["BasicTransformerBlock", "ResnetBlock2D"]
    assert (job["num_processes"], job["fsdp_enable"]) == (8, True)
    assert job["learning_rate"] == pytest.approx(1e-6 * 4 * 2 * 8)
    # The same folder in two resolutions, a metadata file, and a dataset of the hub.
    assert job["datasets"] == [
        {"path": "/data/birds", "resolution": [768, 1024], "caption_column": "text"},
        {
            "path": "someone/bird-sketches",
            "caption_column": "prompt",
            "image_column": "image",
            "split": "train",
        },
    ]
    assert job["max_upscale"] == 1.333
    assert "ema_device" not in job  # cpu does not go with FSDP
    assert job["num_train_epochs"] == 10
    assert "max_train_steps" not in job


def test_simpletuner_video() -> None:
    imported = example("simpletuner", "wan-lora")
    job = imported.to_dict()
    assert (job["model_family"], job["model_flavour"]) == ("wan", "2.1-t2v-14b")
    assert job["num_frames"] == 73  # 4n + 1
    assert imported.spec.caption_lines == "joined"
    assert job["validation_resolution"] == "832x480"
    assert (job["context_parallel_size"], job["num_processes"]) == (2, 4)
    assert (job["lora_variant"], job["lokr_factor"]) == ("lokr", 16)
    assert imported.spec.lora_dropout == 0  # their default is for LoRA
    assert imported.spec.seed == 42  # theirs unreadable
    assert [e.key for e in imported.report.of(Kind.UNREADABLE)] == ["seed"]


def test_ai_toolkit_flux_lora() -> None:
    job = example("ai-toolkit", "flux-lora").to_dict()
    assert job["name"] == "tin_robots-v1"
    assert job["resolution"] == [512, 768, 1024]
    assert (job["optimizer"], job["lora_alpha"]) == ("adamw_8bit", 8.0)
    assert job["trigger_word"] == "t1nb0t"
    assert job["validation_prompts"] == [
        {"prompt": "[trigger] on a workbench, brass gears", "seed": 42},
        {"prompt": "[trigger] in the rain", "resolution": 512, "steps": 12, "seed": 43},
        {"prompt": "a lighthouse, with a red door", "seed": 44},
    ]
    assert job["validation_resolution"] == "1024x768"
    assert job["export_dtype"] == "fp16"


def test_ai_toolkit_full_training_on_several_gpus() -> None:
    imported = example("ai-toolkit", "lumina-full")
    job = imported.to_dict()
    assert (job["model_type"], job["model_family"]) == ("full", "lumina2")
    assert (job["gpus"], job["fsdp_enable"]) == ([0, 1, 2, 3], True)
    assert job["datasets"] == [
        {"path": "/data/fields", "repeats": 3},
        {"path": "/data/fields-other", "trigger_word": "a field"},
        {"path": "/data/reg", "resolution": 512, "regularization": True},
    ]
    assert (job["shuffle_captions"], job["keep_tags"]) == (True, 2)
    assert (job["lr_scheduler"], job["lr_warmup_steps"]) == ("constant_with_warmup", 200)
    assert entry(imported, "datasets[2].is_reg").kind is Kind.TRANSLATED
    assert job["optimizer"] == "adafactor"


def test_ai_toolkit_masks_weights_and_regularization(tmp_path: Path) -> None:
    datasets = [
        {"folder_path": "a", "mask_path": "m", "mask_min_value": 0.2, "loss_multiplier": 2},
        {"folder_path": "r", "is_reg": True, "square_crop": False},
    ]
    spec = process(tmp_path, datasets=datasets, train__reg_weight=0.5).spec
    told = [one.model_dump(mode="json", exclude_defaults=True) for one in spec.datasets or []]
    assert told == [
        {"path": "a", "loss_weight": 2.0, "mask_path": "m"},
        {"path": "r", "regularization": True},
    ]
    assert (spec.masked_loss, spec.unmasked_weight, spec.prior_loss_weight) == ("file", 0.2, 0.5)


def test_ai_toolkit_video_of_two_experts() -> None:
    imported = example("ai-toolkit", "wan22-lora")
    job = imported.to_dict()
    assert job["model_flavour"] == "2.2-t2v-a14b-high"
    assert (job["num_frames"], job["validation_num_frames"]) == (37, 41)
    assert job["gpus"] == [1]
    assert job["lora_alpha"] == 1.0  # what is taken there when none is given
    assert job["both_experts"]
    assert any("each expert trains all of them" in text for text in imported.report.warnings)


@pytest.mark.parametrize(
    ("kwargs", "both"),
    [
        ({}, True),
        ({"train_low_noise": True}, True),
        ({"train_low_noise": False}, False),
        ({"train_high_noise": False}, False),
    ],
)
def test_ai_toolkit_trains_both_experts_unless_one_is_off(
    kwargs: dict[str, bool], both: bool, tmp_path: Path
) -> None:
    spec = process(tmp_path, model={"arch": "wan22_14b", "model_kwargs": kwargs}).spec
    assert spec.both_experts is both
    assert spec.model_flavour == f"2.2-t2v-a14b-{'low' if 'train_high_noise' in kwargs else 'high'}"


@pytest.mark.parametrize(
    ("name", "family", "why"),
    [
        ("someone/sdxl-own", "sdxl", "from the model's name"),
        ("someone/own", "stable_diffusion", "ai-toolkit's default"),
    ],
)
def test_ai_toolkit_without_an_architecture(
    name: str, family: str, why: str, tmp_path: Path
) -> None:
    report = process(tmp_path, model={"name_or_path": name}).report
    (assumed,) = (one for one in report.assumed if one.key == "model.arch")
    assert (assumed.ours, assumed.why) == ({"model_family": family}, why)
    to_check = any(text.startswith("model_family: ") for text in report.to_fill_in)
    assert to_check is (why == "ai-toolkit's default")


def test_a_published_model_wins_over_the_switch_of_ai_toolkit(tmp_path: Path) -> None:
    base = "stabilityai/stable-diffusion-2-1-base"
    for model in ({"is_v2": True}, {"arch": "sd2"}):
        spec = process(tmp_path, model={**model, "name_or_path": base}).spec
        assert spec.model_flavour == "2.1-base"
    # Two flavours of one repository: what the switches say stays.
    wan = {"arch": "wan22_14b", "model_kwargs": {"train_high_noise": False}}
    name = "ai-toolkit/Wan2.2-T2V-A14B-Diffusers-bf16"
    spec = process(tmp_path, model={**wan, "name_or_path": name}).spec
    assert spec.model_flavour == "2.2-t2v-a14b-low"


@pytest.mark.parametrize("on", [True, False])
def test_v_prediction_of_ai_toolkit_is_to_be_checked(on: bool, tmp_path: Path) -> None:
    imported = process(tmp_path, model__is_v_pred=on)
    assert entry(imported, "model.is_v_pred").kind is Needless
    assert any("v_prediction" in text for text in imported.report.to_fill_in) is on


def test_a_script_with_one_caption_for_all() -> None:
    job = example("diffusers-script", "flux-lora.sh").to_dict()
    assert (job["dataset"], job["trigger_word"]) == ("dog", "a photo of sks dog")
    assert job["missing_captions"] == "empty"
    assert (job["optimizer"], job["learning_rate"]) == ("prodigy", 1.0)
    assert job["timestep_sampling"] == "uniform"  # weighting_scheme: none is its default
    assert "ff_context.net.2" in job["lora_target_modules"]


def test_a_script_that_is_launched_with_a_file() -> None:
    imported = example("diffusers-script", "sdxl-full.sh")
    job = imported.to_dict()
    assert (job["gpus"], job["mixed_precision"]) == ([0, 1, 2, 3], "fp16")
    assert "num_processes" not in job
    assert job["fsdp_reshard_after_forward"] is False  # SHARD_GRAD_OP
    assert (job["optimizer"], job["snr_gamma"]) == ("adamw_8bit", 5.0)
    assert "not set" in entry(imported, "dataset_name").why
    assert entry(imported, "accelerate-fsdp.yaml: num_processes").why == "the flag wins"


def test_fewer_processes_than_gpus_take_the_first_of_them() -> None:
    """And a variable in front of the command is read, whatever else is set there."""
    start = "CUDA_VISIBLE_DEVICES=3,1,2 X=1 accelerate launch --num_processes=2"
    imported = import_script([f"{start} train_dreambooth_flux.py --seed=1"])
    assert imported.spec.gpus == [3, 1]
    assert imported.spec.num_processes is None
    assert entry(imported, "X").kind is Needless


def test_defaults_that_are_as_here_are_not_told(tmp_path: Path) -> None:
    imported = process(tmp_path, sample__prompts=["a"])
    told = {one.key for one in imported.report.assumed}
    assert "sample.guidance_scale" in told
    assert "sample.sample_steps" not in told  # 20, as with FLUX.1 here


@pytest.mark.parametrize(
    ("script", "flags", "drawn"),
    [
        ("lumina2", "", ("uniform_shift", 1 / 6, "none")),
        ("z_image", "", ("uniform_shift", "sampler", "none")),
        ("hidream", "", ("uniform_shift", 3.0, "none")),
        ("lumina2", "--weighting_scheme=logit_normal", ("shift", 1 / 6, "none")),
        ("qwen_image", "", ("uniform", None, "none")),
        ("sana", "", ("uniform", None, "none")),
        ("sd3", "", ("shift", None, "sigma_squared")),
        ("sd3", "--precondition_outputs=0", ("shift", None, "none")),
        ("sd3", "--weighting_scheme=sigma_sqrt", ("uniform_shift", None, "none")),
        ("sd3", "--weighting_scheme=cosmap", ("uniform_shift", None, "cosmap")),
        (
            "sd3",
            "--precondition_outputs=0 --weighting_scheme=sigma_sqrt",
            ("uniform_shift", None, "sigma_sqrt"),
        ),
    ],
)
def test_a_script_draws_and_weights_as_it_does_there(
    script: str, flags: str, drawn: tuple[Any, ...]
) -> None:
    spec = import_script([f"train_dreambooth_lora_{script}.py --seed=1 {flags}"]).spec
    assert (spec.timestep_sampling, spec.flow_shift, spec.loss_weighting) == drawn


@pytest.mark.parametrize("script", ["sd3", "lumina2", "z_image", "hidream"])
def test_a_script_loses_the_shift_of_mode(script: str) -> None:
    line = f"train_dreambooth_lora_{script}.py --seed=1 --weighting_scheme=mode"
    imported = import_script([line])
    assert (imported.spec.timestep_sampling, imported.spec.flow_shift) == ("mode", None)
    assert entry(imported, "weighting_scheme").kind is Lost


def test_a_shift_of_simpletuner_is_said_as_the_family_has_it(tmp_path: Path) -> None:
    for family, how in (("flux", "by resolution"), ("hidream", "at 1024 pixels")):
        keys = {"flow_schedule_auto_shift": 1, "flow_use_uniform_schedule": True}
        imported = simple(tmp_path, model_family=family, **keys)
        assert how in entry(imported, "flow_schedule_auto_shift").why


def test_simpletuner_draws_evenly_for_sana_where_nothing_is_set(tmp_path: Path) -> None:
    imported = simple(tmp_path, model_family="sana")
    assert (imported.spec.timestep_sampling, imported.spec.flow_shift) == ("uniform", None)
    assert "flow_schedule_shift" in {assumed.key for assumed in imported.report.assumed}


def test_a_shift_by_size_of_ai_toolkit_is_that_of_the_smallest_size(tmp_path: Path) -> None:
    """It is 3.2 at 512 pixels, and 25 at 1024."""
    keys = {"train__timestep_type": "shift", "model__arch": "chroma"}
    for sides, kinds in ([512], {Kind.TRANSLATED}), ([1024, 512], {Kind.TRANSLATED, Lost}):
        datasets = [{"folder_path": "d", "resolution": sides}]
        imported = process(tmp_path, datasets=datasets, **keys)
        assert (imported.spec.timestep_sampling, imported.spec.flow_shift) == (
            "uniform_shift",
            3.158,
        )
        assert {one.kind for one in entries(imported, "train.timestep_type")} == kinds


def test_a_script_whose_noise_levels_count_from_the_other_end() -> None:
    imported = example("diffusers-script", "sd3-lora.txt")
    job = imported.to_dict()
    assert imported.spec.timestep_sampling == "shift", "as the family has it"
    assert imported.spec.loss_weighting == "sigma_squared", "precondition_outputs is on by default"
    assert (job["logit_mean"], job["logit_std"]) == (-0.5, 1.2)
    assert job["learning_rate"] == pytest.approx(4e-4 * 4 * 2)
    assert job["datasets"] == [{"path": "someone/yarn-art", "caption_column": "text"}]
    assert [e.key for e in imported.report.of(Kind.UNKNOWN)] == ["new_flag_of_tomorrow"]
    assert job["validation_prompts"] == ["a yarn cat, sitting"]


# -- keys ------------------------------------------------------------------------------------


def simple(folder: Path, **theirs: Any) -> Imported:
    path = folder / "config.json"
    path.write_text(json.dumps({"model_family": "flux"} | theirs))
    return import_simpletuner(path)


def backend(folder: Path, *theirs: dict[str, Any], **around: Any) -> Imported:
    (folder / "data.json").write_text(json.dumps(list(theirs)))
    return simple(folder, data_backend_config="somewhere/else/data.json", **around)


def process(folder: Path, name: str = "config.json", /, **theirs: Any) -> Imported:
    """Of ai-toolkit; double underscores stand between levels. JSON is read ten times as fast."""
    tree: dict[str, Any] = {"type": "sd_trainer", "model": {"is_flux": True}}
    for key, value in theirs.items():
        *above, last = key.split("__")
        place = tree
        for name in above:
            place = place.setdefault(name, {})
        place[last] = value
    path = folder / name
    config = {"job": "extension", "config": {"name": "x", "process": [tree]}}
    path.write_text(json.dumps(config) if name.endswith(".json") else yaml.safe_dump(config))
    return import_ai_toolkit(path)


ROUTE: Final = {"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": -2}
SIMPLE_KEYS: Final[list[tuple[dict[str, Any], dict[str, Any] | Kind]]] = [
    ({"report_to": "tensorboard,wandb"}, {"report_to": ["tensorboard", "wandb"]}),
    ({"report_to": "custom-tracker"}, Lost),
    (
        {"tracker_run_name": "a run", "report_to": "wandb"},
        {"tracker_run_name": "a run"},
    ),
    ({"tracker_project_name": "pots", "report_to": "none"}, Needless),
    ({"learning_rate": "3e-5"}, {"learning_rate": 3e-5}),
    ({"optimizer": "optimi-adamw"}, {"optimizer": "adamw"}),
    ({"optimizer": "bnb-adamw8bit"}, {"optimizer": "adamw_8bit"}),
    ({"optimizer": "bnb-lion8bit-paged"}, {"optimizer": "lion"}),
    ({"optimizer": "prodigy"}, {"optimizer": "prodigy"}),
    ({"optimizer": "soap"}, Lost),
    (
        {"optimizer": "adamw_schedulefree", "lr_scheduler": "sine", "lr_warmup_steps": 50},
        {
            "optimizer": "adamw_schedule_free",
            "lr_scheduler": "constant_with_warmup",
            "lr_warmup_steps": 50,
        },
    ),
    (
        {"optimizer": "adamw_schedulefree", "lr_scheduler": "polynomial"},
        {"optimizer": "adamw_schedule_free", "lr_scheduler": "constant"},
    ),
    ({"lr_scheduler": "sine"}, {"lr_scheduler": "cosine"}),
    ({"lr_scheduler": "polynomial"}, {"lr_scheduler": "polynomial"}),
    (
        {"lr_scheduler": "cosine_with_restarts", "lr_num_cycles": 3},
        {"lr_scheduler": "cosine_with_restarts", "lr_num_cycles": 3},
    ),
    ({"lr_scheduler": "something"}, Lost),
    (
        {"lr_warmup_steps": 100, "lr_scheduler": "constant"},
        {"lr_warmup_steps": 100, "lr_scheduler": "constant_with_warmup"},
    ),
    ({"lr_warmup_steps": 100}, {"lr_warmup_steps": 100, "lr_scheduler": "constant_with_warmup"}),
    ({"lr_power": 0.8, "lr_scheduler": "polynomial"}, {"lr_power": 0.8}),
    ({"lr_power": 0.8, "lr_scheduler": "cosine"}, Needless),
    ({"lr_scale": True, "learning_rate": 1e-6, "train_batch_size": 3}, Needless),
    (
        {"learning_rate": 1e-6, "lr_scale_sqrt": "true", "train_batch_size": 4},
        {"learning_rate": 2e-6},
    ),
    ({"max_train_steps": 0, "num_train_epochs": 0}, Needless),
    ({"num_train_epochs": 3, "max_train_steps": 100}, Needless),
    ({"num_train_epochs": 3}, {"num_train_epochs": 3.0, "max_train_steps": None}),
    ({"num_train_epochs": 0.25}, {"num_train_epochs": 0.25}),
    ({"num_train_epochs": "many"}, Kind.UNREADABLE),
    ({"mixed_precision": "no"}, {"mixed_precision": "no"}),
    ({"mixed_precision": "fp8"}, Lost),
    ({"base_model_precision": "no_change"}, Needless),
    ({"base_model_precision": "int8-quanto"}, {"base_precision": "int8"}),
    ({"base_model_precision": "fp8-torchao"}, {"base_precision": "fp8_scaled"}),
    ({"base_model_precision": "int2-quanto"}, {"base_precision": "nf4"}),
    ({"lora_type": "standard"}, Needless),
    ({"lora_type": "lycoris"}, Lost),
    ({"lora_type": "lycoris", "lycoris_config": "a.json"}, Needless),
    ({"lycoris_config": "a.json"}, Needless),
    ({"lycoris_config": "no-such.json", "lora_type": "lycoris"}, Kind.UNREADABLE),
    ({"lora_rank": 64}, {"lora_rank": 64}),
    ({"lora_rank": 0}, Kind.UNREADABLE),
    ({"lora_alpha": "None"}, Needless),
    ({"lora_format": "comfyui"}, {"export_formats": ["comfyui"]}),
    ({"flux_lora_target": "mmdit"}, {"lora_target_modules": ["to_k", "to_q", "to_v", "to_out.0"]}),
    (
        {"flux_lora_target": "context"},
        {"lora_target_modules": ["add_k_proj", "add_q_proj", "add_v_proj", "to_add_out"]},
    ),
    ({"flux_lora_target": "all+ffs"}, Needless),
    ({"flux_lora_target": "nano"}, Lost),
    ({"snr_gamma": 5}, Needless),  # flow matching
    ({"snr_gamma": 5, "model_family": "sdxl"}, {"snr_gamma": 5.0}),
    ({"snr_gamma": 0, "model_family": "sdxl"}, Needless),
    ({"flow_schedule_shift": 1}, {"timestep_sampling": "logit_normal", "flow_shift": None}),
    ({"flow_schedule_shift": 0}, {"timestep_sampling": "logit_normal"}),
    ({"flow_schedule_shift": 2.5}, {"timestep_sampling": "shift", "flow_shift": 2.5}),
    (
        {"flow_schedule_shift": 3, "flow_use_uniform_schedule": True},
        {"flow_shift": 3.0, "timestep_sampling": "uniform_shift"},
    ),
    (
        {"flow_schedule_auto_shift": 1, "flow_use_uniform_schedule": True},
        {"flow_shift": None, "timestep_sampling": "uniform_shift"},
    ),
    (  # its shift is 3 where it is left out
        {"flow_use_uniform_schedule": "true"},
        {"timestep_sampling": "uniform_shift", "flow_shift": 3.0},
    ),
    (
        {"flow_use_uniform_schedule": "true", "flow_schedule_shift": 0},
        {"timestep_sampling": "uniform", "flow_shift": None},
    ),
    ({"flow_schedule_auto_shift": 1}, {"timestep_sampling": "shift", "flow_shift": None}),
    (
        {"flow_schedule_auto_shift": 1, "model_family": "hidream"},
        {"timestep_sampling": "shift", "flow_shift": 3.158},
    ),
    (
        {"flow_schedule_shift": 2, "model_family": "sana"},
        {"timestep_sampling": "uniform", "flow_shift": None},
    ),
    ({"flow_schedule_auto_shift": 1, "model_family": "sana"}, Needless),
    ({"flow_use_uniform_schedule": True, "model_family": "sana"}, Needless),
    ({"flow_sigmoid_scale": 0.8, "model_family": "sana"}, Needless),
    (
        {
            "flow_schedule_shift": 2,
            "model_family": "wan",
            "model_flavour": "i2v-14b-2.2-high",
        },
        {"timestep_sampling": "shift", "flow_shift": 5.0},
    ),
    (
        {
            "flow_use_uniform_schedule": True,
            "flow_schedule_shift": 0,
            "model_family": "wan",
            "model_flavour": "i2v-14b-2.2-low",
        },
        {"timestep_sampling": "uniform_shift", "flow_shift": 5.0},
    ),
    (
        {
            "flow_schedule_auto_shift": True,
            "model_family": "wan",
            "model_flavour": "i2v-14b-2.2-high",
        },
        Needless,
    ),
    ({"flow_schedule_shift": 3, "model_family": "sdxl"}, Needless),
    (
        {"model_flavour": "flf2v-14b-2.1", "model_family": "wan"},
        {"model_flavour": "2.1-flf2v-14b-720p"},
    ),
    *(
        ({"model_flavour": theirs, "model_family": "wan"}, {"model_flavour": ours})
        for theirs, ours in (
            ("flf2v-14b-2.2-high", "2.2-flf2v-a14b-high"),
            ("flf2v-14b-2.2-low", "2.2-flf2v-a14b-low"),
            ("vace-1.3b-2.1", "2.1-vace-1.3b"),
            ("vace-14b-2.1", "2.1-vace-14b"),
        )
    ),
    *(
        ({key: value, "model_family": "ideogram"}, Needless)
        for key, value in (
            ("flow_schedule_auto_shift", True),
            ("flow_use_uniform_schedule", True),
            ("flow_sigmoid_scale", 0.8),
            ("ideogram_auto_json", False),
            ("ideogram_validation", True),
        )
    ),
    ({"ideogram_auto_json": True, "model_family": "ideogram"}, Lost),
    ({"flow_sigmoid_scale": 0.8}, {"logit_std": 0.8}),
    ({"flux_guidance_value": 2}, {"train_guidance": 2.0}),
    ({"noise_offset": 0}, Needless),
    ({"noise_offset": 0.1}, Needless),  # only with offset_noise
    ({"offset_noise": True}, Lost),
    ({"grad_clip_method": "norm"}, Needless),
    ({"grad_clip_method": "value"}, Lost),
    ({"gradient_checkpointing": "false"}, {"gradient_checkpointing": False}),
    ({"gradient_checkpointing_interval": 2}, {"gradient_checkpointing_interval": 2}),
    ({"attention_mechanism": "xformers"}, {"attention_backend": "efficient"}),
    ({"attention_mechanism": "native-math"}, {"attention_backend": "math"}),
    ({"attention_mechanism": "diffusers"}, {"attention_backend": "auto"}),
    ({"attention_mechanism": "xformers", "model_family": "sdxl"}, Needless),
    ({"attention_mechanism": "sageattention"}, Lost),
    ({"attention_mechanism": "flash-attn-3"}, {"attention_backend": "flash3"}),
    ({"disable_tf32": "true"}, {"allow_tf32": False}),
    ({"disable_tf32": False}, {"allow_tf32": True}),
    ({"loss_type": "l2"}, {"loss_type": "mse"}),
    ({"loss_type": "huber"}, {"loss_type": "huber"}),
    ({"huber_schedule": "constant"}, Needless),
    ({"huber_schedule": "snr"}, Needless),
    ({"huber_schedule": "snr", "loss_type": "huber"}, Lost),  # it rises with the noise there
    (
        {"huber_schedule": "snr", "loss_type": "huber", "model_family": "sdxl"},
        {"huber_schedule": "snr"},
    ),
    (
        {"huber_schedule": "exponential", "loss_type": "smooth_l1"},
        {"huber_schedule": "exponential"},
    ),
    ({"ema_validation": "comparison"}, Needless),
    ({"ema_validation": "comparison", "use_ema": True}, Lost),
    ({"crepa_lambda": 0.5}, Needless),
    ({"pretrained_vae_model_name_or_path": "madebyollin/sdxl-vae-fp16-fix"}, Needless),
    ({"pretrained_vae_model_name_or_path": "sdxl-vae", "model_family": "sdxl"}, Lost),
    ({"pretrained_vae_model_name_or_path": "my-vae"}, Lost),
    ({"model_family": "hunyuanvideo"}, {"model_family": "hunyuanvideo15"}),
    (
        {"model_flavour": "t2v-720p", "model_family": "hunyuanvideo"},
        {"model_flavour": "720p-t2v"},
    ),
    (
        {"model_flavour": "i2v-480p", "model_family": "hunyuanvideo"},
        {"model_flavour": "480p-i2v"},
    ),
    (
        {"model_flavour": "i2v-480p-distilled", "model_family": "hunyuanvideo"},
        {"model_flavour": "480p-i2v-distilled"},
    ),
    ({"model_flavour": "2.3-dev", "model_family": "ltxvideo2"}, {"model_flavour": "2.3-22b"}),
    ({"model_flavour": "2.5-dev", "model_family": "ltxvideo2"}, {"model_flavour": "2.5-22b"}),
    ({"model_flavour": "2.5-distilled", "model_family": "ltxvideo2"}, Lost),
    ({"model_flavour": "edit-v3", "model_family": "qwen_image"}, {"model_flavour": "edit-2511"}),
    (
        {"model_flavour": "v2.0", "model_family": "qwen_image"},
        {"model_flavour": "2512"},
    ),
    ({"lr_scheduler": "cosine_with_warmup"}, {"lr_scheduler": "cosine"}),
    ({"lr_scheduler": "constant", "lr_warmup_steps": 0}, {"lr_scheduler": "constant"}),
    ({"lr_warmup_steps": 100, "lr_scheduler": "cosine"}, Lost),  # its curve's period
    ({"optimizer_config": "eps=1e-7,weight_decay=0"}, {"adam_epsilon": 1e-7, "weight_decay": 0.0}),
    ({"optimizer_config": "weight_decay=0.1,use_speed=True"}, Lost),
    ({"optimizer_config": "eps=0"}, Lost),
    ({"adam_epsilon": 1e-3}, Needless),  # only DeepSpeed's optimizer
    ({"adam_epsilon": 1e-3, "deepspeed_config": "ds.json"}, {"adam_epsilon": 1e-3}),
    ({"optimizer": "torch-adamw"}, {"optimizer": "adamw"}),
    ({"learning_rate": 1e-4, "optimizer": "prodigy"}, {"learning_rate": 1.0}),
    ({"ema_device": "cpu", "use_ema": True}, {"ema_device": "cpu"}),
    ({"ema_device": "cpu"}, Needless),
    ({"ema_device": "cpu", "use_ema": "true", "fsdp_enable": "true", "num_processes": 2}, Needless),
    ({"tokenizer_max_length": 256}, {"max_sequence_length": 256}),
    ({"checkpoint_step_interval": 200}, {"checkpointing_steps": 200}),
    ({"checkpoints_total_limit": 0}, {"checkpoints_total_limit": None}),
    ({"checkpoints_total_limit": 3}, {"checkpoints_total_limit": 3}),
    ({"checkpoint_epoch_interval": 1}, {"checkpointing_steps": "1 epoch"}),
    ({"checkpoint_epoch_interval": 1, "checkpoint_step_interval": 200}, Lost),
    ({"validation_epoch_interval": 3}, {"validation_steps": "3 epochs"}),
    ({"resume_from_checkpoint": "latest"}, Needless),
    ({"resume_from_checkpoint": "output/checkpoint-500"}, Lost),
    ({"output_dir": "/a/b c/"}, {"name": "b-c"}),
    ({"output_dir": "../"}, Needless),
    ({"validation_resolution": "0.5"}, {"validation_resolution": 704}),
    ({"validation_resolution": 1024}, {"validation_resolution": 1024}),
    ({"validation_resolution": "1280x768"}, {"validation_resolution": "1280x768"}),
    ({"validation_prompt": "a, b"}, {"validation_prompts": [{"prompt": "a, b"}]}),
    (
        {"evaluation_type": "clip", "validation_prompt": "a"},
        {
            "validation_scores": ["clip_t"],
            "validation_clip_model": "openai/clip-vit-large-patch14-336",
        },
    ),
    (
        {"evaluation_type": "clip", "pretrained_evaluation_model_name_or_path": "a/b"},
        {"validation_scores": ["clip_t"], "validation_clip_model": "a/b"},
    ),
    ({"evaluation_type": "none"}, Needless),
    ({"evaluation_type": "fid"}, Lost),
    ({"validation_prompt": "a", "validation_disable": "true"}, Needless),
    ({"validation_disable": True}, Kind.TRANSLATED),
    ({"assistant_lora_path": "~/loras/turbo"}, {"training_adapter": "~/loras/turbo"}),
    ({"assistant_lora_path": "ostris/zimage_turbo_training_adapter"}, Lost),
    ({"assistant_lora_strength": 1.0}, Needless),
    ({"assistant_lora_strength": 0.5}, Lost),
    ({"disable_assistant_lora": True}, Needless),
    ({"validation_negative_prompt": "b"}, Needless),  # FLUX.1 is guidance-distilled
    (
        {"validation_negative_prompt": "b", "validation_guidance_real": 3.0},
        {"validation_negative_prompt": "b", "validation_true_cfg_scale": 3.0},
    ),
    (
        {"validation_negative_prompt": "b", "model_family": "sdxl"},
        {"validation_negative_prompt": "b"},
    ),
    ({"validation_step_interval": 7}, {"validation_steps": 7}),
    ({"num_validation_images": 1}, Needless),
    ({"num_validation_images": 4}, Lost),
    ({"controlnet": False}, Needless),
    ({"controlnet": "true"}, Lost),
    ({"push_to_hub": "true"}, {"push_to_hub": True}),
    ({"push_to_hub": False}, Needless),
    ({"hub_model_id": "a/b"}, Needless),
    ({"hub_model_id": "a/b", "push_to_hub": "true"}, {"hub_model_id": "a/b"}),
    ({"push_checkpoints_to_hub": 1, "push_to_hub": 1}, {"push_checkpoints_to_hub": True}),
    ({"model_flavour": "schnell"}, {"model_flavour": "schnell"}),
    ({"model_flavour": "libreflux"}, Lost),
    (
        {"model_flavour": "convrot-int8", "model_family": "minimaxh3", "validation_prompt": "a"}
        | {"minimax_h3_target_mode": "av"},
        {"model_flavour": "fl2va", "timestep_sampling": "shift", "flow_shift": 12.0}
        | {"validation_guidance": 1.0, "train_audio": True},
    ),
    ({"minimax_h3_target_mode": "audio", "model_family": "minimaxh3"}, Lost),
    ({"model_flavour": "base-v1.0", "model_family": "anima"}, {"model_flavour": "base-1.0"}),
    ({"fsdp_state_dict_type": "full"}, {"fsdp_state_dict_type": "FULL_STATE_DICT"}),
    ({"fsdp_reshard_after_forward": "false"}, {"fsdp_reshard_after_forward": False}),
    (
        {"fsdp_transformer_layer_cls_to_wrap": "A, B"},
        {"fsdp_transformer_layer_cls_to_wrap": ["A", "B"]},
    ),
    ({"deepspeed_config": "ds.json"}, Lost),
    ({"num_machines": 2}, Lost),
    ({"num_machines": "1"}, Needless),
    ({"dynamo_backend": "inductor"}, {"torch_compile": True, "torch_compile_backend": "inductor"}),
    ({"dynamo_backend": "no"}, Needless),
    (
        {"context_parallel_size": 2, "fsdp_enable": True, "num_processes": 4},
        {"context_parallel_size": 2},
    ),
    (
        {"pretrained_model_name_or_path": "black-forest-labs/flux.1-schnell"},
        {"model_flavour": "schnell"},
    ),
    (
        {"pretrained_model_name_or_path": "https://huggingface.co/black-forest-labs/FLUX.1-dev"},
        {"pretrained_model_name_or_path": "black-forest-labs/FLUX.1-dev"},
    ),
    ({"pretrained_model_name_or_path": "flux1-dev.safetensors"}, Lost),
    ({"pretrained_model_name_or_path": "ftp://x/y"}, Kind.UNREADABLE),
    ({"train_text_encoder": "false"}, Needless),
    ({"train_text_encoder": True}, Lost),
    (
        {
            "model_family": "sdxl",
            "pretrained_model_name_or_path": "stabilityai/stable-diffusion-xl-base-1.0",
            "lora_rank": 8,
            "train_text_encoder": True,
            "text_encoder_lr": 1e-5,
        },
        {"text_encoder_lora_rank": 8, "text_encoder_learning_rate": 1e-5},
    ),
    (
        {
            "model_family": "sdxl",
            "pretrained_model_name_or_path": "stabilityai/stable-diffusion-xl-base-1.0",
            "optimizer": "adamw_schedulefree",
            "train_text_encoder": True,
            "text_encoder_lr": 1e-5,
        },
        {"text_encoder_learning_rate": None},
    ),
    ({"crepa_enabled": True}, Lost),
    ({"ramtorch": True}, Lost),
    ({"tread_config": {"routes": [ROUTE]}}, {"tread": {"2..-2": 0.5}}),
    (
        {"tread_config": {"routes": [ROUTE, ROUTE | {"start_layer_idx": 1, "end_layer_idx": 1}]}},
        {"tread": {"2..-2": 0.5, "1..1": 0.5}},
    ),
    ({"tread_config": json.dumps({"routes": [ROUTE]})}, {"tread": {"2..-2": 0.5}}),
    ({"tread_config": {"routes": [ROUTE]}, "model_family": "sana"}, Lost),
    ({"tread_config": {"routes": []}}, Needless),
    ({"tread_config": {"routes": [ROUTE | {"selection_ratio": 1}]}}, Kind.UNREADABLE),
    ({"tread_config": {"routes": "all"}}, Kind.UNREADABLE),
    ({"aspect_bucket_alignment": "64"}, {"bucket_step": 64}),
    ({"aspect_bucket_alignment": 8}, {"bucket_step": 0}),
    ({"aspect_bucket_alignment": 16, "model_family": "sdxl"}, {"bucket_step": 32}),
    ({"aspect_bucket_alignment": "wide"}, Kind.UNREADABLE),
    ({"something_new": 1}, Kind.UNKNOWN),
]


@pytest.mark.parametrize(("theirs", "expected"), SIMPLE_KEYS, ids=[str(k) for k, _ in SIMPLE_KEYS])
def test_a_key_of_simpletuner(
    theirs: dict[str, Any], expected: dict[str, Any] | Kind, tmp_path: Path
) -> None:
    check(simple(tmp_path, **theirs), next(iter(theirs)), expected)


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        (
            {
                "algo": "lokr",
                "multiplier": 1.0,
                "linear_dim": 10000,
                "linear_alpha": 1,
                "factor": 16,
            },
            {
                "lora_variant": "lokr",
                "lokr_factor": 16,
                "lokr_full_matrix": True,
                "lora_alpha": 1.0,
            },
        ),
        (
            {"algo": "lokr", "linear_dim": 8, "full_matrix": True},
            {"lora_variant": "lokr", "lokr_factor": -1, "lokr_full_matrix": True},
        ),
        (
            {"linear_dim": 8, "linear_alpha": 4, "algo": "lokr", "apply_preset": {}},
            {"lora_variant": "lokr", "lora_rank": 8, "lora_alpha": 4.0, "lokr_full_matrix": False},
        ),
        ({"algo": "lora", "linear_dim": 8, "factor": 3}, {"lora_variant": "lora", "lora_rank": 8}),
        ({"algo": "loha"}, {"lora_variant": "lora"}),
    ],
)
def test_what_lycoris_trains_for_simpletuner(
    theirs: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "lycoris_config.json").write_text(json.dumps(theirs))
    imported = simple(tmp_path, lora_type="lycoris", lycoris_config="config/lycoris_config.json")
    values = imported.spec.model_dump(mode="json")
    assert {key: values[key] for key in expected} == expected
    if theirs["algo"] == "loha":
        assert entry(imported, "lycoris_config.algo").kind is Lost


DATASETS: Final[list[tuple[dict[str, Any], dict[str, Any] | Kind]]] = [
    ({"repeats": 0}, {"dataset": "d"}),
    ({"repeats": "9"}, {"datasets": [{"path": "d", "repeats": 10}]}),
    ({"resolution": 0.25, "resolution_type": "area"}, {"resolution": 512}),
    ({"resolution": 1, "resolution_type": "area"}, {"resolution": 1024}),
    ({"resolution": 0.5, "resolution_type": "area"}, {"resolution": 704}),
    ({"resolution": 768, "resolution_type": "pixel"}, {"resolution": 768}),
    ({"resolution": "640"}, {"resolution": 640}),
    ({"resolution": "big"}, Kind.UNREADABLE),
    ({"minimum_image_size": 512, "resolution": 1024}, {"max_upscale": 2.0}),
    ({"minimum_image_size": 2048, "resolution": 1024}, {"max_upscale": 1.0}),
    (
        {"minimum_image_size": 0.25, "resolution": 1, "resolution_type": "area"},
        {"max_upscale": 2.0},
    ),
    ({"caption_strategy": "textfile"}, Needless),
    ({"caption_strategy": "filename"}, Lost),
    ({"caption_strategy": "parquet"}, Lost),
    (
        {"instance_prompt": "a cat", "caption_strategy": "instanceprompt"},
        {"trigger_word": "a cat", "missing_captions": "empty"},
    ),
    ({"instance_prompt": "a cat", "only_instance_prompt": "true"}, {"missing_captions": "empty"}),
    (
        {"instance_prompt": "a cat", "prepend_instance_prompt": True},
        {"trigger_word": "a cat", "missing_captions": "skip"},
    ),
    ({"instance_prompt": "a cat"}, Needless),
    ({"crop_style": "random", "crop": True}, {"crop": "random"}),
    ({"crop_style": "random", "crop": False}, Needless),
    ({"crop_style": "face", "crop": True}, Lost),
    (
        {"caption_shuffle": {"enable": True, "count": 3, "position_start": 1}},
        {"shuffle_captions": True, "caption_shuffles": 4, "keep_tags": 1},
    ),
    ({"probability": 1.0}, Needless),
    ({"probability": 0.2}, Lost),
    (
        {"is_regularisation_data": True},
        {
            "datasets": [{"path": "d", "regularization": True}],
            "regularization_target": "base",
        },
    ),
    ({"is_regularization_data": False}, {"dataset": "d", "regularization_target": "images"}),
    ({"crop": True, "crop_aspect": "square"}, {"crop": "square"}),
    ({"maximum_aspect_ratio": 3.0}, {"max_aspect_ratio": 3.0}),
    ({"cache_dir_vae": "x"}, Needless),
    ({"never_heard_of": 1}, Kind.UNKNOWN),
]


@pytest.mark.parametrize(("theirs", "expected"), DATASETS, ids=[str(k) for k, _ in DATASETS])
def test_a_dataset_of_simpletuner(
    theirs: dict[str, Any], expected: dict[str, Any] | Kind, tmp_path: Path
) -> None:
    imported = backend(tmp_path, {"id": "a", "instance_data_dir": "d"} | theirs)
    if isinstance(expected, Kind):
        assert entry(imported, f"data.json[0].{next(iter(theirs))}").kind is expected
    else:
        job = imported.spec.model_dump(mode="json") | imported.to_dict()
        assert {name: job[name] for name in expected} == expected


# Datasets of SimpleTuner's guides to DreamBooth and AuraFlow, without what all of them share.
GUIDES: Final = {
    "dreambooth": [
        {"id": "a", "instance_data_dir": "subject", "repeats": 100, "resolution": 512},
        {"id": "b", "instance_data_dir": "subject", "repeats": 100, "resolution": 1024},
        {"id": "c", "instance_data_dir": "reg", "resolution": 512, "is_regularisation_data": True},
        {"id": "d", "instance_data_dir": "reg", "resolution": 1024, "is_regularisation_data": True},
        {"id": "e", "dataset_type": "text_embeds", "default": True, "cache_dir": "t"},
    ],
    "auraflow": [
        {"id": "a", "instance_data_dir": "reg", "is_regularisation_data": True, "crop": True},
        {"id": "b", "instance_data_dir": "subject", "crop": False},
        {"id": "c", "instance_data_dir": "subject", "resolution": 512, "crop": False},
    ],
}


@pytest.mark.parametrize("guide", GUIDES)
def test_regularization_of_simpletuner_is_towards_the_base_for_a_lora(
    guide: str, tmp_path: Path
) -> None:
    for kind, target in (("lora", "base"), ("full", "images")):
        spec = backend(tmp_path, *GUIDES[guide], model_type=kind).spec
        assert spec.regularization_target == target
        assert {d.path: d.regularization for d in spec.datasets or []} == {
            "subject": False,
            "reg": True,
        }


def test_what_ai_toolkit_preserves(tmp_path: Path) -> None:
    """Its form writes all of these keys, whatever is on."""
    folder = EXAMPLES / "ai-toolkit"
    text = (folder / "wan22-lora.yaml").read_text().replace("trigger_word: null", "")
    for name, changed, expected in (
        ("off", {}, ("none", None, 1.0)),
        (
            "class",
            {"diff_output_preservation: false": "diff_output_preservation: true"},
            ("class", "person", 1.0),
        ),
        (
            "blank",
            {
                "diff_output_preservation: false": "blank_prompt_preservation: true\n"
                "        blank_prompt_preservation_multiplier: 0.25"
            },
            ("blank", None, 0.25),
        ),
    ):
        own = text
        for old, new in changed.items():
            own = own.replace(old, new)
        (tmp_path / f"{name}.yaml").write_text(own)
        spec = import_ai_toolkit(tmp_path / f"{name}.yaml").spec
        found = (spec.preservation, spec.preservation_class, spec.preservation_weight)
        assert found == expected
    datasets = [{"folder_path": "a"}, {"folder_path": "r", "is_reg": True, "prior_reg": True}]
    assert process(tmp_path, network={}, datasets=datasets).spec.regularization_target == "base"
    datasets[1]["folder_path"] = "a"
    warnings = process(tmp_path, network={}, datasets=datasets).report.warnings
    assert any("a is listed for training and for regularization" in text for text in warnings)


AI_KEYS: Final[list[tuple[dict[str, Any], dict[str, Any] | Kind]]] = [
    ({"train__lr": "1e-4"}, {"learning_rate": 1e-4}),
    ({"train__optimizer": "adamw8bit"}, {"optimizer": "adamw_8bit"}),
    ({"train__optimizer": "automagic"}, Lost),
    ({"train__optimizer": "adamw8"}, {"optimizer": "adamw_8bit", "weight_decay": 0.0}),
    ({"train__lr": 1e-4, "train__optimizer": "prodigy"}, {"learning_rate": 1.0}),
    ({"train__lr": 0.5, "train__optimizer": "prodigy8bit"}, {"learning_rate": 0.5}),
    ({"train__lr_scheduler": "linear"}, Lost),  # rises, from a third of the rate
    ({"train__lr_scheduler": "cosine_with_restarts"}, {"lr_scheduler": "cosine"}),
    ({"train__lr_scheduler": "constant_with_warmup"}, {"lr_warmup_steps": 1000}),
    ({"model__arch": "sd15"}, {"model_family": "stable_diffusion"}),
    (
        {"train__optimizer_params": {"betas": [0.8, 0.9], "eps": "1e-6"}},
        {"adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-6},
    ),
    ({"train__optimizer_params": {"betas": [0.8, "x"]}}, Kind.UNREADABLE),
    ({"train__optimizer_params": {"betas": [0.8, 0]}}, {"adam_beta1": 0.8, "adam_beta2": 0.0}),
    ({"train__dtype": "float16"}, {"mixed_precision": "fp16"}),
    ({"train__timestep_type": "linear"}, {"timestep_sampling": "uniform"}),
    (
        {"train__timestep_type": "shift"},
        {"timestep_sampling": "uniform_shift", "flow_shift": None},
    ),
    (
        {"train__timestep_type": "shift", "model__arch": "zimage"},
        {"timestep_sampling": "uniform_shift", "flow_shift": 3.0},
    ),
    ({"model__arch": "ltx2.3"}, {"model_family": "ltx2", "model_flavour": "2.3-22b"}),
    (
        {"model__name_or_path": "Lightricks/LTX-2.5", "model__arch": "ltx2.5"},
        {"pretrained_model_name_or_path": "Lightricks/LTX-2.5-Diffusers"},
    ),
    ({"model__arch": "ltx2.5"}, {"model_family": "ltx2", "model_flavour": "2.5-22b"}),
    ({"model__arch": "ltx2"}, {"model_family": "ltx2", "model_flavour": "2-19b"}),
    (
        {"train__timestep_type": "sigmoid", "model__arch": "chroma"},
        {"timestep_sampling": "logit_normal", "flow_shift": None},
    ),
    (
        {"train__timestep_type": "flux_shift", "model__arch": "chroma"},
        {"timestep_sampling": "uniform_shift", "flow_shift": 3.158},
    ),
    (
        {"train__timestep_type": "shift", "model__arch": "lumina2"},
        {"timestep_sampling": "uniform_shift", "flow_shift": 6.0},
    ),
    (
        {"train__timestep_type": "weighted"},
        {"timestep_sampling": "uniform", "loss_weighting": "weighted"},
    ),
    ({"train__timestep_type": "sigmoid"}, {"timestep_sampling": "logit_normal"}),
    (
        {"train__timestep_type": "sigmoid", "model__arch": "ideogram4"},
        {"timestep_sampling": "logit_normal", "logit_std": 1.0},
    ),
    ({"train__timestep_type": "lognorm_blend"}, Lost),
    ({"train__gradient_accumulation": 4}, {"gradient_accumulation_steps": 4}),
    ({"train__gradient_accumulation_steps": -1}, Lost),
    ({"train__content_or_style": "style"}, Lost),
    (
        {"train__min_snr_gamma": 5.0, "model__is_flux": False, "model__is_xl": True},
        {"snr_gamma": 5.0},
    ),
    ({"train": {"lr": 1e-4}}, {"weight_decay": 0.01, "adam_epsilon": 1e-6}),
    ({"train": {"optimizer": "adam8bit"}}, {"weight_decay": 0.0, "adam_epsilon": 1e-6}),
    ({"train": {"optimizer": "lion"}}, {"weight_decay": 0.0}),
    ({"network": {"type": "lora"}}, {"lora_rank": 4, "lora_alpha": 1.0}),
    ({"train__train_text_encoder": True}, Lost),
    (
        {
            "model__arch": "sdxl",
            "model__name_or_path": "stabilityai/stable-diffusion-xl-base-1.0",
            "network__linear": 8,
            "train__train_text_encoder": True,
        },
        {"text_encoder_lora_rank": 8},
    ),
    ({"train__dist_mode": "fsdp"}, {"fsdp_enable": True}),
    ({"train__fsdp_cpu_offload": True, "train__dist_mode": "fsdp"}, {"fsdp_cpu_offload": True}),
    ({"train__fsdp_novelty": 1}, Kind.UNKNOWN),
    ({"device": "cuda"}, Needless),
    ({"device": "cuda:2"}, {"gpus": [2]}),
    ({"device": "cpu"}, {"device": "cpu"}),
    ({"device": "mps"}, Lost),
    ({"type": "concept_slider"}, Lost),
    ({"network": {"type": "lokr", "linear": 8}}, {"lora_variant": "lokr", "lora_rank": 8}),
    ({"network": {"lokr_factor": 8, "type": "lokr"}}, {"lokr_factor": 8}),
    ({"network": {"lokr_factor": 8, "type": "lora"}}, Needless),
    (
        {"network": {"lokr_full_rank": True, "type": "lokr", "linear": 8}},
        {"lokr_full_matrix": True, "lora_rank": 16},
    ),
    ({"network": {"linear": 10**9, "type": "lokr"}}, {"lokr_full_matrix": True}),
    ({"network": {"type": "loha"}}, Lost),
    ({"network__conv": 4}, Lost),
    ({"network": {"type": "lora", "rank": 4, "alpha": 2}}, {"lora_rank": 4, "lora_alpha": 2.0}),
    ({"model__quantize": True}, {"base_precision": "fp8_scaled"}),
    ({"model__quantize": True, "model__qtype": "uint4|ara.safetensors"}, {"base_precision": "nf4"}),
    ({"model__quantize": True, "model__qtype": "qint8"}, {"base_precision": "int8"}),
    ({"model__quantize": False}, Needless),
    ({"model__arch": "flux2"}, {"model_family": "flux2"}),
    ({"model__arch": "sd1"}, {"model_family": "stable_diffusion", "model_flavour": None}),
    (
        {"model__is_v2": True, "model__is_flux": False},
        {"model_family": "stable_diffusion", "model_flavour": "2.1"},
    ),
    (
        {"model__is_flux": False, "model__name_or_path": "a/b"},
        {"model_family": "stable_diffusion"},
    ),
    ({"model__arch": "wan21:1b"}, {"model_flavour": "2.1-t2v-1.3b"}),
    ({"model__arch": "wan21_i2v:14b480p"}, {"model_flavour": "2.1-i2v-14b-480p"}),
    ({"model__arch": "qwen_image_edit"}, {"model_flavour": "edit"}),
    ({"model__arch": "krea2:turbo"}, {"model_family": "krea2", "model_flavour": "turbo"}),
    ({"model__arch": "krea2:o_edit"}, Lost),
    (
        {"train__timestep_type": "shift", "model__arch": "anima"},
        {"model_family": "anima", "timestep_sampling": "uniform_shift", "flow_shift": 3.0},
    ),
    (
        {"train__timestep_type": "shift", "model__arch": "minimax_h3"},
        {"model_family": "minimax_h3", "timestep_sampling": "uniform_shift", "flow_shift": 12.0},
    ),
    ({"model__arch": "ideogram4"}, {"model_family": "ideogram4"}),
    ({"model__arch": "omnigen2"}, Lost),
    (
        {"model__arch": "wan22_14b_i2v", "model__model_kwargs": {"train_high_noise": False}},
        {"model_flavour": "2.2-i2v-a14b-low"},
    ),
    (
        {"model__arch": "wan22_14b", "model__model_kwargs": {"train_high_noise": False}},
        {"model_flavour": "2.2-t2v-a14b-low"},
    ),
    ({"model__assistant_lora_path": "ostris/FLUX.1-schnell-training-adapter"}, Lost),
    ({"model__assistant_lora_path": "/loras/turbo"}, {"training_adapter": "/loras/turbo"}),
    (
        {"sample__prompts": ["a -- b"], "sample__seed": 1},
        {"validation_prompts": [{"prompt": "a -- b"}]},
    ),
    ({"sample__prompts": ["a"], "train__disable_sampling": True}, Needless),
    ({"sample__width": 640, "sample__height": 480}, {"validation_resolution": "640x480"}),
    ({"save__dtype": "bfloat16"}, {"export_dtype": "bf16"}),
    ({"logging__use_wandb": True}, {"report_to": ["wandb"]}),
    ({"logging__use_wandb": False}, Needless),
    (
        {"logging__project_name": "pots", "logging__use_wandb": True},
        {"tracker_project_name": "pots"},
    ),
    ({"logging__project_name": "pots"}, Needless),
    ({"logging__log_every": 10}, Needless),
    ({"trainingfolder": "typo"}, Kind.UNKNOWN),
]


@pytest.mark.parametrize(("theirs", "expected"), AI_KEYS, ids=[str(k) for k, _ in AI_KEYS])
def test_a_key_of_ai_toolkit(
    theirs: dict[str, Any], expected: dict[str, Any] | Kind, tmp_path: Path
) -> None:
    key, value = next(iter(theirs.items()))
    name = key.replace("__", ".")
    if isinstance(value, dict):
        name = f"{name}.{next(iter(value))}"
    check(process(tmp_path, **theirs), name, expected)


@pytest.mark.parametrize(("tolerance", "step"), [({}, 64), ({"bucket_tolerance": 32}, 32)])
def test_buckets_lie_as_far_apart_as_in_ai_toolkit(
    tolerance: dict[str, int], step: int, tmp_path: Path
) -> None:
    """It has 64 pixels at every resolution, where a job here has fewer at smaller ones."""
    imported = process(tmp_path, datasets=[{"folder_path": "d", "resolution": 512} | tolerance])
    assert imported.to_dict()["bucket_step"] == step


SCRIPT_FLAGS: Final[list[tuple[str, dict[str, Any] | Kind]]] = [
    ("--rank 8", {"lora_rank": 8}),
    ("--report_to=tensorboard", {"report_to": ["tensorboard"]}),
    ("--report_to none", Needless),
    ("--report_to all", Lost),
    ("--logging_dir=/logs --report_to=wandb", {"logging_dir": "/logs"}),
    ("--logging_dir=logs --report_to=wandb", Needless),
    ("--tracker_name=pots --report_to=comet_ml", {"tracker_project_name": "pots"}),
    ("--lora_alpha=16", {"lora_alpha": 16.0}),
    ("--use_8bit_adam", {"optimizer": "adamw_8bit"}),
    ("--use_8bit_adam --optimizer prodigy", Needless),
    ("--optimizer=AdamW", {"optimizer": "adamw"}),
    ("--center_crop", {"crop": "center"}),
    ("--random_flip", {"random_flip": True}),
    ("--guidance_scale=2", {"train_guidance": 2.0}),
    ("--weighting_scheme=none", {"timestep_sampling": "uniform"}),
    (
        "--weighting_scheme=cosmap",
        {"timestep_sampling": "uniform", "loss_weighting": "cosmap"},
    ),
    ("--weighting_scheme=mode", {"timestep_sampling": "mode"}),
    ("--mode_scale=0.5 --weighting_scheme=mode", {"mode_scale": 0.5}),
    ("--mode_scale=0.5", Needless),
    ("--logit_mean=-1 --weighting_scheme logit_normal", {"logit_mean": 1.0}),
    ("--train_text_encoder", Lost),
    ("--with_prior_preservation", Lost),  # without a class prompt
    (
        "--with_prior_preservation --class_prompt=cat --num_class_images=7",
        {"num_class_images": 7, "class_prompt": "cat"},
    ),
    (
        "--prior_loss_weight=0.5 --with_prior_preservation --class_prompt=cat",
        {"prior_loss_weight": 0.5, "num_class_images": 100},
    ),
    ("--prior_loss_weight=0.5", Needless),
    ("--class_prompt=cat", Needless),
    ("--lr_warmup_steps=500", Needless),
    ("--lr_warmup_steps=50 --lr_scheduler=cosine", {"lr_warmup_steps": 50}),
    ("--lr_scheduler=cosine", {"lr_scheduler": "cosine", "lr_warmup_steps": 500}),
    ("--num_train_epochs=2", {"num_train_epochs": 2.0, "max_train_steps": None}),
    ("--num_train_epochs=2 --max_train_steps=10", Needless),
    ("--validation_epochs=3", {"validation_steps": "3 epochs"}),
    ("--push_to_hub", {"push_to_hub": True}),
    ("--hub_model_id=a/b --push_to_hub", {"hub_model_id": "a/b"}),
    ("--revision=main", Needless),
    (
        "--revision=v2 --pretrained_model_name_or_path=a/b",
        {"pretrained_model_name_or_path": "a/b@v2"},
    ),
    ("--hub_token=abc", Needless),
    ("--resume_from_checkpoint=latest", Needless),
    ("--max_train_steps=many", Kind.UNREADABLE),
    ("--validation_prompt=a b", Kind.UNREADABLE),
    ("--something_new", Kind.UNKNOWN),
]


@pytest.mark.parametrize(("flags", "expected"), SCRIPT_FLAGS)
def test_a_flag_of_a_script(flags: str, expected: dict[str, Any] | Kind) -> None:
    words = ["accelerate", "launch", "train_dreambooth_lora_flux.py", *flags.split(" ")]
    check(import_script(words), words[3].split("=")[0].lstrip("-"), expected)


SCRIPT_NAMES: Final = [
    ("train_dreambooth_lora_sdxl.py", "sdxl", "lora"),
    ("train_text_to_image_sdxl.py", "sdxl", "full"),
    ("train_dreambooth_flux.py", "flux", "full"),
    ("examples/dreambooth/train_dreambooth_lora_flux2_klein.py", "flux2", "lora"),
    ("train_dreambooth_lora_qwen_image.py", "qwen_image", "lora"),
    ("train_dreambooth_lora_z_image.py", "z_image", "lora"),
    ("train_dreambooth_lora_krea2.py", "krea2", "lora"),
    ("train_dreambooth_lora_ideogram4.py", "ideogram4", "lora"),
    ("my_supported_train_sana_lora.py", "sana", "lora"),
    ("train_dreambooth_lora.py", "stable_diffusion", "lora"),
    ("train_text_to_image.py", "stable_diffusion", "full"),
]


@pytest.mark.parametrize(("script", "family", "kind"), SCRIPT_NAMES)
def test_a_script_s_name_says_what_is_trained(script: str, family: str, kind: str) -> None:
    spec = import_script(["accelerate", "launch", script, "--seed=1"]).spec
    assert (spec.model_family, spec.model_type) == (family, kind)


@pytest.mark.parametrize("flag", ["--rank=16", "--lora_alpha=8", "--lora_layers=attn.to_q"])
def test_flags_of_a_lora_say_that_a_script_of_any_name_trains_one(flag: str) -> None:
    spec = import_script(["accelerate", "launch", "my_flux.py", flag]).spec
    assert (spec.model_family, spec.model_type) == ("flux", "lora")


@pytest.mark.parametrize(
    ("model", "family"),
    [
        ("/data/stable-diffusion/flux-dev", "flux"),
        ("/apps/stable-diffusion-webui/models/sdxl-base/", "sdxl"),
        ("someone/stable-diffusion-xl-own", "sdxl"),
        ("/flux/stable-diffusion-v1-4", "stable_diffusion"),
        ("/models/stable-diffusion/own", "stable_diffusion"),
        ("/models/flux/stable/own", "flux"),
        ("someone/own", None),
    ],
)
def test_the_end_of_a_model_s_name_says_its_family(model: str, family: str | None) -> None:
    assert guess_family(Draft({}, EXAMPLES), model) == family


def test_what_tools_leave_out_is_theirs(tmp_path: Path) -> None:
    """Read from their sources; `tests/bench/imports.py` shows when those change."""
    for words, expected in (
        ({"use_ema": True}, 0.995),
        ({"use_ema": True, "ema_decay": 0.9}, 0.9),
        ({"use_ema": False}, 0.999),
    ):
        assert simple(tmp_path, **words).spec.ema_decay == expected
    assert simple(tmp_path, seed=1).spec.caption_dropout_probability == 0.1
    for script, tokens in (
        ("train_dreambooth_flux.py", 77),
        ("train_dreambooth_lora_flux.py", 512),
        ("train_dreambooth_lora_sd3.py", 77),
    ):
        spec = import_script(["accelerate", "launch", script, "--seed=1"]).spec
        assert spec.max_sequence_length == tokens
    spec = import_script(["accelerate", "launch", "train_control_lora_flux.py", "--seed=1"]).spec
    assert spec.resolution == 1024
    for script, rate in (
        ("train_control_lora_flux.py", 5e-6),
        ("examples/dreambooth/train_dreambooth.py", 5e-6),
        ("train_dreambooth_lora.py", 5e-4),
        ("train_text_to_image_lora.py", 1e-4),
    ):
        imported = import_script(["accelerate", "launch", script, "--seed=1"])
        told = [one.key for one in imported.report.assumed if "learning_rate" in one.ours]
        assert imported.spec.learning_rate == rate
        assert told == ([] if rate == 1e-4 else ["learning_rate"])


OPTIMIZERS: Final = {
    "adamw_bf16": (0.9, 0.999, 1e-6, 0.01),
    "torch-adamw": (0.9, 0.999, 1e-8, 0.01),
    "bnb-adam8bit": (0.9, 0.999, 1e-8, 0.0),
    "adamw_schedulefree": (0.9, 0.999, 1e-8, 0.01),
    "adamw_schedulefree+no_kahan": (0.9, 0.999, 1e-6, 0.001),
    "optimi-adamw": (0.9, 0.99, 1e-6, 0.0),
    "prodigy": (0.9, 0.99, 1e-8, 0.0),
}


@pytest.mark.parametrize(("name", "expected"), OPTIMIZERS.items())
def test_an_optimizer_of_simpletuner_has_its_own_settings(
    name: str, expected: tuple[float, ...], tmp_path: Path
) -> None:
    imported = simple(tmp_path, optimizer=name, adam_epsilon=1e-3, adam_weight_decay=0.5)
    spec = imported.spec
    settings = (spec.adam_beta1, spec.adam_beta2, spec.adam_epsilon, spec.weight_decay)
    assert settings == expected
    differ = settings != (0.9, 0.999, 1e-8, 0.0)  # from what a job has
    assert [e.key for e in imported.report.assumed].count("optimizer_config") == differ
    # What is set goes before.
    spec = simple(tmp_path, optimizer=name, optimizer_config="weight_decay=0.3").spec
    assert (spec.weight_decay, spec.adam_epsilon) == (0.3, expected[2])


def test_what_simpletuner_does_where_a_configuration_is_silent(tmp_path: Path) -> None:
    imported = simple(tmp_path, push_to_hub=True, lr_scheduler="polynomial")
    assert imported.spec.hub_private_repo  # its model_card_private
    assert (imported.spec.lr_end, imported.spec.lr_power) == (4e-7, 0.8)
    assert imported.to_dict()["num_train_epochs"] == 1
    imported = simple(tmp_path, model_family="sdxl", validation_prompt="a", max_train_steps=5)
    assert imported.spec.validation_negative_prompt == "blurry, cropped, ugly"
    unsupported = {e.key for e in imported.report.assumed if e.kind is Lost}
    assert unsupported == {"grad_clip_method", "pretrained_vae_model_name_or_path"}
    assert imported.spec.resolution == 1024
    spec = backend(tmp_path, {"id": "a", "instance_data_dir": "d"}, model_family="wan").spec
    assert spec.resolution == 1024


@pytest.mark.parametrize(
    ("family", "model"),
    [
        ("flux", "black-forest-labs/FLUX.1-Krea-dev"),
        ("hidream", "HiDream-ai/HiDream-I1-Full"),
        ("hunyuanvideo", "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v"),
        ("ltxvideo2", "Lightricks/LTX-2"),
        ("lumina2", "Alpha-VLLM/Lumina-Image-2.0"),
        ("pixart_sigma", "terminusresearch/pixart-900m-1024-ft-v0.6"),
        ("sana", "Efficient-Large-Model/SANA1.5_4.8B_1024px_diffusers"),
        ("sd1x", "Lykon/dreamshaper-8"),
    ],
)
def test_the_model_that_simpletuner_takes_where_none_is_named(
    family: str, model: str, tmp_path: Path
) -> None:
    imported = simple(tmp_path, model_family=family)
    assert imported.spec.pretrained_model_name_or_path == model
    assert "pretrained_model_name_or_path" in {e.key for e in imported.report.assumed}


def test_what_ai_toolkit_does_where_a_configuration_is_silent(tmp_path: Path) -> None:
    wan = {"arch": "wan21:14b", "name_or_path": "Wan-AI/Wan2.1-T2V-14B-Diffusers"}
    datasets = [{"folder_path": "a", "num_frames": 33}]
    imported = process(tmp_path, model=wan, datasets=datasets, sample__prompts=["a"])
    assert imported.spec.export_dtype == "fp16"
    assert imported.spec.validation_on_startup
    assert "datasets[0].shrink_video_to_frames" in {
        e.key for e in imported.report.assumed if e.kind is Lost
    }
    datasets[0]["shrink_video_to_frames"] = False
    assert process(tmp_path, model=wan, datasets=datasets).spec.fps == 24
    datasets[0] = {"folder_path": "a", "auto_frame_count": True}
    imported = process(tmp_path, model=wan, datasets=datasets)
    assert entry(imported, "datasets[0].auto_frame_count").kind is Lost
    # Of images, there is nothing to shrink.
    datasets[0] = {"folder_path": "a", "shrink_video_to_frames": True}
    imported = process(tmp_path, datasets=datasets)
    assert entry(imported, "datasets[0].shrink_video_to_frames").kind is Needless


def test_what_only_one_of_two_datasets_sets_is_warned_of(tmp_path: Path) -> None:
    datasets = [{"folder_path": "a"}, {"folder_path": "b", "flip_x": True}]
    imported = process(tmp_path, datasets=datasets)
    assert imported.spec.random_flip
    assert any(text.startswith("random_flip: 1 of 2") for text in imported.report.warnings)
    datasets = [{"folder_path": "a"}, {"folder_path": "b", "flip_x": False}]
    assert not process(tmp_path, datasets=datasets).report.warnings


@pytest.mark.parametrize(
    "script",
    [
        "train_controlnet_flux.py",
        "textual_inversion.py",
        "train_unconditional.py",
        "train_diffusion_dpo_sdxl.py",
    ],
)
def test_a_script_that_does_something_else_is_not_taken_for_this(script: str) -> None:
    imported = import_script(["accelerate", "launch", script, "--seed=1"])
    assert entry(imported, "script").kind is Lost
    assert imported.report.to_fill_in


# -- odd input -------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ODD, ids=range(len(ODD)))
def test_no_value_of_any_key_breaks_an_import(value: Any, tmp_path: Path) -> None:
    """All keys at once, which may leave nothing of the job; and each is in the report, once."""
    keys = [key for key in simpletuner.CONFIG.rules if key not in ("data_backend_config",)]
    imported = simple(tmp_path, **dict.fromkeys(keys, value))
    assert sorted({e.key for e in imported.report.entries} & set(keys)) == sorted(keys)
    assert all(len(entries(imported, key)) == 1 for key in keys)

    flat = dict.fromkeys((key for key in data_rules.DATASET.rules if "." not in key), value)
    backend(tmp_path, flat, value, {"instance_data_dir": "d", "video": value})

    flat = {key.replace(".", "__"): value for key in ai_toolkit.CONFIG.rules if key.count(".") == 1}
    process(tmp_path, **{key: one for key, one in flat.items() if not key.startswith("config")})
    process(tmp_path, datasets=[dict.fromkeys(ai_toolkit.DATASET.rules, value), value])
    odd = {"datasets": value, "network": value, "sample": value, "trigger_word": value}
    process(tmp_path, "config.yaml", **odd)

    words = [f"--{key}={value}" for key in diffusers_script.SCRIPT.rules]
    import_script(
        ["accelerate", "launch", f"--num_processes={value}", "train_dreambooth_flux.py", *words]
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1, 2]", "it has no keys"),
        ("{}", "has no keys of SimpleTuner"),
        ('{"a": 1}', "has no keys of SimpleTuner"),
        ('{"a": 1,}', "line 1 is not valid JSON"),
        ("[" * 100_000, "cannot be read|not valid JSON"),
        ("\0\0", "not a text file"),
    ],
)
def test_what_is_no_configuration_is_one_sentence(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(UserError, match=said) as caught:
        import_simpletuner(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [1", "line 2 is not valid YAML|line 1 is not valid YAML"),
        ("job: generate\nconfig: {process: [{}]}", "job is generate"),
        ("config: {process: []}", "config.process is missing"),
        ("- 1", "config.process is missing"),
        ("a: 2024-13-45", "cannot be read"),
        ("config: {process: [{train: {2024-01-01: 1}}]}", "a key cannot be read"),
        ("config: {process: [{!!binary aGk=: 1}]}", "a key cannot be read"),
    ],
)
def test_what_is_no_training_of_ai_toolkit(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=said):
        import_ai_toolkit(path)


@pytest.mark.parametrize("levels", [40, 900])
@pytest.mark.parametrize("opening", ["[", '{"a": '])
def test_deep_json_is_one_sentence(opening: str, levels: int, tmp_path: Path) -> None:
    """Rules, and what is shown of values, go down into them by recursion."""
    closing = "]" if opening == "[" else "}"
    deep = opening * levels + "1" + closing * levels
    for importer, text in (
        (import_simpletuner, f'{{"lora_rank": {deep}}}'),
        (import_ai_toolkit, f'{{"config": {{"process": [{{"train": {{"lr": {deep}}}}}]}}}}'),
    ):
        path = tmp_path / "config.json"
        path.write_text(text)
        with pytest.raises(UserError, match="more than 30 levels"):
            importer(path)


BESIDE: Final = [
    ("data_backend_config", {}, "[]", "{}"),
    ("lycoris_config", {"lora_type": "lycoris"}, "{}", "[]"),
    ("user_prompt_library", {}, "{}", "[]"),
    ("accelerate_config", {}, "{}", "[]"),
]


@pytest.mark.parametrize(("key", "more", "good", "other"), BESIDE, ids=[row[0] for row in BESIDE])
def test_a_file_beside_the_configuration_is_read_or_said_why_not(
    key: str, more: dict[str, Any], good: str, other: str, tmp_path: Path
) -> None:
    def why(name: str) -> str:
        kept = entry(simple(tmp_path, **more, **{key: name}), key)
        assert kept.kind is Kind.UNREADABLE
        assert "; set " in kept.why or "; list " in kept.why  # what to do instead
        return kept.why

    (tmp_path / "loop.json").symlink_to(tmp_path / "loop.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00\x81")
    (tmp_path / "large.json").write_text(good + " " * LARGEST_TEXT)
    (tmp_path / "bomb.yaml").write_text(
        "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]\n" for a, b in ("ab", "bc", "cd", "de"))
    )
    (tmp_path / "other.json").write_text(other)
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe.json")
    for name, words in {
        "nowhere.json": "no such file",
        "loop.json": "no such file",
        "bytes.json": "not a text file",
        "large.json": "larger than",
        "bomb.yaml": "more than 20000 values",
        "other.json": "other.json has no ",
        "directory": "is a directory",
        "pipe.json": "not a regular file",
    }.items():
        assert words in why(name), name
    (tmp_path / "good.json").write_text(good)
    imported = simple(tmp_path, **more, **{key: "good.json"})
    assert entry(imported, key).kind in (Kind.TAKEN, Kind.TRANSLATED)


def test_what_is_no_prompt_in_a_library_is_said(tmp_path: Path) -> None:
    library = {"a": "a cat", "b": {"prompt": "a dog"}, "c": ["x"], "d": 5, "e": {}}
    (tmp_path / "library.json").write_text(json.dumps(library))
    imported = simple(tmp_path, user_prompt_library="library.json")
    assert [prompt.prompt for prompt in imported.spec.validation_prompts] == ["a cat", "a dog"]
    assert "3 of its entries are no prompts" in entry(imported, "user_prompt_library").why


@pytest.mark.parametrize("first", [True, False])
def test_lycoris_s_own_file_wins_over_keys_that_the_tool_ignores(
    first: bool, tmp_path: Path
) -> None:
    own = {"algo": "lokr", "linear_dim": 8, "linear_alpha": 4}
    (tmp_path / "lycoris.json").write_text(json.dumps(own))
    ignored = {
        "lora_rank": 64,
        "lora_alpha": 32,
        "lora_dropout": 0.1,
        "use_dora": True,
        "lora_init_type": "gaussian",
        "flux_lora_target": "mmdit",
    }
    lycoris = {"lora_type": "lycoris", "lycoris_config": "lycoris.json"}
    imported = simple(tmp_path, **(lycoris | ignored if first else ignored | lycoris))
    spec = imported.spec
    assert (spec.lora_variant, spec.lora_rank, spec.lora_alpha) == ("lokr", 8, 4)
    assert (spec.lora_dropout, spec.lora_init, spec.lora_target_modules) == (0, "kaiming", None)
    assert all(entry(imported, key).kind is Needless for key in ignored)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"load_in_8bit": true}', {"base_precision": "int8"}),
        ('{"load_in_4bit": true, "bnb_4bit_quant_type": "nf4"}', {"base_precision": "nf4"}),
        ('{"load_in_4bit": false}', Needless),
        ("[]", Kind.UNREADABLE),
        (None, Kind.UNREADABLE),
    ],
)
def test_a_file_for_bitsandbytes(
    text: str | None, expected: dict[str, Any] | Kind, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "bnb.json").write_text(text)
    script = tmp_path / "run.sh"
    script.write_text(
        "python train_dreambooth_lora_flux.py --bnb_quantization_config_path bnb.json"
    )
    check(import_script([str(script)]), "bnb_quantization_config_path", expected)


def test_no_resolution_of_several_is_dropped(tmp_path: Path) -> None:
    imported = process(tmp_path, datasets=[{"folder_path": "a", "resolution": [512, "7 68"]}])
    assert entry(imported, "datasets[0].resolution").kind is Kind.UNREADABLE


@pytest.mark.parametrize("number", [-4, 1e308, 0.5])
def test_a_batch_or_a_number_of_epochs_that_is_none(number: float, tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    for i in range(3):
        (images / f"{i}.png").touch()
    (tmp_path / "data.json").write_text('[{"id": "a", "instance_data_dir": "images"}]')
    for values in (
        {"train_batch_size": number, "lr_scale_sqrt": True, "learning_rate": 1e-4},
        {"num_train_epochs": number},
        {"resolution": number, "resolution_type": "area"},
    ):
        simple(tmp_path, **values, data_backend_config="data.json")


def test_a_directory_a_missing_file_and_bytes(tmp_path: Path) -> None:
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00\x81")
    for name, said in ((".", "is a directory"), ("x.json", "no such file"), ("bytes.json", "text")):
        with pytest.raises(UserError, match=said):
            import_simpletuner(tmp_path / name)


def test_a_key_that_is_misspelled_names_the_nearest(tmp_path: Path) -> None:
    assert '"learning_rate"' in entry(simple(tmp_path, learning_rat=1), "learning_rat").why


def test_a_key_that_is_given_twice_is_told(tmp_path: Path) -> None:
    imported = simple(tmp_path, **{"--seed": 1, "seed": 2})
    assert imported.spec.seed == 2
    assert any("seed: set twice" in text for text in imported.report.warnings)


def test_a_family_that_is_not_here_leaves_a_job_to_fill_in(tmp_path: Path) -> None:
    imported = simple(tmp_path, model_family="kolors", learning_rate=1e-5)
    assert entry(imported, "model_family").kind is Lost
    assert "kolors is not a supported family" in imported.report.to_fill_in[0]
    assert imported.spec.learning_rate == 1e-5


def test_secrets_are_known_by_their_keys_and_by_their_looks() -> None:
    token = "hf_" + "a1B2" * 9
    for key, value in (
        ("hub_token", "x"),
        ("WANDB_API_KEY", "x"),
        ("a.aws_secret_access_key", "x"),
        ("anything", token),
        ("prompt", f"see {token}"),
        ("url", "https://me:pw@host/x"),
        ("webhook_url", "https://host/x"),
        ("words", ["a", token]),
    ):
        assert "(not shown)" in shown(key, value), key
    for key, value in (
        ("tokenizer_max_length", "512"),
        ("shuffle_tokens", "true"),
        ("token_dropout_rate", "0.1"),
        ("model", "hf_datasets/my-own-directory"),
        ("prompt", "a sk-etch of a cat"),
    ):
        assert shown(key, value) == value


def test_a_secret_is_not_copied_whatever_key_it_has(tmp_path: Path) -> None:
    token = "hf_" + "a1B2" * 9
    imported = simple(
        tmp_path, validation_prompt=token, output_dir=token, unheard_of={"token": token}
    )
    assert token not in imported.to_yaml() + json.dumps(imported.report.to_dict())


# -- files beside it -------------------------------------------------------------------------


def test_paths_are_looked_for_beside_the_configuration_and_above(tmp_path: Path) -> None:
    folder = tmp_path / "config" / "mine"
    (tmp_path / "datasets" / "cats").mkdir(parents=True)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model_index.json").write_text('{"_class_name": "SanaPipeline"}')
    folder.mkdir(parents=True)
    imported = backend(
        folder,
        {"id": "a", "instance_data_dir": "datasets/cats"},
        model_family=None,
        pretrained_model_name_or_path="model",
        max_train_steps=100,
    )
    assert imported.spec.dataset == str(tmp_path / "datasets" / "cats")
    assert imported.spec.pretrained_model_name_or_path == str(tmp_path / "model")
    assert imported.spec.model_family == "sana"  # its model_index.json says so
    assert not imported.report.to_fill_in


def test_epochs_stay_epochs_and_repeats_are_part_of_them(
    tmp_path: Path, make_data: Callable[..., Path]
) -> None:
    """How many steps they are, the job's ranks find out, whatever its batch is."""
    imported = backend(
        tmp_path,
        {"id": "a", "instance_data_dir": str(make_data(pictures=10)), "repeats": 1},
        num_train_epochs=3,
        train_batch_size=4,
        num_processes=2,
    )
    assert imported.to_dict()["num_train_epochs"] == 3
    assert imported.spec.max_train_steps is None
    assert [dataset.repeats for dataset in imported.spec.datasets or []] == [2]
    assert total_steps(imported.spec, draws_per_epoch=20) == 8


def test_data_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    imported = simple(tmp_path, data_backend_config="nowhere.json")
    assert entry(imported, "data_backend_config").kind is Kind.UNREADABLE
    assert "dataset is missing" in imported.report.to_fill_in
    (tmp_path / "data.json").write_text("{")
    imported = simple(tmp_path, data_backend_config="data.json")
    assert "not valid JSON" in entry(imported, "data_backend_config").why


def test_a_trigger_word_and_a_caption_for_pictures_without_one(tmp_path: Path) -> None:
    """There the word is put in front of the caption; in prompts it stays the word."""
    job = process(
        tmp_path, trigger_word="c4t", datasets=[{"folder_path": "d", "default_caption": "on a mat"}]
    ).to_dict()
    assert job["trigger_word"] == "c4t"
    assert job["datasets"] == [{"path": "d", "trigger_word": "c4t on a mat"}]


# -- command lines ---------------------------------------------------------------------------


def command(text: str) -> Any:
    return read_command([text])[1]


def test_a_shell_script_is_read_as_a_shell_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(
        "#!/bin/sh\n"
        "# it's commented: accelerate launch other.py --x=1\n"
        "set -e; pip install -q diffusers && cd examples\n"
        'export MODEL="a b/c"; SEED=3\n'
        'EXTRA="--flip --rank 4"\n'
        "A=1 accelerate launch --num_processes=2 --mixed_precision bf16 \\\r\n"
        "  train.py --model=$MODEL --seed ${SEED} \\\n"
        "  # --commented_out=1 \\\n"
        "  $EXTRA --steps=${STEPS:-7} --dir '/x/y z' --lost=$NOWHERE  # don't\n"
        "echo done --x=2\n"
    )
    source, found = read_command([str(path)])
    assert (source, found.script, found.folder) == ("train.sh", "train.py", tmp_path)
    assert found.launch == {"num_processes": "2", "mixed_precision": "bf16"}
    assert found.environment == {"A": "1"}
    assert found.flags == {
        "model": "a b/c",
        "seed": "3",
        "flip": True,
        "rank": "4",
        "steps": "7",
        "dir": "/x/y z",
        "lost": "$NOWHERE",
    }


def test_an_empty_word_does_not_end_a_command(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("accelerate launch train_flux.py --prompt '' --rank 8; echo done")
    assert read_command([str(script)])[1].flags == {"prompt": "", "rank": "8"}


def test_ways_to_start_a_script() -> None:
    for text, script in (
        ("accelerate launch train.py --a=1", "train.py"),
        ("/opt/bin/accelerate launch --multi_gpu x/train.py --a=1", "x/train.py"),
        ("torchrun --nproc_per_node=4 train.py --a=1", "train.py"),
        ("python3 -u train.py --a=1", "train.py"),
        ("CUDA_VISIBLE_DEVICES=0 python train.py --a=1", "train.py"),
        ("--a=1", None),
    ):
        found = command(text)
        assert (found.script, found.flags) == (script, {"a": "1"}), text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nothing here", "no training command"),
        ("nosuchfile.sh", "no such file"),
        ('accelerate launch train.py --a="x', "quotation"),
        ("accelerate launch a.py --a=1\naccelerate launch b.py --a=1", "2 training commands"),
    ],
)
def test_what_is_no_command_is_one_sentence(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_command([text])


def test_every_family_of_the_tables_is_spelled_as_here() -> None:
    """Tables name families and flavours by hand."""
    for family, names in simpletuner.DATA["flavours"].items():
        assert set(names.values()) <= set(FAMILIES[family].flavours), family
    for family, words in diffusion_pipe.DATA["flavours"].items():
        assert set(words.values()) <= set(FAMILIES[family].flavours), family
    models = {**ai_toolkit.DATA["architectures"], **onetrainer.DATA["models"]}
    for family, _, flavour in (text.partition(" ") for text in models.values() if text):
        assert not flavour or flavour in FAMILIES[family].flavours, flavour


@pytest.mark.parametrize("path", TABLES, ids=[path.parent.name for path in TABLES])
def test_no_key_of_a_table_is_written_twice(path: Path) -> None:
    """YAML takes the later one in silence."""
    nodes = [yaml.compose(path.read_text(encoding="utf-8"))]
    while nodes:
        node = nodes.pop()
        if isinstance(node, yaml.MappingNode):
            keys = [key.value for key, _ in node.value]
            assert len(keys) == len(set(keys)), keys
            nodes += [value for _, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            nodes += node.value


# -- never a full fine-tune by mistake -------------------------------------------------------

FLAGS: Final = {"rank": "8", "seed": "3", "output_dir": "out"}


@pytest.mark.parametrize(
    "inner",
    ["$((SLURM_NNODES * 4))", "$(nvidia-smi -L | wc -l)", "`hostname; date`", "$(a $(b;c))"],
)
@pytest.mark.parametrize("flag", ["--num_processes={}", "--num_processes {}", '--main_ip="{}"'])
def test_what_a_shell_would_run_first_is_one_word(inner: str, flag: str) -> None:
    text = f"accelerate launch {flag.format(inner)} x/train_dreambooth_lora_flux.py"
    found = command(" ".join([text, *(f"--{key}={value}" for key, value in FLAGS.items())]))
    assert (found.script, found.flags) == ("x/train_dreambooth_lora_flux.py", FLAGS)
    assert list(found.launch.values()) == [inner]
    assert not found.strays


@pytest.mark.parametrize(
    ("inner", "number"),
    [
        ("A * B", "12"),
        ("$A*${B}+1", "13"),
        ("(A + B) * -B", "-21"),
        ("SUM % B", "1"),
        ("-7 / 2", "-3"),
        ("-7 % 3", "-1"),
        ("A * UNKNOWN", None),
        ("A / 0", None),
        ("010", None),  # octal
        ("A ** 9999", None),
        ("9223372036854775807 + 1", None),
    ],
)
def test_arithmetic_of_a_shell_is_computed(inner: str, number: str | None) -> None:
    lines = (
        "A=4 B=3",
        "SUM=$((A + B))",
        f'python train_dreambooth_lora_flux.py --max_train_steps "$(({inner}))" --rank $SUM',
    )
    assert command("\n".join(lines)).flags == {
        "max_train_steps": number or f"$(({inner}))",
        "rank": "7",
    }


@pytest.mark.parametrize("end", ["\\\n", "\\\r\n", "^\n", "^\r\n", "`\n", "`\r\n", "\\  \n"])
def test_a_command_goes_on_as_in_any_shell(end: str) -> None:
    """Of sh, of cmd, and of PowerShell."""
    lines = [
        "accelerate launch train_dreambooth_lora_flux.py",
        *(f"--{k} {v}" for k, v in FLAGS.items()),
    ]
    found = command(f" {end}  ".join(lines))
    assert (found.script, found.flags) == ("train_dreambooth_lora_flux.py", FLAGS)


@pytest.mark.parametrize(
    ("text", "tool"),
    [
        ("accelerate launch flux_train_network.py --network_dim=16", "kohya's sd-scripts"),
        ("accelerate launch sdxl_train.py --learning_rate=1e-5", "kohya's sd-scripts"),
        ("accelerate launch sd-scripts/train_db.py --seed=1", "kohya's sd-scripts"),
        ("python own.py --network_module=networks.lora", "kohya's sd-scripts"),
        ("accelerate launch src/musubi_tuner/wan_train_network.py --dit=a", "musubi-tuner"),
        ("accelerate launch hv_train_network.py --network_dim=8", "musubi-tuner"),
        ("accelerate launch fpack_train_network.py --dit x", "musubi-tuner"),
        ("python OneTrainer/scripts/train.py --config-path=a.json", "OneTrainer"),
        ("deepspeed --num_gpus=1 train.py --deepspeed --config a.toml", "diffusion-pipe"),
        ("accelerate launch train.py --lora_base_model dit --lora_rank 32", "DiffSynth-Studio"),
        ("accelerate launch SimpleTuner/train.py --model_type=lora", "SimpleTuner"),
        ("python ai-toolkit/run.py --name=a", "ai-toolkit"),
    ],
)
def test_a_script_of_another_tool_is_refused_by_its_name(text: str, tool: str) -> None:
    with pytest.raises(UserError, match=f"is of {tool}, not of diffusers"):
        import_script([text])


@pytest.mark.parametrize(
    "text",
    [
        "accelerate launch my_flux.py --seed=1",
        "accelerate launch train.py --pretrained_model_name_or_path=black-forest-labs/FLUX.1-dev",
        "--pretrained_model_name_or_path=black-forest-labs/FLUX.1-dev --seed=1",
    ],
)
def test_what_may_be_a_lora_is_never_imported_as_a_full_model(text: str) -> None:
    with pytest.raises(UserError, match="scripts of diffusers that train the full model"):
        import_script([text])
    assert import_script([f"{text} --rank=4"]).spec.model_type == "lora"


# -- whose file it is ------------------------------------------------------------------------

FOREIGN: Final = {
    "kohya's sd-scripts": [
        ("a.toml", 'network_module = "networks.lora"\nnetwork_dim = 16\n'),
        ("a.toml", '[model]\npretrained_model_name_or_path = "a"\n[network]\nnetwork_dim = 8\n'),
        ("a.json", '{"LoRA_type": "Standard", "network_dim": 8, "train_batch_size": 1}'),
        ("a.toml", "[general]\nshuffle_caption = true\n[[datasets]]\nresolution = 512\n"),
    ],
    "musubi-tuner": [("a.toml", 'dit = "a"\nnetwork_module = "networks.lora_wan"\n')],
    "OneTrainer": [("a.json", '{"training_method": "LORA", "base_model_name": "a"}')],
    "diffusion-pipe": [
        ("a.toml", 'micro_batch_size_per_gpu = 1\n[model]\ntype = "flux"\n'),
        ("a.toml", '[model]\ntype = "flux"\n[adapter]\nrank = 32\n'),
    ],
    "ltx-trainer": [("a.yaml", "model: {model_path: a}\ntraining_strategy: {name: flexible}\n")],
}
READERS: Final[dict[str, Callable[[Path], Imported]]] = {
    "SimpleTuner": import_simpletuner,
    "ai-toolkit": import_ai_toolkit,
    "OneTrainer": import_onetrainer,
    "diffusion-pipe": import_diffusion_pipe,
    "ltx-trainer": import_ltx_trainer,
}
CELLS: Final = [(tool, name, text) for tool, files in FOREIGN.items() for name, text in files]


@pytest.mark.parametrize(("tool", "name", "text"), CELLS)
@pytest.mark.parametrize("mine", READERS)
def test_a_configuration_of_another_tool_is_refused_by_its_name(
    mine: str, tool: str, name: str, text: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(text)
    if mine == tool:
        assert READERS[mine](path).tool == import_file(path).tool == tool
        return
    with pytest.raises(UserError, match=f"is a configuration of {tool}"):
        READERS[mine](path)


def test_a_file_tells_whose_it_is() -> None:
    files = {
        "simpletuner/flux-lora/config.json": "SimpleTuner",
        "ai-toolkit/flux-lora.yaml": "ai-toolkit",
        "onetrainer/flux-lora.json": "OneTrainer",
        "diffusion-pipe/flux-lora.toml": "diffusion-pipe",
        "ltx-trainer/i2v-lora.yaml": "ltx-trainer",
        "kohya/sdxl-lora.toml": "kohya's sd-scripts",
        "kohya/wan-lora.sh": "musubi-tuner",
        "diffusers-script/flux-lora.sh": "a diffusers script",
    }
    for name, tool in files.items():
        assert import_file(EXAMPLES / name).tool == tool, name


def test_a_file_of_nobody_is_not_guessed(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"learning_rate": 1e-4, "resolution": 512}')
    with pytest.raises(UserError, match="no key by which a tool can be told"):
        import_file(path)
    path.write_text('{"data_backend_config": "b.json", "model_type": "lora"}')
    with pytest.raises(UserError, match="is a configuration of SimpleTuner, not of ai-toolkit"):
        import_ai_toolkit(path)
