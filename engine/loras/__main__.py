"""`python -m engine.loras COMMAND …`: look at, merge, resize or extract LoRAs; prints JSON.

Reads models one layer at a time, and needs no GPU.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from engine.exports.__main__ import prepare_process
from engine.start.command import OneLineParser, run_command
from jobs.errors import UserError

if TYPE_CHECKING:
    from argparse import Namespace

_PROGRESS_EVERY: Final = 0.2  # seconds
_DTYPES: Final = ("fp32", "bf16", "fp16")


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Progress goes to standard error as `lora DONE TOTAL` lines.

    Returns:
        The exit status: 0, or 2 for bad input.
    """
    options = _parser().parse_args(arguments)
    # torch and diffusers take seconds to import, so parse the arguments first.
    from engine.exports.readback import DamagedError

    try:
        answer = _COMMANDS[options.command](options)
    except (UserError, DamagedError) as error:
        print(f"fsdp-tui: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"fsdp-tui: {where}{error.strerror or error}", file=sys.stderr)
        return 2
    print(json.dumps(answer))
    return 0


def _parser() -> OneLineParser:
    parser = OneLineParser(prog="python -m engine.loras", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info").add_argument("file")
    merge = commands.add_parser("merge")
    merge.add_argument("files", nargs="+")
    merge.add_argument("--weight", type=float, action="append", required=True)
    merge.add_argument("--into")
    resize = commands.add_parser("resize")
    resize.add_argument("file")
    extract = commands.add_parser("extract")
    extract.add_argument("tuned")
    extract.add_argument("base")
    for command in (resize, extract):
        command.add_argument("--energy", type=float)
    for command in (merge, extract):
        command.add_argument("--component")
    for command in (merge, resize, extract):
        command.add_argument("--output", type=Path, required=True)
        command.add_argument("--rank", type=int)
        command.add_argument("--dtype", choices=_DTYPES)
    return parser


def _info(options: Namespace) -> dict[str, Any]:
    from engine.loras.kinds import info
    from engine.loras.lora_file import open_lora

    return info(open_lora(options.file))


def _merge(options: Namespace) -> dict[str, Any]:
    from engine.loras.combine import merge
    from engine.loras.into_model import merge_into
    from engine.loras.lora_file import open_lora
    from engine.loras.models import open_model

    files = [open_lora(place) for place in options.files]
    if options.into is not None:
        return merge_into(
            files,
            options.weight,
            open_model(options.into),
            options.output.absolute(),
            component=options.component,
            progress=_progress(),
        )
    return merge(
        files,
        options.weight,
        options.output.absolute(),
        rank=options.rank,
        dtype=_dtype(options, files[0]),
        progress=_progress(),
    )


def _resize(options: Namespace) -> dict[str, Any]:
    from engine.loras.combine import resize
    from engine.loras.lora_file import open_lora

    file = open_lora(options.file)
    return resize(
        file,
        options.output.absolute(),
        rank=options.rank,
        energy=options.energy,
        dtype=_dtype(options, file),
        progress=_progress(),
    )


def _extract(options: Namespace) -> dict[str, Any]:
    from engine.loras.extract import extract
    from engine.loras.models import open_model

    return extract(
        open_model(options.tuned),
        open_model(options.base),
        options.output.absolute(),
        rank=options.rank,
        energy=options.energy,
        component=options.component,
        dtype=_dtype(options, None),
        progress=_progress(),
    )


_COMMANDS: Final = {"info": _info, "merge": _merge, "resize": _resize, "extract": _extract}


def _dtype(options: Namespace, file: Any) -> Any:
    """Return the dtype to store: the requested one, the file's, or bf16 for new files."""
    import torch

    named = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    if options.dtype is not None:
        return named[options.dtype]
    if file is None:
        return torch.bfloat16
    parts = next(iter(file.modules.values()))
    dtype = next(place.dtype for part, place in parts.items() if part != "alpha")
    return dtype if dtype in named.values() else torch.float32


def _progress() -> Any:
    """Return a callback that prints the progress a few times a second."""
    printed = 0.0

    def report(done: int, total: int) -> None:
        nonlocal printed
        if done == total or time.monotonic() - printed >= _PROGRESS_EVERY:
            printed = time.monotonic()
            print(f"lora {done} {total}", file=sys.stderr, flush=True)

    return report


if __name__ == "__main__":
    prepare_process()
    run_command(main)
