"""Wan 2.2's experts: each is trained for its own noise levels, and loaded into its own place."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model_state_dict
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict_saver import save

from engine.exports.__main__ import main as export
from engine.model.adapters.lora import lora_parameters
from engine.ranks.world import World
from engine.sample.frozen_denoiser import OtherExpert, find_other_expert, second_denoisers
from engine.toy.components.weights import one_thread
from jobs.run.checkpoint_files import STATE_FILE, Checkpoint
from jobs.run.rundir import MANIFEST, RunDir
from jobs.service.sweep import expand, plan_all, queue_all
from jobs.spec.file.load import load_spec
from jobs.spec.keys.prompts import requests_of
from tests.support.engine.exports import export_alone, recipe_of, trained_model
from tests.support.engine.families import (
    DEVICE,
    PROMPT,
    Case,
    Spied,
    batch_of,
    quiet,
    toys_root,
)
from tests.support.engine.ranks import family as family_ranks
from tests.support.engine.run_context import run_context
from tests.support.engine.toy_jobs import start_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from jobs.queue.store import Store

HIGH, LOW = "wan:2.2-t2v-a14b-high", "wan:2.2-t2v-a14b-low"
BOUNDARY = 0.875
RANKS, STEPS = 2, 2


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experts")


@torch.no_grad()
def test_each_expert_says_what_the_pipeline_samples_with_at_its_levels(root: Path) -> None:
    high, low = Case(HIGH, root), Case(LOW, root)
    request = high.request(num_frames=5, steps=6)
    spied = Spied(high, request)
    condition = batch_of(high.encoded(PROMPT))
    turns = []
    for noisy, level, expected in spied.seen:
        case = high if level >= high.family.sigma_range()[0] else low
        denoiser = getattr(spied.pipeline, case.family.component)
        found = case.family.predict(denoiser, noisy, level, condition, request.guidance)
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
        turns.append(case.family.component)
    assert turns == sorted(turns), "first the one for high noise, then the other"
    assert set(turns) == {"transformer", "transformer_2"}


@pytest.mark.slow
@pytest.mark.parametrize("targets", [None, ["to_q", "to_k"]], ids=["ours", "named"])
def test_a_lora_of_image_to_video_is_exported_whatever_the_pipeline_fills_up(
    root: Path, targets: list[str] | None, tmp_path: Path
) -> None:
    """It gives an adapter of zeros to what sees CLIP's tokens, where the file has none."""
    case = Case("wan:2.1-i2v-14b-480p", root)
    spec = case.spec(model_type="lora", lora_rank=4, lora_target_modules=targets)
    with quiet():
        model = trained_model(spec, case.paths.model)
        exported = export_alone(model, recipe_of(spec, case.paths.model), tmp_path / "export").path
    names = load_file(exported / "pytorch_lora_weights.safetensors")
    assert any("add_k_proj" in name for name in names) is (targets is None)


@pytest.mark.parametrize(
    ("name", "sigmas", "second_denoiser"),
    [
        (HIGH, (BOUNDARY, 1.0), "transformer_2"),
        (LOW, (0.0, BOUNDARY), "transformer"),
        ("wan:2.2-vace-fun-a14b-low", (0.0, BOUNDARY), "transformer"),
        ("wan:2.2-ti2v-5b", (0.0, 1.0), None),
    ],
)
def test_levels_and_the_other_expert_are_as_the_model_says(
    name: str, sigmas: tuple[float, float], second_denoiser: str | None, root: Path
) -> None:
    family = Case(name, root).family
    assert family.sigma_range() == sigmas
    assert family.second_denoiser == second_denoiser


@pytest.mark.parametrize(
    ("name", "guidance", "second"),
    [
        (HIGH, 4.0, 3.0),
        (LOW, 4.0, 3.0),
        (HIGH, 5.0, None),
        ("wan:2.2-ti2v-5b", 4.0, None),
        ("wan:2.1-t2v-1.3b", 4.0, None),
        ("wan:2.2-i2v-a14b-high", 4.0, None),
        ("wan:2.2-vace-fun-a14b-low", 4.0, None),
    ],
)
def test_experts_have_the_published_guidance_each_unless_a_job_says_otherwise(
    name: str, guidance: float, second: float | None, root: Path
) -> None:
    case = Case(name, root)
    request = replace(Case(HIGH, root).request(num_frames=5), guidance=guidance)
    arguments = case.family.sample_arguments(request, {}, None)
    assert arguments["guidance_scale"] == guidance
    assert arguments.get("guidance_scale_2") == second


