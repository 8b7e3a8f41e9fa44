"""A grid of samples: a row for each prompt, a column for each step, as many as find room."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import Static

from tui.job.samples.loading import Loaded, Loading
from tui.job.samples.table import USUAL_ZOOM, ZOOMS, Place, Shape, Table, shape_of, window
from tui.terminal.images.image import Picture
from tui.text.format import cut

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.app import ComposeResult
    from textual.events import Click, Resize

    from jobs.run.samples import Sample
    from tui.terminal.images.protocol import Protocol

_LONGEST: Final = 384  # pixels


class Cell(Vertical):
    """An image under its step."""

    def __init__(self, protocol: Protocol) -> None:
        super().__init__(classes="sample-cell")
        self.caption = Static("", classes="sample-step")
        self.picture = Picture(protocol)
        self.sample: Sample | None = None
        self.waiting = False
        self._mark_text: Content | None = None

    def compose(self) -> ComposeResult:
        yield self.caption
        yield self.picture

    def mark(self, step: int, chosen: bool, marked: bool) -> None:
        """Say which step this is, and whether it is the chosen one."""
        sign = "▸ " if chosen else "  "
        text = Content(f"{sign}step {step}{' · marked' if marked else ''}")
        self.set_class(chosen, "-chosen")
        if text != self._mark_text:
            self._mark_text = text
            self.caption.update(text)


class SampleGrid(Vertical, can_focus=True):
    """The part of a table of samples that finds room, and the chosen one."""

    @dataclass
    class Chosen(Message):
        """Another sample is chosen."""

    @dataclass
    class Opened(Message):
        """Someone wants to see the chosen sample large."""

    def __init__(self, protocol: Protocol) -> None:
        super().__init__(id="sample-grid")
        self.protocol = protocol
        self.table = Table.of(())
        self.place = Place(0, 0)
        self.marked: tuple[int, int] | None = None  # number of the prompt, step
        self.zoom = USUAL_ZOOM
        self.decoder = Loading(self, _LONGEST)
        self._shape = Shape(0, 0)
        self._first = Place(0, 0)
        self._cells: list[list[Cell]] = []
        self._prompts: list[Static] = []
        self._prompt_texts: list[str] = []

    @property
    def chosen(self) -> Sample | None:
        """The sample at the chosen place, if there is one."""
        return self.table.at(self.place)

    def update_from(self, samples: Sequence[Sample]) -> None:
        """Show these; the chosen one stays chosen, and at first the newest is."""
        before = self.table
        self.table = Table.of(samples)
        if before.steps:
            kept = self.table.find(before.prompts[self.place.row], before.steps[self.place.column])
            self.place = kept or self.table.clamp(self.place)
        elif self.table.steps:
            self.place = Place(0, len(self.table.steps) - 1)
        self.lay_out()
        self.post_message(self.Chosen())

    def go(self, rows: int, columns: int) -> None:
        """Choose another one."""
        place = self.table.clamp(Place(self.place.row + rows, self.place.column + columns))
        self.choose(place)

    def choose(self, place: Place) -> None:
        if place != self.place:
            self.place = place
            self._fill()
            self.post_message(self.Chosen())

    def zoom_by(self, by: int) -> None:
        """Fewer and larger images, or more and smaller ones."""
        zoom = max(0, min(self.zoom + by, len(ZOOMS) - 1))
        if zoom != self.zoom:
            self.zoom = zoom
            self.lay_out()

    def toggle_mark(self) -> None:
        """Remember the chosen one, to compare others with it; or forget it."""
        if (sample := self.chosen) is not None:
            key = (sample.number, sample.step)
            self.marked = None if self.marked == key else key
            self._fill()

    def on_resize(self, event: Resize) -> None:
        self.lay_out()

    def on_click(self, event: Click) -> None:
        for row, cells in enumerate(self._cells):
            for column, cell in enumerate(cells):
                if cell.region.contains(event.screen_x, event.screen_y):
                    place = Place(self._first.row + row, self._first.column + column)
                    again = place == self.place
                    self.choose(self.table.clamp(place))
                    if again:
                        self.post_message(self.Opened())

    # -- what is seen ----------------------------------------------------------------------

    def lay_out(self) -> None:
        """Make as many cells as find room, if there are not enough already."""
        width, height = self.size
        if not width or not height or not self.table.steps:
            return
        shape = shape_of(self.table, width, height, self.zoom)
        if shape == self._shape:
            self._fill()
            return
        self._shape = shape
        self._cells = [
            [Cell(self.protocol) for _ in range(shape.columns)] for _ in range(shape.rows)
        ]
        self._prompts = [Static("", classes="sample-prompt", markup=False) for _ in self._cells]
        self._prompt_texts = [""] * shape.rows
        with self.app.batch_update():
            self.remove_children()
            self.mount_all(
                Vertical(prompt, Horizontal(*cells, classes="sample-cells"), classes="sample-row")
                for prompt, cells in zip(self._prompts, self._cells, strict=True)
            )
        self.call_after_refresh(self._fill)

    def _fill(self) -> None:
        """Put samples into the cells, decoded ones at once, others when they are."""
        shape, table = self._shape, self.table
        if not self._cells:
            return
        self.place = table.clamp(self.place)
        self._first = Place(
            window(self._first.row, shape.rows, self.place.row, len(table.prompts)),
            window(self._first.column, shape.columns, self.place.column, len(table.steps)),
        )
        missing: list[Sample] = []
        for row, cells in enumerate(self._cells):
            self._tell_prompt(row)
            for column, cell in enumerate(cells):
                place = Place(self._first.row + row, self._first.column + column)
                self._fill_cell(cell, place, missing)
        if missing:
            self.decoder.want(missing)

    def _tell_prompt(self, row: int) -> None:
        at = self._first.row + row
        words = cut(
            f"{self.table.prompts[at] + 1}  {' '.join(self.table.prompt(at).split())}",
            self.size.width - 2,
        )
        if words != self._prompt_texts[row]:
            self._prompt_texts[row] = words
            self._prompts[row].update(words)

    def _fill_cell(self, cell: Cell, place: Place, missing: list[Sample]) -> None:
        table, sample = self.table, self.table.at(place)
        key = (table.prompts[place.row], table.steps[place.column])
        cell.mark(key[1], place == self.place, key == self.marked)
        if sample is not None and sample == cell.sample:
            if cell.waiting:  # a newer wish takes the place of the older one
                missing.append(sample)
            return
        cell.sample, cell.waiting = sample, False
        if sample is None:
            cell.picture.say("not sampled")
        elif (image := self.decoder.cached(sample)) is not None:
            cell.picture.show(image)
        else:
            cell.picture.say("…")
            cell.waiting = True
            missing.append(sample)

    def on_loaded(self, message: Loaded) -> None:
        for cell in (cell for cells in self._cells for cell in cells):
            if cell.sample == message.sample:
                cell.waiting = False
                if message.image is not None:
                    cell.picture.show(message.image)
                else:
                    cell.picture.say(message.problem, bad=True)
