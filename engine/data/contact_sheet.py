"""Contact sheets: some samples of each bucket, cropped the way training crops them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

from PIL import Image, ImageDraw

from engine.data.index.data_index import read_content
from engine.data.index.views import count_views, fit, view_of
from engine.data.read.images import PictureError, decode
from jobs.spec.data_tool import STRIP_GAP

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.data.index.data_index import DataIndex, Sample
    from jobs.spec.job_spec import InputKeys


PER_BUCKET: Final = 8
_READERS: Final = 4  # threads
_SIDE: Final = 128  # pixels of a thumbnail's longer side
_LINE: Final = 18  # pixels of a heading
_BACK: Final = (24, 26, 30)
_INK: Final = (225, 225, 225)


def strips(index: DataIndex, spec: InputKeys) -> dict[tuple[int, ...], Image.Image]:
    """Return a row of sample thumbnails per bucket, keyed by bucket, the fullest bucket first."""
    return {bucket: _strip(_spread(own), spec) for bucket, own in index.by_bucket().items()}


def sheet(index: DataIndex, spec: InputKeys) -> Image.Image:
    """Stack the strips of all buckets, each under its bucket's size and number of samples."""
    rows = strips(index, spec)
    members = index.by_bucket()
    width = max(strip.width for strip in rows.values())
    height = sum(strip.height + _LINE for strip in rows.values()) + STRIP_GAP
    page = Image.new("RGB", (width, height), _BACK)
    pen = ImageDraw.Draw(page)
    top = 0
    for bucket, strip in rows.items():
        size = "x".join(map(str, bucket))
        pen.text((STRIP_GAP, top + 4), f"{size}   {len(members[bucket])} samples", fill=_INK)
        page.paste(strip, (0, top + _LINE))
        top += strip.height + _LINE
    return page


def save_strips(index: DataIndex, spec: InputKeys, directory: Path) -> list[str]:
    """Write one PNG per bucket and return the file names, the fullest bucket first."""
    directory.mkdir(parents=True, exist_ok=True)
    names = []
    for bucket, strip in strips(index, spec).items():
        names.append(f"{'x'.join(map(str, bucket))}.png")
        strip.save(directory / names[-1])
    return names


def _spread(samples: Sequence[Sample]) -> list[Sample]:
    """Pick samples evenly from the list."""
    count = min(PER_BUCKET, len(samples))
    return [samples[number * len(samples) // count] for number in range(count)]


def _strip(samples: Sequence[Sample], spec: InputKeys) -> Image.Image:
    with ThreadPoolExecutor(_READERS) as pool:  # decoding releases the GIL
        pictures = list(
            pool.map(lambda pair: _thumbnail(pair[1], pair[0], spec), enumerate(samples))
        )
    height = max(picture.height for picture in pictures)
    width = sum(picture.width + STRIP_GAP for picture in pictures) + STRIP_GAP
    row = Image.new("RGB", (width, height + STRIP_GAP), _BACK)
    left = STRIP_GAP
    for picture in pictures:
        row.paste(picture, (left, 0))
        left += picture.width + STRIP_GAP
    return row


def _thumbnail(sample: Sample, number: int, spec: InputKeys) -> Image.Image:
    """Draw a thumbnail of a sample, cropped the way training crops it."""
    view = view_of(sample, number % count_views(spec), spec)
    factor = _SIDE / max(view.size)
    small = (max(1, round(view.size[0] * factor)), max(1, round(view.size[1] * factor)))
    try:
        if sample.is_video:
            from engine.data.read.videos import VideoError, read_frames

            try:
                frames = read_frames(Path(sample.path), fps=spec.fps, frames=1)
            except VideoError:
                return Image.new("RGB", small, (90, 30, 30))
            picture = Image.fromarray(frames[0])
        else:
            picture = decode(read_content(sample, spec))
    except (OSError, PictureError):  # the file changed after it was indexed
        return Image.new("RGB", small, (90, 30, 30))
    return fit(picture, view).resize(small, Image.Resampling.LANCZOS)
