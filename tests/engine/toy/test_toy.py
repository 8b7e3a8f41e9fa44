"""The toy model is a real model, its pictures are what their captions say, and writing is safe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from diffusers import FluxPipeline
from peft import LoraConfig
from PIL import Image

import engine.toy
from engine.data.read.videos import has_sound, inspect_video, read_frames
from engine.toy import MARK, ToyPaths, is_complete, write_toy
from engine.toy.components import parts
from engine.toy.components.tokenizers import byte_signs
from engine.toy.components.vae import as_tensor
from engine.toy.components.weights import one_thread
from engine.toy.families.flux import FluxSizes, build_transformer, shape_transformer, write_flux
from engine.toy.images import (
    BACKGROUNDS,
    COLOURS,
    SHAPES,
    draw_picture,
    plan_picture,
    toy_captions,
    toy_pictures,
    write_pictures,
)
from jobs.errors import UserError
from jobs.spec.families import FAMILIES
from tests.support.paths import ROOT as REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Iterator

PICTURES = 8
RED_CIRCLE = "a red circle on a blue background"
GREEN_STAR = "a green star on a blue background"


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """So small a model gains nothing by more, and loses much where other tests run beside it."""
    with one_thread():
        yield


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> ToyPaths:
    return write_toy(tmp_path_factory.mktemp("toy"), pictures=PICTURES)


@pytest.fixture(scope="module")
def pipeline(toy: ToyPaths) -> FluxPipeline:
    loaded = FluxPipeline.from_pretrained(toy.model)
    loaded.set_progress_bar_config(disable=True)
    return loaded


@pytest.fixture(scope="module")
def unseen() -> torch.Tensor:
    """Square pictures that the autoencoder was not fitted to: (N, 3, 64, 64)."""
    return as_tensor([p for p in toy_pictures(120, size=64, seed=77) if p.width == p.height])


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def run_command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "engine.toy", *map(str, arguments)],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )


# Pictures


def near(pixel: Any, name: str) -> bool:
    return all(abs(a - b) <= 2 for a, b in zip(pixel, COLOURS[name], strict=True))


@pytest.mark.parametrize("index", range(36))
def test_caption_tells_what_is_in_the_picture(index: int) -> None:
    plan = plan_picture(index, size=64, seed=5)
    picture = draw_picture(plan)
    assert picture.size == (plan.width, plan.height)
    where = (round(plan.centre[0] * plan.width), round(plan.centre[1] * plan.height))
    if plan.shape not in ("ring", "crescent"):  # These are empty in the middle.
        assert near(picture.getpixel(where), plan.colour)
    else:
        assert any(near(colour, plan.colour) for _, colour in picture.getcolors(1 << 20) or ())
    if plan.background == "plain":
        assert near(picture.getpixel((0, 0)), plan.background_colours[0])
        assert plan.caption.endswith(f" {plan.background_colours[0]} background")
    assert f" {plan.colour} {plan.shape} on " in plan.caption
    assert "a orange" not in plan.caption
    assert plan.stem == f"{index + 1:04d}-{plan.colour}-{plan.shape}"


def test_a_set_has_every_shape_background_and_form() -> None:
    plans = [plan_picture(i, size=96, seed=0) for i in range(240)]
    assert {plan.shape for plan in plans} == set(SHAPES)
    assert {plan.background for plan in plans} == set(BACKGROUNDS)
    assert {plan.colour for plan in plans} == set(COLOURS)
    assert sum(plan.width > plan.height for plan in plans) == 30
    assert sum(plan.width < plan.height for plan in plans) == 30
    assert {min(plan.width, plan.height) for plan in plans} == {96}
    assert len({plan.stem for plan in plans}) == 240


def test_every_picture_has_its_caption_beside_it(toy: ToyPaths) -> None:
    pictures = sorted(toy.data.glob("*.png"))
    assert len(pictures) == PICTURES
    for index, path in enumerate(pictures):
        plan = plan_picture(index, size=96, seed=0)
        assert path.stem == plan.stem
        assert path.with_suffix(".txt").read_text() == plan.caption + "\n"
        with Image.open(path) as picture:
            assert picture.size == (plan.width, plan.height)


def test_pictures_depend_on_the_seed_and_not_on_how_many(tmp_path: Path) -> None:
    for name, count, seed in (("short", 3, 1), ("long", 5, 1), ("other", 3, 2)):
        write_pictures(tmp_path / name, count=count, size=32, seed=seed)
    short, long = contents(tmp_path / "short"), contents(tmp_path / "long")
    assert short.items() < long.items()
    assert short.keys() != contents(tmp_path / "other").keys()


def test_pictures_and_the_check_of_arguments_do_without_torch() -> None:
    code = "import sys, engine.toy.images; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=False)
    assert done.returncode == 0


# The model


def test_layout_is_the_published_one(toy: ToyPaths) -> None:
    files = contents(toy.model)
    assert files.keys() >= {
        "model_index.json",
        "scheduler/scheduler_config.json",
        "text_encoder/config.json",
        "text_encoder/model.safetensors",
        "text_encoder_2/config.json",
        "text_encoder_2/model.safetensors",
        "tokenizer/merges.txt",
        "tokenizer/tokenizer_config.json",
        "tokenizer/vocab.json",
        "tokenizer_2/tokenizer.json",
        "tokenizer_2/tokenizer_config.json",
        "transformer/config.json",
        "transformer/diffusion_pytorch_model.safetensors",
        "vae/config.json",
        "vae/diffusion_pytorch_model.safetensors",
    }
    assert not [name for name in files if name.endswith((".bin", ".pt", ".ckpt"))]
    transformer = json.loads(files["transformer/config.json"])
    assert transformer["guidance_embeds"] is True
    assert transformer["in_channels"] == 64
    assert sum(transformer["axes_dims_rope"]) == transformer["attention_head_dim"]
    scheduler = json.loads(files["scheduler/scheduler_config.json"])
    assert scheduler["use_dynamic_shifting"] is True
    assert (scheduler["base_shift"], scheduler["max_shift"]) == (0.5, 1.15)


def test_nothing_names_the_place_it_was_written_in(toy: ToyPaths) -> None:
    here = {str(toy.model), str(REPOSITORY), str(Path.home()) + "/"}
    for name, content in contents(toy.model).items():
        assert not [place for place in here if place.encode() in content], name


@pytest.mark.slow
def test_same_seed_same_bytes_whatever_the_threads(toy: ToyPaths, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 2)
    torch.manual_seed(threads)  # The caller's own generator has no say either.
    for remembered in (parts.fitted_vae, parts.sample_images):
        remembered.cache_clear()
    try:
        write_flux(tmp_path / "again", seed=0)
        assert torch.get_num_threads() != threads
    finally:
        torch.set_num_threads(threads)
    first = contents(toy.model)
    first.pop(engine.toy.MARK)
    assert contents(tmp_path / "again") == first


def test_another_seed_is_another_model() -> None:
    sizes = FluxSizes(layers=1, single_layers=1)
    one, two = (build_transformer(sizes, seed=seed).state_dict() for seed in (0, 1))
    assert [name for name in one if one[name].ndim > 1 and torch.equal(one[name], two[name])] == []


def test_plain_pipeline_draws_a_picture_of_the_prompt(pipeline: FluxPipeline) -> None:
    def draw(prompt: str) -> Image.Image:
        made: Image.Image = pipeline(
            prompt,
            height=64,
            width=64,
            num_inference_steps=2,
            generator=torch.Generator().manual_seed(0),
        ).images[0]
        assert made.size == (64, 64)
        return made

    assert draw(RED_CIRCLE) == draw(RED_CIRCLE)
    assert draw(RED_CIRCLE) != draw(GREEN_STAR)


@torch.no_grad()
def test_prompts_are_told_apart(pipeline: FluxPipeline) -> None:
    (words, pooled, _), (other_words, other_pooled, _) = (
        pipeline.encode_prompt(prompt, max_sequence_length=32)
        for prompt in (RED_CIRCLE, GREEN_STAR)
    )
    # (1, 32, 64): the second and third words are not the same, the fourth is, and it stands alike.
    alike = torch.cosine_similarity(words, other_words, dim=-1)[0]
    assert alike[1:3].max() < 0.8 < alike[3]
    assert torch.cosine_similarity(pooled, other_pooled).item() < 0.9


def test_every_word_of_a_caption_is_one_token(pipeline: FluxPipeline) -> None:
    for caption in toy_captions(300, seed=9):
        words = len(caption.split())
        assert len(pipeline.tokenizer(caption).input_ids) == words + 2
        assert len(pipeline.tokenizer_2(caption).input_ids) == words + 1


@pytest.mark.parametrize(
    "text", ["Grüße, 你好! x+y=Ω", "a\tquick\nbrown fox", "🙂 'tis", "", "\x00"]
)
def test_clip_encodes_any_text(pipeline: FluxPipeline, text: str) -> None:
    tokens = pipeline.tokenizer(text).input_ids
    start, end = pipeline.tokenizer.bos_token_id, pipeline.tokenizer.eos_token_id
    assert (tokens[0], tokens[-1]) == (start, end)
    assert end not in tokens[1:-1]  # The end is CLIP's sign for "unknown" too.
    read = pipeline.tokenizer.decode(tokens, skip_special_tokens=True)
    assert "".join(read.split()) == "".join(text.lower().split())


def test_t5_has_signs_for_western_text_and_one_for_the_unknown(pipeline: FluxPipeline) -> None:
    tokenizer = pipeline.tokenizer_2
    assert tokenizer.decode(tokenizer("Grüße, x+y!").input_ids[:-1]) == "Grüße, x+y!"
    assert tokenizer.unk_token_id in tokenizer("你好").input_ids
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)


def test_byte_signs_are_256_and_printable() -> None:
    signs = byte_signs()
    assert len(set(signs)) == 256
    assert signs[ord("a")] == "a"
    assert signs[ord(" ")] == "Ġ"
    assert not [sign for sign in signs if sign.isspace()]


@torch.no_grad()
def test_normalised_latents_have_mean_0_and_deviation_1(
    pipeline: FluxPipeline, unseen: torch.Tensor
) -> None:
    config = pipeline.vae.config
    latents = pipeline.vae.encode(unseen).latent_dist.sample()
    assert latents.shape[1:] == (16, 8, 8)
    latents = (latents - config.shift_factor) * config.scaling_factor
    assert abs(latents.mean().item()) < 0.2
    assert latents.std().item() == pytest.approx(1.0, abs=0.15)
    assert latents.std(dim=(0, 2, 3)).min().item() > 0.5


@torch.no_grad()
def test_autoencoder_gives_pictures_back(pipeline: FluxPipeline, unseen: torch.Tensor) -> None:
    decoded = pipeline.vae.decode(pipeline.vae.encode(unseen).latent_dist.mode()).sample
    lost = (decoded.clamp(-1, 1) - unseen).square().mean()
    psnr = 10 * torch.log10(4 / lost).item()  # Decibels; the peak-to-peak of [-1, 1] is 2.
    assert psnr > 20.0  # The 8x8 means, enlarged smoothly, reach 18.


# Training


def flow_loss(
    transformer: torch.nn.Module,
    data: dict[str, torch.Tensor],
    batch: int,
    chance: torch.Generator,
) -> torch.Tensor:
    """Rectified-flow loss over `batch` random samples of `data`: a scalar."""
    chosen = torch.randint(0, len(data["latents"]), (batch,), generator=chance)
    latents = data["latents"][chosen]  # (B, 16, 64)
    noise = torch.randn(latents.shape, generator=chance)
    sigma = torch.rand(batch, generator=chance)  # (B,)
    predicted: torch.Tensor = transformer(
        hidden_states=torch.lerp(latents, noise, sigma[:, None, None]),
        timestep=sigma,
        guidance=torch.ones(batch),
        pooled_projections=data["pooled"][chosen],
        encoder_hidden_states=data["words"][chosen],
        txt_ids=torch.zeros(data["words"].shape[1], 3),
        img_ids=data["places"],
        return_dict=False,
    )[0]
    return (predicted - (noise - latents)).square().mean()


@pytest.fixture(scope="module")
def samples(pipeline: FluxPipeline) -> dict[str, torch.Tensor]:
    plans = [plan for i in range(64) if (plan := plan_picture(i, size=64, seed=0)).width == 64]
    plans = [plan for plan in plans if plan.height == 64]
    vae = pipeline.vae
    with torch.no_grad():
        latents = vae.encode(as_tensor([draw_picture(plan) for plan in plans])).latent_dist.mode()
        latents = (latents - vae.config.shift_factor) * vae.config.scaling_factor
        words, pooled, _ = pipeline.encode_prompt(
            [plan.caption for plan in plans], max_sequence_length=16
        )
    return {
        "latents": pipeline._pack_latents(latents, len(plans), 16, 8, 8),
        "places": pipeline._prepare_latent_image_ids(1, 4, 4, "cpu", torch.float32),
        "words": words,
        "pooled": pooled,
    }


def test_a_lora_learns_from_the_first_steps(
    pipeline: FluxPipeline, samples: dict[str, torch.Tensor]
) -> None:
    transformer = build_transformer(FluxSizes(), seed=0)
    transformer.requires_grad_(False)
    targets = r".*(to_q|to_k|to_v|to_out\.0|add_._proj|to_add_out|net\.0\.proj|net\.2|proj_mlp)"
    torch.manual_seed(0)
    transformer.add_adapter(LoraConfig(r=8, lora_alpha=8, target_modules=targets))
    trained = [p for p in transformer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)

    @torch.no_grad()
    def measure() -> float:
        return flow_loss(transformer, samples, 64, torch.Generator().manual_seed(9)).item()

    before = measure()
    chance = torch.Generator().manual_seed(1)
    for _ in range(40):
        flow_loss(transformer, samples, 4, chance).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert measure() < 0.8 * before


@torch.no_grad()
def test_output_is_neither_dead_nor_wild(
    pipeline: FluxPipeline, samples: dict[str, torch.Tensor]
) -> None:
    def predict(**changes: torch.Tensor) -> torch.Tensor:
        inputs = {
            "hidden_states": samples["latents"][:4],
            "timestep": torch.full((4,), 0.5),
            "guidance": torch.ones(4),
            "pooled_projections": samples["pooled"][:4],
            "encoder_hidden_states": samples["words"][:4],
            "txt_ids": torch.zeros(16, 3),
            "img_ids": samples["places"],
        }
        velocity: torch.Tensor = pipeline.transformer(**inputs | changes, return_dict=False)[0]
        return velocity

    output = predict()
    assert 0.3 < output.std().item() < 1.0
    for changes in (
        {"timestep": torch.full((4,), 0.9)},
        {"guidance": torch.full((4,), 3.5)},
        {"pooled_projections": samples["pooled"][4:8]},
        {"encoder_hidden_states": samples["words"][4:8]},
        {"img_ids": samples["places"].flip(0)},
    ):
        moved = (predict(**changes) - output).norm() / output.norm()
        assert moved > 1e-3, changes.keys()


# Sizes and dtypes


@pytest.mark.slow
def test_other_sizes_dtypes_and_split_files(tmp_path: Path, unseen: torch.Tensor) -> None:
    sizes = FluxSizes(layers=1, single_layers=2, heads=2, head_dim=64, clip_dim=32, t5_dim=96)
    write_flux(tmp_path, seed=3, dtype="bfloat16", sizes=sizes, max_shard_size="500KB")
    assert len(list((tmp_path / "transformer").glob("*-of-*.safetensors"))) > 2
    index = tmp_path / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
    assert len(set(json.loads(index.read_text())["weight_map"].values())) > 2
    pipeline = FluxPipeline.from_pretrained(tmp_path, dtype=torch.bfloat16)
    pipeline.set_progress_bar_config(disable=True)
    config = pipeline.transformer.config
    assert (config.num_layers, config.num_single_layers) == (1, 2)
    for part in (pipeline.transformer, pipeline.vae, pipeline.text_encoder_2):
        assert {p.dtype for p in part.parameters()} == {torch.bfloat16}
    made = pipeline(RED_CIRCLE, height=64, width=64, num_inference_steps=2, output_type="pt")
    assert made.images.isfinite().all()
    assert made.images.std() > 0.01


def test_scaled_sizes_are_wider() -> None:
    def count(sizes: FluxSizes) -> int:
        return sum(p.numel() for p in shape_transformer(sizes).parameters())

    assert 1_000_000 < count(FluxSizes()) < 3_000_000
    assert 450_000_000 < count(FluxSizes().scaled(16)) < 700_000_000
    with pytest.raises(ValueError, match="multiple of 32"):
        FluxSizes(head_dim=48)


# Writing


def test_a_second_call_leaves_everything_as_it_is(toy: ToyPaths) -> None:
    def facts() -> dict[Path, tuple[int, ...]]:  # without the time of the last look
        found = {path: path.stat() for path in toy.model.parent.rglob("*")}
        return {p: (s.st_ino, s.st_mode, s.st_size, s.st_mtime_ns) for p, s in found.items()}

    before = facts()
    assert write_toy(toy.model.parent, pictures=3, seed=4) == toy
    assert facts() == before


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Write a short file instead of a model; holds the seed of every writing."""
    seeds: list[int] = []

    def write(model_dir: Path, *, seed: int, **_: object) -> None:
        seeds.append(seed)
        (model_dir / "model_index.json").write_text(f"{seed}")

    monkeypatch.setattr("engine.toy.families.flux.write_flux", write)
    return seeds


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@pytest.mark.parametrize(
    ("family", "flavour", "sound", "control"),
    [
        ("ltx2", None, True, set()),
        ("wan", None, False, set()),
        ("wan", "2.1-vace-1.3b", False, {"0001-red-circle.mp4"}),
    ],
)
def test_video_families_have_videos(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    flavour: str | None,
    sound: bool,
    control: set[str],
) -> None:
    pytest.importorskip("av")
    fake = SimpleNamespace(write=lambda model_dir, **_: None)
    monkeypatch.setattr("engine.toy.import_module", lambda name: fake)
    paths = write_toy(tmp_path, family, flavour=flavour, pictures=1, videos=1, size=17)
    assert paths.videos is not None
    (video,) = paths.videos.glob("*.mp4")
    seen = inspect_video(video)
    assert (seen.width, seen.height, seen.frames) == (18, 18, 49)
    assert seen.fps == pytest.approx(FAMILIES[family].defaults_of(flavour)["fps"])
    assert has_sound(video) is sound
    assert video.with_suffix(".txt").read_text().startswith("a red circle on")
    first, last = read_frames(video, fps=seen.fps, frames=49)[[0, -1]].astype(int)
    assert abs(first - last).mean() > 10
    assert names(paths.control or paths.model) - {"0001-red-circle.png", MARK} == control
    assert not any(map(has_sound, (tmp_path / "control").glob("*.mp4")))
    if not control:
        monkeypatch.setattr("engine.toy.makes_videos", lambda: False)
        assert write_toy(tmp_path / "bare", family, pictures=1, videos=1).videos is None


