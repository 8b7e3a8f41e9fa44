"""Checkpoints of one rank: what is in them, when they are written, which one is loaded."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import sys
import threading
import traceback
from collections import namedtuple
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors import safe_open
from torch.distributed.checkpoint.api import CheckpointException

from engine import checkpoint
from engine.checkpoint import full, sharded
from engine.checkpoint import saver as saver_module
from engine.checkpoint.contents import Contents, collect, expected_bytes
from engine.checkpoint.together import OutOfStepError, SaveError, together
from engine.exports.source import open_checkpoint
from engine.families import load
from engine.model.adapters import lora
from engine.ranks.telemetry import Telemetry
from engine.train.ema import Ema
from engine.train.muon import hidden_matrices
from engine.train.optimizer import build_optimizer, build_scheduler
from engine.train.train_state import TrainState
from jobs.errors import DiskFullError, UserError
from jobs.run.checkpoint_files import STATE_FILE, find_damage, list_checkpoints, read_checkpoint
from jobs.run.events import Scores, Validation
from jobs.run.rundir import RunDir
from tests.support.engine.toy_jobs import ALONE, build, inputs, toy_spec, trained_digest
from tests.support.engine.toy_jobs import save_checkpoint as save
from tests.support.waiting import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from jobs.spec.job_spec import JobSpec

flux = load("flux")

FULL = "FULL_STATE_DICT"
Usage = namedtuple("Usage", "total used free")


def training_of(toy: Path, spec: JobSpec, frozen: str = "") -> TrainState:
    model = build(toy, spec)
    if frozen:
        model.get_submodule(frozen).requires_grad_(False)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    matrices = hidden_matrices(model, spec).values()
    optimizer = build_optimizer(spec, list(trained.values()), ALONE.device, matrices=matrices)
    ema = Ema(trained, spec.ema_decay) if spec.use_ema else None
    return TrainState(model, optimizer, build_scheduler(spec, optimizer), ema)


def advance(training: TrainState, toy: Path, steps: int = 1) -> None:
    for _ in range(steps):
        flux.predict(training.model, **inputs(toy)).square().mean().backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.scheduler.step()
        training.step += 1
        if training.ema is not None:
            training.ema.update(training.step)


def digest_of(training: TrainState) -> str:
    """Of what is trained, its average, and the optimizer's state."""
    state = training.optimizer.state_dict()
    moments = [v for s in state["state"].values() for v in s.values()]
    averages = list(training.ema.shadow.values()) if training.ema else []
    numbers = [float(t.double().abs().sum()) for t in [*moments, *averages]]
    return f"{trained_digest(training.model)} {numbers}"


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.create()
    return made


@pytest.fixture
def saver_of(run_dir: RunDir) -> Iterator[Callable[[JobSpec], checkpoint.Saver]]:
    """Makes savers whose events go to `run_dir`."""
    telemetry = Telemetry(run_dir, 0)
    made: list[checkpoint.Saver] = []

    def make(spec: JobSpec) -> checkpoint.Saver:
        made.append(checkpoint.Saver(spec, run_dir, ALONE, telemetry))
        return made[-1]

    yield make
    for saver in made:
        saver.close()
    telemetry.close()


