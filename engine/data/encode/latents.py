"""Encode the image views that the job draws into latents, once, with the work split over ranks."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from PIL import Image
from torch.nn import functional

from engine.data.encode.tensor_cache import (
    TensorCache,
    find_missing,
    fingerprint,
    nonfinite,
    piece_size,
    pieces,
    together,
)
from engine.data.index.data_index import read_content, read_reference
from engine.data.index.views import (
    FITTING,
    View,
    fills,
    fit,
    fit_reference,
    keyframe_facts,
    keyframe_name,
    keyframes_of,
    random_mask,
    reference_view,
    role_of,
    view_of,
)
from engine.data.read.images import DECODER, decode
from engine.model.release import Watch, give_back
from jobs.errors import NotFiniteError, UserError
from jobs.spec.families import (
    frames_beside,
    makes_layers,
    needs_first_frame,
    needs_last_frame,
    noun_of_references,
    takes_control_videos,
)
from jobs.spec.values.dataset_files import VIDEO_SUFFIXES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from engine.data.index.data_index import DataIndex, Sample
    from engine.data.index.views import ReferenceView
    from engine.run_context import RunContext
    from jobs.spec.job_spec import InputKeys, JobSpec
    from jobs.spec.keys.data import DataKeys


MASK: Final = "mask"
"""Name of a mask's channels, beside the latents of what it leaves."""
MASKING: Final = 1
"""Part of the cache keys: raise it when masks are drawn or applied in another way."""

_COLOURS: Final = 3  # channels of pixels; a fourth one is a mask
_WHITE: Final = 128
_CELL: Final = 8  # pixels of a side of Wan 2.1's latents
_READ_AHEAD: Final = 3  # images decoded while one is encoded
_READERS: Final = 2  # threads


class LatentKeys:
    """Map a sample and a view to its key in the latent cache."""

    def __init__(self, spec: JobSpec, cache: TensorCache, root: Path, index: DataIndex) -> None:
        self._spec = spec
        self._cache = cache
        self._index = index
        self._masks = fills(spec)
        self._controlled = takes_control_videos(spec)
        self._sound_vae = fingerprint(root / "audio_vae") if spec.train_audio else ""
        self._facts: dict[str, Any] = {
            "family": spec.model_family,
            "vae": fingerprint(root / "vae"),
            "dtype": "float32",
            "tf32": spec.allow_tf32,
            "decoder": DECODER,
            "fitting": FITTING,
            **({"alpha": True} if makes_layers(spec) else {}),
        }

    def __call__(self, sample: int, view: int) -> str:
        item = self._index.samples[sample]
        facts = view_of(item, view, self._spec).facts()
        if item.is_video:
            facts |= {"frames": item.bucket[2], "fps": self._spec.fps}
        return self._cache.key(content=item.digest, **facts, **self._facts)

    def sound(self, sample: int) -> str:
        """Return the cache key of a video's sound, the same in all views."""
        item = self._index.samples[sample]
        facts = {name: self._facts[name] for name in ("family", "dtype", "tf32")}
        digest = item.digest if item.is_video else ""  # images are silent
        seconds = item.bucket[2] / self._spec.fps
        return self._cache.key(content=digest, seconds=seconds, vae=self._sound_vae, **facts)

    def beginning(self, sample: int, view: int) -> str:
        """Return the cache key of a view of a video's first frame and of what follows it."""
        item = self._index.samples[sample]
        frames = frames_beside(self._spec, item.bucket[2])
        facts = view_of(item, view, self._spec).facts() | {"beginning": frames}
        if needs_last_frame(self._spec):
            facts |= {"last_frame": True, "fps": self._spec.fps}
        return self._cache.key(content=item.digest, **facts, **self._facts)

    def keyframe(self, sample: int, view: int, number: int) -> str:
        """Return the cache key of a view of a video's first frame (0) or last one (1), alone."""
        item = self._index.samples[sample]
        facts = view_of(item, view, self._spec).facts()
        facts |= keyframe_facts(item, number, self._spec) | self._facts
        return self._cache.key(content=item.digest, **facts)

    def gray(self, sample: int) -> str:
        """Return the cache key of gray frames in the shape of a sample."""
        return self._cache.key(gray=list(self._index.samples[sample].bucket), **self._facts)

    def control(self, sample: int, view: int) -> tuple[str, str] | tuple[()]:
        """Return the keys of what is kept of a control video, and of what is left to the model.

        Gray frames stand for either where nothing is kept or left. Without a control video, a mask
        is of the sample, and nothing of that is left. Of models without control videos, none.
        """
        if not self._controlled:
            return ()
        item, gray = self._index.samples[sample], self.gray(sample)
        number, mask = role_of(item, ""), role_of(item, "fill_mask")
        video = gray if number is None else self.reference(sample, view, number)
        if mask is None:
            return gray, video
        facts = {"fill_mask": self.reference(sample, view, mask), "masking": MASKING}
        if number is None:
            return self._cache.key(kept=self(sample, view), **facts), gray
        return self._cache.key(kept=video, **facts), self._cache.key(left=video, **facts)

    def reference(self, sample: int, view: int, number: int) -> str:
        """Return the cache key of a conditioning image, cropped to match a view of its sample.

        Of a mask, that of what it leaves of the sample.
        """
        item = self._index.samples[sample]
        reference, shown = item.references[number], view_of(item, view, self._spec)
        facts = reference_view(reference, item, shown).facts()
        if makes_layers(self._spec):
            facts = shown.facts()
        content = reference.digest
        if reference.role:
            facts |= {"role": reference.role}
        if item.is_video and reference.role != "reference":
            facts |= {"frames": item.bucket[2], "fps": self._spec.fps}
        if self._masks:
            drawn = {} if reference.path else {"random_mask": [MASKING, shown.mask]}
            facts |= {"filled": item.digest, "centre": shown.centre, **drawn}
        return self._cache.key(content=content, **facts, **self._facts)


