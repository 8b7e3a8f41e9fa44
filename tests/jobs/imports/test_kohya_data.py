"""sd-scripts and musubi-tuner: datasets, prompts, noise levels, and files that are damaged."""

from __future__ import annotations

import json
import math
import random
from typing import TYPE_CHECKING, Any, Final

import pytest
import yaml

from jobs.errors import UserError
from jobs.imports.common.whose import MUSUBI, SD_SCRIPTS
from jobs.imports.imported import import_file, import_kohya
from jobs.spec.noise_levels import sigma_at
from jobs.spec.values.datasets import datasets_of
from tests.support.jobs.kohya_commands import EXAMPLES, FLAGS, FLUX, SDXL, WAN, lost, of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from jobs.imports.imported import Imported


# -- data ------------------------------------------------------------------------------------

FOLDERS: Final[list[tuple[str, str, dict[str, Any]]]] = [
    ("", "", {"crop": "square", "bucket_step": None, "missing_captions": "empty"}),
    ("enable_bucket = true", "", {"crop": "center", "bucket_step": 64}),
    ("enable_bucket = true\nbucket_reso_steps = 32", "", {"bucket_step": 32}),
    ("enable_bucket = true\nmax_bucket_reso = 768", "", {"max_bucket_aspect_ratio": 2.25}),
    (
        "enable_bucket = true\nmax_bucket_reso = 4096\nmin_bucket_reso = 256",
        "",
        {"max_bucket_aspect_ratio": 4.0},
    ),
    ("flip_aug = true", "", {"random_flip": True}),
    ("shuffle_caption = true\nkeep_tokens = 2", "", {"shuffle_captions": True, "keep_tags": 2}),
    ("", "random_crop = true", {"crop": "random", "max_bucket_aspect_ratio": 1.0}),
    ("", "alpha_mask = true", {"masked_loss": "alpha"}),
    ("", "caption_dropout_rate = 0.1", {"caption_dropout_probability": 0.1}),
    ("batch_size = 3", "", {"train_batch_size": 3}),
]


def with_datasets(tmp_path: Path, text: str, command: str = SDXL) -> Imported:
    path = tmp_path / "d.toml"
    path.write_text(text)
    return import_kohya([f"accelerate launch {command} --dataset_config {path}"])


@pytest.mark.parametrize(("above", "below", "expected"), FOLDERS)
def test_a_dataset(above: str, below: str, expected: dict[str, Any], tmp_path: Path) -> None:
    text = (
        f'[[datasets]]\nresolution = 512\n{above}\n[[datasets.subsets]]\nimage_dir = "a"\n{below}'
    )
    spec = with_datasets(tmp_path, text).spec
    assert {key: getattr(spec, key) for key in expected} == expected
    assert spec.resolution == 512


def test_levels_win_over_those_above_and_are_told_once(tmp_path: Path) -> None:
    imported = with_datasets(
        tmp_path,
        "[general]\nkeep_tokens = 1\nshuffle_caption = true\nnum_repeats = 2\ncolor_aug = true\n"
        '[[datasets]]\nresolution = [768, 1344]\n[[datasets.subsets]]\nimage_dir = "a"\n'
        '[[datasets.subsets]]\nimage_dir = "b"\nnum_repeats = 3\n',
        f"{SDXL} --train_batch_size 5 --dataset_repeats 7",
    )
    assert [entry.repeats for entry in datasets_of(imported.spec)] == [2, 3]
    assert (imported.spec.resolution, imported.spec.train_batch_size) == (1016, 5)
    keys = [entry.key for entry in imported.report.entries]
    assert len(keys) == len(set(keys))
    assert "d.toml: general.color_aug" in lost(imported)


def test_folders_of_kohya_s_are_one_dataset_until_the_job_is_submitted(tmp_path: Path) -> None:
    for name in ("train/10_cat", "reg/1_animal"):
        (tmp_path / name).mkdir(parents=True)
    flags = f"--train_data_dir {tmp_path}/train --reg_data_dir {tmp_path}/reg --resolution 512"
    spec = of(f"train_network.py --network_module networks.lora {flags}").spec
    assert [(e.path, e.regularization) for e in datasets_of(spec)] == [
        (f"{tmp_path}/train", False),
        (f"{tmp_path}/reg", True),
    ]
    assert spec.resolution == 512


