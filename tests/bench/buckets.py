"""What a step between buckets costs: how much is cropped, and how many images are nearly alone."""

from __future__ import annotations

import argparse
import math
import random
from collections import Counter
from statistics import mean
from typing import Final

from engine.data.index.views import cut_share
from jobs.spec.rules.buckets import bucket_sizes, nearest_bucket

STEPS: Final = (16, 32, 48, 64, 96, 128)
SHAPES: Final = 4000
FEW: Final = 4  # images of a bucket, from which on a forward of as many needs no copies
DATASETS: Final = (50, 200, 1000)  # images
DRAWN: Final = 20  # of each size
# 3:2, 4:3, 16:9 and 1:1, and upright; the more frequent ones twice.
CAMERAS: Final = (
    *((6000, 4000), (4000, 6000), (4032, 3024), (3024, 4032), (1920, 1080)),
    *((1080, 1920), (3000, 3000), (6000, 4000), (4032, 3024), (2160, 3840)),
)


def shapes(count: int, seed: int) -> list[tuple[int, int]]:
    """Widths and heights, by turns of cameras and freely cropped between 1:2 and 2:1."""
    rng = random.Random(seed)
    drawn = []
    for number in range(count):
        if number % 2:
            drawn.append(rng.choice(CAMERAS))
        else:
            root = math.exp(rng.uniform(-math.log(2), math.log(2)) / 2)
            side = rng.uniform(1200, 3000)
            drawn.append((round(side * root), round(side / root)))
    return drawn


def row(resolution: int, step: int) -> list[str]:
    """The numbers of one step."""
    sizes = bucket_sizes(resolution, step)
    cut = [cut_share(w, h, nearest_bucket(w, h, sizes)) for w, h in shapes(SHAPES, 1)]
    alone = []
    for count in DATASETS:
        shares = []
        for seed in range(DRAWN):
            members = Counter(nearest_bucket(w, h, sizes) for w, h in shapes(count, seed))
            shares.append(sum(n for n in members.values() if n < FEW) / count)
        alone.append(f"{mean(shares):.0%}")
    return [str(step), str(len(sizes)), f"{mean(cut):.1%}", f"{max(cut):.1%}", *alone]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--resolution", type=int, nargs="+", default=[1024])
    for resolution in parser.parse_args().resolution:
        print(f"resolution {resolution}: step, buckets, cropped on average and at most,")
        print(f"images in buckets of fewer than {FEW}, of {', '.join(map(str, DATASETS))}")
        for step in STEPS:
            if step <= resolution // 2:
                print("".join(text.rjust(9) for text in row(resolution, step)))


if __name__ == "__main__":
    main()
