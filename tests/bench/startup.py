"""`python tests/bench/startup.py`: where the time of starting and ending a job goes.

A toy job runs as a person's does: through the command line, the supervisor and the real
`accelerate launch`. Fifty times a second it is noted what each process of it has computed, and
every tenth time its unique memory (USS: what would be free if it ended); the run's events and logs
say what it did meanwhile. Processor seconds tell more than the clock where the machine does other
things too, and unique memory more than resident memory, most of which is torch's libraries: ranks
and launcher have the same pages of them.
"""

from __future__ import annotations

import argparse
import bisect
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench.load import unique_memory  # noqa: E402

EVERY: Final = 0.02  # seconds
WEIGHED: Final = 10  # looks from one look at memory to the next, since it takes milliseconds
TICK: Final = os.sysconf("SC_CLK_TCK")
PATIENCE: Final = 600.0  # seconds
STEPS: Final = 5


@dataclass
class Process:
    """One process of the job: what it had computed (seconds) at which time, and what it held."""

    role: str
    times: list[float] = field(default_factory=list)
    computed: list[float] = field(default_factory=list)
    unique: list[int] = field(default_factory=list)  # bytes

    def between(self, start: float, end: float) -> float:
        """Processor seconds in this time."""
        return self._at(end) - self._at(start)

    def _at(self, when: float) -> float:
        place = bisect.bisect_right(self.times, when)
        return self.computed[place - 1] if place else 0.0

    def holds(self, when: float) -> int:
        """Unique MiB at this time."""
        return self.unique[max(0, bisect.bisect_right(self.times, when) - 1)] >> 20


class Watch:
    """Every process whose environment names this state directory."""

    def __init__(self, home: Path) -> None:
        self._mark = f"FSDP_TUI_HOME={home}".encode()
        self._others = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        self.processes: dict[int, Process] = {}

    def look(self) -> None:
        """Note what they have computed until now."""
        for name in os.listdir("/proc"):
            if not name.isdigit() or int(name) in self._others:
                continue
            try:
                self._note(int(name))
            except (OSError, ValueError, IndexError):  # it has ended, or is not ours to read
                continue

    def _note(self, pid: int) -> None:
        place = Path("/proc", str(pid))
        environment = (place / "environ").read_bytes().split(b"\0")
        if self._mark not in environment:
            return
        role = _role((place / "cmdline").read_bytes().split(b"\0"), environment)
        fields = (place / "stat").read_text().rpartition(")")[2].split()
        if fields[0] == "Z":
            return
        process = self.processes.setdefault(pid, Process(role))
        process.role = role  # a child is first what its parent is
        process.times.append(time.time())
        process.computed.append((int(fields[11]) + int(fields[12])) / TICK)
        memory = unique_memory(pid) if len(process.unique) % WEIGHED == 0 else None
        process.unique.append(memory or (process.unique or [0])[-1])

    def of(self, role: str) -> Process:
        """The process of this role that computed most."""
        return max(
            (p for p in self.processes.values() if p.role == role), key=lambda p: p.computed[-1]
        )


def _role(words: list[bytes], environment: list[bytes]) -> str:
    text = b" ".join(words)
    if b"tui" in words:
        return "submit"
    if b"jobs.backends.local" in words:
        return "supervisor"
    if b"accelerate" in text and b"launch" in text:
        return "launcher"
    rank = next((v for v in environment if v.startswith(b"RANK=")), None)
    if b"engine" in words:  # a single rank is started without torch elastic
        return f"rank {int(rank.removeprefix(b'RANK=')) if rank else 0}"
    return "other"


def run_job(scratch: Path, toy: Path, ranks: int, name: str) -> list[dict[str, Any]]:
    """Run one job to its end; what it did, in order, with what that cost."""
    home = scratch / "state"
    environment = os.environ | {
        "FSDP_TUI_HOME": str(home),
        "XDG_CACHE_HOME": str(scratch / name),
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": str(ROOT),
        "FSDP_TUI_RUNNER_IDLE": "1",
    }
    job = scratch / "job.yaml"
    job.write_text(
        yaml.safe_dump(
            {
                "name": "bench",
                "pretrained_model_name_or_path": str(toy / "model"),
                "dataset": str(toy / "data"),
                "device": "cpu",
                "resolution": 64,
                "lora_rank": 4,
                "max_sequence_length": 16,
                "mixed_precision": "no",
                "learning_rate": 1e-3,
                "max_train_steps": STEPS,
                "checkpointing_steps": 0,
                "num_processes": ranks,
            }
        )
    )
    watch, begun = Watch(home), time.time()
    with open(scratch / "submitted", "wb") as answer:
        subprocess.Popen(
            [sys.executable, "-m", "tui", "submit", str(job), "--json"],
            env=environment,
            stdout=answer,
            cwd=scratch,
        )
    met = ended = run_dir = None
    while ended is None:
        watch.look()
        time.sleep(EVERY)
        if time.time() - begun > PATIENCE:
            sys.exit(f"the job does not end; look into {home}")
        if run_dir is None:
            text = (scratch / "submitted").read_text()
            run_dir = Path(json.loads(text)["run_dir"]) if text.endswith("}\n") else None
            continue
        if met is None and f"rank 0 of {ranks}" in _read(run_dir / "logs" / "rank0.log"):
            met = time.time()
        ended = _ended(run_dir)
    return _breakdown(watch, _moments(run_dir, watch, begun, met or begun, ended), ranks)


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _ended(run_dir: Path) -> float | None:
    """When the supervisor wrote its verdict, its last line."""
    lines = _read(run_dir / "logs" / "supervisor.log").splitlines()
    last = lines[-1].split(maxsplit=3) if lines else []
    if len(last) > 2 and last[2] in ("failed:", "lost:"):
        sys.exit(f"the job failed: {lines[-1]}\n{_read(run_dir / 'logs' / 'rank0.log')[-2000:]}")
    return time.time() if len(last) > 2 and last[2] == "completed:" else None


