"""Whether two directories hold the same model, as far as names and sizes tell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from jobs.errors import SpecError
from jobs.models.find_model import find_model
from jobs.run.rundir import read_json

if TYPE_CHECKING:
    from pathlib import Path

_DENOISERS: Final = ("transformer", "unet")


def place_of(model: str) -> Path | None:
    """The directory of a model, or None when it is not on this machine."""
    try:
        return find_model(model).resolve() if model else None
    except (SpecError, OSError, ValueError):
        return None


def looks_same(first: Path, other: Path) -> bool:
    """Whether both have the same pipeline, and a denoiser of the same configuration and files.

    A copy on a faster disk does. A model that was trained on has files of other sizes only where
    its precision changed, so this is no proof: callers say what they take for granted.
    """
    if read_json(first / "model_index.json") != read_json(other / "model_index.json"):
        return False
    parts = [part for part in _DENOISERS if (first / part).is_dir() or (other / part).is_dir()]
    return bool(parts) and all(
        read_json(first / part / "config.json") == read_json(other / part / "config.json")
        and _files(first / part) == _files(other / part)
        for part in parts
    )


def _files(directory: Path) -> dict[str, int]:
    """Name → bytes of the weight files."""
    try:
        return {path.name: path.stat().st_size for path in directory.glob("*.safetensors")}
    except OSError:
        return {}
