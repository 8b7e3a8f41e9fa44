"""Samples while training on one rank: against stock pipelines, and what lies on the disk."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from engine import families
from engine.data.read.videos import frames_at, has_sound, inspect_video, read_frames
from engine.families.shared.base import Sound
from engine.ranks.telemetry import Telemetry
from engine.ranks.world import World
from engine.run_job import build_model, run_job
from engine.sample.sample_files import write_sample
from engine.sample.sampler import Forwards, Sampler, rounds_of
from engine.toy.components.weights import one_thread
from engine.toy.images import makes_videos, write_videos
from jobs.errors import NotFiniteError
from jobs.run.rundir import RunDir
from jobs.spec.job_spec import JobSpec
from tests.support.engine.run_context import run_context
from tests.support.engine.toy_jobs import toy_spec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from engine.families.shared.references import Conditioning
    from jobs.spec.keys.prompts import SampleRequest

ALONE = World(0, 1, torch.device("cpu"), "single", "t")
GUIDED: dict[str, Any] = {
    "prompt": "a photo of [trigger]",
    "negative_prompt": "blue",
    "true_cfg_scale": 3.0,
    "resolution": "96x64",
    "steps": 2,
    "guidance": 2.0,
    "seed": 2**40,
}


class Texts:
    """Stands in for prepared data: texts are encoded by the stock pipeline."""

    def __init__(self, pipeline: FluxPipeline) -> None:
        self._pipeline = pipeline
        self.asked: list[str] = []
        self.pictures: dict[str, Conditioning] = {}

    def prompt(
        self, text: str, request: SampleRequest, *, negative: bool = False
    ) -> dict[str, torch.Tensor]:
        self.asked.append(text)
        text = text.replace("[trigger]", "sks")
        return families.load("flux").encode(self._pipeline, text, 16)


class Bench:
    """The toy, sampled by us and by a stock pipeline."""

    def __init__(self, toy: Path, root: Path) -> None:
        self.toy = toy
        self.root = root
        self.stock = FluxPipeline.from_pretrained(toy / "model")
        self.stock.set_progress_bar_config(disable=True)
        self.texts = Texts(self.stock)
        self.run_dir = RunDir(root)
        self.run_dir.create()
        self.telemetry = Counting(self.run_dir, 0)
        self.files: list[str] = []

    def sample(
        self, prompts: list[Any], family: Any = None, numbers: tuple[int, ...] = (), **changes: Any
    ) -> Path:
        spec = toy_spec(
            self.toy,
            validation_prompts=prompts,
            validation_num_inference_steps=2,
            trigger_word="sks",
            **changes,
        )
        run = run_context(spec, self.run_dir, ALONE, self.telemetry)
        model = build_model(run)
        data: Any = self.texts
        sampler = Sampler(replace(run, family=family or run.family), data, numbers)
        target = self.run_dir.samples / "step-3"
        with one_thread():
            self.files = sampler.sample(model, target, 3)
        return target

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.run_dir.events.read_text().splitlines()]


class Counting(Telemetry):
    """Counts how often work is seen to move while pictures are made."""

    moves = 0

    def moved(self, step: int | None = None) -> None:
        if self.phase_name == "sample":
            self.moves += 1
        super().moved(step)


@pytest.fixture
def bench(toy: Path, tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(toy, tmp_path)
    yield bench
    bench.telemetry.close()


def same(path: Path, picture: Any) -> bool:
    return bool(np.array_equal(np.asarray(Image.open(path)), np.asarray(picture)))


def test_a_stock_pipeline_with_the_same_seed_makes_the_same_picture(bench: Bench) -> None:
    target = bench.sample(["a red circle", GUIDED], validation_seed=3)
    with one_thread():
        first, second = stock_pictures(bench)
    assert same(target / "00.png", first)
    assert same(target / "01.png", second)


def stock_pictures(bench: Bench) -> tuple[Any, Any]:
    first = bench.stock(
        "a red circle",
        width=64,
        height=64,
        num_inference_steps=2,
        guidance_scale=3.5,
        max_sequence_length=16,
        generator=torch.Generator().manual_seed(3),
    ).images[0]
    second = bench.stock(
        "a photo of sks",
        negative_prompt="blue",
        true_cfg_scale=3.0,
        width=96,
        height=64,
        num_inference_steps=2,
        guidance_scale=2.0,
        max_sequence_length=16,
        generator=torch.Generator().manual_seed(2**40),
    ).images[0]
    return first, second


def test_what_a_picture_was_made_from_lies_beside_it_and_in_it(bench: Bench) -> None:
    target = bench.sample(["a red circle", GUIDED], use_ema=True)
    assert json.loads((target / "00.json").read_text()) == {
        "prompt": "a red circle",
        "negative_prompt": None,
        "seed": 42,
        "size": [64, 64],
        "steps": 2,
        "guidance": 3.5,
        "true_cfg_scale": 1.0,
        "step": 3,
        "family": "flux",
        "guidance_embedded": True,
        "ema": True,
        "dtype": "torch.float32",
    }
    facts = json.loads((target / "01.json").read_text())
    assert (facts["prompt"], facts["negative_prompt"]) == ("a photo of sks", "blue")
    assert (facts["size"], facts["seed"]) == ([96, 64], 2**40)
    words = Image.open(target / "01.png").text  # type: ignore[attr-defined]
    assert words["parameters"].splitlines() == [
        "a photo of sks",
        "Negative prompt: blue",
        "Steps: 2, CFG scale: 3.0, Distilled CFG Scale: 2.0, Seed: 1099511627776, Size: 96x64, "
        "Model: flux, Training step: 3",
    ]
    assert sorted(p.name for p in target.iterdir()) == ["00.json", "00.png", "01.json", "01.png"]


def test_a_black_sample_is_warned_of_and_a_black_class_image_is_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others would train on that one."""
    prompt = Texts.prompt

    def spoilt(self: Texts, *words: Any, **names: Any) -> dict[str, torch.Tensor]:
        return {name: tensor * torch.nan for name, tensor in prompt(self, *words, **names).items()}

    monkeypatch.setattr(Texts, "prompt", spoilt)
    target = bench.sample(["a red circle"])
    assert not np.asarray(Image.open(target / "00.png")).any()
    said = [event["message"] for event in bench.events if event["kind"] == "warning"]
    assert said == ["sample 00.png is black: its latents are not finite"]
    with pytest.raises(NotFiniteError, match=r"class image 07.png is black.*download the model"):
        bench.sample(["a red circle"], numbers=(7,))
    assert sorted(path.name for path in target.iterdir()) == ["00.json", "00.png"]