def _moments(
    run_dir: Path, watch: Watch, begun: float, met: float, ended: float
) -> list[tuple[str, float]]:
    """What was done, and until when."""
    events = [json.loads(line) for line in _read(run_dir / "events.jsonl").splitlines()]
    phases = {(e["name"], e["state"]): e["t"] for e in events if e["kind"] == "phase"}
    steps = [e["t"] for e in events if e["kind"] == "step"]
    (over,) = (e["t"] for e in events if e["kind"] == "end")
    moments = [
        ("submit, supervisor", watch.of("launcher").times[0]),
        ("launcher starts", watch.of("rank 0").times[0]),
        ("rank imports, meets", met),
    ]
    # `encode` is a part of `check`, which looks again when the others are done.
    if (imported := phases.get(("import", "end"), met)) < met:
        moments[2:] = [("rank imports", imported), ("ranks meet", met)]
    done = {"index": "index", "encode captions": "check", "encode latents": "latents"}
    moments += [(name, phases[key, "end"]) for name, key in {**done, "load": "load"}.items()]
    moments += [("build, first step", steps[0]), ("other steps", steps[-1])]
    moments += [("export, save, end", over), ("rank leaves", watch.of("rank 0").times[-1])]
    moments += [("launcher leaves", watch.of("launcher").times[-1]), ("verdict", ended)]
    return [("", begun), *moments]


def _breakdown(watch: Watch, moments: list[tuple[str, float]], ranks: int) -> list[dict[str, Any]]:
    rows, start = [], moments[0][1]
    launched = moments[2][1]  # ranks are there: from now on the launcher only waits for them
    for (_, since), (name, until) in pairwise(moments):
        own = [watch.of(f"rank {rank}").between(since, until) for rank in range(ranks)]
        rest = [p for p in watch.processes.values() if p.role in ("submit", "supervisor", "other")]
        rows.append(
            {
                "name": name,
                "wall": until - since,
                "until": until - start,
                "launcher": watch.of("launcher").between(since, until),
                "rank": own[0],
                "others": sum(own[1:]),
                "rest": sum(p.between(since, until) for p in rest),
                "launcher_mib": watch.of("launcher").holds(until) if until >= launched else 0,
                "rank_mib": watch.of("rank 0").holds(until) if until > launched else 0,
            }
        )
    return rows


def show(title: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{title}", flush=True)
    print(
        f"{'':22}{'wall s':>8}{'until':>8} |{'launcher':>9}{'rank 0':>8}{'ranks':>8}{'rest':>7}"
        f" |{'launcher':>9}{'rank 0':>8} MiB"
    )
    for row in rows:
        print(
            f"{row['name']:22}{row['wall']:8.2f}{row['until']:8.2f} |{row['launcher']:9.2f}"
            f"{row['rank']:8.2f}{row['others']:8.2f}{row['rest']:7.2f} |"
            f"{row['launcher_mib']:9}{row['rank_mib']:8}"
        )
    names = [row["name"] for row in rows]
    first = names.index("build, first step") + 1
    critical = sum(row["launcher"] + row["rank"] + row["rest"] for row in rows[:first])
    after = rows[first + 1 :]
    print(
        f"submit → first step: {critical:.2f} processor seconds, other ranks left out, "
        f"{rows[first - 1]['until']:.2f} s by the clock"
    )
    print(
        f"last step → verdict: {sum(r['launcher'] + r['rank'] + r['rest'] for r in after):.2f} "
        f"processor seconds, {sum(r['wall'] for r in after):.2f} s by the clock"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--again", action="store_true", help="also with caches that are filled")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    asked = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory(prefix="bench-startup-") as scratch:
        toy = Path(scratch, "toy")
        subprocess.run(
            [sys.executable, "-m", "engine.toy", str(toy)],
            cwd=ROOT,
            check=True,
            capture_output=True,
        )
        run_job(Path(scratch), toy, 1, "warm-up")  # files of libraries, byte code
        for ranks in asked.ranks:
            for words in ("empty caches", "filled caches")[: 1 + asked.again]:
                title = f"{ranks} rank{'s' * (ranks > 1)}, {words}"
                found[title] = run_job(Path(scratch), toy, ranks, f"caches-{ranks}")
                show(title, found[title])
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
