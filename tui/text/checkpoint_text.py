"""Checkpoints in words, for the command line and the screen. Pure."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from tui.text.format import MISSING, size
from tui.text.tables import table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.queue.store import Job
    from jobs.run.checkpoint_list import Listed
    from jobs.service.plan import Plan

NEXT: Final = "→"  # marks what a resume goes on after
EMPTY: Final = (
    "No checkpoints yet. A job writes one every checkpointing_steps steps, when it is done and "
    "when it is stopped; m on the dashboard asks a running job for one now."
)
_MOST_NAMED: Final = 4  # in a sentence


def checkpoint_table(listed: Sequence[Listed], free: int | None) -> str:
    """`fsdp-tui checkpoints`."""
    if not listed:
        return "no checkpoints yet"
    head = ("", "CHECKPOINT", "WRITTEN", "SIZE", "LAYOUT", "RANKS", "EMA", "HEALTH")
    rows = [
        (
            NEXT if one.next else "",
            one.name,
            _moment(one.time),
            size(one.bytes),
            one.layout or MISSING,
            number(one.world_size),
            yes_no(one.ema),
            one.health,
        )
        for one in listed
    ]
    lines = [table(head, rows), totals(listed, free)]
    if any(one.next for one in listed):
        lines.append(f"{NEXT} marks where a resume starts")
    return "\n".join(lines)


def totals(listed: Sequence[Listed], free: int | None) -> str:
    """How much all of them take, and how much room there is."""
    count = f"{len(listed)} checkpoint{'s' * (len(listed) != 1)}"
    aside = sum(one.bytes for one in listed if one.set_aside)
    text = f"{count}, {size(sum(one.bytes for one in listed))}"
    text += f" ({size(aside)} set aside)" if aside else ""
    return text + (f" · {size(free)} free on its disk" if free is not None else "")


def number(value: int | None) -> str:
    return MISSING if value is None else str(value)


def yes_no(value: bool | None) -> str:
    return MISSING if value is None else "yes" if value else "no"


def plan_lines(plan: Plan) -> list[str]:
    """What a plan does besides going on: what is set aside, and what changes the result."""
    lines = [f"warning: {warning}" for warning in plan.warnings]
    if plan.rewound:
        names = _named([one.path.name for one in plan.rewound])
        lines.append(f"set aside, not deleted: {names}")
    return [*lines, *(f"the result changes: {change}" for change in plan.changes)]


def resume_question(plan: Plan) -> tuple[str, str]:
    """What to ask before a job is resumed: a heading, and what will happen."""
    assert plan.job is not None
    place = f"after step {plan.begin.step}" if plan.begin is not None else "from step 0"
    question = f"Resume job {plan.job.id} “{plan.job.name}” {place}?"
    lines = [f"Trains to step {plan.spec.max_train_steps}."]
    if plan.rewound:
        lines += ["", "Newer checkpoints are set aside, not deleted:"]
        lines += [f"  {one.path.name}" for one in plan.rewound]
    if plan.changes:
        lines += ["", "The result will differ from an uninterrupted run:"]
        lines += [f"  {change}" for change in plan.changes]
    return question, "\n".join(lines)


def resumed(job: Job) -> str:
    """What came of it."""
    return f"job {job.id} is {job.state}: {job.reason}"


def age(seconds: float) -> str:
    """Coarse, so that it stays the same from one look to the next: `12 min`, `3 h`, `2 d`."""
    if seconds < 60:
        return "now" if seconds < 5 else "< 1 min"
    unit, length = ("min", 60) if seconds < 3600 else ("h", 3600)
    if seconds >= 86400:
        unit, length = "d", 86400
    return f"{seconds // length:.0f} {unit}"


def about(one: Listed, listed: Sequence[Listed]) -> str:
    """What is known of a checkpoint, in a few lines."""
    facts = [f"step {one.step}", f"written {_moment(one.time)}"]
    if one.world_size is not None:
        facts.append(f"by {one.world_size} rank{'s' * (one.world_size != 1)}")
    if one.layout is not None:
        facts.append("full tensors" if one.layout == "full" else "sharded")
    if one.ema:
        facts.append("with EMA")
    later = (other for other in listed if other.step > one.step and not other.set_aside)
    newer = [other.name for other in sorted(later, key=lambda other: other.step)]
    what = one.health
    if one.next:
        what += "; a resume starts here"
    elif not one.set_aside and newer:
        what += f"; resuming here sets aside {_named(newer)}"
    return "\n".join([" · ".join(facts), what, str(one.path)])


def _moment(t: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(t))


def _named(names: Sequence[str]) -> str:
    more = [f"{len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else []
    return ", ".join([*names[:_MOST_NAMED], *more])
