"""A model that is not what the job takes it for is refused before any rank starts."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import pytest

from jobs.errors import SpecError
from jobs.models.model_files import longest_bucket_side, variant_of
from jobs.preflight import check_job
from jobs.spec.families import FAMILIES, flavour_of
from jobs.spec.file.flags import parse_flags, to_flags
from jobs.spec.file.load import dump_spec, load_spec
from jobs.spec.job_spec import JobSpec
from jobs.spec.rules.buckets import sizes_at

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TI2V = "Wan-AI/Wan2.2-TI2V-5B-Diffusers"
WAN_VAE: dict[str, Any] = {"dim_mult": [1, 2, 4, 4], "scale_factor_spatial": 8}
TI2V_VAE: dict[str, Any] = {"dim_mult": [1, 2, 4, 4], "patch_size": 2, "scale_factor_spatial": 16}
WAN: dict[str, Any] = {"patch_size": [1, 2, 2]}


@pytest.fixture
def model(make_model: Callable[..., Path]) -> Callable[..., Path]:
    """Writes a model's directory: `model(pipeline, index={…}, vae={…}, transformer={…})`."""

    def write(pipeline: str, *, index: dict[str, Any] | None = None, **configs: Any) -> Path:
        root = make_model("other", pipeline=pipeline, parts=("vae", *configs.keys() - {"vae"}))
        path = root / "model_index.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | (index or {})))
        for part, config in configs.items():
            (root / part / "config.json").write_text(json.dumps(config))
        return root

    return write


@pytest.fixture
def complaint(job_values: dict[str, Any]) -> Callable[..., str | None]:
    """What is said against a job on a model, in one line; None if nothing is."""

    def check(family: str, root: Path, **changes: Any) -> str | None:
        where = {"model_family": family, "pretrained_model_name_or_path": str(root)}
        spec = load_spec(None, job_values | where | changes)
        try:
            check_job.check_model(spec, settings=True)
        except SpecError as error:
            return str(error)
        return None

    return check


@pytest.mark.parametrize("entry", [["modeling_mine", "Encoder"], ["modeling_mine"]])
def test_encoders_with_code_of_their_own_are_refused(
    entry: list[str], model: Callable[..., Path], complaint: Callable[..., str | None]
) -> None:
    """And not by the ranks, whose libraries advise to run it."""
    root = model("FluxPipeline", index={"text_encoder": entry}, transformer={})
    said = complaint("flux", root)
    assert said is not None
    assert "is modeling_mine." in said
    assert "code of models is not run" in said


# -- the flavour that a name says ----------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "name", "flavour"),
    [
        ("wan", TI2V, "2.2-ti2v-5b"),
        ("wan", "/models/wan2.2-ti2v-5b-diffusers/", "2.2-ti2v-5b"),
        ("wan", "Wan-AI/Wan2.2-T2V-A14B-Diffusers", None),  # one model, two experts
        ("wan", "/models/Wan2.2-TI2V-5B-Diffusers/checkpoint", None),
        ("wan", "/hub/models--Wan-AI--Wan2.2-TI2V-5B-Diffusers/snapshots/0a1b", "2.2-ti2v-5b"),
        ("flux2", "/hub/models--black-forest-labs--FLUX.2-klein-base-4B", None),
        ("FLUX", "black-forest-labs/FLUX.1-schnell", "schnell"),
        ("sd3", "black-forest-labs/FLUX.1-schnell", None),
        ("flux", "FLUX.1-schnell-mine", None),
        ("flux", ".", None),
        ("flux", "", None),
        ("flux", None, None),
        ("flux", "\0", None),
        ("no family", "black-forest-labs/FLUX.1-schnell", None),
        (None, TI2V, None),
    ],
)
def test_a_name_says_a_flavour(family: Any, name: Any, flavour: str | None) -> None:
    assert flavour_of(family, name) == flavour


def test_every_published_model_says_its_flavour_or_is_several() -> None:
    for family in FAMILIES.values():
        plain = {name: one for name, one in family.flavours.items() if not one.widened}
        ids = [flavour.hub_id for flavour in plain.values()]
        for name, flavour in plain.items():
            alone = ids.count(flavour.hub_id) == 1
            assert flavour_of(family.name, flavour.hub_id) == (name if alone else None)