def prepare_latents(
    run: RunContext, cache: TensorCache, index: DataIndex, views: Iterable[tuple[int, int]]
) -> LatentKeys:
    """Fill the cache with the latents of these samples and views.

    Raises:
        UserError: An image changed after it was indexed.
        NotFiniteError: The VAE returned non-finite values. Nothing of that image is cached.
    """
    spec, family = run.spec, run.family
    keys = LatentKeys(spec, cache, run.model_root, index)
    beginning = "first and last frames" if needs_last_frame(spec) else "first frame"
    drawn: dict[str, tuple[str, Callable[[], torch.Tensor]]] = {}
    given: dict[str, tuple[str, Callable[[], torch.Tensor]]] = {}
    for sample, view in views:
        item = index.samples[sample]
        seen = view_of(item, view, spec)
        drawn[keys(sample, view)] = item.name, partial(to_pixels, item, seen, spec)
        mask = role_of(item, "fill_mask")
        for number, reference in enumerate(item.references):
            if mask is None or reference.role == "reference":
                read = partial(reference_pixels, item, number, seen, spec)
                name = _reference_name(item, spec, number)
                given[keys.reference(sample, view, number)] = name, read
        for what, key in zip(("keeps", "leaves"), keys.control(sample, view), strict=False):
            if key == keys.gray(sample):
                gray = partial(torch.zeros, 1, _COLOURS, *item.bucket[::-1])  # (1, 3, F, H, W)
                given[key] = "gray frames", gray
            elif mask is not None:
                read = partial(split_pixels, item, seen, spec, kept=what == "keeps")
                given[key] = f"what the fill mask of {item.name} {what}", read
        if item.from_first and needs_first_frame(spec):
            read = partial(beginning_pixels, item, seen, spec)
            given[keys.beginning(sample, view)] = f"the {beginning} of {item.name}", read
        for number in range(keyframes_of(item, spec)):
            read = partial(keyframe_pixels, item, number, seen, spec)
            given[keys.keyframe(sample, view, number)] = keyframe_name(item, number), read
    drawn |= given

    def encode(vae: Any, pixels: torch.Tensor, key: str) -> dict[str, torch.Tensor]:
        masked = pixels.shape[1] if makes_layers(spec) else _COLOURS
        colours, mask = pixels[:, :masked], pixels[:, masked:]
        how = family.encode_condition if key in given else family.encode_pictures
        latents = _checked(how(vae, colours)[0], vae, drawn[key][0])
        masks = {MASK: mask_channels(mask.cpu(), latents)} if mask.shape[1] else {}
        return {"latents": latents} | masks

    _fill(
        "latents", run, cache, drawn, lambda: family.load_vae(run.model_root, torch.float32), encode
    )
    return keys


def prepare_sounds(
    run: RunContext, cache: TensorCache, index: DataIndex, keys: LatentKeys, samples: Iterable[int]
) -> None:
    """Fill the cache with the latents of these samples' sound, and whether there is some.

    Raises:
        UserError: A video changed after it was indexed.
        NotFiniteError: The autoencoder returned non-finite values.
    """
    spec, family = run.spec, run.family
    drawn = {
        keys.sound(number): (
            f"the sound of {index.samples[number].name}",
            partial(to_sound, index.samples[number], family.sound_rate(), spec),
        )
        for number in samples
    }

    def encode(vae: Any, sound: torch.Tensor, key: str) -> dict[str, torch.Tensor]:
        latents = _checked(family.encode_sound(vae, sound[:2]), vae, drawn[key][0])
        return {"latents": latents, "heard": sound[2, 0].cpu()}

    _fill("sounds", run, cache, drawn, lambda: family.load_sound_vae(run.model_root), encode)


