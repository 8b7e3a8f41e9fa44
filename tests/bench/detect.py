"""`python tests/bench/detect.py`: what looking at a model costs, beside building it for real.

Each way is a process of its own: seconds from its start to its end, and its highest resident
memory. Most of that is torch itself, which is why importing torch alone is measured too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

FLUX_2 = files("jobs") / "models" / "published" / "black-forest-labs--FLUX.2-dev.json"
# FLUX.2 cut down: 1.2 B parameters, 5 GB in fp32.
SMALL: dict[str, Any] = {"num_attention_heads": 16, "num_layers": 3, "num_single_layers": 14}

# Ends as the engine's commands do.
TORCH = """
import json, os, torch
print(json.dumps({"total_params": 0}), flush=True)
os._exit(0)
"""
REAL = """
import json, sys
import diffusers
config = json.load(open(sys.argv[1]))
model = getattr(diffusers, config["_class_name"]).from_config(config)
print(json.dumps({"total_params": sum(p.numel() for p in model.parameters())}))
"""


def measure(*command: str) -> tuple[float, float, int, int]:
    """Seconds, those of a processor, highest resident bytes, and the parameters it told of."""
    begun = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONSAFEPATH": "1"},
    )
    assert process.stdout is not None
    said = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - begun
    if process.returncode:
        sys.exit(f"{' '.join(command[:2])} ended with status {process.returncode}")
    computed = used.ru_utime + used.ru_stime  # what other processes do hardly counts in it
    return seconds, computed, used.ru_maxrss << 10, json.loads(said)["total_params"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as folder:
        large, small = Path(folder, "large.json"), Path(folder, "small.json")
        config = json.loads(FLUX_2.read_text(encoding="utf-8"))
        large.write_text(json.dumps(config))
        small.write_text(json.dumps(config | SMALL))
        ways = {
            "torch, imported": ("-c", TORCH),
            "FLUX.2-dev, looked at": ("-m", "engine.blocks", str(large)),
            "a small one, looked at": ("-m", "engine.blocks", str(small)),
            "a small one, built": ("-c", REAL, str(small)),
        }
        print(
            f"the best and the worst of {repeats}, after one that warms up; {os.cpu_count()} CPUs"
        )
        print(f"{'':24}{'B parameters':>13}{'seconds':>16}{'of a CPU':>14}{'highest MB':>12}")
        for name, command in ways.items():
            measure(*command)
            runs = [measure(*command) for _ in range(repeats)]
            _, _, memory, parameters = max(runs, key=lambda run: run[2])
            told = "".join(
                f"{f'{min(times):.1f} to {max(times):.1f}':>{width}}"
                for width, times in ((16, [run[0] for run in runs]), (14, [run[1] for run in runs]))
            )
            print(f"{name:24}{parameters / 1e9:>13.1f}{told}{memory / 1e6:>12.0f}")


if __name__ == "__main__":
    main()
