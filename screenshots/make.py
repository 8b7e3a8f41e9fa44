"""Make the pictures of the dashboard: `python screenshots/make.py [--home DIR] [--out DIR]`.

With `--home` the pictures show the jobs of that state directory, which should come from a real
run. Without it they show made-up jobs in a temporary directory (`--gpus N` adds made-up GPUs).
The app runs headless and exports what it would send to a terminal.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

SIZES = {"80x24": (80, 24), "120x40": (120, 40)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, help="state directory whose jobs are shown")
    parser.add_argument("--out", type=Path, default=ROOT / "screenshots")
    parser.add_argument("--host", default="gpu-server", help="machine name in the pictures")
    parser.add_argument("--gpus", type=int, default=0, help="made-up GPUs (not with --home)")
    parser.add_argument("--select", type=int, help="job to show")
    parser.add_argument("--sizes", default="120x40,80x24")
    parser.add_argument("--theme", default="")
    parser.add_argument(
        "--settle", type=float, default=1.5, help="seconds before the first picture"
    )
    parser.add_argument("--only", default="", help="comma-separated scenes")
    options = parser.parse_args()
    os.environ["FSDP_TUI_HOST"] = options.host
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as made_up:
        os.environ["FSDP_TUI_HOME"] = str(options.home or made_up)
        if options.home is None:
            pretend(options.gpus)
        asyncio.run(take_all(options))


def pretend(gpus: int) -> None:
    """Fill the state directory with jobs that nobody ran; nothing is started."""
    from tui_support import FakeGpus, add_job, write_facts, write_log, write_rank, write_steps

    from jobs import devices, dispatch
    from jobs.states import State
    from jobs.store import Store

    store = Store()
    cards = FakeGpus(gpus)
    devices.gpus = cards  # type: ignore[assignment]
    dispatch._start_supervisor = lambda job: None
    dispatch.dispatch = lambda store: None
    oom = "rank 1 ran out of GPU memory at step 12 during backward: 79.1 of 79.6 GiB"
    done = add_job(store, "flux-shapes-r8", state=State.COMPLETED, reason="trained 200 steps")
    write_steps(done, 200)
    failed = add_job(store, "flux-large-batch", state=State.FAILED, reason=oom)
    write_steps(failed, 12)
    stopped = add_job(
        store, "flux-bf16-test", state=State.STOPPED, reason="stopped at step 57, saved"
    )
    write_steps(stopped, 57)
    uuids = [gpu.uuid for gpu in cards.gpus[1:3]]
    running = add_job(store, "demo", state=State.RUNNING, gpus=uuids, total_steps=240)
    write_facts(running)
    write_steps(running, 131, seconds=0.37)
    for rank in range(2):
        on_card = {}
        if uuids:
            on_card = {
                "device_uuid": uuids[rank], "device": f"cuda:{rank}", "allocated": 30 * 2**30,
                "reserved": 33 * 2**30, "peak": 36 * 2**30,
            }  # fmt: skip
        write_rank(running, rank, step=131, **on_card)
    lines = ["fsdp2: 57 of 57 parameters are DTensors, local size 1/2; 610.2 MiB on each rank\n"]
    lines += [
        f"step {step}/240  loss {0.38 + 0.5 / (step / 20 + 1):.4f}  lr 1.0e-03  0.37 s/step\n"
        for step in range(1, 132)
    ]
    lines.insert(60, "WARNING: caption of picture 17 is longer than 77 tokens; its end is cut\n")
    write_log(running, "".join(lines))
    add_job(store, "flux-night-run", reason=f"waits for job {running.id} to leave the CPU")
    add_job(store, "flux-sweep-lr3e-4", reason=f"waits for job {running.id} to leave the CPU")


async def take_all(options: argparse.Namespace) -> None:
    for name in options.sizes.split(","):
        size = SIZES.get(name) or tuple(map(int, name.split("x")))
        await take(options, name, size)


async def take(options: argparse.Namespace, name: str, size: tuple[int, int]) -> None:
    """Every scene at one size."""
    from jobs.store import Store
    from tui.app import FsdpTui

    app = FsdpTui(Store(), select=options.select)
    if options.theme:
        app.theme = options.theme
    scenes: dict[str, tuple[list[str], list[str]]] = {  # keys that open it, keys that leave it
        "dashboard": ([], []),
        "log": (["l"], ["l"]),
        "new-job": (["n"], ["escape"]),
        "details": (["i"], ["escape"]),
        "data": (["d"], ["escape"]),
        "checkpoints": (["c"], ["escape"]),
        "help": (["question_mark"], ["escape"]),
    }
    wanted = options.only.split(",") if options.only else list(scenes)
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: app.dashboard.snapshot.t)
        await pilot.pause(options.settle)
        for scene in wanted:
            opening, leaving = scenes[scene]
            await pilot.press(*opening)
            await pilot.pause(0.6)
            await until(pilot, lambda: not app.screen.has_class("-looking"))
            await pilot.pause(0.6)  # what was found is drawn after the look has ended
            path = options.out / f"{scene}-{name}.svg"
            path.write_text(app.export_screenshot(title="fsdp-tui"), encoding="utf-8")
            print(path)
            await pilot.press(*leaving)


async def until(pilot: object, true: object) -> None:
    for _ in range(500):
        if true():  # type: ignore[operator]
            return
        await pilot.pause(0.02)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
