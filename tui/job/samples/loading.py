"""Decode the images that can be seen, in a thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from textual.message import Message
from textual.worker import get_current_worker

from tui.terminal.images.thumbnails import BrokenPictureError, Thumbnails

if TYPE_CHECKING:
    from collections.abc import Sequence

    from PIL.Image import Image
    from textual.dom import DOMNode

    from jobs.run.samples import Sample


@dataclass
class Loaded(Message):
    """A sample is decoded, or cannot be."""

    sample: Sample
    image: Image | None
    problem: str = ""


class Loading:
    """Decodes for a widget or screen, which gets a `Loaded` for each image.

    Args:
        owner: Who gets them; only the newest wish counts.
        longest: Pixels of an image's longer side.
        kept: What was decoded already.
    """

    def __init__(self, owner: DOMNode, longest: int, kept: Thumbnails | None = None) -> None:
        self._owner = owner
        self._longest = longest
        self._kept = kept or Thumbnails()

    def cached(self, sample: Sample) -> Image | None:
        """Return an image that needs no decoding."""
        return self._kept.cached(sample.picture, sample.time, self._longest)

    def want(self, samples: Sequence[Sample]) -> None:
        """Decode these, in their order, and forget about earlier wishes."""
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
            except Exception as error:  # the edge: a place that stays empty tells nothing
                problem = f"{type(error).__name__}: {error}"
                self._owner.post_message(Loaded(sample, None, problem))
