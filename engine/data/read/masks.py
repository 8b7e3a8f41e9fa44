"""Find and read the masks of images.

White areas are trained, black areas are not. A mask is a separate file with the image's name plus
`-mask` or `_mask`, or in a folder of masks, or it is the image's alpha channel.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from PIL import Image

from engine.data.read.folders import Source
from engine.data.read.images import PictureError, decode, decode_opacity
from engine.data.read.memo import stamp_of
from engine.data.read.tables import RowError, table_of
from jobs.errors import UserError
from jobs.paths import expand
from jobs.spec.values.dataset_files import list_files, masked_stem, same_name
from jobs.untrusted.files import LARGEST_PICTURE, read_regular

if TYPE_CHECKING:
    from collections.abc import Collection

    from engine.data.read.folders import Entry
    from engine.data.read.memo import Memo
    from jobs.spec.keys.data import DataKeys
    from jobs.spec.values.datasets import Dataset

_ASPECT_TOLERANCE: Final = 0.02  # relative difference of aspect ratios that rounding may cause


def separate_masks(source: Source, dataset: Dataset) -> tuple[Source, dict[Path, Path]]:
    """Separate the masks in a folder from its images.

    Returns:
        The source without masks, and the mask of each image by the image's path.

    Raises:
        UserError: The folder of masks does not exist.
    """
    entries = source.entries
    stems = {_stem(entry.path) for entry in entries}
    masks = {
        _stem(entry.path, stem): entry.path
        for entry in entries
        if entry.row is None and (stem := masked_stem(entry.path.stem))
        if _stem(entry.path, stem) in stems
    }
    apart = set(masks.values())
    if dataset.mask_path:
        folder = expand(dataset.mask_path)
        apart |= {entry.path for entry in entries if folder in entry.path.parents}
        masks |= _of_folder(folder, Path(dataset.path))
    images = [entry for entry in entries if entry.path not in apart]
    mask_of_image = {
        image.path: masks[stem] for image in images if (stem := _stem(image.path)) in masks
    }
    return Source(images, source.others), mask_of_image


def _of_folder(folder: Path, images: Path) -> dict[str, Path]:
    """Return the masks in a folder, by the stems of their images below another folder."""
    if not folder.is_dir():
        raise UserError(f"no such folder of masks: {folder}")
    masks = {}
    for path in list_files(folder).pictures:
        for stem in filter(None, (path.stem, masked_stem(path.stem))):
            masks[_stem(images / path.relative_to(folder), stem)] = path
    return masks


def _stem(path: Path, stem: str = "") -> str:
    return same_name(os.path.normpath(path.with_name(stem or path.stem)))


def names_mask(name: str, stems: Collection[str]) -> bool:
    """Return whether a name is that of another file's mask.

    Args:
        name: A path.
        stems: All paths without their suffixes.
    """
    stem, _ = os.path.splitext(name)
    return masked_stem(stem) in stems


def read_mask(content: bytes, *, alpha: bool) -> Image.Image | None:
    """Return a mask in 8-bit gray, as displayed; None if `alpha` and the image is opaque.

    Transparent areas of a mask file count as black.

    Raises:
        PictureError: The file cannot be read.
    """
    opacity = decode_opacity(content)
    if alpha:
        return opacity
    mask = decode(content).convert("L")
    if opacity is None:
        return mask
    return Image.composite(mask, Image.new("L", mask.size), opacity)


def inspect_mask(content: bytes, digest: str, *, alpha: bool) -> dict[str, Any] | str:
    """Return a mask's size, digest and whether it is all black, as JSON values; or the problem."""
    try:
        mask = read_mask(content, alpha=alpha)
    except PictureError as error:
        return f"mask: {error}"
    if mask is None:
        return {"width": 0, "height": 0, "digest": "", "empty": False}
    return {
        "width": mask.width,
        "height": mask.height,
        "digest": digest,
        "empty": mask.getbbox() is None,
    }


def why_mask_unfit(facts: dict[str, Any], width: int, height: int, *, empty_counts: bool) -> str:
    """Return why an image cannot be trained with its mask; "" if it can.

    Args:
        facts: From `inspect_mask`.
        width: Width of the image, as displayed.
        height: Height of the image, as displayed.
        empty_counts: Whether black areas have a weight, so that an all-black mask is usable.
    """
    if not facts["digest"]:
        return ""
    if facts["empty"] and not empty_counts:
        return "its mask is all black"
    shapes = facts["width"] * height, width * facts["height"]
    if abs(shapes[0] - shapes[1]) > _ASPECT_TOLERANCE * max(shapes):
        return (
            f"its mask has another shape: {facts['width']}x{facts['height']} for an image of "
            f"{width}x{height}"
        )
    return ""


def mask_of(
    entry: Entry,
    size: tuple[int, int],
    dataset: Dataset,
    memo: Memo,
    spec: DataKeys,
    file: Path | None,
) -> tuple[str, str] | str:
    """Return the digest and file of an entry's mask, both "" if there is none; or why it is unfit.

    Args:
        entry: An image.
        size: Its width and height.
        dataset: The dataset that contains it.
        memo: Facts cached by earlier runs.
        spec: The job.
        file: The mask's file, if it has one.
    """
    alpha = spec.masked_loss == "alpha"
    if not alpha and file is None:
        return "", ""
    name, path = f"{entry.name} mask", entry.path if alpha or file is None else file
    try:
        row = entry.row
        stamp = stamp_of(path) if row is None else table_of(dataset).stamp_of(row)
        stamp += f":{spec.masked_loss}:{os.fspath(path)}" if stamp else ""
        facts = memo.get(name, stamp) if stamp else None
        if facts is None:
            if row is None:
                content = read_regular(path, LARGEST_PICTURE)
            else:
                content = table_of(dataset).content(row)
            facts = inspect_mask(content, hashlib.sha256(content).hexdigest(), alpha=alpha)
            if isinstance(facts, str):
                return facts
            memo.put(name, stamp, facts)
    except (OSError, RowError) as error:
        return f"mask: cannot be read ({getattr(error, 'strerror', None) or error})"
    counts = spec.unmasked_weight > 0
    if why := why_mask_unfit(facts, *size, empty_counts=counts):
        return why
    return facts["digest"], "" if alpha or not facts["digest"] else str(path)
