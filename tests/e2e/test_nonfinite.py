"""Real jobs whose encoders return NaN: they end with a sentence, and nothing of it is cached."""

from __future__ import annotations

import json
import re
import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from engine.data.encode.tensor_cache import nonfinite
from engine.toy import write_toy
from jobs.machine.processes import with_run_id
from tests.support.jobs.real_jobs import Bench

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from jobs.run.rundir import RunDir

pytestmark = pytest.mark.e2e


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Callable[[str], Bench]]:
    benches: list[Bench] = []

    def make(family: str) -> Bench:
        write_toy(tmp_path / "toy", family, pictures=6, size=64)
        benches.append(Bench(tmp_path, tmp_path / "toy"))
        return benches[-1]

    yield make
    for made in benches:
        for job in made.store.all():
            for process in with_run_id(job.run_id):
                process.signal(signal.SIGKILL)


def edit(file: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata=metadata)


def fails(bench: Bench, **changes: Any) -> tuple[dict[str, Any], RunDir]:
    """Run a job that fails; what `show` says, and its files. None of its processes is left."""
    settings = {"validation_prompts": ["a red star"], "max_train_steps": 12} | changes
    job = bench.submit(**settings)
    facts = bench.wait(job, "completed", "stopped", "failed", "lost")
    assert facts["state"] == "failed", facts["reason"]
    assert not bench.processes(job), "no rank waits for the one that failed"
    return facts, bench.store.get(job).run_dir


def cached(bench: Bench, kind: str) -> list[dict[str, torch.Tensor]]:
    files = (bench.home / "cache").rglob(f"{kind}/*/*.safetensors")
    return [load_file(file) for file in files]


@pytest.mark.parametrize(("ranks", "sharded"), [(1, None), (2, False), (2, True)])
def test_a_caption_that_an_encoder_turns_into_nan_is_named_and_alone_not_cached(
    ranks: int, sharded: bool | None, bench: Callable[[str], Bench]
) -> None:
    at = bench("flux")
    model = at.toy / "model"
    tokenizer = AutoTokenizer.from_pretrained(model / "tokenizer_2")
    star = tokenizer("star")["input_ids"][0]
    edit(
        model / "text_encoder_2" / "model.safetensors",
        lambda tensors: tensors["shared.weight"][star].fill_(torch.nan),
    )
    facts, files = fails(at, num_processes=ranks, strategy="auto", shard_text_encoders=sharded)
    assert re.fullmatch(
        r"text_encoder_2 \(T5EncoderModel\) returned values that are not finite for the text "
        r"“a .*star.*”; download the model again, its files may be damaged",
        facts["reason"],
    )
    assert json.loads(files.failure_file.read_text())["cause"] == "not_finite"
    assert not any(nonfinite(tensors) for tensors in cached(at, "text"))
    assert not cached(at, "latents")


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_encoder_that_overflows_fp16_ends_with_the_advice_to_use_bf16(
    ranks: int, bench: Callable[[str], Bench]
) -> None:
    at = bench("qwen_image")
    edit(
        at.toy / "model" / "text_encoder" / "model.safetensors",
        lambda tensors: tensors["model.layers.1.mlp.down_proj.weight"].mul_(1e7),
    )
    values = {"model_family": "qwen_image", "num_processes": ranks, "strategy": "auto"}
    facts, files = fails(at, mixed_precision="fp16", **values)
    assert re.fullmatch(
        r"text_encoder \(Qwen2_5_VLForConditionalGeneration\) returned values that are not finite "
        r"for the text “a .*”; set mixed_precision: bf16 \(or no\), fp16 is too narrow for some "
        "encoders",
        facts["reason"],
    )
    assert not cached(at, "text")
    assert "fp16 is known to overflow in Qwen-Image (its text" in files.events.read_text()
    at.run(mixed_precision="bf16", max_train_steps=1, **values)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_image_that_the_vae_turns_into_nan_is_named_and_not_cached(
    ranks: int, bench: Callable[[str], Bench]
) -> None:
    at = bench("flux")
    edit(
        at.toy / "model" / "vae" / "diffusion_pytorch_model.safetensors",
        lambda tensors: tensors["encoder.conv_in.bias"].fill_(torch.inf),
    )
    facts, _ = fails(at, num_processes=ranks, strategy="auto")
    assert re.fullmatch(
        r"the VAE \(AutoencoderKL\) returned values that are not finite for .*\.png; "
        "download the model again, or leave this file out if it is the only one",
        facts["reason"],
    )
    assert cached(at, "text"), "what was finite stays"
    assert not cached(at, "latents")
