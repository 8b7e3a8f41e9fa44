"""Predicted memory against reality: live tensors counted in the real engine, on real ranks."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any, Final

import pytest

from engine.memory.estimator import Estimator
from jobs.memory.predicted import MEASURED_AS
from jobs.spec.file.load import load_spec
from tests.support.engine.families import Case
from tests.support.engine.memory import small_toy
from tests.support.engine.ranks import memory as memory_ranks
from tests.support.engine.toy_jobs import start_ranks, toy_values

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

pytestmark = pytest.mark.slow

TOLERANCE: Final = 0.03
STEPS_TRAINED: Final = 4  # the first is not counted, and of the others the one with the least

SHARDED: Final = {"strategy": "fsdp2"}
FULL: Final = {"model_type": "full"}
# With short texts: those of a step stay in host memory until its end, which a rank without a GPU
# computes with.
TO_BASE: Final = {"regularization_target": "base", "max_sequence_length": 4}
PRESERVED: Final = {"preservation": "blank", "max_sequence_length": 4}
# A covering selection of strategy, kind, placement of a LoRA, precision, checkpointing and
# accumulation: each pair that changes what is held is in one job. Plain LoRA, LoRA in DDP and full
# training in HSDP are among the whole runs below, of whose steps the same is asked; full training
# in DDP is in bf16, a sharded LoRA accumulates, and accumulation in fp32 is that of bf16.
ON_TWO: Final[dict[str, dict[str, Any]]] = {
    "lora ddp, swapped, preserved": PRESERVED | {"strategy": "ddp", "swap_blocks": 3},
    "lora ddp, swapped, checkpointed": {
        "strategy": "ddp",
        "swap_blocks": 2,
        "gradient_checkpointing": True,
    },
    "lora to base, sharded, nf4": SHARDED
    | TO_BASE
    | {"lora_placement": "sharded", "base_precision": "nf4"},
    "lora kept, preserved": SHARDED | PRESERVED | {"fsdp_reshard_after_forward": False},
    "lora nf4": SHARDED | {"base_precision": "nf4"},
    # Of few layers: for each tensor, a step has numbers that are as large as a toy's matrices.
    "lokr nf4": SHARDED
    | {
        "lora_variant": "lokr",
        "lora_rank": 4,
        "lora_target_modules": [r".*(ff\.net\.0\.proj|proj_mlp)"],
        "base_precision": "nf4",
        "modulation_precision": "none",
    },
    "lokr bf16 ddp, whole matrices": {
        "strategy": "ddp",
        "mixed_precision": "bf16",
        "lora_variant": "lokr",
        "lokr_full_matrix": True,
        "lokr_factor": 2,
    },
    "lokr sharded": SHARDED | {"lora_variant": "lokr", "lora_placement": "sharded"},
    "full checkpointed, came": SHARDED
    | FULL
    | {"gradient_checkpointing": True, "optimizer": "came"},
    "lora ddp, swapped, routed": {
        "strategy": "ddp",
        "swap_blocks": 2,
        "gradient_checkpointing": True,
        "tread": {"1..-1": 0.5},
    },
    "full routed": SHARDED | FULL | {"tread": {"0..-1": 0.6}},
    "full bf16": SHARDED | FULL | {"mixed_precision": "bf16"},
    "full bf16 ddp checkpointed, muon": FULL
    | {"strategy": "ddp", "mixed_precision": "bf16", "gradient_checkpointing": True}
    | {"optimizer": "muon"},
    "full bf16 accumulated": SHARDED
    | FULL
    | {"mixed_precision": "bf16", "gradient_accumulation_steps": 3},
    "lora sharded, accumulated": SHARDED
    | {"lora_placement": "sharded", "gradient_accumulation_steps": 2, "max_sequence_length": 4},
    "full kept, muon": SHARDED | FULL | {"fsdp_reshard_after_forward": False, "optimizer": "muon"},
    "full prefetched, adafactor": SHARDED
    | FULL
    | {"fsdp_forward_prefetch": 1, "fsdp_backward_prefetch": 2, "optimizer": "adafactor"},
    "full averaged, lion": SHARDED | FULL | {"use_ema": True, "optimizer": "lion"},
}
HSDP: Final = {"num_processes": 4, "strategy": "hsdp", "dp_replicate_size": 2}
ON_FOUR: Final[dict[str, dict[str, Any]]] = {
    "hsdp full accumulated, muon": HSDP
    | FULL
    | {"gradient_accumulation_steps": 3, "optimizer": "muon"},
}
# From loading to saving, with caches of their own. What is copied behind training's back goes to
# host memory.
WHOLE: Final = {
    "checkpointing_async": False,
    "checkpointing_steps": 3,
    "validation_steps": 3,
    "validation_num_inference_steps": 2,  # the last unit stays gathered from one to the next
    "validation_prompts": ["a red circle", "a blue square", "a dot", "a line"],
}
RUNS: Final[dict[str, dict[str, Any]]] = {
    "run of lora ddp": {"strategy": "ddp", "base_precision": "int8"} | WHOLE,
    "run of lora, shared encoders": SHARDED | WHOLE | {"shard_text_encoders": True},
    "run of full, whole files": SHARDED
    | FULL
    | WHOLE
    | {"fsdp_state_dict_type": "FULL_STATE_DICT", "use_ema": True},
}
HSDP_RUNS: Final = {"run of hsdp full": HSDP | FULL | WHOLE}


# With conditioning images. Texts are counted as long as they may be: here as long as they are. Of
# Qwen-Image's last block, nobody reads the texts, and what it keeps for them is free at once: much
# of two blocks, unless images have most of the tokens. Wan's texts have 512 tokens, whatever they
# say, and stay while the optimizer steps.
EDIT: Final = {
    "max_sequence_length": 19,
    "train_batch_size": 1,
    "resolution": 256,
    "conditioning_resolution": 384,
    "max_upscale": 4,
}
CONDITIONED: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "kontext": ("flux:kontext", SHARDED),
    "edit": ("qwen_image:edit-2509", SHARDED | EDIT),
    "keyframes and sound": (
        "minimax_h3:fl2va",
        SHARDED | {"train_batch_size": 1, "max_sequence_length": 16, "train_audio": True},
    ),
    "control video": ("wan:2.1-vace-1.3b", SHARDED),
    "image to video": ("wan:2.1-flf2v-14b-720p", SHARDED | FULL | {"train_batch_size": 1}),
    # Of which FSDP2 would train most of the sound's half.
    "without sound": ("ltx2:2.5-22b", SHARDED | FULL | {"train_batch_size": 1}),
    # Of samples, decoding the sound takes most.
    "sound": (
        "ltx2:2.5-22b",
        SHARDED
        | {"train_audio": True, "validation_steps": 3, "validation_prompts": ["a dot", "a line"]}
        | {"validation_resolution": 64, "validation_num_frames": 17},
    ),
}


STEPS: Final = ("forward", "backward", "optimizer")
# Ranks share the work of these, and one may find nothing left to do.
SHARED: Final = ("text_cache", "latent_cache")
CASES: Final = ON_TWO | ON_FOUR | RUNS | HSDP_RUNS


def values_of(case: str, toy: Path, cache: Path) -> dict[str, Any]:
    if case in CONDITIONED:
        name, changes = CONDITIONED[case]
        values = {"cache_dir": str(cache), "num_processes": 2, "train_batch_size": 2}
        of_case = Case(name, toy).values(
            max_train_steps=STEPS_TRAINED, lora_rank=8, **values | changes
        )
        for entry in of_case["datasets"]:  # in every step
            entry |= {key: True for key in ("first_frame", "last_frame") if key in entry}
        return of_case
    usual: dict[str, Any] = {
        "num_processes": 2,
        "train_batch_size": 2,
        "max_train_steps": STEPS_TRAINED,
        "resolution": 64,
        "cache_dir": str(cache / case if case.startswith("run") else cache),
    }
    if "regularization_target" in CASES[case]:
        # Nearly all samples are of this kind, so that each step asks the base.
        prior = {"path": str(toy / "prior"), "regularization": True, "weight": 1}
        shutil.copytree(toy / "data", toy / "prior", dirs_exist_ok=True)
        usual |= {"dataset": "", "datasets": [{"path": str(toy / "data"), "weight": 1e-3}, prior]}
    return toy_values(toy, **usual | CASES[case])


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With text encoders of such a width that their weights are more than what they compute."""
    return small_toy(tmp_path_factory.mktemp("few-blocks"), clip_dim=256, t5_dim=256)


