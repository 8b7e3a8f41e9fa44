"""Provide encoded texts, from the cache or from text encoders that stay in memory."""

from __future__ import annotations

import hashlib
import json
import logging
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import torch
from transformers.utils import is_torchvision_available

from engine.data.encode.latents import keyframe, reference_picture
from engine.data.encode.tensor_cache import (
    TensorCache,
    find_missing,
    fingerprint,
    nonfinite,
    piece_size,
    pieces,
    together,
)
from engine.data.index.views import (
    FITTING,
    View,
    as_keyframe,
    as_seen,
    fit,
    fit_whole,
    keyframe_facts,
    keyframe_name,
    reference_view,
    view_of,
)
from engine.data.read.images import DECODER
from engine.families.shared.base import TEXT_PARTS
from engine.families.shared.clip_family import ClipFamily
from engine.model import text_encoders
from engine.model.adapters.text_lora import adapted_encoders, names_of
from engine.model.packing import packing_of
from engine.model.precision import compute_dtype
from jobs.errors import NotFiniteError
from jobs.run.events import Freed
from jobs.spec.families import (
    frames_beside,
    needs_first_frame,
    needs_last_frame,
    references_of,
    sees_images,
    takes_keyframes,
)
from jobs.spec.rules.lora_conflicts import trains_text
from jobs.untrusted.text import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from PIL.Image import Image

    from engine.data.index.data_index import Sample
    from engine.families import Family
    from engine.families.shared.references import Conditioning
    from engine.model.release import Released
    from engine.ranks.telemetry import Telemetry
    from engine.ranks.world import World
    from engine.run_context import RunContext
    from jobs.spec.job_spec import DataPlanKeys, InputKeys, JobSpec
    from jobs.spec.keys.job import JobKeys
    from jobs.spec.keys.prompts import SampleRequest


_REMEMBERED: Final = 256  # encoded texts kept in memory when there is no cache on disk
_QUOTED: Final = 60  # characters of a text


@dataclass(frozen=True)
class ImageInput:
    """An image that is encoded together with a text.

    Attributes:
        key: Everything that determines its pixels, as part of a cache key.
        read: Returns the image as the pipeline passes it to its encoder.
        name: The image's name in messages.
    """

    key: str
    read: Callable[[], Image] = field(compare=False, repr=False)
    name: str = field(compare=False, repr=False)


class Text(NamedTuple):
    """A text to encode.

    Attributes:
        words: The text.
        negative: Whether it is a negative prompt; some pipelines encode those differently.
        images: The images that are encoded with it, for models that support this.
    """

    words: str
    negative: bool = False
    images: tuple[ImageInput, ...] = ()


NO_TEXT: Final = Text("", negative=True)
"""Used when a sample's caption is dropped: the unconditional input of guidance."""


class Texts(Protocol):
    """Encoded texts.

    Attributes:
        ahead: Whether a background thread may request texts while the model trains.
    """

    ahead: bool

    def encoded(self, text: Text) -> dict[str, torch.Tensor]:
        """Return a text as encoded by the family's `encode`, without a batch dimension."""
        ...

    def close(self) -> None:
        """Release resources; no text is requested after this."""
        ...


class CachedTexts:
    """Texts that were all encoded before training. No encoder stays in memory."""

    ahead = True

    def __init__(self, cache: TensorCache, keys: TextKeys) -> None:
        self._cache = cache
        self._keys = keys

    def encoded(self, text: Text) -> dict[str, torch.Tensor]:
        return self._cache.read(self._keys(text))

    def close(self) -> None:
        pass


class ResidentTexts:
    """Texts that are encoded on first use, by encoders that stay in memory.

    Args:
        run: The job, on a single rank.
        cache: Where to store encoded texts; None keeps only the most recent in memory.
        keys: Maps a text to its key in `cache`.
    """

    ahead = False  # encoders and training share the device

    def __init__(self, run: RunContext, cache: TensorCache | None, keys: TextKeys) -> None:
        self._spec = run.spec
        self._family = run.family
        self._cache = cache
        self._keys = keys
        self._stack = ExitStack()
        self._pipeline = self._stack.enter_context(_load_pipeline(run, sharded=False))
        self._remember = lru_cache(maxsize=_REMEMBERED)(self._encode)
        run.telemetry.say("the text encoders stay in memory during training")

    def encoded(self, text: Text) -> dict[str, torch.Tensor]:
        if self._cache is None:
            return self._remember(text)
        key = self._keys(text)
        if self._cache.check(key) != "sound":
            self._cache.write(key, self._encode(text))
        return self._cache.read(key)

    def close(self) -> None:
        self._remember.cache_clear()
        self._stack.close()

    def _encode(self, text: Text) -> dict[str, torch.Tensor]:
        return _encode(self._family, self._pipeline, text, self._spec)


