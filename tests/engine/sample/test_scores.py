"""Scores of samples: DreamBooth's formulas, what a job makes of them, and what they leave alone."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel, Dinov2Model

from engine.demo.judge import judge as fixed_judge
from engine.demo.pictures import PROMPTS, Scene, draw
from engine.model import release
from engine.ranks.telemetry import Telemetry
from engine.ranks.world import World
from engine.run_job import run_job
from engine.sample import scores as scoring
from engine.sample.scores import (
    ScoringModel,
    image_similarity,
    load_scoring_model,
    prompt_similarity,
)
from engine.toy.components.weights import one_thread
from jobs.errors import SpecError
from jobs.models.scorers import CLIP, DINO, check_scorers
from jobs.run.eventlog import EventLog
from jobs.run.judging import Measurements, judge
from jobs.run.rundir import RunDir
from jobs.spec.values.hub_names import HubName
from tests.support.engine import scorers
from tests.support.engine.ranks import family as ranks
from tests.support.engine.toy_jobs import start_ranks, toy_spec, toy_values

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CPU = torch.device("cpu")
ALONE = World(0, 1, CPU, "single", "t")
TEXTS = ["a red circle on a white background", "a blue heart on a black background"]
SCORES = ["clip_t", "clip_i", "dino_i"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a random `clip` and `dino`."""
    root = tmp_path_factory.mktemp("scorers")
    scorers.write_clip(root / "clip")
    scorers.write_dino(root / "dino")
    return root


def keys(models: Path, **changes: Any) -> dict[str, Any]:
    return {
        "validation_prompts": ["a red circle", "a blue square", "a green star"],
        "validation_num_inference_steps": 1,
        "validation_fraction": 0.15,
        "validation_timesteps": 1,
        "validation_loss_steps": 1000,
        "validation_scores": SCORES,
        CLIP: str(models / "clip"),
        DINO: str(models / "dino"),
        **changes,
    }


def pictures(count: int, seed: int = 0) -> list[Image.Image]:
    rng = np.random.default_rng(seed)
    sizes = ((48, 40), (32, 64))
    return [
        Image.fromarray(rng.integers(0, 256, (*sizes[n % 2], 3), dtype=np.uint8))
        for n in range(count)
    ]


# -- formulas ------------------------------------------------------------------------------


