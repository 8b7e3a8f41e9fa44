"""An image, or why there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from textual.containers import Container
from textual.widgets import Static

from tui.terminal.images.half_blocks import BlockPicture, fitted
from tui.terminal.images.library import picture_class
from tui.terminal.images.protocol import cell_size

if TYPE_CHECKING:
    from PIL.Image import Image
    from textual.app import ComposeResult
    from textual.events import Resize

    from tui.terminal.images.protocol import Protocol

_CELL = (10, 20)  # pixels, where the terminal does not say


class Picture(Container):
    """Shows an image as large as there is room for, by a protocol; or a text in its place."""

    DEFAULT_CSS = """
    Picture { width: 1fr; height: 1fr; align: center middle; }
    Picture > Static { width: 100%; height: auto; text-align: center; color: $foreground 62%; }
    Picture.-bad > Static { color: $error; }
    Picture.-shown > Static { display: none; }
    """

    def __init__(self, protocol: Protocol) -> None:
        super().__init__()
        blocks = protocol == "blocks"
        self.inner: Any = BlockPicture() if blocks else picture_class(protocol)()
        self._blocks = blocks
        self._words = Static("", markup=False)
        self._shown_words = ""

    def compose(self) -> ComposeResult:
        self.inner.display = False
        yield self.inner
        yield self._words

    @property
    def image(self) -> Image | None:
        return self.inner.image  # type: ignore[no-any-return]

    def show(self, image: Image) -> None:
        """Show an image."""
        if image is not self.inner.image:
            self.inner.image = image
            self._fit()
        self.inner.display = True
        self.add_class("-shown")
        self.remove_class("-bad")

    def say(self, words: str, *, bad: bool = False) -> None:
        """Show words in its place."""
        self.inner.display = False
        self.remove_class("-shown")
        self.set_class(bad, "-bad")
        if words != self._shown_words:
            self._shown_words = words
            self._words.update(words)

    def on_resize(self, event: Resize) -> None:
        self._fit()

    def _fit(self) -> None:
        """Fit the image to the widget: the library's widgets stretch images to their own size."""
        image, (width, height) = self.inner.image, self.size
        if self._blocks or image is None or not width or not height:
            return
        across, down = cell_size() or _CELL
        # Lines that are as high as two columns are wide are what half blocks reckon with.
        stretched = (image.width * 2 * down // across, image.height * 4)
        columns, lines = fitted((stretched[0], stretched[1]), width, height)
        self.inner.styles.width, self.inner.styles.height = columns, lines
