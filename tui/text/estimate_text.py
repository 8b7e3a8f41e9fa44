"""The text output of `fsdp-tui estimate`. Pure, except that it queries an `Estimate`."""

from __future__ import annotations

import re
import textwrap
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from jobs.memory.fit import Fit, Verdict
from jobs.memory.predicted import TITLES, Parts, Predicted
from jobs.memory.seconds import PARTS
from jobs.spec.values.value_types import most_on_card, on_card
from tui.text.format import gib, size
from tui.text.tables import table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jobs.memory.calibration import Compared
    from jobs.memory.estimate import Need, Pair
    from jobs.memory.fit import Candidate
    from jobs.memory.ladder import Step
    from jobs.memory.network import Across
    from jobs.memory.question import Refused
    from jobs.memory.ranking import Ranking, Setup
    from jobs.memory.seconds import Seconds
    from jobs.service.dry_run import Measured

_SHORT = {Verdict.FITS: "fits", Verdict.TIGHT: "tight", Verdict.TOO_LARGE: "no"}
_MOST_SETUPS: Final = 6  # listed; the others are slower
_PARTS = tuple(part.name for part in fields(Parts))


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


class Row(NamedTuple):
    """A strategy on a number of ranks: its prediction, how it fits, and the seconds of a step."""

    result: Predicted | Refused
    fits: Sequence[Fit]
    seconds: Seconds | str


def rows_text(rows: Sequence[Row]) -> str:
    """Return a row for each strategy and number of ranks, a column for each kind of GPU."""
    rooms = next((row.fits for row in rows if row.fits), ())
    timed = any(not isinstance(row.seconds, str) for row in rows)
    head = (
        *("strategy", "ranks", "per rank"),
        *(("s a step",) if timed else ()),
        "largest phase",
        *(f"on {f.room.name}" for f in rooms),
    )
    lines = []
    for result, fits, seconds in rows:
        if isinstance(result, Predicted):
            cells = [band(fits[0].low, fits[0].high)]
            if timed:
                cells.append("–" if isinstance(seconds, str) else span(seconds.low, seconds.high))
            cells.append(TITLES.get(result.largest.name, result.largest.name))
            cells += [verdict(fit) if len(fits) == 1 else _SHORT[fit.verdict] for fit in fits]
        else:
            cells = ["–", result.error]
        lines.append(
            (result.strategy, str(result.ranks), *cells, *[""] * (len(head) - 2 - len(cells)))
        )
    return table(head, lines)


# -- seconds --------------------------------------------------------------------------------


def span(low: float, high: float) -> str:
    """`1.9-2.6`: two digits of each end; one number where both read the same."""
    return "-".join(dict.fromkeys(_two_digits(end) for end in (low, high)))


def _two_digits(seconds: float) -> str:
    if seconds >= 10:
        return f"{seconds:.0f}"
    return f"{seconds:.1f}" if seconds >= 0.95 else f"{seconds:.2f}"


def pace(seconds: Seconds) -> str:
    """`1.9-2.6 s a step (computed), mostly traffic between GPUs`."""
    return (
        f"{span(seconds.low, seconds.high)} s a step (computed), mostly {PARTS[seconds.dominant]}"
    )


def traffic(seconds: Seconds) -> str:
    """`24 GB a step over PCIe 4 x16 (assumed): 1.9-3.8 s`; "" if nothing is sent."""
    if not seconds.moved:
        return ""
    link = seconds.link.name + (" (assumed)" if seconds.link.assumed else "")
    return f"{size(seconds.moved)} a step over {link}: {span(*seconds.parts['links'])} s"


def seconds_text(ranking: Ranking | str) -> str:
    """Say how long a step takes and why, or why that is not computed."""
    if isinstance(ranking, str):
        return f"seconds of a step are not computed: {ranking}"
    seconds = ranking.own.seconds
    parts = [
        f"{PARTS[name]} {span(*band)} s"
        for name, band in seconds.parts.items()
        if band[1] >= 0.02 * seconds.high and name != "links"
    ]
    compiled = "torch_compile is not counted" if ranking.own.spec.torch_compile else ""
    return "\n".join(filter(None, [pace(seconds), traffic(seconds), ", ".join(parts), compiled]))