class TrainedTexts:
    """Texts that are encoded on every use, since the encoders' adapters are being trained.

    Args:
        run: The job, on any number of ranks; each rank holds all of the encoders.

    Attributes:
        encoders: Encoders with adapters by their name in the pipeline, to attach to the denoiser
            (`engine.model.adapters.text_lora.attach`).
    """

    ahead = False  # encoders and training share the device

    def __init__(self, run: RunContext) -> None:
        assert isinstance(run.family, ClipFamily), "the job's rules refuse others"
        self._family = run.family
        self._device = run.world.device
        self._pipeline = text_encoders.load_resident(
            run.family,
            run.model_root,
            compute_dtype(run.spec),
            run.world,
            say=run.telemetry.say,
            progress=lambda read: run.telemetry.moved(),
        )
        names = names_of(run.family, run.model_root)
        parts = {name: getattr(self._pipeline, name) for name in names}
        self.encoders = adapted_encoders(parts, run.spec)
        run.telemetry.say("the text encoders stay in memory: LoRAs are trained on them")

    def together(self, texts: Sequence[Text]) -> dict[str, torch.Tensor]:
        """Return texts as encoded by the family's `encode`, each `(B, …)`, on the device.

        The results carry gradients unless gradients are disabled.
        """
        # Sampling requests prompts within autocast, which would encode them differently from
        # training.
        with torch.autocast(self._device.type, enabled=False):
            encoded = self._family.encode_together(
                self._pipeline, [text.words for text in texts], [text.negative for text in texts]
            )
        # The pipeline warns about every overlong text, which would repeat in each step.
        logging.getLogger(type(self._pipeline).__module__).setLevel(logging.ERROR)
        return encoded

    def encoded(self, text: Text) -> dict[str, torch.Tensor]:
        return {name: tensor[0] for name, tensor in self.together([text]).items()}

    def close(self) -> None:
        pass


class TextKeys:
    """Map a text to its key in the text cache."""

    def __init__(self, spec: JobSpec, family: Family, cache: TensorCache, root: Path) -> None:
        parts = sorted(p for p in root.iterdir() if p.name.startswith(TEXT_PARTS))
        if sees_images(spec):
            image_parts = ("image_encoder", "image_processor", "processor")
            parts += [root / name for name in image_parts if (root / name).is_dir()]
        self._cache = cache
        self._apart = family.NEGATIVES_APART
        self._facts: dict[str, Any] = {
            "encoders": [fingerprint(part) for part in parts],
            "family": spec.model_family,
            # Models of a family share encoders, but their pipelines may call them differently.
            "pipeline": family.pipeline_class().__name__,
            "settings": family.settings(),
            "length": spec.max_sequence_length,
            "dtype": str(compute_dtype(spec)),
        }
        if spec.text_encoder_precision != "none":
            self._facts["packed"] = spec.text_encoder_precision
        if family.ENCODING:
            self._facts["encoding"] = family.ENCODING
        self._with_images: dict[str, Any] = {
            "resized_by": "torchvision" if is_torchvision_available() else "pillow",
            "tf32": spec.allow_tf32,
        }
        if family.ENCODING_WITH_IMAGES:
            self._with_images["encoding_with_images"] = family.ENCODING_WITH_IMAGES

    def __call__(self, text: Text) -> str:
        extra: dict[str, Any] = {"negative": True} if text.negative and self._apart else {}
        if text.images:
            extra |= {"looks": [img.key for img in text.images]} | self._with_images
        return self._cache.key(text=text.words, **extra, **self._facts)


