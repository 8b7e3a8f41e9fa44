"""Report on a job's data before it is trained on."""

from __future__ import annotations

import math
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from engine.data.index.batch_plan import BatchPlan, shares_of
from engine.data.index.captions import texts_of, with_class
from engine.data.index.data_index import READERS, hold_out, weights_of
from engine.data.index.views import count_views, cut_share
from engine.data.read.class_images import has_class_images
from engine.data.read.images import NOTES
from engine.data.read.masks import names_mask
from engine.data.read.videos import has_sound
from jobs.errors import UserError
from jobs.paths import expand
from jobs.spec.families import get_family, noun_of_references, takes_control_videos
from jobs.spec.rules.buckets import Buckets, bucket_step, enlargement
from jobs.spec.rules.steps import global_batch_size, preserves, total_steps, trains_to_base
from jobs.spec.values.datasets import datasets_of, find_layout
from jobs.spec.values.resolutions import all_resolutions
from jobs.units import named_counts

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from engine.data.index.data_index import DataIndex, Sample
    from jobs.spec.job_spec import InputKeys, JobSpec
    from jobs.spec.keys.job import JobKeys
    from jobs.spec.keys.training import TrainingKeys


# -- caption lengths ------------------------------------------------------------------------
# Count the tokens of captions without loading a model.


def count_tokens(texts: Sequence[str], spec: JobKeys, model_root: Path) -> list[int] | None:
    """Count each text's tokens, including special ones, as the main text encoder gets them.

    Returns:
        The counts, or None if the model has no readable tokenizer.
    """
    directory = model_root / get_family(spec.model_family).tokenizer
    tokenizer = _fast(directory) or _slow(directory)
    if tokenizer is None:
        return None
    return [tokenizer(text) for text in texts]


def _fast(directory: Path) -> Any:
    """Load `tokenizer.json`, which takes milliseconds; transformers takes seconds."""
    from tokenizers import Tokenizer

    file = directory / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception:  # the library raises plain Exceptions
        return None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda text: len(tokenizer.encode(text).ids)


def _slow(directory: Path) -> Any:
    """Load the tokenizer of an older model from its vocabulary files."""
    if not directory.is_dir():
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception:  # its readers raise many exceptions; tokens are then not counted
        return None
    return lambda text: len(tokenizer(text, truncation=False).input_ids)


# -- data report ----------------------------------------------------------------------------
# Summarize an index and its batch plan, with warnings about likely mistakes.


_EXAMPLES: Final = 8
_FRAMES: Final = 4  # of a latent of Wan
_OFTEN: Final = 1.5  # draws relative to the average sample that deserve a warning


@dataclass(frozen=True)
class Finding:
    """A remark that applies to some of the samples.

    Attributes:
        count: Number of samples.
        text: The remark.
        examples: Names of some of them.
    """

    count: int
    text: str
    examples: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Reason(Finding):
    """The reason why some samples are skipped.

    Attributes:
        files: `[dataset, name, detail]` each; the detail may be "".
    """

    files: list[list[Any]] = field(default_factory=list)


@dataclass(frozen=True)
class BucketReport:
    """A bucket.

    Attributes:
        size: `[width, height]`, for videos `[width, height, frames]`.
        samples: Number of samples in it.
        draws: Mean number of draws per epoch from it.
        cut_mean: Mean fraction of a sample's area that is cropped away.
        cut_most: The largest such fraction.
    """

    size: list[int]
    samples: int
    draws: float
    cut_mean: float
    cut_most: float


@dataclass(frozen=True)
class DatasetReport:
    """A dataset's location, samples, draws per epoch, and whether it is regularization."""

    path: str
    layout: str
    samples: int
    skipped: int
    draws: float
    others: dict[str, int]
    regularization: bool


