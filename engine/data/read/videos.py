"""Read videos as frames at a constant rate, by the times at which a player would show them.

Reading uses PyAV, which is optional and imported only here, inside functions.

Time starts when the first frame is shown and ends after the last frame's duration in the file. The
frame for an instant is chosen by these times alone, so a variable frame rate, a gap or a repeated
frame shifts nothing.
"""

from __future__ import annotations

import hashlib
import math
import struct
from contextlib import closing, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, dropwhile
from typing import TYPE_CHECKING, Any, Final

from jobs.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator
    from pathlib import Path
    from types import ModuleType

    import numpy as np
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

# Allow only containers that hold video data themselves: a playlist named like a video would make
# FFmpeg open other files and URLs.
_CONTAINERS: Final = "mov,matroska,avi,gif,mpegts,mpeg,flv,asf,ogg,mxf,yuv4mpegpipe"
_ALMOST: Final = Fraction(1, 10)  # of a frame: rounding to milliseconds must not change the count
_MISSING: Final = Fraction(1, 2)  # seconds that a file may be shorter than its header says
_UNSPECIFIED: Final = 2  # FFmpeg's color space value for frames that do not name one


class VideoError(Exception):
    """The reason why a video cannot be used, in a few words."""


@dataclass(frozen=True)
class VideoFacts:
    """The facts of a fully decoded video.

    Args:
        width: In pixels, as displayed: upright, with square pixels.
        height: In pixels, as displayed.
        frames: Number of displayed frames, counted while decoding, not taken from the container.
        fps: Mean frames per second, also if the rate varies.
        digest: SHA-256 of the file, in hexadecimal.
    """

    width: int
    height: int
    frames: int
    fps: float
    digest: str


def inspect_video(path: Path) -> VideoFacts:
    """Decode an entire video and report its facts.

    Raises:
        VideoError: It cannot be used: not a video, without frames, truncated or damaged.
        UserError: PyAV is not installed.
    """
    count = 0
    last: _DisplayedFrame | None = None
    for shown in _shown(path):
        count, last = count + 1, shown
    assert last is not None  # a video without frames raises an error
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return VideoFacts(*last.canvas.displayed, count, float(count / last.end), digest)


def frames_at(look: VideoFacts, fps: float) -> int:
    """Return how many frames the video has at that rate, which is what `read_frames` can return."""
    return math.ceil(look.frames / look.fps * fps - float(_ALMOST))


def read_frames(path: Path, *, fps: float, frames: int, start: float = 0.0) -> np.ndarray:
    """Return frames at a constant rate, each the nearest in time (the earlier of two).

    Memory use is the result plus the few frames that the decoder works on.

    Args:
        path: The video.
        fps: Frames per second of the result.
        frames: Number of frames.
        start: Seconds from the first frame of the video to the first of the result.

    Returns:
        (frames, H, W, 3) uint8, RGB as displayed.

    Raises:
        VideoError: The video is too short or cannot be used.
        UserError: PyAV is not installed.
    """
    import numpy as np

    if fps <= 0 or frames < 1 or start < 0:
        raise ValueError(f"no frames to read: fps {fps}, frames {frames}, start {start}")
    first, step = Fraction(start), 1 / Fraction(fps)
    result = np.empty((0, 0, 0, 3), np.uint8)
    done = 0
    with closing(_shown(path, first)) as video:
        for shown in video:
            before = done
            while done < frames and shown.is_nearest_to(first + done * step, step):
                done += 1
            if done == before:
                continue
            if before == 0:
                width, height = shown.canvas.displayed
                result = np.empty((frames, height, width, 3), np.uint8)
            result[before:done] = shown.canvas.draw(shown.frame)
            if done == frames:
                return result
    raise VideoError(f"too short ({float(shown.end):.2f} s)")


def has_sound(path: Path) -> bool:
    """Return whether a video has sound, which its header says; False if it cannot be opened.

    Raises:
        UserError: PyAV is not installed.
    """
    try:
        with _opened(path) as (container, _):
            return bool(container.streams.audio)
    except VideoError:
        return False