def test_what_is_not_said_is_as_of_the_named_flavour() -> None:
    spec = JobSpec(model_family="wan", pretrained_model_name_or_path=TI2V, fps=12)
    assert (spec.model_flavour, spec.resolution, spec.fps) == ("2.2-ti2v-5b", 960, 12.0)
    said = JobSpec(
        model_family="wan", pretrained_model_name_or_path=TI2V, model_flavour="2.1-t2v-14b"
    )
    assert (said.model_flavour, said.resolution) == ("2.1-t2v-14b", 640)


@pytest.mark.parametrize("flavour", ["left out", None, "2.2-ti2v-5b", "2.1-t2v-14b"])
def test_jobs_on_a_named_flavour_come_back_as_they_were(
    tmp_path: Path, flavour: str | None
) -> None:
    values = {"model_family": "wan", "pretrained_model_name_or_path": TI2V, "dataset": "no/such"}
    spec = load_spec(None, values if flavour == "left out" else values | {"model_flavour": flavour})
    for only_set in (False, True):
        path = tmp_path / f"{only_set}.yaml"
        path.write_text(dump_spec(spec, only_set=only_set))
        assert load_spec(path) == spec
    assert load_spec(None, parse_flags(to_flags(spec))[0]) == spec
    if flavour == "left out":
        assert spec.to_dict(only_set=True) == values | {"model_flavour": "2.2-ti2v-5b"}


# -- the flavour that the model's files say ------------------------------------------------


@pytest.mark.parametrize(
    ("vae", "flavour", "advice"),
    [
        (TI2V_VAE, None, "set model_flavour: 2.2-ti2v-5b"),
        (TI2V_VAE, "2.1-t2v-14b", "set model_flavour: 2.2-ti2v-5b"),
        (TI2V_VAE, "2.2-ti2v-5b", None),
        ({"dim_mult": [1, 2, 4, 4], "patch_size": 2}, None, "set model_flavour: 2.2-ti2v-5b"),
        (WAN_VAE, None, None),
        (WAN_VAE, "2.1-t2v-14b", None),
        (WAN_VAE, "2.2-ti2v-5b", "set model_flavour: 2.1-t2v-1.3b or"),
        ({}, None, None),  # it cannot be told
    ],
)
def test_the_autoencoder_tells_how_large_a_token_is(
    model: Callable[..., Path],
    complaint: Callable[..., str | None],
    vae: dict[str, Any],
    flavour: str | None,
    advice: str | None,
) -> None:
    text = complaint("wan", model("WanPipeline", vae=vae, transformer=WAN), model_flavour=flavour)
    assert text is None if advice is None else advice in str(text)


@pytest.mark.parametrize(
    ("pipeline", "distilled", "flavour", "advice"),
    [
        ("Flux2KleinPipeline", None, None, "klein-base-4b or klein-base-9b"),
        ("Flux2KleinPipeline", True, None, "klein-4b or klein-9b"),
        ("Flux2KleinPipeline", True, "klein-base-4b", "klein-4b or klein-9b"),
        ("Flux2KleinPipeline", True, "klein-9b", None),
        ("Flux2KleinPipeline", False, "klein-base-9b", None),
        ("Flux2KleinPipeline", False, "klein-4b", "klein-base-4b or klein-base-9b"),
        ("Flux2Pipeline", None, None, None),
        ("Flux2Pipeline", None, "klein-4b", "dev"),
    ],
)
def test_the_index_tells_what_is_distilled(
    model: Callable[..., Path],
    complaint: Callable[..., str | None],
    pipeline: str,
    distilled: bool | None,
    flavour: str | None,
    advice: str | None,
) -> None:
    index = {} if distilled is None else {"is_distilled": distilled}
    text = complaint("flux2", model(pipeline, index=index, transformer={}), model_flavour=flavour)
    assert text is None if advice is None else str(text).endswith(f"set model_flavour: {advice}")


LTX_FULL: dict[str, Any] = {"use_dynamic_shifting": True, "shift_terminal": 0.1}