def test_force_writes_both_anew(small: list[int], tmp_path: Path) -> None:
    write_toy(tmp_path, pictures=2, size=16, seed=1)
    paths = write_toy(tmp_path, pictures=3, size=16, seed=2, force=True)
    assert small == [1, 2]
    assert (paths.model / "model_index.json").read_text() == "2"
    assert len(list(paths.data.glob("*.png"))) == 3
    assert names(tmp_path) == {"model", "data"}


def test_an_interrupted_write_leaves_nothing_that_looks_complete(
    small: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(model_dir: Path, **_: object) -> None:
        (model_dir / "model_index.json").write_text("half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("engine.toy.families.flux.write_flux", stop)
        with pytest.raises(KeyboardInterrupt):
            write_toy(tmp_path, pictures=2, size=16)
    assert names(tmp_path) == {"data"}
    write_toy(tmp_path, pictures=2, size=16)
    assert small == [0]
    assert is_complete(tmp_path / "model")


def test_a_killed_write_is_never_taken_for_complete(small: list[int], tmp_path: Path) -> None:
    code = """
import os, signal, sys
from pathlib import Path
import engine.toy

def write(data_dir, *, count, size, seed):
    (data_dir / "0001-half.png").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)

engine.toy.write_pictures = write
engine.toy.write_toy(Path(sys.argv[1]))
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=REPOSITORY, check=False)
    assert done.returncode == -9
    assert not (tmp_path / "data").exists()
    assert len(list(tmp_path.glob("data.tmp-*/0001-half.png"))) == 1
    paths = write_toy(tmp_path, pictures=2, size=16)
    assert len(list(paths.data.glob("*.png"))) == 2


def test_two_writers_at_once_agree(
    small: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_is_faster(data_dir: Path, *, count: int, size: int, seed: int) -> None:
        write_pictures(data_dir, count=count, size=size, seed=seed)
        faster = tmp_path / "data"
        write_pictures(faster, count=count, size=size, seed=seed)
        (faster / engine.toy.MARK).write_text("{}")

    monkeypatch.setattr("engine.toy.write_pictures", other_is_faster)
    paths = write_toy(tmp_path, pictures=2, size=16)
    assert (paths.data / engine.toy.MARK).read_text() == "{}"
    assert names(tmp_path) == {"model", "data"}


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("name", ["model", "data"])
def test_what_is_not_a_toy_is_never_touched(
    small: list[int], tmp_path: Path, name: str, force: bool
) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "mine.txt").write_text("years of work")
    with pytest.raises(UserError, match="not a toy") as caught:
        write_toy(tmp_path, pictures=2, size=16, force=force)
    assert str(tmp_path / name) in caught.value.message
    assert caught.value.hint
    assert contents(tmp_path) == {f"{name}/mine.txt": b"years of work"}


@pytest.mark.parametrize(
    ("arguments", "says", "hint"),
    [
        (
            {"family": "fluxx"},
            r'unknown model_family "fluxx" \(did you mean "flux"\?\); known: ',
            None,
        ),
        ({"flavour": "snell"}, 'unknown model_flavour "snell".*known: dev, ', None),
        ({"pictures": 0}, "pictures is 0", "use a number from 1 to 1000000"),
        ({"videos": -1}, "videos is -1", "use a number from 0 to 1000"),
        ({"size": 8}, "size is 8", "use a number from 16 to 4096"),
        ({"dtype": "int8"}, "no dtype 'int8'", "known: float32, bfloat16, float16"),
        ({"hidden_scale": 0}, "hidden_scale is 0", "use a number from 1 to 64"),
    ],
)
def test_arguments_that_make_no_toy(
    tmp_path: Path, arguments: dict[str, object], says: str, hint: str | None
) -> None:
    with pytest.raises(UserError, match=says) as caught:
        write_toy(tmp_path / "toy", **arguments)  # type: ignore[arg-type]
    assert caught.value.hint == hint
    assert not (tmp_path / "toy").exists()


# The command


@pytest.mark.usefixtures("forked")
def test_command_prints_where_they_are(toy: ToyPaths) -> None:
    done = run_command(toy.model.parent, "--family", "flux", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout) == {"model": str(toy.model), "data": str(toy.data)}
    plain = run_command(toy.model.parent)
    assert plain.stdout == f"model: {toy.model}  data: {toy.data}\n"
    assert plain.stderr == ""


@pytest.mark.usefixtures("forked")
def test_command_refuses_bad_input_in_one_line(tmp_path: Path) -> None:
    occupied = tmp_path / "occupied"
    occupied.write_text("a file")
    for arguments, says in (
        ([occupied], "occupied"),
        ([occupied / "below"], "occupied"),
        ([tmp_path / "new", "--family", "sdxx"], "known: flux"),
        ([tmp_path / "new", "--pictures", "many"], "many"),
        ([], "DIR"),
    ):
        done = run_command(*arguments)
        assert done.returncode == 2, arguments
        assert done.stdout == ""
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert done.stderr.startswith("fsdp-tui: ")
        assert says in done.stderr
    assert names(tmp_path) == {"occupied"}
