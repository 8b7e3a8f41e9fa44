"""The samples tab: a row for each prompt, a column for each step, as many as fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from textual import on
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import Static

from jobs.errors import UserError
from jobs.spec.values.yaml_lines import read_mapping
from tui.job.sample_table import (
    USUAL_ZOOM,
    ZOOMS,
    Loaded,
    Loading,
    Place,
    Shape,
    Table,
    about,
    shape_of,
    window,
)
from tui.keys.key_table import Key, bindings_of
from tui.terminal.image import Picture
from tui.terminal.image_protocol import for_many
from tui.text.format import cut
from tui.widgets.bars import show
from tui.widgets.pane import Pane

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.app import ComposeResult
    from textual.events import Click, Resize

    from jobs.queue.store import Job
    from jobs.run.samples import Sample
    from tui.app.app import FsdpTui
    from tui.look.job_look import Look
    from tui.terminal.image_protocol import Protocol


# -- grid -----------------------------------------------------------------------------------
# A grid of samples: a row for each prompt, a column for each step, as many as fit.


_LONGEST: Final = 384  # pixels


class Cell(Vertical):
    """An image below its step."""

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
        """Show a cell's step, and whether the cell is selected."""
        sign = "▸ " if chosen else "  "
        text = Content(f"{sign}step {step}{' · marked' if marked else ''}")
        self.set_class(chosen, "-chosen")
        if text != self._mark_text:
            self._mark_text = text
            self.caption.update(text)


class SampleGrid(Vertical, can_focus=True):
    """The visible part of a table of samples, and the selected one."""

    @dataclass
    class Chosen(Message):
        """Another sample is selected."""

    @dataclass
    class Opened(Message):
        """The user wants to see the selected sample full screen."""

    def __init__(self, protocol: Protocol) -> None:
        super().__init__(id="sample-grid")
        self.protocol = protocol
        self.table = Table.of(())
        self.place = Place(0, 0)
        self.marked: tuple[int, int] | None = None  # prompt number, step
        self.zoom = USUAL_ZOOM
        self.decoder = Loading(self, _LONGEST)
        self._shape = Shape(0, 0)
        self._first = Place(0, 0)
        self._cells: list[list[Cell]] = []
        self._prompts: list[Static] = []
        self._prompt_texts: list[str] = []

    @property
    def chosen(self) -> Sample | None:
        """Return the selected sample, if there is one at that place."""
        return self.table.at(self.place)

    def update_from(self, samples: Sequence[Sample]) -> None:
        """Show these samples; the selection stays, and starts at the newest."""
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
        """Select another sample."""
        place = self.table.clamp(Place(self.place.row + rows, self.place.column + columns))
        self.choose(place)

    def choose(self, place: Place) -> None:
        if place != self.place:
            self.place = place
            self._fill()
            self.post_message(self.Chosen())

    def zoom_by(self, by: int) -> None:
        """Zoom: fewer and larger images, or more and smaller ones."""
        zoom = max(0, min(self.zoom + by, len(ZOOMS) - 1))
        if zoom != self.zoom:
            self.zoom = zoom
            self.lay_out()

    def toggle_mark(self) -> None:
        """Mark the selected sample for comparisons, or clear the mark."""
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
        """Create enough cells, if there are not enough already."""
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
        self._fill()  # before they are shown, so that no image vanishes when a step is added
        with self.app.batch_update():
            self.remove_children()
            self.mount_all(
                Vertical(prompt, Horizontal(*cells, classes="sample-cells"), classes="sample-row")
                for prompt, cells in zip(self._prompts, self._cells, strict=True)
            )
        self.call_after_refresh(self._fit)

    def _fit(self) -> None:
        """Fit the images to their cells: Textual may not report the size of a new widget."""
        for cell in (cell for cells in self._cells for cell in cells):
            cell.picture.fit()

    def _fill(self) -> None:
        """Fill the cells: decoded samples at once, others when they are ready."""
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
            if cell.waiting:  # a newer request replaces an older one
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


# -- pane -----------------------------------------------------------------------------------
# The samples tab: a grid of prompts and steps.


_EMPTY = (
    "No samples yet. A job samples its validation_prompts every validation_steps steps; p samples "
    "a running job now."
)
_NO_PROMPTS = "No samples: this job has no validation_prompts."


EXPORT: Final = Key("export", "e", "e", "export", "Export the checkpoint of the image's step")


