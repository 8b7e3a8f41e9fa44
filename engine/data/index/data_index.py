"""Index the datasets: every usable sample with its captions, size, bucket and content hash."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from engine.data.index.views import Reference, placed
from engine.data.read.class_images import cache_root, only_of_job
from engine.data.read.folders import Entry, pair, read_archives, read_folder
from engine.data.read.images import DECODER, PictureError, inspect_image
from engine.data.read.masks import mask_of, separate_masks
from engine.data.read.memo import Memo, stamp_of
from engine.data.read.tables import RowError, read_table, table_of
from engine.data.read.videos import VideoError, VideoFacts, frames_at, inspect_video
from jobs.errors import UserError
from jobs.run.rundir import read_json, write_atomic
from jobs.spec.families import (
    Family,
    get_family,
    needs_first_frame,
    noun_of_references,
    references_of,
    takes_control_videos,
)
from jobs.spec.keys.prompts import validation_seed_of
from jobs.spec.rules.buckets import Buckets
from jobs.spec.values.dataset_files import VIDEO_SUFFIXES
from jobs.spec.values.datasets import datasets_of, fallback_caption, find_layout
from jobs.untrusted.files import LARGEST_PICTURE, read_regular

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.spec.job_spec import DataPlanKeys, InputKeys, JobSpec
    from jobs.spec.keys.data import DataKeys
    from jobs.spec.values.datasets import Dataset


# -- validation samples ---------------------------------------------------------------------
# Choose the samples that are held out of training to measure the validation loss. Pure.
#
# The choice depends on the seed and on the content of the samples, not on their names, their order
# or the number of ranks. Copies of an image are held out together, since the loss on an image that
# was trained on would be meaningless.


def hold_out(index: DataIndex, spec: DataPlanKeys) -> tuple[DataIndex, list[Sample]]:
    """Split the data into training and held-out samples.

    Both keep the order of the index. At least one sample is held out, and at least one of each
    dataset is trained on. Regularization samples are never chosen, since the model should not learn
    them; copies of held-out samples among them are not trained on either.

    Raises:
        UserError: `validation_fraction` is set, but no sample can be spared.
    """
    if not spec.validation_fraction:
        return index, []
    datasets = datasets_of(spec)
    samples = [sample for sample in index.samples if not datasets[sample.dataset].regularization]
    least = max(1, round(spec.validation_fraction * len(samples)))
    contents: dict[str, list[Sample]] = {}
    for sample in samples:
        contents.setdefault(sample.digest, []).append(sample)
    left = Counter(sample.dataset for sample in samples)
    chosen: set[str] = set()
    held = 0
    for digest in sorted(contents, key=lambda digest: _draw(validation_seed_of(spec), digest)):
        if held >= least:
            break
        copies = Counter(sample.dataset for sample in contents[digest])
        if all(left[dataset] > count for dataset, count in copies.items()):
            chosen.add(digest)
            left -= copies
            held += copies.total()
    if not chosen:
        raise UserError(
            f"validation_fraction: {spec.validation_fraction:g} would hold out "
            + ("the only sample" if len(samples) == 1 else "all samples of a dataset"),
            "add samples, or set validation_fraction: 0",
        )
    trained = [sample for sample in index.samples if sample.digest not in chosen]
    return replace(index, samples=trained), [s for s in samples if s.digest in chosen]


def _draw(seed: int, digest: str) -> bytes:
    return hashlib.blake2b(f"{seed}:held out:{digest}".encode(), digest_size=8).digest()


# -- loss weights ---------------------------------------------------------------------------
# The weight of each sample's loss. Pure.
#
# A weight depends only on its sample, and the loss of a step is the mean of the weighted losses
# over the global batch. The result is therefore the same for any number of ranks and any
# micro-batch size.


def weight_of(sample: Sample, dataset: Dataset, spec: DataKeys) -> float:
    """Return the weight of a sample's loss.

    It is the product of the weights of the sample, its dataset, and its role.
    """
    prior = spec.prior_loss_weight if dataset.regularization else 1.0
    return sample.loss_weight * dataset.loss_weight * prior


def weights_of(samples: Sequence[Sample], spec: InputKeys) -> list[float]:
    """Return the weight of each sample."""
    datasets = datasets_of(spec)
    return [weight_of(sample, datasets[sample.dataset], spec) for sample in samples]


# -- data index -----------------------------------------------------------------------------


Progress = Callable[[int, int], None]  # arguments: done, total

# Reading, hashing and decoding release the GIL. Decoding an image may briefly take 0.7 GB.
READERS: Final = min(8, os.cpu_count() or 1)
_MEMO: Final = DECODER  # multiply by a new factor when the meaning of `_Facts` changes
_LONGEST_VIDEO: Final = 81  # frames, if the job sets no number


@dataclass(frozen=True)
class Sample:
    """An image or video to train on.

    Attributes:
        name: The sample's name in messages.
        path: Its file, or the directory of its table.
        row: Its row in the table.
        is_video: Whether its file is a video, which may still be reduced to a single frame.
        loss_weight: Its weight from a column of the dataset; see `weight_of`.
        mask: SHA-256 of the file that holds its mask; "" without a mask.
        mask_path: The mask's file; "" if the mask is the image's alpha channel.
        dataset: Index of its dataset.
        captions: As written, possibly of several lines each; empty when it has none.
        width: Pixels, as displayed.
        height: Pixels, as displayed.
        digest: SHA-256 of the file.
        bucket: `(width, height)` it is fitted to; for videos `(width, height, frames)`.
        notes: Conversions made while reading; keys of `engine.data.read.images.NOTES`.
        references: Its conditioning images.
        from_first: How often the model is conditioned on its first frame, 0 to 1.
        to_last: How often it is conditioned on its last frame too, where it is on the first.
    """

    name: str
    path: str
    dataset: int
    captions: tuple[str, ...]
    width: int
    height: int
    digest: str
    bucket: tuple[int, ...]
    notes: tuple[str, ...] = ()
    row: int | None = None
    is_video: bool = False
    loss_weight: float = 1.0
    mask: str = ""
    mask_path: str = ""
    references: tuple[Reference, ...] = ()
    from_first: float = 0.0
    to_last: float = 0.0

    @property
    def group(self) -> tuple[Any, ...]:
        """Return what the samples of a batch must share: bucket and conditioning shapes."""
        sizes = tuple((*r.size, r.role) if r.role else r.size for r in self.references)
        # Always and never are what they were before there were shares: what checkpoints remember
        # of their data (`engine.checkpoint.data_facts`) is made of this text.
        first = self.from_first if 0 < self.from_first < 1 else bool(self.from_first)
        last = (self.to_last,) if self.to_last else ()
        return (self.bucket, sizes, first, *last) if sizes or first else self.bucket


@dataclass(frozen=True)
class Skipped:
    """A file that is not trained on, and why."""

    dataset: int
    name: str
    why: str


@dataclass(frozen=True)
class DataIndex:
    """All samples in a fixed order, dataset by dataset, and the skipped files.

    Attributes:
        samples: The samples to train on.
        skipped: The files that cannot be used.
        others: Per dataset, the number of files of each kind that are not samples.
    """

    samples: list[Sample]
    skipped: list[Skipped] = field(default_factory=list)
    others: list[dict[str, int]] = field(default_factory=list)

    def by_bucket(self) -> dict[tuple[int, ...], list[Sample]]:
        """Return the samples by bucket, the fullest bucket first, for reports and strips."""
        members: dict[tuple[int, ...], list[Sample]] = {}
        for sample in self.samples:
            members.setdefault(sample.bucket, []).append(sample)
        return dict(sorted(members.items(), key=lambda item: (-len(item[1]), item[0])))

    def save(self, path: Path) -> None:
        write_atomic(path, json.dumps(asdict(self)) + "\n")

    @classmethod
    def load(cls, path: Path) -> DataIndex:
        data = read_json(path)
        if data is None:
            raise RuntimeError(f"{path} is missing or damaged")
        return cls(
            [_sample(**sample) for sample in data["samples"]],
            [Skipped(**fields) for fields in data["skipped"]],
            data["others"],
        )


def build_index(spec: JobSpec, progress: Progress = lambda done, total: None) -> DataIndex:
    """Read every file of every dataset once; use cached facts for files indexed before.

    Raises:
        UserError: A dataset has nothing usable, or cannot be read.
    """
    family = get_family(spec.model_family)
    samples: list[Sample] = []
    skipped: list[Skipped] = []
    others: list[dict[str, int]] = []
    for number, dataset in enumerate(datasets_of(spec)):
        fit = Fitting(spec, family, dataset)
        if not Path(dataset.path).is_dir():  # deleted since the job was queued
            raise UserError(f"no such dataset folder: {dataset.path}")
        layout = find_layout(Path(dataset.path))
        if layout == "folder":
            source = read_folder(dataset, videos=family.frame_step > 0)
        elif layout == "webdataset":
            source = read_archives(dataset, cache_root(spec), videos=family.frame_step > 0)
        else:
            source = read_table(dataset)
        noun = noun_of_references(spec, roles=dataset.roles)
        source = pair(source, dataset, noun)
        masks: dict[Path, Path] = {}
        if spec.masked_loss == "file":
            if layout in ("arrow", "parquet"):
                raise UserError(
                    f"{dataset.path} is a table, which has no mask files",
                    "use masked_loss: alpha, or a folder of images",
                )
            source, masks = separate_masks(source, dataset)
        if spec.num_class_images:
            source = only_of_job(source, dataset, spec)
        # These values determine which image an entry's name refers to.
        place = f"{dataset.path}:{dataset.split}:{dataset.image_column}"
        memo = Memo(cache_root(spec) / "index", place, _MEMO)
        before, total = len(samples) + len(skipped), len(source.entries)

        default = fallback_caption(spec, dataset)

        def read_entry(
            entry: Entry,
            dataset: Dataset = dataset,
            memo: Memo = memo,
            masks: dict[Path, Path] = masks,
            default: str | None = default,
            noun: str = noun,
        ) -> tuple[_Facts | str, tuple[str, str]]:
            none = ("", "")
            if entry.problem:
                return entry.problem, none
            if entry.captions is None and default is None and spec.missing_captions == "skip":
                return "no caption", none
            facts = _read_facts(entry, dataset, memo)
            if not isinstance(facts, str) and entry.references:
                facts = _add_reference_facts(facts, entry, dataset, memo, noun)
            if isinstance(facts, str) or spec.masked_loss == "none" or entry.is_video:
                return facts, none
            mask = mask_of(
                entry, (facts.width, facts.height), dataset, memo, spec, masks.get(entry.path)
            )
            return (mask, none) if isinstance(mask, str) else (facts, mask)

        usable = len(samples)
        with ThreadPoolExecutor(max_workers=READERS) as pool:
            for done, (facts, mask) in enumerate(pool.map(read_entry, source.entries), start=1):
                entry = source.entries[done - 1]
                if entry.captions is None and default is not None:
                    entry = replace(entry, captions=(default,))
                outcome = fit(entry, number, facts)
                if isinstance(outcome, str):
                    skipped.append(Skipped(number, entry.name, outcome))
                else:
                    samples += [
                        replace(sample, loss_weight=entry.weight, mask=mask[0], mask_path=mask[1])
                        for sample in outcome
                    ]
                progress(before + done, before + total)
                memo.save_sometimes()
        memo.save()
        others.append(dict(source.others))
        if len(samples) == usable:
            first = next((skip for skip in skipped if skip.dataset == number), None)
            video = first is not None and Path(first.name).suffix.lower() in VIDEO_SUFFIXES
            raise UserError(
                f"no usable {'video' if video else 'image'} in {dataset.path}",
                f"{first.name}: {first.why}" if first else "it is empty",
            )
    return DataIndex(samples, skipped, others)


def read_reference(reference: Reference, sample: Sample, spec: InputKeys) -> bytes:
    """Return the content of a sample's conditioning image.

    Raises:
        OSError: The file is missing or cannot be read.
    """
    return read_content(replace(sample, path=reference.path), spec, reference.column)


def read_content(sample: Sample, spec: InputKeys, column: str | None = None) -> bytes:
    """Read the sample's file, or another column of its row.

    Raises:
        OSError: The file is missing or cannot be read.
    """
    if sample.row is not None:
        try:
            return table_of(datasets_of(spec)[sample.dataset], column).content(sample.row)
        except RowError as error:  # the row had an image when it was indexed
            raise FileNotFoundError(str(error)) from None
    return read_regular(Path(sample.path), LARGEST_PICTURE)


@dataclass(frozen=True)
class _Facts:
    """The facts that indexing reads from a file."""

    width: int
    height: int
    digest: str
    notes: tuple[str, ...] = ()
    frames: int = 0
    fps: float = 0.0
    beside: tuple[_Facts, ...] = ()  # facts of its conditioning images


class Fitting:
    """Assigns a dataset's entries to buckets, or says why an entry fits none."""

    def __init__(self, spec: JobSpec, family: Family, dataset: Dataset) -> None:
        self._spec = spec
        self._family = family
        self._buckets = Buckets(spec, dataset)
        self._takes = references_of(spec)
        self._noun = noun_of_references(spec)
        self._roles = dataset.roles if takes_control_videos(spec) else ()
        self._only_first = needs_first_frame(spec)
        self._first_frame = 1.0 if self._only_first else float(dataset.first_frame)
        self._last_frame = float(dataset.last_frame)

    def __call__(self, entry: Entry, dataset: int, facts: _Facts | str) -> list[Sample] | str:
        """Return one sample per training resolution, or the reason why the entry is skipped."""
        if isinstance(facts, str):
            return facts
        if why := self._buckets.why_unfit(facts.width, facts.height):
            return why
        frames: tuple[int, ...] = ()
        if self._family.frame_step:
            length = self._frames(facts)
            if isinstance(length, str):
                return length
            frames = (length,)
            if self._only_first and length == 1:
                return "a single frame: the model is trained on videos from their first frame"
        sizes = self._buckets.find(facts.width, facts.height).values()
        beside = [self._references(entry, facts, size) for size in sizes]
        keeps = self._takes is not None and self._takes.layers  # what is transparent stays so
        for reference in itertools.chain(*beside):
            seen = reference.seen
            if self._takes and any(seen) and (why := self._takes.why_unfit(seen)):
                return f"its {self._noun} cannot be used: {why}"
            if keeps and not reference.aligned:
                return (
                    f"its layer {Path(reference.path).name} has another shape: {reference.width}x"
                    f"{reference.height} for an image of {facts.width}x{facts.height}"
                )
        moves = entry.is_video and frames > (1,)
        return [
            Sample(
                entry.name,
                str(entry.path),
                dataset,
                entry.captions or (),
                facts.width,
                facts.height,
                facts.digest,
                (*size, *frames),
                tuple(note for note in facts.notes if not (keeps and note == "transparent")),
                entry.row,
                entry.is_video,
                references=references,
                from_first=self._first_frame if moves else 0.0,
                to_last=self._last_frame if moves else 0.0,
            )
            for size, references in zip(sizes, beside, strict=True)
        ]

    def _references(
        self, entry: Entry, facts: _Facts, bucket: tuple[int, int]
    ) -> tuple[Reference, ...]:
        if self._takes is None:
            return ()
        if self._takes.masks and not entry.references:
            return (Reference("", None, *bucket, "", aligned=True, scaled=bucket, size=bucket),)
        side = self._spec.conditioning_resolution
        shape = (facts.width, facts.height)
        beside = [
            placed(
                place, (image.width, image.height, image.digest), shape, bucket, self._takes, side
            )
            for place, image in zip(entry.references, facts.beside, strict=True)
        ]
        for number, role in enumerate(self._roles[: len(beside)]):
            if role != "control":
                aligned = beside[number].aligned and role != "reference"  # which is shown whole
                beside[number] = replace(beside[number], role=role, aligned=aligned)
        return tuple(beside)

    def _frames(self, facts: _Facts) -> int | str:
        if not facts.frames:
            return 1  # an image is a video of one frame
        there = min(
            frames_at(
                VideoFacts(each.width, each.height, each.frames, each.fps, each.digest),
                self._spec.fps,
            )
            for each in (facts, *facts.beside)
            if each.frames
        )
        frames = self._spec.num_frames
        if there < (frames or 1):
            return f"too short: {there} frames at {self._spec.fps:g} per second, not {frames or 1}"
        longest = frames or min(there, _LONGEST_VIDEO)
        return self._family.frames_of(longest)


