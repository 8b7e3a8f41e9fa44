"""Run a command on a machine that seems to have GPUs: `play.py --gpus 8 -- fsdp-tui`.

They are for looking at (pictures of the dashboard) and for trying out placement; with `--cuda` jobs
run on them too, though nothing is computed (`../cuda_stub`). Everything started from the command
sees them as well.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support.nvml_stub.stub import StubNvml

_MEMORY_OF_STRANGERS: Final = 38 * 2**30


def main() -> int:
    """Play until the command ends; its exit status."""
    # As a script this file finds no package that it could belong to.
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    from tests.support.cuda_stub import stub as cuda
    from tests.support.nvml_stub.stub import NoCompiler, StubNvml, build, start_holder

    wanted = _parse(sys.argv[1:])
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fsdp-tui"
    try:
        library = build(cache)
        python = cuda.find_python() if wanted.cuda else None
        played = cuda.StubCuda(cuda.build(cache, python), python) if python else None
    except (NoCompiler, cuda.Unavailable) as problem:
        print(f"play.py: {problem}", file=sys.stderr)
        return 2
    over = threading.Event()
    with tempfile.TemporaryDirectory(prefix="nvml-stub-") as folder:
        stub = StubNvml(library, Path(folder) / "gpus.txt")
        strangers = {
            index: start_holder(Path(folder), "train_unet.py", "--batch_size=16")
            for index in wanted.foreign
        }
        pids = {index: process.pid for index, process in strangers.items()}
        _write(stub, wanted, pids, 0.0)
        player = threading.Thread(target=_play, args=(stub, wanted, pids, over), daemon=True)
        player.start()
        # Ctrl-C is for the command; this process waits for what it makes of it.
        signal.signal(signal.SIGINT, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _: sys.exit(128 + number))
        child = None
        try:
            environment = stub.environment
            if played is not None:
                environment = played.environment(environment)
            child = subprocess.Popen(wanted.command, env=environment)
            return child.wait()
        except FileNotFoundError as problem:
            print(f"play.py: {problem}", file=sys.stderr)
            return 127
        finally:
            over.set()
            player.join()
            if child is not None and child.poll() is None:
                child.terminate()
            for process in strangers.values():
                process.kill()
                process.wait()


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="play.py",
        description="Run a command with played GPUs.",
        usage="%(prog)s [options] -- command …",
    )
    parser.add_argument("--gpus", type=int, default=8, metavar="N", help="how many (8)")
    parser.add_argument("--name", default="NVIDIA H200", help="their name (NVIDIA H200)")
    parser.add_argument(
        "--busy", type=_numbers, metavar="0-5", help="those that train (all but the last two)"
    )
    parser.add_argument(
        "--foreign",
        type=_numbers,
        default=[],
        metavar="6,7",
        help="those that someone else's process uses (none)",
    )
    parser.add_argument(
        "--state",
        type=Path,
        metavar="FILE",
        help="a JSON list of GPUs (keys: see gpu() in stub.py) instead, read again as it changes",
    )
    parser.add_argument("--cuda", action="store_true", help="let torch have them, for CUDA 13")
    parser.add_argument("command", nargs="+", help="what to run")
    wanted = parser.parse_args(words)
    if wanted.busy is None:
        wanted.busy = list(range(max(1, wanted.gpus - 2)))
    return wanted


def _numbers(text: str) -> list[int]:
    """`0-2,5` → 0, 1, 2, 5."""
    found: list[int] = []
    for piece in text.split(",") if text else []:
        first, _, last = piece.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def _play(
    stub: StubNvml, wanted: argparse.Namespace, pids: dict[int, int], over: threading.Event
) -> None:
    start = time.monotonic()
    while not over.wait(1.0):
        try:
            _write(stub, wanted, pids, time.monotonic() - start)
        except (OSError, ValueError, TypeError):  # someone is editing the file
            continue


def _write(stub: StubNvml, wanted: argparse.Namespace, pids: dict[int, int], t: float) -> None:
    from tests.support.nvml_stub.stub import busy

    if wanted.state is not None:
        stub.write(json.loads(wanted.state.read_text()))
        return
    gpus = []
    for index in range(wanted.gpus):
        values: dict[str, Any] = {"name": wanted.name}
        if index in wanted.busy:
            values |= busy(index, t)
        if index in pids:
            values |= {"memory_used": _MEMORY_OF_STRANGERS, "utilisation": 71, "temperature": 58}
            values |= {"power": 344.0, "clock": 1755, "reasons": 0}
            values["processes"] = [{"pid": pids[index], "memory": _MEMORY_OF_STRANGERS}]
        gpus.append(values)
    stub.write(gpus)


if __name__ == "__main__":
    sys.exit(main())
