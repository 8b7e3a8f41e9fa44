"""`python tests/bench/data.py`: how fast caches are filled, and how long a step waits for data.

Pictures are JPEGs of camera-like size, decoded, scaled and encoded by the toy's VAE; each rank has
one thread, so that two ranks are two cores' worth of work. The wait is what a step of a real job on
two ranks spends before its first forward.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

ROOT: Final = Path(__file__).resolve().parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=240)
    parser.add_argument("--side", type=int, default=1024, help="pixels of a picture")
    parser.add_argument("--resolution", type=int, default=256)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300, help="of the job whose wait is measured")
    parser.add_argument("--rank-of", type=json.loads, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank_of:
        fill(**asked.rank_of)
        return
    with tempfile.TemporaryDirectory(prefix="bench-data-") as scratch:
        folder = Path(scratch)
        command = [sys.executable, "-m", "engine.toy", scratch, "--pictures=24", "--size=64"]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        write_pictures(folder / "pictures", asked.pictures, asked.side)
        report_filling(folder, asked)
        report_waiting(folder, asked.steps)


def write_pictures(directory: Path, count: int, side: int) -> None:
    directory.mkdir()
    draw = np.random.default_rng(0)
    coarse = draw.integers(0, 255, (count, 24, 24, 3), dtype=np.uint8)
    for number in range(count):
        picture = Image.fromarray(coarse[number]).resize((side, side), Image.Resampling.BICUBIC)
        picture.save(directory / f"{number:04d}.jpg", quality=90)
        (directory / f"{number:04d}.txt").write_text(f"picture {number % 8}")


def report_filling(folder: Path, asked: argparse.Namespace) -> None:
    print(f"{asked.pictures} pictures of {asked.side}², to {asked.resolution}²")
    print(f"{'ranks':>5}{'seconds':>10}{'pictures/s':>12}{'speed-up':>10}   all runs")
    seconds: dict[int, list[float]] = {ranks: [] for ranks in asked.ranks}
    for repeat in range(asked.repeats):  # taking turns: what else the machine does meets all alike
        for ranks in asked.ranks:
            seconds[ranks].append(measure(folder, ranks, repeat, asked.resolution))
    base = statistics.median(seconds[asked.ranks[0]]) * asked.ranks[0]
    for ranks, runs in seconds.items():
        middle = statistics.median(runs)
        print(
            f"{ranks:5}{middle:10.2f}{asked.pictures / middle:12.1f}{base / middle:10.2f}   "
            f"{', '.join(f'{run:.2f}' for run in runs)}"
        )


def measure(folder: Path, ranks: int, repeat: int, resolution: int) -> float:
    """Seconds of the phase in which ranks fill an empty cache with latents."""
    root = folder / f"run-{ranks}-{repeat}"
    values = job(folder, folder / "pictures", num_processes=ranks, resolution=resolution)
    values |= {"cache_dir": str(root / "cache"), "max_train_steps": 100_000}
    started = []
    for rank in range(ranks):
        of = {"rank": rank, "ranks": ranks, "root": str(root), "values": values}
        command = [sys.executable, __file__, "--rank-of", json.dumps(of)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        started.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=-3, stderr=-3))
    if any(process.wait() for process in started):
        raise SystemExit(f"a rank failed; see {root}")
    for line in (root / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if (event["kind"], event.get("name"), event.get("state")) == ("phase", "latents", "end"):
            return float(event["seconds"])
    raise SystemExit("no latents were cached")


def fill(rank: int, ranks: int, root: str, values: dict[str, Any]) -> None:
    """On a rank."""
    import torch

    from engine.data.prepare import prepare
    from engine.ranks.telemetry import Telemetry
    from engine.ranks.world import World
    from jobs.run.rundir import RunDir
    from jobs.spec.file.load import load_spec
    from tests.support.engine.run_context import run_context

    torch.set_num_threads(1)
    run_dir = RunDir(Path(root))
    run_dir.create()
    spec = load_spec(None, values)
    world = World(rank, ranks, torch.device("cpu"), "ddp", "bench")
    telemetry = Telemetry(run_dir, rank)
    prepare(run_context(spec, run_dir, world, telemetry))
    telemetry.close()


def report_waiting(folder: Path, steps: int) -> None:
    job_file = folder / "job.yaml"
    values = job(
        folder,
        folder / "data",
        num_processes=2,
        max_train_steps=steps,
        resolution=64,
        checkpointing_steps=0,
    )
    job_file.write_text(json.dumps(values))
    home = {"FSDP_TUI_HOME": str(folder / "home"), "XDG_CACHE_HOME": str(folder / "cache")}
    command = [sys.executable, "-m", "tui", "run", str(job_file)]
    begun = time.perf_counter()
    subprocess.run(command, check=True, env=os.environ | home, capture_output=True, cwd=folder)
    events = next((folder / "home" / "runs").glob("*/events.jsonl")).read_text().splitlines()
    steps_done = [e for line in events if (e := json.loads(line))["kind"] == "step"][3:]
    waits = [step["data_seconds"] for step in steps_done]
    shares = [step["data_seconds"] / step["seconds"] for step in steps_done]
    total = sum(waits) / sum(step["seconds"] for step in steps_done)
    print(
        f"\n{len(shares)} steps on two ranks ({time.perf_counter() - begun:.0f} s with the start): "
        f"waiting for data {total:.2%} of the time; median {statistics.median(shares):.2%} "
        f"({statistics.median(waits) * 1e3:.2f} ms), 99th percentile "
        f"{sorted(shares)[int(len(shares) * 0.99)]:.2%}"
    )


def job(folder: Path, data: Path, **changes: Any) -> dict[str, Any]:
    return {
        "pretrained_model_name_or_path": str(folder / "model"),
        "dataset": str(data),
        "device": "cpu",
        "mixed_precision": "no",
        "max_sequence_length": 16,
        **changes,
    }


if __name__ == "__main__":
    main()
