"""Jobs on GPUs that compute nothing, many in one process: all that surrounds the numbers."""

from __future__ import annotations

import json
import os
import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

import pytest

from engine.model.release import STILL_HELD
from jobs.run.why_failed import why_failed
from jobs.spec.families import FAMILIES
from jobs.spec.values.value_types import Optimizer
from tests.support.cuda_stub import budgets
from tests.support.cuda_stub.rehearsal import STEPS, TOY, Job, prompt_of
from tests.support.nvml_stub.stub import uuid
from tests.support.paths import SUPPORT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.cuda_stub.rehearsal import Outcome, Rehearsal

pytest_plugins = ["tests.support.nvml_stub.fixture", "tests.support.cuda_stub.fixture"]

HERE: Final = Path(__file__).parent
FSDP: Final = {"strategy": "fsdp2"}
HSDP: Final = {"strategy": "hsdp", "dp_replicate_size": 2}
FULL: Final = {"model_type": "full"}
SAMPLED: Final = {"validation_prompts": [prompt_of("flux")] * 3}
COMPILED: Final = {"torch_compile": True, "torch_compile_backend": "eager"}
SELECTIVE: Final = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_policy": "selective",
}
KINDS: Final = ("lora", "full")
# Steps from which on a scheduler does all that it ever does: UniPC solves equations in the third.
_SAMPLED_IN: Final = {"wan": 4}


def _families() -> Iterator[tuple[str, Job]]:
    for family in FAMILIES:
        for kind in KINDS:
            values = {
                "model_family": family,
                "model_type": kind,
                "train_batch_size": 2,
                "validation_prompts": [prompt_of(family)],
                "validation_num_inference_steps": _SAMPLED_IN.get(family, 2),
            }
            yield f"{family} {kind}", Job(1, values)


# 8-bit AdamW's update is compiled by inductor.
OPTIMIZERS: Final = tuple(sorted({*get_args(Optimizer)} - {"adamw_8bit"}))
_RATES: Final = {"prodigy": 1.0}  # which it multiplies with its estimate
# Whose steps need the GPU although all is in host memory; those of CAME and Adafactor compute with
# what collectives return, and end where that is not finite.
OFFLOADED: Final = ("muon",)


def _optimizers() -> Iterator[tuple[str, Job]]:
    """Yield a job for each that may skip steps; failing the job instead costs no more."""
    for name in OPTIMIZERS:
        values = FULL | {"optimizer": name, "learning_rate": _RATES.get(name, 1e-3)}
        yield f"{name}, skipping", Job(1, values | {"on_nonfinite": "skip"})
        if name in OFFLOADED:
            yield f"{name}, offloaded", Job(2, FSDP | values | {"fsdp_cpu_offload": True})


# How often a step of these waits for the device; one of every other family never does.
WAITS: Final = {
    # Once in each block: how many tokens are sent to each expert (`hidream_experts.py`).
    "hidream": 4,
}
# Each family in one kind; `fsdp2` and `fsdp2 full` are FLUX.1's.
SHARDED: Final = {
    "flux2": "lora",
    "qwen_image:layered": "full",
    "sdxl": "lora",
    "wan:2.1-vace-1.3b": "full",
}
# Data of the conditioned, and what their samples are made of.
CONDITIONED: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "qwen_image:layered": (
        {"path": f"{TOY}/data", "conditioning_path": [f"{TOY}/control/{n}" for n in (1, 2)]},
        f"{TOY}/data/0001-red-circle.png",
    ),
    "wan:2.1-vace-1.3b": (
        {
            "path": f"{TOY}/videos",
            "conditioning_path": [f"{TOY}/{n}" for n in ("control_videos", "control", "videos")],
            "conditioning_roles": ["control", "reference", "fill_mask"],
        },
        f"{TOY}/control_videos/0001-red-circle.mp4",
    ),
}


