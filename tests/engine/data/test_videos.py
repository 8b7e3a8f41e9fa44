"""Videos: which frame is shown when, how it is displayed, and what is refused."""

from __future__ import annotations

import hashlib
import struct
import sys
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from engine.data.encode.latents import beginning_pixels, keyframe_pixels, to_pixels
from engine.data.encode.texts import images_of
from engine.data.index.data_index import build_index
from engine.data.index.views import keyframes_of, view_of
from engine.data.prepare import _numbers_of_frames
from engine.data.read.videos import (
    VideoError,
    frames_at,
    inspect_video,
    read_frames,
    read_sound,
)
from engine.data.report import make_report, summary
from jobs.errors import UserError
from jobs.spec.file.load import load_spec
from tests.support.images.videos import level, record
from tui.text.data_text import facts

if TYPE_CHECKING:
    from pathlib import Path

av = pytest.importorskip("av")

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def numbers(frames: np.ndarray) -> list[int]:
    """Which frames these are, by their grey."""
    means = frames.reshape(len(frames), -1).mean(axis=1)
    found = [round((mean - 10) / 5) for mean in means]
    assert np.abs(means - [level(n) for n in found]).max() < 2, "a mixture of frames"
    return found


def quarters() -> np.ndarray:
    """Red, green / blue, white."""
    picture = np.zeros((48, 64, 3), np.uint8)
    picture[:24, :32], picture[:24, 32:], picture[24:, :32], picture[24:, 32:] = (
        RED,
        GREEN,
        BLUE,
        WHITE,
    )
    return picture


def refusal(path: Path) -> str:
    with pytest.raises(VideoError) as caught:
        inspect_video(path)
    return str(caught.value)


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.avi", "a.mov"])
def test_every_frame_is_seen_once_at_its_own_rate(tmp_path: Path, name: str) -> None:
    path = record(tmp_path / name, 20)
    look = inspect_video(path)
    assert (look.width, look.height, look.frames) == (64, 48, 20)
    assert look.fps == pytest.approx(8, rel=0.001)
    assert look.digest == hashlib.sha256(path.read_bytes()).hexdigest()
    frames = read_frames(path, fps=8, frames=20)
    assert (frames.shape, frames.dtype) == ((20, 48, 64, 3), np.uint8)
    assert numbers(frames) == list(range(20))


def test_a_lower_rate_skips_frames_and_a_higher_one_repeats_them(tmp_path: Path) -> None:
    path = record(tmp_path / "a.mp4", 16)  # at 0, 1/8, 2/8 ...
    assert numbers(read_frames(path, fps=4, frames=8)) == [0, 2, 4, 6, 8, 10, 12, 14]
    # At 0, 1/3, 2/3, 1: 1/3 is nearer to 3/8 than to 2/8.
    assert numbers(read_frames(path, fps=3, frames=4)) == [0, 3, 5, 8]
    # Halfway between two frames it is the earlier one.
    assert numbers(read_frames(path, fps=16, frames=7)) == [0, 0, 1, 1, 2, 2, 3]


@pytest.mark.parametrize("rate", [24, 25, Fraction(30000, 1001), 60])
@pytest.mark.parametrize("name", ["a.mp4", "a.mkv"])
def test_a_video_has_no_frame_too_few_or_too_many(
    tmp_path: Path, name: str, rate: int | Fraction
) -> None:
    look = inspect_video(record(tmp_path / name, 30, rate))
    assert frames_at(look, float(rate)) == 30
    assert frames_at(look, float(rate) / 2) == 15
    assert frames_at(look, float(rate) * 2) == 60