@dataclass(frozen=True)
class DataReport:
    """The report; every field is a JSON value.

    Attributes:
        samples: Number of samples to train on; an image counts once per resolution.
        images: Number of images (or videos) that they show.
        held_out: Number of samples held out for the validation loss.
        skipped: Files that are not trained on: `[dataset, name, why]` each.
        reasons: Why files are skipped, the most frequent reason first.
        handled: Conversions made while reading images.
        cautions: Samples that are trained on, but perhaps not as intended.
        datasets: One report per dataset.
        buckets: One report per bucket, the fullest first.
        bucket_steps: Step between bucket sides in pixels, per resolution.
        texts: Number of distinct texts to encode, not counting prompts.
        masked: Number of images that are trained with a mask.
        sound: With `train_audio`, the number of videos that have sound, and of all; else empty.
        references: What lies beside each sample, such as "layer", and the smallest and the largest
            number of them; empty if nothing does.
        weights: The smallest and largest loss weight of a sample; empty if all are 1.
        class_images: Number of class images still to be generated, which are not counted here.
        views: Number of views of each image (crops, flips).
        longest: Tokens of the longest caption; None if they were not counted.
        global_batch: Samples per optimizer step.
        steps_per_epoch: Optimizer steps per epoch; rarely a whole number.
        draws_per_epoch: Samples drawn per epoch.
        most_drawn: Draws of the most drawn sample, relative to the average sample.
        epochs: Number of epochs that the job trains.
        total_steps: Number of optimizer steps that the job trains.
    """

    samples: int
    images: int
    held_out: int
    skipped: list[list[Any]]
    reasons: list[Reason]
    handled: list[Finding]
    cautions: list[Finding]
    datasets: list[DatasetReport]
    buckets: list[BucketReport]
    bucket_steps: list[int]
    texts: int
    masked: int
    sound: list[int]
    references: list[Any]
    weights: list[float]
    class_images: int
    views: int
    longest: int | None
    global_batch: int
    steps_per_epoch: float
    draws_per_epoch: float
    most_drawn: float
    epochs: float
    total_steps: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def make_plan(spec: JobSpec, index: DataIndex) -> BatchPlan:
    """Plan the batches of the job; the result is the same on every rank."""
    datasets, to_base = datasets_of(spec), datasets_to_base(spec)
    members = Counter(sample.dataset for sample in index.samples)
    shares = shares_of(datasets, [members[number] for number in range(len(datasets))])
    return BatchPlan(
        [PlanBucket(sample.group, sample.dataset in to_base) for sample in index.samples],
        global_batch_size(spec),
        spec.seed,
        shares,
        micro_batch=spec.train_batch_size,
        images=[(sample.dataset, sample.name) for sample in index.samples],
        cost=lambda bucket: _pixels(bucket.group),
        first=lambda bucket: bucket.to_base,
    )


class PlanBucket(NamedTuple):
    """What samples of a micro-batch share.

    Attributes:
        group: Their shapes, see `Sample.group`.
        to_base: Whether the base's own prediction is their target.
    """

    group: Any
    to_base: bool


def datasets_to_base(spec: JobSpec) -> set[int]:
    """Return the numbers of the datasets whose samples' target is the base's own prediction."""
    if not trains_to_base(spec):
        return set()
    return {number for number, dataset in enumerate(datasets_of(spec)) if dataset.regularization}


def _pixels(group: Any) -> int:
    """Return the number of pixels of a group's sample, including its conditioning images."""
    bucket, references = (group, ()) if isinstance(group[0], int) else group[:2]
    # A reference image beside a control video is a latent of its own, as several frames are.
    beside = (math.prod(size[:2]) * (_FRAMES if "reference" in size else 1) for size in references)
    return math.prod(bucket) + sum(beside)


def sample_texts(sample: Sample, spec: InputKeys) -> tuple[str, ...]:
    """Return the texts of a sample, which training cycles through."""
    return texts_of(sample.captions, spec, _trigger(sample, spec))


def preserved_texts(
    samples: Sequence[Sample], captions: Sequence[tuple[str, ...]], spec: JobSpec
) -> list[tuple[str, ...]]:
    """Return each sample's texts with the class for the trigger word; () without `preservation`.

    Args:
        samples: The samples to train on.
        captions: Per sample, its texts.
        spec: The job.
    """
    if not preserves(spec):
        return []
    triggers = [_trigger(sample, spec) for sample in samples]
    name = spec.preservation_class or ""
    return [
        tuple(with_class(text, trigger, name) for text in own)
        for own, trigger in zip(captions, triggers, strict=True)
    ]


def _trigger(sample: Sample, spec: InputKeys) -> str | None:
    """Return the trigger word of a sample's captions, if they have one."""
    dataset = datasets_of(spec)[sample.dataset]
    # It names the learned subject, which regularization samples do not show.
    return dataset.trigger_word or (None if dataset.regularization else spec.trigger_word)


