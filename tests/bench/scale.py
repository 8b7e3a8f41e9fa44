"""Measure commands, dashboard and keeper with very many jobs: `python tests/bench/scale.py`.

Makes a state directory of 5,000 jobs, 500 of which ran for 100,000 events (hard links of one file:
what costs is to read and to decode them), most of them of a version that kept nothing of its ended
runs. Processor time is user and system time.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from jobs.machine.processes import ProcessId  # noqa: E402
from jobs.machine.residence import residence  # noqa: E402
from jobs.queue.store import Store  # noqa: E402
from jobs.run.rundir import RankStatus, RunDir  # noqa: E402
from tests.support.tui.terminal import terminal  # noqa: E402
from tui.text.tables import table  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

_NOW: Final = time.time()
_TICKS: Final = os.sysconf("SC_CLK_TCK")
_RUNNING: Final = 2
_LOG_LINE: Final = b"2026-01-01 12:00:00 INFO trainer: step 12345 loss 0.4321 lr 1.0e-4 grad 0.31\n"

Row = tuple[str, str, str]


def make(home: Path, *, jobs: int, runs: int, events: int, queued: int) -> None:
    """Write the state directory: files and rows, and nothing through the queue."""
    store = Store(home)
    long, short = home / "long.jsonl", home / "short.jsonl"
    _write_events(long, events)
    _write_events(short, 20)
    me = ProcessId.of(os.getpid())  # looks like the supervisor of what runs
    assert me is not None
    rows = []
    for number in range(1, jobs + 1):
        run_dir = RunDir(home / "runs" / f"{number}-job-{number}")
        run_dir.create()
        run_dir.job_file.write_text(f"name: job-{number}\n")
        left = jobs - number  # the newest have run for long, and some of them run
        state = "running" if left < _RUNNING else "completed"
        state = "queued" if runs <= left < runs + queued else state
        if state != "queued":
            os.link(long if left < runs else short, run_dir.events)
        active = state == "running"
        if active:
            status = RankStatus(0, me.pid, me.started, "node", "cpu", "train", 5, _NOW, _NOW)
            run_dir.rank_file(0).write_text(status.to_json())
        rows.append(
            {
                "id": number,
                "name": f"job-{number}",
                "state": state,
                "reason": f"now {state}",
                "ranks": 1,
                "wanted": "null",
                "total_steps": events,
                "run_dir": str(run_dir.root),
                "run_id": f"scale-{number}",
                "created": _NOW - left,
                "queued": _NOW - left,
                "started": None if state == "queued" else _NOW - left,
                "ended": _NOW - left if state == "completed" else None,
                "supervisor_pid": me.pid if active else None,
                "supervisor_started": me.started if active else None,
                "boot_id": str(residence()) if active else None,
            }
        )
    with closing(sqlite3.connect(store.path)) as db, db:
        names, marks = ", ".join(rows[0]), ", ".join(f":{name}" for name in rows[0])
        db.executemany(f"INSERT INTO jobs ({names}) VALUES ({marks})", rows)


def _write_events(path: Path, count: int) -> None:
    frame = {"t": _NOW, "kind": "start", "strategy": "single", "strategy_reason": "one rank"}
    lines = [json.dumps(frame)]
    for step in range(1, count + 1):
        event = {
            "t": _NOW + step,
            "kind": "step",
            "step": step,
            "epoch": 1,
            "loss": 0.4 + step % 97 / 500,
            "lr": 1e-4,
            "grad_norm": 0.31,
            "seconds": 0.42,
            "images_per_second": 4.7,
            "peak_bytes": 81604378624,
        }
        lines.append(json.dumps(event))
        if step % 1000 == 0:
            lines.append(json.dumps({"t": _NOW + step, "kind": "checkpoint", "step": step}))
    path.write_text("\n".join(lines) + "\n")


def _environment(home: Path) -> dict[str, str]:
    kept = {
        name: os.environ[name]
        for name in ("PATH", "HOME", "LANG", "FAKE_SLURM")
        if name in os.environ
    }
    return kept | {
        "FSDP_TUI_HOME": str(home),
        "XDG_CACHE_HOME": str(home / "cache"),
        "TERM": "xterm-256color",
        "XDG_CONFIG_HOME": str(home / "config"),
        "PYTHONPATH": str(ROOT),
        "FSDP_TUI_RUNNER_IDLE": "1000",
    }


def command(home: Path, name: str, *words: str) -> Row:
    """Wall and processor seconds of a command, and its highest memory."""
    begun = time.monotonic()
    with open(os.devnull, "wb") as nowhere:
        process = subprocess.Popen(
            [sys.executable, "-m", "tui", *words], env=_environment(home), stdout=nowhere
        )
        _, status, used = os.wait4(process.pid, 0)
    took = time.monotonic() - begun
    assert status == 0, (name, status)
    cpu = used.ru_utime + used.ru_stime
    return name, f"{cpu:.2f} s", f"{took:.2f} s by the clock, {used.ru_maxrss / 1024:.0f} MiB"


def keeper(home: Path, seconds: float, module: str = "jobs.backends.keeper") -> Row:
    """The share of a core that the queue keeper takes, or that of Slurm jobs."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"from {module} import keep; from jobs.queue.store import Store; keep(Store(), 1000)",
        ],
        env=_environment(home),
        cwd=home,
        stdout=subprocess.DEVNULL,
    )
    try:
        time.sleep(5)
        return "keeper", _share(process.pid, seconds), "goal 1 %"
    finally:
        process.kill()
        process.wait()


