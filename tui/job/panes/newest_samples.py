"""The newest samples of a job, beside each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from textual.containers import Horizontal, Vertical

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.events import Resize

    from jobs.run.samples import Sample
    from tui.job.samples.loading import Loaded
    from tui.terminal.images.image import Picture

_EACH: Final = 24  # columns of an image, at least
_MOST: Final = 4
_ROOMY: Final = 40  # columns for a title with all in it
_LONGEST: Final = 512  # pixels


class NewestSamples(Vertical):
    """As many of the newest step's images as there is room for, the first prompts first."""

    BORDER_TITLE = "samples"

    def __init__(self) -> None:
        super().__init__(id="overview-samples")
        self._samples: Sequence[Sample] = ()
        self._shown: list[Sample] = []
        self._pictures: list[Picture] = []

    def update_from(self, samples: Sequence[Sample]) -> None:
        """Show the newest of these."""
        if samples is not self._samples:
            self._samples = samples
            self._fill()

    def on_resize(self, event: Resize) -> None:
        self._fill()

    def _fill(self) -> None:
        from tui.job.samples.loading import Loading  # images take a while to import
        from tui.terminal.images.image import Picture
        from tui.terminal.images.protocol import for_many

        width = self.size.width
        if not self._samples or not width:
            return
        step = max(sample.step for sample in self._samples)
        newest = sorted((s for s in self._samples if s.step == step), key=lambda s: s.number)
        shown = newest[: max(1, min(_MOST, width // _EACH))]
        if shown == self._shown:
            return
        more = f" · {len(shown)} of {len(newest)}" if len(shown) < len(newest) else ""
        long, short = f"samples of step {step}{more} · 5: all", f"step {step}{more}"
        self.border_title = long if width >= _ROOMY else short
        if len(shown) != len(self._pictures):
            self._pictures = [Picture(for_many()) for _ in shown]
            with self.app.batch_update():
                self.remove_children()
                self.mount(Horizontal(*self._pictures))
        self._shown = shown
        for picture in self._pictures:
            picture.say("…")
        Loading(self, _LONGEST).want(shown)

    def on_loaded(self, message: Loaded) -> None:
        """Show an image once it is decoded, or say that it cannot be."""
        message.stop()
        for sample, picture in zip(self._shown, self._pictures, strict=True):
            if sample == message.sample and picture.is_mounted:
                if message.image is not None:
                    picture.show(message.image)
                else:
                    picture.say(message.problem, bad=True)