@pytest.mark.parametrize(
    ("parts", "scheduler", "accepted"),
    [
        (("transformer", "transformer_full"), {"use_dynamic_shifting": False}, True),
        (("transformer_full",), {"use_dynamic_shifting": False}, True),
        (("transformer",), {"use_dynamic_shifting": False, "shift_terminal": None}, False),
        (("transformer",), LTX_FULL, True),  # as exports have it
        (("transformer",), LTX_FULL | {"shift_terminal": None}, False),
        ((), {}, False),
    ],
)
def test_the_scheduler_tells_whether_the_only_transformer_is_distilled(
    model: Callable[..., Path],
    complaint: Callable[..., str | None],
    parts: tuple[str, ...],
    scheduler: dict[str, Any],
    accepted: bool,
) -> None:
    flavour = FAMILIES["ltx2"].flavours["2.5-22b"]
    root = model("LTX2Pipeline", index={**flavour.marks}, **{part: {} for part in parts})
    (root / "scheduler").mkdir()
    (root / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))
    text = str(complaint("ltx2", root, model_flavour="2.5-22b"))
    lacks = f"{root} lacks transformer_full/, which is trained; its transformer/ is distilled"
    # What it says of the text encoder comes later.
    assert ("transformer" not in text) if accepted else text.startswith(lacks)


I2V, FLF2V = "2.1-i2v-14b-480p", "2.1-flf2v-14b-720p"
BESIDE: dict[str, Any] = WAN | {"in_channels": 36, "out_channels": 16}


@pytest.mark.parametrize(
    ("flavour", "config", "said"),
    [
        (I2V, BESIDE | {"image_dim": 1280, "pos_embed_seq_len": None}, None),
        (
            I2V,
            BESIDE | {"image_dim": 1280, "pos_embed_seq_len": 514},
            f"pos_embed_seq_len is 514; set model_flavour: {FLF2V}",
        ),
        (FLF2V, BESIDE | {"image_dim": 1280, "pos_embed_seq_len": 514}, None),
        (FLF2V, BESIDE | {"image_dim": 1280}, "pos_embed_seq_len is null"),
        (FLF2V, BESIDE | {"image_dim": None}, "in transformer/config.json, image_dim is null"),
        (I2V, BESIDE | {"image_dim": None}, "in transformer/config.json, image_dim is null"),
        (I2V, BESIDE | {"in_channels": 16}, "in_channels is 16, not 36; use another model"),
        ("2.1-t2v-14b", BESIDE, "is not Wan 2.1-t2v-14b: in transformer/config.json, in_channels"),
        ("2.1-t2v-14b", BESIDE | {"in_channels": 16, "image_dim": None}, None),
    ],
)
def test_the_denoiser_tells_how_it_takes_a_first_frame(
    model: Callable[..., Path],
    complaint: Callable[..., str | None],
    flavour: str,
    config: dict[str, Any],
    said: str | None,
) -> None:
    kind = "WanImageToVideoPipeline" if flavour in (I2V, FLF2V) else "WanPipeline"
    text = complaint("wan", model(kind, transformer=config), model_flavour=flavour)
    assert text is None if said is None else said in str(text)


@pytest.mark.parametrize(
    ("part", "present", "said"),
    [
        ("processor", {"preprocessor_config.json": b"{}"}, None),
        ("processor", {}, "processor/preprocessor_config.json is missing or damaged"),
        (
            "image_processor",
            {"preprocessor_config.json": b"{"},
            "image_processor/preprocessor_config.json is missing or damaged",
        ),
        ("image_encoder", {}, "image_encoder/config.json is missing or damaged"),
        ("image_encoder", {"config.json": b"{}"}, "image_encoder has no weights"),
        (
            "image_encoder",
            {"config.json": b"{}", "model.safetensors": b"cut"},
            "model.safetensors is damaged",
        ),
        ("absent", {}, None),
    ],
)
def test_what_encodes_conditioning_images_is_there_and_whole(
    model: Callable[..., Path],
    complaint: Callable[..., str | None],
    part: str,
    present: dict[str, bytes],
    said: str | None,
) -> None:
    index = {"image_encoder": [None, None], part: ["transformers", "Any"]}
    root = model("QwenImageEditPipeline", index=index, transformer={})
    (root / part).mkdir()
    for name, content in present.items():
        (root / part / name).write_bytes(content)
    changes: dict[str, Any] = {
        "model_flavour": "edit",
        "dataset": None,
        "datasets": [{"path": "d", "conditioning_path": "c"}],
        "validation_prompts": None,
    }
    text = complaint("qwen_image", root, **changes)
    assert text is None if said is None else said in str(text)


