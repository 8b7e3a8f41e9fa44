"""One sample full screen, or two side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from textual.containers import Horizontal, Vertical
from textual.widgets import Static

from tui.job.sample_table import Loaded, Loading, Place, about
from tui.job.samples import EXPORT, export_step
from tui.keys.key_table import Key, bindings_of, line_of
from tui.terminal.image import Picture
from tui.terminal.image_protocol import current
from tui.widgets.bars import Links
from tui.widgets.job_actions import OfOneJob

if TYPE_CHECKING:
    from textual.app import ComposeResult

    from jobs.queue.store import Job
    from jobs.run.samples import Sample
    from tui.job.sample_table import Table


_LONGEST: Final = 1536  # pixels; few terminals have more


class Side(Vertical):
    """An image above its description."""

    def __init__(self) -> None:
        super().__init__(classes="sample-side")
        self.picture = Picture(current())
        self.words = Static("", markup=False, classes="sample-words")
        self.sample: Sample | None = None

    def compose(self) -> ComposeResult:
        yield self.picture
        yield self.words


class SampleScreen(OfOneJob[Place]):
    """Shows a sample; returns the place of the last one shown."""

    CSS_PATH = "samples.tcss"
    AUTO_FOCUS = ""
    KEYS: ClassVar = (
        Key("move(0, 1)", "right,l", "← →", "step", "Next step"),
        Key("move(0, -1)", "left,h", "←", "earlier", "Previous step", line=False),
        Key("move(1, 0)", "down,j", "↑ ↓", "prompt", "Next prompt"),
        Key("move(-1, 0)", "up,k", "↑", "previous prompt", "Previous prompt", line=False),
        Key("toggle_compare", "v", "v", "compare", "Show two steps side by side, or one"),
        Key("move_other(1)", "right_square_bracket", "[ ]", "left step", "Later step on the left"),
        Key(
            "move_other(-1)",
            "left_square_bracket",
            "[",
            "earlier on the left",
            "Earlier step on the left",
            line=False,
        ),
        EXPORT,
        Key("copy_path", "o,y", "o", "path", "Copy the path of the image or video"),
        Key("copy_prompt", "c", "c", "copy prompt", "Copy the prompt", line=False),
        Key("show_help", "question_mark,f1", "?", "help", "Keys of this screen", line=False),
        Key("leave", "escape,q,enter", "esc", "close", "Back to the grid"),
    )
    BINDINGS: ClassVar = bindings_of("sample", KEYS)

    def __init__(self, job: Job, table: Table, place: Place, beside: Sample | None) -> None:
        """
        Args:
            job: The job.
            table: All samples.
            place: The sample to show.
            beside: A sample to compare it with.
        """
        super().__init__(job)
        self.table = table
        self.place = place
        self.beside = beside
        self.comparing = beside is not None
        self.left = Side()
        self.right = Side()
        self.decoder = Loading(self, _LONGEST)
        self.key_line = Links("", id="sample-keys")
        self._prompt = ""

    def compose(self) -> ComposeResult:
        yield Static("", id="sample-title", markup=False)
        with Horizontal(id="sample-sides"):
            yield self.left
            yield self.right
        yield self.key_line

    def on_mount(self) -> None:
        self._show()

    def on_resize(self) -> None:
        self.show_keys()

    def show_keys(self) -> None:
        *keys, leave = self.KEYS
        acting = self.job_keys(self.job_now)
        self.key_line.update(line_of((leave, *acting, *keys), self.size.width - 2))

    # -- what is shown ---------------------------------------------------------------------

    def _show(self) -> None:
        self.left.display = self.comparing
        sample = self.table.at(self.place)
        prompt = " ".join(self.table.prompt(self.place.row).split())
        if prompt != self._prompt:
            self._prompt = prompt
            self.query_one("#sample-title", Static).update(
                f"{self.table.prompts[self.place.row] + 1}  {prompt}"
            )
        missing = self._fill(self.right, sample)
        if self.comparing:
            missing = [*self._fill(self.left, self.beside), *missing]
        if missing:
            self.decoder.want(missing)

    def _fill(self, side: Side, sample: Sample | None) -> list[Sample]:
        """Show a sample on one side; return it if it has to be decoded first."""
        side.sample = sample
        if sample is None:
            side.picture.say(f"not sampled at step {self.table.steps[self.place.column]}")
            side.words.update("")
            return []
        side.words.update(about(sample))
        if (image := self.decoder.cached(sample)) is not None:
            side.picture.show(image)
            return []
        return [sample]  # the previous image stays until this one is decoded, to avoid flicker

    def on_loaded(self, message: Loaded) -> None:
        for side in (self.left, self.right):
            if side.sample == message.sample:
                if message.image is not None:
                    side.picture.show(message.image)
                else:
                    side.picture.say(f"{message.sample.picture.name}: {message.problem}", bad=True)

    # -- keys ------------------------------------------------------------------------------

    def action_move(self, rows: int, columns: int) -> None:
        place = self.table.clamp(Place(self.place.row + rows, self.place.column + columns))
        if place == self.place:
            return
        if rows and self.beside is not None:  # same step, other prompt
            number = self.table.prompts[place.row]
            self.beside = self.table.samples.get((number, self.beside.step))
        self.place = place
        self._show()

    def action_export(self) -> None:
        export_step(self.app, self.job, self.table.steps[self.place.column])

    def action_toggle_compare(self) -> None:
        self.comparing = not self.comparing
        if self.comparing and self.beside is None:
            self._choose_other(0)
        self._show()

    def action_move_other(self, by: int) -> None:
        """Show another step on the left side, opening that side if needed."""
        if self.beside is None or not self.comparing:
            self.comparing = True
            if self.beside is None:
                self._choose_other(0)
        else:
            steps = self._steps()
            self._choose_other(steps.index(self.beside.step) + by)
        self._show()

    def _steps(self) -> list[int]:
        """Return the samples of the left side's prompt."""
        number = self.beside.number if self.beside else self.table.prompts[self.place.row]
        return [step for step in self.table.steps if (number, step) in self.table.samples]

    def _choose_other(self, index: int) -> None:
        steps = self._steps()
        if not steps:
            return
        number = self.beside.number if self.beside else self.table.prompts[self.place.row]
        step = steps[max(0, min(index, len(steps) - 1))]
        self.beside = self.table.samples[number, step]

    def _copy(self, text: str) -> None:
        from tui.terminal.clipboard import copy

        self.app.say(copy(self.app, text))

    def action_copy_path(self) -> None:
        if (sample := self.table.at(self.place)) is not None:
            self._copy(str(sample.video or sample.picture))

    def action_copy_prompt(self) -> None:
        self._copy(self.table.prompt(self.place.row))

    def action_press(self, key: str) -> None:
        self.app.simulate_key(key)

    def action_show_help(self) -> None:
        self.app.dashboard.action_show_help()

    def action_leave(self) -> None:
        self.dismiss(self.place)
