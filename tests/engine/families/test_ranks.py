"""Every family on two FSDP2 ranks: trained, sampled, exported, loaded by the stock pipeline."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import av
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from engine.sample.sample_files import stacked
from engine.toy.components.weights import one_thread
from jobs.run.rundir import RunDir
from jobs.spec.keys.prompts import requests_of
from tests.support.engine.families import (
    CONDITIONED,
    NEGATIVE,
    PROMPT,
    Case,
    cases,
    shrink_pipelines,
    toys_root,
)
from tests.support.engine.ranks import family as family_ranks
from tests.support.engine.toy_jobs import start_ranks
from tests.support.forks.client import RanksFailedError

if TYPE_CHECKING:
    from collections.abc import Iterator

KINDS = ("lora", "full")
# And with one process: layout and kind.
ALONE = {
    "wan": "full",
    "minimax_h3:fl2va": "full",
    "flux3": "full",
    "ltx2:2.5-22b": "full",
    "wan:2.2-i2v-a14b-low": "full",
    "qwen_image:edit": "full",
    "flux:kontext": "full",
    "flux:control": "lora",
    "flux:fill": "lora",
    "qwen_image:layered": "full",
    "wan:2.1-vace-1.3b": "lora",
}
RESUMED = tuple(ALONE)[4:]  # and from the middle, all with conditioning images
# Those that go on with two ranks as well: images beside the text, and first frames.
RESUMED_ALIKE = ("qwen_image:edit", "wan:2.2-i2v-a14b-low")
# What ranks do with these is what they do with another layout of the same family: with the base
# model, image to video, control. `test_families.py` and `test_conditioning.py` have their own.
SINGLE = {"flux2:klein-4b", "wan:2.2-t2v-a14b-low", "flux:canny", "ltx2:2.3-22b"}
# Ranks train SDXL's LoRA and all of Stable Diffusion 2.1; `test_text_lora.py` has the LoRA of 1.5.
SINGLE |= {"stable_diffusion"}
RANKS = 2
STEPS = 4
# What has hardly learnt anything by then is trained for twice as long.
LATE = {
    (name, "lora")
    for name in (
        *("auraflow", "flux", "qwen_image", "qwen_image:edit-2509", "flux2"),
        *("flux3", "ideogram4"),
    )
}
LATE |= {("sana:1.6b", "full")}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread(), pytest.MonkeyPatch.context() as patched:
        shrink_pipelines(patched.setattr)
        yield


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directories of all chosen cases. Starting ranks takes longer than a toy's training."""
    root = tmp_path_factory.mktemp("runs")
    toys = toys_root(tmp_path_factory)
    here = [item for item in request.session.items if item.fspath == request.node.fspath]
    chosen = [item.callspec.params for item in here if hasattr(item, "callspec")]
    jobs = {}
    for params in chosen:
        case = Case(params["name"], toys)
        jobs[str(root / place(**params))] = job(case, params["kind"], root)
    launch(jobs, root, RANKS)
    return root


def launch(jobs: dict[str, dict[str, Any]], root: Path, ranks: int) -> None:
    """Do the jobs, one after another; what goes wrong is in their directories."""
    started = start_ranks(family_ranks.train, ranks, jobs, root / "output.txt")
    with suppress(RanksFailedError):
        started.join()


def place(name: str, kind: str) -> str:
    return f"{name}-{kind}".replace(":", "-")


def steps_of(name: str, kind: str) -> int:
    return 2 * STEPS if (name, kind) in LATE else STEPS


