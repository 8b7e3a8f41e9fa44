"""Measure the dashboard on a real pseudo-terminal: `python tests/bench/dashboard.py [--only …]`.

Eight played GPUs, three running jobs whose heartbeats and steps a small process writes once a
second. Processor time is user and system time of the dashboard's process over wall time.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from jobs.queue.states import State  # noqa: E402
from jobs.queue.store import Store  # noqa: E402
from jobs.run.rundir import event  # noqa: E402
from tests.support.nvml_stub.stub import StubNvml, build, busy, gpu, uuid  # noqa: E402
from tests.support.tui.made_up_runs import add_job, append_events, write_log, write_steps  # noqa: E402
from tests.support.tui.terminal import Terminal, terminal  # noqa: E402
from tui.text.tables import table  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from jobs.queue.store import Job

_COMMAND: Final = (sys.executable, "-m", "tui")
_SIZES: Final = ((80, 24), (120, 40), (200, 60))
_LINE: Final = "2026-01-01 12:00:00 INFO trainer: step {n:>9} loss 0.4321 lr 1.0e-4 grad 0.31\n"
_VOCABULARY: Final = ("step", "loss", "latents", "encoded", "saved", "rank", "waits", "of", "0.38")

Row = tuple[str, str, str]


class Machine:
    """A state directory with jobs, eight played GPUs, and a process that keeps them moving."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.home = folder / "home"
        self.home.mkdir(mode=0o700)
        self.store = Store(self.home)
        self._stack = stack
        lock = stack.enter_context((self.home / "runner.lock").open("a"))
        fcntl.flock(lock, fcntl.LOCK_EX)  # no queue keeper: it would end what only looks running
        self.stub = StubNvml(build(folder), folder / "gpus.txt")
        self._moving = threading.Event()
        self.play(0.0)
        threading.Thread(target=self._keep_playing, daemon=True).start()
        stack.callback(self._moving.set)

    @property
    def env(self) -> dict[str, str]:
        return self.stub.environment | {
            "FSDP_TUI_HOME": str(self.home),
            "XDG_CACHE_HOME": str(self.home / "cache"),
            "XDG_CONFIG_HOME": str(self.home / "config"),
            "PYTHONPATH": str(ROOT),
            "XDG_STATE_HOME": str(self.home / "state"),
            "FSDP_TUI_HOST": "node",
        }

    def play(self, t: float) -> None:
        self.stub.write([gpu(index, **(busy(index, t) if index < 6 else {})) for index in range(8)])

    def _keep_playing(self) -> None:
        begun = time.monotonic()
        while not self._moving.wait(1.0):
            self.play(time.monotonic() - begun)

    def train(self, *jobs: Job) -> None:
        """Heartbeats and steps of these jobs, until the end of the measurement."""
        process = self._stack.enter_context(
            subprocess.Popen(
                [
                    sys.executable,
                    str(ROOT / "tests/support/jobs/fake_training.py"),
                    str(self.home),
                    *(str(job.id) for job in jobs),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self._stack.callback(process.stdin.close)
        process.stdout.readline()

    def three_jobs(self, *, train: bool = True) -> list[Job]:
        """Two jobs on two GPUs each and one on one."""
        places = ((0, 1), (2, 3), (4,))
        jobs = [
            add_job(
                self.store,
                f"lora-{number}",
                state=State.RUNNING,
                ranks=len(place),
                gpus=[uuid(index) for index in place],
                total_steps=100_000,
            )
            for number, place in enumerate(places, 1)
        ]
        for job in jobs:  # no two show the same, or a key that moves between them costs nothing
            write_steps(job, 480 + 11 * job.id, seed=job.id)
            words = random.Random(job.id)
            write_log(job, "".join(_random_line(words) for _ in range(500)))
        if train:
            self.train(*jobs)
        return jobs


def _random_line(rng: random.Random) -> str:
    """Return a line of log that says something else than any other."""
    text = " ".join(rng.choice(_VOCABULARY) for _ in range(rng.randint(4, 18)))
    return f"12:{rng.randint(10, 59)}:{rng.randint(10, 59)} {text}\n"


@contextmanager
def machine() -> Iterator[Machine]:
    """One in a folder of its own, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="bench-dashboard-") as folder, ExitStack() as stack:
        yield Machine(Path(folder), stack)


@contextmanager
def dashboard(on: Machine, size: tuple[int, int]) -> Iterator[Terminal]:
    """The dashboard after its first full picture."""
    with terminal(_COMMAND, on.env, size) as shown:
        shown.wait_for(lambda text: "lora-1" in text)
        yield shown


def first_frame(times: int) -> Iterator[Row]:
    with machine() as on:
        on.three_jobs()
        found: list[tuple[float, float, float]] = []
        for _ in range(times):
            with terminal(_COMMAND, on.env, (120, 40)) as shown:
                drawn = shown.wait_for(lambda text: "fsdp-tui" in text)
                filled = drawn + shown.wait_for(lambda text: "lora-1" in text)
                found.append((drawn, filled, shown.processor_seconds()))
    for name, values in zip(
        ("first frame", "first frame with jobs and devices", "processor until then"),
        zip(*found, strict=True),
        strict=True,
    ):
        yield name, f"{statistics.median(values):.2f} s", f"{times} starts, least {min(values):.2f}"


def idle(seconds: float) -> Iterator[Row]:
    for size in _SIZES:
        with machine() as on:
            on.three_jobs()
            with dashboard(on, size) as shown:
                time.sleep(6)
                spent, got = shown.processor_seconds(), shown.received
                begun = time.monotonic()
                time.sleep(seconds)
                took = time.monotonic() - begun
                share = (shown.processor_seconds() - spent) / took
                rate = (shown.received - got) / took
                at = f"{size[0]}x{size[1]}"
                yield f"idle {at}: processor", f"{share:.2%} of a core", "goal 2 %"
                yield f"idle {at}: to the terminal", f"{rate / 1000:.2f} kB/s", "goal 4"
                yield f"idle {at}: resident", f"{shown.resident() / 1e6:.0f} MB", "goal 90"


def keys(times: int) -> Iterator[Row]:
    """Bytes that answer a key on jobs that rest: of a second, less what an idle second takes."""
    for size in _SIZES:
        with machine() as on:
            on.three_jobs(train=False)
            for number in range(20):
                add_job(on.store, f"ended-{number}", state=State.STOPPED)
            with dashboard(on, size) as shown:
                time.sleep(4)
                idle = statistics.median(_second(shown, "") for _ in range(2 * times))
                for name, there, back, goal in (
                    ("j", "j", "k", "goal 1.5"),
                    ("?", "?", "\x1b", "goal 8"),
                    ("esc", "\x1b", "?", "goal 5"),
                ):
                    if name == "esc":
                        _second(shown, "?")
                    counts = []
                    for _ in range(times):
                        counts.append(_second(shown, there) - idle)
                        _second(shown, back)
                    took = max(0.0, statistics.median(counts)) / 1000
                    yield f"key {name} {size[0]}x{size[1]}", f"{took:.1f} kB", goal


def _second(shown: Terminal, key: str) -> int:
    before = shown.received
    if key:
        shown.press(key)
    time.sleep(1.0)
    return shown.received - before


def flood(seconds: float, a_second: int = 50_000) -> Iterator[Row]:
    with machine() as on:
        jobs = on.three_jobs()
        with dashboard(on, (120, 40)) as shown:
            time.sleep(4)
            written = [500]
            # Into both logs between which the keys go to and fro.
            writer = threading.Thread(target=_pour, args=(jobs[:2], seconds, a_second, written))
            spent, got, before = shown.processor_seconds(), shown.received, shown.resident()
            writer.start()
            waits = _answers(shown, lambda: not writer.is_alive())
            writer.join()
            share = (shown.processor_seconds() - spent) / seconds
            yield "flood: lines written", f"{written[0]:,}", f"{a_second:,}/s for {seconds:.0f} s"
            yield "flood: a key is answered", *_of(waits)
            yield "flood: processor", f"{share:.0%} of a core", ""
            yield "flood: to the terminal", f"{(shown.received - got) / seconds / 1e3:.0f} kB/s", ""
            yield (
                "flood: resident",
                f"{shown.resident() / 1e6:.0f} MB",
                f"{before / 1e6:.0f} before",
            )
            yield "flood: lines in the log view", f"{_lines_seen(shown, written[0]):,}", "all"


def _pour(jobs: Sequence[Job], seconds: float, a_second: int, written: list[int]) -> None:
    """Append lines at this rate to each log, a tenth of a second at a time."""
    begun = time.monotonic()
    while (now := time.monotonic() - begun) < seconds:
        due = 500 + int(now * a_second)
        lines = "".join(_LINE.format(n=n) for n in range(written[0], due))
        for job in jobs:
            with open(job.run_dir.rank_log(0), "a", encoding="utf-8") as file:
                file.write(lines)
        written[0] = due
        time.sleep(0.1)


def _answers(shown: Terminal, over: Callable[[], bool]) -> list[float]:
    """Seconds until the cursor moved, for each of many keys."""
    waits: list[float] = []
    while not over():
        time.sleep(0.3)
        shown.forget()
        shown.press("jk"[len(waits) % 2])
        waits.append(shown.wait_for(lambda text: "▸" in text))
    return waits


def _of(waits: list[float]) -> tuple[str, str]:
    ordered = sorted(waits)
    late = ordered[int(len(ordered) * 0.95)]
    return f"{statistics.median(waits) * 1000:.0f} ms", (
        f"95 %: {late * 1000:.0f}, worst {ordered[-1] * 1000:.0f} of {len(waits)}; goal 100"
    )


def _lines_seen(shown: Terminal, expected: int) -> int:
    """The count that the held log names; waited for, since it may still be reading."""
    shown.press("g")
    time.sleep(1)
    shown.press("f")
    counts, deadline = [0], time.monotonic() + 10
    while counts[-1] < expected and time.monotonic() < deadline:
        time.sleep(0.2)
        for line in shown.lines:
            counts += [int(n.replace(",", "")) for n in re.findall(r"of ([\d,]+)", line)]
    return max(counts)


def large_log(gigabytes: float) -> Iterator[Row]:
    with machine() as on:
        jobs = on.three_jobs()
        chunk = "".join(_LINE.format(n=n) for n in range(100_000)).encode()
        with open(jobs[1].run_dir.rank_log(0), "wb") as file:
            while file.tell() < gigabytes * 1e9:
                file.write(chunk)
            size = file.tell()
            file.write(b"the very last line of it\n")
        with dashboard(on, (120, 40)) as shown:
            time.sleep(3)
            before = shown.resident()
            shown.forget()
            shown.press("j")
            opened = shown.wait_for(lambda text: "the very last line" in text)
            yield f"open a log of {size / 1e9:.1f} GB", f"{opened:.2f} s", "goal 0.5"
            spent = shown.processor_seconds()
            most = before
            for _ in range(80):
                time.sleep(0.25)
                most = max(most, shown.resident())
            grown = (most - before) / 1e6
            lines = size // len(_LINE.format(n=0))
            yield "its index", f"+{grown:.0f} MB", f"{lines:,} lines, {before / 1e6:.0f} MB before"
            yield "its index: processor", f"{shown.processor_seconds() - spent:.1f} s", "in 20 s"


def many(jobs: int, events: int) -> Iterator[Row]:
    with machine() as on:
        running = on.three_jobs()
        for number in range(jobs - 3):
            write_steps(add_job(on.store, f"old-{number}", state=State.COMPLETED), 3)
        _long_history(running[0], events)
        with terminal(_COMMAND, on.env, (120, 40)) as shown:
            drawn = shown.wait_for(lambda text: "lora-1" in text)
            yield f"{jobs:,} jobs: first frame with them", f"{drawn:.2f} s", ""
            time.sleep(jobs / 25 + 5)  # ended jobs are read a few at a time
            spent, begun, got = shown.processor_seconds(), time.monotonic(), shown.received
            time.sleep(10)
            took = time.monotonic() - begun
            share = (shown.processor_seconds() - spent) / took
            yield f"{jobs:,} jobs, {events:,} events: processor", f"{share:.2%} of a core", ""
            rate = (shown.received - got) / took / 1000
            yield f"{jobs:,} jobs: to the terminal", f"{rate:.2f} kB/s", ""
            yield f"{jobs:,} jobs: resident", f"{shown.resident() / 1e6:.0f} MB", ""
            stop = time.monotonic() + 8
            waits = _answers(shown, lambda: time.monotonic() > stop)
            yield f"{jobs:,} jobs: a key is answered", *_of(waits)


def _long_history(job: Job, events: int) -> None:
    append_events(
        job,
        *(
            event("step", step=600 + n, epoch=1, loss=0.4 + (n % 97) / 500, lr=1e-4, seconds=1.0)
            for n in range(events)
        ),
    )


def main() -> None:
    """Print the table, a row as soon as it is known."""
    wanted = _parse()
    parts: dict[str, Iterator[Row]] = {
        "first": first_frame(5),
        "idle": idle(wanted.seconds),
        "keys": keys(3),
        "flood": flood(10.0),
        "large": large_log(wanted.gigabytes),
        "many": many(1000, 10_000),
    }
    rows: list[Row] = []
    progress: IO[str] = sys.stderr
    for name, part in parts.items():
        if wanted.only and name not in wanted.only:
            continue
        for row in part:
            rows.append(row)
            print("  ".join(row), file=progress, flush=True)
    print(f"\n{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(table(("what", "measured", "note"), rows))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--only", nargs="*", choices=("first", "idle", "keys", "flood", "large", "many")
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="of each idle measurement")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of the large log")
    return parser.parse_args()


if __name__ == "__main__":
    main()
