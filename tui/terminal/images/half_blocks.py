"""An image in half blocks: two pixels to a character, in any terminal with colours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.segment import Segment
from textual.strip import Strip
from textual.widget import Widget

from tui.terminal.images.strips import Grid, draw

if TYPE_CHECKING:
    from PIL.Image import Image
    from textual.events import Resize


class BlockPicture(Widget):
    """One image, as large as there is room for. Painted when it changes, and never else."""

    DEFAULT_CSS = "BlockPicture { width: 1fr; height: 1fr; }"

    def __init__(self) -> None:
        super().__init__()
        self._image: Image | None = None
        self._lines: list[Strip] = []

    @property
    def image(self) -> Image | None:
        """What is shown."""
        return self._image

    @image.setter
    def image(self, image: Image | None) -> None:
        if image is not self._image:
            self._image = image
            self._draw()

    def on_mount(self) -> None:
        self.app.theme_changed_signal.subscribe(self, lambda _: self._draw())

    def on_resize(self, event: Resize) -> None:
        self._draw()

    def render_line(self, y: int) -> Strip:
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
        self.refresh()


def fitted(size: tuple[int, int], width: int, height: int) -> tuple[int, int]:
    """Columns and lines that an image takes.

    Args:
        size: Its width and height in pixels.
        width: Columns there are.
        height: Lines there are, of two pixels each.
    """
    share = min(width / size[0], height * 2 / size[1])
    columns, pixels = round(size[0] * share), round(size[1] * share)
    return max(1, min(width, columns)), max(1, min(height, round(pixels / 2)))