def _fill(
    work: str,
    run: RunContext,
    cache: TensorCache,
    drawn: Mapping[str, tuple[str, Callable[[], torch.Tensor]]],
    load_vae: Callable[[], Any],
    encode: Callable[[Any, torch.Tensor, str], dict[str, torch.Tensor]],
) -> None:
    """Encode what the cache lacks, the work split over ranks.

    Args:
        work: What it is called in messages between ranks.
        run: The job and its ranks.
        cache: The cache.
        drawn: Key → the name in messages, and what reads it.
        load_vae: Loads the autoencoder.
        encode: Encodes what was read for a key, on the device; returns what is cached.
    """
    missing = find_missing(cache, list(drawn), run)

    def load(key: str) -> torch.Tensor | None:
        if cache.check(key) == "sound":  # another job wrote it first
            return None
        return drawn[key][1]()

    # An image is written while the next one is encoded: the cache may be on another machine's disk.
    with together(work, len(missing), run) as shared, ThreadPoolExecutor(1) as writer:
        vae: Any = None
        written: Future[None] | None = None
        size = piece_size(len(missing), run.world.size)
        mine = (key for piece in pieces(missing, size, work, run) for key in piece)
        for key, pixels in _read_ahead(mine, load):
            if pixels is not None:
                if vae is None:
                    vae = load_vae().to(run.world.device).eval()
                with torch.no_grad():
                    encoded = encode(vae, pixels.to(run.world.device), key)
                if written is not None:
                    written.result()
                written = writer.submit(cache.write, key, encoded)
            shared.add()
        if written is not None:
            written.result()
        if vae is not None:
            watch = Watch({"vae": vae})
            vae = None
            if left := watch.still_held():
                run.telemetry.warn(left)
            give_back(run.world.device)


def to_sound(sample: Sample, rate: int, spec: DataKeys) -> torch.Tensor:
    """Return a sample's sound, `(3, n)`: left, right, and ones if there is some.

    Raises:
        UserError: The file changed after it was indexed.
    """
    seconds = sample.bucket[2] / spec.fps
    heard = None
    if sample.is_video:
        from engine.data.read.videos import read_sound

        with _report_unreadable(sample.name):
            _check_video(sample)
            heard = read_sound(Path(sample.path), seconds=seconds, rate=rate)
    if heard is None:
        return torch.zeros(3, round(seconds * rate))
    return torch.cat([torch.from_numpy(heard), torch.ones(1, heard.shape[1])])


def to_pixels(sample: Sample, view: View, spec: InputKeys) -> torch.Tensor:
    """Return a view of a sample in [-1, 1]: `(1, 3, H, W)`, or `(1, 3, F, H, W)` for videos.

    With opacity as a fourth channel for models that make layers.

    Raises:
        UserError: The file changed after it was indexed.
    """
    with _report_unreadable(sample.name):
        if sample.is_video:
            read = _frames(sample, spec, sample.bucket[2])
            frames = [fit(Image.fromarray(frame), view) for frame in read]
        else:
            frames = [fit(decode(_content(sample, spec), alpha=makes_layers(spec)), view)]
    pixels = _scaled(frames)
    return pixels if len(sample.bucket) == 3 else pixels[:, :, 0]


def reference_pixels(sample: Sample, number: int, view: View, spec: InputKeys) -> torch.Tensor:
    """Return the conditioning image for a view of its sample, `(1, 3, H, W)` in [-1, 1].

    For families that train on videos, `(1, 3, F, H, W)`. For models that fill in what a mask says,
    the sample without that part, and the mask, `(1, 4, H, W)`. For those that make layers, one of
    them, with its opacity, `(1, 4, H, W)`.

    Raises:
        UserError: The file changed after it was indexed.
    """
    reference = sample.references[number]
    if not reference.path:
        return masked_pixels(to_pixels(sample, view, spec), random_mask(sample, view))
    part = reference_view(reference, sample, view)
    if reference.role == "reference":
        return padded_pixels(reference_picture(sample, number, spec), part)
    if sample.is_video:
        frames = _reference_frames(sample, number, spec)
        return _scaled([fit_reference(frame, part) for frame in frames])
    picture = reference_picture(sample, number, spec)
    if makes_layers(spec):  # exactly the part of it that its image has
        return _scaled([fit(picture, view)])[:, :, 0]
    picture = fit_reference(picture, part)
    if fills(spec):
        return masked_pixels(to_pixels(sample, view, spec), picture)
    pixels = _scaled([picture])
    return pixels if len(sample.bucket) == 3 else pixels[:, :, 0]


