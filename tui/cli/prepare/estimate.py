"""`fsdp-tui estimate`: predict whether a job fits, before anything starts."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import click

from jobs.backends.slurm.commands import ask_partitions, cards_of
from jobs.errors import UserError
from jobs.memory.calibration import compare
from jobs.memory.estimate import UNKNOWN_CARDS, Estimate, Pair, estimate, needs_of, pair_of
from jobs.memory.fit import CARD_ROOMS, CARDS, Fit, Room, Verdict, candidates
from jobs.memory.network import SHARED, Across, across
from jobs.memory.predicted import Predicted
from jobs.memory.question import Refused, Server
from jobs.memory.ranking import Ranking
from jobs.queue.store import Store
from jobs.service import dry_run
from jobs.spec.data_tool import NOT_NEEDED
from jobs.spec.file.flags import flags_of, parse_flags
from jobs.spec.rules.steps import accumulation_steps, base_forwards, passes
from jobs.spec.rules.strategy import world_size
from tui.cli.echo import ProgressLine, echo
from tui.cli.job_arguments import FLAGS, JSON, WORDS, JobCommand, read_job
from tui.text import estimate_text as words_of
from tui.text.estimate_text import Row

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jobs.memory.ladder import Step
    from jobs.memory.seconds import Seconds
    from jobs.service.dry_run import Measured
    from jobs.spec.job_spec import JobSpec

DOES_NOT_FIT: Final = 4  # exit status
_IGNORED: Final = (*NOT_NEEDED, "dataset")
_MOST_RANKS: Final = 65_536
_WIDEST: Final = 100  # columns; longer lines are hard to read


def _read_counts(context: click.Context, option: click.Parameter, text: str | None) -> list[int]:
    try:
        counts = [int(part) for part in (text or "").replace(" ", "").split(",") if part]
    except ValueError:
        counts = [0]
    if any(not 1 <= count <= _MOST_RANKS for count in counts):
        what = "rank counts" if option.name == "ranks" else "counts of machines"
        raise click.BadParameter(f'expected {what} such as 2,4,8, got "{text}"')
    return list(dict.fromkeys(counts))


def _read_cards(
    context: click.Context, option: click.Parameter, text: str | None
) -> tuple[str, ...]:
    words = (part.strip().lower() for part in (text or "").split(","))
    cards = tuple(re.sub(r"^(\d+) ?gb$", r"\1", word) for word in words if word)  # as swap_blocks
    if unknown := next((card for card in cards if card not in CARD_ROOMS), None):
        raise click.BadParameter(f'"{unknown}" is not one of {", ".join(CARD_ROOMS)}')
    return cards


@click.command(name="estimate", cls=JobCommand, context_settings=FLAGS)
@click.option(
    "--ranks",
    callback=_read_counts,
    metavar="2,4,8,…",
    help="Rank counts to compare (default: the job's own).",
)
@click.option(
    "--card",
    callback=_read_cards,
    metavar="4090|a100|h100|…|16|24|…",
    help="GPU to fit against, or only its memory in GB (then no seconds are computed); one for "
    "each rank if they differ: 4080,4090. By default this machine's GPUs, or 80 if it has none.",
)
@click.option(
    "--nodes",
    callback=_read_counts,
    metavar="2,4,…",
    help="Numbers of machines: also what crosses the network between them, and what it costs.",
)
@click.option(
    "--network",
    type=click.FloatRange(min=0.01, max=1e6),
    default=100.0,
    show_default=True,
    help="With --nodes: the bandwidth of each machine, in Gbit/s.",
)
@click.option(
    "--step",
    type=click.FloatRange(min=1e-3, max=1e6),
    help="With --nodes: seconds of a step on one machine.",
)
@click.option(
    "--measure", is_flag=True, help="Also run two real steps through the queue, then remove them."
)
@JSON
@WORDS
def estimate_job(
    words: tuple[str, ...],
    ranks: list[int],
    card: tuple[str, ...],
    nodes: list[int],
    network: float,
    step: float | None,
    measure: bool,
    as_json: bool,
) -> int:
    """Predict memory and seconds of a step.

    Nothing starts. It needs no weights, data or GPU: a published model's hub id is enough. The
    first estimate of a model takes seconds, later ones are fast. If the job does not fit, it lists
    what to change, cheapest first. For a GPU whose rates are known, it also ranks the setups that
    fit by the seconds of a step.

    Exit status: 0 it fits (or is tight), 4 it does not fit, 2 bad input, 1 the prediction failed.

    \b
    fsdp-tui estimate job.yaml --ranks 2,4,8
    fsdp-tui estimate job.yaml --card 4090 --gpus=2
    fsdp-tui estimate job.yaml --card 16,24
    fsdp-tui estimate --model_family=flux2 --model_type=full --ranks 8,64 --card 80
    fsdp-tui estimate job.yaml --nodes 2,4 --network 25 --step 3.1
    """
    if len(card) > 1:
        if ranks:
            raise UserError("--ranks and several GPUs in --card exclude each other")
        values, others = parse_flags(words)  # whose GPUs give way, as those of a job file do
        values |= {"gpus": None, "num_processes": len(card)}
        words = (*others, *flags_of(values))
    spec = read_job(words, ignoring=_IGNORED)
    with ProgressLine("measuring the model") as progress:
        progress(0, 1, "…")
        server = Server()
        try:
            asked = _of_ranks(spec, ranks, server, ",".join(card) or None)
            facts = _facts(asked, ranks or [world_size(spec)], progress)
            facts.across = _across(asked, nodes, network)
        finally:
            server.close()
    measured = dry_run.measure(Store(), asked.spec, _tell) if measure else None
    status = _status(asked, measured)
    if as_json:
        more = {"status": status, "nodes": [_on_nodes(row, network, step) for row in facts.across]}
        echo(json.dumps(_as_json(asked, facts, measured) | more))
    else:
        echo(_as_text(asked, facts, measured))
        if facts.across:
            echo(f"\n{words_of.nodes_text(facts.across, network, step)}")
    return status


def _of_ranks(spec: JobSpec, ranks: Sequence[int], server: Server, card: str | None) -> Estimate:
    """Estimate the job on its own number of ranks.

    If it sets none, use the smallest of these numbers on which it fits.
    """
    asks = spec.launcher == "slurm" and card is None
    cards = cards_of(spec, ask_partitions()) if asks else UNKNOWN_CARDS
    if not ranks or spec.num_processes is not None or spec.gpus is not None:
        return estimate(spec, server, card=card, cards=cards)
    for count in sorted(ranks):
        counted = spec.model_copy(update={"num_processes": count})
        asked = estimate(counted, server, card=card, cards=cards)
        own = asked.own
        if isinstance(own, Predicted) and asked.fit(own).verdict is not Verdict.TOO_LARGE:
            break
    return asked


class _Facts:
    """Everything that is printed, collected before the server ends."""

    def __init__(self, asked: Estimate) -> None:
        self.asked = asked
        self.own = asked.own
        self.advised = asked.advised
        self.rows: list[Row] = []
        self.steps = [] if isinstance(self.own, Refused) else asked.steps()
        self.ranking = asked.ranking()
        # Without rates, less recomputation is all that is known to be faster.
        ranked = isinstance(self.ranking, Ranking) or isinstance(self.own, Refused)
        self.faster = None if ranked else asked.faster()
        self.pair: Pair | None = None
        if isinstance(self.own, Predicted):
            self.pair = pair_of(asked.spec, self.own, self.ranking)
        self.rooms = _rooms(asked)
        self.across: list[Across] = []
        self.fewest: dict[str, int | None] = {}  # by kind of GPU
        self.changed: dict[str, int | None] = {}  # the same with every step of the ladder applied
        self.candidates = [
            asked.candidate(strategy, world_size(asked.spec))
            for strategy in candidates(asked.spec, world_size(asked.spec))
        ]


def _facts(asked: Estimate, ranks: Sequence[int], progress: Callable[..., None]) -> _Facts:
    """Collect all answers; the first takes the longest."""
    facts = _Facts(asked)
    for number, count in enumerate(ranks):
        progress(number, len(ranks))
        for strategy in candidates(asked.spec, count):
            result = asked.predict(strategy, count)
            fits: list[Fit] = []
            seconds: Seconds | str = ""
            if isinstance(result, Predicted):
                here = asked.place.here or asked.place.chosen
                fits = [asked.fit(result)] if here else [asked.fit(result, r) for r in facts.rooms]
                seconds = asked.seconds(result)
            facts.rows.append(Row(result, fits, seconds))
    if asked.place.on_gpus:
        facts.fewest = {room.name: asked.fewest(room) for room in facts.rooms}
        if facts.steps:
            changed = facts.steps[-1].spec
            facts.changed = {room.name: asked.fewest(room, changed) for room in facts.rooms}
    return facts


def _across(asked: Estimate, nodes: Sequence[int], gigabits: float) -> list[Across]:
    """Compute the traffic between machines for each strategy."""
    several = [count for count in nodes if count > 1]
    predicted = asked.predict("single", 1) if several else None
    if not isinstance(predicted, Predicted):
        return []
    spec = asked.spec
    weights = max(phase.parts.parameters for phase in predicted.phases)
    again = bool(spec.fsdp_reshard_after_forward)
    gathers = (1 + again) * accumulation_steps(spec) * passes(spec) + again * base_forwards(spec)
    return [
        across(
            strategy,
            count,
            weights=weights,
            trained=predicted.trained,
            gathers=gathers,
            gigabits=gigabits,
            full=spec.model_type == "full",
        )
        for count in several
        for strategy in SHARED
    ]


def _on_nodes(row: Across, gigabits: float, step: float | None) -> dict[str, Any]:
    return {
        "nodes": row.nodes,
        "strategy": row.strategy,
        "sent": round(row.sent),
        "gigabits": gigabits,
        "seconds": row.seconds,
        "speed": list(row.speed(step)) if step else None,
        "slower_below": row.slower_below,
    }


def _rooms(asked: Estimate) -> list[Room]:
    """Return the kinds of GPU to compare with: this machine's, and common ones."""
    if not asked.place.on_gpus:
        return list(asked.place.rooms)
    if not asked.place.here:
        named = list(dict.fromkeys(asked.place.rooms))
        return named if named[0].kind or len(named) > 1 else list(CARDS.values())
    smallest = min(asked.place.rooms, key=lambda room: room.total)
    return [Room(f"GPU like {smallest.name}", smallest.total), *CARDS.values()]


