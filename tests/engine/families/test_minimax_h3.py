"""What is particular to MiniMax-H3: a packed sequence, sound beside the video, two transformers.

Predictions and losses were compared with DiffSynth-Studio's model and layout
(`diffsynth/models/minimax_h3_dit.py`) on the same tensors: equal to 1e-5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from diffusers import (
    MiniMaxH3ModularPipeline,
    MiniMaxH3Scheduler,
    MiniMaxH3Transformer3DModel,
    ModularPipeline,
)
from diffusers.models.modeling_utils import get_parameter_dtype
from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep
from diffusers.modular_pipelines.minimax_h3.decoders import MiniMaxH3AudioDecodeStep
from diffusers.modular_pipelines.minimax_h3.modular_pipeline import audio_latent_num_frames

from engine.blocks.build import on_meta
from engine.data.encode.latents import _scaled
from engine.data.index.views import as_keyframe
from engine.families import load
from engine.families.minimax_h3 import MiniMaxH3Pipeline, MiniMaxH3Transformer, Processor, _video
from engine.families.shared.minimax_h3_forward import (
    GIVEN,
    SOUND,
    TEXT,
    VIDEO,
    keyframes,
    lay_out,
)
from engine.families.shared.references import KEYFRAME, SOUND_NOISE, split_joint
from engine.families.shared.references import SOUND as SOUND_LATENTS
from engine.memory.tracing.inputs import sampled, sound_shapes
from engine.model.quantized_linear import quantize_layers, quantized_layers
from engine.toy.components.weights import one_thread
from jobs.models.find_model import find_index
from jobs.spec.families import FAMILIES
from jobs.spec.job_spec import JobSpec
from tests.support.engine.exports import export_alone, recipe_of, trained_model
from tests.support.engine.families import PROMPT, Case, batch_of, quiet, toys_root

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("minimax_h3", toys_root(tmp_path_factory))


def stock(root: Path) -> Any:
    """The pipeline as diffusers' documentation loads it, but for a processor of images."""
    with quiet():
        pipeline = ModularPipeline.from_pretrained(root, workflow="t2va")
        names = [name for name in pipeline.pretrained_component_names if name != "processor"]
        pipeline.load_components(names=names, local_files_only=True)
    pipeline.register_components(processor=Processor(root))
    return pipeline


def video(pipeline: Any) -> Any:
    frames = pipeline(
        prompt=PROMPT,
        num_inference_steps=3,
        height=64,
        width=96,
        num_frames=22,
        generator=torch.Generator("cpu").manual_seed(3),
        output="videos",
    )[0]
    return np.stack([np.asarray(frame, int) for frame in frames])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_diffusers_own_pipeline_makes_of_an_export_what_ours_makes(
    kind: str, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It refuses videos of less than five seconds, which take long here.
    monkeypatch.setattr(MiniMaxH3ModularPipeline, "min_duration", 0.0)
    spec = case.spec(model_type=kind, lora_rank=2)
    recipe, model = recipe_of(spec, case.paths.model), trained_model(spec, case.paths.model)
    made = export_alone(model, recipe, tmp_path / "export")
    theirs = stock(made.path if kind == "full" else case.paths.model)
    assert type(theirs.transformer) is MiniMaxH3Transformer3DModel
    ours = case.stock(made.path if kind == "full" else None)
    before = video(theirs) if kind == "lora" else None
    if kind == "lora":
        case.family.load_lora(ours, made.path)
        theirs.load_lora_weights(made.path, weight_name="pytorch_lora_weights.safetensors")
    request = case.request(resolution="96x64", num_inference_steps=3, num_frames=22, seed=3)
    frames = [np.asarray(frame, int) for frame in case.run(ours, request, output_type="pil")[0]]
    found = video(theirs)
    assert np.abs(found - np.stack(frames)).max() == 0
    assert before is None or np.abs(found - before).max() > 1


@pytest.mark.parametrize("anchors", [(), ("first",), ("first", "last")])
@pytest.mark.parametrize("sounds", [0, 7])
@pytest.mark.parametrize("size", [(1, 4, 4), (12, 3, 5)])
def test_a_sequence_is_laid_out_as_by_the_stock_pipeline(
    size: tuple[int, int, int], sounds: int, anchors: tuple[str, ...]
) -> None:
    """Each sample as if it was alone, one after the other."""
    texts = (5, 1)
    layout = lay_out(texts, size, sounds, CPU, keyframes(len(anchors), size))
    tags = layout.kinds.where(layout.kinds != GIVEN, VIDEO)
    ends = np.cumsum(layout.samples).tolist()
    frames, height, width = size
    for owner, (length, end) in enumerate(zip(texts, ends, strict=True)):
        rows = slice(end - layout.samples[owner], end)
        shape = (frames, 2 * height, 2 * width)
        positions, kinds, *indices, given, _ = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
            torch.full((length,), TEXT), *shape, sounds, (1, 2, 2), 2, 2, 0, anchors
        )
        assert torch.allclose(layout.positions[rows], positions, rtol=1e-12, atol=1e-12)
        assert torch.equal(tags[rows], kinds)
        assert int((layout.kinds[rows] == GIVEN).sum()) == given
        assert (layout.owners[rows] == owner).all()
        for tag, expected in zip((VIDEO, SOUND, TEXT), indices, strict=True):
            mine = layout.indices[tag]
            mine = mine[(mine >= rows.start) & (mine < rows.stop)]
            assert torch.equal(mine - rows.start, expected)


