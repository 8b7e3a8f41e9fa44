"""`python launcher.py RUNDIR RANKS STEPS GRACE`: what `accelerate launch` looks like from outside.

As torch elastic does, it starts every rank in a session of its own; hands SIGTERM on to them; and
when one fails, ends the others (SIGTERM, after GRACE seconds SIGKILL), prints how all of them
ended, the others first, and exits with status 1. With `FAKE_LAUNCHER=refuse` it prints an error and
exits with status 2 before any rank starts. Ranks are forked, which spares each of them the imports;
`.ended-N` in the run directory says that the launcher has noticed the end of rank N.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# As torch elastic 2.13 prints it; `tests/jobs/supervise/test_diagnosis.py` has recorded ends to
# compare with.
FAILURE = """\
[{index}]:
  time      : {time}
  host      : node
  rank      : {rank} (local_rank: {rank})
  exitcode  : {code} (pid: {pid}) {signal}
  error_file: <N/A>
  traceback : {traceback}"""
SUMMARY = """\
Traceback (most recent call last):
  File "accelerate/commands/launch.py", line 1029, in multi_gpu_launcher
    distrib_run.run(args)
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
{border}
engine FAILED
{section}
Failures:
{others}
{section}
Root Cause (first observed failure):
{root}
{border}
"""


def failure(index: int, rank: int, code: int, pid: int) -> str:
    """One rank's end in the summary."""
    name = signal.Signals(-code).name if code < 0 else ""
    return FAILURE.format(
        index=index,
        rank=rank,
        code=code,
        pid=pid,
        time=time.strftime("%Y-%m-%d_%H:%M:%S"),
        signal=f" ({name})" if name else "",
        traceback=f"Signal {-code} ({name}) received by PID {pid}"
        if name
        else "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html",
    )


def summary(root: tuple[int, int, int], others: Sequence[tuple[int, int, int]] = ()) -> str:
    """What elastic prints at the end; of each rank its number, exit status and pid."""
    rest = [failure(index, *other) for index, other in enumerate(others, 1)]
    first = failure(0, *root)
    width = max(len(line) for text in (first, *rest) for line in text.splitlines())
    return SUMMARY.format(
        border="=" * width,
        section="-" * width,
        root=first,
        others="\n".join(rest) or "  <NO_OTHER_FAILURES>",
    )


def say(level: str, line: int, text: str) -> None:
    """A line of elastic's own log."""
    stamp = time.strftime("%m%d %H:%M:%S.000000")
    where = f"torch/distributed/elastic/multiprocessing/api.py:{line}"
    print(f"{level}{stamp} {os.getpid()} {where}] {text}", flush=True)


def alone(code: int) -> int:
    """A single rank is started without elastic, and `subprocess` says how it ended."""
    try:
        subprocess.CompletedProcess([sys.executable, "-m", "engine"], code).check_returncode()
    except subprocess.CalledProcessError as error:
        print(f"Traceback (most recent call last):\nsubprocess.{type(error).__name__}: {error}")
        return 1
    return 0


def start(run_dir: Path, rank: int, ranks: int, steps: int) -> int:
    """Fork a rank; its pid."""
    # Beside this script; whoever starts a keeper keeps Python from looking there.
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from rank import Rank  # type: ignore[import-not-found]

    from jobs.run.rundir import RunDir

    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()
        status = Rank(RunDir(run_dir), rank, ranks, steps).run()
    except BaseException:
        traceback.print_exc()
    os._exit(status)


def main() -> int:
    run_dir, ranks, steps, grace = Path(sys.argv[1]), *map(int, sys.argv[2:4]), float(sys.argv[4])
    if os.environ.get("FAKE_LAUNCHER") == "refuse":
        print("warming up\nerror: no such option: --fsdp_versoin")
        return 2
    for mark in run_dir.glob(".ended-*"):  # of an earlier attempt
        mark.unlink()
    living = {start(run_dir, rank, ranks, steps): rank for rank in range(ranks)}
    ends: list[tuple[int, int, int]] = []

    def hand_on(number: int, _: object) -> None:
        for pid in living:
            with suppress(ProcessLookupError):  # it has just been waited for
                os.kill(pid, number)

    def wait_for_one() -> None:
        pid, status = os.wait()
        rank = living.pop(pid)
        (run_dir / f".ended-{rank}").touch()
        ends.append((rank, os.waitstatus_to_exitcode(status), pid))

    def give_up(*_: object) -> None:
        for pid in living:
            unable = f"Unable to shutdown process {pid} via 15, forcefully exiting via 9"
            say("W", 1048, unable)
        hand_on(signal.SIGKILL, None)

    told: list[int] = []

    def hand_on_and_end(number: int, frame: object) -> None:
        told.append(number)
        hand_on(number, frame)

    signal.signal(signal.SIGTERM, hand_on_and_end)
    while living and (told or not (ends and ends[-1][1])):
        wait_for_one()
    first = ends[-1]
    if ranks == 1:
        return alone(first[1])
    if told:  # elastic waits for the ranks, then raises, however they ended
        where = "torch.distributed.elastic.multiprocessing.api.SignalException"
        print(f"{where}: Process {os.getpid()} got signal: {told[0]}", flush=True)
        return 1
    if first[1] == 0:
        return 0
    for pid in living:
        say("W", 1028, f"Sending process {pid} closing signal SIGTERM")
    hand_on(signal.SIGTERM, None)
    signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, max(grace, 0.001))
    while living:
        wait_for_one()
    others = sorted(end for end in ends if end != first and end[1] != 0)
    say(
        "E",
        1002,
        f"failed (exitcode: {first[1]}) local_rank: {first[0]} "
        f"(pid: {first[2]}) of binary: {sys.executable}",
    )
    print(summary(first, others))
    return 1


if __name__ == "__main__":
    sys.exit(main())
