"""Encoded captions: cached before training or on the way, or encoded again each time; or refused,
where an encoder returns NaN.
"""

from __future__ import annotations

import json
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
from PIL import Image

from engine.data.encode.tensor_cache import TensorCache, nonfinite
from engine.data.encode.texts import NO_TEXT, ImageInput, Text, _alike, _encode, _named
from engine.families.flux import Flux
from engine.model.text_encoders import load_whole, models_of
from engine.ranks.telemetry import Telemetry
from engine.ranks.world import World
from engine.run_job import run_job
from jobs.errors import NotFiniteError
from jobs.run.rundir import RunDir
from tests.support.engine.families import Case, cases, chosen, quiet, toys_root
from tests.support.engine.toy_jobs import toy_spec

if TYPE_CHECKING:
    from pathlib import Path


def train(toy: Path, root: Path, **changes: Any) -> list[dict[str, Any]]:
    """The events of a job on one rank."""
    values = {
        "cache_dir": str(root / "cache"),
        "validation_prompts": ["a red circle"],
        "validation_num_inference_steps": 1,
        "caption_dropout_probability": 0.2,
        "max_train_steps": 5,
        "train_batch_size": 2,
    }
    spec = toy_spec(toy, **values | changes)
    run_dir = RunDir(root / "run")
    run_dir.create()
    with closing(Telemetry(run_dir, 0)) as telemetry:
        run_job(spec, run_dir, World(0, 1, torch.device("cpu"), "single", "t"), telemetry)
    return [json.loads(line) for line in run_dir.events.read_text().splitlines()]


def losses(events: list[dict[str, Any]]) -> list[float]:
    return [event["loss"] for event in events if event["kind"] == "step"]


@pytest.mark.slow
@pytest.mark.parametrize("kept", [True, False], ids=["cached on the way", "not cached"])
def test_resident_encoders_train_like_cached_captions(
    kept: bool, toy: Path, tmp_path: Path
) -> None:
    cached = train(toy, tmp_path / "cached")
    resident = train(
        toy, tmp_path / "resident", unload_text_encoder=False, cache_text_embeddings=kept
    )
    assert losses(resident) == losses(cached)
    assert len(losses(cached)) == 5

    assert not [event for event in cached + resident if event["kind"] == "warning"]

    def order(events: list[dict[str, Any]]) -> list[str]:
        kinds = [event["kind"] for event in events]
        return [kind for kind in kinds if kind in ("freed", "start", "end")]

    assert order(cached) == ["freed", "start", "end"], "freed before the transformer is there"
    assert order(resident) == ["start", "freed", "end"], "they stayed"
    pictures = [
        next((tmp_path / name / "run" / "samples").rglob("*.png")).read_bytes()
        for name in ("cached", "resident")
    ]
    assert pictures[0] == pictures[1]
    before, on_the_way = (
        {path.name for path in (tmp_path / name / "cache/text").rglob("*.safetensors")}
        for name in ("cached", "resident")
    )
    assert len(before) > 5
    assert on_the_way <= before, "and nothing that was not used"
    assert bool(on_the_way) is kept


@pytest.mark.slow
def test_what_was_cached_on_the_way_is_used_and_repaired(toy: Path, tmp_path: Path) -> None:
    first = train(toy, tmp_path, unload_text_encoder=False)
    cache = TensorCache(tmp_path / "cache", "text")
    files = {path: path.stat().st_mtime_ns for path in cache.root.rglob("*.safetensors")}
    damaged = min(files)
    damaged.write_bytes(b"damaged")
    (tmp_path / "run").rename(tmp_path / "before")
    assert losses(train(toy, tmp_path, unload_text_encoder=False)) == losses(first)
    now = {path: path.stat().st_mtime_ns for path in cache.root.rglob("*.safetensors")}
    assert {path for path in files if now[path] != files[path]} == {damaged}
    assert cache.check(damaged.stem) == "sound"


