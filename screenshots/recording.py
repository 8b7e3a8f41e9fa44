"""Make the README's recording: `pip install cairosvg`, then `python screenshots/recording.py`.

It runs `fsdp-tui demo` in a new state directory, presses keys in the real dashboard, and writes
what that shows as an animated GIF: training, samples arriving, a stop, a resume. Waiting is cut.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import cairosvg
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from jobs import service  # noqa: E402
from jobs.queue.states import State  # noqa: E402
from jobs.queue.store import Store  # noqa: E402
from tests.support.tui.scenes import running  # noqa: E402
from tui.app.app import FsdpTui  # noqa: E402
from tui.cli.demo import start_demo  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

    from textual.pilot import Pilot

SIZE = (110, 34)
WIDTH = 1000  # pixels
FONT = "DejaVu Sans Mono"
_BRAILLE = '<text style="font-family: DejaVu Sans" '
LONG, SHORT = 2500, 550  # milliseconds of a frame
COLORS = 128


class Film:
    """Frames of an app, each with the milliseconds that it is shown."""

    def __init__(self, pilot: Pilot[None]) -> None:
        self.pilot = pilot
        self.frames: list[tuple[str, int]] = []

    def shoot(self, shown: int = SHORT) -> None:
        """Add what is on the screen; a frame that did not change is shown no longer."""
        picture = re.sub(r"terminal-\d+", "terminal-0", self.pilot.app.export_screenshot(title=""))
        if not self.frames or self.frames[-1][0] != picture:
            self.frames.append((picture, shown))
        elif shown > self.frames[-1][1]:
            self.frames[-1] = picture, shown

    async def roll(self, end: Callable[[], bool], every: float) -> None:
        """Take a frame at a fixed interval until a condition holds."""
        while not end():
            await self.pilot.pause(every)
            self.shoot()

    def save(self, path: Path) -> None:
        """Draw all frames, in the colors of the whole film."""
        frames = [
            Image.open(io.BytesIO(cairosvg.svg2png(with_font(svg), output_width=WIDTH)))
            for svg, _ in self.frames
        ]
        colors = palette([frame.convert("RGB") for frame in frames])
        drawn = [
            frame.convert("RGB").quantize(palette=colors, dither=Image.Dither.NONE)
            for frame in frames
        ]
        times = [shown for _, shown in self.frames]
        drawn[0].save(path, save_all=True, append_images=drawn[1:], duration=times, loop=0)


def palette(frames: list[Image.Image]) -> Image.Image:
    """The colors of all frames. Those of a few letters count, too: a color weighs its root."""
    counts: Counter[tuple[int, int, int]] = Counter()
    for frame in frames:
        counts.update({rgb: n for n, rgb in frame.getcolors(frame.width * frame.height) or []})
    weighed = [rgb for rgb, count in counts.items() for _ in range(int(count**0.5))]
    film = Image.new("RGB", (len(weighed), 1))
    film.putdata(weighed)
    return film.quantize(COLORS)


def with_font(svg: str) -> bytes:
    """The font that Textual names is on no server."""
    svg = svg.replace("Fira Code", FONT)
    return re.sub(r"<text (?=[^>]*>[^<]*[\u2800-\u28ff])", _BRAILLE, svg).encode()


async def record(home: Path, out: Path) -> None:
    store = Store(home)
    job = start_demo(store, print).id
    folder = store.get(job).run_dir.samples

    def step() -> int:
        return service.progress(store.get(job)).step

    def samples() -> int:
        return len(list(folder.glob("step-*")))

    app = FsdpTui(store, select=job)
    async with running(app, SIZE) as pilot:
        film = Film(pilot)
        await film.roll(lambda: step() >= 1, every=4)
        await film.roll(lambda: step() >= 40, every=4)
        film.shoot(LONG)
        await pilot.press("i", "5")
        await pilot.press("minus", "end")
        await film.roll(lambda: samples() >= 5, every=4)
        film.shoot(LONG)
        while not store.get(job).stop_level:  # a key that stops may ask to be pressed again
            await pilot.press("x")
            await pilot.pause(1)
            film.shoot()
        await film.roll(lambda: store.get(job).state is State.STOPPED, every=2)
        await pilot.pause(2)
        film.shoot(LONG)
        stopped = step()
        await pilot.press("s")
        await film.roll(lambda: step() > stopped, every=4)
        await pilot.press("end")  # follow the newest
        await film.roll(lambda: store.get(job).state.ended, every=12)
        await pilot.press("end")
        await pilot.pause(3)
        film.shoot(LONG)
    film.save(out)
    print(f"{out}: {len(film.frames)} frames, {sum(t for _, t in film.frames) / 1000:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "screenshots" / "demo.gif")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="server-", dir="/tmp") as home:
        os.environ |= {"FSDP_TUI_HOST": "gpu-server", "FSDP_TUI_HOME": home}
        asyncio.run(record(Path(home), options.out))


if __name__ == "__main__":
    main()