def _on_two() -> Iterator[tuple[str, Job]]:
    for name, kind in SHARDED.items():
        family, _, flavour = name.partition(":")
        values = {"model_family": family, "model_type": kind, "train_batch_size": 2}
        if name in CONDITIONED:
            entry, shown = CONDITIONED[name]
            prompt = prompt_of(family) | {"conditioning_image": shown}
            values |= {
                "model_flavour": flavour,
                "datasets": [entry],
                "validation_prompts": [prompt],
            }
            if prompt["num_frames"] > 1:
                values |= {"num_frames": prompt["num_frames"], "fps": 8}
        yield f"{name} {kind} on two", Job(2, FSDP | values)


# From the first frame of each video and the last one.
_WITH_FRAMES: Final = {
    "model_family": "minimax_h3",
    "model_flavour": "fl2va",
    "train_batch_size": 2,
    "datasets": [{"path": f"{TOY}/videos", "first_frame": True, "last_frame": True}],
    "num_frames": FAMILIES["minimax_h3"].shortest,
    "fps": 8,
    "validation_prompts": [
        prompt_of("minimax_h3") | {"conditioning_image": [f"{TOY}/data/0001-red-circle.png"] * 2}
    ],
}

# What does not change what a step asks of the device is tried together with something else.
JOBS: Final = (
    dict(_families())
    | dict(_on_two())
    | dict(_optimizers())
    | {
        "unclipped": Job(1, FULL | {"max_grad_norm": 0}),
        "ltx2 with sound": Job(
            1, FULL | {"model_family": "ltx2", "train_audio": True, "train_batch_size": 2}
        ),
        "minimax_h3 with sound": Job(1, FULL | _WITH_FRAMES | {"train_audio": True}),
        "one gpu": Job(1, SAMPLED | {"checkpointing_steps": 1}),
        "accumulation": Job(1, {"gradient_accumulation_steps": 2}),
        "ema": Job(1, FULL | {"use_ema": True, "checkpointing_steps": 2}),
        "ema on the cpu": Job(1, FULL | {"use_ema": True, "ema_device": "cpu"}),
        "checkpointing": Job(1, {"gradient_checkpointing": True}),
        "selective checkpointing": Job(1, SELECTIVE),
        "fp32, adafactor": Job(1, FULL | {"mixed_precision": "no", "optimizer": "adafactor"}),
        "fp16, held out": Job(
            1,
            {"mixed_precision": "fp16", "validation_fraction": 0.25, "validation_loss_steps": 1}
            | {"validation_scores": ["clip_t", "clip_i", "dino_i"]}
            | SAMPLED,
        ),
        "fp16 full": Job(1, FULL | {"mixed_precision": "fp16"}),
        "compiled": Job(1, COMPILED | {"lora_target_modules": [r".*attn\.to_q"]}),
        "ddp": Job(2, {"strategy": "ddp", "checkpointing_steps": 1} | SAMPLED),
        "ddp full": Job(2, FULL | {"strategy": "ddp"}),
        "fsdp2": Job(2, FSDP | SAMPLED),
        "fsdp2 full": Job(
            2, FSDP | FULL | SAMPLED | {"checkpointing_steps": 1, "checkpointing_async": True}
        ),
        "sharded came": Job(2, FSDP | FULL | {"optimizer": "came"}),
        "muon": Job(2, FSDP | FULL | {"optimizer": "muon"}),
        "sharded lora": Job(2, FSDP | {"lora_placement": "sharded"}),
        "lokr": Job(2, FSDP | {"lora_variant": "lokr", "lora_rank": 2} | SAMPLED),
        "lokr on one": Job(1, {"lora_variant": "lokr", "lora_rank": 2}, resumes="lokr"),
        "scaled fp8 lokr": Job(
            1, {"lora_variant": "lokr", "lokr_full_matrix": True, "base_precision": "fp8_scaled"}
        ),
        "dora, packed encoders": Job(
            2,
            FSDP
            | {
                "lora_variant": "dora",
                "lora_rank_pattern": {"to_q": 2},
                "text_encoder_precision": "int8",
                "preservation": "blank",
            },
        ),
        "int8": Job(1, {"base_precision": "int8"}),
        "sharded nf4": Job(2, FSDP | {"base_precision": "nf4"} | SAMPLED),
        "scaled fp8": Job(2, FSDP | {"base_precision": "fp8_scaled"} | SAMPLED),
        "swapped blocks": Job(
            1,
            {"swap_blocks": 2, "base_precision": "fp8_scaled", "base_matmul": "dequantize"}
            | SAMPLED,
        ),
        "swapped blocks, ddp": Job(
            2,
            {
                "strategy": "ddp",
                "swap_blocks": {"16GB": 2, "24GB": 1},
                "checkpointing_steps": 1,
            }
            | SAMPLED
            | {"gradient_checkpointing": True},
        ),
        "forwards shared out": Job(
            2,
            {
                "strategy": "ddp",
                "gradient_accumulation_steps": 2,
                "batch_shares": {"16GB": 1, "24GB": 3},
            },
        ),
        "routed tokens": Job(
            1, {"tread": {"0..1": 0.5, "-1..-1": 0.5}, "gradient_checkpointing": True} | SAMPLED
        ),
        "training adapter": Job(1, SAMPLED, adapted_by="one gpu"),
        "cpu offload": Job(2, FSDP | FULL | SAMPLED | {"fsdp_cpu_offload": True, "use_ema": True}),
        "class images": Job(
            2,
            FSDP
            | SAMPLED
            | {
                "class_prompt": "a red circle",
                "num_class_images": 3,
                "prior_loss_weight": 0.5,
            },
        ),
        "full state dict, accumulation and ema": Job(
            2,
            FSDP
            | FULL
            | {
                "fsdp_state_dict_type": "FULL_STATE_DICT",
                "gradient_accumulation_steps": 2,
                "use_ema": True,
            },
        ),
        "fsdp2 compiled": Job(2, FSDP | FULL | COMPILED | SELECTIVE),
        "fsdp2 checkpointing": Job(
            2,
            FSDP
            | FULL
            | {
                "gradient_checkpointing": True,
                "checkpointing_steps": 1,
                "checkpointing_async": False,
            },
        ),
        "ring": Job(2, FSDP | {"context_parallel_size": 2}),
        "ulysses": Job(
            2, FSDP | {"context_parallel_size": 2, "context_parallel_comm_strategy": "alltoall"}
        ),
        "hsdp": Job(4, HSDP | SAMPLED | {"checkpointing_steps": 1}),
        "hsdp full": Job(4, HSDP | FULL | {"gradient_accumulation_steps": 2}),
        "fp16 on four, sharded encoders": Job(
            4,
            FSDP
            | {"context_parallel_size": 2, "mixed_precision": "fp16", "shard_text_encoders": True}
            | {"model_family": "ltx2", "train_audio": True}
            | {"validation_prompts": [prompt_of("ltx2")]},
        ),
        "fsdp2 full on one": Job(1, FULL, resumes="fsdp2 full"),
        "full state dict on one": Job(
            1, FULL | {"use_ema": True}, resumes="full state dict, accumulation and ema"
        ),
        "one gpu on two": Job(2, FSDP, resumes="one gpu"),
    }
)