def dashboard(home: Path, newest: str, settle: float, seconds: float) -> Iterator[Row]:
    """Seconds of a processor until the first rows, and the share of a core at rest."""
    with terminal([sys.executable, "-m", "tui"], _environment(home), (120, 40)) as shown:
        took = shown.wait_for(lambda text: newest in text)
        cpu = shown.processor_seconds()
        yield "dashboard: first rows", f"{cpu:.2f} s", f"{took:.2f} s by the clock; goal 1.5"
        time.sleep(settle)
        yield "dashboard: idle", _share(shown.process.pid, seconds), "goal 2 %"
        yield "dashboard: resident", f"{shown.resident() / 1e6:.0f} MB", ""


def _share(pid: int, seconds: float) -> str:
    before, begun = _spent(pid), time.monotonic()
    time.sleep(seconds)
    return f"{(_spent(pid) - before) / (time.monotonic() - begun):.2%} of a core"


def _spent(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def measure(home: Path, asked: argparse.Namespace) -> Iterator[Row]:
    """All rows of the table."""
    log = RunDir(home / "runs" / f"{asked.jobs}-job-{asked.jobs}").rank_log(0)
    # The keeper first: commands start one, which would look after the queue in its place.
    parts: dict[str, Any] = {
        "keeper": lambda: [keeper(home, asked.seconds)],
        "list": lambda: [
            command(home, "list, the first time", "list"),
            command(home, "list", "list"),
            command(home, "list --json", "list", "--json"),
        ],
        "show": lambda: [
            command(home, "show, ended", "show", str(asked.jobs - _RUNNING)),
            command(home, "show, ended, again", "show", str(asked.jobs - _RUNNING)),
            command(home, "show, running", "show", str(asked.jobs)),
            command(home, "show, running, again", "show", str(asked.jobs)),
        ],
        "dashboard": lambda: dashboard(home, f"job-{asked.jobs}", asked.settle, asked.seconds),
        "logs": lambda: [_logs(home, log, asked)],
    }
    for name, part in parts.items():
        if not asked.only or name in asked.only:
            yield from part()


def _logs(home: Path, log: Path, asked: argparse.Namespace) -> Row:
    with open(log, "wb") as file:
        while file.tell() < asked.gigabytes * 1e9:
            file.write(_LOG_LINE * 10_000)
    try:
        return command(home, f"logs of {asked.gigabytes:g} GB", "logs", str(asked.jobs))
    finally:
        log.unlink()


def main() -> None:
    """Print the table, a row as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=5000)
    parser.add_argument("--runs", type=int, default=500, help="jobs with a long event stream")
    parser.add_argument("--events", type=int, default=100_000, help="of each of these")
    parser.add_argument("--queued", type=int, default=100, help="jobs that wait")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each idle measurement")
    parser.add_argument("--settle", type=float, default=120.0, help="until all ended jobs are read")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of the log")
    parser.add_argument("--only", nargs="*", help="list show keeper dashboard logs")
    parser.add_argument("--dir", type=Path, help="where it is made; default: /tmp")
    asked = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="bench-scale-", dir=asked.dir) as folder:
        home = Path(folder) / "home"
        home.mkdir(mode=0o700)
        os.umask(0o077)
        make(home, jobs=asked.jobs, runs=asked.runs, events=asked.events, queued=asked.queued)
        for row in measure(home, asked):
            rows.append(row)
            print("  ".join(row), file=sys.stderr, flush=True)
    print(table(("what", "processor", "note"), rows))


if __name__ == "__main__":
    main()
