"""The images that some models encode with a text: of a sample's captions, and of prompts."""

from __future__ import annotations

import hashlib
import json
from functools import partial
from typing import TYPE_CHECKING, Any

from engine.data.encode.latents import first_picture, reference_picture
from engine.data.encode.texts import ImageInput
from engine.data.index.references import as_seen, fit_whole, reference_view
from engine.data.index.views import FITTING, view_of
from engine.data.read.images import DECODER
from jobs.spec.families import references_of, sees_images

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from PIL.Image import Image

    from engine.data.index.data_index import Sample
    from engine.data.index.views import View
    from jobs.spec.job_spec import InputKeys, JobSpec
    from jobs.spec.keys.job import JobKeys


def looks_of(sample: Sample, view: int, spec: JobSpec) -> tuple[ImageInput, ...]:
    """Return the images that are encoded with a sample's captions; () for most models.

    Args:
        sample: The sample.
        view: Which of its views.
        spec: The job.
    """
    if not sees_images(spec):
        return ()
    shown = view_of(sample, view, spec)
    if sample.from_first:
        facts = shown.facts() | {"frame": 0}
        read = partial(first_picture, sample, shown, spec)
        return (ImageInput(_key(sample.digest, facts), read, f"the first frame of {sample.name}"),)
    return tuple(
        _of_reference(sample, number, shown, spec) for number in range(len(sample.references))
    )


def looks_of_prompt(
    paths: Sequence[str], pictures: Mapping[str, Image], spec: JobKeys
) -> tuple[ImageInput, ...]:
    """Return the images that are encoded with a prompt.

    Args:
        paths: Its conditioning images.
        pictures: From their paths (`engine.data.prepare.read_pictures`).
        spec: The job.
    """
    return tuple(_of_prompt(path, pictures[path], spec) for path in paths if sees_images(spec))


def _of_reference(sample: Sample, number: int, shown: View, spec: InputKeys) -> ImageInput:
    reference = sample.references[number]
    view = reference_view(reference, sample, shown)

    def read() -> Image:
        return as_seen(reference_picture(sample, number, spec), view, reference.seen)

    key = _key(reference.digest, view.facts() | {"seen": list(reference.seen)})
    return ImageInput(key, read, f"the conditioning image of {sample.name}")


def _of_prompt(path: str, picture: Image, spec: JobKeys) -> ImageInput:
    takes = references_of(spec)
    if takes is not None and takes.seen is not None:
        picture = fit_whole(picture, takes.seen, None)
    digest = hashlib.sha256(picture.tobytes()).hexdigest()
    return ImageInput(_key(digest, {"size": list(picture.size)}), lambda: picture, path)


def _key(content: str, facts: Mapping[str, Any]) -> str:
    everything = {"content": content, "decoder": DECODER, "fitting": FITTING, **facts}
    return json.dumps(everything, sort_keys=True)
