"""Fill the caches before training: ranks share the work, then meet, with no collective open."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.data.buckets import bucket_sizes, divisible, fit, nearest_bucket
from engine.data.cache import TensorCache, fingerprint
from engine.data.index import DataIndex, build_index, open_picture
from engine.precision import compute_dtype
from jobs.paths import cache_home

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from engine.families import Family
    from engine.meeting import Meeting
    from engine.telemetry import Telemetry
    from engine.world import World
    from jobs.rundir import RunDir
    from jobs.spec import JobSpec


@dataclass(frozen=True)
class Prepared:
    """Everything training reads.

    Attributes:
        buckets: Per sample, the `(width, height)` it was fitted to.
        latents: Cache, and per sample its key.
        text: Cache, and per sample the key of its caption.
        prompt_keys: Keys of the validation prompts.
        empty_key: Key of the empty caption, "" when no caption is ever dropped.
    """

    buckets: tuple[tuple[int, int], ...]
    latents: TensorCache
    latent_keys: tuple[str, ...]
    text: TensorCache
    text_keys: tuple[str, ...]
    prompt_keys: tuple[str, ...]
    empty_key: str = ""


def prepare(
    spec: JobSpec,
    family: Family,
    model_root: Path,
    run_dir: RunDir,
    world: World,
    meeting: Meeting,
    telemetry: Telemetry,
) -> Prepared:
    """Index the dataset, encode captions and pictures that no cache has yet.

    When this returns, on every rank, all files exist and neither text encoders nor VAE are left
    in memory.
    """
    index = _index(spec, run_dir, world, meeting, telemetry)
    root = Path(spec.cache_dir) if spec.cache_dir else cache_home()
    text, latents = TensorCache(root, "text"), TensorCache(root, "latents")

    captions = [sample.caption for sample in index.samples]
    empty = [""] if spec.caption_dropout_probability > 0 else []
    wanted = [*captions, *spec.validation_prompts, *empty]
    text_of = _text_keys(spec, text, model_root, wanted)
    texts = {key: caption for caption, key in text_of.items()}
    with _filling("encode", text, texts, world, meeting, telemetry) as (mine, progress):
        _encode_texts(spec, family, model_root, text, mine, world, progress)

    sizes = divisible(
        bucket_sizes(spec.resolution, family.LATENT_STEP),
        family.LATENT_STEP,
        spec.context_parallel_size,
    )
    buckets = tuple(nearest_bucket(s.width, s.height, sizes) for s in index.samples)
    vae_identity = fingerprint(model_root / "vae")
    latent_keys = tuple(
        latents.key(picture=s.digest, vae=vae_identity, size=list(size), dtype="float32")
        for s, size in zip(index.samples, buckets, strict=True)
    )
    pictures = {
        key: (sample.path, size)
        for key, sample, size in zip(latent_keys, index.samples, buckets, strict=True)
    }
    with _filling("latents", latents, pictures, world, meeting, telemetry) as (mine, progress):
        _encode_pictures(family, model_root, latents, mine, world, progress)

    return Prepared(
        buckets,
        latents,
        latent_keys,
        text,
        tuple(text_of[caption] for caption in captions),
        tuple(text_of[prompt] for prompt in spec.validation_prompts),
        text_of.get("", ""),
    )


def _index(
    spec: JobSpec, run_dir: RunDir, world: World, meeting: Meeting, telemetry: Telemetry
) -> DataIndex:
    """Rank 0 looks at the pictures; everyone reads what it found."""
    path = run_dir.root / "data.json"
    if world.main:
        index = build_index(Path(spec.dataset), lambda done: telemetry.moved())
        index.save(path)
        meeting.arrive("index")
        telemetry.say(f"{len(index.samples)} pictures in {index.root}")
        for name, why in index.skipped:
            telemetry.say(f"left out {name}: {why}")
        if index.skipped:
            name, why = index.skipped[0]
            telemetry.warn(f"{len(index.skipped)} pictures left out, such as {name} ({why})")
    meeting.wait("index", ranks=1, waiting=telemetry.moved)
    return DataIndex.load(path)


def _text_keys(
    spec: JobSpec, cache: TensorCache, root: Path, texts: Sequence[str]
) -> dict[str, str]:
    """Text → key."""
    parts = sorted(p for p in root.iterdir() if p.name.startswith(("text_encoder", "tokenizer")))
    identity = [fingerprint(part) for part in parts]
    return {
        text: cache.key(
            text=text,
            encoders=identity,
            family=spec.model_family,
            length=spec.max_sequence_length,
            dtype=str(compute_dtype(spec)),
        )
        for text in dict.fromkeys(texts)
    }


@contextmanager
def _filling(
    phase: str,
    cache: TensorCache,
    wanted: dict[str, Any],
    world: World,
    meeting: Meeting,
    telemetry: Telemetry,
) -> Iterator[tuple[dict[str, Any], Callable[[int], None]]]:
    """A phase in which ranks fill a cache together, and at whose end all of it is there.

    Yields:
        This rank's part of what is missing, and a function that tells how much of it is done.
    """
    keys = list(wanted)
    missing = {key for key in keys if not cache.has(key)}
    # The split is over everything, not over what is missing: by the time another rank looks, this
    # one may have written a file, and two ranks that split different lists would leave gaps.
    mine = {key: wanted[key] for key in keys[world.rank :: world.size] if key in missing}
    with telemetry.phase(phase, len(missing)) as progress:
        yield mine, lambda done: progress(min(done * world.size, len(missing)))
        if mine:  # an encoder was loaded, and is in cycles
            gc.collect()
            if world.device.type == "cuda":
                torch.cuda.empty_cache()
        meeting.arrive(phase)
        meeting.wait(
            phase, waiting=lambda: progress(sum(cache.path(key).exists() for key in missing))
        )


@torch.no_grad()
def _encode_texts(
    spec: JobSpec,
    family: Family,
    root: Path,
    cache: TensorCache,
    mine: dict[str, str],
    world: World,
    progress: Callable[[int], None],
) -> None:
    if not mine:
        return
    pipeline = family.load_text_pipeline(root, compute_dtype(spec))
    pipeline.to(world.device)
    # One at a time: in a batch, rounding would depend on the neighbours, and so on the ranks.
    for done, (key, text) in enumerate(mine.items(), start=1):
        encoded = family.encode(pipeline, text, spec.max_sequence_length)
        cache.write(key, {name: tensor.cpu() for name, tensor in encoded.items()})
        progress(done)


@torch.no_grad()
def _encode_pictures(
    family: Family,
    root: Path,
    cache: TensorCache,
    mine: dict[str, tuple[str, tuple[int, int]]],
    world: World,
    progress: Callable[[int], None],
) -> None:
    if not mine:
        return
    vae = family.load_vae(root, torch.float32).to(world.device).eval()
    for done, (key, (path, size)) in enumerate(mine.items(), start=1):
        latents = family.encode_pictures(vae, to_pixels(path, size).to(world.device))
        cache.write(key, {"latents": latents[0].float().cpu().contiguous()})
        progress(done)


def to_pixels(path: str, size: tuple[int, int]) -> torch.Tensor:
    """A picture fitted to `size`, as `(1, 3, H, W)` in [-1, 1]."""
    picture = np.asarray(fit(open_picture(path), size), dtype=np.float32)
    return torch.from_numpy(picture).permute(2, 0, 1).unsqueeze(0) / 127.5 - 1.0
