"""Videos whose frames say which they are."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any

import av
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


def level(number: int) -> int:
    """The grey of the frame with that number."""
    return 10 + 5 * number


def record(
    path: Path,
    pictures: Iterable[np.ndarray] | int,
    rate: int | Fraction = 8,
    times: list[int] | None = None,
    *,
    codec: str = "mpeg4",
    options: dict[str, str] | None = None,
    sound: np.ndarray | None = None,
    **settings_of_codec: Any,
) -> Path:
    """Write a video; a number of pictures means as many greys. `times` are in milliseconds.

    `sound` is `(2, n)` at 16 kHz.
    """
    if isinstance(pictures, int):
        pictures = [np.full((48, 64, 3), level(n), np.uint8) for n in range(pictures)]
    with av.open(str(path), "w", options=options or {}) as container:
        stream: Any = None
        for number, picture in enumerate(pictures):
            if stream is None:
                stream = container.add_stream(codec, rate=rate)
                stream.height, stream.width = picture.shape[:2]
                stream.pix_fmt = "yuv420p"
                stream.codec_context.qmin = stream.codec_context.qmax = 1
                for name, value in settings_of_codec.items():
                    setattr(stream.codec_context, name, value)
                if sound is not None:
                    heard: Any = container.add_stream("aac", rate=16_000, layout="stereo")
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            if times:
                stream.codec_context.time_base = frame.time_base = Fraction(1, 1000)
                frame.pts = times[number]
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
        if sound is not None:
            whole = av.AudioFrame.from_ndarray(sound.astype(np.float32), "fltp", "stereo")
            whole.sample_rate, whole.pts, whole.time_base = 16_000, 0, Fraction(1, 16_000)
            container.mux(heard.encode(whole))
            container.mux(heard.encode())
    return path
