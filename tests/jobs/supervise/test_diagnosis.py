"""Why a job failed, in one line, from files as real launchers and ranks leave them behind."""

from __future__ import annotations

import json
import os
import pickle
import re
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest

from jobs.machine.processes import kernel_oom_kills
from jobs.queue.states import State
from jobs.run.rundir import RankStatus, RunDir, event
from jobs.run.why_failed import RankExit, diagnose, find_wait, rank_exits, why_failed
from jobs.supervise.remedies import advice
from tests.support.jobs.fakes.launcher import summary

if TYPE_CHECKING:
    from pathlib import Path

# Recorded of `accelerate launch` (1.15, torch 2.13), two ranks, of which rank 0 was killed.
RECORDED = """\
W1122 15:17:25.438000 21068 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process \
21245 closing signal SIGTERM
E1122 15:17:25.446000 21068 torch/distributed/elastic/multiprocessing/api.py:1002] failed \
(exitcode: -9) local_rank: 0 (pid: 21244) of binary: /usr/bin/python
Traceback (most recent call last):
  File "accelerate/commands/launch.py", line 1029, in multi_gpu_launcher
    distrib_run.run(args)
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
=======================================================
engine FAILED
-------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-22_15:17:25
  host      : node
  rank      : 1 (local_rank: 1)
  exitcode  : -15 (pid: 21245)  (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 21245
-------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-22_15:17:25
  host      : node
  rank      : 0 (local_rank: 0)
  exitcode  : -9 (pid: 21244)  (SIGKILL)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 21244
=======================================================
"""
# The same of a single rank.
ALONE = """\
Traceback (most recent call last):
  File "accelerate/commands/launch.py", line 999, in simple_launcher
    raise subprocess.CalledProcessError(returncode=process.returncode, cmd=cmd)
subprocess.CalledProcessError: Command '['/usr/bin/python', '-m', 'engine', '/runs/1']' {end}.
"""
# The same of a launcher that got SIGTERM.
SIGNALED = """\
W1122 15:25:17.596000 31641 torch/distributed/elastic/agent/server/api.py:753] Received 15 death \
signal, shutting down workers
W1122 15:25:17.596000 31641 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process \
31830 closing signal SIGTERM
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.api.SignalException: Process 31641 got signal: 15
"""
# Recorded of torch 2.13 with CUDA.
WATCHDOG = """\
[rank0]:[E1122 15:19:53.676730941 ProcessGroupNCCL.cpp:730] [Rank 0] Watchdog caught collective \
operation timeout: WorkNCCL(SeqNum=3, OpType=_ALLGATHER_BASE, NumelIn=4, NumelOut=8, \
Timeout(ms)=6000) ran for 6036 milliseconds before timing out.
[rank0]:[E1122 15:21:01.997641463 ProcessGroupNCCL.cpp:805] [Rank 0] To avoid data inconsistency, \
we are taking the entire process down.
terminate called after throwing an instance of 'c10::DistBackendError'
Fatal Python error: Aborted
"""
NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:92, unhandled system error "
    "(run with NCCL_DEBUG=INFO for details), NCCL version 2.29.7\n"
    "{code}: System call (e.g. socket, malloc) or external library call failed or device error. \n"
    "Last error:\n{last}"
)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path)
    made.create()
    for rank in (0, 1):
        write_status(made, rank)
    return made


def write_status(run_dir: RunDir, rank: int, **changes: Any) -> None:
    values: dict[str, Any] = {
        "rank": rank,
        "pid": 1,
        "started": 1.0,
        "host": "h",
        "device": "cpu",
        "phase": "train",
        "step": 12,
        "heartbeat": 1.0,
        "progressed": 1.0,
    }
    run_dir.rank_file(rank).write_text(RankStatus(**values | changes).to_json())


def write_error(run_dir: RunDir, rank: int, kind: str, message: str, **changes: Any) -> None:
    record = {
        "t": 10.0 + rank,
        "rank": rank,
        "type": kind,
        "message": message,
        "phase": "train",
        "step": 12,
    } | changes
    run_dir.rank_error(rank).write_text(json.dumps(record))


def elastic(run_dir: RunDir, rank: int, code: int, *others: tuple[int, int]) -> None:
    """What the launcher prints when a rank ends so, and then the others."""
    rest = [(other, status, 4300 + other) for other, status in others]
    run_dir.launcher_log.write_text(summary((rank, code, 4242), rest))