def better(ranking: Ranking) -> tuple[Setup, str] | None:
    """Return the fastest setup that fits and why it is; None if that is the job as it is."""
    best, own = ranking.fastest, ranking.own
    if best is None or best is own:
        return None
    before, after = own.seconds, best.seconds
    if not own.fits:
        may = "may not" if own.fit.verdict is Verdict.TIGHT else "does not"
        why = f"the job as it is {may} fit"
    elif after.moved < before.moved / 2 and before.parts["links"][1] > 0.1 * before.high:
        why = f"it moves {size(after.moved)} a step between GPUs, not {size(before.moved)}"
    elif best.spec.batch_shares != own.spec.batch_shares:
        why = "faster GPUs compute more of its forwards"
    elif best.recomputed < own.recomputed:
        why = "it recomputes fewer blocks"
    elif most_on_card(best.spec.swap_blocks) < most_on_card(own.spec.swap_blocks):
        why = "it keeps fewer blocks in host memory"
    else:
        why = "all in all it is computed to take less time"
    return best, why


def exactly(ranking: Ranking) -> str:
    """Return `without that: ddp, …, 1.9-2.6 s a step`: the fastest setup that loses nothing."""
    exact = ranking.exact
    if exact is None:
        return "without that, nothing fits"
    return f"without that: {exact.title}, {span(exact.seconds.low, exact.seconds.high)} s a step"


def ranking_text(ranking: Ranking | str) -> str:
    """List the setups that fit, the fastest first, and recommend one."""
    if isinstance(ranking, str):
        return ""
    own, choice = ranking.own, better(ranking)
    if ranking.fastest is None:
        return ""
    before_fastest = ranking.setups[: ranking.setups.index(ranking.fastest)]
    lines = [f"fastest setup that fits: {ranking.fastest.title}"]
    if choice is None:
        lines[0] += ", as the job is"
    else:
        best, why = choice
        lines[0] += (
            f", {span(best.seconds.low, best.seconds.high)} s a step instead of "
            f"{span(own.seconds.low, own.seconds.high)}: {why}"
        )
        if best.loses:
            lines.append(f"it loses something: {best.loses}; {exactly(ranking)}")
    if any(setup.fits and setup.loses for setup in before_fastest):
        lines.append("what rounds more is computed to be faster, but by less than 10 %")
    for number, setup in enumerate(ranking.setups[:_MOST_SETUPS], 1):
        seconds = setup.seconds
        lost = f"; {setup.loses}" if setup.loses else ""
        lines.append(
            f"  {number}. {span(seconds.low, seconds.high)} s: {setup.title}; "
            f"{verdict(setup.fit)}{lost}"
        )
        lines.append(f"     {keys_text(setup.changes) or 'the job as it is'}")
    return "\n".join(lines)


def each_text(fits: Sequence[Fit], swapped: int | Mapping[str, int]) -> str:
    """Return a row for each GPU of a job whose GPUs differ, as each rank has to fit its own."""
    head = ("GPU", "blocks in host memory", "its rank", "")
    rows = [
        (
            f"{fit.room.name} ({gib(fit.room.total)} GiB)",
            str(on_card(swapped, fit.room.total)),
            band(fit.low, fit.high),
            verdict(fit),
        )
        for fit in fits
    ]
    return table(head, rows)


def keys_text(changes: Mapping[str, Any]) -> str:
    """Write changed keys as in a job file, in one line."""
    return ", ".join(f"{key}: {word(value)}" for key, value in changes.items())


def phases_text(predicted: Predicted) -> str:
    """Format the phases with their parts, in GiB."""
    head = ("phase (GiB)", "peak", *_PARTS)
    rows = [
        (
            TITLES.get(phase.name, phase.name),
            gib(phase.peak),
            *(gib(getattr(phase.parts, part)) for part in _PARTS),
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
        changed = keys_text(step.changes)
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
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {word(part)}' for key, part in value.items())}}}"
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


def pair_text(pair: Pair | None) -> str:
    """Return the hours and the disk space of two jobs that train a model's two experts."""
    if pair is None:
        return ""
    lines = ["both experts: two jobs like this one, which share the caches"]
    if pair.hours is not None:
        low, high = pair.hours
        lines.append(
            f"  {pair.steps} steps each: {span(low, high)} h at the same time on other GPUs, or "
            f"{span(2 * low, 2 * high)} h one after the other, without samples and saves"
        )
    if pair.disk:
        saves = "checkpoints" if pair.counted else "one checkpoint each"
        lines.append(f"  disk for {saves} and exports of both: {size(pair.disk)}")
    return "\n".join(lines)


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


_BULLET: Final = re.compile(r" *(\d+\. )?")


def wrapped(text: str, width: int) -> str:
    """Wrap long lines, except for those of tables, whose columns are two spaces apart."""
    return "\n".join(
        line
        if len(line) <= width or "  " in line.strip()
        else textwrap.fill(
            line,
            width,
            subsequent_indent=" " * (len(_BULLET.match(line)[0]) or 2),  # type: ignore[index]
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in text.split("\n")
    )


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