def split_pixels(sample: Sample, view: View, spec: InputKeys, *, kept: bool) -> torch.Tensor:
    """Return a control video where its fill mask is black, or white; gray elsewhere.

    Without a control video, the sample. Like `WanVACEPipeline`, this splits at half white, and
    leaves the mask itself as it is.

    Args:
        sample: The sample.
        view: Its view.
        spec: The job.
        kept: Whether to return what is kept, with the mask in 0 to 1, `(1, 4, F, H, W)`; or what is
            left to the model, `(1, 3, F, H, W)`.

    Raises:
        UserError: A file changed after it was indexed.
    """
    number, mask = role_of(sample, ""), role_of(sample, "fill_mask")
    assert mask is not None, "it has one"
    part = reference_view(sample.references[mask], sample, view)
    frames = [
        np.asarray(fit_reference(frame.convert("L"), part), dtype=np.float32)
        for frame in _reference_frames(sample, mask, spec)
    ]
    white = torch.from_numpy(np.stack(frames)).expand(sample.bucket[2], -1, -1)[None, None]
    if number is None:
        pixels = to_pixels(sample, view, spec)
    else:
        pixels = reference_pixels(sample, number, view, spec)
    if not kept:
        return pixels * (white >= _WHITE)
    return torch.cat([pixels * (white < _WHITE), white / 255], dim=1)


def _reference_frames(sample: Sample, number: int, spec: InputKeys) -> list[Image.Image]:
    """Return the frames of a video beside a sample, as many as the sample has; one of an image.

    Raises:
        UserError: The file changed after it was indexed.
    """
    reference = sample.references[number]
    if not sample.is_video or Path(reference.path).suffix.lower() not in VIDEO_SUFFIXES:
        return [reference_picture(sample, number, spec)]
    name = _reference_name(sample, spec, number)
    with _report_unreadable(name):
        shown = replace(sample, path=reference.path, digest=reference.digest, name=name)
        frames = _frames(shown, spec, sample.bucket[2])
    return [Image.fromarray(frame) for frame in frames]


