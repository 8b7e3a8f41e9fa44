"""Which files of a dataset folder are pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

PICTURE_SUFFIXES: Final = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp"})


def list_pictures(root: Path) -> list[Path]:
    """Picture files below a folder, in a fixed order; hidden files are passed over."""
    return sorted(
        path
        for path in root.rglob("*")
        if path.suffix.lower() in PICTURE_SUFFIXES
        and not any(part.startswith(".") for part in path.relative_to(root).parts)
        and path.is_file()
    )