def cosine(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


def test_scores_are_mean_cosines_of_what_transformers_computes(models: Path) -> None:
    """CLIP's own forward gives the expected embeddings; pairs are looped over."""
    samples, references = pictures(2), pictures(9, seed=1)  # more than a batch
    clip = CLIPModel.from_pretrained(models / "clip")
    dino = Dinov2Model.from_pretrained(models / "dino")
    tokens = AutoTokenizer.from_pretrained(models / "clip")(TEXTS, return_tensors="pt")
    see = AutoImageProcessor.from_pretrained(models / "clip")
    expected: dict[str, Any] = {}
    with torch.no_grad():
        for name, images in (("samples", samples), ("references", references)):
            pixels = see(images=images, return_tensors="pt")["pixel_values"]
            out = clip(**tokens, pixel_values=pixels)
            class_tokens = dino(pixel_values=pixels).pooler_output
            expected[name] = out.image_embeds.numpy(), class_tokens.numpy()
        texts = out.text_embeds.numpy()
        own = load_scoring_model(CLIP, models / "clip", CPU)
        other = load_scoring_model(DINO, models / "dino", CPU)
        found = [m.images(i, lambda: None) for m in (own, other) for i in (samples, references)]
        told = own.texts(TEXTS)
    by_prompt = np.mean([cosine(*pair) for pair in zip(expected["samples"][0], texts, strict=True)])
    assert prompt_similarity(found[0], told) == pytest.approx(by_prompt, abs=1e-6)
    for kind in (0, 1):
        pairs = [(a, b) for a in expected["samples"][kind] for b in expected["references"][kind]]
        mean = np.mean([cosine(*pair) for pair in pairs])
        mine = image_similarity(*found[2 * kind : 2 * kind + 2])
        assert mine == pytest.approx(mean, abs=1e-6)


def test_long_prompts_are_cut_to_what_clip_reads(models: Path) -> None:
    with torch.no_grad():
        own = load_scoring_model(CLIP, models / "clip", CPU)
        long = own.texts(["a red circle on a white background " * 9])
    assert long.shape == (1, scorers.WIDTH)
    assert float(long.norm()) == pytest.approx(1.0, abs=1e-6)


# -- in a job ------------------------------------------------------------------------------


@pytest.fixture
def train(toy: Path, toy_cache: Path, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    def run(name: str, **changes: Any) -> list[dict[str, Any]]:
        """The events of a job on one rank, of all its attempts."""
        run_dir = RunDir(tmp_path / name)
        run_dir.create()
        telemetry = Telemetry(run_dir, 0)
        with one_thread():
            run_job(toy_spec(toy, cache_dir=str(toy_cache), **changes), run_dir, ALONE, telemetry)
        telemetry.close()
        return [json.loads(line) for line in run_dir.events.read_text().splitlines()]

    return run


def of_kind(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["kind"] == kind]


def numbers(events: list[dict[str, Any]]) -> list[tuple[float, float]]:
    return [(event["loss"], event["grad_norm"]) for event in of_kind(events, "step")]


@pytest.mark.slow
def test_scoring_changes_nothing_of_the_training_and_a_resume_is_exact(
    train: Any, models: Path, tmp_path: Path
) -> None:
    settings = {
        "max_train_steps": 4,
        "validation_steps": 1,
        "lora_dropout": 0.3,
        "checkpointing_steps": 2,
        "validation_on_startup": True,
    }
    plain = train("plain", **keys(models, validation_scores=[]), **settings)
    scored = train("scored", **keys(models), **settings)
    assert numbers(scored) == numbers(plain)
    assert [event["step"] for event in of_kind(scored, "scores")] == [0, 1, 2, 3, 4]
    assert all(event[name] is not None for event in of_kind(scored, "scores") for name in SCORES)
    assert (event := of_kind(scored, "scores")[0])["samples"] == 3
    assert event["references"] == 4
    assert not of_kind(plain, "scores")
    train("halves", **keys(models), **settings | {"max_train_steps": 2})
    halves = train("halves", **keys(models), **settings)
    assert numbers(halves) == numbers(scored), "bit for bit"
    same = [(one["step"], *(one[name] for name in SCORES)) for one in of_kind(scored, "scores")]
    log = EventLog(RunDir(tmp_path / "halves").events).read_all()
    assert [(step, *values.values()) for step, values in log.scores] == same, "bit for bit"


@pytest.mark.parametrize("fails", ["load", "file"])
def test_a_job_whose_samples_cannot_be_scored_trains_on(
    fails: str, train: Any, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise OSError("the disk is gone\nand more")

    monkeypatch.setattr(scoring, "load_scoring_model" if fails == "load" else "_read", refuse)
    events = train(fails, **keys(models, validation_scores=["clip_t"]), max_train_steps=1)
    assert len(numbers(events)) == 1
    assert of_kind(events, "end")[0]["reason"] == "completed"
    assert not of_kind(events, "scores")
    warned = [event["message"] for event in of_kind(events, "warning")]
    told = "the samples of step 1 were not scored (the disk is gone); training continues"
    assert [text for text in warned if "scored" in text] == [told]


def test_random_numbers_are_put_back_and_no_model_stays(
    toy: Path, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where loading draws some, as transformers does for weights that a file lacks."""
    watches: list[release.Watch] = []

    def load(key: str, root: Path, device: torch.device) -> ScoringModel:
        torch.rand(3)
        loaded = load_scoring_model(key, root, device)
        assert not [watch.still_held() for watch in watches if watch.still_held()], "one at a time"
        watches.append(release.Watch({key: loaded.model}))
        return loaded

    monkeypatch.setattr(scoring, "load_scoring_model", load)
    spec = toy_spec(toy, **keys(models))
    run_dir = RunDir(tmp_path)
    run_dir.create()
    telemetry = Telemetry(run_dir, 0)
    scorer = scoring.Scorer(*prepared(spec, run_dir, telemetry))
    files = [f"{number:02d}.png" for number in range(3)]
    for file, image in zip(files, pictures(3), strict=True):
        image.save(tmp_path / file)
    before = torch.get_rng_state()
    scored = scorer.score(3, tmp_path, files)
    assert torch.equal(torch.get_rng_state(), before)
    assert len(watches) == 2
    assert not watches[-1].still_held()
    assert scored is not None
    assert list(scored.values()) == SCORES
    assert scorer.score(4, tmp_path, files[:2]) is None
    telemetry.close()
    assert "not scored (there are 2 of 3 samples)" in run_dir.events.read_text()


def prepared(spec: Any, run_dir: RunDir, telemetry: Telemetry) -> tuple[Any, Any]:
    from types import SimpleNamespace

    from engine.data.index.data_index import build_index, hold_out
    from tests.support.engine.run_context import run_context

    held = hold_out(build_index(spec), spec)[1]
    return run_context(spec, run_dir, ALONE, telemetry), SimpleNamespace(held=held)


@pytest.mark.slow
def test_two_ranks_score_what_one_does(train: Any, toy: Path, models: Path, tmp_path: Path) -> None:
    settings = {"max_train_steps": 2, "validation_steps": 1, "global_batch_size": 2}
    one = of_kind(train("one", **keys(models), **settings), "scores")
    values = toy_values(toy, num_processes=2, strategy="fsdp2", **keys(models), **settings)
    start_ranks(ranks.train, 2, {str(tmp_path / "two"): values}, tmp_path / "said").join()
    lines = (tmp_path / "two" / "events.jsonl").read_text().splitlines()
    two = of_kind([json.loads(line) for line in lines], "scores")
    assert [event["step"] for event in two] == [1, 2]
    for mine, other in zip(two, one, strict=True):
        assert [mine[n] for n in SCORES] == pytest.approx([other[n] for n in SCORES], abs=1e-4)


# -- what they mean ------------------------------------------------------------------------


@pytest.mark.slow
def test_clip_orders_the_demos_samples_as_its_fixed_judge_does(tmp_path: Path) -> None:
    """With a CLIP that knows the demo's scenes: samples of which 0 to 8 show what they should."""
    with one_thread():
        model = load_scoring_model(CLIP, scorers.write_demo_clip(tmp_path / "clip"), CPU)
        rng = random.Random(1)
        values = []
        for step, right in enumerate((3, 0, 8, 5, 1, 6)):
            folder = tmp_path / "samples" / f"step-{step}"
            folder.mkdir(parents=True)
            images = []
            for number, prompt in enumerate(rng.sample(PROMPTS, len(PROMPTS))):
                scene = Scene.of_caption(prompt)
                assert scene is not None
                drawn = scene if number < right else replace(scene, shape="square")
                images.append(draw(drawn, rng))
                images[-1].save(folder / f"{number:02d}.png")
                facts = json.dumps({"prompt": prompt})
                (folder / f"{number:02d}.json").write_text(facts)
            prompts = [json.loads(f.read_text())["prompt"] for f in sorted(folder.glob("*.json"))]
            with torch.no_grad():
                seen, told = model.images(images, lambda: None), model.texts(prompts)
            values.append((step, prompt_similarity(seen, told)))
    counted = fixed_judge(tmp_path / "samples")
    correct = {one["step"]: one["hearts_right"] + one["others_right"] for one in counted}
    assert sorted(correct.values()) == [0, 1, 3, 5, 6, 8]
    best_first = [judged.step for judged in judge(range(6), Measurements(values, "clip_t"))]
    assert best_first == sorted(correct, key=lambda step: -correct[step]), values


# -- before a job starts -------------------------------------------------------------------


def test_a_model_that_cannot_score_is_refused_before_a_job_starts(
    models: Path, toy: Path, tmp_path: Path
) -> None:
    check_scorers(toy_spec(toy, **keys(models)))
    wrong: dict[str, Any] = {
        "no such model": {CLIP: "someone/clip"},
        "is not a model of type dinov2": {DINO: str(models / "clip")},
        "is not a model of type clip": {CLIP: str(toy / "model")},
    }
    for path, words in (
        ("tokenizer_config.json", "has no tokenizer_config.json"),
        ("model.safetensors", "has no .safetensors file"),
    ):
        copy = tmp_path / path
        shutil.copytree(models / "clip", copy)
        (copy / path).unlink()
        wrong[words] = {CLIP: str(copy)}
    for words, changes in wrong.items():
        with pytest.raises(SpecError, match=words):
            check_scorers(toy_spec(toy, **keys(models, **changes)))
    check_scorers(
        toy_spec(toy, **keys(models, **{CLIP: "someone/clip"})), [HubName("model", "someone/clip")]
    )
    check_scorers(toy_spec(toy, **keys(models, validation_scores=[], **{CLIP: "no/model"})))