@pytest.mark.parametrize(("frames", "longest"), [(1, 1), (21, 1), (22, 22), (38, 22), (124, 124)])
def test_videos_have_a_length_that_its_autoencoder_takes_and_makes(
    frames: int, longest: int
) -> None:
    assert FAMILIES["minimax_h3"].frames_of(frames) == longest


@pytest.mark.parametrize("precision", ["nf4", "int8", "fp8"])
def test_packed_modulation_computes_in_the_precision_of_the_job(precision: str) -> None:
    """Diffusers asks a layer for its dtype; a scale's would turn the whole stream into fp32."""
    with on_meta():
        model = MiniMaxH3Transformer(num_layers=1, num_refiner_layers=1).to(torch.bfloat16)
    spec = JobSpec(
        model_family="minimax_h3",
        base_precision=precision,
        modulation_precision="int8",
        mixed_precision="bf16",
    )
    quantize_layers(model, spec, load("minimax_h3"))
    layer = model.transformer_blocks[0].adaln_proj.linear
    assert any(layer is packed for packed in quantized_layers(model).values())
    assert get_parameter_dtype(layer) is torch.bfloat16


@pytest.mark.slow
def test_the_transformer_for_references_is_not_needed(case: Case) -> None:
    """The published index names it; it takes 66 GB."""
    assert '"transformer_ref"' in (case.paths.model / "modular_model_index.json").read_text()
    assert "transformer_ref" not in (find_index(case.paths.model) or {})
    assert not (case.paths.model / "transformer_ref").exists()


@pytest.mark.slow
def test_an_empty_text_is_a_space(case: Case) -> None:
    """It has no token, and the sequence would have none of a text."""
    empty, space = (case.encoded(text)["prompt_embeds"] for text in ("", " "))
    assert torch.equal(empty, space)
    assert len(empty) > 0


@pytest.mark.parametrize(("frames", "made"), [(None, 22), (1, 22), (39, 39)])
def test_an_estimate_counts_the_frames_that_an_image_is_cut_out_of(
    frames: int | None, made: int
) -> None:
    values = {"validation_prompts": [PROMPT], "validation_num_frames": frames}
    assert (sampled(JobSpec(model_family="minimax_h3", **values)) or ())[1:] == (made,)