def _status(asked: Estimate, measured: Measured | None) -> int:
    if measured is not None:
        return DOES_NOT_FIT if measured.out_of_memory else 0
    own = asked.own
    if isinstance(own, Refused):
        raise UserError(own.error, own.hint)
    fits = asked.fit(own).verdict is not Verdict.TOO_LARGE
    return 0 if fits else DOES_NOT_FIT


def _as_text(asked: Estimate, facts: _Facts, measured: Measured | None) -> str:
    own, spec = facts.own, asked.spec
    ranks, width = world_size(spec), min(_WIDEST, shutil.get_terminal_size((80, 24)).columns)
    parts = [words_of.rows_text(facts.rows)]
    if isinstance(own, Predicted):
        fit = asked.fit(own)
        count = f"{ranks} rank{'s' if ranks > 1 else ''}"
        parts += [
            f"this job, {own.strategy} on {count}, on {fit.room.name}: {words_of.verdict(fit)}",
            words_of.each_text(asked.each(own), spec.swap_blocks) if asked.each(own) else "",
            asked.place.note,
            words_of.seconds_text(facts.ranking),
            words_of.phases_text(own.on(fit.room.total)),
            words_of.ranking_text(facts.ranking)
            or words_of.advice_text(own.strategy, facts.candidates, facts.advised, ranks),
        ]
        if facts.steps:
            last = facts.steps[-1].after.verdict
            end = "" if last is Verdict.FITS else "\n  still not enough: use more GPUs"
            parts.append(f"what to change, cheapest first\n{words_of.steps_text(facts.steps)}{end}")
        elif fit.verdict is not Verdict.FITS:
            parts.append("no setting is enough: use more GPUs, or GPUs with more memory")
        if facts.faster:
            parts.append(f"faster, and still fits\n{words_of.steps_text([facts.faster])}")
        if facts.fewest:
            few = f"fewest GPUs that are enough: {words_of.fewest_text(facts.fewest)}"
            if facts.changed:
                few += f"\nwith all of these changes: {words_of.fewest_text(facts.changed)}"
            parts.append(few)
        parts += [words_of.needs_text(needs_of(spec, own)), words_of.pair_text(facts.pair)]
        parts.append(asked.calibration.in_words())
        parts.append("\n".join(words_of.paragraph(note, width) for note in own.notes))
    if measured is not None:
        parts.append(words_of.measured_text(measured, _beside(asked, measured)))
    return words_of.wrapped("\n\n".join(filter(None, parts)), width)