def _read_facts(entry: Entry, dataset: Dataset, memo: Memo) -> _Facts | str:
    """Read the facts about a file, or return why it cannot be used."""
    try:
        stamp = stamp_of(entry.path) if entry.row is None else table_of(dataset).stamp_of(entry.row)
        facts = memo.get(entry.name, stamp) if stamp else None
        if facts is None:
            facts = _inspect(entry, dataset)
            if not isinstance(facts, str):  # do not cache failures, which may be transient
                memo.put(entry.name, stamp, facts)
    except FileNotFoundError:
        return "a broken link" if entry.path.is_symlink() else "it is gone"
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    if isinstance(facts, str):
        return facts
    return _Facts(**{**facts, "notes": tuple(facts["notes"])})


def _add_reference_facts(
    facts: _Facts, entry: Entry, dataset: Dataset, memo: Memo, noun: str
) -> _Facts | str:
    """Add the facts of an entry's conditioning images, or return why one cannot be used."""
    beside = []
    for place, role in zip(entry.references, dataset.roles, strict=True):
        name = f"{entry.name}:{place.column}" if place.column else place.path
        column = dataset.model_copy(update={"image_column": place.column or dataset.image_column})
        named = Entry(name, Path(place.path), row=entry.row)
        image = _read_facts(named, column, memo)
        moves = entry.is_video and role != "reference"
        if named.is_video != moves and (named.is_video or role != "fill_mask"):
            image = "a video" if named.is_video else "an image, not a video"
        if isinstance(image, str):
            return f"its {noun} cannot be used: {Path(place.path).name}: {image}"
        beside.append(image)
    return replace(facts, beside=tuple(beside))


def _inspect(entry: Entry, dataset: Dataset) -> dict[str, Any] | str:
    """Return the facts about a file as JSON values for the memo, or why it cannot be used."""
    try:
        if entry.is_video:
            video = inspect_video(entry.path)
            return asdict(
                _Facts(video.width, video.height, video.digest, (), video.frames, video.fps)
            )
        if entry.row is None:
            content = read_regular(entry.path, LARGEST_PICTURE)
        else:
            content = table_of(dataset).content(entry.row)
        seen = inspect_image(content)
        return asdict(_Facts(seen.width, seen.height, seen.digest, seen.notes))
    except (PictureError, VideoError, RowError) as error:
        return str(error)


def _sample(**values: Any) -> Sample:
    for name in ("captions", "bucket", "notes"):
        values[name] = tuple(values[name])
    pairs = ("scaled", "size", "seen")
    values["references"] = tuple(
        Reference(**fields | {name: tuple(fields[name]) for name in pairs if name in fields})
        for fields in values.get("references", ())
    )
    return Sample(**values)
