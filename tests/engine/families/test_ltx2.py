"""What is particular to LTX-2: sound beside the video, connectors between text and transformer.

Its text, inputs, targets, predictions, losses and gradients were compared with those of Lightricks'
trainer (`ltx_core`, and `TextToVideoStrategy` of `ltx_trainer` with `with_audio: false`) on the
same weights and tensors, for LTX-2, LTX-2.3 and LTX-2.5: equal to 6e-6, and the same parameters
have gradients.
"""

from __future__ import annotations

import math
import re
import shutil
from copy import copy
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from diffusers.modular_pipelines import LTX25AutoBlocks, LTX25ModularPipeline
from diffusers.modular_pipelines.ltx2.modular_blocks_ltx2 import LTX2AutoDecoderStep
from diffusers.pipelines.ltx2.utils import resolve_default_image_crf
from PIL import Image
from transformers import AutoTokenizer

from engine import families
from engine.data.encode.tensor_cache import TensorCache
from engine.data.encode.texts import Text, TextKeys
from engine.diffusion.objective import build_objective
from engine.families.shared.ltx2_pipeline import log_spectrum
from engine.families.shared.references import (
    SOUND,
    SOUND_NOISE,
    SOUND_WEIGHT,
    first_frame_of,
    split_joint,
)
from engine.memory.phases import text_cache
from engine.memory.tracing.inputs import sound_shapes
from engine.memory.tracing.model import shape_of
from engine.model.text_encoders import encoder_bytes
from engine.toy.components.weights import one_thread
from jobs.errors import SpecError, UserError
from jobs.models.model_files import check_model
from tests.support.engine.families import (
    NEGATIVE,
    PROMPT,
    Case,
    batch_of,
    toys_root,
    without_sound,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FIRST, LATER, LAST = "ltx2", "ltx2:2.3-22b", "ltx2:2.5-22b"
KEYFRAMES = "keyframes_abs_pos_embedding"  # which only diffusers' pipelines of keyframes use
# What Lightricks' trainer names in `v2v_ic_lora.yaml`, for videos without sound.
ITS_TARGETS = {
    *(f"attn{number}.{part}" for number in (1, 2) for part in ("to_k", "to_q", "to_v", "to_out.0")),
    *("ff.net.0.proj", "ff.net.2"),
}

pytestmark = pytest.mark.slow  # its toys are written for all of its tests


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module", params=[FIRST, LATER, LAST])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, toys_root(tmp_path_factory))


def noisy(frames: int = 3) -> torch.Tensor:
    return torch.randn(1, 32, frames, 2, 3, generator=torch.Generator().manual_seed(0))


def test_only_what_makes_videos_is_trained(case: Case) -> None:
    """As in Lightricks' trainer: no weight that reads or writes sound has a gradient."""
    denoiser = case.stock().transformer.train().requires_grad_(True)
    text = batch_of(case.encoded(PROMPT))
    case.family.predict(
        denoiser, noisy(), torch.tensor([0.5]), text, 1.0
    ).square().mean().backward()
    trained = {name for name, p in denoiser.named_parameters() if p.grad is not None}
    case.family.freeze(denoiser, case.spec(model_type="full"))
    assert trained == {name for name, p in denoiser.named_parameters() if p.requires_grad}
    modules = [name for name, _ in denoiser.named_modules()]
    adapted = {name for name in modules if re.fullmatch(case.family.LORA_TARGETS, name)}
    assert {name.split(".", 2)[2] for name in adapted} == ITS_TARGETS
    assert {f"{name}.weight" for name in adapted} <= trained


@torch.no_grad()
def test_places_are_those_of_the_stock_transformer(case: Case) -> None:
    denoiser = case.stock().transformer
    for fps in (24.0, 12.5):
        family = families.load("ltx2", case.flavour, case.paths.model, fps)
        places = family._places(denoiser.config, noisy().shape[2:], torch.device("cpu"))
        stock = denoiser.rope.prepare_video_coords(1, 3, 2, 3, torch.device("cpu"), fps=fps)
        assert torch.equal(places, stock)


@torch.no_grad()
def test_sound_reaches_the_video_in_samples_and_not_in_training(case: Case) -> None:
    """Of the stock pipeline, whose videos are others without it."""
    request = case.request(num_frames=case.frames, seed=2)
    pipeline = case.stock()
    whole = case.run(pipeline, request, output_type="latent")
    without_sound(pipeline.transformer)
    assert not torch.allclose(case.run(pipeline, request, output_type="latent"), whole, atol=1e-2)
    text = batch_of(case.encoded(PROMPT))
    video, sound = text["prompt_embeds"].tensor_split([-32], dim=-1)
    other = {"prompt_embeds": torch.cat([video, sound + 1], dim=-1)}
    level, denoiser = torch.tensor([0.5]), pipeline.transformer
    assert torch.equal(
        case.family.predict(denoiser, noisy(), level, text, 1.0),
        case.family.predict(denoiser, noisy(), level, other, 1.0),
    )


def with_sound(latents: torch.Tensor, noise: torch.Tensor) -> dict[str, torch.Tensor]:
    return {SOUND: latents, SOUND_NOISE: noise, SOUND_WEIGHT: torch.ones(len(latents))}


@torch.no_grad()
def test_video_and_sound_are_predicted_together_as_in_the_pipeline(case: Case) -> None:
    request = case.request(num_frames=case.frames, seed=2)
    pipeline, calls = case.stock(), []
    pipeline.transformer.register_forward_hook(
        lambda module, args, told, output: calls.append((told, output)), with_kwargs=True
    )
    case.run(pipeline, request, output_type="latent")
    text = batch_of(case.encoded(PROMPT))
    for told, (video, sound) in list(calls):
        seen = case.family.unpack(pipeline, told["hidden_states"], request)
        rows, level = told["audio_hidden_states"], told["timestep"].view(1) / 1000
        # Between latents and noise that are equal, all levels are.
        condition = text | with_sound(rows, rows)
        found = case.family.predict(pipeline.transformer, seen, level, condition, 1.0)
        expected = case.family.unpack(pipeline, video, request)
        for ours, theirs in zip(
            split_joint(found, seen.shape), (expected, sound.flatten(1)), strict=True
        ):
            assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)
        other = case.family.predict(
            pipeline.transformer, seen, level, text | with_sound(rows.flip(1), rows.flip(1)), 1.0
        )
        assert not torch.allclose(split_joint(other, seen.shape)[0], expected, atol=1e-3)


