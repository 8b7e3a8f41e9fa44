"""Checkpoints of a model of one weight: their files, and how a run begins from one."""

from __future__ import annotations

import errno
import json
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from engine import checkpoint
from engine.checkpoint import full, sharded
from engine.checkpoint import resume as checkpoint_resume
from engine.checkpoint.contents import Contents, tensors_of
from engine.checkpoint.resume import resume
from engine.checkpoint.together import OutOfStepError, SaveError, together, words_of
from engine.checkpoint.write import aside_of, keep_newest
from engine.ranks.telemetry import Telemetry
from engine.ranks.world import World
from engine.run_job import start_training
from jobs.errors import UserError
from jobs.run.checkpoint_files import STATE_FILE, find_damage, read_checkpoint
from jobs.run.rundir import MANIFEST, RunDir
from tests.support.engine.run_context import run_context
from tests.support.engine.toy_jobs import ALONE, Line, toy_spec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from engine.train.train_state import TrainState
    from jobs.spec.job_spec import JobSpec

DATA = {"samples": 4, "steps_per_epoch": 2, "plan": 2, "digest": "a"}


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.create()
    return made


@pytest.fixture
def telemetry(run_dir: RunDir) -> Iterator[Telemetry]:
    one = Telemetry(run_dir, 0)
    yield one
    one.close()


def trained(spec: JobSpec, steps: int = 2) -> TrainState:
    training = start_training(spec, Line(), ALONE)
    for _ in range(steps):
        training.model(torch.ones(1)).square().sum().backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.scheduler.step()
        training.step += 1
        if training.ema is not None:
            training.ema.update(training.step)
    return training


def save(training: TrainState, spec: JobSpec, run_dir: RunDir, **data: Any) -> Path:
    path = run_dir.checkpoint(training.step)
    checkpoint.write(checkpoint.collect(training, spec, 1, data or None), path, ALONE)
    return path


# -- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [("fp16", "no"), ("no", "fp16"), ("fp16", "fp16")])
def test_the_loss_scale_goes_on_where_both_have_one(
    tmp_path: Path, run_dir: RunDir, before: str, after: str
) -> None:
    spec = toy_spec(tmp_path, mixed_precision=before)
    training = trained(spec)
    if training.scaler is not None:
        training.scaler.scale(torch.ones(()))
        training.scaler.update(64.0)
    save(training, spec, run_dir)
    resumed = start_training(toy_spec(tmp_path, mixed_precision=after), Line(), ALONE)
    checkpoint.load(resumed, run_dir.checkpoint(2), ALONE)
    assert resumed.step == 2
    assert (resumed.scaler is not None) == (after == "fp16")
    if resumed.scaler is not None:
        assert (resumed.scaler.get_scale() == 64.0) == (before == "fp16")


@pytest.mark.parametrize("absent", [MANIFEST, STATE_FILE])
def test_what_misses_a_part_is_no_checkpoint(tmp_path: Path, run_dir: RunDir, absent: str) -> None:
    spec = toy_spec(tmp_path)
    training = trained(spec)
    save(training, spec, run_dir)
    (run_dir.checkpoint(2) / absent).unlink()
    with pytest.raises(UserError, match="is not a complete checkpoint"):
        checkpoint.load(training, run_dir.checkpoint(2), ALONE)