def test_the_work_is_seen_to_move_with_every_forward(bench: Bench) -> None:
    bench.sample(["a red circle", GUIDED])
    begun, pictures = 1, 2
    assert bench.telemetry.moves == begun + (2 + 2 * 2) + pictures


def test_a_negative_prompt_without_effect_is_not_even_encoded(bench: Bench) -> None:
    bench.sample([{"prompt": "a", "negative_prompt": "b", "steps": 1}])
    assert bench.texts.asked == ["a"]
    assert bench.telemetry.moves == 1 + 1 + 1


def test_a_family_that_plans_other_forwards_than_its_pipeline_makes_is_found(bench: Bench) -> None:
    class Wrong:
        """Forgets that guidance takes two forwards."""

        def __getattr__(self, name: str) -> Any:
            return getattr(families.load("flux"), name)

        def forwards_of(self, request: Any) -> int:
            return int(request.steps)

    with pytest.raises(RuntimeError, match=r"FluxPipeline made 4 forwards .* instead of 2"):
        bench.sample([GUIDED], Wrong())


def test_the_vae_comes_to_the_device_once_for_each_picture_and_leaves(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU it comes from and goes to the same place; what is counted are the moves."""
    from accelerate.hooks import CpuOffload

    came, left = CpuOffload.pre_forward, CpuOffload.init_hook
    moves: list[str] = []

    def comes(hook: Any, module: Any, *words: Any, **names: Any) -> Any:
        moves.append("comes")
        return came(hook, module, *words, **names)

    def leaves(hook: Any, module: Any) -> Any:
        moves.append("leaves")
        return left(hook, module)

    monkeypatch.setattr(CpuOffload, "pre_forward", comes)
    monkeypatch.setattr(CpuOffload, "init_hook", leaves)
    bench.sample(["a", "b"])
    assert moves == ["leaves", "comes", "leaves", "comes", "leaves"]


def test_pictures_that_cannot_be_written_are_warned_of_and_the_others_are_there(
    bench: Bench,
) -> None:
    place = bench.run_dir.samples / "step-3" / "00.png"
    place.mkdir(parents=True)  # in the way
    bench.sample(["a", "b"])
    assert bench.files == ["01.png"]
    (warning,) = [event["message"] for event in bench.events if event["kind"] == "warning"]
    assert warning == f"cannot write {place} (Is a directory)"
    assert (bench.run_dir.samples / "step-3" / "01.png").is_file()


def test_what_cannot_be_decoded_as_a_whole_is_decoded_in_tiles_from_there_on(
    bench: Bench,
) -> None:
    class Crowded:
        """Runs out of memory until the VAE works part by part."""

        def __getattr__(self, name: str) -> Any:
            return getattr(families.load("flux"), name)

        def decode(self, pipeline: Any, latents: torch.Tensor, request: Any) -> Any:
            if not pipeline.vae.use_tiling:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return families.load("flux").decode(pipeline, latents, request)

    bench.sample(["a", "b"], Crowded())
    assert bench.files == ["00.png", "01.png"]
    (warning,) = [event["message"] for event in bench.events if event["kind"] == "warning"]
    assert "not enough memory to decode 64x64 at once" in warning


FACTS: dict[str, Any] = {
    "prompt": "ein Käfer ☃",
    "negative_prompt": "",
    "seed": 1,
    "size": [16, 16],
    "steps": 1,
    "guidance": 1.0,
    "true_cfg_scale": 2.0,
    "step": 1,
    "family": "flux",
}


def test_a_picture_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "00.png"
    write_sample([Image.new("RGB", (16, 16), "red")], FACTS, path)
    write_sample([Image.new("RGB", (16, 16), "blue")], FACTS, path)
    assert Image.open(path).getpixel((0, 0)) == (0, 0, 255)
    assert Image.open(path).text["parameters"].startswith("ein Käfer ☃\nNegative prompt: \n")  # type: ignore[attr-defined]
    assert json.loads(path.with_suffix(".json").read_text()) == FACTS

    class Broken(Image.Image):
        def save(self, *_: Any, **__: Any) -> None:
            (tmp_path / ".00.png.tmp").write_bytes(b"half")
            raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_sample([Broken()], FACTS, path)  # type: ignore[list-item]
    assert Image.open(path).getpixel((0, 0)) == (0, 0, 255), "the old one is whole"
    assert not list(tmp_path.glob(".*")), "and nothing is left of the new one"


@given(forwards=st.lists(st.integers(1, 100), max_size=20), ranks=st.integers(1, 8))
def test_rounds_hold_every_picture_once_and_waste_little(forwards: list[int], ranks: int) -> None:
    rounds = rounds_of(forwards, ranks)
    assert sorted(number for one in rounds for number in one) == list(range(len(forwards)))
    assert len(rounds) == -(-len(forwards) // ranks)
    in_order = [forwards[number] for one in rounds for number in one]
    assert in_order == sorted(forwards, reverse=True)
    made = sum(forwards[one[0]] for one in rounds)
    as_written = sum(max(forwards[i : i + ranks]) for i in range(0, len(forwards), ranks))
    assert sum(forwards) / ranks <= made <= as_written
    for one in rounds:
        assert [n for n in one if forwards[n] == forwards[one[0]]] == sorted(
            n for n in one if forwards[n] == forwards[one[0]]
        )


def test_missing_forwards_are_made_with_the_last_inputs_and_hooks_are_gone_afterwards() -> None:
    seen: list[tuple[float, float]] = []

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
            seen.append((float(x), scale))
            return x * scale

    model, moved = Model(), []
    with Forwards([model], lambda: moved.append(len(seen)), expected=2, total=4) as forwards:
        model(torch.tensor(1.0), scale=2.0)
        with pytest.raises(RuntimeError, match="made 1 forwards"):
            forwards.check(model)
        assert model(torch.tensor(3.0), scale=4.0) == 12
        forwards.check(model)
        assert seen == [(1.0, 2.0), (3.0, 4.0), (3.0, 4.0), (3.0, 4.0)]
        assert moved == [1, 2, 3, 4]
        model(torch.tensor(5.0), scale=6.0)
        with pytest.raises(RuntimeError, match="made 3 forwards"):
            forwards.check(model)
    model(torch.tensor(1.0), scale=1.0)
    assert forwards.made == 3


@pytest.fixture
def train(toy: Path, toy_cache: Path, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    def run(name: str = "run", request: str = "", **changes: Any) -> list[dict[str, Any]]:
        """The events of a job on one rank."""
        settings = {"cache_dir": str(toy_cache), "validation_num_inference_steps": 1}
        run_dir = RunDir(tmp_path / name)
        run_dir.create()
        if request:
            run_dir.request(request)
        telemetry = Telemetry(run_dir, 0)
        with one_thread():
            run_job(toy_spec(toy, **settings | changes), run_dir, ALONE, telemetry)
        telemetry.close()
        return [json.loads(line) for line in run_dir.events.read_text().splitlines()]

    return run


@pytest.mark.parametrize(
    ("settings", "request_", "when"),
    [
        ({}, "", [4]),
        ({"validation_steps": 3}, "", [3, 4]),
        ({"validation_steps": 2, "validation_on_startup": True}, "", [0, 2, 4]),
        ({}, "sample_now", [0, 4]),
    ],
)
def test_pictures_are_made_when_the_job_says(
    settings: dict[str, Any], request_: str, when: list[int], train: Any, tmp_path: Path
) -> None:
    events = train(validation_prompts=["a red circle"], request=request_, **settings)
    assert [event["step"] for event in events if event["kind"] == "sample"] == when
    written = (tmp_path / "run" / "samples").iterdir()
    assert sorted(p.name for p in written) == [f"step-{step}" for step in when]


@pytest.mark.slow
def test_a_request_that_cannot_be_honoured_is_answered(train: Any, tmp_path: Path) -> None:
    events = train(max_train_steps=1, request="sample_now")
    warnings = [event["message"] for event in events if event["kind"] == "warning"]
    assert "nothing to sample: the job has no validation_prompts" in warnings
    assert not RunDir(tmp_path / "run").requested("sample_now")


@pytest.mark.slow
def test_sampling_changes_nothing_of_the_training(train: Any) -> None:
    settings = {
        "lora_dropout": 0.3,
        "use_ema": True,
        "caption_dropout_probability": 0.3,
        "max_train_steps": 3,
    }
    plain = train("plain", **settings)
    sampled = train(
        "sampled",
        validation_prompts=["a red circle", "a"],
        validation_steps=1,
        validation_on_startup=True,
        **settings,
    )

    def steps(events: list[dict[str, Any]]) -> list[tuple[float, float]]:
        return [(e["loss"], e["grad_norm"]) for e in events if e["kind"] == "step"]

    assert steps(sampled) == steps(plain)
    assert len(steps(plain)) == 3


@pytest.fixture
def _without(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide encoders of PyAV, as builds of FFmpeg without them do."""
    av = pytest.importorskip("av")
    codec = av.Codec

    def find(name: str, mode: str) -> Any:
        return codec("hidden" if name in request.param else name, mode)

    monkeypatch.setattr(av, "Codec", find)


@pytest.mark.parametrize(
    ("_without", "codec"), [((), "h264"), (("libx264",), "mpeg4")], indirect=["_without"]
)
@pytest.mark.usefixtures("_without")
def test_a_video_is_an_mp4_with_its_middle_frame_beside_it(tmp_path: Path, codec: str) -> None:
    av = pytest.importorskip("av")
    frames = [Image.new("RGB", (32, 16), (20 * n, 0, 0)) for n in range(9)]
    path = tmp_path / "00.png"
    write_sample(frames, FACTS | {"fps": 16.0, "frames": 9}, path)
    assert Image.open(path).getpixel((0, 0)) == (80, 0, 0)
    with av.open(str(path.with_suffix(".mp4"))) as video:
        stream = video.streams.video[0]
        assert stream.average_rate == 16
        assert stream.codec.canonical_name == codec
        shown = [frame.to_ndarray(format="rgb24") for frame in video.decode(stream)]
    assert len(shown) == 9
    for wanted, got in zip(frames, shown, strict=True):
        assert np.abs(np.asarray(wanted, int) - got).max() <= 8
    assert sorted(p.name for p in tmp_path.iterdir()) == ["00.json", "00.mp4", "00.png"]


@pytest.mark.parametrize(
    ("_without", "notes"),
    [((), 0), (("libx264",), 1), (("libx264", "mpeg4"), 0)],
    indirect=["_without"],
)
@pytest.mark.usefixtures("_without")
def test_another_encoder_is_named_once_in_the_log(notes: int) -> None:
    told: list[str] = []
    spec = JobSpec(
        model_family="wan",
        pretrained_model_name_or_path="m",
        dataset="d",
        validation_prompts=["a", "b"],
        validation_num_frames=5,
    )
    run: Any = SimpleNamespace(spec=spec, telemetry=SimpleNamespace(pass_on=told.append))
    Sampler(run, run)
    assert len(told) == notes
    assert all("libx264" in note and "mpeg4" in note for note in told)
    run.spec = spec.model_copy(update={"validation_num_frames": 1})
    Sampler(run, run)
    assert len(told) == notes, "a still image needs no encoder"


@pytest.mark.parametrize("_without", [("libx264",), ("libx264", "mpeg4")], indirect=True)
@pytest.mark.usefixtures("_without")
def test_toys_videos_are_read_whatever_encodes_them(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    hidden = request.node.callspec.params["_without"]
    assert makes_videos() is ("mpeg4" not in hidden)
    if makes_videos():
        write_videos(tmp_path, count=1, size=32, seed=0, fps=16.0, sound=True)
        (video,) = tmp_path.glob("*.mp4")
        seen = read_frames(video, fps=16.0, frames=frames_at(inspect_video(video), 16.0))
        assert len(seen) > 1
        assert has_sound(video)
    else:
        with pytest.raises(OSError, match="has none of the encoders"):
            write_videos(tmp_path, count=1, size=32, seed=0, fps=16.0)


def test_a_videos_sound_is_in_its_mp4(tmp_path: Path) -> None:
    """As long, and what is heard, to the loss of AAC."""
    av = pytest.importorskip("av")
    times = torch.arange(24_000) / 48_000
    samples = torch.stack([torch.sin(400 * torch.pi * times), torch.zeros_like(times)]) / 2
    path = tmp_path / "00.png"
    frames = [Image.new("RGB", (32, 16))] * 8
    write_sample(frames, FACTS | {"fps": 16.0, "frames": 8}, path, Sound(samples, 48_000))
    with av.open(str(path.with_suffix(".mp4"))) as video:
        assert video.streams.video[0].frames == 8
        (stream,) = video.streams.audio
        assert (stream.rate, stream.layout.name) == (48_000, "stereo")
        parts = list(video.decode(stream))
    heard = np.concatenate([part.to_ndarray() for part in parts], axis=1)
    begin = 1000 - int(parts[0].pts)  # what an encoder puts first is before time 0
    assert heard.shape[1] + int(parts[0].pts) == pytest.approx(24_000, abs=1024)
    expected = samples[:, 1000:20_000].numpy()
    assert np.abs(heard[:, begin : begin + 19_000] - expected).max() < 0.05


def test_without_what_writes_videos_a_sample_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    frames = [Image.new("RGB", (16, 16))] * 2
    with pytest.raises(OSError, match=r"pip install 'fsdp-tui\[video\]'"):
        write_sample(frames, FACTS | {"fps": 16.0}, tmp_path / "00.png")
    assert (tmp_path / "00.png").exists()