def read_sound(path: Path, *, seconds: float, rate: int) -> np.ndarray | None:
    """Return the sound of a video's beginning; silence before it starts and after it ends.

    Args:
        path: The video.
        seconds: From the first frame of the video on.
        rate: Samples per second of the result.

    Returns:
        (2, n) float32, left and right, in [-1, 1]; None if the video has no sound.

    Raises:
        VideoError: The video cannot be used.
        UserError: PyAV is not installed.
    """
    import numpy as np

    samples = np.zeros((2, round(seconds * rate)), np.float32)
    place: int | None = None
    with _opened(path) as (container, video):
        if not container.streams.audio:
            return None
        stream = container.streams.audio[0]
        begin = (video.start_time or 0) * (video.time_base or Fraction(0))
        resampler = _av().AudioResampler(format="fltp", layout="stereo", rate=rate)
        decoded = (frame for packet in container.demux(stream) for frame in stream.decode(packet))
        for frame in chain(decoded, [None]):
            if place is None and frame is not None:
                time = (frame.pts or 0) * (frame.time_base or Fraction(0))
                place = round((time - begin) * rate)
            for part in resampler.resample(frame):
                place = _put(part.to_ndarray(), samples, place or 0)
            if (place or 0) >= samples.shape[1]:
                break
    return samples


def _put(part: np.ndarray, samples: np.ndarray, place: int) -> int:
    """Copy what lies inside `samples`; return where the next part begins."""
    end = place + part.shape[1]
    first, last = max(place, 0), min(end, samples.shape[1])
    if first < last:
        samples[:, first:last] = part[:, first - place : last - place]
    return end


@dataclass(frozen=True)
class _DisplayedFrame:
    """A frame with its display interval, in seconds since the first frame."""

    frame: VideoFrame
    time: Fraction
    end: Fraction
    canvas: _Canvas
    is_last: bool = False

    def is_nearest_to(self, instant: Fraction, step: Fraction) -> bool:
        """Return whether no later frame is nearer. The last frame ends slightly early."""
        if self.is_last:
            return instant < self.end - step * _ALMOST
        return instant <= (self.time + self.end) / 2


def _shown(path: Path, start: Fraction = Fraction(0)) -> Generator[_DisplayedFrame]:
    """Yield the frames in display order, starting with one shown at `start` or earlier."""
    with _opened(path) as (container, stream):
        decoded = _decoded(container, stream)
        first = next(decoded, None)
        if first is None:
            raise VideoError("no frames")
        if start == 0:
            yield from _timed(chain([first], decoded), stream, first)
            return
        nearer = _seek(container, stream, _time(first) + start)
        if nearer is not None:
            yield from _timed(nearer, stream, first)
            return
    yield from _shown(path)  # seeking failed: decode from the beginning


def _seek(
    container: InputContainer, stream: VideoStream, instant: Fraction
) -> Iterator[VideoFrame] | None:
    """Return the frames from a key frame at or before the instant, or None if seeking failed.

    Seek only in containers that store a time with every frame. In others (MPEG), times are
    extrapolated from the last one seen and differ after a seek.
    """
    if _kind(container) not in ("mov", "matroska") or stream.time_base is None:
        return None
    try:
        container.seek(math.floor(instant / stream.time_base), stream=stream)
    except _av().FFmpegError:
        return None
    frames = dropwhile(lambda frame: not frame.key_frame, _decoded(container, stream))
    first = next(frames, None)
    if first is None or _time(first) > instant:
        return None
    return chain([first], frames)


def _timed(
    frames: Iterable[VideoFrame], stream: VideoStream, first: VideoFrame
) -> Iterator[_DisplayedFrame]:
    """Yield each frame with the time until the next, and the last with its duration in the file."""
    canvas = _Canvas.of(first, stream)
    held: tuple[VideoFrame, Fraction] | None = None
    gap = 1 / (stream.guessed_rate or Fraction(25))
    for frame in frames:
        time = _time(frame) - _time(first)
        if held is not None:
            if time <= held[1]:  # a repeated or decreasing time: players drop the frame
                continue
            gap = time - held[1]
            yield _DisplayedFrame(*held, time, canvas)
        held = frame, time
    assert held is not None  # the caller has seen a frame
    frame, time = held
    if frame.duration and frame.time_base:
        gap = frame.duration * frame.time_base
    yield _DisplayedFrame(frame, time, time + gap, canvas, is_last=True)


def _decoded(container: InputContainer, stream: VideoStream) -> Iterator[VideoFrame]:
    """Yield frames in decoding order, from the current position of the file."""
    reached = Fraction(0)  # end time over all streams, in seconds: audio may outlast the frames
    for packet in container.demux():
        if packet.pts is not None and packet.time_base is not None:
            reached = max(reached, (packet.pts + (packet.duration or 0)) * packet.time_base)
        # The number in the empty packet that ends a stream is 0 for all of them (PyAV 18.1).
        if packet.stream.index != stream.index:
            continue
        if packet.is_corrupt:
            raise VideoError("truncated or damaged")
        for frame in stream.decode(packet):
            if frame.is_corrupt:  # concealed by the decoder
                raise VideoError("damaged")
            yield frame
    if _ends_early(container, stream, reached):
        raise VideoError("truncated")


