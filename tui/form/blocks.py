"""The modal, over the form, for choosing the classes to wrap."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final

from textual import on
from textual.binding import Binding
from textual.containers import Vertical
from textual.events import DescendantFocus
from textual.message import Message
from textual.screen import ModalScreen
from textual.widgets import Input, Static
from textual.worker import get_current_worker

from jobs.errors import UserError
from jobs.machine.engine_tools import Cancelled, ToolError
from jobs.models.blocks import detect_blocks
from tui.keys.key_table import bind, key_line
from tui.text.block_text import (
    NO_SPLIT,
    RECOMMENDED,
    about,
    cautions,
    headline,
    outcome,
    parameters,
    paths,
    share,
    usable,
)
from tui.text.format import Row, Span, bar, left, right
from tui.widgets.bars import Links
from tui.widgets.lines import Lines, PickList
from tui.widgets.size_classes import set_size_classes

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from textual.app import ComposeResult

    from jobs.models.blocks import BlockClass, Detection
    from tui.text.block_text import Model


# -- rows -----------------------------------------------------------------------------------
# The rows of the block modal. Pure.


_BOX: Final = 2  # columns, including the space after it
_STAR: Final = 2
_COUNT: Final = 6
_TOTAL: Final = 8
_SHARE: Final = 6
_LEAST_NAME: Final = 16
_LEAST_BAR: Final = 5
_BAR: Final = 14
_LEAST_PATHS: Final = 20
_GAP: Final = "  "


def block_rows(
    classes: Sequence[BlockClass], chosen: Collection[str], width: int, names: int
) -> list[Row]:
    """Return a heading, and a row for each class.

    Columns that do not fit are dropped, the rightmost first.

    Args:
        classes: In the order of the rows.
        chosen: Names of the checked classes.
        width: Columns.
        names: Columns of the longest name of all classes, so that a search moves no columns.
    """
    numbers = _COUNT + _TOTAL + _SHARE + len(_GAP)
    room = width - _BOX - _STAR - numbers - 1
    badges = len(_GAP) + len(NO_SPLIT) if room >= _LEAST_NAME + len(_GAP) + len(NO_SPLIT) else 0
    names = min(names, room - badges)
    room -= names + badges
    length = min(_BAR, room - 1) if room > _LEAST_BAR else 0
    where = room - 1 - length - len(_GAP)
    if where < _LEAST_PATHS:
        where = 0
    heading = " " * (_BOX + _STAR) + left("class", names) + " " * badges + right("count", _COUNT)
    heading += right("total", _TOTAL) + _GAP + right("share", _SHARE)
    heading += (" " * (1 + length) + _GAP + "at") if where else ""
    rows: list[Row] = [(Span(heading, "dim"),)]
    for block_class in classes:
        on = block_class.class_name in chosen
        badge = _GAP + (NO_SPLIT if block_class.in_no_split_modules else "").ljust(len(NO_SPLIT))
        row: list[Span] = [
            Span("■ " if on else "□ ", "good" if on else "dim"),
            Span(RECOMMENDED.ljust(_STAR) if block_class.recommended else " " * _STAR, "accent"),
            Span(left(block_class.class_name, names), "strong" if on else ""),
            Span(badge if badges else "", "title"),
            Span(
                right(str(block_class.count), _COUNT)
                + right(parameters(block_class.params_total), _TOTAL)
            ),
            Span(_GAP + right(share(block_class.share), _SHARE)),
        ]
        if length:
            row += [Span(" "), *bar(block_class.share, length)]
        if where:
            row.append(Span(_GAP + left(paths(block_class), where), "dim"))
        rows.append(tuple(row))
    return rows


def looking_row(done: int, total: int, width: int) -> Row:
    """Return the progress of inspecting a model."""
    words = "building the model without its weights "
    if not total or done >= total:
        return (Span(words + "…", "accent"),)
    count = f" {done}/{total}"
    length = max(0, min(40, width - len(words) - len(count)))
    return (Span(words, "accent"), *bar(done / total, length), Span(count, "strong"))


# -- panel ----------------------------------------------------------------------------------
# The list of the block modal.


class BlocksPanel(PickList):
    """Classes with checkboxes, one of them highlighted. A search hides some."""

    BINDINGS: ClassVar = [bind("detect.check", "space", "Check or uncheck the selected class")]

    @dataclass
    class Toggled(Message):
        """The user checked or unchecked this class."""

        class_name: str

    def __init__(self) -> None:
        super().__init__(id="detect-blocks")
        self.block_classes: list[BlockClass] = []
        self.listed: list[BlockClass] = []
        self.chosen: frozenset[str] = frozenset()
        self.search_text = ""
        self._class_name: str | None = None  # stays highlighted while the list changes

    @property
    def count(self) -> int:
        return len(self.listed)

    @property
    def highlighted(self) -> BlockClass | None:
        return self.listed[self.index] if self.listed else None

    def update_from(self, classes: Sequence[BlockClass]) -> None:
        """Show these classes."""
        self.block_classes = list(classes)
        self.search(self.search_text)

    def search(self, search_text: str) -> None:
        """List only classes with this text in their name or paths, ignoring case."""
        self.search_text = search_text
        word = search_text.strip().lower()
        self.listed = [
            block_class
            for block_class in self.block_classes
            if any(
                word in text.lower() for text in (block_class.class_name, *block_class.sample_paths)
            )
        ]
        names = [block_class.class_name for block_class in self.listed]
        self.index = names.index(self._class_name) if self._class_name in names else 0
        self.fill()
        self.post_message(self.Highlighted())

    def check(self, chosen: Collection[str]) -> None:
        """Check exactly these classes."""
        self.chosen = frozenset(chosen)
        self.fill()

    def highlight(self, index: int) -> None:
        super().highlight(index)
        self._class_name = self.listed[index].class_name

    def action_check(self) -> None:
        if (highlighted := self.highlighted) is not None:
            self.post_message(self.Toggled(highlighted.class_name))

    def pick(self, row: int) -> None:
        if row < self.count:
            super().pick(row)
            self.action_check()

    def nothing(self) -> Sequence[Row]:
        return [(), (Span("  no class matches", "dim"),)] if self.block_classes else []

    def table(self, width: int) -> Sequence[Row]:
        names = max(len(block_class.class_name) for block_class in self.block_classes)
        return block_rows(self.listed, self.chosen, width, names)


# -- screen ---------------------------------------------------------------------------------
# The modal, over the form, for choosing the classes to wrap.


_KEYS: Final = (  # action, displayed keys, description
    ("check", "space", "check"),
    ("recommended", "a", "recommended"),
    ("search", "/", "search"),
    ("refresh", "r", "refresh"),
    ("apply", "enter", "apply"),
    ("leave", "esc", "cancel"),
)
_MOST_TOLD: Final = 4  # cautions at a time
_KEYS_WITHOUT: Final = (("refresh", "r", "try again"), ("leave", "esc", "close"))
_KEYS_LOOKING: Final = (("leave", "esc", "stop"),)
_KEYS_LOOKING_AGAIN: Final = (*_KEYS[:3], _KEYS[4], *_KEYS_LOOKING)
_KEYS_SEARCHING: Final = (("to_list", "enter", "to the list"), ("leave", "esc", "show all"))


class DetectScreen(ModalScreen[list[str] | None]):
    """Returns the chosen classes, or None if the user cancels.

    A model that was never inspected is built without weights in a separate process, which ends
    with the screen.
    """

    CSS_PATH = "blocks.tcss"
    VERTICAL_BREAKPOINTS = [(0, "-short"), (34, "-tall"), (50, "-high")]  # noqa: RUF012
    AUTO_FOCUS = "#detect-blocks"
    BINDINGS: ClassVar = [
        bind(
            "detect.leave",
            "escape",
            "Leave the search, cancel a refresh, or go back to the form",
            label="cancel",
        ),
        bind("detect.apply", "enter", "Put the checked classes into the form"),
        bind("detect.recommended", "a", "Check only the recommended classes"),
        bind("detect.refresh", "r", "Detect the blocks again, ignoring the cache"),
        bind("detect.search", "slash", "Filter the classes by name or path"),
        Binding("j,down", "go(1)", "next class", id="detect.down"),
        Binding("k,up", "go(-1)", "previous class", id="detect.up"),
        Binding("ctrl+d,pagedown", "go(10)", "ten classes down", id="detect.page_down"),
        Binding("ctrl+u,pageup", "go(-10)", "ten classes up", id="detect.page_up"),
        Binding("home,g", "go(-1000000)", "first class", id="detect.first"),
        Binding("end,G,shift+g", "go(1000000)", "last class", id="detect.last"),
    ]

    @dataclass
    class Progressed(Message):
        """Inspection has made progress."""

        done: int
        total: int

        def can_replace(self, message: Message) -> bool:
            return isinstance(message, DetectScreen.Progressed)

    @dataclass
    class Found(Message):
        """Detection has finished."""

        detection: Detection

    @dataclass
    class Failed(Message):
        """Detection has failed."""

        problem: str

    def __init__(self, model: Model, chosen: Sequence[str] | None, ranks: int) -> None:
        """
        Args:
            model: The model.
            chosen: The classes checked at first; None checks the recommended ones.
            ranks: The job's number of ranks, if the form sets it.
        """
        super().__init__()
        self.model = model
        self.detection: Detection | None = None
        self.chosen: list[str] | None = None if chosen is None else list(dict.fromkeys(chosen))
        self.ranks = ranks
        self.panel = BlocksPanel()
        self.looking = Lines(id="detect-looking")

    def compose(self) -> ComposeResult:
        set_size_classes(self)
        with Vertical(classes="dialog", id="detect") as dialog:
            dialog.border_title = "blocks to wrap"
            yield Static(str(self.model), id="detect-model", markup=False)
            yield self.panel
            yield Static("", id="detect-about", markup=False)
            yield Static("", id="detect-paths", markup=False)
            yield self.looking
            yield Static("", id="detect-problem", markup=False)
            yield Static("", id="detect-outcome", markup=False)
            yield Static("", id="detect-cautions", markup=False)
            yield Input(placeholder="class or path", id="detect-search", compact=True)
            yield Links("", id="detect-keys")

    def on_mount(self) -> None:
        self._look(refresh=False)

    # -- looking ---------------------------------------------------------------------------

    def _look(self, *, refresh: bool) -> None:
        self._complain("")
        self._become_looking(True)
        self.looking.show([looking_row(0, 0, 0)])
        work = partial(self._detect, refresh)
        self.run_worker(work, group="detect", exclusive=True, exit_on_error=False, thread=True)

    def _detect(self, refresh: bool) -> None:
        """Detect in a thread. Closing the screen cancels its worker, and with it the process."""
        worker = get_current_worker()

        def report_progress(done: int, total: int) -> None:
            self.post_message(self.Progressed(done, total))

        try:
            detection = detect_blocks(
                model_family=self.model.family,
                model_flavour=self.model.flavour,
                pretrained_model=self.model.path,
                refresh=refresh,
                progress=report_progress,
                cancelled=lambda: worker.is_cancelled,
            )
            result: Message = self.Found(detection)
        except Cancelled:
            return
        except (UserError, ToolError) as error:
            result = self.Failed(str(error))
        except Exception as error:  # top level: report any failure instead of waiting forever
            result = self.Failed(f"{type(error).__name__}: {error}")
        if not worker.is_cancelled:  # a late cancellation still counts
            self.post_message(result)

    def on_detect_screen_progressed(self, message: Progressed) -> None:
        width = self.looking.size.width
        self.looking.show([looking_row(message.done, message.total, width)])

    def on_detect_screen_failed(self, message: Failed) -> None:
        self._become_looking(False)
        self._complain(message.problem)

    def on_detect_screen_found(self, message: Found) -> None:
        detection = self.detection = message.detection
        if self.chosen is None:
            self.chosen = detection.recommended
        self.add_class("-found")
        self._become_looking(False)
        self.query_one("#detect-model", Static).update(headline(detection, self.model))
        self.panel.update_from(detection.classes)
        self._show_choice()

    def _become_looking(self, looking: bool) -> None:
        self.set_class(looking, "-looking")
        self._show_keys()

    def _complain(self, problem: str) -> None:
        self.query_one("#detect-problem", Static).update(f"! {problem}" if problem else "")
        self.set_class(bool(problem), "-failed")

    # -- choosing --------------------------------------------------------------------------

    def _show_choice(self) -> None:
        """Show what is checked, and its effect."""
        if (detection := self.detection) is None or self.chosen is None:
            return
        self.panel.check(self.chosen)
        self.query_one("#detect-outcome", Static).update(
            outcome(detection, self.chosen, self.ranks)
        )
        warnings = [f"! {warning}" for warning in cautions(detection, self.chosen)]
        if len(warnings) > _MOST_TOLD:
            warnings[_MOST_TOLD - 1 :] = [f"! and {len(warnings) - _MOST_TOLD + 1} more"]
        self.query_one("#detect-cautions", Static).update("\n".join(warnings))
        self.set_class(bool(warnings), "-warned")
        self.query_one("#detect").border_subtitle = f"{len(usable(detection, self.chosen))} checked"

    @on(BlocksPanel.Highlighted)
    def _show_about(self) -> None:
        highlighted = self.panel.highlighted
        if highlighted is not None and self.detection is not None:
            self.query_one("#detect-about", Static).update(
                about(highlighted, self.detection.dtype_bytes)
            )
            self.query_one("#detect-paths", Static).update(f"at {paths(highlighted)}")

    @on(BlocksPanel.Toggled)
    def _toggle(self, event: BlocksPanel.Toggled) -> None:
        if self.chosen is not None:
            kept = [name for name in self.chosen if name != event.class_name]
            self.chosen = kept if len(kept) < len(self.chosen) else [*kept, event.class_name]
            self._show_choice()

    def action_check(self) -> None:
        self.panel.action_check()

    def action_recommended(self) -> None:
        """Check only the recommended classes."""
        if self.detection is not None:
            self.chosen = self.detection.recommended
            self._show_choice()

    def action_go(self, by: int) -> None:
        self.panel.go(by)

    def action_refresh(self) -> None:
        if not self.has_class("-looking"):
            self._look(refresh=True)

    # -- searching -------------------------------------------------------------------------

    def action_search(self) -> None:
        if self.detection is not None:
            self.add_class("-searching")
            self.query_one("#detect-search").focus()

    @on(Input.Changed, "#detect-search")
    def _searched(self, event: Input.Changed) -> None:
        self.panel.search(event.value)

    @on(Input.Submitted, "#detect-search")
    def action_to_list(self) -> None:
        """Keep the search, and go to the list."""
        self.set_class(bool(self.panel.search_text.strip()), "-searching")
        self.panel.focus()

    def _end_search(self) -> None:
        self.query_one("#detect-search", Input).value = ""
        self.panel.search("")
        self.action_to_list()

    # -- leaving ---------------------------------------------------------------------------

    def action_apply(self) -> None:
        if (detection := self.detection) is None or self.chosen is None:
            return
        rank = {
            block_class.class_name: place for place, block_class in enumerate(detection.classes)
        }
        kept = usable(detection, self.chosen)
        self.dismiss(sorted(kept, key=lambda name: rank.get(name, len(rank))))

    def action_leave(self) -> None:
        """Go back one step: out of the search, of a refresh, or of the screen."""
        if self.has_class("-searching"):
            self._end_search()
        elif self.has_class("-looking") and self.detection is not None:
            self.workers.cancel_group(self, "detect")
            self._become_looking(False)
        else:
            self.dismiss(None)

    # -- inside ----------------------------------------------------------------------------

    def on_resize(self) -> None:
        self.call_after_refresh(self._show_keys)  # the dialog has its new width then

    @on(DescendantFocus)
    def _show_keys(self) -> None:
        if self.query_one("#detect-search").has_focus:
            keys: Sequence[tuple[str, str, str]] = _KEYS_SEARCHING
        elif self.has_class("-looking"):
            keys = _KEYS_LOOKING if self.detection is None else _KEYS_LOOKING_AGAIN
        else:
            keys = _KEYS if self.detection is not None else _KEYS_WITHOUT
        line = self.query_one("#detect-keys", Static)
        line.update(key_line(keys, line.size.width or None))
