"""The curves that are shown, as a file or as text to paste. Know no widgets."""

from __future__ import annotations

import csv
import io
import time
from typing import TYPE_CHECKING

from jobs.errors import UserError
from jobs.run.rundir import write_atomic
from tui.plots.drawing import SPANS, view_of
from tui.plots.measures import place

if TYPE_CHECKING:
    from pathlib import Path

    from tui.plots.drawing import Choices, Values


def write_csv(values: Values, choices: Choices) -> Path:
    """Write what is shown into the run directory of the first run.

    Returns:
        The file, of a new name each time.

    Raises:
        UserError: There is nothing to write, or it cannot be written.
    """
    if not values.runs or view_of(values, choices) is None:
        raise UserError("nothing to write yet: no steps recorded")
    what = "all" if choices.everything else choices.shown[0].name
    jobs = "-".join(str(run.job) for run in values.runs)
    folder = values.runs[0].root / "plots"
    path = folder / f"{what}-of-{jobs}-{time.strftime('%Y%m%d-%H%M%S')}.csv"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        write_atomic(path, as_csv(values, choices), durable=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"cannot write {path}: {reason}") from None
    return path


def as_csv(values: Values, choices: Choices) -> str:
    """Return a line for each value that is in the shown part of the axis.

    Columns: `job`, `name`, `measure`, `step`, `seconds` since the run's first step, `value`, and
    `average`, which is empty where none is drawn.
    """
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["job", "name", "measure", "step", "seconds", "value", "average"])
    view = view_of(values, choices)
    for number, run in enumerate(values.runs):
        for measure in choices.shown:
            series = values.of(number, measure, choices.by_time)
            over_time = values.of(number, measure, True)
            averaged = measure.smooth and SPANS[choices.span] != 1
            averages = values.average(number, measure, SPANS[choices.span]) if averaged else None
            for at, x in enumerate(series.xs):
                if view is not None and view.first <= x <= view.last:
                    writer.writerow(
                        [
                            run.job,
                            run.name,
                            measure.name,
                            series.steps[at],
                            f"{over_time.xs[at]:.3f}",
                            series.ys[at],
                            averages[at] if averages is not None else "",
                        ]
                    )
    return file.getvalue()


def as_text(values: Values, choices: Choices) -> str:
    """Return the values at the cursor, or the newest ones, as text.

    There is a line for each run and measure, with tabs between columns.
    """
    lines = []
    for number, run in enumerate(values.runs):
        for measure in choices.shown:
            series = values.of(number, measure, choices.by_time)
            cursor = choices.cursor
            at = series.at(cursor) if cursor is not None else len(series.xs) - 1
            if at is None or at < 0:
                continue
            where = place(series.xs[at], by_time=choices.by_time)
            axis = "time" if choices.by_time else "step"
            line = f"{run.job} {run.name}\t{axis} {where}\t{measure.title}\t{series.ys[at]!r}"
            if measure.smooth and SPANS[choices.span] != 1:
                average = values.average(number, measure, SPANS[choices.span])[at]
                line += f"\taverage\t{average:.6g}"
            lines.append(line)
    return "\n".join(lines)
