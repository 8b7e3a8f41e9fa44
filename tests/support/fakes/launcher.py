"""`python launcher.py RUNDIR RANKS STEPS GRACE`: what `accelerate launch` looks like from outside.

As torch elastic does, it starts every rank in a session of its own; hands SIGTERM on to them; and
when one fails, ends the others (SIGTERM, after GRACE seconds SIGKILL), prints how all of them
ended, the others first, and exits with status 1. With `FAKE_LAUNCHER=refuse` it prints an error and
exits with status 2 before any rank starts.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# As torch elastic 2.13 prints it; `tests/test_jobs_diagnosis.py` has recorded ends to compare with.
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
        index=index, rank=rank, code=code, pid=pid, time=time.strftime("%Y-%m-%d_%H:%M:%S"),
        signal=f" ({name})" if name else "",
        traceback=f"Signal {-code} ({name}) received by PID {pid}" if name else
        "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html",
    )  # fmt: skip


def summary(root: tuple[int, int, int], others: Sequence[tuple[int, int, int]] = ()) -> str:
    """What elastic prints at the end; of each rank its number, exit status and pid."""
    rest = [failure(index, *other) for index, other in enumerate(others, 1)]
    first = failure(0, *root)
    width = max(len(line) for text in (first, *rest) for line in text.splitlines())
    return SUMMARY.format(
        border="=" * width, section="-" * width, root=first,
        others="\n".join(rest) or "  <NO_OTHER_FAILURES>",
    )  # fmt: skip


def say(level: str, line: int, text: str) -> None:
    """A line of elastic's own log."""
    stamp = time.strftime("%m%d %H:%M:%S.000000")
    where = f"torch/distributed/elastic/multiprocessing/api.py:{line}"
    print(f"{level}{stamp} {os.getpid()} {where}] {text}", flush=True)


def alone(child: subprocess.Popen[bytes], command: list[str]) -> int:
    """A single rank is started without elastic, and `subprocess` says how it ended."""
    try:
        subprocess.CompletedProcess(command, child.wait()).check_returncode()
    except subprocess.CalledProcessError as error:
        print(f"Traceback (most recent call last):\nsubprocess.{type(error).__name__}: {error}")
        return 1
    return 0


def main() -> int:
    run_dir, ranks, steps, grace = sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
    if os.environ.get("FAKE_LAUNCHER") == "refuse":
        print("warming up\nerror: no such option: --fsdp_versoin")
        return 2
    script = str(Path(__file__).resolve().parent / "rank.py")
    commands = [
        [sys.executable, script, run_dir, str(rank), str(ranks), steps] for rank in range(ranks)
    ]
    children = [subprocess.Popen(command, start_new_session=True) for command in commands]

    def hand_on(number: int, _: object) -> None:
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    signal.signal(signal.SIGTERM, hand_on)
    if ranks == 1:
        return alone(children[0], commands[0])
    failed = None
    while failed is None and any(child.poll() is None for child in children):
        time.sleep(0.01)
        failed = next((r for r, c in enumerate(children) if c.poll() not in (None, 0)), None)
    if failed is None:
        return 0
    first = children[failed]
    for child in children:
        if child.poll() is None:
            say("W", 1028, f"Sending process {child.pid} closing signal SIGTERM")
    hand_on(signal.SIGTERM, None)
    deadline = time.monotonic() + grace
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        time.sleep(0.01)
    for child in children:
        if child.poll() is None:
            say(
                "W",
                1048,
                f"Unable to shutdown process {child.pid} via 15, forcefully exiting via 9",
            )
    hand_on(signal.SIGKILL, None)
    ends = [(rank, child.wait(), child.pid) for rank, child in enumerate(children)]
    say("E", 1002, f"failed (exitcode: {first.returncode}) local_rank: {failed} "
        f"(pid: {first.pid}) of binary: {sys.executable}")  # fmt: skip
    print(summary(ends.pop(failed), [end for end in ends if end[1] != 0]))
    return 1


if __name__ == "__main__":
    sys.exit(main())