def test_a_directory_alone_is_not_asked_for_its_flavour(
    model: Callable[..., Path], job_values: dict[str, Any]
) -> None:
    """The form looks at a path before it knows the rest."""
    root = model("WanPipeline", vae=TI2V_VAE, transformer=WAN)
    where = {"model_family": "wan", "pretrained_model_name_or_path": str(root)}
    assert check_job.check_model(load_spec(None, job_values | where)) == root


# -- how large pictures may be -------------------------------------------------------------


def test_the_longest_side_is_that_of_the_engines_buckets() -> None:
    for step in (None, 0, 16, 32, 64, 96, 128):
        spec = JobSpec(bucket_step=step)
        for resolution in range(16, 1600, 13):
            assert longest_bucket_side(resolution, spec) == max(
                map(max, sizes_at(resolution, spec))
            )


@pytest.mark.parametrize(
    ("positions", "changes", "said"),
    [
        (4096, {"resolution": 1024}, "buckets of 1408 pixels"),
        (4096, {"resolution": 1024, "bucket_step": 16}, "buckets of 1440 pixels"),
        (4096, {"resolution": 1024}, "up to 1024 pixels a side; set resolution: 752"),
        (4096, {"resolution": 736}, None),
        (4096, {"model_flavour": "v0.2"}, None),
        (4096, {"resolution": 512, "validation_resolution": "1040x512"}, "samples of 1040x512"),
        (9216, {"resolution": 1024}, None),
        (9216, {"resolution": 1104}, None),
        (
            9216,
            {"resolution": 1104, "bucket_step": 0},
            "up to 1536 pixels a side; set resolution: 1088",
        ),
        (9216, {"validation_resolution": 1536}, None),
        (9216, {"validation_resolution": 1552}, "samples of 1552x1552"),
        (None, {"resolution": 4096}, None),  # it cannot be told
    ],
)
def test_pictures_that_a_model_has_no_positions_for(
    model: Callable[..., Path],
    complaint: Callable[..., str | None],
    positions: int | None,
    changes: dict[str, Any],
    said: str | None,
) -> None:
    config = {"patch_size": 2, "pos_embed_max_size": positions}
    root = model("AuraFlowPipeline", transformer=config)
    text = complaint("auraflow", root, validation_prompts=["a cat"], **changes)
    assert text is None if said is None else said in str(text)


# -- what is there -------------------------------------------------------------------------


@pytest.mark.parametrize("flavour", ["2.2-t2v-a14b-high", "2.2-t2v-a14b-low"])
@pytest.mark.parametrize("lacking", ["transformer", "transformer_2"])
def test_both_experts_are_looked_for(
    model: Callable[..., Path],
    complaint: Callable[..., str | None],
    flavour: str,
    lacking: str,
) -> None:
    index = {"boundary_ratio": 0.875}
    root = model("WanPipeline", index=index, vae=WAN_VAE, transformer=WAN, transformer_2=WAN)
    assert complaint("wan", root, model_flavour=flavour) is None
    next((root / lacking).glob("*.safetensors")).unlink()
    assert complaint("wan", root, model_flavour=flavour) == (
        f"{root / lacking} has no .safetensors weights"
    )
    (root / lacking / "config.json").unlink()
    text = complaint("wan", root, model_flavour=flavour)
    assert text == (
        f"{root} is incomplete: {lacking}/config.json is missing or damaged; download it again"
    )


