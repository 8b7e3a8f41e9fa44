"""LoRA on the text encoders of SDXL and Stable Diffusion: trained, resumed, exported, loaded."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
import torch
from diffusers.loaders.lora_base import disable_lora_for_text_encoder
from PIL import Image
from safetensors.torch import load_file

from engine.memory.estimator import Estimator
from engine.model.adapters import lora, lora_file, text_lora
from engine.model.text_encoders import encoder_bytes
from engine.toy.components.weights import one_thread
from jobs.run.rundir import RunDir
from jobs.spec.file.load import load_spec
from jobs.spec.keys.prompts import requests_of
from tests.support.engine.families import NEGATIVE, PROMPT, Case, toys_root
from tests.support.engine.ranks import family as family_ranks
from tests.support.engine.toy_jobs import start_ranks
from tests.support.forks.client import RanksFailedError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from jobs.spec.job_spec import JobSpec

STEPS: Final = 4
SINGLE: Final = {"num_processes": 1, "strategy": "single"}
ALONE: Final = SINGLE | {"gradient_accumulation_steps": 4}  # the batch of two ranks
SHARED: Final = {"num_processes": 2, "gradient_accumulation_steps": 2}
PREFIXES: Final = {"sdxl": ("lora_te1_", "lora_te2_"), "stable_diffusion": ("lora_te_",)}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def job(case: Case, **changes: Any) -> dict[str, Any]:
    """A job whose text encoders have a rank and a learning rate of their own."""
    prompt = {"prompt": PROMPT, "negative_prompt": NEGATIVE, "guidance": 3.0, "seed": 3}
    return case.values(
        **{
            "model_type": "lora",
            "lora_rank": 8,
            "lora_alpha": 4,
            "text_encoder_lora_rank": 4,
            "text_encoder_learning_rate": 5e-3,
            "learning_rate": 1e-2,
            "lr_scheduler": "linear",
            "max_train_steps": STEPS,
            "gradient_accumulation_steps": 2,
            "caption_dropout_probability": 0.2,
            "use_ema": True,
            "ema_decay": 0.5,
            "validation_prompts": [prompt],
            "validation_fraction": 0.25,
            "validation_timesteps": 2,
            "validation_loss_steps": 2,
            **changes,
        }
    )


def run(jobs: dict[Path, dict[str, Any]], root: Path, ranks: int) -> None:
    """Do jobs on ranks, and fail as they fail."""
    values = {str(place): job for place, job in jobs.items()}
    try:
        start_ranks(family_ranks.train, ranks, values, root / "output.txt").join()
    except RanksFailedError:
        errors = [error.read_text() for place in jobs for error in place.glob("error.txt")]
        raise AssertionError(errors or (root / "output.txt").read_text()[-2000:]) from None


@pytest.mark.e2e
def test_resumed_to_the_bit_and_the_export_makes_the_same_in_the_stock_pipeline(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    case = Case("sdxl", toys_root(tmp_path_factory))
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    start = str(RunDir(whole).checkpoint(STEPS // 2))
    run(
        {
            whole: job(case, **SINGLE, checkpointing_steps=STEPS // 2),
            resumed: job(case, **SINGLE, resume_from_checkpoint=start),
        },
        tmp_path,
        1,
    )
    before, again = exported(whole), exported(resumed)
    assert all(torch.equal(again[name], tensor) for name, tensor in before.items())
    _check_stock(case, "sdxl", whole)
    for file in RunDir(whole).export.glob("*.safetensors"):
        model = adapted(case, case.spec(**job(case)))
        lora_file.begin_from(model, file, case.family)
        for name, parameter in lora.lora_parameters(model).items():
            key = name.replace(".default", "")
            key = key if key.startswith("text_encoder") else f"unet.{key}"
            # The file's ups have the scale in them: alpha 4 of rank 8, and of rank 4 the same.
            scale = 0.5 if ".lora_B." in name else 1.0
            assert torch.equal(parameter * scale, before[key].float()), (file.name, name)


def adapted(case: Case, spec: JobSpec) -> torch.nn.Module:
    """The denoiser as a job adapts it, with its text encoders, at the first step."""
    root = case.paths.model
    model = case.family.transformer_class().from_pretrained(root, subfolder="unet")
    lora.add_lora(model, spec, case.family.lora_targets(spec))
    pipeline = case.family.load_text_pipeline(root, torch.float32)
    parts = {name: getattr(pipeline, name) for name in text_lora.names_of(case.family, root)}
    text_lora.attach(model, text_lora.adapted_encoders(parts, spec))
    return model


def _check_stock(case: Case, name: str, place: Path) -> None:
    """Both files load completely, and make the sample."""
    (request,) = requests_of(case.spec(**{"validation_prompts": job(case)["validation_prompts"]}))
    sampled = np.asarray(Image.open(RunDir(place).samples / f"step-{STEPS}" / "00.png"), int)
    export = RunDir(place).export
    layers = exported(place)
    encoders = [f"text_encoder{suffix}" for suffix in ("", "_2")][: len(PREFIXES[name])]
    for encoder, prefix in zip(encoders, PREFIXES[name], strict=True):
        own = {key: tensor for key, tensor in layers.items() if key.startswith(f"{encoder}.")}
        assert any(tensor.any() for key, tensor in own.items() if ".lora_B." in key)
        kohya = load_file(next(export.glob("*-kohya.safetensors")))
        assert 2 * sum(key.startswith(prefix) for key in kohya) == 3 * len(own)
    stock = case.stock()
    stock.load_lora_weights(export, weight_name="pytorch_lora_weights.safetensors")
    assert np.abs(pixels(case, stock, request) - sampled).max() <= 1
    for encoder in encoders:
        disable_lora_for_text_encoder(getattr(stock, encoder))
    assert np.abs(pixels(case, stock, request) - sampled).max() > 1, "captions were trained"
    stock.unload_lora_weights()  # the case's pipelines share their text encoders
    other = case.stock()
    other.load_lora_weights(export, weight_name=next(export.glob("*-kohya.safetensors")).name)
    assert np.abs(pixels(case, other, request) - sampled).max() <= 1


def exported(place: Path) -> dict[str, torch.Tensor]:
    return load_file(RunDir(place).export / "pytorch_lora_weights.safetensors")


def pixels(case: Case, pipeline: Any, request: Any) -> Any:
    return np.asarray(case.run(pipeline, request, output_type="pil")[0], int)


def numbers_of(place: Path) -> list[tuple[float, ...]]:
    """Loss and gradient norm of each step, and validation losses."""
    events = [json.loads(line) for line in RunDir(place).events.read_text().splitlines()]
    steps = [(e["loss"], e["grad_norm"]) for e in events if e["kind"] == "step"]
    return steps + [(e["loss"], 0.0) for e in events if e["kind"] == "validation"]


@pytest.mark.slow
@pytest.mark.e2e
def test_two_ranks_train_as_one_process_does(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever holds the denoiser, and with a denoiser's adapter in shards beside whole ones."""
    case = Case("sdxl", toys_root(tmp_path_factory))
    alone = tmp_path / "alone"
    layouts = {
        "ddp": {"strategy": "ddp"},
        "fsdp2": {"strategy": "fsdp2", "gradient_checkpointing": True},
        "sharded": {"strategy": "fsdp2", "lora_placement": "sharded"},
    }
    # Tensors are compared, which Adam's first steps move by the sign of next to nothing.
    sgd = {
        "optimizer": "sgd",
        "learning_rate": 2.0,
        "text_encoder_learning_rate": 1.0,
        "max_grad_norm": 0.05,
        "max_train_steps": STEPS // 2,
        "validation_prompts": [],
    }
    run({alone: job(case, **ALONE | sgd)}, tmp_path, 1)
    run({tmp_path / n: job(case, **SHARED | sgd | how) for n, how in layouts.items()}, tmp_path, 2)
    expected = exported(alone)
    for name in layouts:
        assert np.allclose(numbers_of(tmp_path / name), numbers_of(alone), rtol=1e-4), name
        trained = exported(tmp_path / name)
        assert trained.keys() == expected.keys()
        for key, tensor in expected.items():
            assert torch.allclose(trained[key], tensor, rtol=1e-4, atol=1e-5), (name, key)