def test_the_boundary_is_read_from_the_model(root: Path) -> None:
    index = Case(HIGH, root).paths.model / "model_index.json"
    written = index.read_text()
    index.write_text(json.dumps(json.loads(written) | {"boundary_ratio": 0.9}))
    try:
        assert Case(HIGH, root).family.sigma_range() == (0.9, 1.0)
    finally:
        index.write_text(written)


@pytest.mark.parametrize("name", [HIGH, LOW])
def test_a_lora_is_loaded_into_the_expert_that_it_was_trained_for(
    name: str, root: Path, tmp_path: Path
) -> None:
    case = Case(name, root)
    trained, pipeline = getattr(case.stock(), case.family.component), case.stock()
    trained.add_adapter(LoraConfig(r=2, target_modules=case.family.LORA_TARGETS))
    layers = get_peft_model_state_dict(trained)
    pipeline.save_lora_weights(tmp_path, transformer_lora_layers=layers)
    case.family.load_lora(pipeline, tmp_path)
    for component in ("transformer", "transformer_2"):
        adapted = bool(getattr(getattr(pipeline, component), "peft_config", None))
        assert adapted == (component == case.family.component)


@torch.no_grad()
def test_one_timestep_says_the_same_as_one_for_each_token(root: Path) -> None:
    """The pipeline of TI2V-5B repeats the timestep for each token; training does without."""
    case = Case("wan:2.2-ti2v-5b", root)
    transformer = case.stock().transformer
    noisy = torch.randn(1, 48, 2, 4, 6, generator=torch.Generator().manual_seed(0))
    condition = batch_of(case.encoded(PROMPT))
    found = case.family.predict(transformer, noisy, torch.tensor([0.6]), condition, 1.0)
    expected = transformer(
        hidden_states=noisy,
        timestep=torch.full((1, 2 * 2 * 3), 600.0),
        encoder_hidden_states=condition["prompt_embeds"],
        return_dict=False,
    )[0]
    assert torch.allclose(found, expected, atol=1e-5)


@torch.no_grad()
def test_the_other_expert_keeps_as_many_blocks_in_host_memory(root: Path) -> None:
    case = Case(HIGH, root)
    noisy = torch.randn(1, 16, 2, 4, 6, generator=torch.Generator().manual_seed(0))
    condition = batch_of(case.encoded(PROMPT))
    world = World(0, 1, DEVICE, "single", "t")
    found = []
    for swapped in (0, 1):
        spec = case.spec(swap_blocks=swapped)
        run = run_context(
            spec,
            RunDir(root),
            world,
            Mock(),
            family=case.family,
            model_root=case.paths.model,
        )
        with second_denoisers(run) as (others, _):
            (expert,) = others.values()
            blocks = {
                ".".join(name.split(".")[:2])
                for name, one in expert.named_parameters()
                if not one.untyped_storage().nbytes()
            }
            assert len(blocks) == swapped
            level = torch.tensor([0.4])
            found.append(case.family.predict(expert, noisy, level, condition, 1.0))
            del expert
    assert torch.equal(*found)


def test_without_a_readable_checkpoint_of_the_other_job_the_base_is_sampled(
    root: Path, tmp_path: Path
) -> None:
    case, telemetry = Case(LOW, root), Mock()
    other = RunDir(tmp_path / "1-cats-high")
    run = run_context(
        case.spec(other_expert=str(other.root)),
        RunDir(tmp_path),
        World(0, 1, DEVICE, "single", "t"),
        telemetry,
        family=case.family,
        model_root=case.paths.model,
    )
    assert find_other_expert(run) is None
    telemetry.say.assert_called_with(
        "1-cats-high has no checkpoint; samples use the base model's other expert"
    )
    place = other.checkpoint(4)
    place.mkdir(parents=True)
    (place / MANIFEST).write_text(json.dumps({"step": 4, "files": {}}))
    for damaged in ([], "x", ["a"], {"model_type": 3}):
        (place / STATE_FILE).write_text(json.dumps({"spec": damaged}))
        assert find_other_expert(run) is None
    state = {"spec": Case(HIGH, root).spec(lora_rank=4).to_dict(), "ema": True}
    (place / STATE_FILE).write_text(json.dumps(state))
    expert = find_other_expert(run)
    assert expert is not None
    assert (expert.run, expert.checkpoint.step, expert.ema) == ("1-cats-high", 4, True)
    with second_denoisers(run, expert) as (others, used):
        assert used is None
        assert not lora_parameters(others["transformer"])
    assert "step 4 of 1-cats-high cannot be read" in telemetry.warn.call_args.args[0]