def test_captions_that_the_tool_would_not_read_are_warned_of(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.txt").write_text("x")
    text = '[[datasets]]\nresolution = 512\n[[datasets.subsets]]\nimage_dir = "a"\n'
    warnings = with_datasets(tmp_path, text).report.warnings
    assert any("captions in .txt files are read here; there, only .caption" in w for w in warnings)


VIDEOS: Final[list[tuple[str, str, dict[str, Any] | str]]] = [
    (WAN, "target_frames = [1, 25, 45]\nsource_fps = 30.0", {"num_frames": 45}),
    (WAN, "target_frames = [33]", "source_fps"),
    (WAN, 'target_frames = [33]\nframe_extraction = "uniform"', "frame_extraction"),
    (WAN, "enable_bucket = true", {"max_bucket_aspect_ratio": 4.0, "bucket_step": 16}),
    (WAN, "resolution = 512", {"resolution": 512, "crop": "square"}),
    (WAN, "", "enable_bucket"),  # 960 by 544, of which there is no bucket here
    (WAN, 'video_jsonl_file = "a.jsonl"', "video_jsonl_file"),
    (WAN, 'control_directory = "c"', "control_directory"),
]


@pytest.mark.parametrize(("command", "keys", "expected"), VIDEOS)
def test_a_dataset_of_videos(
    command: str, keys: str, expected: dict[str, Any] | str, tmp_path: Path
) -> None:
    imported = with_datasets(tmp_path, f'[[datasets]]\nvideo_directory = "v"\n{keys}\n', command)
    if isinstance(expected, dict):
        assert {key: getattr(imported.spec, key) for key in expected} == expected
    else:
        assert f"d.toml: datasets[0].{expected}" in lost(imported)


@pytest.mark.parametrize(
    ("beside", "more", "damaged", "taken", "is_lost"),
    [
        (True, "", "", True, False),
        (False, "", "", True, True),
        (True, "other.mp4", "", False, True),
        (True, "", '{"video_path": "v/9.mp4"}', False, True),
        (True, "", '["v/0.mp4"]', False, True),
        (True, "", "{", False, True),
    ],
    ids=[
        "captions beside",
        "no captions",
        "others in the folder",
        "one missing",
        "list",
        "no JSON",
    ],
)
def test_rows_of_a_file_are_taken_as_their_folder(
    beside: bool, more: str, damaged: str, taken: bool, is_lost: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "v"
    folder.mkdir()
    for number in range(2):
        (folder / f"{number}.mp4").touch()
        (folder / f"{number}.txt").write_text(f"cat {number if beside else 7}\n")
    (folder / (more or "0.mp4")).touch()
    rows = [json.dumps({"video_path": f"v/{n}.mp4", "caption": f"cat {n}"}) for n in range(2)]
    (tmp_path / "a.jsonl").write_text("\n".join([*rows, damaged]))
    imported = with_datasets(tmp_path, '[[datasets]]\nvideo_jsonl_file = "a.jsonl"\n', WAN)
    assert (imported.to_dict().get("dataset") == str(folder)) is taken
    assert ("d.toml: datasets[0].video_jsonl_file" in lost(imported)) is is_lost
    told = [text for text in imported.report.to_fill_in if "with a metadata.jsonl" in text]
    assert len(told) == is_lost
    assert not told or (str(folder) in told[0]) is taken


def test_control_images_go_with_the_models_that_take_them(tmp_path: Path) -> None:
    text = '[[datasets]]\nimage_directory = "a"\ncontrol_directory = "c"\nresolution = 1024\n'
    for script, kind in (("qwen_image", "--edit"), ("flux_kontext", ""), ("flux_2", "")):
        command = f"{script}_train_network.py --dit a {kind} --network_module networks.lora"
        (entry,) = datasets_of(with_datasets(tmp_path, text, command).spec)
        assert entry.conditioning_path == ["c"], script


PROMPTS: Final = {
    "p.txt": "a --w 512 --d 3 --l 4 --n bad\n#b\nc --ci x.png --zz 1\n",
    "p.json": json.dumps(
        [
            {"prompt": "a", "width": 512, "seed": 3, "scale": 4, "negative_prompt": "bad"},
            {"prompt": "c", "control_image_path": ["x.png"], "zz": 1},
        ]
    ),
    "p.toml": '[prompt]\nwidth = 512\n[[prompt.subset]]\nprompt = "a"\nseed = 3\nscale = 4\n'
    'negative_prompt = "bad"\n[[prompt.subset]]\nprompt = "c"\nzz = 1\n',
}


@pytest.mark.parametrize("name", list(PROMPTS))
def test_prompts_are_read_from_any_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(PROMPTS[name])
    imported = of(f"{SDXL} --sample_prompts {path} --sample_every_n_steps 10")
    first = imported.spec.validation_prompts[0]
    assert (first.prompt, first.resolution, first.seed) == ("a", 512, 3)
    assert (first.guidance, first.negative_prompt) == (4.0, "bad")
    assert imported.spec.validation_guidance == 7.5
    assert any(key.endswith(": --zz") for key in lost(imported))
    assert not of(f"{SDXL} --sample_prompts {path}").spec.validation_prompts


# -- what is drawn ---------------------------------------------------------------------------

DRAWS: Final = 20_000
_R: Final = random.Random(0)


def _shifted(sigma: float, shift: float) -> float:
    return shift * sigma / (1 + (shift - 1) * sigma)


def _sigmoid(mean: float = 0.0, deviation: float = 1.0) -> float:
    return 1 / (1 + math.exp(-_R.gauss(mean, deviation)))


def _line(side: int, many: int = 4096, high: float = 1.15) -> float:
    tokens = (side // 16) ** 2
    return math.exp(0.5 + (high - 0.5) * (tokens - 256) / (many - 256))


def _scheduled(u: float, shift: float) -> float:
    """Among the steps of a schedule, of which the first has most noise."""
    return _shifted(1 - int(u * 1000) / 1000, shift)


def _mode(scale: float) -> float:
    u = _R.random()
    return 1 - u - scale * (math.cos(math.pi * u / 2) ** 2 - 1 + u)


LUMINA: Final = "lumina_train_network.py --network_module networks.lora_lumina"
SD3: Final = "sd3_train_network.py --network_module networks.lora_sd3"
QWEN: Final = "qwen_image_train_network.py --dit a --network_module networks.lora_qwen_image"
ZIMAGE: Final = "zimage_train_network.py --dit a --network_module networks.lora_zimage"
FLUX2: Final = "flux_2_train_network.py --dit a --network_module networks.lora_flux_2"
IDEOGRAM: Final = "ideogram4_train_network.py --dit a --network_module networks.lora_ideogram4"
# get_noisy_model_input_and_timesteps of library/flux_train_utils.py, sd3_train_utils.py and
# lumina_train_util.py (sd-scripts) and of training/trainer_base.py (musubi-tuner).
DRAWN: Final[list[tuple[str, Callable[[], float]]]] = [
    (FLUX, lambda: _scheduled(_R.random(), 3.0)),
    (f"{FLUX} --timestep_sampling sigmoid --sigmoid_scale 0.5", lambda: _sigmoid(0, 0.5)),
    (f"{FLUX} --timestep_sampling shift", lambda: _shifted(_sigmoid(), 3.0)),
    (
        f"{FLUX} --timestep_sampling shift --discrete_flow_shift 3.1582",
        lambda: _shifted(_sigmoid(), 3.1582),
    ),
    (
        f"{FLUX} --timestep_sampling flux_shift --resolution 512",
        lambda: _shifted(_sigmoid(), _line(512)),
    ),
    (f"{FLUX} --timestep_sampling uniform", _R.random),
    (
        f"{FLUX} --weighting_scheme logit_normal --logit_mean 0.5",
        lambda: _scheduled(_sigmoid(0.5), 3.0),
    ),
    (
        f"{FLUX} --weighting_scheme mode --discrete_flow_shift 1",
        lambda: _scheduled(_mode(1.29), 1.0),
    ),
    (LUMINA, lambda: _shifted(_sigmoid(), 6.0)),
    (
        f"{LUMINA} --timestep_sampling nextdit_shift --resolution 1024",
        lambda: _shifted(_R.random(), _line(1024)),
    ),
    (SD3, lambda: int(_R.random() * 1000) / 1000),
    (
        f"{SD3} --training_shift 3 --weighting_scheme logit_normal --logit_mean 0.5",
        lambda: int(_shifted(_sigmoid(0.5), 3) * 1000) / 1000,
    ),
    (f"{SD3} --weighting_scheme mode", lambda: int(_mode(1.29) * 1000) / 1000),
    (WAN, lambda: _scheduled(_R.random(), 1.0)),
    (f"{WAN} --discrete_flow_shift 5", lambda: _scheduled(_R.random(), 5.0)),
    (f"{WAN} --timestep_sampling shift --discrete_flow_shift 3", lambda: _shifted(_sigmoid(), 3.0)),
    (f"{WAN} --timestep_sampling logsnr --logit_mean -6 --logit_std 2", lambda: _sigmoid(3, 1)),
    (
        f"{QWEN} --timestep_sampling shift --discrete_flow_shift 2.2",
        lambda: _shifted(_sigmoid(), 2.2),
    ),
    (
        f"{QWEN} --timestep_sampling qwen_shift",
        lambda: _shifted(_sigmoid(), _line(1024, 8192, 0.9)),
    ),
    (
        f"{ZIMAGE} --timestep_sampling shift --discrete_flow_shift 2",
        lambda: _shifted(_sigmoid(), 2.0),
    ),
    (f"{IDEOGRAM} --timestep_sampling sigmoid", _sigmoid),
    (
        f"{IDEOGRAM} --timestep_sampling shift --discrete_flow_shift 2",
        lambda: _shifted(_sigmoid(), 2.0),
    ),
    (f"{FLUX2} --timestep_sampling flux2_shift", lambda: _shifted(_sigmoid(), _line(1024))),
]


@pytest.mark.parametrize(("command", "theirs"), DRAWN, ids=[command for command, _ in DRAWN])
def test_noise_levels_are_drawn_as_there(command: str, theirs: Callable[[], float]) -> None:
    spec = of(command).spec
    _R.seed(1)
    drawn = sorted(theirs() for _ in range(DRAWS))
    shift = spec.flow_shift if isinstance(spec.flow_shift, float) else None
    assert shift is not None or "shift" not in spec.timestep_sampling  # a number, not a name
    for share in (0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98):
        mine = sigma_at(
            share,
            spec.timestep_sampling,
            shift=shift or 1.0,
            mean=spec.logit_mean,
            deviation=spec.logit_std,
            scale=spec.mode_scale,
        )
        assert drawn[int(share * DRAWS)] == pytest.approx(mine, abs=0.015), share


@pytest.mark.parametrize(
    ("command", "weighting"),
    [
        (SD3, "sigma_squared"),
        (f"{SD3} --weighting_scheme sigma_sqrt", "none"),
        (f"{FLUX} --weighting_scheme sigma_sqrt --model_prediction_type raw", "none"),
        (f"{WAN} --weighting_scheme sigma_sqrt", "sigma_sqrt"),
    ],
)
def test_the_loss_is_weighted_as_there(command: str, weighting: str) -> None:
    assert of(command).spec.loss_weighting == weighting


# -- what is damaged -------------------------------------------------------------------------

YAML: Final = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
ODD: Final = (
    "",
    "x",
    "-1",
    "1e400",
    "nan",
    "[1, 2]",
    "{",
    "true",
    "0",
    "1,2,3",
    "é\x07",
    "9" * 400,
)


def job_or_sentence(path: Path) -> bool:
    """Whether a file makes a job, or is refused in one line."""
    try:
        return isinstance(yaml.load(import_file(path).to_yaml(), YAML), dict)
    except UserError as error:
        return "\n" not in str(error)


@pytest.mark.parametrize("value", ODD)
@pytest.mark.parametrize("tool", list(FLAGS))
def test_no_value_of_any_flag_breaks_an_import(tool: str, value: str, tmp_path: Path) -> None:
    keys = [key for key in FLAGS[tool].split() if key not in ("config_file", "network_module")]
    path = tmp_path / "a.toml"
    network = {SD_SCRIPTS: "networks.lora_flux", MUSUBI: "networks.lora_wan"}[tool]
    base = f'network_module = "{network}"\ndit = "a"\ndataset_config = "a"\n'
    base = base if tool == MUSUBI else f'network_module = "{network}"\n'
    for key in keys:
        if f"\n{key} =" not in f"\n{base}":
            base += f"{key} = {json.dumps(value)}\n"
    path.write_text(base)
    assert job_or_sentence(path)


@pytest.mark.parametrize("name", ["sdxl-lora.toml", "wan-lora.sh", "dataset.toml", "videos.toml"])
def test_damaged_files_are_one_sentence(name: str, tmp_path: Path) -> None:
    for path in EXAMPLES.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    target, content = tmp_path / name, (EXAMPLES / name).read_bytes()
    start = {"dataset.toml": "sdxl-lora.toml", "videos.toml": "wan-lora.sh"}.get(name, name)
    draw = random.Random(3)
    for _ in range(60):
        at, length = draw.randrange(len(content)), draw.randrange(1, 30)
        other = draw.choice([b"", b"\xff", b"[[", b'"', b"=", b"\n\n", b"[a]", b"9" * 40, b"-1"])
        target.write_bytes(content[:at] + other + content[at + length :])
        assert job_or_sentence(tmp_path / start)
