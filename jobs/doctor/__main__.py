"""`python -m jobs.doctor`: run the checks and print the findings as lines of JSON.

It is a separate process so that its parent can abandon it: a thread that waits for a driver in the
kernel can be neither killed nor joined.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any, NoReturn

from jobs.doctor.agreed import END
from jobs.doctor.checks.in_order import CHECKS
from jobs.doctor.examine import Patient, examine


def main(arguments: list[str] | None = None) -> NoReturn:
    """Print findings, then the end marker. Never returns."""
    parser = argparse.ArgumentParser(prog="python -m jobs.doctor", description=__doc__)
    parser.add_argument("--job", type=Path)
    parser.add_argument("--gpus", default="")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--run-id", default="doctor")
    options = parser.parse_args(arguments)
    patient = Patient(
        job=options.job,
        gpus=tuple(name for name in options.gpus.split(",") if name),
        quick=options.quick,
        run_id=options.run_id,
    )
    for finding in examine(CHECKS, patient):
        _print_line(finding.to_dict())
    _print_line({END: True})
    os._exit(0)  # without joining threads that may hang


def _print_line(values: dict[str, Any]) -> None:
    try:
        print(json.dumps(values), flush=True)
    except BrokenPipeError:  # the reader has gone
        os._exit(1)


if __name__ == "__main__":
    main()