def job(case: Case, kind: str, root: Path) -> dict[str, Any]:
    """LoRA is sampled with guidance, and full training without."""
    prompt: dict[str, Any] = {"prompt": PROMPT, "num_frames": case.frames, "seed": 3}
    if kind == "lora" and case.facts.true_cfg_of(case.flavour):
        prompt |= {"negative_prompt": NEGATIVE, "guidance": 3.0, "true_cfg_scale": 3.0}
    if case.takes is not None or case.first_frame:
        own = case.takes is None or case.takes.layers
        pictures = case.paths.data if own else case.paths.control
        if case.takes is not None and case.takes.videos:
            (entry,) = case.spec().datasets or []
            places = [Path(place) for place in entry.conditioning_path or ()]
            prompt["conditioning_image"] = [str(min(place.glob("0*"))) for place in places]
            prompt["conditioning_roles"] = entry.conditioning_roles
        else:
            prompt["conditioning_image"] = [str(min(pictures.glob("*.png")))]
        if case.facts.needs_last_frame(case.flavour) or case.facts.takes_keyframes(case.flavour):
            prompt["conditioning_image"].append(str(max(pictures.glob("*.png"))))
        if case.takes is not None and case.takes.masks:
            prompt["conditioning_image"].insert(0, str(max(case.paths.data.glob("*.png"))))
    heard: dict[str, Any] = {}
    if case.facts.sound:
        heard = {"train_audio": True}
        if not case.first_frame:
            heard |= {"dataset": str(case.videos), "num_frames": case.frames}
    return case.values(
        **heard,
        model_type=kind,
        num_processes=RANKS,
        strategy="fsdp2",
        train_batch_size=1,
        lora_rank=8,
        lora_alpha=12.0,  # exports keep it
        max_train_steps=steps_of(case.name, kind),
        checkpointing_steps=STEPS // 2 if case.name in RESUMED and ALONE[case.name] == kind else 0,
        learning_rate=1e-2 if kind == "lora" else 1e-3,
        lr_scheduler="constant",
        timestep_sampling="uniform",
        caption_dropout_probability=0.2,
        cache_dir=str(root / "cache"),
        validation_prompts=[prompt],
        validation_fraction=0.25,
        validation_timesteps=2,
        validation_loss_steps=2,
    )


# One process, with the batch sizes of two ranks, on which depends what a step trains on.
BY_ITSELF = {"num_processes": 1, "strategy": "single", "gradient_accumulation_steps": RANKS}
FAST = {("flux", "lora")}


def _trainings() -> list[Any]:
    """Each layout not in `SINGLE`; a LoRA of every family, and all of the model in half of them.

    A family of several layouts trains a LoRA in the first, and all of the model in the second. On
    one device `tests/cuda/test_jobs.py` trains all of every family.
    """
    others: dict[str, list[str]] = {}
    for name in (*cases(), *CONDITIONED):
        others.setdefault(name.partition(":")[0], []).append(name)
    pairs = []
    for family, (first, *more) in others.items():
        both = family in ALONE
        pairs += [(first, kind) for kind in (KINDS if both else KINDS[:1])]
        pairs += [(name, KINDS[1 - place % 2]) for place, name in enumerate(more)]
    return [
        pytest.param(*p, marks=() if p in FAST else pytest.mark.slow)
        for p in pairs
        if p[0] not in SINGLE
    ]