def _ends_early(container: InputContainer, stream: VideoStream, reached: Fraction) -> bool:
    """Return whether the header promised more frames, in formats with reliable headers."""
    match _kind(container):
        case "mov" | "matroska":
            promised = Fraction(container.duration or 0, 1_000_000)
        case "avi":
            promised = stream.frames / (stream.average_rate or Fraction(25))
        case _:
            return False
    return promised - reached > max(_MISSING, promised / 50)


def _kind(container: InputContainer) -> str:
    return container.format.name.split(",")[0]


def _time(frame: VideoFrame) -> Fraction:
    if frame.pts is None or frame.time_base is None:
        raise VideoError("frames without timestamps")
    return frame.pts * frame.time_base


@dataclass(frozen=True)
class _Canvas:
    """The geometry that turns stored frames into displayed ones.

    Args:
        size: Width and height with square pixels, as stored.
        swap: Whether rows become columns, as in a video filmed in portrait mode.
        flip: Whether to flip vertically and horizontally after that.
    """

    size: tuple[int, int]
    swap: bool
    flip: tuple[bool, bool]

    @classmethod
    def of(cls, frame: VideoFrame, stream: VideoStream) -> _Canvas:
        aspect = stream.sample_aspect_ratio or Fraction(1)
        if not Fraction(1, 4) <= aspect <= 4:  # damaged: no camera has such pixels
            aspect = Fraction(1)
        size = max(1, round(frame.width * aspect)), frame.height
        side_data: Any = frame.side_data
        try:
            matrix = bytes(side_data["DISPLAYMATRIX"])
        except KeyError:
            return cls(size, False, (False, False))
        # A point (p, q) of the stored frame is displayed at (a p + c q, b p + d q).
        a, b, _, c, d = struct.unpack_from("=5i", matrix)
        if abs(b) > abs(a):
            return cls(size, True, (b < 0, c < 0))
        return cls(size, False, (d < 0, a < 0))

    @property
    def displayed(self) -> tuple[int, int]:
        """Return the displayed width and height."""
        return (self.size[1], self.size[0]) if self.swap else self.size

    def draw(self, frame: VideoFrame) -> np.ndarray:
        """Return the frame as (H, W, 3) uint8."""
        width, height = self.size
        space = None
        if frame.colorspace == _UNSPECIFIED:  # players do this, while FFmpeg assumes SD
            space = "ITU709" if frame.height >= 720 else "ITU601"
        pixels = frame.to_ndarray(format="rgb24", width=width, height=height, src_colorspace=space)
        if self.swap:
            pixels = pixels.transpose(1, 0, 2)
        upside_down, mirrored = self.flip
        return pixels[:: -1 if upside_down else 1, :: -1 if mirrored else 1]


@contextmanager
def _opened(path: Path) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Open a video file, turning all of FFmpeg's errors into one type."""
    av = _av()
    try:
        with path.open("rb") as file:
            head = file.read(12)
    except OSError as error:
        raise VideoError(f"cannot be read ({error.strerror})") from None
    if not head:
        raise VideoError("empty file")
    try:
        container = av.open(
            str(path.absolute()),
            container_options={"format_whitelist": _CONTAINERS, "protocol_whitelist": "file"},
            metadata_errors="replace",
        )
    except (av.FFmpegError, ValueError) as error:
        video_header = head[4:8] == b"ftyp" or head[:4] in (b"\x1a\x45\xdf\xa3", b"RIFF")
        raise VideoError("truncated or damaged" if video_header else "not a video") from error
    with container:
        still = av.stream.Disposition.attached_pic  # the cover of an audio file
        videos = [stream for stream in container.streams.video if not stream.disposition & still]
        if not videos:
            raise VideoError("no video stream")
        if getattr(videos[0], "codec_context", None) is None:
            # The file is truncated before its first frame. PyAV before 18.1 crashes when decoding
            # it.
            raise VideoError("truncated or damaged, or an unknown codec")
        videos[0].thread_type = "AUTO"
        try:
            yield container, videos[0]
        except (av.FFmpegError, ValueError) as error:
            raise VideoError("damaged") from error


def _av() -> ModuleType:
    try:
        import av
    except ImportError:
        raise UserError("videos need PyAV", "pip install 'fsdp-tui[video]'") from None
    return av