def padded_pixels(picture: Image.Image, view: ReferenceView) -> torch.Tensor:
    """Return an image as large as it fits into a view, in the middle of white, `(1, 3, 1, H, W)`.

    As `WanVACEPipeline` and the authors' code do it. Its sides become multiples of a latent's.
    """
    width, height = (side // _CELL * _CELL or side for side in picture.size)
    pixels = _scaled([picture.resize((width, height), Image.Resampling.LANCZOS)])[:, :, 0]
    scale = min(view.size[0] / width, view.size[1] / height)
    across, down = int(width * scale), int(height * scale)
    pixels = functional.interpolate(pixels, (down, across), mode="bilinear", align_corners=False)
    left, top = (view.size[0] - across) // 2, (view.size[1] - down) // 2
    canvas = torch.ones(1, _COLOURS, *view.size[::-1])
    canvas[:, :, top : top + down, left : left + across] = pixels
    return (canvas.flip(-1) if view.flip else canvas).unsqueeze(2)


def masked_pixels(pixels: torch.Tensor, mask: Image.Image) -> torch.Tensor:
    """Return pixels `(1, 3, H, W)` gray where a mask is white, and the mask: `(1, 4, H, W)`.

    Like `FluxFillPipeline`, which rounds its mask to black and white first.
    """
    white = torch.from_numpy(np.asarray(mask.convert("L")) >= _WHITE).to(pixels.dtype)
    white = white.view(1, 1, *white.shape)
    return torch.cat([pixels * (1 - white), white], dim=1)


def mask_channels(mask: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
    """Return a mask `(1, 1, H, W)` as channels of latents `(C, h, w)`: `(64, h, w)` bytes.

    One for each pixel of a cell, row by row, as in `FluxFillPipeline`. Of a video's, `(1, 1, F, H,
    W)` and `(C, f, h, w)`, they are `(64, f, h, w)` bytes in 0 to 255, as `WanVACEPipeline` chooses
    frames.
    """
    side = mask.shape[-1] // latents.shape[-1]
    if mask.dim() == 5:
        cells = functional.pixel_unshuffle(mask[0].transpose(0, 1), side)  # (F, 64, h, w)
        size = tuple(latents.shape[1:])
        chosen = functional.interpolate(cells.transpose(0, 1)[None], size, mode="nearest-exact")
        return (chosen[0] * 255).round().to(torch.uint8)
    return functional.pixel_unshuffle(mask, side)[0].to(torch.uint8).contiguous()


def reference_picture(sample: Sample, number: int, spec: InputKeys) -> Image.Image:
    """Return a conditioning image, decoded but not resized.

    Raises:
        UserError: The file changed after it was indexed.
    """
    reference = sample.references[number]
    name = _reference_name(sample, spec, number)
    with _report_unreadable(name):
        content = read_reference(reference, sample, spec)
    _check(name, hashlib.sha256(content).hexdigest(), reference.digest)
    return decode(content, alpha=makes_layers(spec))


def keyframe(sample: Sample, number: int, view: View, spec: DataKeys) -> Image.Image:
    """Return a view of a video's first frame (0) or last one (1).

    Raises:
        UserError: The file changed after it was indexed.
    """
    with _report_unreadable(sample.name):
        count = sample.bucket[2] if number else 1
        return fit(Image.fromarray(_frames(sample, spec, count)[-1]), view)


def keyframe_pixels(sample: Sample, number: int, view: View, spec: DataKeys) -> torch.Tensor:
    """Return `keyframe` as pixels, `(1, 3, 1, H, W)` in [-1, 1]."""
    return _scaled([keyframe(sample, number, view, spec)])


def beginning_pixels(sample: Sample, view: View, spec: InputKeys) -> torch.Tensor:
    """Return a view of a video's given frames, gray elsewhere: `(1, 3, F, H, W)` in [-1, 1].

    Models whose other frames have latents of 0 get the first frame alone.
    """
    first, *last = (
        keyframe_pixels(sample, number, view, spec) for number in range(1 + needs_last_frame(spec))
    )
    gray = frames_beside(spec, sample.bucket[2]) - 1 - len(last)
    return torch.cat([functional.pad(first, (0, 0, 0, 0, 0, gray)), *last], dim=2)


def _scaled(frames: Sequence[Image.Image]) -> torch.Tensor:
    """Stack frames into a tensor of shape `(1, 3, F, H, W)` in [-1, 1]."""
    pixels = torch.from_numpy(np.stack([np.asarray(frame, dtype=np.float32) for frame in frames]))
    return pixels.permute(3, 0, 1, 2).unsqueeze(0) / 127.5 - 1.0


def _content(sample: Sample, spec: InputKeys) -> bytes:
    content = read_content(sample, spec)
    _check(sample.name, hashlib.sha256(content).hexdigest(), sample.digest)
    return content


def _frames(sample: Sample, spec: DataKeys, count: int) -> Any:
    from engine.data.read.videos import read_frames

    _check_video(sample)
    return read_frames(Path(sample.path), fps=spec.fps, frames=count)


def _check_video(sample: Sample) -> None:
    with open(sample.path, "rb") as file:
        _check(sample.name, hashlib.file_digest(file, "sha256").hexdigest(), sample.digest)


@contextmanager
def _report_unreadable(name: str) -> Iterator[None]:
    """Turn an `OSError` into a `UserError` that says the file is no longer readable."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{name} is no longer readable ({error.strerror or error})",
            "resume the job: it reads its data again",
        ) from None


def _check(name: str, digest: str, seen: str) -> None:
    # Without this check, the latents of the new content would be cached under the old digest.
    if digest != seen:
        raise UserError(f"{name} changed while the job was preparing its data", "resume the job")


def _reference_name(sample: Sample, spec: InputKeys, number: int) -> str:
    role = sample.references[number].role or "control"
    return f"the {noun_of_references(spec, roles=[role])} of {sample.name}"


def _checked(latents: torch.Tensor, vae: Any, name: str) -> torch.Tensor:
    latents = latents.float().cpu().contiguous()
    if nonfinite({"latents": latents}):
        raise NotFiniteError(
            f"the VAE ({type(vae).__name__}) returned values that are not finite for {name}",
            "download the model again, or leave this file out if it is the only one",
        )
    return latents


def _read_ahead(keys: Iterator[str], load: Any) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Load items in threads, a few ahead of the consumer."""
    waiting: list[tuple[str, Future[torch.Tensor | None]]] = []
    with ThreadPoolExecutor(_READERS) as pool:
        try:
            for key in keys:
                waiting.append((key, pool.submit(load, key)))
                if len(waiting) > _READ_AHEAD:
                    first, pixels = waiting.pop(0)
                    yield first, pixels.result()
            for first, pixels in waiting:
                yield first, pixels.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