@pytest.mark.slow
def test_an_image_is_the_first_frame_of_the_shortest_video(case: Case) -> None:
    still, moving = (case.request(num_frames=count, seed=3) for count in (1, 22))
    assert case.family.sample_arguments(still, {}, None) == {"num_frames": 22}
    pipeline = case.stock()
    latents = case.run(pipeline, still, output_type="latent")
    with torch.no_grad():
        (image,) = case.family.decode(pipeline, latents, still)
        frames = case.family.decode(pipeline, latents, moving)
    assert len(frames) == 22
    assert np.array_equal(np.asarray(image), np.asarray(frames[0]))


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
@torch.no_grad()
def test_a_prediction_with_sound_is_what_the_pipelines_scheduler_gets(
    count: int, case: Case
) -> None:
    """And frames are encoded as by the pipeline: drawn, rounded, with some noise."""
    pictures = [str(path) for path in sorted(case.paths.data.glob("*.png"))[:count]]
    request = case.request(resolution="96x64", num_frames=22, seed=3, conditioning_image=pictures)
    pipeline, calls = case.stock(), []

    def spy(module: Any, args: Any, told: dict[str, Any], output: Any) -> None:
        moving = ("hidden_states", "audio_hidden_states")  # the loop writes into them
        calls.append((told | {name: told[name].clone() for name in moving}, output))

    pipeline.transformer.register_forward_hook(spy, with_kwargs=True)
    case.run(pipeline, request, output_type="latent")
    text = case.encoded(PROMPT, request=request)
    vae, shape, rows = pipeline.vae, (1, 24, 7, 4, 6), 2 * 3
    clean = [
        case.family.encode_condition(vae, _scaled([as_keyframe(picture, (96, 64), number)]))
        for number, picture in enumerate(case.pictures(request))
    ]
    assert calls
    for told, (output, heard) in list(calls):
        video = told["hidden_states"][0]
        given = {
            f"{KEYFRAME}{n}": _video(video[n * rows : (n + 1) * rows], (1, 24, 1, 4, 6), (1, 2, 2))
            for n in range(count)
        }
        for n in range(count):
            noise = (given[f"{KEYFRAME}{n}"] - 0.999 * clean[n]) / 0.001
            assert 0.7 < float(noise.std()) < 1.3
        noisy, expected = (
            _video(part[count * rows :], shape, (1, 2, 2)) for part in (video, -output[0])
        )
        level = 1 - told["timestep"][told["timestep_indices"][-1]].view(1)
        sound = told["audio_hidden_states"]  # between latents and noise that are equal, all are
        condition = batch_of(text) | {SOUND_LATENTS: sound, SOUND_NOISE: sound}
        both = case.family.predict(pipeline.transformer, noisy, level, condition | given, 1.0)
        found, said = split_joint(both, noisy.shape)
        assert torch.allclose(said, -heard.flatten(1), rtol=1e-3, atol=1e-4)
        limit = 1e-4 * float(expected.abs().max())
        assert torch.allclose(found, expected, rtol=1e-3, atol=limit)
        for other in ({}, {name: frame.flip(-1) for name, frame in given.items()}):
            both = case.family.predict(pipeline.transformer, noisy, level, condition | other, 1.0)
            plain, _ = split_joint(both, noisy.shape)
            assert (plain - expected).abs().max() > 20 * limit, "they make a difference"


@torch.no_grad()
def test_frames_are_read_from_nothing_but_the_host() -> None:
    """Of two samples with texts of different lengths."""
    with torch.device("meta"):
        transformer = MiniMaxH3Transformer(num_layers=1, num_refiner_layers=1)
        noisy, frame = torch.empty(2, 24, 7, 4, 6), torch.empty(2, 24, 1, 4, 6)
        texts = {}
        for number, length in enumerate((5, 3)):
            texts[f"prompt_embeds_{number}"] = torch.empty(1, length, 5120)
            texts[f"text_token_tags_{number}"] = torch.empty(1, length, 1, dtype=torch.long)
        given = {f"{KEYFRAME}{number}": frame for number in range(2)}
        level = torch.empty(2)
    found = load("minimax_h3").predict(transformer, noisy, level, texts | given, 1.0)
    assert found.shape == noisy.shape


@torch.no_grad()
def test_sound_is_encoded_as_long_as_in_the_pipeline_and_decoded_as_by_it(case: Case) -> None:
    """And the estimate counts its rows."""
    vae = case.family.load_sound_vae(case.paths.model)
    for frames in (1, 22, 56):
        spec = case.spec(train_audio=True, fps=24)
        samples = torch.rand(2, round(frames / 24 * case.family.sound_rate())) - 0.5
        rows = case.family.encode_sound(vae, samples)
        assert len(rows) == 2 * audio_latent_num_frames(frames)
        (shape, _) = sound_shapes(spec, {"audio_in_channels": rows.shape[1]}, frames)[SOUND_LATENTS]
        assert shape == rows.shape
        left, right = (case.family.encode_sound(vae, samples[[one, one]]) for one in (0, 1))
        assert torch.allclose(rows, torch.cat([left[: len(rows) // 2], right[len(rows) // 2 :]]))
    latents = torch.randn(2, 32, 9, generator=torch.Generator().manual_seed(0))
    pipeline = MiniMaxH3Pipeline(blocks=MiniMaxH3AudioDecodeStep())
    pipeline.register_components(audio_vae=vae)
    (theirs,) = ModularPipeline.__call__(pipeline, audio_latents=latents, output="audio")
    ours = case.family.decode_sound(case.paths.model, latents, CPU)
    assert torch.allclose(ours.samples, theirs)
    assert ours.rate == 32_000


def test_sound_has_the_level_of_the_same_step_of_its_own_schedule(case: Case) -> None:
    video, sound = (MiniMaxH3Scheduler(shift=shift) for shift in (12.0, 3.0))
    for scheduler in (video, sound):
        scheduler.set_timesteps(9)
    levels = case.family._level_of_sound(1 - video.timesteps)
    assert torch.allclose(levels, 1 - sound.timesteps, atol=1e-6)
