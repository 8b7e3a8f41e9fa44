"""The widgets of textual-image, without the questions that it asks when it is imported."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Any

from tui.terminal.images.protocol import cell_size

if TYPE_CHECKING:
    from tui.terminal.images.protocol import Protocol


def picture_class(protocol: Protocol) -> Any:
    """Return the widget class of a protocol; it has an `image` to set.

    Importing textual-image 0.12 asks the terminal what it can do and waits a tenth of a second for
    each answer: too short for many links, whose answers Textual would then take for keys. It asks
    nobody where standard output is no terminal, which is what it is shown while it is imported.
    """
    shown, sys.__stdout__ = sys.__stdout__, io.StringIO()  # type: ignore[misc,assignment]
    try:
        from textual_image import _terminal
        from textual_image.widget import SixelImage, TGPImage
    finally:
        sys.__stdout__ = shown  # type: ignore[misc]
    if (cell := cell_size()) is not None:  # else it reckons with 10 by 20 pixels
        _terminal.get_cell_size._result = _terminal.CellSize(*cell)  # type: ignore[attr-defined]
    return TGPImage if protocol == "kitty" else SixelImage