def recorded_entry(number: int, name: str, state: str) -> dict[str, Any]:
    """A collective in a flight record of torch 2.13."""
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "p2p_seq_id": 0,
        "collective_seq_id": number,
        "op_id": number,
        "profiling_name": f"nccl:{name}",
        "time_created_ns": 10**18 + number,
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        "output_sizes": [[8]],
        "output_dtypes": ["Float"],
        "state": state,
        "retired": False,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "timeout_ms": 6000,
        "is_p2p": False,
        "frames": [],
    }


def recorded_flight(*entries: dict[str, Any]) -> dict[str, Any]:
    """A rank's flight record."""
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}}
    return {"version": "2.10", "pg_config": config, "entries": list(entries)}


def test_a_rank_that_told_its_error(run_dir: RunDir) -> None:
    write_error(run_dir, 1, "ValueError", "bad\n  picture")
    elastic(run_dir, 1, 1)
    assert (
        why_failed(run_dir, 1) == "rank 1 failed at step 12 during train: ValueError: bad picture"
    )


def test_what_a_person_can_put_right_is_said_without_ceremony(run_dir: RunDir) -> None:
    write_error(run_dir, 0, "UserError", "the loss is not finite at step 3")
    assert why_failed(run_dir, 1) == "the loss is not finite at step 3"