# Out of memory from a phase on → where the sentence says that it was.
FULL_IN: Final = {
    "encode": "while encoding captions",
    "latents": "while caching latents",
    "start": "while loading weights",
    "forward": "in the forward pass of step 1",
    "backward": "in the backward pass of step 1",
    "step": "in the optimizer update of step 1",
    "sample": f"while sampling after step {STEPS}",
}
_LARGE: Final = {"validation_prompts": [prompt_of("flux")], "validation_resolution": 512}
# What the cache does not have.
_NEW: Final = {"encode": {"max_sequence_length": 48}, "latents": {"resolution": 96}}
JOBS |= {
    f"full in {phase}": Job(
        1, FULL | _LARGE | _NEW.get(phase, {}), full_in=phase, cached_by="flux full"
    )
    for phase in FULL_IN
}

WITH_BUDGET: Final = (
    *(f"{family} {kind}" for family in FAMILIES for kind in KINDS),
    "ltx2 with sound",
    "minimax_h3 with sound",
    "lokr",
    "scaled fp8 lokr",
    "int8",
    "scaled fp8",
    "swapped blocks",
    "swapped blocks, ddp",
    "routed tokens",
    "sharded nf4",
    *(f"{family} {kind} on two" for family, kind in SHARDED.items()),
    *(name for name, _ in _optimizers()),
    "unclipped",
    "one gpu",
    "ddp",
    "ddp full",
    "fsdp2",
    "fsdp2 full",
    "muon",
    "sharded came",
    "cpu offload",
    "ema",
    "ema on the cpu",
    "ring",
    "ulysses",
    "hsdp",
    "hsdp full",
)