@pytest.mark.parametrize(
    "name",
    [
        "{}.fp16.safetensors",
        "{}.fp16-00001-of-00002.safetensors",
        "{}-00001-of-00002.fp16.safetensors",
    ],
)
@pytest.mark.parametrize("part", ["transformer", "vae", "text_encoder"])
def test_a_variant_alone_is_not_enough(
    model: Callable[..., Path], complaint: Callable[..., str | None], part: str, name: str
) -> None:
    index = {
        "text_encoder": ["transformers", "CLIPTextModel"],
        "text_encoder_2": [None, None],
    }
    root = model("FluxPipeline", index=index, transformer={}, text_encoder={})
    stem = "model" if part == "text_encoder" else "diffusion_pytorch_model"
    (root / "text_encoder" / "diffusion_pytorch_model.safetensors").rename(
        root / "text_encoder" / "model.safetensors"
    )
    plain = root / part / f"{stem}.safetensors"
    (root / part / name.format(stem)).write_bytes(plain.read_bytes())
    assert complaint("flux", root) is None
    plain.unlink()
    text = complaint("flux", root) or ""
    assert text.startswith(f"{root / part} has only the fp16 variant of its weights")
    assert f"{part}/{stem}.safetensors" in text


def test_a_text_encoder_that_is_not_there(
    model: Callable[..., Path], complaint: Callable[..., str | None]
) -> None:
    index = {"text_encoder": ["transformers", "CLIPTextModel"]}
    root = model("FluxPipeline", index=index, transformer={}, text_encoder={})
    next((root / "text_encoder").glob("*.safetensors")).unlink()
    assert "text_encoder has no weights" in (complaint("flux", root) or "")
    (root / "text_encoder" / "pytorch_model.bin").touch()
    text = complaint("flux", root) or ""
    assert "text_encoder has only pickled weights (pytorch_model.bin), and unpickling" in text
    assert "convert them: load with from_pretrained, then save_pretrained" in text
    empty = struct.pack("<Q", 2) + b"{}"
    (root / "text_encoder" / "model.safetensors").write_bytes(empty)
    assert complaint("flux", root) is None
    (root / "text_encoder" / "config.json").unlink()
    assert "text_encoder/config.json is missing" in (complaint("flux", root) or "")


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("model.safetensors", None),
        ("diffusion_pytorch_model-00001-of-00002.safetensors", None),
        ("diffusion_pytorch_model.safetensors.index.json", None),
        ("pytorch_model.fp16.bin", "fp16"),
        ("diffusion_pytorch_model.safetensors.index.fp16.json", "fp16"),
        ("model.fp16.safetensors.index.json", "fp16"),
        ("diffusion_pytorch_model.non_ema.safetensors", "non_ema"),
        ("config.json", None),
        ("model.onnx", None),
        ("my.best.safetensors", None),
    ],
)
def test_variants_are_known_by_their_names(name: str, variant: str | None) -> None:
    assert variant_of(name) == variant


# -- videos --------------------------------------------------------------------------------


@pytest.mark.parametrize("installed", [True, False])
def test_videos_need_their_library(
    job_values: dict[str, Any],
    make_data: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    installed: bool,
) -> None:
    found = object() if installed else None
    monkeypatch.setattr(
        "jobs.preflight.data.find_spec", lambda name: found if name == "av" else True
    )
    folder = make_data("clips", pictures=1)
    values = job_values | {"model_family": "wan", "dataset": str(folder)}
    sampled = values | {"validation_prompts": ["a cat"], "validation_num_frames": 5}

    def said(values: dict[str, Any]) -> str | None:
        try:
            check_job.check_dataset(load_spec(None, values))
        except SpecError as error:
            return str(error)
        return None

    assert said(values) is None
    assert said(sampled | {"validation_num_frames": 1}) is None
    assert said(sampled | {"model_family": "flux"}) is None
    text = said(sampled)
    assert text is None if installed else "validation_prompts are sampled as videos" in str(text)
    text = str(said(values | {"model_flavour": "2.2-i2v-a14b-low"}))
    assert text.startswith(f"0 videos in the dataset folder {folder}"), "from a first frame only"
    (folder / "film.mp4").touch()
    assert said(values | {"model_family": "flux"}) is None
    text = said(values)
    assert text is None if installed else f"{folder} holds videos, which need PyAV" in str(text)
    assert installed or "pip install" in str(text)
