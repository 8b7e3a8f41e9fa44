"""Each rung of the ladder: what it changes in which job, and what it says that it costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from jobs.memory.fit import Fit, Room
from jobs.memory.ladder import LADDER, LOOSER, Rung, Step
from jobs.spec.job_spec import JobSpec

if TYPE_CHECKING:
    from syrupy.assertion import SnapshotAssertion

RUNGS = {rung.title: rung for rung in LADDER}
FULL = {"model_type": "full"}
TWO = {"num_processes": 2, "strategy": "fsdp2"}
DDP = {"num_processes": 2, "strategy": "ddp"}
TEXT = {"model_family": "sdxl", "text_encoder_lora_rank": 4}
OLD = {"base_precision": "nf4", "modulation_precision": "none"}
VIDEO = {"model_family": "wan"}
H3 = {"model_family": "minimax_h3"}  # whose videos have 17n + 22 frames
SPLIT = "samples split over ranks"


def job(**values: Any) -> JobSpec:
    return JobSpec.model_validate({"pretrained_model_name_or_path": "m", "dataset": "."} | values)


@pytest.mark.parametrize(
    ("title", "values", "changes"),
    [
        ("8-bit base", {}, {"base_precision": "int8"}),
        ("8-bit base", {"base_precision": "fp8"}, None),
        ("8-bit base", {"base_precision": "nf4"}, None),
        ("8-bit base", FULL, None),
        ("8-bit modulation", OLD, {"modulation_precision": "int8"}),
        ("8-bit modulation", {"base_precision": "int8"}, {"modulation_precision": "int8"}),
        ("8-bit modulation", {"base_precision": "nf4"}, None),
        ("8-bit modulation", {}, None),
        ("8-bit modulation", OLD | {"modulation_precision": "int8"}, None),
        ("8-bit modulation", OLD | {"modulation_precision": "nf4"}, None),
        ("4-bit modulation", OLD, {"modulation_precision": "nf4"}),
        ("4-bit modulation", {"base_precision": "nf4"}, {"modulation_precision": "nf4"}),
        ("4-bit modulation", {}, None),
        ("4-bit modulation", FULL | {"base_precision": "nf4"}, None),
        ("4-bit base", {"base_precision": "int8"}, {"base_precision": "nf4"}),
        ("4-bit base", {"base_precision": "nf4"}, None),
        (
            "encode captions with sharded encoders",
            TWO | {"shard_text_encoders": False},
            {"shard_text_encoders": True},
        ),
        ("encode captions with sharded encoders", {"shard_text_encoders": False}, None),
        ("encode captions with sharded encoders", TWO, None),
        (
            "encode captions with sharded encoders",
            TWO | TEXT | {"shard_text_encoders": False},
            None,
        ),
        ("8-bit text encoders", {}, {"text_encoder_precision": "int8"}),
        ("8-bit text encoders", {"text_encoder_precision": "nf4"}, None),
        ("8-bit text encoders", TEXT, None),
        (
            "smaller samples",
            {"validation_prompts": ["a"], "validation_resolution": 768, "resolution": 512},
            {"validation_resolution": 512},
        ),
        (
            "smaller samples",
            {"validation_prompts": ["a"], "validation_resolution": 512, "resolution": 512},
            None,
        ),
        ("smaller samples", {"validation_resolution": 768, "resolution": 512}, None),
        (
            "smaller samples",
            VIDEO
            | {"validation_prompts": ["a"], "num_frames": 33, "validation_num_frames": 81}
            | {"validation_resolution": 512, "resolution": 512},
            {"validation_num_frames": 33},
        ),
        (
            "smaller samples",
            H3 | {"validation_prompts": ["a"], "validation_num_frames": 124},
            {"validation_num_frames": 73},
        ),
        ("moving average in host memory", DDP | {"use_ema": True}, {"ema_device": "cpu"}),
        ("moving average in host memory", TWO | {"use_ema": True}, None),
        ("moving average in host memory", DDP, None),
        ("moving average in host memory", DDP | {"use_ema": True, "ema_device": "cpu"}, None),
        (
            "smaller batch, more accumulation",
            {"train_batch_size": 9, "gradient_accumulation_steps": 2},
            {"train_batch_size": 3, "gradient_accumulation_steps": 6},
        ),
        (
            "smaller batch, more accumulation",
            {"train_batch_size": 4, "global_batch_size": 8},
            {"train_batch_size": 2},
        ),
        ("smaller batch, more accumulation", {}, None),
        ("8-bit AdamW", {}, {"optimizer": "adamw_8bit"}),
        ("8-bit AdamW", {"device": "cpu"}, None),
        ("8-bit AdamW", {"optimizer": "lion"}, None),
        (
            "free gathered weights after forward",
            TWO | {"fsdp_reshard_after_forward": False},
            {"fsdp_reshard_after_forward": True},
        ),
        ("free gathered weights after forward", TWO, None),
        ("free gathered weights after forward", DDP | {"fsdp_reshard_after_forward": False}, None),
        (
            "shard over all ranks",
            DDP,
            {"strategy": "fsdp2", "dp_replicate_size": None, "fsdp_enable": None},
        ),
        (
            "shard over all ranks",
            DDP | {"swap_blocks": 4},
            {"strategy": "fsdp2", "dp_replicate_size": None, "fsdp_enable": None, "swap_blocks": 0},
        ),
        (
            "most blocks in host memory",
            DDP | {"swap_blocks": {"16GB": 4, "24GB": 12}},
            {"swap_blocks": {"16GB": 48, "24GB": 48}},
        ),
        ("shard over all ranks", TWO, None),
        ("shard over all ranks", {"strategy": "single"}, None),
        ("sharded LoRA", TWO, {"lora_placement": "sharded"}),
        ("sharded LoRA", TWO | {"lora_placement": "sharded"}, None),
        ("sharded LoRA", TWO | FULL, None),
        ("sharded LoRA", DDP, None),
        (SPLIT, TWO, {"context_parallel_size": 2, "gradient_accumulation_steps": 2}),
        (
            SPLIT,
            TWO | {"num_processes": 6, "gradient_accumulation_steps": 5},
            {"context_parallel_size": 2, "gradient_accumulation_steps": 10},
        ),
        (
            SPLIT,
            TWO | {"num_processes": 6, "context_parallel_size": 2},
            {"context_parallel_size": 6, "gradient_accumulation_steps": 3},
        ),
        (
            SPLIT,
            TWO | {"model_family": "qwen_image"},
            {
                "context_parallel_size": 2,
                "gradient_accumulation_steps": 2,
                "context_parallel_comm_strategy": "alltoall",
            },
        ),
        (SPLIT, TWO | {"context_parallel_size": 2}, None),
        (SPLIT, TWO | {"model_family": "sdxl"}, None),
        (SPLIT, TWO | {"device": "cpu"}, None),
        (SPLIT, DDP, None),
        ("most blocks in host memory", {}, {"swap_blocks": 48}),
        ("most blocks in host memory", {"swap_blocks": 48}, None),
        ("most blocks in host memory", FULL, None),
        ("most blocks in host memory", DDP, {"swap_blocks": 48}),
        ("most blocks in host memory", TWO, None),
        ("most blocks in host memory", {"device": "cpu"}, None),
        ("compute in bf16", {"mixed_precision": "no"}, {"mixed_precision": "bf16"}),
        ("compute in bf16", {"mixed_precision": "fp16"}, None),
        ("offload to host memory", TWO, {"fsdp_cpu_offload": True}),
        (
            "offload to host memory",
            TWO | {"fsdp_reshard_after_forward": 2},
            {"fsdp_cpu_offload": True, "fsdp_reshard_after_forward": True},
        ),
        ("offload to host memory", TWO | {"fsdp_cpu_offload": True}, None),
        ("offload to host memory", TWO | {"device": "cpu"}, None),
        ("offload to host memory", DDP, None),
        ("shorter videos", VIDEO, {"num_frames": 49}),
        ("shorter videos", VIDEO | {"num_frames": 121}, {"num_frames": 81}),
        ("shorter videos", VIDEO | {"num_frames": 81}, {"num_frames": 49}),
        ("shorter videos", VIDEO | {"num_frames": 49}, {"num_frames": 33}),
        ("shorter videos", VIDEO | {"num_frames": 33}, {"num_frames": 17}),
        ("shorter videos", VIDEO | {"num_frames": 17}, None),
        ("shorter videos", H3, {"num_frames": 39}),
        ("shorter videos", H3 | {"num_frames": 39}, {"num_frames": 22}),
        ("shorter videos", H3 | {"num_frames": 22}, None),
        ("shorter videos", {}, None),
        ("lower resolution", {"resolution": 1024}, {"resolution": 768}),
        ("lower resolution", {"resolution": 256}, None),
        (
            "lower resolution",
            {"resolution": [512, 768]},
            {"resolution": 512, "resolution_mode": "each"},
        ),
        (
            "lower resolution",
            {"resolution": [512, 768, 1024]},
            {"resolution": [512, 768], "resolution_mode": "each"},
        ),
        ("lower resolution", {"datasets": [{"path": ".", "resolution": 512}]}, None),
    ],
)
def test_a_rung_changes_what_it_can(
    title: str, values: dict[str, Any], changes: dict[str, Any] | None
) -> None:
    assert RUNGS[title].change(job(**values)) == changes


def test_what_each_step_costs(snapshot: SnapshotAssertion) -> None:
    nothing = Fit(0, 0, Room("GPU 0", 1))

    def cost(rung: Rung) -> str:
        return f"{rung.title}: {Step(rung, {}, nothing, nothing, job()).cost}"

    every = [one for rung in (*LADDER, *LOOSER) for one in (rung, *rung.milder)]
    assert list(map(cost, every)) == snapshot