def make_report(spec: JobSpec, index: DataIndex, model_root: Path | None) -> DataReport:
    """Report on an index.

    Args:
        spec: The job.
        index: Its data, including the samples to be held out.
        model_root: Model directory with the tokenizers; None skips counting tokens.

    Raises:
        UserError: `validation_fraction` is set, but no sample can be spared.
    """
    index, held = hold_out(index, spec)
    plan = make_plan(spec, index)
    steps = total_steps(spec, plan.draws_per_epoch) or 0
    texts = [sample_texts(sample, spec) for sample in index.samples]
    distinct = list(dict.fromkeys(text for own in texts for text in own))
    counts = count_tokens(distinct, spec, model_root) if model_root is not None else None
    tokens = dict(zip(distinct, counts, strict=True)) if counts is not None else {}
    weights = weights_of(index.samples, spec)
    sound = _count_sound(index) if spec.train_audio else []
    if sound and sound[1] and not sound[0]:
        raise UserError(
            f"train_audio: none of the {sound[1]} videos has sound",
            "set train_audio: false, or add videos with sound",
        )
    return DataReport(
        samples=len(index.samples),
        images=len(_images(index.samples)),
        held_out=len(held),
        skipped=[[skip.dataset, skip.name, skip.why] for skip in index.skipped],
        reasons=reasons_of(index),
        handled=_handled(index),
        cautions=[*_drawn_often(spec, plan), *_cautions(spec, index, texts, tokens)],
        datasets=_datasets(spec, index, plan),
        buckets=_buckets(spec, index, plan),
        bucket_steps=sorted({bucket_step(side, spec) for side in all_resolutions(spec)}),
        texts=len(distinct),
        masked=sum(bool(image.mask) for image in _images(index.samples)),
        sound=sound,
        references=_references(spec, index),
        weights=[min(weights), max(weights)] if any(weight != 1 for weight in weights) else [],
        class_images=0 if has_class_images(spec) else spec.num_class_images,
        views=count_views(spec),
        longest=max(tokens.values()) if tokens else None,
        global_batch=plan.global_batch,
        steps_per_epoch=round(plan.steps_per_epoch, 3),
        draws_per_epoch=round(plan.draws_per_epoch, 3),
        most_drawn=round(max(_relative_draws(plan)), 3),
        epochs=round(plan.epoch(steps), 3),
        total_steps=steps,
    )


def summary(report: DataReport) -> list[str]:
    """Return the report as a few log lines."""
    held = f" and {report.held_out} held out" if report.held_out else ""
    shown = f" of {_plural(report.images, 'image')}" if report.images != report.samples else ""
    lines = [
        f"{_plural(report.samples, 'sample')}{shown}{held} in "
        f"{_plural(len(report.buckets), 'bucket')}, {_plural(report.texts, 'caption')}; "
        f"{report.steps_per_epoch:g} steps of {report.global_batch} per epoch, "
        f"{report.epochs:g} epochs"
    ]
    if report.masked:
        lines.append(f"{_plural(report.masked, 'image')} with a mask")
    if report.sound:
        lines.append("{} of {} videos with sound".format(*report.sound))
    if report.weights:
        least, most = report.weights
        lines.append(f"weights of the loss from {least:g} to {most:g}")
    if len(report.datasets) > 1:
        for dataset in report.datasets:
            kind = "regularization" if dataset.regularization else "dataset"
            count = _plural(dataset.samples, "sample")
            share = dataset.draws / report.draws_per_epoch
            lines.append(
                f"{kind} {dataset.path}: {count}, {dataset.draws:g} draws per epoch ({share:.1%})"
            )
    for bucket in report.buckets:
        size = "x".join(map(str, bucket.size))
        lines.append(
            f"bucket {size}: {bucket.samples} samples, {bucket.draws:g} draws per epoch, "
            f"{bucket.cut_mean:.0%} cropped on average, {bucket.cut_most:.0%} max"
        )
    for kind, findings in (("skipped", report.reasons), ("read", report.handled)):
        lines += [f"{kind}: {_describe(finding)}" for finding in findings]
    return lines + [f"note: {_describe(caution)}" for caution in report.cautions]


def _count_sound(index: DataIndex) -> list[int]:
    """Return how many videos have sound, and how many there are; reads only their headers."""
    paths = [Path(image.path) for image in _images(index.samples) if image.is_video]
    with ThreadPoolExecutor(READERS) as pool:
        return [sum(pool.map(has_sound, paths)), len(paths)]