@pytest.mark.parametrize("main", [True, False])
def test_a_rank_that_cannot_gather_a_tensor_leaves_at_once(
    tmp_path: Path, main: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(tensor: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(full, "gather", fails)
    with pytest.raises(OutOfStepError, match=r"b\.weight") as caught:
        full._write_part({"b.weight": torch.zeros(2)}, tmp_path / "part", main=main)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_averages_can_be_left_out(tmp_path: Path) -> None:
    training = trained(toy_spec(tmp_path, use_ema=True))
    assert set(tensors_of(training, "sharded")) == {"model", "optimizer", "ema"}
    assert set(tensors_of(training, "sharded", ema=False)) == {"model", "optimizer"}


def test_a_tensor_made_of_others_takes_what_they_take() -> None:
    class EightBit(torch.Tensor):
        codes = torch.zeros(10, dtype=torch.uint8)
        scale = torch.zeros(2)

        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return ["codes", "scale"], None

    one = torch.zeros(10).as_subclass(EightBit)
    contents = Contents(0, "sharded", {"state": [one, torch.zeros(3)]}, {}, 1)
    assert contents.own_bytes == (10 + 2 * 4) + 3 * 4
    assert contents.total_bytes == (10 + 2 * 4) + 3 * 4


@pytest.mark.parametrize("layout", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
@pytest.mark.parametrize("use_ema", [False, True])
def test_the_manifest_says_what_is_in_it(
    tmp_path: Path, run_dir: RunDir, use_ema: bool, layout: str
) -> None:
    spec = toy_spec(tmp_path, use_ema=use_ema, fsdp_state_dict_type=layout)
    found = read_checkpoint(path := save(trained(spec), spec, run_dir))
    assert found is not None
    assert (found.step, found.ema, found.world_size) == (2, use_ema, 1)
    assert found.layout == layout.split("_")[0].lower()
    files = {file.name: file.stat().st_size for file in path.iterdir() if file.name != MANIFEST}
    listed = json.loads((path / MANIFEST).read_text())["files"]
    assert {name: one["bytes"] for name, one in listed.items()} == files
    assert found.bytes == sum(files.values())
    assert find_damage(path) is None


def test_what_killed_attempts_left_is_not_in_a_checkpoint(tmp_path: Path, run_dir: RunDir) -> None:
    spec = toy_spec(tmp_path)
    final = run_dir.checkpoint(2)
    for rest in (final, aside_of(final)):
        rest.mkdir(parents=True)
        (rest / "torn").write_text("half")
    assert save(trained(spec), spec, run_dir) == final
    assert find_damage(final) is None
    assert not (final / "torn").exists()
    assert not aside_of(final).exists()


def test_a_file_that_no_rank_wrote_is_an_error_and_no_checkpoint(
    tmp_path: Path, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, write = toy_spec(tmp_path), sharded.write_tensors

    def and_another(contents: Any, directory: Path, group: Any) -> None:
        write(contents, directory, group)
        (directory / "stray").touch()

    monkeypatch.setattr(sharded, "write_tensors", and_another)
    with pytest.raises((RuntimeError, SaveError), match=r"files that no rank wrote, .*\['stray'\]"):
        save(trained(spec), spec, run_dir)
    assert not run_dir.checkpoint(2).exists()


@pytest.mark.parametrize(
    ("limit", "kept"), [(None, [1, 2, 3]), (5, [1, 2, 3]), (3, [1, 2, 3]), (1, [3])]
)
def test_the_newest_are_kept(
    tmp_path: Path, run_dir: RunDir, limit: int | None, kept: list[int]
) -> None:
    spec = toy_spec(tmp_path)
    training = trained(spec, 0)
    for training.step in (1, 2, 3):
        save(training, spec, run_dir)
    keep_newest(run_dir.complete_checkpoints(), limit)
    assert [step for step, _ in run_dir.complete_checkpoints()] == kept


def failed_on(rank: int, error: Exception) -> CheckpointException:
    return CheckpointException("save", {rank: (error, None)})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (OSError("odd"), "rank 3: OSError: odd"),
        (UserError("the message"), "the message"),
        (ValueError("two\n  lines"), "rank 3: ValueError: two lines"),
        (ValueError(), "rank 3: ValueError"),
        (ValueError("x" * 300), f"rank 3: ValueError: {'x' * 199}…"),
        (ValueError("x" * 200), f"rank 3: ValueError: {'x' * 200}"),
        (failed_on(1, KeyError("a")), "rank 1: KeyError: 'a'"),
    ],
)
def test_what_went_wrong_is_one_line(error: BaseException, said: str) -> None:
    assert words_of(error, 3) == said


def test_only_what_nobody_thought_of_leaves_a_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(error: Exception) -> Any:
        raise error

    for error in (OSError(errno.ENOSPC, "No space left on device"), UserError("the message")):
        with pytest.raises(SaveError, match=words_of(error)):
            together(lambda error=error: fail(error), ALONE)  # type: ignore[misc]
        assert capsys.readouterr().err == ""
    with pytest.raises(SaveError, match="ValueError: odd"):
        together(lambda: fail(ValueError("odd")), ALONE)
    assert "Traceback (most recent call last)" in capsys.readouterr().err
    assert together(lambda: 3, ALONE) == [3]


@pytest.mark.parametrize("ranks", [1, 2])
def test_torch_is_asked_for_a_collective_where_there_are_ranks(
    tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone: list[bool] = []
    take = {"save": sharded.state_dict_saver, "load": sharded.state_dict_loader}
    for name, module in take.items():
        monkeypatch.setattr(module, name, lambda *_, no_dist, **__: alone.append(no_dist))
    monkeypatch.setattr(sharded, "Reader", lambda directory: SimpleNamespace(read_metadata=int))
    sharded.write_tensors(Contents(0, "sharded", {}, {}, ranks), tmp_path, None)
    sharded.read_tensors({}, tmp_path, ranks)
    assert alone == [ranks == 1] * 2


WRITER = "PytorchStreamWriter failed: inline_container.cc"
UNCUT = ValueError("must align with block boundary")


@pytest.mark.parametrize(
    ("failure", "free", "raised"),
    [
        (OSError(errno.EDQUOT, "Disk quota exceeded"), 1 << 40, OSError),
        (RuntimeError(WRITER), (64 << 20) - 1, OSError),
        (RuntimeError(WRITER), 64 << 20, OSError),
        (ValueError(WRITER), 0, CheckpointException),
        (RuntimeError("shapes differ"), 0, CheckpointException),
    ],
)
def test_what_the_disk_did_to_a_writer_is_told_from_other_failures(
    tmp_path: Path,
    failure: Exception,
    free: int,
    raised: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def save(*_: Any, **__: Any) -> None:
        raise failed_on(1, failure)

    monkeypatch.setattr(sharded.state_dict_saver, "save", save)
    monkeypatch.setattr(sharded.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    with pytest.raises(raised) as caught:
        sharded.write_tensors(Contents(0, "sharded", {}, {}, 2), tmp_path, None)
    if isinstance(caught.value, OSError):
        full = free < 64 << 20
        code = errno.ENOSPC if full else errno.EIO
        assert caught.value.errno == getattr(failure, "errno", code)


@pytest.mark.parametrize(
    ("failure", "raised", "said"),
    [
        (UserError("it would run posix.mkdir"), UserError, "it would run"),
        (UNCUT, UserError, "cannot be split over this number of ranks"),
        (KeyError("weight"), CheckpointException, "weight"),
    ],
)
def test_why_shards_cannot_be_read_is_one_sentence_where_it_is_known(
    tmp_path: Path,
    failure: Exception,
    raised: type[BaseException],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise failed_on(1, failure)

    monkeypatch.setattr(sharded.state_dict_loader, "load", load)
    monkeypatch.setattr(sharded, "Reader", lambda directory: SimpleNamespace(read_metadata=int))
    with pytest.raises(raised, match=said):
        sharded.read_tensors({}, tmp_path, 2)


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (failed_on(1, OSError(errno.ENOSPC, "No space left on device")), True),
        (failed_on(1, KeyError("a")), False),
        (CheckpointException("save", {}), False),
        (ValueError("odd"), False),
    ],
)
def test_a_full_disk_is_told_from_other_failures(error: BaseException, full: bool) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(SaveError) as caught:
        together(fail, ALONE)
    assert caught.value.full is full


def test_of_several_ranks_the_one_that_failed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ValueError("odd")

    monkeypatch.setattr(World, "gather", lambda self, own, group: [(None, None), own])
    with pytest.raises(SaveError, match=r"^rank 1: ValueError: odd$"):
        together(fail, replace(ALONE, rank=1, size=2))


def test_a_rank_that_is_out_of_step_does_not_wait_for_the_others() -> None:
    def fail() -> None:
        raise OutOfStepError from TimeoutError("gone")

    with pytest.raises(SaveError, match="TimeoutError: gone"):  # there are no others
        together(fail, ALONE)
    with pytest.raises(TimeoutError, match="gone"):  # a collective would need a process group
        together(fail, replace(ALONE, size=2))


# -- how a run begins ----------------------------------------------------------------------------


def begin(spec: JobSpec, run_dir: RunDir, telemetry: Telemetry, **data: Any) -> TrainState:
    training = start_training(spec, Line(), ALONE)
    resume(run_context(spec, run_dir, ALONE, telemetry), training, DATA | data)
    return training


def warnings(run_dir: RunDir) -> list[str]:
    lines = map(json.loads, run_dir.events.read_text().splitlines())
    return [line["message"] for line in lines if line["kind"] == "warning"]


def test_a_run_without_a_checkpoint_begins_at_step_0(
    tmp_path: Path, run_dir: RunDir, telemetry: Telemetry, capfd: pytest.CaptureFixture[str]
) -> None:
    assert begin(toy_spec(tmp_path), run_dir, telemetry).step == 0
    assert "resumed" not in capfd.readouterr().out


def test_a_run_goes_on_after_its_newest_checkpoint(
    tmp_path: Path, run_dir: RunDir, telemetry: Telemetry, capfd: pytest.CaptureFixture[str]
) -> None:
    spec = toy_spec(tmp_path, lr_scheduler="linear", max_train_steps=10)
    before = trained(spec)
    path = save(before, spec, run_dir, **DATA)
    resumed = begin(spec, run_dir, telemetry)
    assert resumed.step == 2
    assert torch.equal(resumed.trained()["weight"], before.trained()["weight"])
    assert resumed.scheduler.get_last_lr() == before.scheduler.get_last_lr()
    assert f"resumed after step 2 from {path}" in capfd.readouterr().out
    assert warnings(run_dir) == []


def test_other_data_and_another_rate_are_told(
    tmp_path: Path, run_dir: RunDir, telemetry: Telemetry
) -> None:
    spec = toy_spec(tmp_path)
    save(trained(spec), spec, run_dir, **DATA)
    begin(spec, run_dir, telemetry, digest="b")
    (data,) = warnings(run_dir)
    assert data.startswith(
        "changed since step-2 was saved: the data: different ones among the 4 samples"
    )
    begin(toy_spec(tmp_path, learning_rate=0.5), run_dir, telemetry)
    _, rate = warnings(run_dir)
    assert rate.startswith("changed since step-2 was saved: learning_rate")


def test_how_the_checkpoint_computed_with_its_base_is_handed_on(
    tmp_path: Path, run_dir: RunDir, telemetry: Telemetry
) -> None:
    spec = toy_spec(tmp_path)
    training = trained(spec)
    run = run_context(spec, run_dir, ALONE, telemetry)
    assert resume(run, start_training(spec, Line(), ALONE), DATA) is None
    path = save(training, spec.model_copy(update={"base_matmul": "scaled"}), run_dir, **DATA)
    assert resume(run, training, DATA) == "scaled"
    state = json.loads((path / STATE_FILE).read_text())
    for older in ({k: v for k, v in state["spec"].items() if k != "base_matmul"}, None):
        (path / STATE_FILE).write_text(json.dumps(state | {"spec": older}))
        assert checkpoint_resume._compare(path, spec, DATA, True)[1] == "dequantize"


def test_what_is_read_of_checkpoints_is_counted_in_mib(
    tmp_path: Path, run_dir: RunDir, telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []

    def choose(*words: Any) -> None:
        for _ in range(3):
            words[-1](1 << 20)

    @contextmanager
    def phase(name: str) -> Iterator[Any]:
        yield counted.append

    monkeypatch.setattr(checkpoint_resume, "choose_start", choose)
    monkeypatch.setattr(telemetry, "phase", phase)
    begin(toy_spec(tmp_path), run_dir, telemetry)
    assert counted == [1, 2, 3]


def test_a_checkpoint_that_says_nothing_of_its_data_is_believed(
    tmp_path: Path, run_dir: RunDir, telemetry: Telemetry
) -> None:
    spec = toy_spec(tmp_path)
    save(trained(spec), spec, run_dir)
    assert begin(spec, run_dir, telemetry).step == 2
    assert warnings(run_dir) == []


def test_a_run_that_drew_its_samples_by_another_plan_is_not_continued(
    tmp_path: Path, run_dir: RunDir, telemetry: Telemetry
) -> None:
    spec = toy_spec(tmp_path)
    save(trained(spec), spec, run_dir, **{k: v for k, v in DATA.items() if k != "plan"})
    with pytest.raises(UserError, match="gave steps other samples") as refused:
        begin(spec, run_dir, telemetry)
    assert "--resume_from_checkpoint" in refused.value.hint
    other = RunDir(tmp_path / "other")
    other.create()
    origin = str(run_dir.checkpoint(2))
    assert begin(toy_spec(tmp_path, resume_from_checkpoint=origin), other, telemetry).step == 2
    assert any("the data plan" in line for line in warnings(run_dir))


def test_a_job_that_cannot_go_on_from_a_checkpoint_is_told_why(
    tmp_path: Path, run_dir: RunDir, telemetry: Telemetry
) -> None:
    spec = toy_spec(tmp_path)
    save(trained(spec), spec, run_dir, **DATA)
    other = toy_spec(tmp_path, pretrained_model_name_or_path=str(tmp_path / "another"))
    with pytest.raises(UserError, match="cannot resume from step-2: pretrained_model_name_or_path"):
        begin(other, run_dir, telemetry)