def prepare_texts(run: RunContext, directory: Path, texts: Iterable[Text]) -> Texts:
    """Encode the texts, or set up their encoders, as the job requests.

    Args:
        run: The job with its defaults resolved (`jobs.spec.rules.cascade`), and its ranks.
        directory: The root of all caches.
        texts: Every text that may be requested.

    Raises:
        StoppedError: A stop was requested on any rank; raised on all of them.
        NotFiniteError: An encoder returned non-finite values. Nothing of that text is cached.
    """
    cache = TensorCache(directory, "text")
    spec, family = run.spec, run.family
    if trains_text(spec):
        return TrainedTexts(run)
    keys = TextKeys(spec, family, cache, run.model_root)
    if not spec.unload_text_encoder:
        kept = cache if spec.cache_text_embeddings else None
        return ResidentTexts(run, kept, keys)
    text_of = {keys(text): text for text in dict.fromkeys(texts)}
    missing = find_missing(cache, list(text_of), run)
    sharded = bool(missing) and _agree(run)
    with together("encode", len(missing), run) as shared:
        if sharded:
            with _load_pipeline(run, sharded=True) as pipeline:
                rounds = (_lockstep(keys, run.world) for keys in _alike(missing, text_of))
                for key, mine in chain.from_iterable(rounds):
                    if text_encoders.agree_to_stop(pipeline, run.stop_requested()):
                        break
                    content = _encode(family, pipeline, text_of[key], spec)
                    if mine:
                        cache.write(key, content)
                        shared.add()
        else:
            with ExitStack() as stack:
                pipeline = None
                size = piece_size(len(missing), run.world.size)
                for piece in pieces(missing, size, "encode", run):
                    pipeline = pipeline or stack.enter_context(_load_pipeline(run, sharded=False))
                    for key in piece:
                        if cache.check(key) != "sound":  # another job may have been faster
                            cache.write(key, _encode(family, pipeline, text_of[key], spec))
                        shared.add()
    return CachedTexts(cache, keys)


def _load_pipeline(run: RunContext, *, sharded: bool) -> AbstractContextManager[Any]:
    return text_encoders.text_pipeline(
        run.family,
        run.model_root,
        compute_dtype(run.spec),
        run.world,
        sharded=sharded,
        packing=packing_of(run.spec.text_encoder_precision),
        say=run.telemetry.say,
        progress=lambda read: run.telemetry.moved(),
        freed=partial(_report_freed, run.telemetry),
    )


def _agree(run: RunContext) -> bool:
    sharded, reason = text_encoders.agree_on_sharding(
        run.spec.shard_text_encoders,
        run.model_root,
        compute_dtype(run.spec),
        run.world,
        run.run_dir,
        run.barrier,
        packing_of(run.spec.text_encoder_precision),
    )
    run.telemetry.say(f"text encoders {'are sharded' if sharded else 'are not sharded'}: {reason}")
    return sharded


def _lockstep(missing: list[str], world: World) -> Iterable[tuple[str, bool]]:
    """Yield one key per round for this rank, and whether the rank should store the result.

    All ranks must run the same number of forwards, so a rank that runs out of keys encodes the last
    one again and discards the result.
    """
    for first in range(0, len(missing), world.size):
        number = first + world.rank
        yield missing[min(number, len(missing) - 1)], number < len(missing)


def _alike(missing: Sequence[str], text_of: Mapping[str, Text]) -> Iterable[list[str]]:
    """Split keys into those of texts alone, and those with images, which run other layers."""
    for with_images in (False, True):
        yield [key for key in missing if bool(text_of[key].images) is with_images]


@torch.no_grad()
def _encode(
    family: Family, pipeline: Any, text: Text, spec: DataPlanKeys
) -> dict[str, torch.Tensor]:
    # Encode one text at a time: in a batch, rounding would depend on the other texts and therefore
    # on the number of ranks.
    with text_encoders.track_nonfinite(pipeline) as broken:
        if text.images:
            encoded = family.encode_with_images(
                pipeline, text.words, spec.max_sequence_length, [img.read() for img in text.images]
            )
        else:
            encoded = family.encode(
                pipeline, text.words, spec.max_sequence_length, negative=text.negative
            )
        encoded = {name: tensor.cpu() for name, tensor in encoded.items()}
        if nonfinite(encoded):
            hint = "download the model again, its files may be damaged"
            if spec.mixed_precision == "fp16":
                hint = "set mixed_precision: bf16 (or no), fp16 is too narrow for some encoders"
            raise NotFiniteError(
                f"{broken()} returned values that are not finite for {_named(text)}", hint
            )
    return encoded