def _references(spec: JobSpec, index: DataIndex) -> list[Any]:
    counts = {len(sample.references) for sample in index.samples}
    return [noun_beside(spec), min(counts), max(counts)] if max(counts, default=0) else []


def noun_beside(spec: JobSpec) -> str:
    """Return what the conditioning images of a job's samples are called, of whatever role."""
    roles = {role for dataset in datasets_of(spec) for role in dataset.roles}
    several = len(roles) > 1 and takes_control_videos(spec)
    return "conditioning image" if several else noun_of_references(spec, roles=roles)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _describe(finding: Finding) -> str:
    example = f", such as {finding.examples[0]}" if finding.examples else ""
    return f"{finding.count} {finding.text}{example}"


def reasons_of(index: DataIndex) -> list[Reason]:
    """Return why samples are skipped, the most frequent reason first."""
    files: dict[str, list[list[Any]]] = {}
    for skip in index.skipped:
        reason = skip.why.partition(":")[0].partition(" (")[0]
        detail = skip.why.removeprefix(reason).removeprefix(":").strip()
        files.setdefault(reason, []).append([skip.dataset, skip.name, detail])
    reasons = [
        Reason(len(of), text, [name for _, name, _ in of[:_EXAMPLES]], of)
        for text, of in files.items()
    ]
    return sorted(reasons, key=lambda reason: -reason.count)


def _handled(index: DataIndex) -> list[Finding]:
    findings = []
    for key, text in NOTES.items():
        names = [sample.name for sample in _images(index.samples) if key in sample.notes]
        if names:
            findings.append(Finding(len(names), text, names[:_EXAMPLES]))
    return findings


def _cautions(
    spec: JobSpec, index: DataIndex, texts: list[tuple[str, ...]], tokens: dict[str, int]
) -> list[Finding]:
    samples = _images(index.samples)
    enlarged = _images(s for s in index.samples if enlargement(s.width, s.height, _size(s)) > 1.0)
    cut = _images(s for s in index.samples if cut_share(s.width, s.height, _size(s)) > 0.25)
    long = _images(
        sample
        for sample, own in zip(index.samples, texts, strict=True)
        if any(tokens.get(text, 0) > spec.max_sequence_length for text in own)
    )
    first: dict[str, Sample] = {}
    copies = [s for s in samples if first.setdefault(s.digest, s) is not s]
    candidates = [
        *_too_small(spec, samples),
        ([s for s in samples if not s.captions], "without a caption"),
        (long, f"with captions longer than {spec.max_sequence_length} tokens, truncated"),
        (cut, "cropped by more than a quarter"),
        (enlarged, "enlarged"),
        (copies, "with the same content as another"),
        *_crowded(spec, index),
        *_mask_cautions(spec, samples),
    ]
    findings = [
        Finding(len(c), text, [s.name for s in c[:_EXAMPLES]]) for c, text in candidates if c
    ]
    for number, dataset in enumerate(index.others):
        folder = Path(datasets_of(spec)[number].path).name
        for kind, count in sorted(dataset.items()):
            findings.append(Finding(count, f"{kind} in {folder}, which are not samples"))
    return findings


def _relative_draws(plan: BatchPlan) -> list[float]:
    """Return how often a sample of each dataset is drawn, relative to the average sample."""
    mean = plan.draws_per_epoch / len(plan.buckets)
    return [share.draws / max(share.samples, 1) / mean for share in plan.shares]


def _drawn_often(spec: InputKeys, plan: BatchPlan) -> list[Finding]:
    """Report datasets that are drawn far more often than others, unless `repeats` causes that."""
    findings = []
    for dataset, share, often in zip(
        datasets_of(spec), plan.shares, _relative_draws(plan), strict=True
    ):
        if often > _OFTEN and share.draws != share.samples * dataset.repeats:
            cause = "regularization" if dataset.weight is None else f"weight {dataset.weight:g}"
            text = (
                f"of {Path(dataset.path).name} come {often:.1f} times as often as the average "
                f"sample ({cause}); add images to it"
            )
            text += "" if dataset.weight is None else " or lower its weight"
            findings.append(Finding(share.samples, text, []))
    return findings


