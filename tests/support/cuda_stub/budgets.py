"""What a step may ask of the device: `budgets.json`, and the table that compares it with a run.

`FSDP_TUI_RENEW_BUDGETS=1 pytest -m "slow or not slow" tests/cuda/test_jobs.py -k budget` writes the
file again from what it measures. A number that has grown needs a reason, in the commit that renews.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

FILE: Final = Path(__file__).with_name("budgets.json")
RENEW_VARIABLE: Final = "FSDP_TUI_RENEW_BUDGETS"
# Of the last of three steps, on rank 0; `held` is what stays on the device between steps.
COLUMNS: Final = (
    "syncs",
    "forward",
    "backward",
    "step",
    "casts",
    "gemms",
    "h2d",
    "pageable",
    "d2h",
    "nccl",
    "held",
)


def read() -> dict[str, dict[str, int]]:
    """Name of the job → column → at most this."""
    rows: dict[str, dict[str, int]] = json.loads(FILE.read_text())["jobs"] if FILE.exists() else {}
    return rows


def versions() -> dict[str, str]:
    """The versions that the numbers hold for; launches change with each of them."""
    found: dict[str, str] = json.loads(FILE.read_text())["versions"] if FILE.exists() else {}
    return found


def write(rows: Mapping[str, Mapping[str, int]], made_with: Mapping[str, str]) -> None:
    """Replace rows of the file; one line a job, so that a change reads well in a diff."""
    merged = read() | dict(rows)
    lines = [f"  {json.dumps(name)}: {json.dumps(merged[name])}" for name in sorted(merged)]
    text = ",\n".join(lines)
    FILE.write_text(f'{{"versions": {json.dumps(made_with)}, "jobs": {{\n{text}\n}}}}\n')


def measured(counts: Mapping[str, Any]) -> dict[str, int]:
    """A row from what a rank's steps asked for; see `counting`."""
    step, phases = counts["steps"][-1], counts["phases"]
    row = {
        name: int(phases[name][-1].get("launches", 0)) for name in ("forward", "backward", "step")
    }
    row |= {
        name: int(step.get(name, 0)) for name in ("syncs", "casts", "gemms", "h2d", "d2h", "nccl")
    }
    row |= {"pageable": int(step.get("h2d_pageable", 0)), "held": int(counts["memory"]["held"])}
    return {column: row[column] for column in COLUMNS}


def table(rows: Mapping[str, Mapping[str, int]], syncs: Mapping[str, Mapping[str, int]]) -> str:
    """Measured numbers, each with its budget behind it where they differ, and where it waits."""
    budgets = read()
    heads = ["a step of", *COLUMNS]
    lines = [heads]
    for name, row in rows.items():
        allowed = budgets.get(name, {})
        lines.append(
            [name]
            + [
                f"{row[c]:,}" + (f" ({allowed[c]:,})" if allowed.get(c, row[c]) != row[c] else "")
                for c in COLUMNS
            ]
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    text = ["  ".join(f"{w:>{n}}" for w, n in zip(line, widths, strict=True)) for line in lines]
    places: dict[str, list[str]] = {}
    for name, found in syncs.items():
        for place, times in found.items():
            places.setdefault(f"{times} × {place}", []).append(name)
    text += ["", "the host waits"]
    text += [
        f"  {place}  ({len(names)} jobs, such as {names[0]})" for place, names in places.items()
    ]
    return "\n".join(text)