HALF: Final[dict[str, dict[str, Any]]] = {
    "scaled": {
        "mixed_precision": "fp16",
        "optimizer": "prodigy",
        "learning_rate": 1.0,
        "text_encoder_learning_rate": None,
    },
    "whole files": {
        "mixed_precision": "bf16",
        "gradient_checkpointing": True,
        "lora_dropout": 0.1,
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "checkpointing_steps": STEPS // 2,
    },
}


@pytest.mark.slow
@pytest.mark.e2e
def test_half_precision_and_checkpoints_of_whole_files_and_one_encoder(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    sdxl, older = (Case(n, toys_root(tmp_path_factory)) for n in ("sdxl", "stable_diffusion"))
    jobs = {tmp_path / n: job(sdxl, **SINGLE | how) for n, how in HALF.items()}
    whole = tmp_path / "whole files"
    start = str(RunDir(whole).checkpoint(STEPS // 2))
    jobs[tmp_path / "resumed"] = jobs[whole] | {"resume_from_checkpoint": start}
    jobs[tmp_path / "older"] = job(older, **SINGLE)
    run(jobs, tmp_path, 1)
    for place in jobs:
        assert np.isfinite(numbers_of(place)).all()
        texts = {k: t for k, t in exported(place).items() if k.startswith("text_encoder")}
        assert any(tensor.any() for key, tensor in texts.items() if ".lora_B." in key), place.name
    again = exported(tmp_path / "resumed")
    assert all(torch.equal(again[name], tensor) for name, tensor in exported(whole).items())
    _check_stock(older, "stable_diffusion", tmp_path / "older")


def test_the_estimate_counts_encoders_that_stay(tmp_path_factory: pytest.TempPathFactory) -> None:
    case = Case("sdxl", toys_root(tmp_path_factory))
    jobs = [job(case, **SHARED, strategy="ddp"), job(case, **SHARED, strategy="ddp")]
    jobs[0] |= {"text_encoder_lora_rank": 0}
    plain, texts = (Estimator().estimate(load_spec(None, values)) for values in jobs)
    encoders = encoder_bytes(case.paths.model, torch.float32)
    for name in ("forward", "optimizer", "sample"):
        before, after = plain.phase(name), texts.phase(name)
        assert before is not None
        assert after is not None
        assert encoders < after.peak - before.peak < 3 * encoders
    trained = lora.lora_parameters(adapted(case, load_spec(None, jobs[1])))
    numbers = sum(p.numel() for name, p in trained.items() if name.startswith("text_encoder"))
    more = {name: texts.disk[name] - plain.disk[name] for name in ("checkpoint", "export")}
    # In fp32: weights, their average and two moments; and two formats.
    assert more == {"checkpoint": 16 * numbers, "export": 8 * numbers}