def test_with_sound_all_of_the_model_is_trained(case: Case) -> None:
    """As in Lightricks' trainer with `with_audio`; and each layer with the names of its configs."""
    denoiser = case.stock().transformer.train().requires_grad_(True)
    text = batch_of(case.encoded(PROMPT))
    rows = torch.randn(1, 7, denoiser.config.audio_in_channels)
    condition = text | with_sound(rows, rows.flip(1))
    level = torch.tensor([0.5])
    case.family.predict(denoiser, noisy(), level, condition, 1.0).square().mean().backward()
    untrained = {name for name, p in denoiser.named_parameters() if p.grad is None}
    assert untrained == ({KEYFRAMES} if case.name == LAST else set())
    spec = case.spec(train_audio=True)
    adapted = {
        name.split(".", 2)[2]
        for name, _ in denoiser.named_modules()
        if re.fullmatch(case.family.lora_targets(spec), name)
    }
    both = {f"audio_{name}" for name in ITS_TARGETS} | ITS_TARGETS
    crossed = {
        f"{way}_attn.{part}"
        for way in ("audio_to_video", "video_to_audio")
        for part in ("to_k", "to_q", "to_v", "to_out.0")
    }
    assert adapted == both | crossed


@torch.no_grad()
def test_sound_is_read_from_nothing_but_the_host(case: Case) -> None:
    denoiser = case.stock().transformer.to("meta")
    text = {name: one.to("meta") for name, one in batch_of(case.encoded(PROMPT)).items()}
    rows = torch.empty(1, 7, denoiser.config.audio_in_channels, device="meta")
    for more in ({}, first_frame_of(noisy().to("meta"))):
        level, condition = torch.empty(1, device="meta"), text | with_sound(rows, rows) | more
        found = case.family.predict(denoiser, noisy().to("meta"), level, condition, 1.0)
        assert found.shape == (1, noisy().numel() + rows.numel())