def export_step(app: FsdpTui, job: Job, step: int) -> None:
    """Export a job's checkpoint of a step, if there is one."""

    def export() -> str:
        if job.id in app.dashboard.exports.running:
            return f"job {job.id} is being exported already"
        steps = [saved for saved, _ in job.run_dir.complete_checkpoints()]
        if step not in steps:
            near = min(steps, key=lambda saved: abs(saved - step), default=None)
            near_by = f"step {near} has the nearest: 6 lists them" if near is not None else None
            raise UserError(f"job {job.id} has no checkpoint of step {step}", near_by)
        app.call_later(app.dashboard.exports.start, job, step)
        return f"exporting step {step} of job {job.id} …"

    app.act(export)


class SamplesPane(Pane):
    """The grid, and how the selected image was made."""

    KEYS: ClassVar = (
        Key("move(0, 1)", "right,l", "← →", "step", "Next step"),
        Key("move(0, -1)", "left,h", "←", "earlier", "Previous step", line=False),
        Key("move(1, 0)", "down,j", "↑ ↓", "prompt", "Next prompt"),
        Key("move(-1, 0)", "up,k", "↑", "previous prompt", "Previous prompt", line=False),
        Key("move(0, 1000000)", "end,G,shift+g", "G", "newest", "Newest step", line=False),
        Key("move(0, -1000000)", "home,g", "g", "oldest", "Oldest step", line=False),
        Key("open_sample", "enter", "enter", "large", "Show the image full-screen"),
        Key("mark", "space", "space", "mark", "Mark an image to compare others with"),
        Key(
            "compare",
            "v",
            "v",
            "compare",
            "Compare with the marked image, or the first of its prompt",
        ),
        EXPORT,
        Key("copy_path", "o,y", "o", "path", "Copy the path of the image or video"),
        Key("zoom(1)", "plus,equals_sign", "+ −", "size", "Fewer, larger images"),
        Key("zoom(-1)", "minus", "−", "smaller", "More, smaller images", line=False),
    )
    BINDINGS: ClassVar = bindings_of("samples", KEYS)

    def __init__(self, job: Job) -> None:
        super().__init__(id="samples")
        self.job = job
        self.grid = SampleGrid(for_many())
        self._samples: tuple[Sample, ...] | None = None

    def compose(self) -> ComposeResult:
        yield Static("", id="sample-none", markup=False)
        yield self.grid
        yield Static("", id="sample-about", markup=False)

    def update_from(self, look: Look) -> None:
        if look.samples is self._samples:
            return
        self._samples = look.samples
        self.set_class(not look.samples, "-none")
        if not look.samples:
            show(
                self.query_one("#sample-none", Static),
                _EMPTY if _has_prompts(look) else _NO_PROMPTS,
            )
        self.grid.update_from(look.samples)

    @on(SampleGrid.Chosen)
    def show_about(self) -> None:
        sample = self.grid.chosen
        show(self.query_one("#sample-about", Static), about(sample) if sample is not None else "")

    # -- keys ------------------------------------------------------------------------------

    def action_move(self, rows: int, columns: int) -> None:
        self.grid.go(rows, columns)

    def action_zoom(self, by: int) -> None:
        self.grid.zoom_by(by)

    def action_mark(self) -> None:
        self.grid.toggle_mark()

    @on(SampleGrid.Opened)
    def action_open_sample(self) -> None:
        self._open(None)

    def action_compare(self) -> None:
        """Compare with the marked sample, or with the first one of the same prompt."""
        table, chosen = self.grid.table, self.grid.chosen
        if chosen is None:
            return
        first = next(
            (
                table.samples[chosen.number, step]
                for step in table.steps
                if (chosen.number, step) in table.samples
            ),
            None,
        )
        marked = table.samples.get(self.grid.marked) if self.grid.marked else None
        self._open(marked or first)

    def _open(self, beside: Sample | None) -> None:
        from tui.job.sample_screen import SampleScreen

        if self.grid.chosen is not None:
            screen = SampleScreen(self.job, self.grid.table, self.grid.place, beside)
            self.app.push_screen(screen, self._came_back)

    def _came_back(self, place: object) -> None:
        from tui.job.sample_table import Place

        if isinstance(place, Place):
            self.grid.choose(self.grid.table.clamp(place))

    def action_export(self) -> None:
        if (sample := self.grid.chosen) is not None:
            export_step(self.app, self.job, sample.step)

    def action_copy_path(self) -> None:
        if (sample := self.grid.chosen) is not None:
            self.copy(str(sample.video or sample.picture))


def _has_prompts(look: Look) -> bool:
    """Return whether the job file has prompts; true if it cannot be read."""
    try:
        return read_mapping(look.job.run_dir.job_file)[0].get("validation_prompts") != []
    except UserError:
        return True
