"""Checkpoint descriptions for the command line and the screen. Pure."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from jobs.run.judging import TITLES, Measurements
from tui.text import format as formats
from tui.text.estimate_text import word
from tui.text.format import BEST, MISSING, size
from tui.text.tables import table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jobs.queue.store import Job
    from jobs.run.checkpoint_files import Listed
    from jobs.service.plan import Plan

NEXT: Final = "→"  # marks the checkpoint that a resume uses
EMPTY: Final = (
    "No checkpoints yet. A job writes one every checkpointing_steps steps, when it is done and "
    "when it is stopped; m on the dashboard asks a running job for one now."
)
_MOST_NAMED: Final = 4  # in a sentence


def checkpoint_table(listed: Sequence[Listed], free: int | None) -> str:
    """Return the table of `fsdp-tui checkpoints`."""
    if not listed:
        return "no checkpoints yet"
    val = [name.upper() for name in judged_column(listed)]
    head = ("", "CHECKPOINT", "WRITTEN", "SIZE", "LAYOUT", "RANKS", "EMA", *val, "HEALTH")
    rows = [
        (
            marks(checkpoint),
            checkpoint.name,
            _moment(checkpoint.time),
            size(checkpoint.bytes),
            checkpoint.layout or MISSING,
            number(checkpoint.world_size),
            yes_no(checkpoint.ema),
            *([formats.number(checkpoint.value)] if val else []),
            checkpoint.health,
        )
        for checkpoint in listed
    ]
    lines = [table(head, rows), totals(listed, free)]
    if any(checkpoint.next for checkpoint in listed):
        lines.append(f"{NEXT} marks where a resume starts")
    if best := [checkpoint for checkpoint in listed if checkpoint.best]:
        lines.append(f"{BEST} marks the best one, {best_words(best[0])}")
    return "\n".join(lines)


def marks(checkpoint: Listed) -> str:
    """Return symbols that mark the best checkpoint, and the one that a resume uses."""
    return (NEXT if checkpoint.next else "") + (BEST if checkpoint.best else "")


def judged_column(listed: Sequence[Listed]) -> list[str]:
    """Return the heading of what checkpoints are judged by; nothing if none was measured."""
    judged = (Measurements(by=each.by).column for each in listed if each.value is not None)
    return [*judged][:1]


def best_words(checkpoint: Listed) -> str:
    """Return `validation loss 0.3521`, and where it was measured if at another step."""
    there = "" if checkpoint.value_step == checkpoint.step else f" of step {checkpoint.value_step}"
    return f"{TITLES[checkpoint.by]} {formats.number(checkpoint.value)}{there}"


def totals(listed: Sequence[Listed], free: int | None) -> str:
    """Return the total size of all checkpoints, and the free space."""
    count = f"{len(listed)} checkpoint{'s' * (len(listed) != 1)}"
    aside = sum(checkpoint.bytes for checkpoint in listed if checkpoint.set_aside)
    text = f"{count}, {size(sum(checkpoint.bytes for checkpoint in listed))}"
    text += f" ({size(aside)} set aside)" if aside else ""
    return text + (f" · {size(free)} free on its disk" if free is not None else "")


def number(value: int | None) -> str:
    return MISSING if value is None else str(value)


def yes_no(value: bool | None) -> str:
    return MISSING if value is None else "yes" if value else "no"


def plan_lines(plan: Plan) -> list[str]:
    """Describe a plan's effects: warnings, what is set aside, what changes the result."""
    lines = [f"warning: {warning}" for warning in plan.warnings]
    if plan.rewound:
        names = _named([checkpoint.path.name for checkpoint in plan.rewound])
        lines.append(f"set aside, not deleted: {names}")
    return [*lines, *(f"the result changes: {change}" for change in plan.changes)]


def change_lines(changes: Mapping[str, Any]) -> list[str]:
    """Return a line for each setting that changes, as in a job file."""
    return [f"  {key}: {word(value)}" for key, value in changes.items()]


def resume_question(plan: Plan, changed: Mapping[str, Any] | None = None) -> tuple[str, str]:
    """Return the question before a resume: a heading and its effects.

    Args:
        plan: The resume.
        changed: Settings that change with it, by key.
    """
    assert plan.job is not None
    place = f"after step {plan.begin.step}" if plan.begin is not None else "from step 0"
    question = f"Resume job {plan.job.id} “{plan.job.name}” {place}?"
    epochs, steps = plan.spec.num_train_epochs, plan.spec.max_train_steps
    lines = [f"Trains to step {steps}." if epochs is None else f"Trains {epochs:g} epochs."]
    if changed:
        lines += ["", "With other settings:", *change_lines(changed)]
    if plan.rewound:
        lines += ["", "Newer checkpoints are set aside, not deleted:"]
        lines += [f"  {checkpoint.path.name}" for checkpoint in plan.rewound]
    if plan.changes:
        lines += ["", "The result will differ from an uninterrupted run:"]
        lines += [f"  {change}" for change in plan.changes]
    return question, "\n".join(lines)


def resumed(job: Job) -> str:
    """Return the message after a resume: the job and its state."""
    return f"job {job.id} is {job.state}: {job.reason}"


def age(seconds: float) -> str:
    """Return a coarse age, which rarely changes: `12 min`, `3 h`, `2 d`."""
    if seconds < 60:
        return "now" if seconds < 5 else "< 1 min"
    unit, length = ("min", 60) if seconds < 3600 else ("h", 3600)
    if seconds >= 86400:
        unit, length = "d", 86400
    return f"{seconds // length:.0f} {unit}"


def about(checkpoint: Listed, listed: Sequence[Listed]) -> str:
    """Describe a checkpoint in three lines."""
    facts = [f"step {checkpoint.step}", f"written {_moment(checkpoint.time)}"]
    if checkpoint.world_size is not None:
        facts.append(f"by {checkpoint.world_size} rank{'s' * (checkpoint.world_size != 1)}")
    if checkpoint.layout is not None:
        facts.append("full tensors" if checkpoint.layout == "full" else "sharded")
    if checkpoint.ema:
        facts.append("with EMA")
    if checkpoint.value is not None:
        facts.append(best_words(checkpoint) + (f" {BEST} best" if checkpoint.best else ""))
    later = (other for other in listed if other.step > checkpoint.step and not other.set_aside)
    newer = [other.name for other in sorted(later, key=lambda other: other.step)]
    what = checkpoint.health
    if checkpoint.next:
        what += "; a resume starts here"
    elif not checkpoint.set_aside and newer:
        what += f"; resuming here sets aside {_named(newer)}"
    return "\n".join([" · ".join(facts), what, str(checkpoint.path)])


def _moment(t: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(t))


def _named(names: Sequence[str]) -> str:
    more = [f"{len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else []
    return ", ".join([*names[:_MOST_NAMED], *more])