@pytest.fixture(scope="module")
def counted(
    request: pytest.FixtureRequest, toy: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, int]]]:
    """Case, of those that are tested → of each rank, phase → bytes."""
    folder = tmp_path_factory.mktemp("counted")
    here = [item for item in request.session.items if item.fspath == request.node.fspath]
    chosen = {item.callspec.params["case"] for item in here if hasattr(item, "callspec")}
    found: dict[str, list[dict[str, int]]] = {}
    for ranks, cases in ((2, (*ON_TWO, *RUNS, *CONDITIONED)), (4, (*ON_FOUR, *HSDP_RUNS))):
        found |= count(ranks, [case for case in cases if case in chosen], toy, folder)
    return found


def count(
    ranks: int, cases: Collection[str], toy: Path, folder: Path
) -> dict[str, list[dict[str, int]]]:
    if not cases:
        return {}
    values = {case: values_of(case, toy, folder / "cache") for case in cases}
    (own := folder / str(ranks)).mkdir()
    start_ranks(memory_ranks.train, ranks, values, str(own)).join()
    found = [json.loads((own / f"{rank}.json").read_text()) for rank in range(ranks)]
    return {case: [rank[case] for rank in found] for case in cases}


@pytest.fixture(scope="module")
def estimator() -> Estimator:
    return Estimator()