# What is asked of the device in a step is compared with a job that differs in one thing.
COMPARED: Final = {
    "accumulation": "one gpu",
    "ema": "flux full",
    "unclipped": "adamw, skipping",
    "checkpointing": "one gpu",
    "selective checkpointing": "one gpu",
    "sharded lora": "fsdp2",
    "swapped blocks, ddp": "ddp",
    "forwards shared out": "ddp",
    "training adapter": "one gpu",
    "class images": "fsdp2",
    "cpu offload": "fsdp2 full",
    "fsdp2 full": "ddp full",
    "fsdp2 checkpointing": "fsdp2 full",
}


def test_the_readme_says_what_is_rehearsed() -> None:
    """Every job is in its table; every row names jobs or tests that are there, or why not."""
    text = (SUPPORT / "cuda_stub" / "README.md").read_text()
    table = text.partition("## What is rehearsed")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    named: set[str] = set()
    for what, by in rows:
        names = re.findall(r"`([^`]+)`", by)
        assert bool(names) != by.strip().startswith("left out: "), what
        for name in names:
            file, _, test = name.partition("::")
            if test:
                assert f"def {test}(" in (HERE / file).read_text(), name
            elif "OPTIMIZER" in name:
                named |= {name.replace("OPTIMIZER", each) for each in OPTIMIZERS}
            elif "FAMILY" in name:
                named |= {name.replace("FAMILY", family) for family in FAMILIES}
            else:
                named.add(name)
    assert named == JOBS.keys()


def needed_for(name: str, *_: str) -> Iterator[str]:
    """The jobs that a test of this one looks at, or that these need."""
    if name in FULL_IN:
        name = f"full in {name}"
    job = JOBS[name]
    for one in (name, COMPARED.get(name), job.resumes, job.cached_by, job.adapted_by):
        if one is not None:
            yield one


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, job in JOBS.items() if not job.full_in])
def test_a_job_on_gpus_runs_to_its_end(name: str, rehearsal: Rehearsal) -> None:
    job, done = JOBS[name], rehearsal[name]
    assert not done.error, done.error[-3000:]
    last = STEPS + (2 if job.resumes else 0)
    steps = [step.step for step in done.log.steps]
    assert steps == list(range(STEPS + 1 if job.resumes else 1, last + 1))
    assert done.log.end_reason == "completed"
    kinds = [event["kind"] for event in done.events]
    assert "export" in kinds
    warnings = [event["message"] for event in done.events if event["kind"] == "warning"]
    assert not [text for text in warnings if "was skipped" in text], "no update was skipped"
    assert not [text for text in warnings if text.startswith(STILL_HELD)]
    (end,) = done.run_dir.complete_checkpoints()[-1:]
    assert end[0] == last
    prompts = len(job.values.get("validation_prompts", ()))
    found = list((done.run_dir.samples / f"step-{last}").glob("*.json"))
    assert len(found) == prompts
    if prompts:
        assert "sample" in kinds
    assert ("scores" in kinds) == bool(job.values.get("validation_scores"))
    # Each rank on a GPU of its own, which it names as NVML does.
    for rank, status in enumerate(done.run_dir.rank_statuses()):
        assert (status.device, status.device_uuid) == (f"cuda:{rank}", uuid(rank))
        assert status.phase == "end"
    for counts in done.counts:
        assert counts["totals"]["bad_devices"] == 0
        assert counts["steps"][-1]["launches"] > 100
        assert bool(counts["totals"]["nccl"]) == (job.ranks > 1)
        for validated in counts["phases"].get("validate", ()):
            assert validated.get("h2d_pageable", 0) == 0
            assert validated["syncs"] == 1, "all errors are read at the end"
        if name in ("int8", "sharded nf4"):
            assert counts["behind"].get("syncs", 0) < 4, "reading weights waits for no tensor"