SEES: Final = "wan:2.1-i2v-14b-480p"  # its captions are encoded with an image
SAYS: Final = 'a red circle with the word "star"'  # HunyuanVideo 1.5 has an encoder for such words


@pytest.mark.parametrize("name", chosen([*cases(), SEES]))
def test_the_encoder_that_returns_nan_is_named(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever a family makes of what its encoders return, and with its neighbours sound."""
    case = Case(name, toys_root(tmp_path_factory))
    look = ImageInput("", lambda: Image.new("RGB", (64, 64)), "cat.png")
    text = Text(SAYS, images=(look,) if name == SEES else ())
    with quiet(), torch.no_grad():
        pipeline = case.family.load_text_pipeline(case.paths.model, torch.float32)
    encoders = models_of(pipeline)
    assert not nonfinite(_encode(case.family, pipeline, text, case.spec()))
    for part, encoder in encoders.items():
        kept = {n: tensor.clone() for n, tensor in encoder.state_dict().items()}
        for parameter in encoder.parameters():
            parameter.data.fill_(torch.nan)
        with pytest.raises(NotFiniteError) as caught:
            _encode(case.family, pipeline, text, case.spec())
        seen = " with cat.png" if name == SEES else ""
        assert caught.value.message == (
            f"{part} ({type(encoder).__name__}) returned values that are not finite for "
            f"the text “{SAYS}”{seen}"
        )
        encoder.load_state_dict(kept)
        assert not encoder._forward_hooks


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (Text("a cat"), "the text “a cat”"),
        (Text("a cat", negative=True), "the negative prompt “a cat”"),
        (NO_TEXT, "the empty caption"),
        (Text(" \n"), "the empty caption"),
        (Text("a\x1b[31m cat\non a sofa"), "the text “a?[31m cat on a sofa”"),
        (Text("word " * 99), f"the text “{'word ' * 11}word …”"),
    ],
)
def test_texts_are_called_by_their_beginnings(text: Text, said: str) -> None:
    assert _named(text) == said


def test_ranks_that_share_encoders_encode_texts_with_images_apart() -> None:
    """Images run layers that texts alone do not, and ranks gather them together."""
    image = ImageInput("k", lambda: Image.new("RGB", (1, 1)), "x")
    texts = {"a": Text("a"), "b": Text("b", images=(image,)), "c": Text("c")}
    assert list(_alike(["a", "b", "c"], texts)) == [["a", "c"], ["b"]]


def test_t5_clamps_what_exceeds_fp16(toy: Path) -> None:
    """Why no family is warned of for its T5: as loaded here, it keeps `wo` in fp32 and clamps."""
    encoders = load_whole(toy / "model", torch.float16, torch.device("cpu"))
    t5 = encoders["text_encoder_2"]
    assert t5.encoder.block[0].layer[1].DenseReluDense.wo.weight.dtype is torch.float32
    for block in t5.encoder.block:
        block.layer[1].DenseReluDense.wo.weight.data.mul_(1e8)
    with torch.no_grad():
        output = t5(input_ids=torch.arange(3, 11)[None])[0]
    assert output.dtype is torch.float16
    assert not nonfinite({"output": output})


@pytest.mark.slow
@pytest.mark.parametrize("kept", [True, False], ids=["cached on the way", "not cached"])
def test_resident_encoders_refuse_too(
    kept: bool, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = Flux.encode

    def spoilt(self: Flux, pipeline: Any, prompt: str, length: int, **names: Any) -> Any:
        encoded = encode(self, pipeline, prompt, length, **names)
        return encoded | {"pooled_prompt_embeds": encoded["pooled_prompt_embeds"] / 0}

    monkeypatch.setattr(Flux, "encode", spoilt)
    with pytest.raises(NotFiniteError, match=r"not finite for the (text|empty caption)"):
        train(toy, tmp_path, unload_text_encoder=False, cache_text_embeddings=kept)
    assert not list((tmp_path / "cache" / "text").rglob("*.safetensors"))
