"""The samples tab: a grid of prompts and steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual import on
from textual.widgets import Static

from jobs.errors import UserError
from jobs.spec.values.yaml_lines import read_mapping
from tui.job.samples.grid import SampleGrid
from tui.job.samples.table import about
from tui.keys.key_table import Key, bindings_of
from tui.terminal.images.protocol import for_many
from tui.widgets.pane import Pane

if TYPE_CHECKING:
    from textual.app import ComposeResult

    from jobs.queue.store import Job
    from jobs.run.samples import Sample
    from tui.look.job_look import Look

_EMPTY = (
    "No samples yet. A job samples its validation_prompts every validation_steps steps; p samples "
    "a running job now."
)
_NO_PROMPTS = "No samples: this job has no validation_prompts."


class SamplesPane(Pane):
    """The grid, and what the chosen image was made from."""

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
        self._texts = {"sample-about": "", "sample-none": ""}

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
            self._put("sample-none", _EMPTY if _has_prompts(look) else _NO_PROMPTS)
        self.grid.update_from(look.samples)

    @on(SampleGrid.Chosen)
    def show_about(self) -> None:
        sample = self.grid.chosen
        self._put("sample-about", about(sample) if sample is not None else "")

    def _put(self, name: str, text: str) -> None:
        """Change a text; one that stays the same is not sent to the terminal again."""
        if self._texts[name] != text:
            self._texts[name] = text
            self.query_one(f"#{name}", Static).update(text)

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
        """Beside the marked one, or the first one of the same prompt."""
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
        from tui.job.samples.screen import SampleScreen

        if self.grid.chosen is not None:
            screen = SampleScreen(self.job, self.grid.table, self.grid.place, beside)
            self.app.push_screen(screen, self._came_back)

    def _came_back(self, place: object) -> None:
        from tui.job.samples.table import Place

        if isinstance(place, Place):
            self.grid.choose(self.grid.table.clamp(place))

    def action_copy_path(self) -> None:
        if (sample := self.grid.chosen) is not None:
            self.copy(str(sample.video or sample.picture))


def _has_prompts(look: Look) -> bool:
    """Whether its job file names prompts; where that cannot be read, it may."""
    try:
        return read_mapping(look.job.run_dir.job_file)[0].get("validation_prompts") != []
    except UserError:
        return True