def last_step(done: Outcome) -> dict[str, int]:
    """What rank 0's last step asked of the device."""
    step: dict[str, int] = done.counts[0]["steps"][-1]
    return step


@pytest.mark.slow
@pytest.mark.parametrize(("name", "other"), COMPARED.items())
def test_what_a_setting_changes_in_a_step(name: str, other: str, rehearsal: Rehearsal) -> None:
    done, plain = rehearsal[name], rehearsal[other]
    mine, others = last_step(done), last_step(plain)
    held = [one.counts[0]["memory"]["held"] for one in (done, plain)]
    match name:
        case "accumulation":
            assert mine["gemms"] == 2 * others["gemms"]
        case "ema":
            assert held[0] > held[1]
        case "unclipped":
            assert mine["launches"] < others["launches"], "gradients are measured, not scaled"
            for kind in ("h2d", "d2h", "syncs"):
                assert mine.get(kind, 0) == others.get(kind, 0), kind
        case "checkpointing" | "fsdp2 checkpointing":
            assert mine["gemms"] > others["gemms"], "blocks are computed twice"
        case "selective checkpointing":
            assert mine["gemms"] == others["gemms"], "products are kept"
            assert mine["launches"] > others["launches"], "the rest is computed twice"
        case "sharded lora":
            assert held[0] < held[1]
        case "swapped blocks, ddp":
            assert held[0] < held[1]
            assert mine["nccl"] == others["nccl"], "only gradients are reduced"
            # Both in forward, and the first again in backward, beside what is computed.
            assert mine["h2d"] == others["h2d"] + 3
            more = mine["h2d_bytes"] - others["h2d_bytes"]
            assert (
                mine["h2d_aside"] - others.get("h2d_aside", 0) == more > 1.4 * (held[1] - held[0])
            )
            steps = [one.counts[1]["steps"][-1] for one in (done, plain)]
            assert steps[0]["h2d"] == steps[1]["h2d"] + 1, "one block on the GPU of 24 GB"
            assert steps[0]["nccl"] == steps[1]["nccl"]
        case "forwards shared out":
            gemms, calls = (
                [c["steps"][-1][kind] for c in done.counts] for kind in ("gemms", "nccl")
            )
            assert gemms == [others["gemms"], 3 * others["gemms"]]
            assert calls == [others["nccl"]] * 2, "gradients are averaged once"
        case "training adapter":
            assert mine["gemms"] > others["gemms"]
            assert held[0] > held[1]
            for kind in ("h2d", "d2h", "syncs"):
                assert mine.get(kind, 0) == others.get(kind, 0), kind
        case "class images":
            assert mine["h2d"] == others["h2d"] + 1, "the weights of the samples"
            for kind in ("h2d_pageable", "syncs"):
                assert mine.get(kind, 0) == others.get(kind, 0), kind
            assert mine["launches"] == others["launches"] + 2, "a product, and its gradient"
        case "cpu offload":
            assert held[0] < held[1] / 2
            assert mine["h2d_bytes"] > others["h2d_bytes"] + held[1] / 4, "parameters come"
            assert mine["d2h_bytes"] > others["d2h_bytes"] + held[1] / 4, "gradients go"
        case "fsdp2 full":
            assert held[0] < 0.6 * held[1]
        case _:
            raise AssertionError(f"nothing is known of {name}")


