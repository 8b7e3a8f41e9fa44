"""Qwen-Image-Layered: an image and its layers, each with opacity, from the image."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from diffusers import QwenImageLayeredPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_layered
from PIL import Image

from engine.data.encode.latents import reference_pixels, to_pixels
from engine.data.index.data_index import build_index
from engine.data.index.views import view_of
from engine.data.read.images import decode
from engine.families.shared.references import REFERENCE
from engine.memory.tracing.inputs import (
    latents_shape,
    reference_shapes,
    references,
    sampled,
    training_frames,
)
from engine.sample.sample_files import write_sample
from engine.toy.components.weights import one_thread
from jobs.errors import SpecError
from jobs.run.rundir import read_json
from tests.support.engine.families import PROMPT, Case, Spied, batch_of, toys_root

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from jobs.spec.keys.prompts import SampleRequest


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("qwen_image:layered", toys_root(tmp_path_factory))


def picture_of(case: Case) -> str:
    found = (p for p in sorted(case.paths.data.glob("*.png")) if len(set(Image.open(p).size)) == 1)
    return str(next(found))


def asked(case: Case, **changes: Any) -> SampleRequest:
    return case.request(resolution=case.side, conditioning_image=picture_of(case), **changes)


def latents(case: Case, path: str) -> torch.Tensor:
    """Latents `(1, C, h, w)` of an image, as the cache has them."""
    vae = case.family.load_vae(case.paths.model, torch.float32).eval()
    with open(path, "rb") as file:
        pixels = np.asarray(decode(file.read(), alpha=True), dtype=np.float32)
    return case.family.encode_pictures(
        vae, torch.from_numpy(pixels).permute(2, 0, 1)[None] / 127.5 - 1
    )


@torch.no_grad()
def test_a_prediction_is_what_the_pipelines_scheduler_gets(case: Case) -> None:
    request = asked(case)
    assert request.layers == 2
    spied = Spied(case, request)
    own = latents(case, picture_of(case))
    text = case.family.arrange(batch_of(case.encoded(PROMPT)))
    assert spied.seen
    for noisy, level, expected in spied.seen:
        assert noisy.shape == (1, 16, 3, 16, 16)
        found = case.family.predict(
            spied.pipeline.transformer, noisy, level, text | {f"{REFERENCE}0": own}, 1.0
        )
        limit = 1e-4 * float(expected.abs().max())
        assert torch.allclose(found, expected, rtol=1e-3, atol=limit)
        others = text | {f"{REFERENCE}0": own.flip(-1)}
        plain = case.family.predict(spied.pipeline.transformer, noisy, level, others, 1.0)
        assert (plain - expected).abs().max() > 20 * limit, "the image makes a difference"
        turned = case.family.predict(
            spied.pipeline.transformer, noisy.flip(2), level, text | {f"{REFERENCE}0": own}, 1.0
        )
        assert (turned.flip(2) - expected).abs().max() > 20 * limit, "layers have an order"


@torch.no_grad()
def test_a_batch_is_its_samples(case: Case) -> None:
    transformer = case.stock().transformer
    generator = torch.Generator().manual_seed(1)
    noisy = torch.randn(2, 16, 3, 4, 6, generator=generator)
    own = torch.randn(2, 16, 4, 6, generator=generator)
    levels, texts = torch.tensor([0.3, 0.8]), [case.encoded(PROMPT), case.encoded("a star")]
    both = batch_of(*texts) | {f"{REFERENCE}0": own}
    together = case.family.predict(transformer, noisy, levels, both, 1.0)
    assert together.shape == noisy.shape
    for number, text in enumerate(texts):
        part = slice(number, number + 1)
        alone = case.family.predict(
            transformer,
            noisy[part],
            levels[part],
            batch_of(text) | {f"{REFERENCE}0": own[part]},
            1.0,
        )
        limit = 1e-5 * float(alone.abs().max())
        assert torch.allclose(together[part], alone, rtol=1e-4, atol=limit)


@torch.no_grad()
def test_the_stock_pipeline_makes_the_same_of_the_sizes_that_it_takes(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it returns latents and takes any size, `LayeredPipeline` can go."""
    own = pipeline_qwenimage_layered.calculate_dimensions
    small = lambda area, ratio: own(min(area, case.side**2), ratio)  # noqa: E731
    monkeypatch.setattr(pipeline_qwenimage_layered, "calculate_dimensions", small)
    ours = case.stock()
    stock = QwenImageLayeredPipeline(**ours.components)
    stock.set_progress_bar_config(disable=True)
    image = Image.open(picture_of(case)).convert("RGBA")
    words: dict[str, Any] = {"prompt": PROMPT, "layers": 1, "num_inference_steps": 1}

    def made(pipeline: Any, **more: Any) -> Any:
        return pipeline(image, generator=torch.Generator().manual_seed(0), **words, **more)

    (expected,) = made(stock, resolution=640).images[0]
    (found,) = made(ours, width=case.side, height=case.side).images[0]
    assert found.mode == "RGBA"
    assert np.array_equal(found, expected)
    assert made(ours, width=96, height=64).images[0][0].size == (96, 64)
    with pytest.raises(AssertionError, match="resolution must be"):
        made(stock, resolution=64)
    with pytest.raises(UnboundLocalError):
        made(stock, resolution=640, output_type="latent")