@pytest.mark.e2e
@pytest.mark.parametrize(("name", "kind"), _trainings())
def test_a_family_trains_and_its_export_makes_the_same_in_the_stock_pipeline(
    name: str, kind: str, runs: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    case, steps = Case(name, toys_root(tmp_path_factory)), steps_of(name, kind)
    run_dir = RunDir(runs / place(name, kind))
    assert run_dir.events.exists(), (runs / "output.txt").read_text()[-2000:]
    error = run_dir.root / "error.txt"
    assert not error.exists(), error.read_text()
    events = events_of(run_dir)
    losses = [event["loss"] for event in events if event["kind"] == "step"]
    assert len(losses) == steps
    assert np.isfinite(losses).all()
    assert events[-1]["reason"] == "completed"
    # Of a picture that is held out, always with the same noise.
    held_out = [event["loss"] for event in events if event["kind"] == "validation"]
    assert len(held_out) == steps // 2
    assert held_out[-1] < 0.985 * held_out[0], held_out

    spec = case.spec(**{k: v for k, v in job(case, kind, runs).items() if k not in case.values()})
    (request,) = requests_of(spec)
    sampled = np.asarray(Image.open(run_dir.samples / f"step-{steps}" / "00.png"), int)
    if case.family.MAKES_SOUND:
        with av.open(str(run_dir.samples / f"step-{steps}" / "00.mp4")) as video:
            assert len(video.streams.audio) == 1
    stock = exported(case, kind, run_dir.export)
    assert np.abs(picture(case, stock, request) - sampled).max() <= 1
    # Of a widened model, the published one has no place for the image.
    if kind == "lora" and hasattr(stock, "disable_lora"):
        (plain := stock).disable_lora()
    else:
        plain = case.stock()
    assert np.abs(picture(case, plain, request) - sampled).max() > 1, "it was trained"


@pytest.mark.slow
@pytest.mark.e2e
def test_two_ranks_train_as_one_process_does(
    runs: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Where some parameters stay whole beside the shards, where texts of a batch are padded, and
    with conditioning images."""
    chosen = [n for n in ALONE if RunDir(runs / place(n, ALONE[n])).events.exists()]
    if not chosen:
        pytest.skip("neither is among the chosen tests")
    jobs = {}
    for name in chosen:
        case = Case(name, toys_root(tmp_path_factory))
        jobs[str(tmp_path / name)] = (
            job(case, ALONE[name], runs) | BY_ITSELF | {"validation_prompts": []}
        )
    launch(jobs, tmp_path, 1)
    for name in chosen:
        shared, alone = (
            steps_in(run_dir)
            for run_dir in (RunDir(runs / place(name, ALONE[name])), RunDir(tmp_path / name))
        )
        assert len(alone) == STEPS, (tmp_path / "output.txt").read_text()[-2000:]
        assert np.allclose(shared, alone, rtol=1e-5)
    if "wan" in chosen:
        case, start = Case("wan", toys_root(tmp_path_factory)), RunDir(tmp_path / "wan")
        on = {"resume_from_checkpoint": str(start.checkpoint(STEPS)), "max_train_steps": STEPS + 2}
        losses = []
        for ranks, how in ((1, BY_ITSELF), (RANKS, {})):
            values = job(case, "full", runs) | {"validation_prompts": []} | on | how
            place_of = tmp_path / f"on-{ranks}"
            launch({str(place_of): values}, tmp_path, ranks)
            error = place_of / "error.txt"
            assert not error.exists(), error.read_text()
            steps = [e for e in events_of(RunDir(place_of)) if e["kind"] == "step"]
            losses.append([event["loss"] for event in steps])
        assert len(losses[0]) == 2
        assert np.allclose(*losses, rtol=1e-5), "a checkpoint of one process goes on on two ranks"


@pytest.mark.slow
@pytest.mark.e2e
def test_resumed_with_conditioning_images_is_as_never_stopped(
    runs: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """To the bit on as many ranks, of some, and to rounding on another number."""
    chosen = [n for n in RESUMED if RunDir(runs / place(n, ALONE[n])).events.exists()]
    if not chosen:
        pytest.skip("none is among the chosen tests")
    hows = {RANKS: {}, 1: BY_ITSELF}
    for ranks, how in hows.items():
        jobs = {}
        for name in chosen:
            if ranks == RANKS and name not in RESUMED_ALIKE:
                continue
            start = RunDir(runs / place(name, ALONE[name])).checkpoint(STEPS // 2)
            values = job(Case(name, toys_root(tmp_path_factory)), ALONE[name], runs) | how
            values |= {"validation_prompts": [], "resume_from_checkpoint": str(start)}
            jobs[str(tmp_path / f"{place(name, ALONE[name])}-{ranks}")] = values
        launch(jobs, tmp_path, ranks)
    for name in chosen:
        whole, same, other = (
            RunDir(folder)
            for folder in (
                runs / place(name, ALONE[name]),
                *(tmp_path / f"{place(name, ALONE[name])}-{ranks}" for ranks in hows),
            )
        )
        expected = steps_in(whole)[STEPS // 2 :]
        assert len(expected) == STEPS // 2
        assert other.events.exists(), (tmp_path / "output.txt").read_text()[-2000:]
        assert np.allclose(steps_in(other), expected, rtol=1e-5)
        if name not in RESUMED_ALIKE:
            continue
        assert steps_in(same) == expected, (tmp_path / "output.txt").read_text()[-2000:]
        component = Case(name, toys_root(tmp_path_factory)).family.component
        part = component if ALONE[name] == "full" else ""
        (trained,) = (whole.export / part).glob("*.safetensors")
        before, again = (load_file(one) for one in (trained, same.export / part / trained.name))
        assert all(torch.equal(again[key], tensor) for key, tensor in before.items())


def steps_in(run_dir: RunDir) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    return [(e["loss"], e["grad_norm"]) for e in events_of(run_dir) if e["kind"] == "step"]


def events_of(run_dir: RunDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run_dir.events.read_text().splitlines()]


def exported(case: Case, kind: str, directory: Path) -> Any:
    """The stock pipeline with what was exported."""
    if kind == "full":
        return case.stock(directory)
    pipeline = case.stock()
    case.family.load_lora(pipeline, directory)
    return pipeline


def picture(case: Case, pipeline: Any, request: Any) -> Any:
    """The middle frame of what it makes, or its layers together; pixels as in its PNG."""
    found = case.run(pipeline, request, output_type="pil")[0]
    if request.layers:
        return np.asarray(stacked(found), int)
    found = found if isinstance(found, list) else [found]
    return np.asarray(found[len(found) // 2], int)