@pytest.mark.parametrize("case", [*CASES, *CONDITIONED])
def test_each_phase_takes_what_was_predicted(
    counted: dict[str, list[dict[str, int]]],
    estimator: Estimator,
    toy: Path,
    tmp_path: Path,
    case: str,
) -> None:
    spec = load_spec(None, values_of(case, toy, tmp_path))
    predicted = estimator.estimate(spec)
    some = ("base", "score")  # which only some jobs have
    names = (
        [name for name in MEASURED_AS if name not in some] if case in RUNS | HSDP_RUNS else STEPS
    )
    names = (*(name for name in some if predicted.phase(name) is not None), *names)
    if case == "sound":
        names = [*STEPS, "sample"]
    if case == "edit":  # its table of positions, no weight, is more than a toy's optimizer step
        names = [*STEPS[:2]]
    for name in names:
        phase = predicted.phase(name)
        assert phase is not None
        measured = MEASURED_AS[name]
        found = [rank[measured] for rank in counted[case] if measured in rank]
        real = max(found) if name in SHARED else min(found)
        assert phase.peak == pytest.approx(real, rel=TOLERANCE), (name, phase.parts, real)
    work = predicted.work
    of_passes = work["forward"]["linked"] + work["backward"]["linked"]
    linked = work["micro_batches"] * of_passes + work["step"]["linked"]
    linked += work["base_forwards"] * work["base"]["linked"] + work["step"].get("exchanged", 0)
    assert linked > 0
    # Norms and losses are summed over the ranks, which are some numbers. Of muon's matrices, some
    # ranks have one more than others.
    counts = [rank["linked"] for rank in counted[case]]
    for count in [max(counts)] if spec.optimizer == "muon" else counts:
        assert linked == pytest.approx(count, rel=1e-3, abs=2000)