def test_the_samplers_shift_is_the_pipelines(case: Case) -> None:
    """mu follows the tokens of one image, however many layers there are."""
    scheduler, mu, sigma = case.stock().scheduler, (24 * 16 / 256) ** 0.5, torch.tensor([0.3])
    shift = case.family.sampler_shift_of(48, 32, 5)
    expected = scheduler.time_shift(mu, 1.0, sigma)
    assert torch.allclose(shift * sigma / (1 + (shift - 1) * sigma), expected)
    assert case.family.shift_of(48, 32, 5) == case.family.shift_of(48, 32)


def test_an_image_and_its_layers_show_the_same_part(case: Case, tmp_path: Path) -> None:
    """With their opacity; together, layers are their image."""
    data = tmp_path / "data"
    data.mkdir()
    for picture in case.paths.data.iterdir():
        (data / picture.name).write_bytes(picture.read_bytes())
    for number in (1, 2):  # the names that musubi-tuner has
        for layer in (case.paths.control / str(number)).glob("*.png"):
            (data / f"{layer.stem}_{number}.png").write_bytes(layer.read_bytes())
    datasets = [{"path": str(data), "layer_suffix": ["_1", "_2"]}]
    spec = case.spec(datasets=datasets, crop="random", crop_variants=2, random_flip=True)
    index = build_index(spec)
    assert len(index.samples) == 4
    assert {sample.bucket for sample in index.samples} > {(128, 128)}
    for sample in index.samples:
        view = view_of(sample, 3, spec)
        assert view.flip
        image = to_pixels(sample, view, spec)
        back, front = (reference_pixels(sample, number, view, spec) for number in (0, 1))
        assert image.shape == back.shape == front.shape
        assert image.shape[1] == 4
        assert float(back[:, 3].min()) == 1
        opacity = (front[:, 3:] + 1) / 2
        assert float(opacity.min()) == 0
        together = back[:, :3] * (1 - opacity) + front[:, :3] * opacity
        assert float((together - image[:, :3]).abs().mean()) < 1 / 127.5


def test_an_image_without_all_of_its_layers_is_skipped(case: Case, tmp_path: Path) -> None:
    for name, size in (("a", 64), ("a_1", 64), ("b", 64), ("b_1", 32), ("c", 64), ("d", 64)):
        Image.new("RGBA", (size, size)).save(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.txt").write_text("an image")
    Image.new("RGBA", (64, 48)).save(tmp_path / "d_1.png")
    spec = case.spec(
        datasets=[{"path": str(tmp_path), "layer_suffix": "_1"}], resolution=64, max_upscale=4
    )
    index = build_index(spec)
    assert [sample.name for sample in index.samples] == ["a.png", "b.png"]
    assert [skip.why for skip in index.skipped] == [
        f"no layer: {tmp_path / 'c_1.png'} does not exist",
        "its layer d_1.png has another shape: 64x48 for an image of 64x64",
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"datasets": [{"path": "d"}]}, "d has no layers for each image"),
        ({"datasets": [{"path": "d", "layer_suffix": [f"_{n}" for n in range(21)]}]}, "21 layers"),
        (
            {"validation_prompts": [{"prompt": "a", "conditioning_image": ["b", "c"]}]},
            '"a" has 2 conditioning images; the model splits only one',
        ),
        ({"validation_prompts": ["a"]}, '"a" has no conditioning image'),
    ],
)
def test_what_layers_need_is_said(case: Case, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=re.escape(said)):
        case.spec(**changes)


def test_a_sample_is_its_layers_and_what_they_show(tmp_path: Path) -> None:
    back = Image.new("RGBA", (4, 4), (255, 0, 0, 255))
    front = Image.new("RGBA", (4, 4), (0, 0, 255, 128))
    facts = dict.fromkeys(("prompt", "negative_prompt", "steps", "guidance", "seed", "step"), "a")
    facts |= {"size": [4, 4], "family": "qwen_image", "layers": 2}
    write_sample([back, front], facts, tmp_path / "00.png")
    names = {"00.png", "00-1.png", "00-2.png", "00.json"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert Image.open(tmp_path / "00-2.png").getpixel((0, 0)) == (0, 0, 255, 128)
    assert Image.open(tmp_path / "00.png").getpixel((0, 0)) == (127, 0, 128)
    assert Image.open(tmp_path / "00.png").mode == "RGB"


def test_the_memory_prediction_counts_an_image_and_its_layers(case: Case) -> None:
    spec = case.spec(validation_prompts=[{"prompt": "a", "conditioning_image": picture_of(case)}])
    config = read_json(case.paths.model / "transformer" / "config.json")
    assert config is not None
    size = (case.side, case.side)
    assert training_frames(spec) == 3
    assert sampled(spec) == (size, 3)
    assert latents_shape(spec, config, size, 3) == (16, 3, 16, 16)
    shapes = reference_shapes(spec, config, size, references(spec, training=True), 3)
    assert {name: shape for name, (shape, _) in shapes.items()} == {f"{REFERENCE}0": (16, 16, 16)}