def tensors(path: Path) -> dict[str, tuple[str, bytes]]:
    """Name → precision and bytes of a safetensors file, without torch."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header, data = json.loads(file.read(length)), file.read()
    header.pop("__metadata__", None)
    return {
        name: (about["dtype"], data[slice(*about["data_offsets"])])
        for name, about in header.items()
    }


def exported_and_original(rehearsal: Rehearsal, name: str) -> list[dict[str, tuple[str, bytes]]]:
    """The transformer that a job of the toy FLUX.1 exported, and the one that it read."""
    model = "transformer/diffusion_pytorch_model.safetensors"
    read = rehearsal.root / "toys" / "flux" / "model"
    both = [tensors(folder / model) for folder in (rehearsal[name].run_dir.export, read)]
    assert both[0].keys() == both[1].keys()
    return both


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp2 full on one"])
def test_weights_survive_shards_and_a_resume_bit_for_bit(name: str, rehearsal: Rehearsal) -> None:
    """No kernel changes a weight: what is exported is what was read, if every copy went right.

    From the file in slices to two GPUs, into checkpoints, onto one GPU, and into an export.
    """
    exported, original = exported_and_original(rehearsal, name)
    wrong = [name for name, tensor in original.items() if exported[name] != tensor]
    assert not wrong, f"{len(wrong)} of {len(original)} differ: {wrong[:5]}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hsdp full"])
def test_what_a_group_split_off_gathers_is_all_of_it(name: str, rehearsal: Rehearsal) -> None:
    """The stub gives a rank its own part in place of the other's: twice the first half."""
    exported, original = exported_and_original(rehearsal, name)
    for weight, (_, data) in original.items():
        assert exported[weight][1] == 2 * data[: len(data) // 2], weight


@pytest.mark.slow
@pytest.mark.parametrize("phase", FULL_IN)
def test_a_gpu_that_is_full_is_one_sentence(phase: str, rehearsal: Rehearsal) -> None:
    done = rehearsal[f"full in {phase}"]
    reason = why_failed(done.run_dir, 1)
    began = f"rank 0 ran out of GPU memory {FULL_IN[phase]}: CUDA out of memory. "
    assert reason.startswith(began), done.error
    assert "\n" not in reason


@pytest.fixture(scope="module")
def rows(
    rehearsal: Rehearsal, request: pytest.FixtureRequest
) -> Iterator[dict[str, dict[str, int]]]:
    """What was measured of each job so far; printed, and written where it is asked for."""
    found: dict[str, dict[str, int]] = {}
    yield found
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print("\n" + budgets.table(found, {n: rehearsal[n].counts[0]["syncs"] for n in found}))
    if os.environ.get(budgets.RENEW_VARIABLE) and found:
        budgets.write(found, rehearsal[next(iter(found))].counts[0]["versions"])


def test_no_family_may_wait_without_a_reason() -> None:
    allowed = budgets.read()
    names = {f"{family} {kind}": WAITS.get(family, 0) for family in FAMILIES for kind in KINDS}
    assert {name: allowed[name]["syncs"] for name in names} == names


def test_no_optimizer_waits_to_skip_a_step_without_a_reason() -> None:
    """Schedule-free AdamW's authors count and weigh steps on the host."""
    allowed = budgets.read()
    waits = {"adamw_schedule_free": 1}
    rows = {name: allowed[f"{name}, skipping"] for name in OPTIMIZERS}
    assert {name: row["syncs"] for name, row in rows.items()} == {
        name: waits.get(name, 0) for name in OPTIMIZERS
    }
    everyone = [*rows.values(), *(allowed[f"{name}, offloaded"] for name in OFFLOADED)]
    assert not any(row["pageable"] for row in everyone)


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_BUDGET)
def test_a_step_stays_within_its_budget(
    name: str, rehearsal: Rehearsal, rows: dict[str, dict[str, int]]
) -> None:
    """No host sync, launch, copy or collective is added without a reason."""
    done = rehearsal[name]
    assert not done.error, done.error[-3000:]
    rows[name] = row = budgets.measured(done.counts[0])
    if os.environ.get(budgets.RENEW_VARIABLE):
        return
    if done.counts[0]["versions"] != budgets.versions():
        pytest.skip(f"the budgets hold for {budgets.versions()}")
    allowed = budgets.read()[name]
    over = {
        column: (row[column], allowed[column]) for column in row if row[column] > allowed[column]
    }
    assert not over, f"(measured, budget); the host waits: {done.counts[0]['syncs']}"
