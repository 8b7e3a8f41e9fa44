"""The demo's pictures, the judge of its samples, and the model that it starts from."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import CLIPTokenizer, T5TokenizerFast

from engine.demo import __main__ as demo
from engine.demo.judge import judge, look
from engine.demo.pictures import (
    BACKGROUNDS,
    COLORS,
    PROMPTS,
    SIZE,
    Scene,
    draw,
    lessons,
    scenes,
)
from engine.toy.images import HEART
from tests.support import demo_base

if TYPE_CHECKING:
    from pathlib import Path

HEARTS = [Scene(HEART, color, background) for color in COLORS for background in BACKGROUNDS]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("demo")
    assert demo.main([str(root)]) == 0
    return root


def test_the_judge_sees_what_a_picture_shows() -> None:
    chance = random.Random(7)
    every = [*scenes(), *HEARTS]
    assert [look(draw(scene, chance)) for scene in every] == every


def test_the_judge_gives_no_name_to_what_has_none() -> None:
    chance = random.Random(7)
    noise = Image.frombytes("RGB", (SIZE, SIZE), chance.randbytes(3 * SIZE * SIZE))
    plain = Image.new("RGB", (SIZE, SIZE), "white")
    heart, cross = (draw(Scene(shape, "red", "white"), chance) for shape in (HEART, "cross"))
    half = heart.copy()
    half.paste("white", (0, 0, SIZE // 2, SIZE))
    both = Image.blend(heart, cross, 0.5)
    assert [look(picture) for picture in (noise, plain, half, both)] == [None] * 4


def test_samples_are_counted_by_step(tmp_path: Path) -> None:
    chance = random.Random(7)
    asked = Scene(HEART, "red", "white"), Scene("ring", "green", "black")
    for step, shown in ((20, asked), (0, (Scene("star", "red", "white"), asked[1]))):
        place = tmp_path / f"step-{step}"
        place.mkdir()
        for number, (prompt, scene) in enumerate(zip(asked, shown, strict=True)):
            draw(scene, chance).save(place / f"{number:02}.png")
            (place / f"{number:02}.json").write_text(json.dumps({"prompt": prompt.caption}))
    assert judge(tmp_path) == [
        {"step": 0, "hearts": 1, "hearts_right": 0, "others": 1, "others_right": 1},
        {"step": 20, "hearts": 1, "hearts_right": 1, "others": 1, "others_right": 1},
    ]


def test_what_is_sampled_is_not_trained_on() -> None:
    captions = [scene.caption for scene in lessons()]
    assert not set(captions) & set(PROMPTS)
    hearts = sum(HEART in caption for caption in captions)
    assert 2 * hearts == len(captions)
    assert all(Scene.of_caption(prompt) is not None for prompt in PROMPTS)


def test_the_base_is_written_in_fp32_and_kept(
    written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = sorted((written / "base").rglob("*.safetensors"))
    assert len(files) == 4
    for path in files:
        shipped = load_file(demo.BASE / path.relative_to(written / "base"))
        for name, tensor in load_file(path).items():
            assert tensor.dtype is torch.float32
            assert torch.equal(tensor, shipped[name].float()), name
    times = [path.stat().st_mtime_ns for path in files]
    assert demo.main([str(written)]) == 0
    assert [path.stat().st_mtime_ns for path in files] == times
    said = json.loads(capsys.readouterr().out)
    assert [one["prompt"] for one in said["prompts"]] == list(PROMPTS)
    assert len(list((written / "hearts").glob("*.png"))) == len(lessons())


def test_each_word_of_the_demo_is_one_token(written: Path) -> None:
    clip = CLIPTokenizer.from_pretrained(written / "base" / "tokenizer")
    t5 = T5TokenizerFast.from_pretrained(written / "base" / "tokenizer_2")
    for prompt in PROMPTS:
        words = len(prompt.split())
        assert len(clip(prompt).input_ids) == words + 2
        assert len(t5(prompt).input_ids) == words + 1


def test_a_place_that_is_taken_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "mine").touch()
    assert demo.main([str(tmp_path)]) == 2
    assert "already exists" in capsys.readouterr().err


def test_the_base_is_small_and_its_making_is_on_record() -> None:
    sizes = [path.stat().st_size for path in demo.BASE.rglob("*") if path.is_file()]
    assert sum(sizes) < 7e6
    made = json.loads((demo.BASE / demo.CURVES).read_text())
    assert made["vae"]["steps"] == demo_base.VAE_STEPS
    assert made["transformer"]["steps"] == demo_base.STEPS
    for curve in (made["vae"]["loss"], made["transformer"]["loss"]):
        assert curve[-1] < curve[0] / 4