@torch.no_grad()
def test_estimates_count_the_tokens_of_sound(case: Case) -> None:
    """As many as the autoencoder makes of it."""
    vae = case.family.load_sound_vae(case.paths.model)
    config = case.stock().transformer.config
    for frames, fps in ((9, 24.0), (121, 24.0), (49, 12.5)):
        spec = case.spec(train_audio=True, fps=fps)
        samples = torch.zeros(2, round(frames / fps * case.family.sound_rate()))
        real = case.family.encode_sound(vae, samples)
        assert sound_shapes(spec, config, frames)[SOUND][0] == real.shape
    assert not sound_shapes(case.spec(), config, 9)
    for training in (True, False):  # one prediction is not taken for another
        jobs: tuple[dict[str, Any], ...] = ({}, {"fps": 12.5}, {"train_audio": True})
        asked = [case.spec(validation_prompts=[PROMPT], **changes) for changes in jobs]
        shapes = [shape_of(spec, sharded=True, training=training) for spec in asked]
        assert len({shape.key for shape in shapes if shape}) == len(jobs)


def test_a_spectrum_is_that_of_the_trainer() -> None:
    """Of a tone; the numbers are of torchaudio's, with the arguments of Lightricks' trainer."""
    config = SimpleNamespace(sample_rate=16_000, mel_bins=64, mel_hop_length=160)
    tone = torch.sin(2 * torch.pi * 440 * torch.arange(16_000) / 16_000)
    spectrum = log_spectrum(torch.stack([tone, torch.zeros_like(tone)]), config)
    assert spectrum.shape == (2, 101, 64)
    assert torch.allclose(spectrum[1], torch.tensor(1e-5).log())
    assert spectrum[0, 50].argmax() == 8
    assert torch.allclose(spectrum[0, 50, 7:10], torch.tensor([-2.7888, 1.7789, 1.6730]), atol=1e-3)


@torch.no_grad()
def test_a_samples_sound_is_that_of_the_stock_pipeline(case: Case) -> None:
    request = case.request(num_frames=case.frames, seed=2)
    pipeline = case.stock()
    text = case.encoded(PROMPT)
    ours = case.family.sampling_pipeline(case.paths.model, pipeline.transformer, pipeline.vae)
    ours.set_progress_bar_config(disable=True)
    latents = ours(
        **case.family.sample_arguments(request, text, None),
        width=request.width,
        height=request.height,
        num_inference_steps=request.steps,
        generator=torch.Generator().manual_seed(request.seed),
        output_type="latent",
    )[1]
    spec, config = case.spec(fps=case.family.fps), pipeline.transformer.config
    expected = sound_shapes(spec, config, case.frames, training=False)[SOUND][0]
    assert expected == latents.transpose(1, 2).flatten(2)[0].shape, "as estimates count"
    sound = case.family.decode_sound(case.paths.model, latents, torch.device("cpu"))
    heard: list[torch.Tensor] = []
    pipeline.vocoder.register_forward_hook(lambda module, args, output: heard.append(output))
    case.run(pipeline, request)
    assert sound.samples.shape == heard[0].shape[1:]
    assert torch.allclose(sound.samples, heard[0][0].clamp(-1, 1), rtol=1e-3, atol=1e-4)
    seconds = sound.samples.shape[1] / sound.rate
    assert seconds == pytest.approx(case.frames / case.family.fps, abs=0.05)


