"""Puts a screen together from as few rendered lines as it needs.

Textual asks every widget on the screen for all of its lines whenever one cell changes, containers
below others too. A dashboard that stands open all day changes a few lines a second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from textual._compositor import Compositor
from textual.geometry import Region

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from textual.strip import Strip


class SparseCompositor(Compositor):
    """Asks only for lines that are painted, and not for what lies below others there."""

    def _render_chops(
        self, crop: Region, is_rendered_line: Callable[[int], bool]
    ) -> Sequence[Mapping[int, Strip]]:
        """Pieces of each line by their column; None where a line is not painted."""
        cuts = self.cuts
        pieces: list[dict[int, Strip | None]] = [dict.fromkeys(line[:-1]) for line in cuts]
        missing = {y: len(line) for y, line in enumerate(pieces) if is_rendered_line(y)}
        for widget, (region, clip) in self.visible_widgets.items():  # the topmost first
            shown = region.intersection(clip)
            lines = [y for y in shown.line_range if missing.get(y)]
            if not lines or not shown.width:
                continue
            first, height = lines[0], lines[-1] - lines[0] + 1
            strips = widget.render_lines(
                Region(shown.x - region.x, first - region.y, shown.width, height)
            )
            left, right = shown.column_span
            for y in lines:
                inside = [cut for cut in cuts[y] if left <= cut <= right]
                parts = strips[y - first].divide([cut - left for cut in inside[1:]])
                line = pieces[y]
                for cut, part in zip(inside, parts, strict=False):
                    if line[cut] is None:
                        line[cut] = part
                        missing[y] -= 1
        return cast("list[Mapping[int, Strip]]", pieces)  # as Textual calls it