# Recorded of torch 2.13.
FULL = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.25 GiB of "
    "which 5.00 MiB is free. Of the allocated memory 79.00 GiB is allocated by PyTorch, and 20.00 "
    "MiB is reserved by PyTorch but unallocated."
)
TORCH_ADVICE = (
    " If reserved but unallocated memory is large try setting "
    "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


@pytest.mark.parametrize(
    ("phase", "step", "words", "advised"),
    [
        ("encode", 0, "while encoding captions", "shard_text_encoders"),
        ("latents", 0, "while caching latents", "resolution"),
        ("load", 0, "while loading weights", "fsdp_cpu_offload"),
        ("resume", 8, "while reading the checkpoint after step 8", "fsdp2"),
        ("forward", 0, "in the forward pass of step 1", "gradient_checkpointing"),
        ("backward", 12, "in the backward pass of step 13", "gradient_checkpointing"),
        ("step", 0, "in the optimizer update of step 1", "adamw_8bit"),
        ("sample", 5, "while sampling after step 5", "validation_resolution"),
        ("validate", 5, "while measuring the validation loss after step 5", "train_batch_size"),
    ],
)
def test_a_gpu_that_is_full(
    run_dir: RunDir, phase: str, step: int, words: str, advised: str
) -> None:
    write_error(run_dir, 1, "OutOfMemoryError", FULL + TORCH_ADVICE, phase=phase, step=step)
    failure = diagnose(run_dir, 1)
    assert failure.text == f"rank 1 ran out of GPU memory {words}: {FULL}"
    assert advised in "; ".join(advice(State.FAILED, failure))


@pytest.mark.parametrize(
    ("phase", "advised"),
    [
        ("encode", "bf16"),
        ("latents", "leave the file out"),
        ("sample", "bf16"),
        ("step", "lower learning_rate"),
    ],
)
def test_values_that_are_not_finite(run_dir: RunDir, phase: str, advised: str) -> None:
    """Before anything is trained, no learning rate is to blame."""
    write_error(run_dir, 1, "UserError", "not finite", phase=phase, cause="not_finite")
    words = "; ".join(advice(State.FAILED, diagnose(run_dir, 1)))
    assert advised in words
    assert ("learning_rate" in words) is (phase == "step")


@pytest.mark.parametrize(
    ("kind", "message", "told"),
    [
        (
            "RuntimeError",
            words := "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
            words,
        ),
        (
            "DistBackendError",
            NCCL.format(code="ncclUnhandledCudaError", last="Cuda failure 2 'out of memory'"),
            "ncclUnhandledCudaError: Cuda failure 2 'out of memory'",
        ),
    ],
)
def test_libraries_that_get_no_gpu_memory_say_so_too(
    run_dir: RunDir, kind: str, message: str, told: str
) -> None:
    write_error(run_dir, 0, kind, message, phase="forward", step=0)
    assert why_failed(run_dir, 1) == (
        f"rank 0 ran out of GPU memory in the forward pass of step 1: {told}"
    )


@pytest.mark.parametrize(
    ("kind", "message", "more", "cause"),
    [
        ("OSError", "[Errno 28] No space left on device: '/x'", {}, "disk_full"),
        ("UserError", "cannot save step-4", {"cause": "disk_full"}, "disk_full"),
        ("UserError", "the loss is bad", {"cause": "not_finite"}, "not_finite"),
        ("DistBackendError", "NCCL error in: x.cpp", {}, "communication"),
        ("ModuleNotFoundError", "No module named 'av'", {}, "missing_package"),
        ("ValueError", "shapes", {"cause": "other"}, "other"),
        ("ValueError", "shapes", {"cause": 7}, "other"),
    ],
)
def test_the_kind_of_a_failure_is_a_fact(
    run_dir: RunDir, kind: str, message: str, more: dict[str, Any], cause: str
) -> None:
    write_error(run_dir, 0, kind, message, **more)
    assert diagnose(run_dir, 1).cause == cause


def test_the_first_error_is_the_cause(run_dir: RunDir) -> None:
    write_error(run_dir, 0, "KeyError", "later", t=20.0)
    write_error(run_dir, 1, "ValueError", "earlier", t=10.0)
    assert "rank 1 failed" in why_failed(run_dir, 1)


@pytest.mark.parametrize("kind", ["RuntimeError", "DistBackendError", "DistNetworkError"])
@pytest.mark.parametrize(
    "message",
    [
        "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242",
        "Broken pipe",
        "NCCL communicator was aborted on rank 0",
        "Timed out waiting 4000ms for recv operation to complete",
        "failed to recv, got 0 bytes. Connection was likely closed. Did the remote server crash?",
        NCCL.format(code="ncclRemoteError", last="socketProgress: read 0 bytes"),
        NCCL.format(code="ncclSystemError", last="Connection closed by remote peer node<4242>"),
        "[Rank 0] Watchdog caught collective operation timeout",
    ],
)
def test_what_the_others_say_afterwards_is_not_the_cause(
    run_dir: RunDir, message: str, kind: str
) -> None:
    write_error(run_dir, 0, kind, message, t=1.0)
    write_error(run_dir, 1, "ValueError", "the cause", t=2.0)
    assert why_failed(run_dir, 1).endswith("ValueError: the cause")


def test_a_rank_that_was_killed_is_named_though_only_the_other_complains(run_dir: RunDir) -> None:
    write_error(run_dir, 0, "RuntimeError", "Connection closed by peer")
    elastic(run_dir, 1, -9)
    text = why_failed(run_dir, 1)
    assert text.startswith("rank 1 was killed by SIGKILL")
    assert "at step 12 during train" in text


def test_the_step_is_not_behind_the_one_that_is_shown(run_dir: RunDir) -> None:
    """A rank tells its own about once a second, and an event each step."""
    run_dir.events.write_text(event("step", step=15, loss=0.5, seconds=0.01))
    write_error(run_dir, 0, "RuntimeError", "Connection closed by peer")
    assert why_failed(run_dir, 1) == "rank 1 vanished at step 15 during train"


def test_a_rank_that_vanished_without_a_trace(run_dir: RunDir) -> None:
    write_error(run_dir, 0, "RuntimeError", "Connection closed by peer")
    assert why_failed(run_dir, 1) == "rank 1 vanished at step 12 during train"


def test_aftermath_alone_is_better_than_nothing(run_dir: RunDir) -> None:
    for rank in (0, 1):
        write_error(run_dir, rank, "RuntimeError", "Connection reset by peer")
    assert why_failed(run_dir, 1).startswith("rank 0 failed at step 12 during train: RuntimeError")


def test_a_rank_that_we_ended_is_not_blamed(run_dir: RunDir) -> None:
    elastic(run_dir, 0, -9, (1, -11))
    assert why_failed(run_dir, 1, ended_by_us={0}).startswith("rank 1 was killed by SIGSEGV")


def test_a_rank_that_only_exits(run_dir: RunDir) -> None:
    elastic(run_dir, 1, 3)
    run_dir.rank_log(1).write_text("hello\nI have seen enough\n\n")
    assert why_failed(run_dir, 1) == (
        "rank 1 exited with status 3 at step 12 during train; its log ends with: I have seen enough"
    )
    run_dir.rank_log(1).unlink()
    assert why_failed(run_dir, 1).endswith("its log is empty")


def test_a_rank_that_died_before_its_first_word(run_dir: RunDir) -> None:
    run_dir.rank_file(1).unlink()
    elastic(run_dir, 1, -11)
    assert why_failed(run_dir, 1) == "rank 1 was killed by SIGSEGV while starting"


def test_a_signal_without_a_name(run_dir: RunDir) -> None:
    assert why_failed(run_dir, -99) == "the launcher was killed by signal 99"


def test_a_launcher_that_was_killed(run_dir: RunDir) -> None:
    assert why_failed(run_dir, -9).startswith("the launcher was killed by SIGKILL")


def test_a_launcher_that_failed_by_itself(run_dir: RunDir) -> None:
    run_dir.launcher_log.write_text("usage: accelerate\nerror: no such option --x\n\n")
    assert why_failed(run_dir, 2) == "the launcher failed: error: no such option --x"
    run_dir.launcher_log.unlink()
    assert why_failed(run_dir, 2) == "the launcher failed: exit status 2"


def test_an_end_that_nobody_explains(run_dir: RunDir) -> None:
    assert "without a reason" in why_failed(run_dir, 0)


def test_it_is_one_line_that_fits_the_screen(run_dir: RunDir) -> None:
    write_error(run_dir, 0, "ValueError", "x\n" * 9000)
    text = why_failed(run_dir, 1)
    assert "\n" not in text
    assert len(text) < 400


def test_only_the_end_of_a_large_log_is_read(run_dir: RunDir) -> None:
    run_dir.launcher_log.write_bytes(b"\xff" * 300_000 + b"\nthe end\n")
    assert why_failed(run_dir, 1) == "the launcher failed: the end"


# -- several ranks that failed ---------------------------------------------------------------


def test_the_rank_that_failed_first_is_named_and_not_the_one_ended_because_of_it(
    run_dir: RunDir,
) -> None:
    """The launcher lists its victims before the cause."""
    run_dir.launcher_log.write_text(RECORDED)
    assert rank_exits(run_dir) == [RankExit(0, -9), RankExit(1, -15, ended=True)]
    assert why_failed(run_dir, 1) == "rank 0 was killed by SIGKILL at step 12 during train"
    before = kernel_oom_kills() - 1
    assert "the machine ran out of memory" in why_failed(run_dir, 1, oom_kills_before=before)


def test_the_fake_launcher_prints_what_the_real_one_does() -> None:
    said = summary((0, -9, 21244), [(1, -15, 21245)])
    stamp = re.compile(r"\d{4}-\d\d-\d\d_\d\d:\d\d:\d\d")
    assert stamp.sub("TIME", said) in stamp.sub("TIME", RECORDED)


def test_a_rank_that_the_launcher_ended_is_not_silent(run_dir: RunDir) -> None:
    """Only rank 1 says something, of which it is not known whether it is the cause."""
    write_error(run_dir, 1, "RuntimeError", "Connection reset by peer")
    swapped = re.sub(r"rank      : (\d)", lambda m: f"rank      : {1 - int(m[1])}", RECORDED)
    run_dir.launcher_log.write_text(swapped.replace("-9", "1"))
    assert why_failed(run_dir, 1).startswith("rank 1 failed at step 12 during train: RuntimeError")


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("died with <Signals.SIGKILL: 9>", "rank 0 was killed by SIGKILL at step 12 during train"),
        ("returned non-zero exit status 3", "rank 0 exited with status 3 at step 12 during train"),
    ],
)
def test_a_single_rank_is_started_without_elastic(run_dir: RunDir, end: str, reason: str) -> None:
    run_dir.rank_file(1).unlink()
    run_dir.launcher_log.write_text(ALONE.format(end=end))
    assert why_failed(run_dir, 1).startswith(reason)