@pytest.mark.parametrize("fps", [3, 8, 16, 29.97])
def test_as_many_frames_as_were_promised_can_be_read(tmp_path: Path, fps: float) -> None:
    path = record(tmp_path / "a.mp4", 16)
    count = frames_at(inspect_video(path), fps)
    assert len(read_frames(path, fps=fps, frames=count)) == count
    with pytest.raises(VideoError, match=r"too short \(2\.00 s\)"):
        read_frames(path, fps=fps, frames=count + 1)


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.avi", "a.mpg"])
def test_a_clip_from_the_middle_is_the_middle_of_the_whole(tmp_path: Path, name: str) -> None:
    codec = "mpeg2video" if name == "a.mpg" else "mpeg4"
    between = {} if name == "a.avi" else {"max_b_frames": 2}
    path = record(tmp_path / name, 48, 24, codec=codec, gop_size=7, **between)
    whole = read_frames(path, fps=24, frames=48)
    assert numbers(whole) == list(range(48))
    for first in (1, 6, 7, 20, 41):
        clip = read_frames(path, fps=24, frames=5, start=first / 24)
        assert np.array_equal(clip, whole[first : first + 5]), f"from frame {first}"
    with pytest.raises(VideoError, match="too short"):
        read_frames(path, fps=24, frames=5, start=44 / 24)
    with pytest.raises(VideoError, match="too short"):
        read_frames(path, fps=24, frames=1, start=60.0)


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv"])
def test_a_variable_rate_is_read_by_its_times(tmp_path: Path, name: str) -> None:
    times = [0, 100, 200, 1000, 1100, 2000]
    path = record(tmp_path / name, 6, 10, times)
    assert numbers(read_frames(path, fps=5, frames=10)) == [0, 2, 2, 2, 3, 3, 4, 4, 5, 5]
    assert numbers(read_frames(path, fps=2, frames=2, start=0.9)) == [3, 4]
    look = inspect_video(path)
    assert look.frames == 6
    assert look.fps == pytest.approx(6 / 2.1, rel=0.01)


def test_time_begins_with_the_first_frame(tmp_path: Path) -> None:
    path = record(tmp_path / "a.mkv", 4, 10, [5000, 5100, 5200, 5300])
    assert numbers(read_frames(path, fps=10, frames=4)) == [0, 1, 2, 3]
    assert numbers(read_frames(path, fps=10, frames=2, start=0.2)) == [2, 3]
    assert inspect_video(path).fps == pytest.approx(10)


