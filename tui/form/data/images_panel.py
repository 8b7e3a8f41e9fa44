"""Some images of a bucket, as they are trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from textual.strip import Strip
from textual.widget import Widget

from tui.terminal.images.strips import draw, find_grid, pictures_of
from tui.text.data_text import bucket_name, some

if TYPE_CHECKING:
    from collections.abc import Mapping

    from PIL.Image import Image
    from textual.events import Resize
    from textual.timer import Timer

_DRAW_AFTER: Final = 0.12  # seconds; who runs through the buckets does not wait for each of them


class PicturesPanel(Widget):
    """Images in half blocks, drawn only when another bucket or page is shown."""

    def __init__(self) -> None:
        super().__init__(id="pictures")
        self.pictures: list[Image] = []
        self.first = 0  # of those on the screen
        self._room = 0  # how many find room on the screen
        self._lines: list[Strip] = []
        self._title = ""
        self._due: Timer | None = None

    def on_mount(self) -> None:
        self.app.theme_changed_signal.subscribe(self, lambda _: self._draw_soon())

    def show(self, bucket: Mapping[str, Any], strip: bytes) -> None:
        """Show images of a bucket, unless another bucket is shown within a moment."""
        width, height = bucket["size"][:2]
        self.pictures, self.first = pictures_of(strip, width / height), 0
        shown, there = len(self.pictures), bucket["samples"]
        which = f"{shown} of {there} samples" if shown < there else some(there, "sample")
        self._title = f"{bucket_name(bucket)} · {which}, cropped as for training"
        self._draw_soon()

    def turn(self, by: int) -> None:
        """Show the next images, or the previous ones."""
        first = self.first + by * max(1, self._room)
        if 0 <= first < len(self.pictures):
            self.first = first
            self._draw_soon()

    def on_resize(self, event: Resize) -> None:
        self._draw_soon()

    def render_line(self, y: int) -> Strip:
        style = self.visual_style.rich_style
        if y >= len(self._lines):
            return Strip.blank(self.size.width, style)
        return self._lines[y].adjust_cell_length(self.size.width, style)

    def _draw_soon(self) -> None:
        if self._due is not None:
            self._due.stop()
        self._due = self.set_timer(_DRAW_AFTER, self._draw)

    def _draw(self) -> None:
        width, height = self.size
        if not self.pictures or not width or not height:
            return
        aspect = self.pictures[0].width / self.pictures[0].height
        grid = find_grid(len(self.pictures), aspect, width, height)
        self._room = grid.room if grid else 0
        # A page begins where an earlier one ended, whatever the size of the screen was then.
        self.first -= self.first % max(1, self._room)
        page = self.pictures[self.first : self.first + self._room]
        background = self.background_colors[1].rgb
        lines = draw(page, grid, width, background) if grid else []
        self._lines = [Strip(line, width) for line in lines]
        self.border_title = self._title
        more = len(page) < len(self.pictures)
        last = self.first + len(page)
        self.border_subtitle = (
            f"← {self.first + 1}–{last} of {len(self.pictures)} →" if more else ""
        )
        self.refresh()
