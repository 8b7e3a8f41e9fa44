"""Models that take conditioning images train on what their stock pipelines sample with."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from diffusers import (
    Flux2Pipeline,
    FluxKontextPipeline,
    QwenImageEditPipeline,
    WanVACEPipeline,
)
from diffusers.pipelines.flux import pipeline_flux_kontext
from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_dimensions
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import (
    CONDITION_IMAGE_SIZE,
    VAE_IMAGE_SIZE,
)
from PIL import Image
from safetensors.torch import load_file
from transformers import PreTrainedModel
from transformers.utils import is_torchvision_available

from engine import families
from engine.data.encode import texts as encode_texts
from engine.data.encode.latents import (
    mask_channels,
    masked_pixels,
    padded_pixels,
    prepare_latents,
)
from engine.data.encode.tensor_cache import TensorCache
from engine.data.encode.texts import Text, TextKeys, prompt_images
from engine.data.index.batch_plan import Draw
from engine.data.index.data_index import build_index
from engine.data.index.views import ReferenceView, fit_whole
from engine.data.prepare import Prepared
from engine.diffusion.objective import NoisySample
from engine.families.shared.references import (
    BEGINNING,
    FIRST_FRAME,
    REFERENCE,
    SOUND,
    SOUND_NOISE,
    SOUND_WEIGHT,
    first_frame_of,
    joint,
    loss_inputs,
    references_in,
)
from engine.families.wan import _control
from engine.memory.phases import text_cache
from engine.memory.tracing.inputs import largest_encoded, latents_shape, reference_shapes
from engine.memory.tracing.model import build, shape_of
from engine.memory.tracing.trace import batch_of as batch_of_shape
from engine.model import text_encoders
from engine.model.adapters import lora
from engine.model.files import weights
from engine.model.packing import Packing
from engine.ranks.telemetry import Telemetry
from engine.ranks.world import World
from engine.toy.components.weights import one_thread
from jobs.errors import NotFiniteError
from jobs.run.rundir import RunDir, read_json
from jobs.spec.families import FAMILIES, frames_beside, references
from jobs.spec.families.references import _SEEN_SIDE, PREFERRED, to_area, to_small_area
from jobs.spec.file.load import load_spec
from jobs.spec.keys.prompts import ValidationPrompt, requests_of
from tests.support.engine.families import (
    PROMPT,
    Case,
    Spied,
    batch_of,
    shrink_pipelines,
    toys_root,
    without_sound,
    write_fill_masks,
)
from tests.support.engine.run_context import run_context
from tests.support.waiting import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from jobs.spec.job_spec import JobSpec
    from jobs.spec.keys.prompts import SampleRequest

END = "<|im_end|>\n<|im_start|>assistant\n"
_JOB = {
    "pretrained_model_name_or_path": "m",
    "datasets": [{"path": "d", "conditioning_path": "c"}],
}
CASES = {
    "flux:kontext": 1,
    "flux2": 2,
    "flux2:klein-base-4b": 2,
    "qwen_image:edit": 1,
    "qwen_image:edit-2509": 2,
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread(), pytest.MonkeyPatch.context() as patched:
        shrink_pipelines(patched.setattr)
        yield


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name == "flux:kontext" else pytest.mark.slow)
        for name in CASES
    ],
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, toys_root(tmp_path_factory))


def asked(case: Case) -> SampleRequest:
    """A wide picture, with as many conditioning images as are tested."""
    assert case.paths.control is not None
    square = [one for one in sorted(case.paths.control.glob("*.png")) if is_square(one)]
    beside = [str(path) for path in square[: CASES[case.name]]]
    return case.request(resolution=f"{case.side * 3 // 2}x{case.side}", conditioning_image=beside)


def is_square(path: Any) -> bool:
    return len(set(Image.open(path).size)) == 1


def encoded(case: Case, request: SampleRequest) -> dict[str, torch.Tensor]:
    """Latents of conditioning images, as the cache has them."""
    vae = case.family.load_vae(case.paths.model, torch.float32).eval()
    found = {}
    for number, picture in enumerate(case.pictures(request)):
        pixels = torch.from_numpy(np.asarray(picture, dtype=np.float32)).permute(2, 0, 1)[None]
        found[f"{REFERENCE}{number}"] = case.family.encode_pictures(vae, pixels / 127.5 - 1)
    return found


@torch.no_grad()
def test_a_prediction_is_what_the_pipelines_scheduler_gets(case: Case) -> None:
    request = asked(case)
    references = encoded(case, request)
    assert len(references) == CASES[case.name]
    spied = Spied(case, request)
    text = case.family.arrange(batch_of(case.encoded(PROMPT, request=request)))
    condition = text | references
    denoiser = getattr(spied.pipeline, case.family.component)
    assert spied.seen
    for noisy, level, expected in spied.seen:
        found = case.family.predict(denoiser, noisy, level, condition, request.guidance)
        limit = 1e-4 * float(expected.abs().max())  # the pipeline's VAE sees pixels of a tensor
        assert torch.allclose(found, expected, rtol=1e-3, atol=limit)
        plain = case.family.predict(denoiser, noisy, level, text, request.guidance)
        assert (plain - expected).abs().max() > 20 * limit, "they make a difference"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen_image:edit", "qwen_image:edit-2509"])
@torch.no_grad()
def test_images_keep_their_grid_in_the_text_encoder(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As the encoder is given everything that its processor returns.

    The stock pipeline drops the types of the tokens: once it does not, `image_tokens` can go.
    """
    case = Case(name, toys_root(tmp_path_factory))
    pipeline, shown = case.text, [Image.effect_noise((96, 64), 90).convert("RGB")]
    calls: list[dict[str, Any]] = []
    processor, encoder = pipeline.processor, pipeline.text_encoder
    hook = encoder.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append(kwargs), with_kwargs=True
    )
    image = shown if "plus" in type(pipeline).__name__.lower() else shown[0]
    stock = pipeline.encode_prompt(prompt=PROMPT, image=image)[0][0]
    hook.remove()
    assert "mm_token_type_ids" not in calls[0]
    found = case.family.encode_with_images(pipeline, PROMPT, 64, shown)["prompt_embeds"]
    assert not encoder._forward_pre_hooks
    named = "Picture 1: " if isinstance(image, list) else ""
    images = named + ("<|vision_start|><|image_pad|><|vision_end|>" if named else "")
    text = pipeline.prompt_template_encode.format(images + PROMPT)
    inputs = processor(text=[text], images=image, return_tensors="pt")
    whole = encoder(**inputs, output_hidden_states=True).hidden_states[-1][0]
    expected = whole[pipeline.prompt_template_encode_start_idx :]
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert (stock - expected).abs().max() > 1e-3, "it makes a difference"
    length = len(pipeline.tokenizer(PROMPT, add_special_tokens=False)["input_ids"])
    for most in (3, length, length + 1):
        cut = case.family.encode_with_images(pipeline, PROMPT, most, shown)["prompt_embeds"]
        assert len(cut) == len(found) - length + min(most, length)
    cut = case.family.encode_with_images(pipeline, PROMPT, 3, shown)["prompt_embeds"]
    same = len(found) - length - len(pipeline.tokenizer(END)["input_ids"]) + 3
    assert torch.allclose(cut[:same], found[:same], rtol=1e-5, atol=1e-6), "its beginning"


