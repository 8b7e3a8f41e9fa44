"""The doctor's all-reduce: real ranks over gloo, and what is said of those that do not answer."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from jobs.doctor import processes
from jobs.doctor.agreed import RESULT
from jobs.doctor.checks import gpus as exchange
from jobs.doctor.checks.gpus import check_all_reduce, judge
from jobs.doctor.checks.software import TorchFacts
from jobs.doctor.examine import Finding, Patient, Verdict
from jobs.doctor.nvml import Nvml
from jobs.doctor.processes import Outcome, Size, all_reduce, find_silent, run_helper
from jobs.launch import Launch
from jobs.machine.devices import Gpu
from jobs.machine.processes import with_run_id
from jobs.run.rundir import RankStatus, RunDir
from jobs.spec.job_spec import JobSpec
from tests.support.waiting import eventually

PATIENCE = 300.0  # seconds; a slow machine under load, not an expectation
GPUS = tuple(Gpu(n, f"GPU-{n}", "H200", 2**37) for n in range(4))
TORCH = TorchFacts("2.13", cuda="13.0", devices=({}, {}, {}, {}))


def run_id(name: str) -> str:
    """Marks processes of this very test run."""
    return f"{name}-{os.getpid()}"


# -- real ranks ----------------------------------------------------------------------------


@pytest.mark.e2e
@pytest.mark.usefixtures("forked")
def test_two_ranks_measure_over_gloo() -> None:
    outcome = all_reduce(
        [], 2, run_id=run_id("doctor-real"), seconds=0.5, limit=PATIENCE, still=PATIENCE
    )
    assert outcome.problem is None
    assert [size.bytes for size in outcome.sizes] == [8, 1 << 16, 1 << 20, 1 << 24]
    assert all(size.seconds > 0 for size in outcome.sizes)
    for size in outcome.sizes:  # of two ranks, each sends and receives the message once
        assert size.bus == pytest.approx(size.bytes / size.seconds)
    (finding,) = judge(outcome, [], nvlink=False, ranks=2)
    assert finding.verdict is Verdict.OK
    assert finding.found.startswith("2 CPU ranks: ")
    assert len(finding.lines) == 5
    assert with_run_id(run_id("doctor-real")) == []


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.usefixtures("forked")
def test_a_rank_that_stops_answering_is_named_and_all_are_killed() -> None:
    mark = run_id("doctor-silent")
    frozen: list[int] = []

    def freeze() -> None:
        """Suspend rank 1 as soon as both ranks measure."""
        folders: set[str] = set()

        def both_measure() -> bool:
            for process in with_run_id(mark):
                try:
                    words = psutil.Process(process.pid).cmdline()
                except psutil.Error:
                    continue
                if "engine.doctor.allreduce" in words:
                    folders.add(words[words.index("engine.doctor.allreduce") + 1])
            statuses = [s for name in folders for s in RunDir(Path(name)).rank_statuses()]
            frozen[:] = [status.pid for status in statuses if status.rank == 1]
            return len(statuses) == 2 and all(status.step for status in statuses)

        eventually(both_measure, PATIENCE)
        os.kill(frozen[0], signal.SIGSTOP)

    thread = threading.Thread(target=freeze)
    thread.start()
    outcome = all_reduce([], 2, run_id=mark, seconds=PATIENCE, limit=PATIENCE, still=30)
    thread.join()
    assert outcome.silent == (1,)
    assert outcome.sizes == ()
    assert outcome.problem is not None
    assert outcome.problem.startswith("rank 1 did not answer")
    assert outcome.left == ()
    assert with_run_id(mark) == []
    (finding,) = judge(outcome, [], nvlink=False, ranks=2)
    assert finding.verdict is Verdict.FAIL
    assert "rank 1 did not answer" in finding.found
    assert finding.facts["silent"] == [1]


def launch_of(script: str) -> Any:
    """Stands in for `jobs.launch.build_launch`: a launcher that is a line of shell."""

    def build(spec: JobSpec, run_dir: RunDir, **names: Any) -> Launch:
        environment = {"FSDP_TUI_RUN_ID": names["run_id"]}
        # The last three words are those of a job; two of them are replaced.
        return Launch(["sh", "-c", script, "sh", "-m", "engine", "RUN"], environment, {})

    return build


def test_ranks_that_never_come_up_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "build_launch", launch_of("exec sleep 600"))
    outcome = all_reduce([], 3, run_id=run_id("doctor-never"), seconds=1, limit=0.5, still=60)
    assert outcome.silent == (0, 1, 2)
    assert outcome.problem is not None
    assert outcome.problem.startswith("ranks 0, 1, 2 did not answer")
    assert with_run_id(run_id("doctor-never")) == []


def test_a_launcher_that_fails_says_why_and_what_nccl_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = "echo 'host:1:2 [0] NCCL WARN no such device eth7'; echo 'Boom: it broke'; exit 4"
    monkeypatch.setattr(processes, "build_launch", launch_of(said))
    outcome = all_reduce([], 2, run_id=run_id("doctor-fails"), seconds=1, limit=60, still=60)
    assert outcome.silent == ()
    assert outcome.problem == "the launcher failed: Boom: it broke"
    assert outcome.warning == "no such device eth7"
    (finding,) = judge(outcome, GPUS[:2], nvlink=False, ranks=2)
    assert finding.found.startswith("GPU 0, 1: the launcher failed: Boom")
    assert finding.found.endswith("NCCL says: no such device eth7")


def test_a_helper_that_hangs_is_killed_and_what_it_said_counts() -> None:
    said = run_helper("http.server", "0", run_id=run_id("doctor-helper"), seconds=1.0)
    assert said.status is None
    assert with_run_id(run_id("doctor-helper")) == []
    assert run_helper("no_such_module", run_id="x", seconds=60).last_line.endswith("no_such_module")


@pytest.mark.usefixtures("forked")
def test_the_engines_facts_are_read() -> None:
    said = run_helper("engine.doctor", run_id=run_id("doctor-facts"), seconds=PATIENCE)
    assert said.status == 0, said.last_line
    assert {"torch", "cuda", "hip", "nccl", "gloo", "architectures"} <= said.facts.keys()
    assert said.facts["gloo"] is True


@pytest.mark.usefixtures("forked")
def test_one_rank_needs_no_launcher(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.create()
    words = (str(tmp_path), "--seconds=0.1", f"--limit={PATIENCE}")
    said = run_helper(
        "engine.doctor.allreduce", *words, run_id=run_id("doctor-one"), seconds=PATIENCE
    )
    assert said.status == 0, said.last_line
    sizes = json.loads((tmp_path / RESULT).read_text())["sizes"]
    assert [size["bus"] for size in sizes] == [0.0] * 4, "there is nobody to send to"


def test_sums_that_arrive_wrong_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    import torch.distributed as dist

    from engine.doctor.allreduce import check_sums

    def add_the_other(message: torch.Tensor) -> None:
        message.add_(2)

    def lose_one(message: torch.Tensor) -> None:
        message.add_(2)[7] = 1

    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "all_reduce", add_the_other)
    check_sums(10, torch.device("cpu"), 40)
    monkeypatch.setattr(dist, "all_reduce", lose_one)
    with pytest.raises(RuntimeError, match="1 of 10 sums arrived wrong"):
        check_sums(10, torch.device("cpu"), 40)


# -- who is silent -------------------------------------------------------------------------


def status(rank: int, *, step: int = 1, heartbeat: float = 100.0) -> RankStatus:
    return RankStatus(rank, 1, 0.0, "h", "cpu", "start", step, heartbeat, 90.0)


@pytest.mark.parametrize(
    ("statuses", "silent"),
    [
        ([], (0, 1, 2)),
        ([status(0), status(2)], (1,)),
        ([status(0), status(1, heartbeat=80.0), status(2, step=2)], (1,)),
        ([status(0, step=3), status(1, step=2), status(2, step=3)], (1,)),
        ([status(0), status(1), status(2)], (0, 1, 2)),
    ],
)
def test_the_rank_that_holds_up_the_others(
    statuses: list[RankStatus], silent: tuple[int, ...]
) -> None:
    assert find_silent(statuses, 3, mute_after=4.0) == silent


# -- what it means -------------------------------------------------------------------------


def measured(bus: float) -> Outcome:
    return Outcome((Size(8, 2e-5, 1e5), Size(1 << 28, 2**28 / bus, bus)))


@pytest.mark.parametrize(
    ("outcome", "gpus", "nvlink", "ranks", "verdict", "told"),
    [
        (measured(370e9), 4, True, 4, "ok", "GPU 0, 1, 2, 3: 370.0 GB/s bus, 20 µs for 8 B"),
        (measured(9e9), 4, True, 4, "warn", "expected over NVLink: 20 or more"),
        (measured(9e9), 4, False, 4, "ok", "9.0 GB/s"),
        (measured(1e9), 2, False, 2, "warn", "expected over PCIe: 2.5 or more"),
        (measured(0.1e9), 0, False, 2, "ok", "2 CPU ranks: 0.1 GB/s"),
        (measured(1.0), 1, False, 1, "ok", "one rank starts, with no peer to exchange with"),
        (Outcome(problem="rank 2 failed", silent=(2,)), 4, True, 4, "fail", "rank 2 failed"),
    ],
)
def test_speed_is_judged_by_what_connects_the_gpus(
    outcome: Outcome, gpus: int, nvlink: bool, ranks: int, verdict: str, told: str
) -> None:
    (finding,) = judge(outcome, GPUS[:gpus], nvlink=nvlink, ranks=ranks)
    assert finding.verdict == verdict
    assert told in finding.found
    assert (finding.advice is None) == (verdict == "ok")


def test_a_silent_rank_on_gpus_is_told_as_a_gpu_to_leave_out() -> None:
    (finding,) = judge(Outcome(problem="p", silent=(1,)), GPUS[2:], nvlink=True, ranks=2)
    assert finding.advice is not None
    assert "without GPU 3" in finding.advice


def test_processes_that_cannot_be_killed_are_told() -> None:
    first, *_ = judge(Outcome(problem="p", left=(4711,)), GPUS, nvlink=True, ranks=4)
    assert first.verdict is Verdict.FAIL
    assert "4711" in first.found


# -- on which devices ----------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, home: Path) -> list[tuple[list[str], int]]:
    """GPUs and ranks of every all-reduce that was to be measured."""
    calls: list[tuple[list[str], int]] = []

    def play(gpus: list[str], ranks: int, **_: Any) -> Outcome:
        calls.append((gpus, ranks))
        return measured(100e9)

    monkeypatch.setattr(exchange, "all_reduce", play)
    monkeypatch.setattr(exchange, "claimed", lambda: {"GPU-1": 7})
    return calls


@pytest.mark.parametrize(
    ("changes", "devices"),
    [
        ({}, (["GPU-0", "GPU-2", "GPU-3"], 3)),  # GPU 1 is a job's
        ({"gpus": ("2", "1")}, (["GPU-2", "GPU-1"], 2)),
        ({"spec": JobSpec(gpus=2)}, (["GPU-0", "GPU-2"], 2)),
        ({"spec": JobSpec(gpus=[3, 0])}, (["GPU-3", "GPU-0"], 2)),
        ({"spec": JobSpec(device="cpu", num_processes=2)}, ([], 2)),
        ({"nvml": Nvml()}, ([], 2)),
        ({"quick": True}, None),
        ({"nvml": None}, None),
        ({"torch": None}, None),
        ({"torch": TorchFacts("2.13")}, None),  # built for the CPU, which was said before
    ],
)
def test_what_is_measured(
    changes: dict[str, Any],
    devices: tuple[list[str], int] | None,
    asked: list[tuple[list[str], int]],
) -> None:
    patient = Patient(**{"nvml": Nvml(counted=4, gpus=GPUS), "torch": TORCH} | changes)
    found: list[Finding] = list(check_all_reduce(patient))
    assert asked == ([] if devices is None else [devices])
    assert len(found) == len(asked)


def test_nothing_is_measured_where_all_is_in_use(asked: list[Any]) -> None:
    nvml = Nvml(counted=1, gpus=(GPUS[1],))
    (finding,) = check_all_reduce(Patient(nvml=nvml, torch=TORCH))
    assert finding.verdict is Verdict.WARN
    assert asked == []
