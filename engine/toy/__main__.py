"""`python -m engine.toy DIR`: write a toy model and its data, print where they are."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from engine.start.command import OneLineParser, run_command
from engine.toy import DTYPES, write_toy
from jobs.errors import UserError
from jobs.spec.families import FAMILIES

# The libraries' progress bars and advice would hide the one line of output.
QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "DIFFUSERS_VERBOSITY": "error",
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit status: 0, or 2 for bad input.
    """
    parser = OneLineParser(prog="python -m engine.toy", description=__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--family", default="flux", help=f"one of: {', '.join(FAMILIES)}")
    parser.add_argument("--flavour", help="model flavour; default: the family's main one")
    parser.add_argument("--pictures", type=int, default=240, help="number of images")
    parser.add_argument("--videos", type=int, default=3, help="number of videos, of video families")
    parser.add_argument("--size", type=int, default=96, help="short side in pixels")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    parser.add_argument("--dtype", default="float32", help=f"one of: {', '.join(DTYPES)}")
    parser.add_argument("--hidden_scale", type=int, default=1, help="width factor")
    parser.add_argument("--force", action="store_true", help="overwrite both")
    parser.add_argument("--json", action="store_true", help="print the paths as JSON")
    options = parser.parse_args(arguments)
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        paths = write_toy(
            options.directory,
            options.family,
            flavour=options.flavour,
            pictures=options.pictures,
            videos=options.videos,
            size=options.size,
            seed=options.seed,
            dtype=options.dtype,
            hidden_scale=options.hidden_scale,
            force=options.force,
        )
    except UserError as error:
        print(f"fsdp-tui: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps({name: str(path) for name, path in vars(paths).items() if path}))
    else:
        print("  ".join(f"{name}: {path}" for name, path in vars(paths).items() if path))
    return 0


if __name__ == "__main__":
    run_command(main)
