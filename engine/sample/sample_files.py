"""A sample on the disk: a PNG, and in a JSON file what it was made from.

Videos have an MP4 too, and images in layers a PNG for each of them, `00-1.png` at the back.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from fractions import Fraction
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from PIL.Image import alpha_composite
from PIL.Image import new as new_image
from PIL.PngImagePlugin import PngInfo

from jobs.run.rundir import write_atomic

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from PIL.Image import Image

    from engine.families.shared.base import Sound

# Visually lossless, the best first. Builds of FFmpeg without GPL parts lack the first; all have the
# last, which players know but browsers do not.
_ENCODERS: Final = {"libx264": {"crf": "14"}, "mpeg4": {"qmin": "1", "qmax": "2"}}
_BEST: Final = next(iter(_ENCODERS))
_SOUND_CODEC: Final = "aac"


def sample_name(number: int) -> str:
    """Return the image of a job's prompt with this number."""
    return f"{number:02d}.png"


def write_sample(
    frames: Sequence[Image], facts: Mapping[str, Any], path: Path, sound: Sound | None = None
) -> None:
    """Write the files; each is replaced as a whole.

    Args:
        frames: An image, or the frames of a video, of which the middle one is the image; or the
            layers of an image, from the back.
        facts: JSON values; `prompt`, `negative_prompt`, `steps`, `guidance`, `seed`, `size`, …,
            of videos also `fps`, and how many `layers` there are.
        path: Of the image; the other files have the suffixes `.mp4` and `.json`.
        sound: Of a video.

    Raises:
        OSError: They cannot be written.
    """
    notes = PngInfo()
    notes.add_itxt("parameters", _in_words(facts))
    layers = frames if facts.get("layers") else []
    picture = stacked(layers) if layers else frames[len(frames) // 2]
    for number, layer in enumerate(layers, start=1):
        beside = path.with_name(f"{path.stem}-{number}.png")
        _replace(beside, partial(layer.save, format="PNG"))
    _replace(path, lambda aside: picture.save(aside, format="PNG", pnginfo=notes))
    write_atomic(path.with_suffix(".json"), json.dumps(facts, ensure_ascii=False) + "\n")
    if len(frames) > 1 and not layers:
        _replace(
            path.with_suffix(".mp4"), lambda aside: write_video(frames, facts["fps"], aside, sound)
        )


def stacked(layers: Sequence[Image]) -> Image:
    """Return what layers show together, the first one at the back, on white."""
    white = new_image("RGBA", layers[0].size, "white")
    return reduce(alpha_composite, layers, white).convert("RGB")


def _replace(path: Path, write: Callable[[Path], None]) -> None:
    aside = path.with_name(f".{path.name}.tmp")
    try:
        write(aside)
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def video_encoder() -> tuple[str, str]:
    """Return the best encoder of PyAV's FFmpeg, and a note for the log if it is not the usual one.

    Raises:
        OSError: PyAV is not installed, or its FFmpeg has no encoder that we know.
    """
    try:
        import av
    except ImportError:
        raise OSError("videos need PyAV: pip install 'fsdp-tui[video]'") from None
    for name in _ENCODERS:
        with suppress(av.codec.codec.UnknownCodecError):
            av.Codec(name, "w")
            note = f"PyAV has no {_BEST} here: videos are in {name}, which browsers may not play"
            return name, "" if name == _BEST else note
    raise OSError(
        f"PyAV's FFmpeg has none of the encoders {', '.join(_ENCODERS)}: "
        "pip install --force-reinstall --only-binary av av"
    )


def write_video(frames: Sequence[Image], fps: float, path: Path, sound: Sound | None) -> None:
    """Write H.264 (or what else this FFmpeg encodes) and AAC.

    Raises:
        OSError: It cannot be written, or the library that does it is not installed.
    """
    encoder, _ = video_encoder()
    import av

    try:
        with av.open(str(path), "w", format="mp4") as file:
            stream: Any = file.add_stream(
                encoder, rate=Fraction(fps).limit_denominator(1001), options=_ENCODERS[encoder]
            )
            # Half as many pixels of colour each way: sides are even, as all families' are.
            stream.width, stream.height = frames[0].size
            stream.pix_fmt = "yuv420p"
            audio: Any = None
            if sound is not None:  # all streams are added before the first packet
                audio = file.add_stream(_SOUND_CODEC, rate=sound.rate, layout="stereo")
            for frame in frames:
                file.mux(stream.encode(av.VideoFrame.from_image(frame)))
            file.mux(stream.encode())
            if sound is not None:
                samples = np.ascontiguousarray(sound.samples.numpy())
                whole = av.AudioFrame.from_ndarray(samples, format="fltp", layout="stereo")
                whole.sample_rate, whole.pts = sound.rate, 0
                whole.time_base = Fraction(1, sound.rate)
                file.mux(audio.encode(whole))
                file.mux(audio.encode())
    except (ValueError, av.FFmpegError) as error:  # such as a full disk
        raise OSError(str(error)) from error


def _in_words(facts: Mapping[str, Any]) -> str:
    """Format the facts as web interfaces write them, for image viewers.

    Prompt, negative prompt, then the rest.
    """
    guidance = {"CFG scale": facts["guidance"]}
    if facts.get("guidance_embedded"):
        guidance = {"CFG scale": facts["true_cfg_scale"], "Distilled CFG Scale": facts["guidance"]}
    named = {
        "Steps": facts["steps"],
        **guidance,
        "Seed": facts["seed"],
        "Size": "x".join(map(str, facts["size"])),
        "Model": facts["family"],
        "Training step": facts["step"],
    }
    lines = [facts["prompt"]]
    if facts["negative_prompt"] is not None:
        lines.append(f"Negative prompt: {facts['negative_prompt']}")
    return "\n".join([*lines, ", ".join(f"{name}: {value}" for name, value in named.items())])
