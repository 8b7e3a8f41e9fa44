"""A run that was stopped and resumed equals one that never stopped, on any number of ranks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from jobs.run.checkpoint_files import list_checkpoints, read_state
from jobs.run.eventlog import EventLog
from jobs.run.rundir import RunDir
from tests.support.engine.ranks.checkpoint import train
from tests.support.engine.toy_jobs import start_ranks, toy_values

if TYPE_CHECKING:
    from pathlib import Path

    Jobs = list[tuple[str, dict[str, Any], int | None]]

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# An epoch has six steps: runs go on in the middle of one, and at its end.
STEPS: Final = 8
HALF: Final = 4
MOVED: Final = (3, 6)
DORA: Final = {"lora_variant": "dora", "base_precision": "none", "validation_prompts": []}
FREE: Final = {
    "model_type": "full",
    "optimizer": "adamw_schedule_free",
    "lr_scheduler": "constant_with_warmup",
    "use_ema": False,
    "base_precision": "none",
}
LOKR: Final = {"lora_variant": "lokr", "lora_rank": 2}
# On GPUs of 16 and 24 GB (`toy_jobs`).
SHARED_OUT: Final = {"batch_shares": {"16GB": 1, "24GB": 3}}
# Each step has two passes here, and two forwards without the adapter.
SWAPPED: Final = {
    "strategy": "ddp",
    "swap_blocks": 2,
    "preservation": "blank",
    "tread": {"0..1": 0.5},
} | SHARED_OUT
# Before it goes on as if on GPUs of one size.
SWAPPED_BY_CARD: Final = SWAPPED | {"swap_blocks": {"16GB": 3, "24GB": 1}}
# A global batch of 4 on any number of ranks.
ACCUMULATION: Final = {1: 4, 2: 2, 4: 1}


class Folder:
    """Runs, by name."""

    def __init__(self, root: Path, toy: Path) -> None:
        self.root = root
        self.toy = toy

    def values(self, ranks: int = 2, **changes: Any) -> dict[str, Any]:
        return toy_values(
            self.toy,
            **{
                "cache_dir": str(self.root / "cache"),
                "num_processes": ranks,
                "gradient_accumulation_steps": ACCUMULATION[ranks],
                "strategy": "fsdp2" if ranks > 1 else "single",
                "max_train_steps": STEPS,
                "lr_scheduler": "cosine",
                "lr_warmup_steps": 3,
                "caption_dropout_probability": 0.2,
                "random_flip": True,
                "use_ema": True,
                "base_precision": "nf4",  # of a LoRA; a whole run without is in tests/e2e
                "validation_prompts": ["a red circle", "a blue square"],
                "validation_num_inference_steps": 2,
            }
            | changes,
        )

    def run(self, name: str) -> RunDir:
        return RunDir(self.root / name)

    def job(self, name: str, stop_at: int | None = None, ranks: int = 2, **changes: Any) -> Any:
        return (str(self.root / name), self.values(ranks, **changes), stop_at)

    def train(self, ranks: int, *jobs: Any) -> None:
        start_ranks(train, ranks, list(jobs)).join()

    def losses(self, name: str) -> list[tuple[int, float, float | None]]:
        steps = EventLog(self.run(name).events).read_all().steps
        return [(step.step, step.loss, step.grad_norm) for step in steps]

    def contents(self, name: str) -> dict[str, Any]:
        """Every tensor of the newest checkpoint, whole, by a dotted name."""
        newest = list_checkpoints(self.run(name))[-1]
        assert newest.step == STEPS
        whole = self.root / f"{name}.pt"
        dcp_to_torch_save(newest.path, whole)
        return dict(flat("", torch.load(whole, weights_only=False)))

    def pictures(self, name: str) -> dict[str, bytes]:
        files = sorted((self.run(name).samples / f"step-{STEPS}").glob("*.png"))
        return {file.name: file.read_bytes() for file in files}


def flat(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        for key, one in value.items():
            yield from flat(f"{name}.{key}", one)
    else:
        yield name, value


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, toy: Path) -> Folder:
    """Runs of two ranks that went straight, and that were stopped halfway and went on."""
    made = Folder(tmp_path_factory.mktemp("resume"), toy)
    whole = {"model_type": "full", "fsdp_state_dict_type": "FULL_STATE_DICT"}
    made.train(
        2,
        made.job("lora"),
        made.job("lora-halves", HALF),
        made.job("lora-halves"),
        made.job("full", model_type="full"),
        made.job("full-halves", HALF, model_type="full"),
        made.job("full-halves", model_type="full"),
        made.job("schedule-free", **FREE),
        made.job("schedule-free-halves", HALF, **FREE),
        made.job("schedule-free-halves", **FREE),
        made.job("whole-files", HALF, **whole),
        made.job("moving", MOVED[0], lora_placement="sharded"),
        made.job("dora", **DORA),
        made.job("dora-moving", MOVED[0], lora_placement="sharded", **DORA),
        made.job("lokr", **LOKR),
        made.job("lokr-halves", HALF, **LOKR),
        made.job("lokr-halves", **LOKR),
        made.job("lokr-moving", MOVED[0], lora_placement="sharded", **LOKR),
        made.job("swapped", **SWAPPED),
        made.job("swapped-halves", HALF, **SWAPPED_BY_CARD),
        made.job("swapped-halves", **SWAPPED),
        made.job("branch", resume_from_checkpoint=str(made.run("lora-halves").checkpoint(HALF))),
    )
    return made


@pytest.mark.parametrize("kind", ["lora", "lokr", "full", "schedule-free", "swapped"])
def test_half_of_the_steps_and_the_rest_are_all_of_them_bit_for_bit(
    folder: Folder, kind: str
) -> None:
    straight, halves = folder.losses(kind), folder.losses(f"{kind}-halves")
    assert [step for step, *_ in straight] == list(range(1, STEPS + 1))
    assert halves == straight
    assert [c.step for c in list_checkpoints(folder.run(f"{kind}-halves"))] == [HALF, STEPS]
    wanted, found = folder.contents(kind), folder.contents(f"{kind}-halves")
    assert wanted.keys() == found.keys()
    # Tensors.
    trained = {"lora": 44, "lokr": 66, "full": 80, "schedule-free": 80, "swapped": 44}[kind]
    assert sum(name.startswith(".model.") for name in wanted) == trained
    assert sum(name.endswith(".exp_avg_sq") for name in wanted) == trained
    assert sum(name.startswith(".ema.") for name in wanted) == trained
    for name, value in wanted.items():
        same = torch.equal(value, found[name]) if torch.is_tensor(value) else value == found[name]
        assert same, name
    pictures = folder.pictures(kind)
    assert list(pictures) == ["00.png", "01.png"]
    assert folder.pictures(f"{kind}-halves") == pictures


def test_a_run_moves_from_two_ranks_to_four_to_one(folder: Folder) -> None:
    """And from a sharded adapter to a whole one, and to one process that shards nothing."""
    folder.train(
        4,
        folder.job("moving", MOVED[1], ranks=4),
        folder.job("dora-moving", MOVED[1], ranks=4, **DORA),
        folder.job("lokr-moving", MOVED[1], ranks=4, **LOKR),
    )
    folder.train(
        1,
        folder.job("moving", ranks=1),
        folder.job("dora-moving", ranks=1, **DORA),
        folder.job("lokr-moving", ranks=1, **LOKR),
        folder.job(
            "whole-files",
            ranks=1,
            model_type="full",
            fsdp_state_dict_type="SHARDED_STATE_DICT",
        ),
    )
    for name, before in (
        ("moving", "lora"),
        ("dora-moving", "dora"),
        ("lokr-moving", "lokr"),
        ("whole-files", "full"),
    ):
        straight, moved = folder.losses(before), folder.losses(name)
        assert [step for step, *_ in moved] == list(range(1, STEPS + 1))
        for (_, loss, norm), (step, wanted, wanted_norm) in zip(moved, straight, strict=True):
            assert loss == pytest.approx(wanted, rel=1e-5), step
            assert norm == pytest.approx(wanted_norm, rel=1e-4), step
    assert [c.world_size for c in list_checkpoints(folder.run("moving"))] == [2, 4, 1]
    whole = list_checkpoints(folder.run("whole-files"))
    assert [(c.step, c.layout, c.world_size) for c in whole] == [
        (HALF, "full", 2),
        (STEPS, "sharded", 1),
    ]


def test_a_job_goes_on_from_another_jobs_checkpoint(folder: Folder) -> None:
    assert folder.losses("branch") == folder.losses("lora")[HALF:]
    assert list_checkpoints(folder.run("branch"))[-1].step == STEPS
    start = next(
        json.loads(line)
        for line in folder.run("branch").events.read_text().splitlines()
        if json.loads(line)["kind"] == "start"
    )
    assert start["step"] == HALF


def test_a_checkpoint_says_what_it_was_made_by(folder: Folder) -> None:
    state = read_state(list_checkpoints(folder.run("lora"))[-1].path)
    assert state["spec"]["max_train_steps"] == STEPS
    assert state["world_size"] == 2
    assert state["data"]["samples"] == 24
    assert state["digest"]
