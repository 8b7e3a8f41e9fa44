"""The text output of `fsdp-tui estimate`. Pure, except that it queries an `Estimate`."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from jobs.memory.fit import Fit, Verdict
from jobs.memory.predicted import TITLES, Predicted
from tui.text.format import gib, size
from tui.text.tables import table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jobs.memory.calibration import Compared
    from jobs.memory.estimate import Need
    from jobs.memory.fit import Candidate
    from jobs.memory.ladder import Step
    from jobs.memory.network import Across
    from jobs.memory.question import Refused
    from jobs.service.dry_run import Measured

_SHORT = {Verdict.FITS: "fits", Verdict.TIGHT: "tight", Verdict.TOO_LARGE: "no"}
_PARTS = ("parameters", "gathered", "gradients", "optimizer", "activations", "workspace")


def band(low: int, high: int) -> str:
    """Return `27.7-31.0 GiB`, or one number if both are displayed the same."""
    ends = dict.fromkeys((gib(low), gib(high)))
    return f"{'-'.join(ends)} GiB"


def verdict(fit: Fit) -> str:
    """Return how well it fits, and by how much."""
    match fit.verdict:
        case Verdict.FITS:
            return f"fits, {size(fit.spare)} spare"
        case Verdict.TIGHT:
            return f"tight: up to {size(-fit.spare)} over"
    return f"does not fit: {size(fit.low - fit.room.free)} over"


def rows_text(rows: Sequence[tuple[Predicted | Refused, Sequence[Fit]]]) -> str:
    """Return a row for each strategy and number of ranks, with a column for each kind of GPU."""
    rooms = next((fits for _, fits in rows if fits), ())
    head = (
        "strategy",
        "ranks",
        "per rank",
        "largest phase",
        *(f"on {f.room.name}" for f in rooms),
    )
    lines = []
    for result, fits in rows:
        if isinstance(result, Predicted):
            needed = band(fits[0].low, fits[0].high)
            cells = [needed, TITLES.get(result.largest.name, result.largest.name)]
            cells += [verdict(fit) if len(fits) == 1 else _SHORT[fit.verdict] for fit in fits]
        else:
            cells = ["–", result.error]
        lines.append(
            (result.strategy, str(result.ranks), *cells, *[""] * (len(head) - 2 - len(cells)))
        )
    return table(head, lines)


def phases_text(predicted: Predicted) -> str:
    """Format the phases with their parts, in GiB."""
    head = ("phase (GiB)", "peak", *_PARTS)
    rows = [
        (
            TITLES.get(phase.name, phase.name),
            gib(phase.peak),
            *(gib(phase.parts.get(part)) for part in _PARTS),
        )
        for phase in predicted.phases
    ]
    beside = ", ".join(
        f"{name.replace('_', ' ')} {size(n)}" for name, n in predicted.overheads.items()
    )
    reserved = f"torch reserves {band(*predicted.reserved)}"
    if beside:
        reserved += f"; the driver shows {band(*predicted.device)}, including {beside}"
    return f"{table(head, rows)}\n{reserved}"


def steps_text(steps: Sequence[Step]) -> str:
    """Format the ladder: each step with its changes."""
    lines = []
    for number, step in enumerate(steps, 1):
        changed = ", ".join(f"{key}: {word(value)}" for key, value in step.changes.items())
        cost = f" ({step.cost})" if step.cost else ""
        lines.append(
            f"  {number}. {step.rung.title}: {gib(step.before.high)} → {gib(step.after.high)} GiB"
            f"{cost}\n     {changed}"
        )
    return "\n".join(lines)


def word(value: Any) -> str:
    """Format a value as in a job file."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def fewest_text(counts: Mapping[str, int | None]) -> str:
    """Return `2 × 24 GB, 1 × 48 GB, …`, and the kinds on which it never fits."""
    able = [f"{count} × {name}" for name, count in counts.items() if count is not None]
    unable = [name for name, count in counts.items() if count is None]
    text = ", ".join(able)
    if unable:
        text += f"{'; ' if able else ''}not possible on {', '.join(unable)}"
    return text


def advice_text(own: str, candidates: Sequence[Candidate], advised: str | None, ranks: int) -> str:
    """Return the fastest strategy that fits."""
    if len(candidates) < 2:
        return ""
    if advised is None:
        return f"no strategy fits this job on {ranks} ranks"
    same = ", which this job uses" if advised == own else f"; this job uses {own}"
    return f"fastest strategy that fits on {ranks} ranks: {advised}{same}"


def needs_text(needs: Sequence[Need]) -> str:
    """Return the host memory and disk space needed."""
    return "\n".join(
        f"{need.what}: {size(need.needed)}; this machine has {size(need.free)} free"
        + ("" if need.enough else ", NOT ENOUGH")
        for need in needs
    )


def compared_text(compared: Sequence[Compared]) -> str:
    """Compare predicted and measured peaks; of several ranks, the highest one."""
    rows = [
        (
            TITLES.get(phase.phase, phase.phase),
            size(phase.predicted),
            size(max(phase.measured)) if phase.measured else "–",
            difference(phase.ratio),
        )
        for phase in compared
    ]
    return table(("phase", "predicted", "measured", "difference"), rows)


def difference(ratio: float | None) -> str:
    """Return `+2.1 %` if more was measured than predicted."""
    return "–" if ratio is None else f"{(ratio - 1) * 100:+.1f} %"


def measured_text(measured: Measured, compared: Sequence[Compared]) -> str:
    """Describe the result of a dry run."""
    if measured.out_of_memory:
        return f"measured: does not fit: {measured.reason}"
    if measured.measure == "rss":
        most = max((max(ranks) for ranks in measured.peaks.values()), default=0)
        return (
            f"measured with {measured.strategy}: peak RSS {size(most)} on a CPU rank, including "
            "Python and its libraries, which are not predicted"
        )
    return f"measured with {measured.strategy}, two steps\n{compared_text(compared)}"


def paragraph(text: str, width: int) -> str:
    """Wrap a note, with a bullet."""
    return textwrap.fill(text, width, initial_indent="- ", subsequent_indent="  ")


def nodes_text(moves: Sequence[Across], gigabits: float, step: float | None) -> str:
    """Describe the traffic of several machines per step, and whether they beat one."""
    rows = []
    for move in moves:
        if step is None:
            verdict = f"slower than one if its step takes less than {move.slower_below:.2g} s"
        else:
            least, most = move.speed(step)
            verdict = f"{least:.2f}-{most:.2f} times as many images per second"
            verdict += "; slower than one machine" if least < 1 else ""
        rows.append(
            (str(move.nodes), move.strategy, size(move.sent), f"{move.seconds:.2g} s", verdict)
        )
    head = ("machines", "strategy", "sent per step", "takes", "compared with one machine")
    note = "least: transfers do not overlap with computing; most: they do"
    if step is None:
        note = "if transfers do not overlap with computing; --step SECONDS says how much faster"
    title = f"between machines, at {gigabits:g} Gbit/s each (simulated)"
    return f"{title}\n{table(head, rows)}\n{note}"
