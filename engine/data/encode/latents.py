"""Encode the views of images that the job draws into latents, once, shared by the ranks."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from PIL import Image
from torch.nn import functional

from engine.data.encode.shared_work import find_missing, piece_size, pieces, together
from engine.data.encode.tensor_cache import TensorCache, fingerprint, nonfinite
from engine.data.index.data_index import read_content, read_reference
from engine.data.index.references import fit_reference, reference_view
from engine.data.index.views import FITTING, View, fit, view_of
from engine.data.read.images import DECODER, decode
from engine.model.release import Watch, give_back
from jobs.errors import NotFiniteError, UserError
from jobs.spec.families import needs_first_frame

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from engine.data.index.data_index import DataIndex, Sample
    from engine.families import Family
    from engine.run_context import RunContext
    from jobs.spec.job_spec import InputKeys, JobSpec
    from jobs.spec.keys.data import DataKeys

_READ_AHEAD: Final = 3  # images decoded while one is encoded
_READERS: Final = 2  # threads


class LatentKeys:
    """Sample and view → key in the cache."""

    def __init__(self, spec: JobSpec, cache: TensorCache, root: Path, index: DataIndex) -> None:
        self._spec = spec
        self._cache = cache
        self._index = index
        self._facts: dict[str, Any] = {
            "family": spec.model_family,
            "vae": fingerprint(root / "vae"),
            "dtype": "float32",
            "tf32": spec.allow_tf32,
            "decoder": DECODER,
            "fitting": FITTING,
        }

    def __call__(self, sample: int, view: int) -> str:
        item = self._index.samples[sample]
        facts = view_of(item, view, self._spec).facts()
        if item.is_video:
            facts |= {"frames": item.bucket[2], "fps": self._spec.fps}
        return self._cache.key(content=item.digest, **facts, **self._facts)

    def beginning(self, sample: int, view: int) -> str:
        """Return the cache key of a view of a video's first frame, followed by gray frames."""
        item = self._index.samples[sample]
        facts = view_of(item, view, self._spec).facts() | {"beginning": item.bucket[2]}
        return self._cache.key(content=item.digest, **facts, **self._facts)

    def reference(self, sample: int, view: int, number: int) -> str:
        """Return the cache key of a conditioning image, cropped to match a view of its sample."""
        item = self._index.samples[sample]
        reference = item.references[number]
        seen = reference_view(reference, item, view_of(item, view, self._spec))
        return self._cache.key(content=reference.digest, **seen.facts(), **self._facts)


def prepare_latents(
    run: RunContext, cache: TensorCache, index: DataIndex, views: Iterable[tuple[int, int]]
) -> LatentKeys:
    """Fill the cache with latents of these samples and views.

    Raises:
        UserError: An image changed after it was indexed.
        NotFiniteError: The VAE gives values that are not finite. Nothing of that image is cached.
    """
    spec, family = run.spec, run.family
    keys = LatentKeys(spec, cache, run.model_root, index)
    drawn: dict[str, tuple[str, Callable[[], torch.Tensor]]] = {}
    for sample, view in views:
        item = index.samples[sample]
        seen = view_of(item, view, spec)
        drawn[keys(sample, view)] = item.name, partial(to_pixels, item, seen, spec)
        for number in range(len(item.references)):
            read = partial(reference_pixels, item, number, seen, spec)
            drawn[keys.reference(sample, view, number)] = _reference_name(item), read
        if item.from_first and needs_first_frame(spec):
            read = partial(beginning_pixels, item, seen, spec)
            drawn[keys.beginning(sample, view)] = f"the first frame of {item.name}", read
    missing = find_missing(cache, list(drawn), run)

    def load(key: str) -> torch.Tensor | None:
        if cache.check(key) == "sound":  # another job was faster
            return None
        return drawn[key][1]()

    with together("latents", len(missing), run) as shared:
        vae: Any = None
        size = piece_size(len(missing), run.world.size)
        mine = (key for piece in pieces(missing, size, "latents", run) for key in piece)
        for key, pixels in _read_ahead(mine, load):
            if pixels is not None:
                if vae is None:
                    vae = family.load_vae(run.model_root, torch.float32).to(run.world.device).eval()
                latents = _encode(family, vae, pixels.to(run.world.device), drawn[key][0])
                cache.write(key, {"latents": latents})
            shared.add()
        if vae is not None:
            watch = Watch({"vae": vae})
            vae = None
            if left := watch.still_held():
                run.telemetry.warn(left)
            give_back(run.world.device)
    return keys


