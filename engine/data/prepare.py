"""Prepare the data for training: index, report, encode, cache."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from engine.data.encode.latents import MASK, LatentKeys, prepare_latents, prepare_sounds
from engine.data.encode.loss_weights import LossWeights, prepare_masks
from engine.data.encode.tensor_cache import TensorCache
from engine.data.encode.texts import NO_TEXT, Text, Texts, images_of, prepare_texts, prompt_images
from engine.data.index.batch_plan import BatchPlan, Draw, nth_variant
from engine.data.index.captions import prompt_text
from engine.data.index.data_index import DataIndex, build_index, hold_out
from engine.data.index.views import (
    count_views,
    fit_whole,
    in_frames,
    keyframes_of,
    shown,
    view_of,
)
from engine.data.read.class_images import cache_root
from engine.data.read.images import PictureError, decode
from engine.data.read.videos import VideoError, read_frames
from engine.data.report import (
    PlanBucket,
    changed_since,
    make_plan,
    make_report,
    noun_beside,
    preserved_texts,
    sample_texts,
    summary,
)
from engine.families.shared.references import (
    BEGINNING,
    KEYFRAME,
    REFERENCE,
    SOUND,
    SOUND_NOISE,
    SOUND_WEIGHT,
)
from engine.ranks.team import StoppedError
from jobs.errors import UserError
from jobs.paths import expand
from jobs.run.events import Data
from jobs.run.rundir import write_atomic
from jobs.spec.families import (
    makes_layers,
    needs_first_frame,
    noun_of_references,
    references_of,
    takes_control_videos,
    takes_keyframes,
)
from jobs.spec.keys.prompts import requests_of
from jobs.spec.rules.cascade import settle
from jobs.spec.rules.steps import preserves, steps_of, with_total_steps
from jobs.spec.values.dataset_files import PICTURE_SUFFIXES
from jobs.untrusted.files import LARGEST_PICTURE, read_regular

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from engine.data.encode.texts import ImageInput
    from engine.data.index.data_index import Sample
    from engine.data.index.views import Shown
    from engine.data.report import DataReport
    from engine.families.shared.references import Conditioning
    from engine.ranks.telemetry import Telemetry
    from engine.run_context import RunContext
    from jobs.spec.job_spec import DataPlanKeys, JobSpec
    from jobs.spec.keys.job import JobKeys
    from jobs.spec.keys.prompts import SampleRequest


@dataclass(frozen=True)
class Prepared:
    """Everything that training reads.

    Attributes:
        spec: The job.
        index: The samples to train on.
        plan: Assigns samples to steps.
        captions: Per sample, the texts that it cycles through.
        preserved: Per sample, these texts with `preservation_class`; empty without `preservation`.
        latents: The cache of latents.
        latent_keys: Maps a sample and a view to a key in `latents`; held-out samples are numbered
            after the others.
        texts: Encoded captions and prompts.
        held: The held-out samples (`engine.data.index.data_index`).
        weights: Loss weights of the samples; None if all are equal everywhere.
        held_weights: Those of the held-out samples, of which only the masks count; None if no
            sample has one.
        pictures: Conditioning images of prompts by path, as pipelines take them.
        sounds: The cache of the latents of sound; None if none is trained.
    """

    spec: JobSpec
    index: DataIndex
    plan: BatchPlan
    captions: Sequence[tuple[str, ...]]
    preserved: Sequence[tuple[str, ...]]
    latents: TensorCache
    latent_keys: LatentKeys
    texts: Texts
    held: Sequence[Sample] = ()
    weights: LossWeights | None = None
    held_weights: LossWeights | None = None
    pictures: Mapping[str, Conditioning] = field(default_factory=dict)
    sounds: TensorCache | None = None

    def latents_of(self, draw: Draw) -> torch.Tensor:
        """Return a draw's latents: `(C, h, w)`, for videos `(C, f, h, w)`; normalized, fp32.

        For models that make layers, those of the image and of its layers, `(C, 1 + layers, h, w)`.
        Reference images beside a control video are frames before the video's.
        """
        return self._latents(draw.sample, view_number(draw, self.spec), self.index.samples)

    def sound_of(self, sample: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Return a sample's sound by the names in `references`, with noise; {} without sound.

        Args:
            sample: Its number; held-out samples are numbered after the others.
            generator: Draws the noise.
        """
        if self.sounds is None:
            return {}
        cached = self.sounds.read(self.latent_keys.sound(sample))
        noise = torch.randn(cached["latents"].shape, generator=generator)
        return {
            SOUND: cached["latents"],
            SOUND_NOISE: noise,
            SOUND_WEIGHT: cached["heard"],
        }

    def references_of(self, draw: Draw, frames: int) -> dict[str, torch.Tensor]:
        """Return what a draw is conditioned on, by the names that `Family.predict` takes.

        Args:
            draw: The draw.
            frames: How many of its frames are given; see `frame_shares`.
        """
        view = view_number(draw, self.spec)
        return self._references(draw.sample, view, self.index.samples, frames)

    def frame_shares(self, draw: Draw) -> tuple[float, float]:
        """Return how often the model gets a draw's first frame, and its last one with it."""
        return frame_shares(self.index.samples[draw.sample], self.spec)

    def weight_of(self, draw: Draw, latents: torch.Tensor) -> torch.Tensor | None:
        """Return the weight of a draw's errors; see `LossWeights.of`."""
        if self.weights is None:
            return None
        return self.weights.of(draw.sample, view_number(draw, self.spec), latents)

    def shown_of(self, draw: Draw) -> Shown:
        """Return the part of its image that a draw shows."""
        sample = self.index.samples[draw.sample]
        return shown(sample, view_of(sample, view_number(draw, self.spec), self.spec))

    def name_of(self, draw: Draw) -> str:
        """Return the name of a draw's sample in messages, usually its file."""
        return self.index.samples[draw.sample].name

    def caption_of(self, draw: Draw, frames: int = 0) -> Text:
        """Return the text of a draw of which some frames are given."""
        return _caption(draw, self.captions, self.index.samples, self.spec, frames)

    def dropped_of(self, draw: Draw, frames: int = 0) -> Text:
        """Return the text of a draw whose caption is dropped."""
        return _dropped(draw, self.index.samples, self.spec, frames)

    def preserved_of(self, draw: Draw, frames: int = 0) -> Text | None:
        """Return the text with which the base's prediction is preserved, whatever is dropped."""
        if not preserves(self.spec):
            return None
        if self.spec.preservation == "blank":
            return self.dropped_of(draw, frames)
        return _caption(draw, self.preserved, self.index.samples, self.spec, frames)

    def is_to_base(self, draw: Draw) -> bool:
        """Return whether a draw's target is the base's own prediction."""
        bucket = self.plan.buckets[draw.sample]
        return isinstance(bucket, PlanBucket) and bucket.to_base

    def prompt(
        self, text: str, request: SampleRequest, *, negative: bool = False
    ) -> dict[str, torch.Tensor]:
        """Return a request's prompt or negative prompt, encoded."""
        inputs = prompt_images(request, self.pictures, self.spec)
        return self.texts.encoded(Text(prompt_text(text, self.spec), negative, inputs))

    def held_latents(self, number: int) -> torch.Tensor:
        """Return the latents of a held-out sample's first view, as `latents_of`."""
        return self._latents(number, 0, self.held, len(self.index.samples))

    def held_mask(self, number: int, latents: torch.Tensor) -> torch.Tensor | None:
        """Return the factor of a held-out sample's mask; see `LossWeights.of_mask`."""
        weights = self.held_weights
        return None if weights is None else weights.of_mask(number, 0, latents)

    def held_references(self, number: int, frames: int) -> dict[str, torch.Tensor]:
        """Return the latents of what a held-out sample is conditioned on."""
        offset = len(self.index.samples)
        return self._references(number, 0, self.held, frames, offset)

    def _references(
        self, number: int, view: int, samples: Sequence[Sample], frames: int, offset: int = 0
    ) -> dict[str, torch.Tensor]:
        """Return fp32 `reference_0` and so on, `(C, h, w)`, or `beginning`, `(C, f, h, w)`.

        Or of each given frame that has tokens of its own, `(C, 1, h, w)`. For models that make
        layers, the image is `reference_0`. Of a control video, it is `(2C, f, h, w)`, with 64
        channels more of a fill mask; reference images follow, each `(C, 1, h, w)`.
        """
        keys, sample = self.latent_keys, samples[number]
        if makes_layers(self.spec):
            own = self.latents.read(keys(offset + number, view))["latents"]
            return {f"{REFERENCE}0": own}
        if sample.from_first and needs_first_frame(self.spec):
            key = keys.beginning(offset + number, view)
            return {BEGINNING: self.latents.read(key)["latents"]}
        if takes_control_videos(self.spec):
            kept, left = map(self.latents.read, keys.control(offset + number, view))
            mask = [kept[MASK] / 255] if MASK in kept else []
            control = torch.cat([kept["latents"], left["latents"], *mask])
            frames_before = self._beside(offset + number, view, in_frames(sample))
            return {f"{REFERENCE}{n}": part for n, part in enumerate([control, *frames_before])}
        if takes_keyframes(self.spec):
            given = (keys.keyframe(offset + number, view, place) for place in range(frames))
            return {
                f"{KEYFRAME}{place}": self.latents.read(key)["latents"]
                for place, key in enumerate(given)
            }
        beside = self._beside(offset + number, view, range(len(sample.references)))
        return {f"{REFERENCE}{place}": latents for place, latents in enumerate(beside)}

    def _latents(
        self, number: int, view: int, samples: Sequence[Sample], offset: int = 0
    ) -> torch.Tensor:
        own = self.latents.read(self.latent_keys(offset + number, view))["latents"]
        sample = samples[number]
        if before := in_frames(sample):
            return torch.cat([*self._beside(offset + number, view, before), own], dim=1)
        if not makes_layers(self.spec):
            return own
        layers = self._beside(offset + number, view, range(len(sample.references)))
        return torch.stack([own, *layers], dim=1)

    def _beside(self, number: int, view: int, places: Iterable[int]) -> list[torch.Tensor]:
        """Return the latents of images beside a sample's, `(C, h, w)` or `(C, 1, h, w)`."""
        keys = (self.latent_keys.reference(number, view, place) for place in places)
        return [_with_mask(self.latents.read(key)) for key in keys]

    def held_shown(self, number: int) -> Shown:
        """Return the part of a held-out image that its first view shows."""
        return shown(self.held[number], view_of(self.held[number], 0, self.spec))

    def held_text(self, number: int, frames: int = 0) -> dict[str, torch.Tensor]:
        """Return a held-out sample's first caption, encoded; some of its frames are given."""
        return self.texts.encoded(_held_text(self.held[number], self.spec, frames))


