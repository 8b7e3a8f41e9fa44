"""Make the pictures of every screen: `python screenshots/make.py [--home DIR] [--out DIR]`.

They show a made-up server, the same each time. With `--home` they show the jobs of that state
directory, on this machine. The app runs headless and exports what it would send to a terminal.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import pytest  # noqa: E402
from tui_scenes import SCENES, Clock, make_up, nobody_starts  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = "80x24,120x40"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, help="state directory whose jobs are shown")
    parser.add_argument("--out", type=Path, default=ROOT / "screenshots")
    parser.add_argument("--host", default="gpu-server", help="machine name in the pictures")
    parser.add_argument("--select", type=int, help="job to show")
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--theme", default="")
    parser.add_argument("--only", default="", help="comma-separated scenes")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fsdp-tui-") as scratch:
        for size in options.sizes.split(","):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("FSDP_TUI_HOST", options.host)
                patch.setenv("FSDP_TUI_PICTURES", "blocks")
                asyncio.run(take(options, size, Path(scratch) / size, patch))


async def take(
    options: argparse.Namespace, size: str, scratch: Path, patch: pytest.MonkeyPatch
) -> None:
    """Every scene at one size."""
    from jobs.store import Store
    from tui.app import FsdpTui

    home = options.home or scratch / "state"
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    patch.setenv("FSDP_TUI_HOME", str(home))
    store, select = Store(home), options.select
    if options.home is None:
        for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME"):
            patch.setenv(name, str(scratch / name.lower()))
        clock = Clock()
        patch.setattr("time.time", clock)
        nobody_starts(patch, make_up(store, scratch / "data", clock))
        select = 3
    app = FsdpTui(store, select=select)
    if options.theme:
        app.theme = options.theme
    wanted = options.only.split(",") if options.only else [scene.name for scene in SCENES]
    columns, rows = map(int, size.split("x"))
    async with app.run_test(size=(columns, rows)) as pilot:
        await until(pilot, lambda: app.dashboard.snapshot.t)
        await pilot.pause(3.0)  # the curve is drawn anew after two seconds at the earliest
        for scene in SCENES:
            if scene.name in wanted:
                await pilot.press(*scene.keys)
                await pilot.pause(0.6)
                await until(pilot, lambda: not app.screen.has_class("-looking"))
                await pilot.pause(0.6)  # what was found is drawn after the look has ended
                path = options.out / f"{scene.name}-{size}.svg"
                path.write_text(app.export_screenshot(title="fsdp-tui"), encoding="utf-8")
                print(os.path.relpath(path))
                await pilot.press(*scene.leave)


async def until(pilot: Any, true: Callable[[], object]) -> None:
    for _ in range(500):
        if true():
            return
        await pilot.pause(0.02)


if __name__ == "__main__":
    main()