@torch.no_grad()
def test_a_batch_is_its_samples(case: Case) -> None:
    """Each sample has its own conditioning images."""
    denoiser = getattr(case.stock(), case.family.component)
    request = asked(case)
    references = encoded(case, request)
    some = next(iter(references.values()))
    noisy = torch.randn(2, *some.shape[1:], generator=torch.Generator().manual_seed(1))
    levels = torch.tensor([0.3, 0.8])
    both = {name: torch.cat([one, one.flip(-1)]) for name, one in references.items()}
    text = case.encoded(PROMPT, request=request)
    texts = case.family.arrange(batch_of(text, text))
    together = case.family.predict(denoiser, noisy, levels, texts | both, 2.0)
    for number in range(2):
        part = slice(number, number + 1)
        own = {name: one[part] for name, one in both.items()}
        alone = case.family.predict(denoiser, noisy[part], levels[part], batch_of(text) | own, 2.0)
        limit = 1e-5 * float(alone.abs().max())
        assert torch.allclose(together[part], alone, rtol=1e-4, atol=limit)


def test_the_memory_prediction_counts_what_is_trained_on(case: Case) -> None:
    entry = {"path": str(case.paths.data), "conditioning_path": ["c"] * CASES[case.name]}
    spec = case.spec(dataset="", datasets=[entry], conditioning_resolution=case.side)
    config = read_json(case.paths.model / "transformer" / "config.json")
    assert config is not None
    shapes = reference_shapes(spec, config, (case.side, case.side), CASES[case.name])
    real = encoded(case, asked(case))
    assert {n: shape for n, (shape, _) in shapes.items()} == {
        n: t.shape[1:] for n, t in real.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["wan:2.2-ti2v-5b", "ltxvideo", "ltxvideo:13b-0.9.7-dev", "ltx2", "ltx2:2.5-22b"],
)
@torch.no_grad()
def test_a_first_frame_is_held_as_in_the_pipeline(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Of what it predicts, and of what the autoencoder makes of it with other frames behind it."""
    case = Case(name, toys_root(tmp_path_factory))
    picture = min(case.paths.data.glob("*.png"))
    frames = 2 * (case.frames - 1) + 1
    request = case.request(
        resolution=case.side, num_frames=frames, conditioning_image=str(picture), guidance=1.0
    )
    pipeline, calls = case.stock(), []
    denoiser = getattr(pipeline, case.family.component)
    denoiser.register_forward_hook(
        lambda module, args, kwargs, output: calls.append((kwargs, output[0])), with_kwargs=True
    )
    options: dict[str, Any] = {}
    if case.facts.name == "ltx2":  # training sees no compressed image, and no sound
        options["image_crf"] = 0
        without_sound(pipeline.transformer)
    case.run(pipeline, request, output_type="latent", **options)
    text = batch_of(case.encoded(PROMPT))
    assert len(calls) == request.steps
    for told, output in list(calls):
        noisy, expected = (
            case.family.unpack(pipeline, one, request) for one in (told["hidden_states"], output)
        )
        level = told["timestep"].max().view(1) / 1000
        given = first_frame_of(noisy)
        # What stands there is not looked at: it is what the model is given.
        found = case.family.predict(denoiser, noisy.flip(2), level, text | given, 1.0)
        assert not torch.allclose(found[:, :, 1:], expected[:, :, 1:], rtol=1e-3, atol=1e-3)
        noisy = torch.cat([torch.zeros_like(noisy[:, :, :1]), noisy[:, :, 1:]], dim=2)
        found = case.family.predict(denoiser, noisy, level, text | given, 1.0)
        limit = 1e-4 * float(expected.abs().max())
        assert torch.allclose(found, expected, rtol=1e-3, atol=limit)
        plain = case.family.predict(denoiser, noisy, level, text, 1.0)[:, :, 1:]
        assert (plain - expected[:, :, 1:]).abs().max() > 20 * limit, "it makes a difference"

    vae = case.family.load_vae(case.paths.model, torch.float32).eval()
    image = case.pictures(request)[0].resize((case.side, case.side), Image.Resampling.LANCZOS)
    pixels = torch.from_numpy(np.asarray(image, dtype=np.float32)).permute(2, 0, 1)
    pixels = pixels[None, :, None] / 127.5 - 1
    first = case.family.encode_pictures(vae, pixels)
    moving = torch.cat([pixels, *(pixels.roll(8 * n, -1) for n in range(1, frames))], dim=2)
    given = first_frame_of(case.family.encode_pictures(vae, moving))
    assert torch.allclose(given[FIRST_FRAME], first, rtol=1e-4, atol=1e-4), "it is causal"
    if (
        case.facts.name != "ltxvideo"
    ):  # its pipelines draw the first frame's latents, as training does not
        seen = case.family.unpack(pipeline, calls[0][0]["hidden_states"], request)
        assert torch.allclose(seen[:, :, :1], first, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("wan:2.1-i2v-14b-480p", "wan:2.2-i2v-a14b-low", "hunyuanvideo15:480p-i2v-step-distilled"),
        *("wan:2.1-flf2v-14b-720p", "wan:2.2-flf2v-a14b-high"),
    ],
)
@torch.no_grad()
def test_a_first_frame_beside_the_video_is_as_in_the_pipeline(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What the model is given of it, and what it predicts from that.

    Step-distilled models predict for the step's end, which is its beginning in training.
    """
    case = Case(name, toys_root(tmp_path_factory))
    picture, last = sorted(one for one in case.paths.data.glob("*.png") if is_square(one))[:2]
    given = [str(picture), str(last)][: 1 + case.family.last_frame]
    frames = 2 * (case.frames - 1) + 1
    request = case.request(
        resolution=case.side, num_frames=frames, conditioning_image=given, guidance=1.0
    )
    pipeline, calls = case.stock(), []
    denoiser = getattr(pipeline, case.family.component)
    denoiser.register_forward_hook(
        lambda module, args, kwargs, output: calls.append((kwargs, output[0])), with_kwargs=True
    )
    case.run(pipeline, request, output_type="latent")
    vae = case.family.load_vae(case.paths.model, torch.float32).eval()
    after = frames_beside(case.spec(), frames) - 1
    pixels = torch.zeros(1, 3, 1 + after, case.side, case.side)
    for place, one in zip((0, -1), case.pictures(request), strict=False):
        image = one.resize((case.side, case.side), Image.Resampling.LANCZOS)
        shown = torch.from_numpy(np.asarray(image, dtype=np.float32)).permute(2, 0, 1)
        pixels[:, :, place] = shown / 127.5 - 1
    beginning = case.family.encode_pictures(vae, pixels)
    text = batch_of(case.encoded(PROMPT, request=request)) | {BEGINNING: beginning}
    counted = text_cache(case.spec(), case.paths.model, 1)
    image_encoder = getattr(case.text, "image_encoder", None)
    encoders = [name for name in case.text.components if name.startswith("text_encoder")]
    held = [getattr(case.text, name) for name in encoders] + [image_encoder] * bool(image_encoder)
    assert counted is not None
    assert counted.peak == pytest.approx(
        sum(4 * parameter.numel() for part in held for parameter in part.parameters()), rel=0.01
    )
    assert calls
    for told, expected in list(calls):
        inputs = told["hidden_states"]
        if told.get("timestep_r") is not None:
            with_end, told = expected, told | {"timestep_r": told["timestep"]}
            expected = denoiser(**told)[0]
            assert not torch.allclose(expected, with_end, rtol=1e-2, atol=1e-2)
        noisy, given = inputs.split([16, inputs.shape[1] - 16], dim=1)
        there = given[:, 4:] if after else given[:, :-1, :1]
        assert torch.allclose(there, beginning, rtol=1e-3, atol=1e-3)
        found = case.family.predict(denoiser, noisy, told["timestep"] / 1000, text, 1.0)
        limit = 1e-3 * float(expected.abs().max())
        assert torch.allclose(found, expected, rtol=1e-3, atol=limit)
        others = text | {BEGINNING: beginning.flip(-1)}
        plain = case.family.predict(denoiser, noisy, told["timestep"] / 1000, others, 1.0)
        assert (plain - expected).abs().max() > 3 * limit, "it makes a difference"


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(
    "roles",
    [
        ["control"],
        ["control", "reference", "reference"],
        ["reference"],
        ["fill_mask", "control"],
        ["reference", "control", "fill_mask"],
    ],
    ids="-".join,
)
def test_a_control_video_is_as_in_the_pipeline(
    roles: list[str], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What the control blocks are given, as a job caches it of a sample, and what is predicted.

    Of reference images in the order of the authors' code, which the pipeline reverses.
    """
    case = Case("wan:2.1-vace-1.3b", toys_root(tmp_path_factory))
    images = iter((case.paths.control, case.paths.data))
    still = roles[0] == "fill_mask"
    masks = write_fill_masks(case.videos, case.frames, case.side, still=still, root=tmp_path / "m")
    own = {"control": case.control_videos, "fill_mask": masks}
    places = [own[role] if role in own else next(images) for role in roles]
    entry = {"path": str(case.videos), "conditioning_path": [str(place) for place in places]}
    spec = case.spec(datasets=[entry | {"conditioning_roles": roles}])
    index, cache = build_index(spec), TensorCache(tmp_path, "latents")
    with preparing(case, case.family, tmp_path, spec) as run:
        keys = prepare_latents(run, cache, index, [(0, 0)])
    data = Prepared(spec, index, Mock(), [], [], cache, keys, Mock())
    condition = {n: part[None] for n, part in data.references_of(Draw(0, 0), 0).items()}
    latents = data.latents_of(Draw(0, 0))[None]
    before = roles.count("reference")
    request = case.request(
        resolution=case.side,
        num_frames=case.frames,
        conditioning_image=[reference.path for reference in index.samples[0].references],
        conditioning_roles=roles,
        guidance=1.0,
    )
    pipeline, calls = case.stock(), []
    pipeline.transformer.register_forward_hook(
        lambda module, args, kwargs, output: calls.append((kwargs, output[0])), with_kwargs=True
    )
    case.run(pipeline, request, output_type="latent")
    shape = shape_of(spec, sharded=False)
    assert shape is not None
    counted = batch_of_shape(build(shape), shape, 1)
    assert counted.latents.shape == latents.shape
    assert {n: counted.condition[n].shape for n in condition} == {
        n: part.shape for n, part in condition.items()
    }
    text = batch_of(case.encoded(PROMPT, request=request))
    assert calls
    for told, expected in list(calls):
        given = told["control_hidden_states"]
        own = _control(*references_in(condition))
        assert torch.allclose(given, own, rtol=1e-3, atol=1e-3)
        shares = given[:, 32:].mean((0, 1, 3, 4))
        assert not shares[:before].any()
        assert ((shares[before:] == 1) ^ ("fill_mask" in roles)).all()
        assert torch.equal(latents[:, :, :before], own[:, :16, :before]), "they are to be made too"
        level, noisy = told["timestep"] / 1000, told["hidden_states"]
        assert noisy.shape == latents.shape
        limit = 1e-3 * float(expected.abs().max())
        for parts, same in ((condition, True), (flipped(condition), False)):
            found = case.family.predict(pipeline.transformer, noisy, level, text | parts, 1.0)
            assert torch.allclose(found, expected, rtol=1e-3, atol=limit) is same


def flipped(condition: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: part.flip(-1) for name, part in condition.items()}


@pytest.mark.parametrize("size", [(100, 61), (40, 90), (64, 64), (65, 7)])
def test_a_reference_image_is_what_the_pipeline_makes_of_it(size: tuple[int, int]) -> None:
    """Nothing is computed by a model."""
    picture = Image.effect_noise(size, 90).convert("RGB")
    if min(size) < 8:  # which the pipeline cannot read
        assert padded_pixels(picture, whole(picture, (64, 48))).shape == (1, 3, 1, 48, 64)
        return
    pipeline = WanVACEPipeline(*[None] * 4)
    *_, ((canvas,),) = pipeline.preprocess_conditions(
        None, None, [picture], 1, 48, 64, 5, torch.float32, torch.device("cpu")
    )
    found = padded_pixels(picture, whole(picture, (64, 48)))
    assert torch.allclose(found[0, :, 0], canvas, atol=1e-5)
    mirrored = padded_pixels(picture, replace(whole(picture, (64, 48)), flip=True))
    assert torch.equal(mirrored, found.flip(-1))


def whole(picture: Image.Image, size: tuple[int, int]) -> ReferenceView:
    return ReferenceView((0, 0, *picture.size), size, size, flip=False)


@pytest.mark.slow
@pytest.mark.parametrize("packing", [None, Packing("int8")])
def test_the_image_encoder_is_read_straight_onto_the_device(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    packing: Packing | None,
) -> None:
    """Ranks on GPUs do not each hold a copy of it in host memory first."""
    case = Case("wan:2.1-i2v-14b-480p", toys_root(tmp_path_factory))
    expected = dict(case.text.image_encoder.named_parameters())
    read: list[torch.device] = []
    whole = text_encoders.load_encoder_whole

    def on_host(kind: Any, root: Path, dtype: Any, device: torch.device, **more: Any) -> Any:
        read.append(device)
        return whole(kind, root, dtype, torch.device("cpu"), **more)

    monkeypatch.setattr(text_encoders, "load_encoder_whole", on_host)
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, *where, **more: module)
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", None)
    gpu = World(0, 1, torch.device("cuda", 0), "single", "t")
    pipeline = text_encoders._load(
        case.family, case.paths.model, torch.bfloat16, gpu, None, packing, print, print
    )
    assert read == [gpu.device] * 2
    found = dict(pipeline.image_encoder.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items()), "in fp32"


@pytest.mark.slow
@pytest.mark.parametrize("flavour", ["canny", "fill"])
@torch.no_grad()
def test_a_control_image_is_in_channels_of_its_own(
    flavour: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What the model is given of it, and what it predicts from that; of the size of the sample."""
    case = Case(f"flux:{flavour}", toys_root(tmp_path_factory))
    assert case.paths.control is not None
    size = (case.side * 3 // 2, case.side)
    beside = [str(min(one for one in case.paths.control.glob("*.png") if is_square(one)))]
    if flavour == "fill":
        mask = Image.linear_gradient("L").resize(size)
        mask.save(tmp_path / "mask.png")
        beside.append(str(tmp_path / "mask.png"))
    request = case.request(resolution=f"{size[0]}x{size[1]}", conditioning_image=beside)
    pipeline, calls = case.stock(), []
    pipeline.transformer.register_forward_hook(
        lambda module, args, kwargs, output: calls.append((kwargs, output[0])), with_kwargs=True
    )
    case.run(pipeline, request, output_type="latent")
    vae = case.family.load_vae(case.paths.model, torch.float32).eval()
    pictures = [one.resize(size, Image.Resampling.LANCZOS) for one in (case.pictures(request)[:2])]
    pixels = torch.from_numpy(np.asarray(pictures[0], dtype=np.float32)).permute(2, 0, 1)[None]
    pixels = pixels / 127.5 - 1
    masked = masked_pixels(pixels, pictures[1]) if flavour == "fill" else pixels
    own = case.family.encode_pictures(vae, masked[:, :3])
    config = dict(pipeline.transformer.config)
    assert own.shape[1:] == latents_shape(case.spec(), config, size)
    if flavour == "fill":
        assert float(masked[:, 3:].mean()) == pytest.approx(0.5, abs=0.05)
        own = torch.cat([own, mask_channels(masked[:, 3:], own)[None]], dim=1)
    text = batch_of(case.encoded(PROMPT, request=request))
    (shape, _) = reference_shapes(case.spec(), config, size, 1)[f"{REFERENCE}0"]
    assert shape == own.shape[1:]
    assert len(calls) == request.steps
    for told, output in list(calls):
        inputs = told["hidden_states"]
        parts = inputs.split([64, inputs.shape[2] - 64], dim=2)
        noisy, given = (case.family.unpack(pipeline, one, request) for one in parts)
        # The pipeline draws from what the autoencoder says; training takes the mean.
        left, ours = given[:, :16], own[:, :16]
        assert float((left - ours).square().mean()) < 0.05 * float(ours.square().mean())
        assert torch.equal(given[:, 16:], own[:, 16:].float()), "the mask, pixel by pixel"
        expected = case.family.unpack(pipeline, output, request)
        for latents, same in ((given, True), (given.flip(-1), False)):
            condition = text | {f"{REFERENCE}0": latents}
            found = case.family.predict(
                pipeline.transformer, noisy, told["timestep"], condition, request.guidance
            )
            assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4) is same


@pytest.mark.slow
def test_a_new_control_lora_widens_the_model(tmp_path_factory: pytest.TempPathFactory) -> None:
    """With zeros, which the memory prediction counts too."""
    case = Case("flux:control", toys_root(tmp_path_factory))
    spec, root = case.spec(model_type="lora"), case.paths.model / "transformer"
    model, stored = weights.build_on_meta(case.family.transformer_class(), root, spec)
    weights.materialise(model, torch.device("cpu"))
    torch.nn.init.ones_(model.x_embedder.weight)
    weights.stream(model, stored)
    own, new = model.x_embedder.weight.detach().chunk(2, dim=1)
    published = load_file(root / "diffusion_pytorch_model.safetensors")["x_embedder.weight"]
    assert torch.equal(own, published)
    assert not new.any()
    assert (model.config.in_channels, model.config.out_channels) == (128, 64)
    lora.add_lora(model, spec, case.family.lora_targets(spec))
    assert "x_embedder.lora_A.default.weight" in lora.lora_parameters(model)
    shape = shape_of(spec, sharded=True)
    assert shape is not None
    counted = {one.name: one.numel for unit in build(shape).units for one in unit.weights}
    assert counted == {name: part.numel() for name, part in model.named_parameters()}


def test_the_loss_is_of_what_is_not_given() -> None:
    target, frames = torch.zeros(2, 3, 4, 2, 2), torch.arange(4.0).view(1, 1, 4, 1, 1)
    problem = NoisySample(target, torch.zeros(2), target)
    prediction = target + frames
    left, of = loss_inputs(prediction, problem, {FIRST_FRAME: target[:, :, :1]})
    assert left.shape == of.target.shape == (2, 3, 3, 2, 2)
    assert float((left - of.target).square().mean()) == pytest.approx((1 + 4 + 9) / 3)
    for given in ({}, {BEGINNING: target[:, :, :1]}):  # beside the video, all of it is predicted
        assert loss_inputs(prediction, problem, given)[0] is prediction


def test_a_mask_has_a_channel_for_each_pixel_of_a_cell() -> None:
    """Row by row; from gray 128 on it is white, and what it covers is gray."""
    gray = np.zeros((16, 24), np.uint8)
    gray[9, 21], gray[9, 20] = 128, 127
    masked = masked_pixels(torch.ones(1, 3, 16, 24), Image.fromarray(gray))
    assert (masked[0, :, 9, 21].tolist(), masked[0, :, 9, 20].tolist()) == (
        [0, 0, 0, 1],
        [1, 1, 1, 0],
    )
    channels = mask_channels(masked[:, 3:], torch.zeros(16, 2, 3))
    assert channels.shape == (64, 2, 3)
    assert channels.nonzero().tolist() == [[8 * 1 + 5, 1, 2]]


@pytest.mark.parametrize("from_first", [False, True])
def test_with_sound_the_loss_is_the_sum_of_two(from_first: bool) -> None:
    """Of the second sample, which is silent, that of the video alone."""
    rng = torch.Generator().manual_seed(0)
    target, video = torch.randn(2, 2, 3, 4, 2, 2, generator=rng)
    latents, noise, sound = torch.randn(3, 2, 5, 6, generator=rng)
    condition = {SOUND: latents, SOUND_NOISE: noise, SOUND_WEIGHT: torch.tensor([1.0, 0.0])}
    condition |= first_frame_of(target) if from_first else {}
    problem = NoisySample(target, torch.zeros(2), target)
    prediction, of = loss_inputs(joint(video, sound), problem, condition)
    found = (prediction - of.target).square().mean(dim=1)
    begin = int(from_first)
    of_video = (video - target)[:, :, begin:].square().flatten(1).mean(dim=1)
    of_sound = (sound - (noise - latents)).square().flatten(1).mean(dim=1)
    assert torch.allclose(found, of_video + torch.tensor([1.0, 0.0]) * of_sound)


@pytest.mark.parametrize("size", [(900, 640), (1500, 1100), (400, 1300)])
def test_a_conditioning_image_is_what_its_pipeline_makes_of_it(size: tuple[int, int]) -> None:
    """Pixel by pixel; nothing is computed by a model."""
    assert list(PREFERRED) == pipeline_flux_kontext.PREFERRED_KONTEXT_RESOLUTIONS
    picture = Image.effect_noise(size, 90).convert("RGB")
    kontext = FAMILIES["flux"].references_of("kontext")
    assert kontext is not None
    fitted = fit_whole(picture, kontext.fit, None)
    processor = FluxKontextPipeline(*[None] * 7).image_processor
    assert np.array_equal(processor.resize(picture, fitted.height, fitted.width), fitted)
    flux2 = FAMILIES["flux2"].references
    assert flux2 is not None
    fitted = fit_whole(picture, flux2.fit, None)
    own = Flux2Pipeline(*[None] * 5).image_processor
    assert isinstance(own, Flux2ImageProcessor)
    if size[0] * size[1] > 1024 * 1024:
        picture = own._resize_to_target_area(picture, 1024 * 1024)
    width, height = (side // 16 * 16 for side in picture.size)
    pixels = own.preprocess(picture, height=height, width=width, resize_mode="crop")[0]
    again = (pixels.permute(1, 2, 0).numpy() + 1) * 127.5
    assert np.abs(again - np.asarray(fitted)).max() < 0.01


@pytest.mark.parametrize("size", [(300, 200), (310, 187), (64, 220)])
def test_what_qwen_edits_is_as_large_as_in_its_pipeline(size: tuple[int, int]) -> None:
    for side in (1024, 512, _SEEN_SIDE):
        width, height, _ = calculate_dimensions(side**2, size[0] / size[1])
        assert to_area(*size, side).size == (width, height)
    assert to_small_area(*size, 9999) == to_area(*size, references._SEEN_SIDE)
    assert CONDITION_IMAGE_SIZE == _SEEN_SIDE**2
    assert VAE_IMAGE_SIZE == 1024**2
    picture = Image.effect_noise(size, 90).convert("RGB")
    fitted = fit_whole(picture, to_area, 256)
    processor = QwenImageEditPipeline(*[None] * 6).image_processor
    assert np.array_equal(processor.resize(picture, fitted.height, fitted.width), fitted)


def test_what_is_encoded_may_be_larger_than_what_is_trained_on() -> None:
    kontext = _JOB | {"model_family": "flux", "model_flavour": "kontext", "resolution": "512"}
    assert largest_encoded(load_spec(None, kontext)) == (1024, 1024)
    small = load_spec(None, kontext | {"conditioning_resolution": "256"})
    assert largest_encoded(small) == (512, 512)
    plain = {key: value for key, value in kontext.items() if key != "datasets"}
    assert largest_encoded(load_spec(None, plain | {"dataset": "d"})) == (512, 512)


def test_texts_are_encoded_for_each_image(tmp_path: Path) -> None:
    """Once for each text and what is seen with it, in the cache too."""
    edit = load_spec(None, {"model_family": "qwen_image", "model_flavour": "edit", **_JOB})
    plain = load_spec(None, {"model_family": "flux", "model_flavour": "kontext", **_JOB})
    pictures = {name: Image.new("RGB", (64, 96), name) for name in ("red", "blue")}
    prompts = [ValidationPrompt(prompt="a", conditioning_image=[name]) for name in pictures]
    asked = requests_of(edit.model_copy(update={"validation_prompts": prompts}))
    red, blue = (prompt_images(request, pictures, edit) for request in asked)
    assert red == prompt_images(asked[0], pictures, edit) != blue
    assert prompt_images(asked[0], pictures, plain) == ()
    assert [look.read().size for look in red] == [to_area(64, 96, None).size]
    (tmp_path / "text_encoder").mkdir()
    family = families.load("qwen_image", "edit")
    keys = TextKeys(edit, family, TensorCache(tmp_path / "cache", "text"), tmp_path)
    texts = [Text("a"), Text("a", images=red), Text("a", images=blue), Text("a", images=red + blue)]
    texts += [Text("a", images=blue + red), Text("b", images=red)]
    assert len({keys(text) for text in texts}) == len(texts)

    def key_of(text: Text) -> str:
        return TextKeys(edit, family, TensorCache(tmp_path / "cache", "text"), tmp_path)(text)

    def changed(owner: Any, name: str, value: Any) -> list[bool]:
        """Whether the keys change of a text alone, and of one with an image."""
        before = [key_of(text) for text in texts[:2]]
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(owner, name, value)
            return [key_of(t) != k for t, k in zip(texts[:2], before, strict=True)]

    backend = not is_torchvision_available()
    assert changed(type(family), "ENCODING", 1) == [True, True]
    assert changed(type(family), "ENCODING_WITH_IMAGES", 0) == [False, True], "it is not 0"
    assert changed(encode_texts, "is_torchvision_available", lambda: backend) == [False, True]
    edit = edit.model_copy(update={"allow_tf32": not edit.allow_tf32})
    assert key_of(texts[0]) == keys(texts[0])
    assert key_of(texts[1]) != keys(texts[1])


class Spoiling:
    """A family whose VAE returns NaN for the second picture."""

    def __init__(self, family: Any) -> None:
        self._family = family
        self._calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._family, name)

    def encode_condition(self, vae: Any, pixels: torch.Tensor) -> torch.Tensor:
        return self.encode_pictures(vae, pixels)

    def encode_pictures(self, vae: Any, pixels: torch.Tensor) -> torch.Tensor:
        self._calls += 1
        latents: torch.Tensor = self._family.encode_pictures(vae, pixels)
        return latents * (torch.nan if self._calls == 2 else 1.0)


@contextmanager
def preparing(case: Case, family: Any, root: Path, spec: JobSpec | None = None) -> Iterator[Any]:
    """A job of one rank that prepares its data."""
    run_dir = RunDir(root / "run")
    run_dir.create()
    telemetry = Telemetry(run_dir, 0)
    world = World(0, 1, torch.device("cpu"), "single", "t")
    try:
        yield run_context(spec or case.spec(), run_dir, world, telemetry, family=family)
    finally:
        telemetry.close()


def test_an_image_is_written_while_the_next_one_is_encoded(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    case = Case("flux:kontext", toys_root(tmp_path_factory))
    index, cache = build_index(case.spec()), TensorCache(tmp_path, "latents")
    family, write, second = Spoiling(case.family), cache.write, threading.Event()

    def encode(vae: Any, pixels: torch.Tensor) -> torch.Tensor:
        family._calls += 1
        if family._calls == 2:
            second.set()
        latents: torch.Tensor = case.family.encode_pictures(vae, pixels)
        return latents

    def written(key: str, tensors: dict[str, torch.Tensor]) -> None:
        assert second.wait(PATIENCE)
        write(key, tensors)

    with (
        preparing(case, family, tmp_path) as run,
        patch.object(family, "encode_pictures", encode),
        patch.object(cache, "write", written),
    ):
        prepare_latents(run, cache, index, [(0, 0)])
    assert len(list(cache.root.rglob("*.safetensors"))) == 2


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("flux:kontext", "the conditioning image of"),
        pytest.param("wan:2.2-i2v-a14b-low", "the first frame of", marks=pytest.mark.slow),
    ],
)
def test_what_a_sample_is_conditioned_on_is_named_where_its_latents_are_not_finite(
    name: str, said: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    case = Case(name, toys_root(tmp_path_factory))
    index, cache = build_index(case.spec()), TensorCache(tmp_path, "latents")
    with (
        preparing(case, Spoiling(case.family), tmp_path) as run,
        pytest.raises(NotFiniteError) as caught,
    ):
        prepare_latents(run, cache, index, [(0, 0)])
    assert caught.value.message.endswith(f" for {said} {index.samples[0].name}")
    assert len(list(cache.root.rglob("*.safetensors"))) == 1, "that of the sample itself"