def test_a_launcher_that_was_told_to_end(run_dir: RunDir) -> None:
    run_dir.launcher_log.write_text(SIGNALED)
    assert why_failed(run_dir, 1) == "someone sent SIGTERM to the launcher, which ended the ranks"


def test_a_launcher_that_was_interrupted_while_it_imported(run_dir: RunDir) -> None:
    run_dir.launcher_log.write_text("Traceback\n  File torch/x.py\nKeyboardInterrupt\n\n".rstrip())
    said = "someone sent SIGINT to the launcher while it started"
    assert why_failed(run_dir, 1) == said


# -- collectives -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "last", "reason"),
    [
        (
            "ncclSystemError",
            "Error while creating shared memory segment /dev/shm/nccl-Wk3bY9 (size "
            "33030528), error: No space left on device (28)",
            "ncclSystemError: Error while creating shared memory segment /dev/shm/nccl-Wk3bY9 "
            "(size 33030528), error: No space left on device (28); /dev/shm is too small (in a "
            "container: --shm-size)",
        ),
        (
            "ncclInvalidUsage",
            "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1a000",
            "ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device "
            "1a000",
        ),
        (
            "ncclUnhandledCudaError",
            "Cuda failure 700 'an illegal memory access was encountered'",
            "ncclUnhandledCudaError: Cuda failure 700 'an illegal memory access was encountered'",
        ),
    ],
)
def test_what_nccl_says_of_its_own_trouble_is_the_cause(
    run_dir: RunDir, code: str, last: str, reason: str
) -> None:
    write_error(run_dir, 0, "DistBackendError", "NCCL communicator was aborted on rank 0", t=1.0)
    write_error(run_dir, 1, "DistBackendError", NCCL.format(code=code, last=last), t=2.0)
    assert why_failed(run_dir, 1) == (
        f"rank 1 failed at step 12 during train: DistBackendError: {reason}"
    )