def to_pixels(sample: Sample, view: View, spec: InputKeys) -> torch.Tensor:
    """Return a view of a sample, in [-1, 1]: `(1, 3, H, W)`, for videos `(1, 3, F, H, W)`.

    Raises:
        UserError: The file changed after it was indexed.
    """
    with _readable(sample.name):
        if sample.is_video:
            read = _frames(sample, spec, sample.bucket[2])
            frames = [fit(Image.fromarray(frame), view) for frame in read]
        else:
            frames = [fit(decode(_content(sample, spec)), view)]
    pixels = _scaled(frames)
    return pixels if len(sample.bucket) == 3 else pixels[:, :, 0]


def reference_pixels(sample: Sample, number: int, view: View, spec: InputKeys) -> torch.Tensor:
    """Return the conditioning image for a view of its sample, `(1, 3, H, W)` in [-1, 1].

    For families that train on videos, `(1, 3, 1, H, W)`.

    Raises:
        UserError: The file changed after it was indexed.
    """
    picture = reference_picture(sample, number, spec)
    pixels = _scaled(
        [fit_reference(picture, reference_view(sample.references[number], sample, view))]
    )
    return pixels if len(sample.bucket) == 3 else pixels[:, :, 0]


def reference_picture(sample: Sample, number: int, spec: InputKeys) -> Image.Image:
    """Return a conditioning image as it is.

    Raises:
        UserError: The file changed after it was indexed.
    """
    reference = sample.references[number]
    name = _reference_name(sample)
    with _readable(name):
        content = read_reference(reference, sample, spec)
    _check(name, hashlib.sha256(content).hexdigest(), reference.digest)
    return decode(content)


def first_picture(sample: Sample, view: View, spec: DataKeys) -> Image.Image:
    """Return a view of a video's first frame.

    Raises:
        UserError: The file changed after it was indexed.
    """
    with _readable(sample.name):
        return fit(Image.fromarray(_frames(sample, spec, 1)[0]), view)


def beginning_pixels(sample: Sample, view: View, spec: DataKeys) -> torch.Tensor:
    """Return a view of a video's first frame, then gray frames: `(1, 3, F, H, W)` in [-1, 1]."""
    first = _scaled([first_picture(sample, view, spec)])
    return functional.pad(first, (0, 0, 0, 0, 0, sample.bucket[2] - 1))


def _scaled(frames: Sequence[Image.Image]) -> torch.Tensor:
    """`(1, 3, F, H, W)` in [-1, 1]."""
    pixels = torch.from_numpy(np.stack([np.asarray(frame, dtype=np.float32) for frame in frames]))
    return pixels.permute(3, 0, 1, 2).unsqueeze(0) / 127.5 - 1.0


def _content(sample: Sample, spec: InputKeys) -> bytes:
    content = read_content(sample, spec)
    _check(sample.name, hashlib.sha256(content).hexdigest(), sample.digest)
    return content


def _frames(sample: Sample, spec: DataKeys, count: int) -> Any:
    from engine.data.read.videos import read_frames

    with open(sample.path, "rb") as file:
        _check(sample.name, hashlib.file_digest(file, "sha256").hexdigest(), sample.digest)
    return read_frames(Path(sample.path), fps=spec.fps, frames=count)


@contextmanager
def _readable(name: str) -> Iterator[None]:
    """Put into words that a file is gone."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{name} is no longer readable ({error.strerror or error})",
            "resume the job: it reads its data again",
        ) from None


def _check(name: str, digest: str, seen: str) -> None:
    # Otherwise latents of one content would be stored under another's name.
    if digest != seen:
        raise UserError(f"{name} changed while the job was preparing its data", "resume the job")


def _reference_name(sample: Sample) -> str:
    return f"the conditioning image of {sample.name}"


@torch.no_grad()
def _encode(family: Family, vae: Any, pixels: torch.Tensor, name: str) -> torch.Tensor:
    latents = family.encode_pictures(vae, pixels)[0].float().cpu().contiguous()
    if nonfinite({"latents": latents}):
        raise NotFiniteError(
            f"the VAE ({type(vae).__name__}) returned values that are not finite for {name}",
            "download the model again, or leave this file out if it is the only one",
        )
    return latents


def _read_ahead(keys: Iterator[str], load: Any) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Load in threads, a few items ahead of the consumer."""
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
