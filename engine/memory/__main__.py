"""`python -m engine.memory`: predict memory, as a server of JSON lines or once for a job file.

Without arguments it reads requests from standard input, a JSON object a line, and answers each with
a line: `{"id": …, "job": {…}, "ranks": […], "strategies": […]}`. All but the job is optional; every
combination is answered. It ends at the end of the input, and never because of a request.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.start.command import OneLineParser, run_command
from engine.start.lean_imports import QUANTISERS, hide
from jobs.errors import UserError
from jobs.spec.file.load import load_spec

if TYPE_CHECKING:
    from engine.memory.estimator import Estimator
    from jobs.spec.job_spec import JobSpec


def main(arguments: list[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit status: 0, or 2 for a bad job.
    """
    parser = OneLineParser(prog="python -m engine.memory", description=__doc__)
    parser.add_argument("job", nargs="?", type=Path, metavar="JOB.yaml")
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--ranks", help="such as 2,4,8")
    parser.add_argument("--strategies", help="such as ddp,fsdp2")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if options.job is None:
        with contextlib.redirect_stdout(sys.stderr):  # only answers go to standard output
            serve(sys.__stdin__, sys.__stdout__)
        return 0
    try:
        changes = dict(change.split("=", 1) for change in options.changes)
        ranks = [int(number) for number in options.ranks.split(",")] if options.ranks else None
        spec = load_spec(options.job, changes)
    except (UserError, ValueError) as error:
        print(f"fsdp-tui: {error}", file=sys.stderr)
        return 2
    strategies = options.strategies.split(",") if options.strategies else None
    with contextlib.redirect_stdout(sys.stderr):
        predicted = answer(_estimator(), {"ranks": ranks, "strategies": strategies}, spec)
    print(json.dumps(predicted) if options.json else _table(predicted))
    return 0 if predicted["predictions"] else 2


def serve(requests: Any, answers: Any) -> None:
    """Answer requests until the input ends."""
    estimator: Estimator | None = None
    for line in requests:
        if not line.strip():
            continue
        name: Any = None
        try:
            request = json.loads(line)
            if not isinstance(request, dict) or not isinstance(request.get("job"), dict):
                raise UserError("a request is a JSON object with a job")
            name = request.get("id")
            spec = load_spec(None, request["job"])
            estimator = estimator or _estimator()
            reply = {"id": name, **answer(estimator, request, spec)}
        except Exception as error:  # a failed request must not end the server
            reply = {"id": name, **_words(error)}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


def answer(estimator: Estimator, request: dict[str, Any], spec: JobSpec) -> dict[str, Any]:
    """Return predictions for every combination of strategies and ranks."""
    begun = time.perf_counter()
    predictions: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = []
    for strategy in request.get("strategies") or [None]:
        for ranks in request.get("ranks") or [None]:
            try:
                predictions.append(estimator.estimate(spec, ranks, strategy).values)
            except Exception as error:
                failed.append({"strategy": strategy, "ranks": ranks} | _words(error))
    seconds = round(time.perf_counter() - begun, 4)
    return {"predictions": predictions, "failed": failed, "seconds": seconds}


def _estimator() -> Estimator:
    # Predictions do not need these libraries, which are slow to import.
    hide(*QUANTISERS)
    os.environ["HF_HUB_OFFLINE"] = "1"
    from engine.memory.estimator import Estimator

    return Estimator()


def _words(error: Exception) -> dict[str, Any]:
    if isinstance(error, UserError):
        return {"error": error.message, "hint": error.hint}
    words = " ".join(str(error).split())[:300]
    return {"error": f"memory cannot be predicted ({type(error).__name__}: {words})", "hint": None}


def _table(predicted: dict[str, Any]) -> str:
    """Return one row per prediction, in GiB."""
    rows = []
    for row in predicted["predictions"]:
        phases = "  ".join(f"{p['name']} {p['peak'] / 2**30:.1f}" for p in row["phases"])
        low, high = (size / 2**30 for size in row["device"])
        rows.append(
            f"{row['ranks']:5} {row['strategy']:6} {low:7.1f} to {high:.1f} GiB a GPU   {phases}"
        )
    rows += [
        f"{failure['ranks']} {failure['strategy']}: {failure['error']}"
        for failure in predicted["failed"]
    ]
    return "\n".join(rows)


if __name__ == "__main__":
    run_command(main)
