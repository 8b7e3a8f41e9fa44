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
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from jobs.queue.store import Store  # noqa: E402
from tests.support.tui.scenes import SCENES, leave, opened, running, show  # noqa: E402
from tui.app.app import FsdpTui  # noqa: E402

if TYPE_CHECKING:
    from textual.pilot import Pilot

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
    for size in options.sizes.split(","):
        for jobs in (True,) if options.home is not None else (True, False):
            with tempfile.TemporaryDirectory(prefix="server-", dir="/tmp") as scratch:
                asyncio.run(take(options, size, jobs, Path(scratch)))


async def take(options: argparse.Namespace, size: str, jobs: bool, scratch: Path) -> None:
    """Every scene of a server with jobs, or of one without, at one size."""
    wanted = options.only.split(",") if options.only else [scene.name for scene in SCENES]
    scenes = [one for one in SCENES if one.name in wanted and one.jobs is jobs]
    if not scenes:
        return
    columns, rows = map(int, size.split("x"))
    async with AsyncExitStack() as stack:
        if options.home is None:
            app_on = opened(scratch, (columns, rows), jobs=jobs, host=options.host)
        else:
            os.environ |= {"FSDP_TUI_HOST": options.host, "FSDP_TUI_HOME": str(options.home)}
            app_on = running(FsdpTui(Store(options.home), select=options.select), (columns, rows))
        pilot: Pilot[None] = await stack.enter_async_context(app_on)
        if options.home is not None:
            await pilot.pause(3.0)  # a curve is drawn again after two seconds at the earliest
        if options.theme:
            pilot.app.theme = options.theme
        for scene in scenes:
            await show(pilot, scene)
            picture = pilot.app.export_screenshot(title="fsdp-tui")
            path = options.out.resolve() / f"{scene.name}-{size}.svg"
            path.write_text(picture.replace(scratch.name, "server-0"), encoding="utf-8")
            print(path)
            await leave(pilot, scene)


if __name__ == "__main__":
    main()