@pytest.mark.parametrize("first_frame", [False, True])
@torch.no_grad()
def test_samples_are_those_of_the_modular_pipeline(
    first_frame: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Of LTX-2.5, with the decoder that its blocks' description names beside the diffusion one."""
    case = Case(LAST, toys_root(tmp_path_factory))
    image = {"conditioning_image": str(min(case.paths.data.glob("*.png")))} if first_frame else {}
    request = case.request(
        num_frames=case.frames, guidance=3.0, negative_prompt=NEGATIVE, seed=2, **image
    )
    stock, pictures = case.stock(), case.pictures(request) if first_frame else []
    made = {"width": request.width, "height": request.height, "num_inference_steps": request.steps}
    ours = case.family.sampling_pipeline(case.paths.model, stock.transformer, stock.vae)
    texts = case.encoded(PROMPT), case.encoded(NEGATIVE)
    arguments = case.family.sample_arguments(request, *texts)
    if first_frame:
        ours = case.family.pipeline_with_image(ours)
        arguments |= case.family.reference_arguments(pictures)
    ours.set_progress_bar_config(disable=True)
    latents, rows = ours(
        **arguments,
        **made,
        generator=torch.Generator().manual_seed(request.seed),
        output_type="latent",
        return_dict=False,
    )
    frames = case.family.decode(ours, latents, request)
    sound = case.family.decode_sound(case.paths.model, rows, torch.device("cpu"))

    blocks = LTX25AutoBlocks()
    blocks.sub_blocks["decode"] = LTX2AutoDecoderStep()
    modular = LTX25ModularPipeline(blocks=blocks)
    parts = {n: p for n, p in stock.components.items() if n in modular.components}
    modular.register_components(**{n: p for n, p in parts.items() if p is not None})
    modular.set_progress_bar_config(disable=True)
    theirs = modular(
        prompt=PROMPT,
        negative_prompt=NEGATIVE,
        num_frames=request.frames,
        frame_rate=case.family.fps,
        max_sequence_length=64,
        generator=torch.Generator().manual_seed(request.seed),
        output_type="np",
        output=["videos", "audio"],
        **made,
        **({"image": pictures[0]} if first_frame else {}),
    )
    expected = torch.from_numpy(theirs["videos"][0]) * 255
    found = torch.from_numpy(np.stack([np.asarray(frame) for frame in frames]))
    assert (found - expected.round()).abs().max() <= 1
    assert expected.std() > 20
    # It runs prompts one by one, not in a batch, and vocoders amplify what that changes.
    assert torch.allclose(sound.samples, theirs["audio"][0], atol=0.03)
    assert sound.samples.std() > 0.5


def test_the_published_model_is_read_as_diffusers_says(case: Case) -> None:
    """Of LTX-2.5, neither its distilled transformer nor that one's scheduler."""
    folder, root = case.family.denoiser_of(case.paths.model), case.paths.model
    assert folder.name == ("transformer_full" if case.name == LAST else "transformer")
    stock = case.stock()
    ours = case.family.sampling_pipeline(root, stock.transformer, stock.vae)
    assert dict(ours.scheduler.config) == dict(stock.scheduler.config)
    assert ours.scheduler.config.use_dynamic_shifting
    assert resolve_default_image_crf(case.text.text_encoder) == (18 if case.name == LAST else 33)
    picture = Image.new("RGB", (8, 8))
    given = case.family.reference_arguments([picture])["image_crf"]
    assert given == resolve_default_image_crf(case.text.text_encoder)


def test_a_models_files_say_whether_it_is_ltx_2_5(case: Case) -> None:
    """Else its distilled transformer would be trained."""
    for flavour in (None, *case.facts.flavours):
        spec = case.spec().model_copy(update={"model_flavour": flavour})
        if (flavour == "2.5-22b") == (case.name == LAST):
            check_model(spec, settings=True)
        else:
            with pytest.raises(SpecError, match="according to its files"):
                check_model(spec, settings=True)


@pytest.mark.parametrize(
    ("guidance", "forwards"),
    [(1.0, {FIRST: 1, LATER: 1, LAST: 1}), (3.0, {FIRST: 2, LATER: 3, LAST: 3})],
)
def test_samples_are_guided_as_by_the_pipelines_own_defaults(
    guidance: float, forwards: dict[str, int], case: Case
) -> None:
    """All of them where a negative prompt guides; LTX-2's blocks cannot skip self-attention."""
    request = case.request(num_frames=case.frames, guidance=guidance, negative_prompt=NEGATIVE)
    assert case.family.forwards_per_step(request) == forwards[case.name]
    arguments = case.family.sample_arguments(request, {}, {} if request.guided else None)
    pipeline = case.stock()
    ours = case.run(pipeline, request, output_type="latent")
    if request.guided:
        assert "modality_scale" not in arguments
        assert ("stg_scale" in arguments) is (case.name == FIRST)
        own = {"guidance_scale": guidance, "frame_rate": case.family.fps, "num_frames": case.frames}
        with torch.no_grad():
            theirs = pipeline(
                PROMPT,
                NEGATIVE,
                case.side,
                case.side,
                **own,
                num_inference_steps=request.steps,
                generator=torch.Generator().manual_seed(request.seed),
                max_sequence_length=64,
                output_type="latent",
            )[0]
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_text_is_filled_up_with_registers(case: Case) -> None:
    """So its length is a multiple of theirs, and nothing is masked."""
    text = case.encoded("a star")["prompt_embeds"]
    assert len(text) == 64
    assert text.abs().amin(dim=1).min() > 0
    with pytest.raises(UserError, match="multiple of the model's 16 text registers"):
        case.family.encode(case.text, PROMPT, 40)


@torch.no_grad()
def test_every_text_begins_with_a_bos_token(case: Case) -> None:
    """As in Lightricks' code, also where the tokenizer adds none, as published with Gemma 4."""
    bare = copy(case.text)
    bare.tokenizer = AutoTokenizer.from_pretrained(
        case.paths.model / "tokenizer", add_bos_token=False
    )
    bos = bare.tokenizer.bos_token_id
    assert bos not in bare.tokenizer(PROMPT).input_ids
    assert case.text.tokenizer(PROMPT).input_ids[0] == bos
    for prompt in (PROMPT, f" {PROMPT}", ""):
        text = case.family.encode(bare, prompt, 64)["prompt_embeds"]
        assert torch.equal(text, case.encoded(prompt)["prompt_embeds"])


def test_estimates_of_encoding_count_the_connectors(case: Case) -> None:
    """3.2 B parameters in LTX-2.3, which each rank loads beside its shard of Gemma."""
    spec, root = case.spec(), case.paths.model
    phase = text_cache(spec, root, 1)
    assert phase is not None
    connectors = sum(p.numel() for p in case.text.connectors.parameters())
    beside = phase.parts.parameters - encoder_bytes(root, torch.float32)
    assert 4 * connectors <= beside < 6 * connectors, "each tensor is rounded up"


@pytest.mark.parametrize("name", [FIRST, "anima"])
def test_cached_texts_are_of_every_part_that_made_them(
    name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Also of connectors, which may differ where text encoders do not."""
    case, root = Case(name, toys_root(tmp_path_factory)), tmp_path / "model"
    shutil.copytree(case.paths.model, root)
    cache = TensorCache(tmp_path, "text")

    def key() -> str:
        return TextKeys(case.spec(), case.family, cache, root)(Text(PROMPT))

    parts = [part for part, loaded in case.text.components.items() if loaded is not None]
    parts = [part for part in parts if (root / part).is_dir() and part != "scheduler"]
    assert len(parts) >= 3
    for part in parts:
        before = key()
        (root / part / "other.json").write_text("{}")
        assert key() != before, part


def test_the_shift_is_of_the_tokens(case: Case) -> None:
    """As Lightricks' trainer and the pipeline count them: one for each cell, in all frames."""
    assert case.family.tokens_of(16, 24, 16) == 16 * 24 * 16
    assert case.family.sampler_shift_of(16, 16, 4) == pytest.approx(math.exp(0.95))


@pytest.mark.parametrize("frames", [1, 4, 16, 200])
def test_levels_are_drawn_as_lightricks_trainer_draws_them(frames: int, case: Case) -> None:
    """By `ShiftedLogitNormalTimestepSampler`, whose shift grows with any number of tokens."""
    objective = build_objective(case.spec(), case.family, case.paths.model)
    latents = torch.zeros(1, 1, frames, 16, 24, device="meta")
    mu = 0.95 + (frames * 16 * 24 - 1024) * 1.1 / 3072
    shares = (torch.arange(9000).double() + 0.5) / 9000
    normal = torch.special.ndtri(shares)
    low, high = (torch.sigmoid(torch.tensor(mu + end).double()) for end in (-2.5758, 3.0902))
    stretched = ((torch.sigmoid(normal + mu) - low) / (high - low)).clamp(1e-3, 1)
    theirs = torch.cat([stretched, shares[::9] * 0.999 + 1e-3])  # nine to one
    quantiles = [number / 20 for number in range(1, 20)]
    levels = torch.tensor([objective.level_at(each, latents) for each in quantiles]).double()
    wanted = torch.quantile(theirs, torch.tensor(quantiles).double())
    assert torch.allclose(levels, wanted, atol=0.01)
    assert levels[1] < 0.6 < levels[9], "no noise level is left out"