def frame_shares(sample: Sample, spec: DataPlanKeys) -> tuple[float, float]:
    """Return how often the model gets a sample's first frame, and its last one with it.

    Models that always get the first beside the video (`BEGINNING`) have no choice.
    """
    return (0.0, 0.0) if needs_first_frame(spec) else (sample.from_first, sample.to_last)


def _with_mask(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return cached latents `(C, h, w)`, followed by the channels of a mask if there is one."""
    latents, mask = tensors["latents"], tensors.get(MASK)
    return latents if mask is None else torch.cat([latents, mask.to(latents.dtype)])


def prepare(run: RunContext) -> Prepared:
    """Index the data, and encode the captions and images that are not cached yet.

    When this returns, on every rank, all files exist that the job's steps will read. The VAE is no
    longer in memory, and neither are text encoders unless the job keeps them.

    Raises:
        StoppedError: A stop was requested on any rank. All ranks leave at the same point; cached
            files are kept.
    """
    spec = settle(run.spec)
    run = replace(run, spec=spec)
    index, held = hold_out(_index(run), spec)
    plan = make_plan(spec, index)
    spec = with_total_steps(spec, plan.draws_per_epoch)
    run = replace(run, spec=spec)
    run.telemetry.total_steps, run.telemetry.steps_per_epoch = steps_of(spec), plan.steps_per_epoch
    captions = [sample_texts(sample, spec) for sample in index.samples]
    preserved = preserved_texts(index.samples, captions, spec)
    views, texts = _drawn(spec, plan, captions, index.samples)
    if spec.preservation == "class" and preserved:
        texts += _drawn(spec, plan, preserved, index.samples)[1]
    views += [(len(index.samples) + number, 0) for number in range(len(held))]
    pictures = read_pictures(spec)
    texts += [
        _held_text(sample, spec, frames)
        for sample in held
        for frames in _numbers_of_frames(sample, spec)
    ]
    texts += _prompts(spec, pictures)
    directory = cache_root(spec)
    encoded = prepare_texts(run, directory, texts)
    cache = TensorCache(directory, "latents")
    everything = replace(index, samples=[*index.samples, *held])
    keys = prepare_latents(run, cache, everything, views)
    sounds = TensorCache(directory, "sounds")
    if spec.train_audio:
        prepare_sounds(run, sounds, everything, keys, {number for number, _ in views})
    masks = TensorCache(directory, "masks")
    prepare_masks(run, masks, cache, keys, everything.samples, views)
    weights, held_weights = (LossWeights(spec, some, masks) for some in (index.samples, held))
    loss_weights = weights if weights.active else None
    return Prepared(
        spec,
        index,
        plan,
        captions,
        preserved,
        cache,
        keys,
        encoded,
        held,
        loss_weights,
        held_weights if held_weights.masked else None,
        pictures,
        sounds if spec.train_audio else None,
    )


def view_number(draw: Draw, spec: DataPlanKeys) -> int:
    """Return the number of the view that a draw uses."""
    return nth_variant(count_views(spec), draw.turn, spec.seed, "view", draw.sample)


def _caption(
    draw: Draw,
    captions: Sequence[tuple[str, ...]],
    samples: Sequence[Sample],
    spec: JobSpec,
    frames: int,
) -> Text:
    own = captions[draw.sample]
    words = own[nth_variant(len(own), draw.turn, spec.seed, "caption", draw.sample)]
    return Text(words, images=_images(draw, samples, spec, frames))


def _dropped(draw: Draw, samples: Sequence[Sample], spec: JobSpec, frames: int) -> Text:
    return NO_TEXT._replace(images=_images(draw, samples, spec, frames))


def _images(
    draw: Draw, samples: Sequence[Sample], spec: JobSpec, frames: int
) -> tuple[ImageInput, ...]:
    return images_of(samples[draw.sample], view_number(draw, spec), spec, frames)


def _held_text(sample: Sample, spec: JobSpec, frames: int) -> Text:
    return Text(sample_texts(sample, spec)[0], images=images_of(sample, 0, spec, frames))


def _numbers_of_frames(sample: Sample, spec: JobKeys) -> tuple[int, ...]:
    """Return each number of frames of a sample that its texts may be encoded with."""
    if not keyframes_of(sample, spec):
        return (0,)
    none = () if sample.from_first == 1 else (0,)
    first = () if sample.to_last == 1 else (1,)
    return (*none, *first, *((2,) if sample.to_last else ()))


def _drawn(
    spec: JobSpec,
    plan: BatchPlan,
    captions: Sequence[tuple[str, ...]],
    samples: Sequence[Sample],
) -> tuple[list[tuple[int, int]], list[Text]]:
    """Return the views and texts that the job's steps draw.

    A job that ends before its first full pass over the data prepares only what it uses.
    """
    blank = preserves(spec) and spec.preservation == "blank"
    drops, views = blank or spec.caption_dropout_probability > 0, count_views(spec)
    everything = len(captions) * max(views, *(len(own) for own in captions))
    if steps_of(spec) * plan.global_batch >= everything:
        pairs = [(sample, view) for sample in range(len(captions)) for view in range(views)]
        shown = [
            (sample, images_of(samples[sample], view, spec, frames))
            for sample, view in pairs
            for frames in _numbers_of_frames(samples[sample], spec)
        ]
        texts = [Text(words, images=own) for sample, own in shown for words in captions[sample]]
        return pairs, [*texts, *(NO_TEXT._replace(images=own) for _, own in shown if drops)]
    steps = [draw for step in range(steps_of(spec)) for draw in plan.draws(step)]
    pairs = sorted({(draw.sample, view_number(draw, spec)) for draw in steps})
    # Which frames a draw is given depends on its micro-batch; texts for each choice are cheap.
    ways = [(draw, n) for draw in steps for n in _numbers_of_frames(samples[draw.sample], spec)]
    drawn = dict.fromkeys(_caption(draw, captions, samples, spec, n) for draw, n in ways)
    dropped = dict.fromkeys(_dropped(draw, samples, spec, n) for draw, n in ways if drops)
    return pairs, [*drawn, *dropped]


def _prompts(spec: DataPlanKeys, pictures: Mapping[str, Conditioning]) -> list[Text]:
    """Return the prompts to sample, and the negative prompts that have an effect."""
    texts = []
    for request in requests_of(spec):
        images = prompt_images(request, pictures, spec)
        texts.append(Text(prompt_text(request.prompt, spec), images=images))
        if request.guided and request.negative_prompt is not None:
            texts.append(Text(prompt_text(request.negative_prompt, spec), True, images))
    return texts


def read_pictures(spec: DataPlanKeys) -> dict[str, Conditioning]:
    """Return the conditioning images of prompts by path, at the size that the model expects.

    They are read once at the start, so that sampling cannot fail because a file was deleted since.

    Raises:
        UserError: An image cannot be used.
    """
    takes = references_of(spec)  # other families' pipelines resize their inputs
    if takes_control_videos(spec):
        return _read_videos(spec)
    pictures: dict[str, Conditioning] = {}
    for path in {path for request in requests_of(spec) for path in request.conditioning}:
        try:
            content = read_regular(expand(path), LARGEST_PICTURE)
            picture = decode(content, alpha=makes_layers(spec))
        except (OSError, PictureError) as error:
            raise UserError(f"the conditioning image {path} cannot be used ({error})") from None
        if takes is None or takes.fit is None:
            pictures[path] = picture
            continue
        side = None if takes.fixed else spec.conditioning_resolution
        if why := takes.why_unfit((takes.seen or takes.fit)(*picture.size, side).size):
            raise UserError(f"the conditioning image {path} cannot be used ({why})")
        pictures[path] = picture if takes.fixed else fit_whole(picture, takes.fit, side)
    return pictures


def _read_videos(spec: DataPlanKeys) -> dict[str, Conditioning]:
    """Return prompts' reference images and the frames of their control videos, by path.

    A video has as many frames as the longest of its prompts needs.

    Raises:
        UserError: An image or a video cannot be used.
    """
    from PIL import Image

    longest: dict[str, int] = {}
    nouns: dict[str, str] = {}
    for request in requests_of(spec):
        for path, role in zip(request.conditioning, request.roles, strict=True):
            still = expand(path).suffix.lower() in PICTURE_SUFFIXES
            frames = 1 if role == "reference" or (role == "fill_mask" and still) else request.frames
            longest[path] = max(frames, longest.get(path, 1))
            nouns.setdefault(path, noun_of_references(spec, roles=[role]))
    given: dict[str, Conditioning] = {}
    for path, frames in longest.items():
        moves = frames > 1
        try:
            if not moves and expand(path).suffix.lower() in PICTURE_SUFFIXES:
                given[path] = decode(read_regular(expand(path), LARGEST_PICTURE))
            else:
                read = read_frames(expand(path), fps=spec.fps, frames=frames)
                given[path] = [Image.fromarray(frame) for frame in read]
        except (OSError, PictureError, VideoError) as error:
            raise UserError(
                f"the {nouns[path]} {path} cannot be used ({error})",
                f"its prompt needs {frames} frames at {spec.fps:g} per second" if moves else None,
            ) from None
    return given


def _index(run: RunContext) -> DataIndex:
    """Build the index on rank 0 and load it on all ranks."""
    path = run.run_dir.root / "data.json"
    if run.world.main:
        before = _index_of_last_attempt(path)
        indexed = _build_index(run, path)
        run.arrive("index", {})
        if indexed is not None:
            _report(*indexed, before, noun_beside(run.spec), run.telemetry)
    run.barrier.wait("index", ranks=1)
    run.words("index")
    return DataIndex.load(path)


def _build_index(run: RunContext, path: Path) -> tuple[DataIndex, DataReport] | None:
    """Index the data, and write the index and the report; None if a stop was requested."""
    with run.telemetry.phase("index") as progress:

        def on_progress(done: int, total: int) -> None:
            progress.total = total
            progress(done)
            if run.stop_requested():
                raise StoppedError("index")

        try:
            index = build_index(run.spec, on_progress)
        except StoppedError:
            return None  # the other ranks see the request at the barrier, and all leave there
        index.save(path)
        report = make_report(run.spec, index, run.model_root)
        write_atomic(run.run_dir.data_report, json.dumps(report.to_dict()) + "\n")
        return index, report


def _report(
    index: DataIndex, report: DataReport, before: DataIndex | None, noun: str, telemetry: Telemetry
) -> None:
    """Log a summary of the data, and what changed since the last attempt."""
    for line in summary(report):
        telemetry.say(line)
    for skip in index.skipped:
        telemetry.say(f"skipped {skip.name}: {skip.why}")
    if index.skipped:
        first = index.skipped[0]
        telemetry.warn(
            f"{len(index.skipped)} of {len(index.skipped) + len(index.samples)} images skipped, "
            f"such as {first.name} ({first.why})"
        )
    if before is not None and (changes := changed_since(before, index, noun)):
        telemetry.warn(f"the data has changed since the last attempt: {changes}")
    telemetry.emit(
        Data(
            samples=report.samples,
            held_out=report.held_out,
            skipped=len(report.skipped),
            texts=report.texts,
            buckets=[[*bucket.size, bucket.samples] for bucket in report.buckets],
            steps_per_epoch=report.steps_per_epoch,
            epochs=report.epochs,
            total_steps=report.total_steps,
        )
    )


def _index_of_last_attempt(path: Path) -> DataIndex | None:
    try:
        return DataIndex.load(path) if path.exists() else None
    except (RuntimeError, LookupError, TypeError):  # truncated, or written by another version
        return None