def _crowded(spec: TrainingKeys, index: DataIndex) -> list[tuple[list[Sample], str]]:
    """Return the samples whose shape is too rare to fill a micro-batch with distinct samples."""
    counts = Counter(sample.group for sample in index.samples)
    rare = [s for s in index.samples if counts[s.group] < spec.train_batch_size]
    sizes = ", ".join(dict.fromkeys("x".join(map(str, s.bucket)) for s in rare[:3]))
    return [
        (
            rare,
            f"of a shape ({sizes}) with fewer samples than train_batch_size, so they wait for "
            "a batch and come in it more than once; a larger bucket_step joins shapes, and "
            "train_batch_size: 1 needs no two alike",
        )
    ]


def _images(samples: Iterable[Sample]) -> list[Sample]:
    """Return one sample of each image, in order."""
    return list({(sample.dataset, sample.name): sample for sample in samples}.values())


def _too_small(spec: JobSpec, images: list[Sample]) -> list[tuple[list[Sample], str]]:
    """Return the images that are too small for one of their resolutions, grouped by resolution."""
    missed: dict[int, list[Sample]] = {}
    if spec.resolution_mode == "each":
        every = [Buckets(spec, dataset) for dataset in datasets_of(spec)]
        for image in images:
            buckets = every[image.dataset]
            reached = buckets.find(image.width, image.height)
            for side in buckets.sizes.keys() - reached.keys():
                missed.setdefault(side, []).append(image)
    return [
        (small, f"too small for resolution {side}, trained at smaller ones only")
        for side, small in sorted(missed.items())
    ]


def _mask_cautions(spec: InputKeys, images: list[Sample]) -> list[tuple[list[Sample], str]]:
    """Return the images without a mask or, if the job uses no masks, those that look like masks."""
    datasets = datasets_of(spec)
    if spec.masked_loss == "none":
        stems = {os.path.splitext(image.name)[0] for image in images}
        named = [image for image in images if names_mask(image.name, stems)]
        return [(named, "named like masks of other images; masked_loss: file uses them as masks")]
    bare = [s for s in images if not s.mask and not datasets[s.dataset].regularization]
    return [(bare, "without a mask, trained whole")]


def _datasets(spec: InputKeys, index: DataIndex, plan: BatchPlan) -> list[DatasetReport]:
    return [
        DatasetReport(
            path=dataset.path,
            layout=find_layout(expand(dataset.path)),
            samples=plan.shares[number].samples,
            skipped=sum(skip.dataset == number for skip in index.skipped),
            draws=round(plan.shares[number].draws, 3),
            others=index.others[number],
            regularization=dataset.regularization,
        )
        for number, dataset in enumerate(datasets_of(spec))
    ]


def _buckets(spec: JobSpec, index: DataIndex, plan: BatchPlan) -> list[BucketReport]:
    draws, to_base = plan.bucket_draws, datasets_to_base(spec)
    reports = []
    for bucket, samples in index.by_bucket().items():
        cuts = [cut_share(s.width, s.height, _size(s)) for s in samples]
        groups = {PlanBucket(s.group, s.dataset in to_base) for s in samples}
        reports.append(
            BucketReport(
                size=list(bucket),
                samples=len(samples),
                draws=round(sum(draws[group] for group in groups), 1),
                cut_mean=round(sum(cuts) / len(cuts), 4),
                cut_most=round(max(cuts), 4),
            )
        )
    return reports


def _size(sample: Sample) -> tuple[int, int]:
    return sample.bucket[0], sample.bucket[1]


def _contents(sample: Sample) -> list[str]:
    """Return the digests of a sample's conditioning images."""
    return [reference.digest for reference in sample.references]


def changed_since(before: DataIndex, now: DataIndex, noun: str) -> str:
    """Describe how two indexes of a job's data differ: `2 new (a.png, …)`; "" if they do not.

    Args:
        before: The former one.
        now: The present one.
        noun: What a sample's conditioning images are called.
    """
    old, new = ({(s.dataset, s.name): s for s in index.samples} for index in (before, now))
    pairs = [(old[key], new[key]) for key in sorted(old.keys() & new.keys())]
    facts = {
        "new": [name for _, name in sorted(new.keys() - old.keys())],
        "gone": [name for _, name in sorted(old.keys() - new.keys())],
        "changed": [b.name for a, b in pairs if a.digest != b.digest],
        "with another caption": [b.name for a, b in pairs if a.captions != b.captions],
        f"with another {noun}": [b.name for a, b in pairs if _contents(a) != _contents(b)],
        "with another mask or loss weight": [
            b.name for a, b in pairs if (a.mask, a.loss_weight) != (b.mask, b.loss_weight)
        ],
    }
    return named_counts(facts)
