"""Make the README's picture of the demo: `python screenshots/demo.py SAMPLES [--out FILE]`.

SAMPLES is the folder that `fsdp-tui demo` names at its end. The first samples are above, the last
ones below, under the prompts they were made from.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

SIDE, GAP, LEFT, TOP = 112, 8, 76, 40
INK, PAPER = (31, 35, 40), (255, 255, 255)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("samples", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "demo-samples.png")
    options = parser.parse_args()
    steps = sorted(options.samples.glob("step-*"), key=step_of)
    shown = (steps[0], steps[-1])
    columns = len(list(shown[0].glob("*.png")))
    size = (LEFT + columns * (SIDE + GAP), TOP + len(shown) * (SIDE + GAP))
    sheet = Image.new("RGB", size, PAPER)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for row, step in enumerate(shown):
        y = TOP + row * (SIDE + GAP)
        draw.text((0, y + SIDE / 2), f"step {step_of(step)}", INK, font, anchor="lm")
        for column, picture in enumerate(sorted(step.glob("*.png"))):
            x = LEFT + column * (SIDE + GAP)
            with Image.open(picture) as image:
                sheet.paste(image.resize((SIDE, SIDE), Image.Resampling.LANCZOS), (x, y))
            if row == 0:
                prompt = json.loads(picture.with_suffix(".json").read_text())["prompt"]
                what, where = prompt.split(" on a ")
                words = f"{what}\non {where.removesuffix(' background')}"
                draw.multiline_text(
                    (x + SIDE / 2, 0), words, INK, font, anchor="ma", align="center"
                )
    sheet.save(options.out, optimize=True)
    print(options.out)


def step_of(directory: Path) -> int:
    return int(directory.name.removeprefix("step-"))


if __name__ == "__main__":
    main()
