"""Samples by prompt and step, and their images, decoded in a thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from textual.message import Message
from textual.worker import get_current_worker

from tui.terminal.thumbnails import BrokenPictureError, Thumbnails
from tui.text.format import size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from PIL.Image import Image
    from textual.dom import DOMNode

    from jobs.run.samples import Sample


# -- table ----------------------------------------------------------------------------------
# Samples by prompt and step, and which of them fit. Pure.


ZOOMS: Final = ((14, 5), (22, 8), (34, 12), (54, 20))  # minimum columns and lines of an image
USUAL_ZOOM: Final = 1


class Shape(NamedTuple):
    """The number of images that fit at once."""

    columns: int
    rows: int


class Place(NamedTuple):
    """A row and a column of the table."""

    row: int
    column: int


@dataclass(frozen=True)
class Table:
    """Samples by prompt number and step.

    Attributes:
        prompts: Prompt numbers, ascending; a row each.
        steps: Ascending; a column each.
        samples: (number, step) → the sample.
    """

    prompts: tuple[int, ...]
    steps: tuple[int, ...]
    samples: dict[tuple[int, int], Sample]

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Table:
        return cls(
            tuple(sorted({sample.number for sample in samples})),
            tuple(sorted({sample.step for sample in samples})),
            {(sample.number, sample.step): sample for sample in samples},
        )

    def at(self, place: Place) -> Sample | None:
        """Return the sample at a cell, if there is one."""
        if not (0 <= place.row < len(self.prompts) and 0 <= place.column < len(self.steps)):
            return None
        return self.samples.get((self.prompts[place.row], self.steps[place.column]))

    def find(self, number: int, step: int) -> Place | None:
        """Return the place of a sample, whether or not it exists."""
        if number not in self.prompts or step not in self.steps:
            return None
        return Place(self.prompts.index(number), self.steps.index(step))

    def prompt(self, row: int) -> str:
        """Return a row's prompt, as of its newest sample."""
        number = self.prompts[row]
        for step in reversed(self.steps):
            sample = self.samples.get((number, step))
            if sample is not None and sample.prompt:
                return sample.prompt
        return f"prompt {number}"

    def clamp(self, place: Place) -> Place:
        """Return the nearest cell of the table."""
        return Place(
            max(0, min(place.row, len(self.prompts) - 1)),
            max(0, min(place.column, len(self.steps) - 1)),
        )


def shape_of(table: Table, width: int, height: int, zoom: int) -> Shape:
    """Count the images that fit at once; at least one.

    Args:
        table: The samples.
        width: Columns of the screen.
        height: Lines of the screen; each row has one for its prompt and one for the steps.
        zoom: Index into `ZOOMS`.
    """
    across, down = ZOOMS[zoom]
    columns = max(1, (width + 1) // (across + 1))
    rows = max(1, height // (down + 2))
    return Shape(min(columns, max(1, len(table.steps))), min(rows, max(1, len(table.prompts))))


def window(first: int, shown: int, chosen: int, count: int) -> int:
    """Return the first visible row, scrolled as little as needed to show the chosen one."""
    if chosen < first:
        first = chosen
    if chosen >= first + shown:
        first = chosen - shown + 1
    return max(0, min(first, count - shown))


def about(sample: Sample) -> str:
    """Describe in one line how an image was made."""
    facts = sample.facts
    parts = [f"step {sample.step}"]
    if sample.size is not None:
        parts.append("×".join(map(str, sample.size)))
    for key, words in (
        ("seed", "seed {}"),
        ("steps", "{} steps"),
        ("guidance", "guidance {}"),
        ("frames", "{} frames"),
    ):
        if facts.get(key) is not None:
            parts.append(words.format(facts[key]))
    if facts.get("ema"):
        parts.append("EMA")
    if not facts:
        parts.append("no settings recorded (yet)")
    parts.append(size(sample.bytes))
    if sample.video is not None:
        parts.append(f"video {sample.video.name}")
    return " · ".join(parts)


# -- loading --------------------------------------------------------------------------------
# Decode the visible images in a thread.


@dataclass
class Loaded(Message):
    """A sample was decoded, or could not be."""

    sample: Sample
    image: Image | None
    problem: str = ""


class Loading:
    """Decodes images for a widget or screen, posting a `Loaded` for each.

    Args:
        owner: Receives the messages; only its newest request counts.
        longest: Pixels of an image's longer side.
        kept: Cache of decoded images.
    """

    def __init__(self, owner: DOMNode, longest: int, kept: Thumbnails | None = None) -> None:
        self._owner = owner
        self._longest = longest
        self._kept = kept or Thumbnails()

    def cached(self, sample: Sample) -> Image | None:
        """Return an image that needs no decoding."""
        return self._kept.cached(sample.picture, sample.time, self._longest)

    def want(self, samples: Sequence[Sample]) -> None:
        """Decode these samples in order, and drop earlier requests."""
        self._owner.run_worker(
            lambda: self._decode(samples),
            group="pictures",
            exclusive=True,
            exit_on_error=False,
            thread=True,
        )

    def _decode(self, samples: Sequence[Sample]) -> None:
        worker = get_current_worker()
        for sample in samples:
            if worker.is_cancelled:
                return
            try:
                image = self._kept.load(sample.picture, sample.time, self._longest)
                self._owner.post_message(Loaded(sample, image))
            except BrokenPictureError as error:
                self._owner.post_message(Loaded(sample, None, str(error)))
            except Exception as error:  # top level: report the failure in place of an empty cell
                problem = f"{type(error).__name__}: {error}"
                self._owner.post_message(Loaded(sample, None, problem))
