"""`python -m engine.blocks CONFIG.json`: find the repeated blocks of a model, print them as JSON.

Needs no weights: the model is built on the meta device.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from engine.blocks.build import import_lean
from engine.start.command import OneLineParser, run_command
from jobs.errors import UserError

_STEPS = 3  # import, build, walk


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Progress goes to standard error as `step DONE TOTAL` lines.

    Returns:
        The exit status: 0, or 2 for bad input.
    """
    parser = OneLineParser(prog="python -m engine.blocks", description=__doc__)
    parser.add_argument("config", type=Path, metavar="CONFIG.json")
    parser.add_argument("--whole", action="store_true", help="import all that diffusers can use")
    options = parser.parse_args(arguments)
    try:
        config = json.loads(options.config.read_bytes())
        if not isinstance(config, dict):
            raise ValueError("no JSON object")
    except (OSError, ValueError) as error:
        print(f"fsdp-tui: cannot read {options.config} ({error})", file=sys.stderr)
        return 2
    os.environ["HF_HUB_OFFLINE"] = "1"  # some constructors would download files
    lean = not options.whole and "_class_name" in config
    try:
        detected = _detect(config, options.config.parent, lean=lean)
    except Exception as error:
        if lean and not _is_final(error):  # lean imports may be the cause
            return _restart_with_full_imports()
        if not isinstance(error, UserError):
            raise
        print(f"fsdp-tui: {error}", file=sys.stderr)
        return 2
    print(json.dumps(detected))
    return 0


def _detect(config: dict[str, Any], directory: Path, *, lean: bool) -> dict[str, Any]:
    _print_progress(0)
    if lean:
        import_lean()
    from engine.blocks.build import build
    from engine.blocks.detection import report

    _print_progress(1)
    model = build(config, directory)
    _print_progress(2)
    detected = report(model)
    _print_progress(3)
    return detected


def _is_final(error: Exception) -> bool:
    """Return whether a process with full imports would fail in the same way, seconds later."""
    from engine.blocks.build import NoSuchClassError  # imports torch

    return isinstance(error, NoSuchClassError)


def _print_progress(done: int) -> None:
    print(f"step {done} {_STEPS}", file=sys.stderr, flush=True)


def _restart_with_full_imports() -> int:
    """Replace this process by one with full imports, since lean imports cannot be undone."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "engine.blocks", *sys.argv[1:], "--whole"])


if __name__ == "__main__":
    run_command(main)