@torch.no_grad()
@pytest.mark.parametrize("layout", ["full", "sharded"])
def test_a_fully_trained_expert_is_packed_as_the_base_is(
    root: Path, layout: Any, tmp_path: Path
) -> None:
    """Where this job's LoRA has a packed base, and the other job trains all weights."""
    case, high = Case(LOW, root), Case(HIGH, root)
    trained = high.stock().components["transformer"].eval()
    for parameter in trained.parameters():
        parameter.mul_(1.5)
    tensors = {name: parameter.detach() for name, parameter in trained.named_parameters()}
    if layout == "full":
        save_file(tensors, tmp_path / "model.safetensors")
    else:
        save({"model": tensors}, checkpoint_id=tmp_path, no_dist=True)
    files = {path.name: (0, "") for path in tmp_path.iterdir()}
    checkpoint = Checkpoint(4, tmp_path, 0, layout, 1, False, 0.0, files)
    run = run_context(
        case.spec(model_type="lora", base_precision="int8"),
        RunDir(tmp_path),
        World(0, 1, DEVICE, "single", "t"),
        Mock(),
        family=case.family,
        model_root=case.paths.model,
    )
    other = OtherExpert("1-cats-high", checkpoint, high.spec(model_type="full"), ema=False)
    noisy = torch.randn(1, 16, 2, 4, 6, generator=torch.Generator().manual_seed(0))
    words = (noisy, torch.tensor([0.95]), batch_of(case.encoded(PROMPT)), 1.0)
    expected = case.family.predict(trained, *words)
    with second_denoisers(run, other) as (others, used):
        assert used is other
        found = case.family.predict(others["transformer"], *words)
    assert (found - expected).norm() < 0.02 * expected.norm()


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.usefixtures("no_gpus", "started")
def test_one_command_trains_both_experts_and_one_export_has_both(
    store: Store, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The second job samples with what the first one has trained, as the stock pipeline does."""
    case, pairs = Case(HIGH, toys_root(tmp_path_factory)), {}
    prompt = {"prompt": PROMPT, "num_frames": 5, "seed": 3, "steps": 4}
    for kind in ("lora", "full"):
        values = case.values(
            name=kind,
            both_experts=True,
            model_type=kind,
            num_processes=RANKS,
            strategy="fsdp2",
            lora_rank=4,
            max_train_steps=STEPS,
            checkpointing_steps=STEPS,
            learning_rate=3e-2 if kind == "lora" else 3e-3,
            cache_dir=str(tmp_path / "cache"),
            validation_prompts=[prompt],
            use_ema=kind == "full",
            fsdp_state_dict_type="full" if kind == "lora" else "sharded",  # both layouts are read
        )
        sweep = expand(store, values, {})
        assert [spec.name for spec in sweep.specs] == [f"{kind}-high", f"{kind}-low"]
        pairs[kind] = queue_all(store, plan_all(store, sweep, lambda spec: ()), sweep.pairs)
    jobs = [job for pair in pairs.values() for job in pair]
    files = {str(job.run_dir.root): load_spec(job.run_dir.job_file).to_dict() for job in jobs}
    start_ranks(family_ranks.train, RANKS, files, tmp_path / "output.txt").join()
    for kind, (high, low) in pairs.items():
        sampled = low.run_dir.samples / f"step-{STEPS}"
        facts = json.loads((sampled / "00.json").read_text())
        used = {"run": high.run_dir.root.name, "step": STEPS, "ema": kind == "full"}
        assert facts["other_expert"] == used
        assert "other_expert" not in json.loads(
            (high.run_dir.samples / f"step-{STEPS}" / "00.json").read_text()
        ), "the other job has not begun"
        first, second = (str(job.run_dir.checkpoint(STEPS)) for job in (low, high))
        target = tmp_path / f"both-{kind}"
        assert export([first, str(target), f"--other={second}"]) == 0
        (request,) = requests_of(load_spec(low.run_dir.job_file))
        expected = np.asarray(Image.open(sampled / "00.png"), int)
        stock = case.stock(target if kind == "full" else None)
        if kind == "full":
            alone = case.stock(low.run_dir.export)
        else:
            alone = case.stock()
            for pipeline, loaded in ((stock, (high, low)), (alone, (low,))):
                for job in loaded:
                    name = f"{job.name}-diffusers.safetensors"
                    into = {"load_into_transformer_2": True} if job is low else {}
                    pipeline.load_lora_weights(target, weight_name=name, **into)
        drawn, without = (
            np.asarray(case.run(pipeline, request, output_type="pil")[0][2], int)
            for pipeline in (stock, alone)
        )
        assert np.abs(drawn - expected).max() <= 1
        assert np.abs(without - expected).max() > 1, "the expert for high noise was trained too"