def _as_json(asked: Estimate, facts: _Facts, measured: Measured | None) -> dict[str, Any]:
    own = facts.own
    fit = asked.fit(own) if isinstance(own, Predicted) else None
    return {
        "strategy": asked.strategy,
        "ranks": world_size(asked.spec),
        "fastest_that_fits": facts.advised,
        "fit": _fit(fit) if fit else None,
        "each": [_fit(fit) for fit in asked.each(own)] if isinstance(own, Predicted) else [],
        "predictions": [
            {
                **row.result.on(row.fits[0].room.total).values,
                "fits": [_fit(fit) for fit in row.fits],
                "seconds": None if isinstance(row.seconds, str) else row.seconds.values,
            }
            for row in facts.rows
            if isinstance(row.result, Predicted)
        ],
        "failed": [
            {
                "strategy": row.result.strategy,
                "ranks": row.result.ranks,
                "error": row.result.error,
                "hint": row.result.hint,
            }
            for row in facts.rows
            if isinstance(row.result, Refused)
        ],
        "ladder": [_step(step) for step in facts.steps],
        "faster": _step(facts.faster) if facts.faster else None,
        "seconds": _seconds(facts.ranking),
        "setups": _setups(facts.ranking),
        "both_experts": asdict(facts.pair) if facts.pair is not None else None,
        "fewest": facts.fewest,
        "fewest_with_changes": facts.changed or None,
        "needs": [
            {"what": need.what, "needed": need.needed, "free": need.free, "enough": need.enough}
            for need in (needs_of(asked.spec, own) if isinstance(own, Predicted) else ())
        ],
        "calibration": {
            "runs": asked.calibration.runs,
            "usual": asked.calibration.usual,
            "factor": asked.calibration.factor,
        },
        "measured": _measured(asked, measured) if measured else None,
    }