def events(run_dir: RunDir, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in run_dir.events.read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


# -- what is in them -----------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["SHARDED_STATE_DICT", FULL])
@pytest.mark.parametrize(
    "kind", [{"model_type": "lora"}, {"lora_variant": "dora"}, {"model_type": "full"}], ids=str
)
def test_a_loaded_checkpoint_goes_on_bit_for_bit(
    toy: Path, run_dir: RunDir, kind: dict[str, str], layout: str
) -> None:
    spec = toy_spec(toy, lr_scheduler="cosine", fsdp_state_dict_type=layout, use_ema=True, **kind)
    straight = training_of(toy, spec)
    advance(straight, toy, 2)
    path = save(straight, spec, run_dir)
    advance(straight, toy)

    resumed = training_of(toy, spec)
    checkpoint.load(resumed, path, ALONE)
    assert resumed.step == 2
    advance(resumed, toy)
    assert resumed.scheduler.get_last_lr() == straight.scheduler.get_last_lr()
    assert digest_of(resumed) == digest_of(straight)


@pytest.mark.parametrize("layout", ["SHARDED_STATE_DICT", FULL])
@pytest.mark.parametrize("optimizer", ["adamw", "prodigy", "sgd"])
def test_a_checkpoint_may_hold_more_than_is_trained(
    toy: Path, run_dir: RunDir, optimizer: str, layout: str
) -> None:
    """As those from before a family froze what its losses do not depend on."""
    kind = {"model_type": "full", "fsdp_state_dict_type": layout, "optimizer": optimizer}
    spec, frozen = toy_spec(toy, **kind), "norm_out"
    more = training_of(toy, spec)
    advance(more, toy, 2)
    path = save(more, spec, run_dir)

    fewer = training_of(toy, spec, frozen)
    published = [p.clone() for p in fewer.model.get_submodule(frozen).parameters()]
    checkpoint.load(fewer, path, ALONE)
    assert fewer.step == 2
    trained, before = fewer.trained(), more.trained()
    assert len(trained) == len(before) - len(published)
    for name, parameter in trained.items():
        assert torch.equal(parameter, before[name])
        states = fewer.optimizer.state[parameter], more.optimizer.state[before[name]]
        assert states[0].keys() == states[1].keys()
        assert all(
            torch.equal(*map(torch.as_tensor, pair))
            for pair in zip(*map(dict.values, states), strict=True)
        )
    kept = fewer.model.get_submodule(frozen).parameters()
    assert all(map(torch.equal, kept, published))
    advance(fewer, toy)


@pytest.mark.parametrize(
    "optimizer", ["sgd", "adafactor", "prodigy", "lion", "adamw_schedule_free", "came", "muon"]
)
def test_the_full_layout_holds_what_every_optimizer_keeps(
    toy: Path, run_dir: RunDir, optimizer: str
) -> None:
    spec = toy_spec(toy, optimizer=optimizer, fsdp_state_dict_type=FULL, learning_rate=0.01)
    straight = training_of(toy, spec)
    advance(straight, toy, 2)
    path = save(straight, spec, run_dir)
    advance(straight, toy, 2)
    resumed = training_of(toy, spec)
    checkpoint.load(resumed, path, ALONE)
    advance(resumed, toy, 2)
    assert trained_digest(resumed.model) == trained_digest(straight.model)


def test_a_full_checkpoint_is_read_by_any_tool(toy: Path, run_dir: RunDir) -> None:
    spec = toy_spec(toy, model_type="full", fsdp_state_dict_type=FULL)
    training = training_of(toy, spec)
    path = save(training, spec, run_dir)
    with safe_open(path / "model.safetensors", "pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    state = training.model.state_dict()
    assert stored.keys() == state.keys()
    assert all(torch.equal(stored[name], state[name]) for name in state)
    found = read_checkpoint(path)
    assert found is not None
    assert (found.layout, found.world_size, found.ema) == ("full", 1, False)


def test_saving_before_the_first_step_changes_nothing(toy: Path, run_dir: RunDir) -> None:
    spec = toy_spec(toy)
    untouched, saved, resumed = (training_of(toy, spec) for _ in range(3))
    path = save(saved, spec, run_dir)
    checkpoint.load(resumed, path, ALONE)
    digests = set()
    for training in (untouched, saved, resumed):
        advance(training, toy)
        digests.add(trained_digest(training.model))
    assert len(digests) == 1


@pytest.mark.parametrize("layout", ["SHARDED_STATE_DICT", FULL])
def test_a_lora_checkpoint_holds_no_base_weight(toy: Path, run_dir: RunDir, layout: str) -> None:
    spec = toy_spec(toy, fsdp_state_dict_type=layout)
    training = training_of(toy, spec)
    found = read_checkpoint(save(training, spec, run_dir))
    assert found is not None
    adapter = sum(p.numel() * 4 for p in lora.lora_parameters(training.model).values())
    base = sum(p.numel() * 4 for p in training.model.parameters()) - adapter
    assert 3 * adapter <= found.bytes < base / 4  # weights and two moments, and file headers
    contents = checkpoint.collect(training, spec, 1)
    assert 3 * adapter <= contents.total_bytes == contents.own_bytes < 3.1 * adapter


def test_a_job_with_another_rate_trains_at_that_rate(toy: Path, run_dir: RunDir) -> None:
    before = toy_spec(toy, lr_scheduler="linear", max_train_steps=10, weight_decay=0.1)
    training = training_of(toy, before)
    advance(training, toy, 5)
    path = save(training, before, run_dir)
    now = toy_spec(
        toy, lr_scheduler="linear", max_train_steps=20, learning_rate=2e-3, weight_decay=0.3
    )
    resumed = training_of(toy, now)
    checkpoint.load(resumed, path, ALONE)
    group = resumed.optimizer.param_groups[0]
    assert group["lr"] == pytest.approx(2e-3 * (1 - 5 / 20))
    assert resumed.scheduler.get_last_lr() == [group["lr"]]
    assert group["weight_decay"] == 0.3
    advance(resumed, toy)
    assert resumed.scheduler.get_last_lr() == [pytest.approx(2e-3 * (1 - 6 / 20))]


@pytest.mark.parametrize("layout", ["SHARDED_STATE_DICT", FULL])
def test_a_checkpoint_has_the_average_of_a_schedule_free_optimizer(
    toy: Path, run_dir: RunDir, layout: str
) -> None:
    spec = toy_spec(toy, optimizer="adamw_schedule_free", fsdp_state_dict_type=layout)
    training = training_of(toy, spec)
    advance(training, toy, 3)
    averages = {name: average.clone() for name, average in training.averages().items()}
    path = save(training, spec, run_dir)
    found = read_checkpoint(path)
    assert found is not None
    assert found.ema
    for ema, expected in ((True, averages), (False, training.trained())):
        source = open_checkpoint(found, ema=ema)
        stored = {name: source.read(name) for name in expected}
        assert all(torch.equal(stored[name], expected[name]) for name in expected)
    assert any(not torch.equal(averages[n], p) for n, p in training.trained().items())
    # Other betas put the same average elsewhere.
    other = toy_spec(toy, optimizer="adamw_schedule_free", adam_beta1=0.8)
    resumed = training_of(toy, other)
    checkpoint.load(resumed, path, ALONE)
    assert resumed.optimizer.param_groups[0]["betas"] == (0.8, 0.999)
    for name, average in resumed.averages().items():
        torch.testing.assert_close(average, averages[name], rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_an_average_may_begin_with_a_resume_and_end_with_one(toy: Path, run_dir: RunDir) -> None:
    plain, averaged = toy_spec(toy), toy_spec(toy, use_ema=True)
    training = training_of(toy, plain)
    advance(training, toy)
    path = save(training, plain, run_dir)
    begun = training_of(toy, averaged)
    checkpoint.load(begun, path, ALONE)
    assert begun.ema is not None
    trained = begun.trained()
    assert all(torch.equal(begun.ema.shadow[name], trained[name]) for name in trained)
    advance(begun, toy)
    path = save(begun, averaged, run_dir)
    ended = training_of(toy, plain)
    checkpoint.load(ended, path, ALONE)
    assert trained_digest(ended.model) == trained_digest(begun.model)


def test_a_checkpoint_of_another_shape_is_refused_in_words(toy: Path, run_dir: RunDir) -> None:
    wide = toy_spec(toy, lora_rank=8, fsdp_state_dict_type=FULL)
    path = save(training_of(toy, wide), wide, run_dir)
    narrow = toy_spec(toy, lora_rank=4)
    with pytest.raises(UserError, match=r"\(4, \d+\) here, but the checkpoint step-0 has it as"):
        checkpoint.load(training_of(toy, narrow), path, ALONE)


# -- which one is loaded -------------------------------------------------------------------


def test_damage_is_found_and_named(toy: Path, run_dir: RunDir) -> None:
    spec = toy_spec(toy)
    path = save(training_of(toy, spec), spec, run_dir)
    assert find_damage(path) is None
    victim = next(path.glob("*.distcp"))
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    assert victim.name in (find_damage(path) or "")
    victim.unlink()
    assert "missing" in (find_damage(path) or "")


def test_a_damaged_checkpoint_is_passed_over_for_an_older_one(toy: Path, run_dir: RunDir) -> None:
    spec = toy_spec(toy)
    training = training_of(toy, spec)
    for training.step in (1, 2):
        path = save(training, spec, run_dir)
    next(path.glob("*.distcp")).write_bytes(b"torn")
    said: list[str] = []
    assert checkpoint.choose_start(run_dir, None, ALONE, said.append) == run_dir.checkpoint(1)
    assert len(said) == 1
    assert "step-2 is damaged" in said[0]
    assert run_dir.complete_checkpoints() == [(1, run_dir.checkpoint(1))]
    assert (run_dir.checkpoints / "step-2.damaged").is_dir()


def test_a_run_without_a_sound_checkpoint_does_not_begin_anew_by_itself(
    toy: Path, run_dir: RunDir
) -> None:
    spec = toy_spec(toy)
    training = training_of(toy, spec)
    for training.step in (1, 2):
        next(save(training, spec, run_dir).glob("*.distcp")).write_bytes(b"torn")
    with pytest.raises(UserError, match=r"all checkpoints .*step-2: .*step-1: .*--from 0"):
        checkpoint.choose_start(run_dir, None, ALONE, lambda line: None)
    assert len(run_dir.complete_checkpoints()) == 2, "nothing is renamed"


def test_a_checkpoint_that_cannot_be_read_is_not_called_damaged(
    toy: Path, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> str:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    spec = toy_spec(toy)
    save(training_of(toy, spec), spec, run_dir)
    monkeypatch.setattr("jobs.run.checkpoint_files.sha256", fail)
    with pytest.raises(UserError, match=r"cannot read .*step-0.* \(Input/output error\)"):
        checkpoint.choose_start(run_dir, None, ALONE, lambda line: None)
    assert run_dir.latest_checkpoint() == (0, run_dir.checkpoint(0))


def test_a_named_checkpoint_counts_until_there_is_an_own_one(
    toy: Path, run_dir: RunDir, tmp_path: Path
) -> None:
    spec = toy_spec(toy)
    training = training_of(toy, spec)
    training.step = 7
    other = save(training, spec, RunDir(tmp_path / "other"))
    said: list[str] = []
    assert checkpoint.choose_start(run_dir, str(other), ALONE, said.append) == other
    training.step = 3
    own = save(training, spec, run_dir)
    assert checkpoint.choose_start(run_dir, str(other), ALONE, said.append) == own


def test_a_damaged_named_checkpoint_is_refused_and_left_alone(
    toy: Path, run_dir: RunDir, tmp_path: Path
) -> None:
    spec = toy_spec(toy)
    other = save(training_of(toy, spec), spec, RunDir(tmp_path / "other"))
    (other / STATE_FILE).write_text("{}")
    with pytest.raises(UserError, match=r"resume_from_checkpoint: .*step-0 cannot be used"):
        checkpoint.choose_start(run_dir, str(other), ALONE, lambda line: None)
    assert other.is_dir()


# -- when they are written -----------------------------------------------------------------


def test_only_the_newest_checkpoints_are_kept(
    toy: Path, run_dir: RunDir, saver_of: Callable[[JobSpec], checkpoint.Saver]
) -> None:
    spec = toy_spec(toy, checkpoints_total_limit=2)
    training, saver = training_of(toy, spec), saver_of(spec)
    for training.step in (1, 2, 3):
        saver.save(training)
    saver.finish()
    assert sorted(p.name for p in run_dir.checkpoints.iterdir()) == ["step-2", "step-3"]
    assert [e["step"] for e in events(run_dir, "checkpoint")] == [1, 2, 3]
    assert all(e["bytes"] > 0 for e in events(run_dir, "checkpoint"))


@pytest.mark.parametrize("by", ["validation_loss", "clip_t"])
def test_the_limit_deletes_no_checkpoint_of_the_best(
    toy: Path, run_dir: RunDir, saver_of: Callable[[JobSpec], checkpoint.Saver], by: str
) -> None:
    """Each is judged after it was saved; a resume knows what was measured before."""
    keys: dict[str, Any] = {"validation_prompts": ["a"], "validation_scores": ["clip_t"]}
    keys |= {"checkpoints_total_limit": 1, "checkpoints_keep_best": 2, "checkpoints_best_by": by}
    spec = toy_spec(toy, **keys)
    training, losses = training_of(toy, spec), {1: 3.0, 2: 1.0, 3: 2.0, 4: 4.0, 5: 0.5, 6: 9.0}

    def steps_after(*steps: int) -> list[int]:
        saver = saver_of(spec)
        for training.step in steps:
            saver.save(training)
            saver.finish()
            loss = losses[training.step]
            with run_dir.events.open("a") as file:
                file.write(Validation(training.step, loss if by == "validation_loss" else 1).line())
                file.write(Scores(training.step, clip_t=-loss / 9).line())
        return [step for step, _ in run_dir.complete_checkpoints()]

    assert steps_after(1, 2, 3) == [1, 2, 3]
    assert steps_after(4) == [2, 3, 4], "1 is the worst of those before"
    assert steps_after(5, 6) == [2, 5, 6]
    run_dir.events.unlink()
    assert steps_after(7 - 3) == [2, 4, 5, 6], "nothing is deleted while nothing is known"


def test_a_complete_checkpoint_of_the_step_is_left_as_it_is(
    toy: Path, run_dir: RunDir, saver_of: Callable[[JobSpec], checkpoint.Saver]
) -> None:
    spec = toy_spec(toy)
    training, saver = training_of(toy, spec), saver_of(spec)
    saver.save(training, last=True)
    before = (run_dir.checkpoint(0) / "manifest.json").stat().st_mtime_ns
    saver.save(training, last=True)
    assert (run_dir.checkpoint(0) / "manifest.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("behind", [True, False])
def test_what_is_written_is_what_was_when_it_was_asked_for(
    toy: Path,
    run_dir: RunDir,
    saver_of: Callable[[JobSpec], checkpoint.Saver],
    monkeypatch: pytest.MonkeyPatch,
    behind: bool,
) -> None:
    """Training goes on while the thread has not even begun to write."""
    gate = threading.Event()
    write = checkpoint.write

    def held(*arguments: Any) -> int:
        assert gate.wait(PATIENCE)
        return write(*arguments)

    monkeypatch.setattr(saver_module, "write", held)
    spec = toy_spec(toy, checkpointing_async=behind, use_ema=True)
    training, saver = training_of(toy, spec), saver_of(spec)
    advance(training, toy)
    wanted = digest_of(training)
    if not behind:
        gate.set()
    saver.save(training)
    assert (run_dir.latest_checkpoint() is None) is behind
    advance(training, toy, 2)
    gate.set()
    saver.finish()
    resumed = training_of(toy, spec)
    checkpoint.load(resumed, run_dir.checkpoint(1), ALONE)
    assert digest_of(resumed) == wanted
    # The copy's memory is used again, for what is then.
    wanted = digest_of(training)
    saver.save(training)
    advance(training, toy)
    saver.finish()
    checkpoint.load(resumed, run_dir.checkpoint(3), ALONE)
    assert digest_of(resumed) == wanted


def test_all_ranks_of_a_machine_may_copy_to_half_of_its_free_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(saver_module, "available_memory", lambda: 80)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert [saver_module._fits_in_memory(part) for part in (9, 10, 11)] == [True, True, False]
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert [saver_module._fits_in_memory(part) for part in (40, 41)] == [True, False]


def test_progress_is_in_mebibytes_of_which_the_last_counts_whole() -> None:
    numbers = [0, 1, 1 << 20, (1 << 20) + 1, 5 << 20]
    assert list(map(saver_module._mebibytes, numbers)) == [0, 1, 1, 2, 5]


@pytest.mark.parametrize("can_be_copied", [True, False])
def test_training_waits_for_saves_that_cannot_be_copied_to_memory(
    toy: Path,
    run_dir: RunDir,
    saver_of: Callable[[JobSpec], checkpoint.Saver],
    can_be_copied: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(saver_module, "_fits_in_memory", lambda part: not can_be_copied)
    monkeypatch.setattr(Contents, "can_be_copied", can_be_copied)
    spec = toy_spec(toy)
    saver_of(spec).save(training_of(toy, spec))
    assert run_dir.latest_checkpoint() == (0, run_dir.checkpoint(0)), "complete at once"
    told = capfd.readouterr().out
    assert "checkpoints are written while training waits" in told
    assert "saved step-0 (" in told


@pytest.mark.slow
def test_8_bit_state_is_saved_while_training_waits_and_goes_on(
    toy: Path, run_dir: RunDir, saver_of: Callable[[JobSpec], checkpoint.Saver]
) -> None:
    """Torch's stager does not know such tensors; there are some from 4,096 numbers on."""
    spec = toy_spec(toy, optimizer="adamw_8bit", lora_rank=32)
    straight, saver = training_of(toy, spec), saver_of(spec)
    advance(straight, toy, 2)
    contents = checkpoint.collect(straight, spec, 1)
    assert not contents.can_be_copied
    assert contents.own_bytes < sum(p.numel() * 8 for p in straight.trained().values())
    saver.save(straight)
    advance(straight, toy)
    resumed = training_of(toy, spec)
    checkpoint.load(resumed, run_dir.checkpoint(2), ALONE)
    advance(resumed, toy)
    assert trained_digest(resumed.model) == trained_digest(straight.model)


def test_a_save_is_completed_before_a_failed_rank_ends(
    toy: Path,
    run_dir: RunDir,
    saver_of: Callable[[JobSpec], checkpoint.Saver],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write = checkpoint.write
    go_on = threading.Event()

    def slow(*arguments: Any) -> int:
        assert go_on.wait(PATIENCE)
        return write(*arguments)

    monkeypatch.setattr(saver_module, "write", slow)
    spec = toy_spec(toy, checkpointing_async=True)
    training, saver = training_of(toy, spec), saver_of(spec)
    saver.save(training)
    assert run_dir.latest_checkpoint() is None
    threading.Timer(0.3, go_on.set).start()
    saver.rescue()
    assert run_dir.latest_checkpoint() == (0, run_dir.checkpoint(0))


def test_a_save_that_another_rank_has_left_is_not_waited_for(
    toy: Path,
    run_dir: RunDir,
    saver_of: Callable[[JobSpec], checkpoint.Saver],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = threading.Event()
    monkeypatch.setattr(saver_module, "write", lambda *arguments: left.wait(PATIENCE))
    monkeypatch.setattr(saver_module, "_RESCUE_SECONDS", 0.5)
    spec = toy_spec(toy, checkpointing_async=True)
    saver = saver_of(spec)
    saver.save(training_of(toy, spec))
    saver.rescue()
    assert not left.is_set()
    assert run_dir.latest_checkpoint() is None
    left.set()


def test_closing_ends_the_thread_and_frees_the_copy(
    toy: Path, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed: list[str] = []
    close = saver_module.DefaultStager.close

    def spy(stager: Any) -> None:
        freed.append("copy")
        close(stager)

    monkeypatch.setattr(saver_module.DefaultStager, "close", spy)
    spec = toy_spec(toy, checkpointing_async=True)
    telemetry = Telemetry(run_dir, 0)
    before = set(threading.enumerate())
    saver = checkpoint.Saver(spec, run_dir, ALONE, telemetry)
    own = [one for one in threading.enumerate() if one.name == "save_0" and one not in before]
    assert len(own) == 1
    saver.save(training_of(toy, spec))
    saver.finish()
    assert freed == [], "its memory is used again"
    saver.close()
    assert freed == ["copy"]
    assert not any(one.is_alive() for one in own)
    telemetry.close()


# -- failures ------------------------------------------------------------------------------


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2**30, 2**30 - 2**20, 2**20))


@pytest.fixture
def short_files() -> Iterator[None]:
    """No file of this process can grow beyond 64 KiB: writing fails in the middle of one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_save_without_room_is_not_begun(
    toy: Path, run_dir: RunDir, saver_of: Callable[[JobSpec], checkpoint.Saver], no_room: None
) -> None:
    spec = toy_spec(toy)
    training, saver = training_of(toy, spec), saver_of(spec)
    with pytest.raises(DiskFullError, match=r"no room for a checkpoint: it takes .* 1 MiB"):
        saver.check_room(training)
    with pytest.raises(
        DiskFullError, match=r"cannot save step-0: it takes .*on_save_failure: warn"
    ):
        saver.save(training)
    assert not run_dir.checkpoints.exists()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_ema": True},
        {"optimizer": "sgd"},
        {"optimizer": "lion"},
        {"optimizer": "adamw_schedule_free"},
    ],
)
def test_the_room_looked_for_before_the_first_step_is_what_a_save_takes(
    toy: Path, changes: dict[str, Any]
) -> None:
    spec = toy_spec(toy, **changes)
    training = training_of(toy, spec)
    expected = expected_bytes(training, spec)
    assert not training.optimizer.state, "nothing was made for that"
    advance(training, toy)
    saved = collect(training, spec, 1).total_bytes
    assert 0 <= saved - expected <= 4 * len(training.trained()), "but for Adam's step counts"


@pytest.mark.parametrize("layout", ["SHARDED_STATE_DICT", FULL])
@pytest.mark.parametrize("behind", [True, False])
def test_a_save_that_fails_halfway_leaves_the_older_ones_intact(
    toy: Path,
    run_dir: RunDir,
    saver_of: Callable[[JobSpec], checkpoint.Saver],
    request: pytest.FixtureRequest,
    layout: str,
    behind: bool,
) -> None:
    if layout == FULL and behind:
        pytest.skip("the full layout is always waited for")
    spec = toy_spec(toy, checkpointing_async=behind, fsdp_state_dict_type=layout)
    training, saver = training_of(toy, spec), saver_of(spec)
    saver.save(training, last=True)
    advance(training, toy)
    request.getfixturevalue("short_files")
    if behind:
        saver.save(training)
    wanted = r"cannot save step-1: File too large \(tried twice\); step-0 is intact"
    with pytest.raises(UserError, match=wanted):
        saver.finish() if behind else saver.save(training)
    assert [c.step for c in list_checkpoints(run_dir)] == [0]
    assert find_damage(run_dir.checkpoint(0)) is None
    assert os.listdir(run_dir.checkpoints) == ["step-0"], "the half one takes no space"


@pytest.mark.parametrize("said", ["enforce fail at inline_container.cc:672", "no room"])
def test_what_torch_says_of_a_full_disk_is_said_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    free = Usage(2**30, 2**30, 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    failure: Exception = RuntimeError(f"{said} . unexpected pos 64 vs 0")
    if said == "no room":
        failure.__context__ = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    found = sharded._of_the_disk(failure, tmp_path)
    assert found is not None
    assert found.strerror == "No space left on device"
    free = Usage(2**40, 0, 2**40)
    assert sharded._of_the_disk(RuntimeError("shapes differ"), tmp_path) is None


def test_a_job_may_train_on_without_a_checkpoint_but_not_end(
    toy: Path, run_dir: RunDir, saver_of: Callable[[JobSpec], checkpoint.Saver], no_room: None
) -> None:
    spec = toy_spec(toy, on_save_failure="warn")
    training, saver = training_of(toy, spec), saver_of(spec)
    saver.check_room(training)
    saver.save(training)
    messages = [e["message"] for e in events(run_dir, "warning")]
    assert len(messages) == 2
    assert "cannot save step-0" in messages[1]
    assert messages[1].endswith("there is no other checkpoint; training continues")
    with pytest.raises(UserError, match="cannot save step-0"):
        saver.save(training, last=True)


def test_a_failure_behind_training_is_noticed(
    toy: Path,
    run_dir: RunDir,
    saver_of: Callable[[JobSpec], checkpoint.Saver],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*arguments: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saver_module, "write", fail)
    spec = toy_spec(toy, checkpointing_async=True, on_save_failure="warn")
    training, saver = training_of(toy, spec), saver_of(spec)
    saver.save(training)
    while not saver.failed():
        threading.Event().wait(0.01)
    saver.tell()
    assert events(run_dir, "checkpoint") == []
    saver.finish()
    assert not saver.failed(), "told once"
    assert "No space left on device (tried twice)" in events(run_dir, "warning")[0]["message"]


def test_a_save_behind_training_takes_as_long_as_it_is_written(
    toy: Path,
    run_dir: RunDir,
    saver_of: Callable[[JobSpec], checkpoint.Saver],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However long training then samples before it asks: the time left goes by it."""
    now, written = [100.0], threading.Event()

    def write(*arguments: Any) -> int:
        now[0] += 3.0
        return 7

    monkeypatch.setattr(saver_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(saver_module, "write", write)
    saver = saver_of(spec := toy_spec(toy, checkpointing_async=True))
    saver.save(training_of(toy, spec))
    saver._thread.submit(written.set)
    assert written.wait(PATIENCE)
    now[0] += 60.0
    saver.finish()
    assert [event["seconds"] for event in events(run_dir, "checkpoint")] == [3.0]


class OddError(Exception):
    """Of a type that nobody expects."""


WRITE = sys.modules["engine.checkpoint.write"]  # the package has a function of that name
ODD = [
    RuntimeError,
    ValueError,
    TypeError,
    MemoryError,
    OSError,
    OddError,
    torch.OutOfMemoryError,
    CheckpointException,
    UserError,
]
PARTS = {
    "collecting": (saver_module, "collect"),
    "copying": (saver_module.DefaultStager, "stage"),
    "writing sharded": (sharded, "write_tensors"),
    "writing whole files": (full.SafetensorsWriter, "add"),
    "hashing": (WRITE, "sha256"),
    "finishing": (WRITE, "write_atomic"),
}


def odd(kind: type[BaseException]) -> BaseException:
    if kind is CheckpointException:
        return CheckpointException("write", {0: (ValueError("bad"), traceback.StackSummary())})
    return OSError(errno.EIO, "bad") if kind is OSError else kind("bad")


def break_part(
    monkeypatch: pytest.MonkeyPatch, part: str, kind: type[BaseException], times: int
) -> list[None]:
    """Have a part of saving raise so many times; grows by one each time."""
    owner, name = PARTS[part]
    works = getattr(owner, name)
    raised: list[None] = []

    def fail(*words: Any, **more: Any) -> Any:
        if len(raised) >= times:
            return works(*words, **more)
        raised.append(None)
        raise odd(kind)

    monkeypatch.setattr(owner, name, fail)
    return raised


def broken_job(toy: Path, part: str, **changes: Any) -> JobSpec:
    layout = FULL if part == "writing whole files" else "SHARDED_STATE_DICT"
    return toy_spec(toy, checkpointing_async=layout != FULL, fsdp_state_dict_type=layout, **changes)


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("part", ["copying", "writing sharded"])
def test_whatever_a_save_raises_the_next_try_saves_what_was_trained(
    toy: Path,
    run_dir: RunDir,
    saver_of: Callable[[JobSpec], checkpoint.Saver],
    monkeypatch: pytest.MonkeyPatch,
    part: str,
    kind: type[BaseException],
) -> None:
    spec = broken_job(toy, part)
    training, saver = training_of(toy, spec), saver_of(spec)
    raised = break_part(monkeypatch, part, kind, times=1)
    saver.save(training)  # behind training's back
    saver.finish()
    assert raised == [None]
    assert [c.step for c in list_checkpoints(run_dir)] == [0]
    assert find_damage(run_dir.checkpoint(0)) is None
    (warning,) = events(run_dir, "warning")
    assert warning["message"].startswith("could not save step-0 at first: ")
    assert "bad" in warning["message"]
    assert warning["message"].endswith("; saved step-0 synchronously")
    saver.save(training)
    advance(training, toy)
    saver.save(training)
    assert [c.step for c in list_checkpoints(run_dir)] == [0, 1], "complete: training waits now"


@pytest.mark.parametrize("part", [part for part in PARTS if part != "copying"])
@pytest.mark.parametrize("last", [False, True])
def test_whatever_part_of_a_save_fails_twice_the_last_checkpoint_stays(
    toy: Path,
    run_dir: RunDir,
    saver_of: Callable[[JobSpec], checkpoint.Saver],
    monkeypatch: pytest.MonkeyPatch,
    part: str,
    last: bool,
) -> None:
    spec = broken_job(toy, part)
    training, saver = training_of(toy, spec), saver_of(spec)
    saver.save(training, last=True)
    advance(training, toy)
    break_part(monkeypatch, part, OddError, times=99)

    def save_and_wait() -> None:
        saver.save(training, last=last)
        saver.finish()

    with pytest.raises(UserError) as refused:
        save_and_wait()
    assert refused.value.message == (
        "cannot save step-1: OddError: bad (tried twice); step-0 is intact"
    )
    assert [c.step for c in list_checkpoints(run_dir)] == [0]
    assert os.listdir(run_dir.checkpoints) == ["step-0"], "the half one takes no space"
    assert find_damage(run_dir.checkpoint(0)) is None


@pytest.mark.parametrize("kind", [RuntimeError, OddError, CheckpointException])
def test_a_job_trains_on_whatever_a_save_raises_if_it_is_to_warn_only(
    toy: Path,
    run_dir: RunDir,
    saver_of: Callable[[JobSpec], checkpoint.Saver],
    monkeypatch: pytest.MonkeyPatch,
    kind: type[BaseException],
) -> None:
    spec = broken_job(toy, "writing sharded", on_save_failure="warn")
    training, saver = training_of(toy, spec), saver_of(spec)
    raised = break_part(monkeypatch, "writing sharded", kind, times=2)
    saver.save(training)
    saver.finish()
    assert len(raised) == 2
    (warning,) = events(run_dir, "warning")
    assert warning["message"].endswith(
        "bad (tried twice); there is no other checkpoint; training continues"
    )
    saver.save(training)
    saver.finish()
    assert [c.step for c in list_checkpoints(run_dir)] == [0], "and saves at the next occasion"


def test_a_save_behind_training_that_fails_is_made_up_for_at_the_present_step(
    toy: Path,
    run_dir: RunDir,
    saver_of: Callable[[JobSpec], checkpoint.Saver],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    spec = toy_spec(toy, checkpointing_async=True)
    training, saver = training_of(toy, spec), saver_of(spec)
    break_part(monkeypatch, "writing sharded", OddError, times=1)
    saver.save(training)
    advance(training, toy, 2)
    saver.finish()
    assert "cannot save step-0: OddError: bad; retrying synchronously" in capfd.readouterr().out
    assert [c.step for c in list_checkpoints(run_dir)] == [2]
    resumed = training_of(toy, spec)
    checkpoint.load(resumed, run_dir.checkpoint(2), ALONE)
    assert digest_of(resumed) == digest_of(training)


def test_a_rank_that_could_not_gather_a_tensor_ends_and_does_not_wait_for_the_others() -> None:
    def leave() -> None:
        raise OutOfStepError("weight") from torch.OutOfMemoryError("full")

    others = replace(ALONE, size=2)
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        together(leave, others)
    with pytest.raises(SaveError, match="OutOfMemoryError: full"):
        together(leave, ALONE)