def _named(text: Text) -> str:
    """Return a text's name in messages: its first words, and the images encoded with it."""
    name, words = "the empty caption", one_line(text.words)
    if words:
        words = words if len(words) <= _QUOTED else f"{words[:_QUOTED].rstrip()} …"
        name = f"the {'negative prompt' if text.negative else 'text'} “{words}”"
    return " with ".join([name, *(img.name for img in text.images)])


def _report_freed(telemetry: Telemetry, memory: Released) -> None:
    facts = asdict(memory)
    if left := facts.pop("left"):
        telemetry.warn(left)
    mib = {name: f"{size / 2**20:.0f} MiB" for name, size in facts.items() if isinstance(size, int)}
    telemetry.say(
        f"text encoders freed: {mib['held']} of weights; {memory.measure} {mib['before']} "
        f"before, {mib['loaded']} with them, {mib['after']} after"
    )
    telemetry.emit(Freed("text encoders", **facts))


# -- images encoded with texts --------------------------------------------------------------
# Some models encode images together with a text: those of a sample, or those of a prompt.


def images_of(sample: Sample, view: int, spec: JobSpec, frames: int = 0) -> tuple[ImageInput, ...]:
    """Return the images that are encoded with a sample's captions; () for most models.

    Args:
        sample: The sample.
        view: Index of the view.
        spec: The job.
        frames: How many frames of its own the model is given: 1 the first, 2 the last too. Models
            that need the first get it anyway.
    """
    if not sees_images(spec):
        return ()
    shown = view_of(sample, view, spec)
    if sample.from_first:
        count = 1 + needs_last_frame(spec) if needs_first_frame(spec) else frames
        return tuple(_of_frame(sample, number, shown, spec) for number in range(count))
    return tuple(
        _of_reference(sample, number, shown, spec) for number in range(len(sample.references))
    )


def prompt_images(
    request: SampleRequest, pictures: Mapping[str, Conditioning], spec: JobKeys
) -> tuple[ImageInput, ...]:
    """Return the images that are encoded with a prompt; () for most models.

    Args:
        request: The prompt, with the paths of its conditioning images.
        pictures: The loaded images by path (`engine.data.prepare.read_pictures`).
        spec: The job.
    """
    if not sees_images(spec):
        return ()
    size, images = (request.width, request.height), []
    for number, path in enumerate(request.conditioning):
        picture = pictures[path]
        assert not isinstance(picture, list), "no encoder of texts sees videos"
        if takes_keyframes(spec):
            images.append(_of_picture(path, as_keyframe(picture, size, number)))
        else:
            images.append(_of_prompt(path, picture, spec, size))
    return tuple(images)


def _of_frame(sample: Sample, number: int, shown: View, spec: InputKeys) -> ImageInput:
    key = _key(sample.digest, shown.facts() | keyframe_facts(sample, number, spec))
    read = partial(keyframe, sample, number, shown, spec)
    return ImageInput(key, read, keyframe_name(sample, number))


def _of_reference(sample: Sample, number: int, shown: View, spec: InputKeys) -> ImageInput:
    reference = sample.references[number]
    view = reference_view(reference, sample, shown)

    def read() -> Image:
        return as_seen(reference_picture(sample, number, spec), view, reference.seen)

    key = _key(reference.digest, view.facts() | {"seen": list(reference.seen)})
    return ImageInput(key, read, f"the conditioning image of {sample.name}")


def _of_prompt(path: str, picture: Image, spec: JobKeys, size: tuple[int, int]) -> ImageInput:
    takes = references_of(spec)
    if frames_beside(spec, 2) == 1:
        picture = fit(picture, View(size))
    if takes is not None and takes.seen is not None:
        picture = fit_whole(picture, takes.seen, None)
    return _of_picture(path, picture)


def _of_picture(path: str, picture: Image) -> ImageInput:
    digest = hashlib.sha256(picture.tobytes()).hexdigest()
    return ImageInput(_key(digest, {"size": list(picture.size)}), lambda: picture, path)


def _key(content: str, facts: Mapping[str, Any]) -> str:
    everything = {"content": content, "decoder": DECODER, "fitting": FITTING, **facts}
    return json.dumps(everything, sort_keys=True)