# What (1, 0) and (0, 1) of the stored picture become, and where its quarters are seen then.
@pytest.mark.parametrize(
    ("matrix", "seen"),
    [
        ((1, 0, 0, 1), [[RED, GREEN], [BLUE, WHITE]]),
        ((0, 1, -1, 0), [[BLUE, RED], [WHITE, GREEN]]),  # a telephone held upright
        ((-1, 0, 0, -1), [[WHITE, BLUE], [GREEN, RED]]),
        ((0, -1, 1, 0), [[GREEN, WHITE], [RED, BLUE]]),
        ((-1, 0, 0, 1), [[GREEN, RED], [WHITE, BLUE]]),  # its front camera
        ((0, 1, 1, 0), [[RED, BLUE], [GREEN, WHITE]]),
    ],
)
def test_frames_are_turned_upright(
    tmp_path: Path, matrix: tuple[int, int, int, int], seen: list[list[tuple[int, int, int]]]
) -> None:
    path = record(tmp_path / "a.mp4", [quarters()] * 2)
    content = bytearray(path.read_bytes())
    a, b, c, d = (value * 65536 for value in matrix)
    at = content.index(b"tkhd") + 4 + 40
    content[at : at + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    path.write_bytes(content)
    look, frame = inspect_video(path), read_frames(path, fps=8, frames=1)[0]
    height, width = frame.shape[:2]
    assert (look.width, look.height) == (width, height) == ((64, 48) if a else (48, 64))
    for row, y in enumerate((height // 4, height * 3 // 4)):
        for column, x in enumerate((width // 4, width * 3 // 4)):
            assert np.abs(frame[y, x].astype(int) - seen[row][column]).max() < 12


def test_pixels_are_made_square(tmp_path: Path) -> None:
    for aspect, width in ((Fraction(3, 2), 96), (Fraction(16, 15), 68), (Fraction(5), 64)):
        path = record(tmp_path / "a.mkv", [quarters()] * 2, sample_aspect_ratio=aspect)
        look = inspect_video(path)
        assert (look.width, look.height) == (width, 48)
        assert read_frames(path, fps=8, frames=1).shape == (1, 48, width, 3)


@pytest.mark.parametrize(("size", "space"), [((64, 48), "ITU601"), ((1280, 720), "ITU709")])
def test_colours_are_those_that_a_player_assumes(
    tmp_path: Path, size: tuple[int, int], space: str
) -> None:
    wanted = (40, 180, 60)
    width, height = size
    picture = np.full((height, width, 3), wanted, np.uint8)
    frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
    stored = frame.reformat(format="yuv420p", dst_colorspace=space)
    luma = stored.to_ndarray(format="yuv420p")
    with av.open(str(tmp_path / "a.mkv"), "w") as container:
        stream = container.add_stream("ffv1", rate=8)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        container.mux(stream.encode(av.VideoFrame.from_ndarray(luma, format="yuv420p")))
        container.mux(stream.encode())
    found = read_frames(tmp_path / "a.mkv", fps=8, frames=1)[0, 3, 3].astype(int)
    assert np.abs(found - wanted).max() <= 3


def test_reading_stops_where_the_clip_ends(tmp_path: Path) -> None:
    path = record(tmp_path / "a.mp4", 40, options={"movflags": "faststart"}, gop_size=4)
    path.write_bytes(path.read_bytes()[:-60])
    assert numbers(read_frames(path, fps=8, frames=4)) == [0, 1, 2, 3]
    assert "truncated" in refusal(path)


@pytest.mark.parametrize("name", ["a.mp4", "fast.mp4", "a.mkv", "a.avi"])
def test_a_truncated_video_is_refused(tmp_path: Path, name: str) -> None:
    options = {"movflags": "faststart"} if name == "fast.mp4" else {}
    content = record(tmp_path / name, 40, options=options).read_bytes()
    for part in range(1, 16):
        (tmp_path / name).write_bytes(content[: len(content) * part // 20])
        assert len(refusal(tmp_path / name)) < 60


def test_a_refusal_says_why(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    record(tmp_path / "other.mp4", 2)
    assert refusal(path) == "cannot be read (No such file or directory)"
    for content, why in (
        (b"", "empty file"),
        (b"hello" * 100, "not a video"),
        (b"\0" * 5000, "not a video"),
        (b"#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1/a.ts\n#EXT-X-ENDLIST\n", "not a video"),
        (b"ffconcat version 1.0\nfile other.mp4\n", "not a video"),  # which is there
        (b"\0\0\0\x18ftypisom" + bytes(100), "truncated or damaged"),
    ):
        path.write_bytes(content)
        assert refusal(path) == why


def test_the_cover_of_a_song_is_no_video(tmp_path: Path) -> None:
    path = tmp_path / "song.mp4"
    with av.open(str(path), "w") as container:
        song, cover = container.add_stream("aac", rate=8000), container.add_stream("mjpeg", rate=1)
        cover.height, cover.width, cover.pix_fmt = 48, 64, "yuvj420p"
        cover.disposition = av.stream.Disposition.attached_pic.value
        picture = av.VideoFrame.from_ndarray(quarters(), format="rgb24")
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        sound.sample_rate = 8000
        for stream, frame in ((cover, picture), (song, sound)):
            container.mux(stream.encode(frame))
            container.mux(stream.encode())
    assert refusal(path) == "no video stream"


def test_a_frame_that_repeats_a_time_is_dropped(tmp_path: Path) -> None:
    path = record(tmp_path / "a.mkv", 5, 10, [0, 100, 100, 200, 300], codec="ffv1")
    assert inspect_video(path).frames == 4
    assert numbers(read_frames(path, fps=10, frames=4)) == [0, 1, 3, 4]


def test_a_broadcast_may_begin_in_the_middle(tmp_path: Path) -> None:
    path = record(tmp_path / "a.ts", 32, 25, codec="mpeg2video", gop_size=8, max_b_frames=2)
    packets = path.read_bytes()
    path.write_bytes(packets[len(packets) // 188 // 3 * 188 :])
    look = inspect_video(path)
    assert 8 <= look.frames < 32
    read = numbers(read_frames(path, fps=25, frames=look.frames))
    assert read == list(range(read[0], 32))


def test_damage_is_refused_where_it_is_decoded(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (12, 48, 64, 3), dtype=np.uint8)
    times = [5000 + 125 * number for number in range(12)]
    whole = record(tmp_path / "a.mp4", list(noise), 8, times, gop_size=4)
    clip = read_frames(whole, fps=8, frames=3, start=1.0)
    content = bytearray(whole.read_bytes())
    at = content.index(b"mdat") + 4
    for damaged in (at + 2000, len(content) // 3):
        worse = content.copy()
        worse[damaged : damaged + 60] = bytes(60)
        whole.write_bytes(worse)
        assert refusal(whole) == "damaged"
    assert np.array_equal(read_frames(whole, fps=8, frames=3, start=1.0), clip)


def test_a_video_cut_off_before_its_first_frame_is_refused(tmp_path: Path) -> None:
    path = record(tmp_path / "a.mp4", 8, options={"movflags": "faststart"}, codec="libx264")
    content = path.read_bytes()
    for size in range(40, content.index(b"mdat") + 60, 12):
        path.write_bytes(content[:size])
        assert len(refusal(path)) < 60


@pytest.mark.parametrize(
    "flavour",
    [
        *("2.1-i2v-14b-480p", "2.2-i2v-a14b-low", "2.2-ti2v-5b"),
        *("2.1-flf2v-14b-720p", "2.2-flf2v-a14b-low"),
    ],
)
def test_image_to_video_is_given_the_first_frame_and_maybe_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flavour: str
) -> None:
    """In channels of its own, and of one model to an encoder of images too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "data"
    folder.mkdir()
    record(folder / "a.mp4", 6).with_suffix(".txt").write_text("a")
    Image.new("RGB", (64, 48)).save(folder / "b.png")
    (folder / "b.txt").write_text("b")
    values = {"model_family": "wan", "model_flavour": flavour, "dataset": str(folder)}
    spec = load_spec(
        None, values | {"pretrained_model_name_or_path": "m", "resolution": 64, "fps": 8}
    )
    index = build_index(spec)
    sample, *others = index.samples
    assert (sample.name, sample.bucket[2]) == ("a.mp4", 5)
    if flavour == "2.2-ti2v-5b":
        assert (sample.from_first, len(others), images_of(sample, 0, spec)) == (False, 1, ())
        return
    assert sample.from_first
    assert [one.name for one in index.skipped] == ["b.png"]
    assert index.skipped[0].why.startswith("a single frame")
    view = view_of(sample, 0, spec)
    whole, begun = to_pixels(sample, view, spec), beginning_pixels(sample, view, spec)
    assert whole.shape == begun.shape
    given = [0, -1] if "flf2v" in flavour else [0]
    assert torch.equal(begun[:, :, given], whole[:, :, given])
    assert not begun[:, :, 1 : 6 - len(given)].any(), "gray"
    looks = images_of(sample, 0, spec)
    assert len(looks) == (len(given) if flavour.startswith("2.1") else 0)
    assert len({look.key for look in looks}) == len(looks)
    for look, place in zip(looks, given, strict=False):
        seen = torch.from_numpy(np.array(look.read())).permute(2, 0, 1) / 127.5 - 1
        assert torch.equal(seen, whole[0, :, place])


@pytest.mark.parametrize(
    ("shares", "numbers"),
    [
        ({}, [0]),
        ({"first_frame": True}, [1]),
        ({"first_frame": 0.5}, [0, 1]),
        ({"first_frame": True, "last_frame": True}, [2]),
        ({"first_frame": 0.5, "last_frame": 0.5}, [0, 1, 2]),
    ],
)
def test_frames_that_may_be_given_are_encoded_alone_and_seen_with_the_caption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shares: dict[str, Any], numbers: list[int]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (folder := tmp_path / "data").mkdir()
    record(folder / "a.mp4", 24).with_suffix(".txt").write_text("a")
    values = {"model_family": "minimax_h3", "model_flavour": "fl2va", "num_frames": 22}
    values |= {"datasets": [{"path": str(folder), **shares}], "resolution": 64, "fps": 8}
    spec = load_spec(None, values | {"pretrained_model_name_or_path": "m", "max_upscale": 4})
    (sample,) = build_index(spec).samples
    assert list(_numbers_of_frames(sample, spec)) == numbers
    view = view_of(sample, 0, spec)
    whole = to_pixels(sample, view, spec)
    assert keyframes_of(sample, spec) == max(numbers)
    for number in range(max(numbers)):
        expected = whole[:, :, -number : whole.shape[2] if number else 1]
        assert torch.equal(keyframe_pixels(sample, number, view, spec), expected)
    for count in numbers:
        looks = images_of(sample, 0, spec, count)
        assert len({look.key for look in looks}) == count
        for look, frame in zip(looks, (0, -1), strict=False):
            seen = torch.from_numpy(np.array(look.read())).permute(2, 0, 1) / 127.5 - 1
            assert torch.equal(seen, whole[0, :, frame])


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "mov"])
def test_a_video_with_sound_has_the_frames_of_one_without(tmp_path: Path, suffix: str) -> None:
    """The end of its sound is not one of its frames."""
    sound = np.random.default_rng(0).normal(0, 0.1, (2, 16_000))
    silent = record(tmp_path / f"silent.{suffix}", 8)
    heard = record(tmp_path / f"heard.{suffix}", 8, sound=sound)
    assert inspect_video(heard).frames == inspect_video(silent).frames == 8
    frames = [read_frames(path, fps=8, frames=8) for path in (silent, heard)]
    assert np.array_equal(*frames)


def test_sound_is_read_from_the_first_frame_on(tmp_path: Path) -> None:
    """At another rate and in stereo; with silence behind its end."""
    times = np.arange(16_000) / 16_000
    tone = np.where(times < 0.5, 0, 0.4 * np.sin(2 * np.pi * 200 * times))
    path = record(tmp_path / "a.mp4", 16, sound=np.stack([tone, 0 * tone]))
    heard = read_sound(path, seconds=1.5, rate=8_000)
    assert heard is not None
    assert heard.shape == (2, 12_000)
    assert np.abs(heard[0, 100:3_800]).max() < 0.02
    assert np.abs(heard[0, 4_200:7_800] - tone[8_400:15_600:2]).max() < 0.05
    assert np.abs(heard[1]).max() < 0.02
    assert not heard[:, 10_000:].any()
    assert read_sound(record(tmp_path / "b.mp4", 8), seconds=1.0, rate=8_000) is None


@pytest.mark.parametrize("wanted", [True, False])
def test_videos_with_sound_are_counted_where_it_is_trained(tmp_path: Path, wanted: bool) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for name, sound in (("a", np.zeros((2, 16_000))), ("b", None), ("c", np.zeros((2, 16_000)))):
        record(data / f"{name}.mp4", 9, sound=sound).with_suffix(".txt").write_text(name)
    values = {"model_family": "ltx2", "dataset": str(data), "cache_dir": str(tmp_path / "cache")}
    small = {"resolution": 64, "max_upscale": 4, "fps": 8, "train_audio": wanted}
    spec = load_spec(None, {"pretrained_model_name_or_path": "m"} | values | small)
    report = make_report(spec, build_index(spec), None)
    assert report.sound == ([2, 3] if wanted else [])
    assert ("2 of 3 videos with sound" in summary(report)) is wanted
    assert dict(facts(report.to_dict())).get("sound") == ("2 of 3 videos" if wanted else None)
    for name in ("a", "c"):
        (data / f"{name}.mp4").unlink()
    if wanted:
        with pytest.raises(UserError, match="train_audio: none of the 1 videos has sound"):
            make_report(spec, build_index(spec), None)
    fast = spec.model_copy(update={"fps": 1.0})
    with pytest.raises(UserError, match=r"no usable video in .* b.mp4: too short"):
        build_index(fast.model_copy(update={"num_frames": 9}))


def test_senseless_requests_are_errors_of_the_caller(tmp_path: Path) -> None:
    path = record(tmp_path / "a.mp4", 2)
    wrong: list[dict[str, Any]] = [{"fps": 0}, {"frames": 0}, {"start": -1.0}]
    for arguments in wrong:
        with pytest.raises(ValueError, match="no frames to read"):
            read_frames(path, **{"fps": 8, "frames": 1, **arguments})


def test_without_pyav_one_is_told_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(UserError, match=r"videos need PyAV.*pip install"):
        inspect_video(tmp_path / "a.mp4")


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    folder = tmp_path_factory.mktemp("whole")
    return [record(folder / f"a.{kind}", 12).read_bytes() for kind in ("mp4", "mkv", "avi", "mpg")]


@given(data=st.data())
@settings(
    max_examples=80,
    deadline=None,
    derandomize=True,  # what is tried here runs through C: the same each time
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_damage_of_any_kind_is_a_video_error_and_silent(
    data: st.DataObject, contents: list[bytes], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    content = bytearray(data.draw(st.sampled_from(contents)))
    for _ in range(data.draw(st.integers(0, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "a.mp4"
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    outcomes = 0
    for use in (inspect_video, lambda path: read_frames(path, fps=8, frames=3, start=0.5)):
        try:
            use(path)
        except VideoError:
            outcomes += 1
        else:
            outcomes += 1
    assert outcomes == 2
    assert capfd.readouterr() == ("", "")
