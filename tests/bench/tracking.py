"""`python tests/bench/tracking.py`: what a tracker costs a rank, in processor seconds a step.

A toy job on one CPU rank, by turns without a tracker and with TensorBoard, which follows the run
from a process of its own. The figure is the median over rounds of the ratio of the rank's times.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from jobs.machine.procfs import started_at  # noqa: E402
from jobs.run.rundir import RunDir  # noqa: E402
from jobs.spec.file.load import load_spec  # noqa: E402
from jobs.trackers import start_trackers  # noqa: E402

GOAL: Final = 1.01


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    asked = parser.parse_args()
    ratios = []
    with tempfile.TemporaryDirectory(prefix="bench-tracking-") as scratch:
        toy = [sys.executable, "-m", "engine.toy", scratch, "--pictures=16", "--size=64"]
        subprocess.run(toy, cwd=ROOT, check=True, capture_output=True)
        run(Path(scratch), "warm", [], 2)  # fills the caches
        print(f"{'off ms':>8}{'on ms':>8}{'ratio':>8}{'tracker s':>11}")
        for number in range(asked.rounds):
            off, _ = run(Path(scratch), f"off-{number}", [], asked.steps)
            on, tracker = run(Path(scratch), f"on-{number}", ["tensorboard"], asked.steps)
            ratios.append(on / off)
            print(f"{off * 1e3:8.2f}{on * 1e3:8.2f}{ratios[-1]:8.3f}{tracker:11.2f}", flush=True)
    middle = statistics.median(ratios)
    print(f"median {middle:.3f}" + ("" if middle <= GOAL else f"   more than {GOAL}"))


def run(scratch: Path, name: str, trackers: list[str], steps: int) -> tuple[float, float]:
    """Processor seconds of the rank a step, its start included, and of the tracker altogether."""
    values: dict[str, Any] = {
        "name": name,
        "pretrained_model_name_or_path": str(scratch / "model"),
        "dataset": str(scratch / "data"),
        "device": "cpu",
        "resolution": 64,
        "max_sequence_length": 16,
        "mixed_precision": "no",
        "max_train_steps": steps,
        "checkpointing_steps": 0,
        "report_to": trackers,
        "cache_dir": str(scratch / "cache"),
    }
    run_dir = RunDir(scratch / name)
    run_dir.create()
    spec = load_spec(None, values)
    run_dir.job_file.write_text(json.dumps(spec.to_dict()))  # JSON is YAML
    environment = os.environ | {
        "ACCELERATE_USE_CPU": "true",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    rank = subprocess.Popen([sys.executable, "-m", "engine", run_dir.root], env=environment)
    run_dir.launch_file.write_text(
        json.dumps({"launcher": [rank.pid, started_at(rank.pid)], "events_offset": 0})
    )
    followers = start_trackers(spec, run_dir)
    _, status, used = os.wait4(rank.pid, 0)
    assert status == 0, run_dir.rank_log(0).read_text()[-2000:]
    spent = [os.wait4(one.pid, 0)[2] for one in followers]
    return (used.ru_utime + used.ru_stime) / steps, sum(
        one.ru_utime + one.ru_stime for one in spent
    )


if __name__ == "__main__":
    main()
