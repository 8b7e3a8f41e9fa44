"""List the samples of a run: images and videos made from its prompts during training."""

from __future__ import annotations

import os
import re
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from jobs.run.rundir import read_json

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.run.rundir import RunDir

_STEP: Final = re.compile(r"step-(\d+)")
_PICTURE: Final = re.compile(r"(\d+)\.png")
_LAYER: Final = re.compile(r"(\d+)-(\d+)\.png")
_SETTLED: Final = 2.0  # seconds after which a directory's mtime reflects every change


@dataclass(frozen=True)
class Sample:
    """An image, or the middle frame of a video.

    Attributes:
        number: Index of the job's prompt.
        step: Optimizer steps trained before.
        picture: The PNG file.
        video: The MP4 file; None for images.
        layers: The PNG files of its layers, the one at the back first; none of most models.
        bytes: Size of the image.
        time: When the image was written, in Unix seconds.
        facts: What it was made from (`prompt`, `seed`, `size`, `steps`, …); empty until that is
            written, or if it cannot be read.
    """

    number: int
    step: int
    picture: Path
    video: Path | None = None
    layers: tuple[Path, ...] = ()
    bytes: int = 0
    time: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def prompt(self) -> str:
        """Return the sampled prompt; "" if unknown."""
        return str(self.facts.get("prompt", ""))

    @property
    def size(self) -> tuple[int, int] | None:
        """Return width and height in pixels; None if unknown."""
        match self.facts.get("size"):
            case [int() as width, int() as height]:
                return width, height
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return the sample as JSON values, for scripts."""
        video = str(self.video) if self.video is not None else None
        files = {"picture": str(self.picture), "video": video, "layers": [*map(str, self.layers)]}
        return asdict(self) | files


class Samples:
    """List the samples of a run repeatedly, rereading only directories that have changed.

    Args:
        run_dir: The run.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self._root = run_dir.samples
        self._seen: dict[str, tuple[int, list[Sample]]] = {}  # directory → (its mtime, its samples)
        self._samples: tuple[Sample, ...] = ()

    def look(self) -> tuple[Sample, ...]:
        """Return all samples by step and prompt; the same tuple if nothing has changed."""
        directories = _entries(self._root)
        self._seen = {k: v for k, v in self._seen.items() if k in {d.name for d in directories}}
        for directory in directories:
            if match := _STEP.fullmatch(directory.name):
                self._look_at(directory, int(match[1]))
        ordered = tuple(
            sorted(
                (sample for _, samples in self._seen.values() for sample in samples),
                key=lambda sample: (sample.step, sample.number),
            )
        )
        if ordered != self._samples:
            self._samples = ordered
        return self._samples

    def _look_at(self, directory: os.DirEntry[str], step: int) -> None:
        try:
            changed = os.stat(directory.path).st_mtime_ns
        except OSError:  # removed in the meantime
            return
        seen = self._seen.get(directory.name)
        # Further changes right afterwards may not alter the mtime: file system clocks are coarse.
        settled = time.time() - changed / 1e9 > _SETTLED
        if seen is None or seen[0] != changed or not settled:
            samples = _samples_in(self._root / directory.name, step)
            self._seen[directory.name] = (changed, samples)


def list_samples(run_dir: RunDir) -> tuple[Sample, ...]:
    """Return all samples of a run, by step and prompt."""
    return Samples(run_dir).look()


def _samples_in(directory: Path, step: int) -> list[Sample]:
    samples, entries = [], _entries(directory)
    layers: dict[int, dict[int, Path]] = {}
    for entry in entries:
        if match := _LAYER.fullmatch(entry.name):
            layers.setdefault(int(match[1]), {})[int(match[2])] = directory / entry.name
    for entry in entries:
        match = _PICTURE.fullmatch(entry.name)
        if match is None:
            continue
        path = directory / entry.name
        video = path.with_suffix(".mp4")
        try:
            stat = entry.stat()
        except OSError:  # removed in the meantime
            continue
        samples.append(
            Sample(
                number=int(match[1]),
                step=step,
                picture=path,
                video=video if video.exists() else None,
                layers=tuple(path for _, path in sorted(layers.get(int(match[1]), {}).items())),
                bytes=stat.st_size,
                time=stat.st_mtime,
                facts=read_json(path.with_suffix(".json")) or {},
            )
        )
    return samples


def _entries(path: Path) -> list[os.DirEntry[str]]:
    """List a directory; empty if it is missing or unreadable."""
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except OSError:
        return []