def _seconds(ranking: Ranking | str) -> dict[str, Any]:
    if isinstance(ranking, str):
        return {"low": None, "high": None, "why": ranking}
    return ranking.own.seconds.values | {"why": None}


def _setups(ranking: Ranking | str) -> list[dict[str, Any]]:
    if isinstance(ranking, str):
        return []
    return [
        {
            "title": setup.title,
            "changes": dict(setup.changes),
            "own": setup is ranking.own,
            "seconds": setup.seconds.values,
            "loses": setup.loses,
            "fit": _fit(setup.fit),
        }
        for setup in ranking.setups
    ]


def _step(step: Step) -> dict[str, Any]:
    return {
        "title": step.rung.title,
        "changes": step.changes,
        "before": step.before.high,
        "after": step.after.high,
        "slower": step.rung.slower,
        "cost": step.cost,
        "verdict": str(step.after.verdict),
    }


def _fit(fit: Fit) -> dict[str, Any]:
    return {
        "on": fit.room.name,
        "total": fit.room.total,
        "free": fit.room.free,
        "low": fit.low,
        "high": fit.high,
        "verdict": str(fit.verdict),
        "spare": fit.spare,
    }


def _measured(asked: Estimate, measured: Measured) -> dict[str, Any]:
    return {
        "strategy": measured.strategy,
        "measure": measured.measure,
        "peaks": {name: list(ranks) for name, ranks in measured.peaks.items()},
        "out_of_memory": measured.out_of_memory,
        "reason": measured.reason,
        "compared": [
            {
                "name": phase.phase,
                "predicted": phase.predicted,
                "measured": list(phase.measured),
                "ratio": phase.ratio,
            }
            for phase in _beside(asked, measured)
        ],
    }


def _beside(asked: Estimate, measured: Measured) -> list[Any]:
    own = asked.own
    if not isinstance(own, Predicted) or measured.out_of_memory:
        return []
    return compare(own, measured.measure, measured.peaks)


def _tell(text: str) -> None:
    echo(f"fsdp-tui: {text}", err=True)
