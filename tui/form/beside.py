"""Beside the fields: whether the job fits, and what the form describes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from textual.containers import VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.widget import Widget
from textual.widgets import Static
from textual.worker import get_current_worker

from jobs.backends.slurm.commands import cards_of
from jobs.errors import UserError
from jobs.machine.engine_tools import Cancelled, ToolError
from jobs.memory import question
from jobs.memory.estimate import estimate
from jobs.memory.fit import Fit, Verdict, worst
from jobs.memory.question import Refused
from jobs.spec.rules.strategy import world_size
from tui.form import draft
from tui.text.estimate_text import band, better, exactly, keys_text, pace, span, verdict
from tui.text.format import gib, ranges, size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from textual.app import ComposeResult
    from textual.timer import Timer

    from jobs.backends.slurm.commands import Partition
    from jobs.memory.estimate import Estimate
    from jobs.memory.ladder import Step
    from tui.look.snapshot import Snapshot


# -- fit ------------------------------------------------------------------------------------
# Whether the form's job fits: a bar for each chosen GPU, and the same in words.


_SETTLES_IN: Final = 0.3  # seconds without a change after which the server is queried
_SOON: Final = 0.6  # seconds more after which it says that the answer takes time
_MEASURING: Final = "memory: measuring the model …"
_IGNORED: Final = ("dataset",)
_NAME: Final = 16  # columns, as wide as the labels above
_ROOMY: Final = 66  # columns from which names get that many
_SHORTEST, _LONGEST = 6, 40  # columns of a bar
_ALIKE: Final = 0.01  # GPUs that differ by less than this share of their memory share a bar
_COLOURS: Final = {Verdict.FITS: "$success", Verdict.TIGHT: "$warning", Verdict.TOO_LARGE: "$error"}


@dataclass(frozen=True)
class Look:
    """A prediction for the form's values.

    Attributes:
        values: The values.
        bars: A name and a prediction for each bar.
        step: What to change first if it does not fit.
        strategy: The strategy that runs, if known.
        pace: The seconds of a step, in words, or "".
        faster: Another setup that would fit and is faster, in words, or "".
        asked: Finds what to change, which takes a while; None if that was done or is not needed.
        remark: What to say if nothing can be predicted.
        notes: More details, for the tooltip.
    """

    values: Mapping[str, Any]
    bars: tuple[tuple[str, Fit], ...] = ()
    step: Step | None = None
    strategy: str = ""
    pace: str = ""
    faster: str = ""
    asked: Estimate | None = None
    remark: str = ""
    notes: str = ""

    @property
    def worst(self) -> Fit | None:
        """Return the bar with the least room."""
        return worst(fit for _, fit in self.bars) if self.bars else None


class FitBars(Static):
    """Shows whether the values fit, shortly after they change; hidden while it knows nothing."""

    @dataclass
    class Found(Message):
        """A thread has made a prediction."""

        look: Look

    def __init__(self) -> None:
        super().__init__("", id="fit", markup=False)
        self.prediction: Look | None = None
        self._snapshot: Snapshot | None = None
        self._values: Mapping[str, Any] = {}
        self._partitions: Sequence[Partition] = ()
        self._due: Timer | None = None

    def look_at(
        self, values: Mapping[str, Any], snapshot: Snapshot, partitions: Sequence[Partition] = ()
    ) -> None:
        """Predict for these values, unless they are those of the last prediction.

        Args:
            values: The job's values, by key.
            snapshot: The machine's state.
            partitions: The cluster's partitions, if Slurm has reported them.
        """
        if (values, partitions) != (self._values, self._partitions):
            self._values, self._partitions = dict(values), partitions
            self.look_again(snapshot)

    def look_again(self, snapshot: Snapshot) -> None:
        """Predict again for the same values, since GPU use has changed."""
        self._snapshot = snapshot
        if self._due is not None:
            self._due.stop()
        self._due = self.set_timer(_SETTLES_IN, self._begin)

    def knows(self, values: Mapping[str, Any]) -> bool:
        """Return whether it is known if these values fit and what to change, or cannot be."""
        latest = self.prediction
        if latest is None or latest.values != values:
            return False
        too_large = latest.worst is not None and latest.worst.verdict is Verdict.TOO_LARGE
        return not too_large or latest.asked is None

    def strategy_of(self, values: Mapping[str, Any]) -> str:
        """Return the strategy that was predicted for these values, or ""."""
        latest = self.prediction
        return latest.strategy if latest is not None and latest.values == values else ""

    def doubt(self, values: Mapping[str, Any]) -> str:
        """Say why these values do not fit, and what to change first; "" if they may fit."""
        prediction, fit = self.prediction, self.prediction.worst if self.prediction else None
        if prediction is None or fit is None or prediction.values != values:
            return ""
        if fit.verdict is not Verdict.TOO_LARGE:
            return ""
        detail = f"{fit.room.name}: {band(fit.low, fit.high)} needed, {verdict(fit)}."
        return f"{detail}\n{_in_words(prediction.step)}" if prediction.step is not None else detail

    # -- looking ---------------------------------------------------------------------------

    def _begin(self) -> None:
        values = self._values

        def late() -> None:
            if values is self._values and (
                self.prediction is None or self.prediction.values != values
            ):
                self._show(Content.styled(_MEASURING, "$foreground 60%"))

        if values.get("pretrained_model_name_or_path"):
            self.set_timer(_SOON, late)
        self.run_worker(self._look, group="fit", exclusive=True, exit_on_error=False, thread=True)

    def _look(self) -> None:
        """Predict in a thread."""
        worker, values = get_current_worker(), self._values
        assert self._snapshot is not None
        try:
            prediction = look(values, self._snapshot, lambda: worker.is_cancelled, self._partitions)
        except Cancelled:
            return
        if not worker.is_cancelled:
            self.post_message(self.Found(prediction))
        if prediction.asked is None or worker.is_cancelled:
            return
        try:
            advised = advise(prediction)
        except Cancelled:
            return
        except (UserError, ToolError):  # what was posted stays
            advised = replace(prediction, asked=None)
        self.post_message(self.Found(advised))

    def on_fit_bars_found(self, message: Found) -> None:
        if message.look.values == self._values:
            self.prediction = message.look
            self._draw()

    def on_resize(self) -> None:
        if self.prediction is not None:
            self._draw()

    # -- showing ---------------------------------------------------------------------------

    def _draw(self) -> None:
        look = self.prediction
        assert look is not None
        # While hidden it has no width, but its container has.
        width = (self.parent if isinstance(self.parent, Widget) else self).content_size.width
        lines = bar_lines(look.bars, width)
        if look.pace:
            lines.append(Content.styled(look.pace, "$foreground 80%"))
        if look.step is not None:
            lines.append(Content.styled(f"→ {_in_words(look.step)}", "$foreground"))
        if look.faster:
            lines.append(Content.styled(f"→ {look.faster}", "$foreground"))
        if look.remark:
            lines.append(Content.styled(look.remark, "$foreground 60%"))
        self.tooltip = look.notes or None
        self._show(Content("\n").join(lines))

    def _show(self, text: Content) -> None:
        """Update the text if it changed: Textual repaints at every update."""
        if self.content != text:
            self.update(text)
        self.set_class(bool(text.plain), "-shown")


def look(
    values: Mapping[str, Any],
    snapshot: Snapshot,
    cancelled: Callable[[], bool] = lambda: False,
    partitions: Sequence[Partition] = (),
) -> Look:
    """Predict whether the form's values fit, without advice; takes seconds for a new model.

    Raises:
        Cancelled: `cancelled` returned true.
    """
    if not values.get("pretrained_model_name_or_path"):
        return Look(values)  # most forms are opened and closed again
    try:
        spec = draft.spec_of(values, ignoring=_IGNORED)
        asked = estimate(
            spec,
            question.shared(),
            present=snapshot.gpus,
            ours=snapshot.our_pids,
            claims=snapshot.claims,
            imagine=False,
            cards=cards_of(spec, partitions),
            cancelled=cancelled,
        )
        own = asked.own
        if isinstance(own, Refused):
            return Look(values, remark=f"memory: {own.error}")
        bars = _bars(asked, world_size(spec))
        fits = worst(fit for _, fit in bars).verdict is Verdict.FITS
        seconds = asked.seconds(own)
    except UserError:  # shown beside the fields, or the model is unknown
        return Look(values)
    except ToolError as error:
        return Look(values, remark=f"memory: {error}")
    strategy = f"{own.strategy} on {own.ranks} rank{'s' if own.ranks > 1 else ''}"
    about = [f"Predicted for {strategy}; peak in {own.largest.name}.", *own.notes]
    notes = "\n".join([*about, asked.calibration.in_words()]).strip()
    return Look(
        values,
        bars,
        strategy=own.strategy,
        pace="" if isinstance(seconds, str) else pace(seconds),
        asked=asked if asked.place.on_gpus or not fits else None,
        remark=asked.place.note,
        notes=notes,
    )


def advise(look: Look) -> Look:
    """Add what to change for a job that does not fit, or what would be faster for one that does.

    Raises:
        Cancelled: The answer is no longer needed.
        UserError: This model cannot be predicted.
        ToolError: The prediction failed.
    """
    tightest = look.worst
    if look.asked is None or tightest is None:
        return look
    if tightest.verdict is Verdict.FITS:
        return replace(look, faster=_faster(look.asked), asked=None)
    return replace(look, step=look.asked.remedy(tightest.room), asked=None)


def _faster(asked: Estimate) -> str:
    """Name the fastest setup that fits, if that is not the job as it is; takes a while."""
    ranking = asked.ranking()
    if isinstance(ranking, str) or (choice := better(ranking)) is None:
        return ""
    setup, _ = choice
    lost = f"; {setup.loses}; {exactly(ranking)}" if setup.loses else ""
    seconds = span(setup.seconds.low, setup.seconds.high)
    return f"{keys_text(setup.changes)}: {seconds} s a step{lost}"


def _bars(asked: Estimate, ranks: int) -> tuple[tuple[str, Fit], ...]:
    """Return a label and a fit for each GPU; equal GPUs share one."""
    own, place = asked.own, asked.place
    assert not isinstance(own, Refused)
    if not place.on_gpus:
        return (("host", asked.fit(own)),)
    if not place.chosen:
        return ((f"any {ranks} GPUs" if ranks > 1 else "any GPU", asked.fit(own)),)
    groups: list[tuple[list[int | None], Fit]] = []
    for room in place.rooms:
        fit = asked.fit(own, room)
        same = next((group for group in groups if _alike(group[1], fit)), None)
        if same is None:
            groups.append(([room.gpu], fit))
        else:
            same[0].append(room.gpu)
    return tuple((_name(gpus), fit) for gpus, fit in groups)


def _alike(fit: Fit, other: Fit) -> bool:
    near = _ALIKE * fit.room.total
    return (
        abs(fit.room.total - other.room.total) <= near
        and abs(fit.room.held - other.room.held) <= near
        and abs(fit.room.passing - other.room.passing) <= near
    )


def _name(gpus: list[int | None]) -> str:
    """Return `GPU 0-3`."""
    return f"GPU {ranges(gpu for gpu in gpus if gpu is not None)}"


def bar_lines(bars: Sequence[tuple[str, Fit]], width: int) -> list[Content]:
    """Return one line for each bar; all bars have the same length."""
    figures = [_figures(fit) for _, fit in bars]
    words = [_verdict(fit) for _, fit in bars]
    beside = max(map(len, figures)) + max(map(len, words)) if bars else 0
    column = _NAME if width >= _ROOMY else max((len(name) for name, _ in bars), default=0) + 1
    cells = max(_SHORTEST, min(_LONGEST, width - column - beside))
    return [
        Content.styled(f"{name:<{column}}", "$foreground 75%")
        + _bar(fit, cells)
        + Content.styled(figure.ljust(max(map(len, figures))), "$foreground 80%")
        + Content.styled(text, f"b {_COLOURS[fit.verdict]}")
        for (name, fit), figure, text in zip(bars, figures, words, strict=True)
    ]


def _bar(fit: Fit, cells: int) -> Content:
    """Draw a bar: memory surely needed, possibly needed, free, and used by others."""
    colour, total = _COLOURS[fit.verdict], max(1, fit.room.total)
    held = min(cells - 1, round((fit.room.held + fit.room.passing) / total * cells))
    low, high = (min(cells - held, round(n / total * cells)) for n in (fit.low, fit.high))
    low = max(1, low)
    may = max(0, high - low)
    parts = [
        ("━" * low, colour),
        ("╍" * may, colour),
        ("┄" * (cells - low - may - held), "$foreground 26%"),
        ("▒" * held, "$warning"),
    ]
    return Content("").join(Content.styled(text, style) for text, style in parts if text)


def _figures(fit: Fit) -> str:
    needed = "-".join(dict.fromkeys(f"{n / 2**30:.0f}" for n in (fit.low, fit.high)))
    return f" {needed} of {fit.room.total / 2**30:.0f} GiB  "


def _verdict(fit: Fit) -> str:
    """Return how it fits, in a few words."""
    if fit.verdict is Verdict.TOO_LARGE:
        return f"does not fit by {size(fit.low - fit.room.free)}"
    if fit.verdict is Verdict.FITS and fit.spare < fit.room.passing:
        return f"fits when other processes free {gib(fit.room.passing)} GiB"
    return verdict(fit)


def _in_words(step: Step) -> str:
    """Return the first thing to change."""
    changed = keys_text(step.changes)
    cost = f", {step.cost}" if step.cost else ""
    return f"{changed}: {gib(step.before.high)} → {gib(step.after.high)} GiB{cost}"


# -- preview --------------------------------------------------------------------------------
# The form's result beside it: the job file, or the launch command.


KINDS: Final = ("yaml", "command")
_TITLES: Final = {"yaml": "job file", "command": "launch command"}
_NOTHING: Final = {"yaml": "nothing yet", "command": "loading …"}


class Preview(VerticalScroll, can_focus=False):
    """Shows one of two texts.

    Attributes:
        kind: Which text.
        texts: The texts to copy.
        reading: Whether it was requested although it does not fit beside the fields.
    """

    def __init__(self) -> None:
        super().__init__(id="preview")
        self.kind = KINDS[0]
        self.reading = False
        self.texts = dict.fromkeys(KINDS, "")

    def compose(self) -> ComposeResult:
        for kind in KINDS:
            yield Static(_NOTHING[kind], id=kind, markup=False)

    def on_mount(self) -> None:
        self.turn_to(self.kind)

    def turn(self, kind: str = "") -> None:
        """Show this text, or the next; after the last, the fields if there is no room for both."""
        if kind or not self.display:
            self.reading = True
            self.turn_to(kind or KINDS[0])
        elif self.kind == KINDS[-1]:
            self.reading = False
            self.turn_to(KINDS[0])
        else:
            self.turn_to(KINDS[-1])

    def turn_to(self, kind: str) -> None:
        """Show this text."""
        self.kind = kind
        for name in KINDS:
            self.query_one(f"#{name}").display = name == kind
        titles = []
        for name in KINDS:
            style = "b $primary" if name == kind else "$foreground 55%"
            titles.append(f"[@click=screen.preview('{name}')][{style}]{_TITLES[name]}[/][/]")
        self.border_title = " │ ".join(titles)
        self.border_subtitle = "F3 switch · ^y copy"

    def tell(self, kind: str, seen: str, copied: str | None = None) -> None:
        """Replace a text.

        Args:
            kind: Which text.
            seen: The displayed text.
            copied: The text to copy, if that is more.
        """
        self.texts[kind] = seen if copied is None else copied
        text = self.query_one(f"#{kind}", Static)
        if str(text.content) != (seen or _NOTHING[kind]):
            text.update(seen or _NOTHING[kind])