def test_gloos_own_trouble_is_a_cause(run_dir: RunDir) -> None:
    write_error(run_dir, 0, "RuntimeError", "Connection closed by peer", t=1.0)
    write_error(
        run_dir,
        1,
        "RuntimeError",
        "[enforce fail at gloo/transport/tcp/device.cc:83] "
        "ifa != nullptr. Unable to find address for: eth7",
        t=2.0,
    )
    assert "Unable to find address for: eth7" in why_failed(run_dir, 1)


def test_a_collective_that_timed_out_is_named_and_so_is_the_late_rank(run_dir: RunDir) -> None:
    elastic(run_dir, 0, -6)
    run_dir.rank_log(0).write_text(WATCHDOG)
    waited = "rank 0 waited 6 s in all_gather at step 12 during train"
    assert why_failed(run_dir, 1) == f"{waited} for other ranks"
    first, second = (
        recorded_entry(1, "all_reduce", "completed"),
        recorded_entry(2, "x", "completed"),
    )
    waits = recorded_entry(3, "_all_gather_base", "scheduled")
    for rank, entries in enumerate([(first, second, waits), (first, second)]):
        path = run_dir.flight_prefix.with_name(f"{run_dir.flight_prefix.name}{rank}")
        path.write_bytes(pickle.dumps(recorded_flight(*entries), protocol=2))
    assert why_failed(run_dir, 1) == (
        f"{waited}: rank 1 never reached the all_gather that rank 0 waits in"
    )


@pytest.mark.parametrize(
    ("reached", "words"),
    [
        ([3, 2, 3], "rank 1 never reached the all_gather that ranks 0, 2 wait in"),
        ([3, 0, 3], "rank 1 never reached the all_reduce that ranks 0, 2 wait in"),
        ([3, 3, 3], "all ranks are in the same all_gather, which never finishes"),
    ],
)
def test_who_is_late_for_what(run_dir: RunDir, reached: list[int], words: str) -> None:
    kinds = ["all_reduce", "reduce_scatter", "_all_gather_base"]
    for rank, last in enumerate(reached):
        entries = [
            recorded_entry(number, kind, "scheduled" if number == 3 else "completed")
            for number, kind in enumerate(kinds[:last], 1)
        ]
        run_dir.flight(rank).write_text(json.dumps([recorded_flight(*entries), {}]))
    assert str(find_wait(run_dir)) == words


def test_ranks_that_wait_for_nobody(run_dir: RunDir) -> None:
    assert find_wait(run_dir) is None
    done = recorded_flight(recorded_entry(1, "all_reduce", "completed"))
    for rank in (0, 1):
        run_dir.flight(rank).write_text(json.dumps([done, {}]))
    assert find_wait(run_dir) is None


class Evil:
    """What a pickle must not be able to do."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, ("evil",)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"torn",
        b"[1",
        b"[[]]",
        b'[{"entries": 5}]',
        b'[{"entries": [{"is_p2p": false}]}]',
        pickle.dumps(Evil()),
        pickle.dumps({"entries": [Evil()]}),
        pickle.dumps([1]),
        b"[" * 100_000,
        b"\x80\x04Nr\0\0\0\1.",  # reserves 256 MB
    ],
)
@pytest.mark.parametrize("suffix", ["", ".json"])
def test_a_flight_record_of_any_content_does_no_harm(
    run_dir: RunDir, content: bytes, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run_dir.root)
    run_dir.flight_prefix.with_name(f"{run_dir.flight_prefix.name}0{suffix}").write_bytes(content)
    tracemalloc.start()
    assert find_wait(run_dir) is None
    assert tracemalloc.get_traced_memory()[1] < 100 << 20
    tracemalloc.stop()
    assert not (run_dir.root / "evil").exists()
