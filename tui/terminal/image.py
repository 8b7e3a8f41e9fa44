"""A widget that shows an image, or why there is none."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Any

from rich.segment import Segment
from textual.containers import Container
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Static

from tui.terminal.image_protocol import cell_size
from tui.terminal.thumbnails import Grid, draw

if TYPE_CHECKING:
    from PIL.Image import Image
    from textual.app import ComposeResult
    from textual.events import Resize
    from textual.geometry import Size

    from tui.terminal.image_protocol import Protocol


# -- library --------------------------------------------------------------------------------
# textual-image's widgets, without the queries that importing it sends to the terminal.


def picture_class(protocol: Protocol) -> Any:
    """Return the widget class for a protocol; its `image` can be set.

    Importing textual-image 0.12 queries the terminal and waits a tenth of a second for each answer:
    too short for many links, whose late answers Textual would take for keys. It queries nothing if
    standard output is no terminal, so we replace it during the import.
    """
    shown, sys.__stdout__ = sys.__stdout__, io.StringIO()  # type: ignore[misc,assignment]
    try:
        from textual_image import _terminal
        from textual_image.widget import SixelImage, TGPImage
    finally:
        sys.__stdout__ = shown  # type: ignore[misc]
    if (cell := cell_size()) is not None:  # its default is 10 by 20 pixels
        _terminal.get_cell_size._result = _terminal.CellSize(*cell)  # type: ignore[attr-defined]
    return TGPImage if protocol == "kitty" else SixelImage


# -- half blocks ----------------------------------------------------------------------------
# An image in half blocks: two pixels to a character, for any terminal with colors.


class BlockPicture(Widget):
    """One image, as large as it fits. Painted only when it changes."""

    DEFAULT_CSS = "BlockPicture { width: 1fr; height: 1fr; }"

    def __init__(self) -> None:
        super().__init__()
        self._image: Image | None = None
        self._lines: list[Strip] = []
        self._drawn: Size | None = None  # the size that the lines are for

    @property
    def image(self) -> Image | None:
        """Return the image."""
        return self._image

    @image.setter
    def image(self, image: Image | None) -> None:
        if image is not self._image:
            self._image = image
            self._redraw()

    def on_mount(self) -> None:
        self.app.theme_changed_signal.subscribe(self, lambda _: self._redraw())

    def _redraw(self) -> None:
        self._drawn = None
        self.refresh()

    def render_line(self, y: int) -> Strip:
        # Not when it is resized: Textual may give a new widget its size without that event.
        if self._drawn != self.size:
            self._drawn = self.size
            self._draw()
        style = self.visual_style.rich_style
        if y >= len(self._lines):
            return Strip.blank(self.size.width, style)
        return self._lines[y].adjust_cell_length(self.size.width, style)

    def _draw(self) -> None:
        width, height = self.size
        self._lines = []
        if self._image is not None and width and height:
            shown, lines = fitted(self._image.size, width, height)
            background = self.background_colors[1].rgb
            grid = Grid(1, 1, shown, lines * 2)
            gap, above = (width - shown) // 2, (height - lines) // 2
            style = self.visual_style.rich_style
            self._lines = [Strip.blank(width, style)] * above + [
                Strip([Segment(" " * gap, style), *line], gap + shown)
                for line in draw([self._image], grid, shown, background)
            ]


def fitted(size: tuple[int, int], width: int, height: int) -> tuple[int, int]:
    """Return the columns and lines that an image takes.

    Args:
        size: Width and height in pixels.
        width: Available columns.
        height: Available lines, of two pixels each.
    """
    share = min(width / size[0], height * 2 / size[1])
    columns, pixels = round(size[0] * share), round(size[1] * share)
    return max(1, min(width, columns)), max(1, min(height, round(pixels / 2)))


# -- image ----------------------------------------------------------------------------------


_CELL = (10, 20)  # pixels, if the terminal does not say


class Picture(Container):
    """Shows an image as large as it fits, by a protocol, or a text in its place."""

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
        self.inner.display = False  # not in compose, which may come after the first image
        self._blocks = blocks
        self._words = Static("", markup=False)
        self._shown_words = ""

    def compose(self) -> ComposeResult:
        yield self.inner
        yield self._words

    @property
    def image(self) -> Image | None:
        return self.inner.image  # type: ignore[no-any-return]

    def show(self, image: Image) -> None:
        """Show an image."""
        if image is not self.inner.image:
            self.inner.image = image
            self.fit()
        self.inner.display = True
        self.add_class("-shown")
        self.remove_class("-bad")

    def say(self, words: str, *, bad: bool = False) -> None:
        """Show a text in its place."""
        self.inner.display = False
        self.remove_class("-shown")
        self.set_class(bad, "-bad")
        if words != self._shown_words:
            self._shown_words = words
            self._words.update(words)

    def on_resize(self, event: Resize) -> None:
        self.fit()

    def fit(self) -> None:
        """Fit the image to the widget: the library's widgets would stretch it."""
        image, (width, height) = self.inner.image, self.size
        if self._blocks or image is None or not width or not height:
            return
        across, down = cell_size() or _CELL
        # Half blocks assume that lines are as high as two columns are wide.
        stretched = (image.width * 2 * down // across, image.height * 4)
        columns, lines = fitted((stretched[0], stretched[1]), width, height)
        self.inner.styles.width, self.inner.styles.height = columns, lines
