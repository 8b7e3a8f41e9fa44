"""`python -m engine.data JOB.yaml`: look at a job's data, print the report as JSON.

Needs no torch, so it answers quickly.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from engine.data.contact_sheet import save_strips, sheet
from engine.data.index.data_index import build_index
from engine.data.read.class_images import folder_of, numbers_in, with_class_images
from engine.data.report import make_report
from engine.start.command import OneLineParser, run_command
from jobs.errors import UserError
from jobs.models.find_model import find_model
from jobs.spec.data_tool import NOT_NEEDED
from jobs.spec.file.load import load_spec

_PROGRESS_EVERY = 0.2  # seconds


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Progress goes to standard error as `looked DONE TOTAL` lines.

    Returns:
        The exit status: 0, or 2 for bad input.
    """
    parser = OneLineParser(prog="python -m engine.data", description=__doc__)
    parser.add_argument("job", type=Path, metavar="JOB.yaml")
    parser.add_argument("--sheet", type=Path, help="path of a contact sheet to write (PNG)")
    parser.add_argument("--strips", type=Path, help="folder for one PNG per bucket")
    options = parser.parse_args(arguments)
    try:
        # Data can be checked before a model is chosen; without one, tokens are not counted.
        spec = load_spec(options.job, ignoring=NOT_NEEDED)
        model = spec.pretrained_model_name_or_path
        root = find_model(model) if model else None
        if spec.num_class_images and root is not None:
            made = folder_of(spec, root)
            if numbers_in(made):  # otherwise the job makes them when it runs
                spec = with_class_images(spec, made)
        report = make_report(spec, index := build_index(spec, _Progress()), root)
        output = report.to_dict()
        try:
            if options.sheet:
                sheet(index, spec).save(options.sheet, format="PNG")
                output["sheet"] = str(options.sheet)
            if options.strips:
                output["strips"] = save_strips(index, spec, options.strips)
        except OSError as error:
            place = error.filename or options.sheet or options.strips
            raise UserError(f"cannot write {place} ({error.strerror or error})") from None
    except UserError as error:
        print(f"fsdp-tui: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"fsdp-tui: {error.filename or 'a file'}: {error.strerror or error}", file=sys.stderr)
        return 2
    print(json.dumps(output))
    return 0


class _Progress:
    """Print the progress of the index a few times a second."""

    def __init__(self) -> None:
        self._last_print = 0.0

    def __call__(self, done: int, total: int) -> None:
        if done == total or time.monotonic() - self._last_print >= _PROGRESS_EVERY:
            self._last_print = time.monotonic()
            print(f"looked {done} {total}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_command(main)
