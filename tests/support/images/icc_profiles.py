"""Small ICC profiles, built from what they mean: Display P3, Adobe RGB, grey, a press."""

from __future__ import annotations

import struct
from functools import cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

_D50: Final = (0.9642, 1.0, 0.8249)
# Red, green and blue as XYZ under D50, as the public profiles give them.
_P3: Final = ((0.5151, 0.2412, -0.0011), (0.2920, 0.6922, 0.0419), (0.1571, 0.0666, 0.7841))
_ADOBE: Final = ((0.6097, 0.3111, 0.0195), (0.2053, 0.6257, 0.0609), (0.1492, 0.0632, 0.7446))
_SRGB: Final = ((0.4361, 0.2225, 0.0139), (0.3851, 0.7169, 0.0971), (0.1431, 0.0606, 0.7141))
# Lab of every overprint on coated paper, as offset presses print them; black ink covers the rest.
_INKS: Final = {
    "": (100, 0, 0),
    "C": (55, -37, -50),
    "M": (48, 74, -3),
    "Y": (89, -5, 93),
    "CM": (24, 22, -46),
    "CY": (50, -68, 33),
    "MY": (47, 68, 48),
    "CMY": (23, 0, 0),
    "K": (16, 0, 0),
}


@cache
def display_p3() -> bytes:
    return _matrix_profile(_P3, _srgb_curve())


@cache
def adobe_rgb() -> bytes:
    return _matrix_profile(_ADOBE, _gamma(2.19921875))


@cache
def srgb_twin() -> bytes:
    """sRGB, in other bytes than any library writes."""
    return _matrix_profile(_SRGB, _srgb_curve())


@cache
def linear_grey() -> bytes:
    """Grey that counts light itself: half of it is 188 of 255 in sRGB."""
    tags = {b"wtpt": _xyz(_D50), b"kTRC": _gamma(1.0)}
    return _profile(b"mntr", b"GRAY", b"XYZ ", tags)


@cache
def press_cmyk() -> bytes:
    """Four inks on paper, mixed linearly between the overprints."""
    grid = b"".join(
        bytes((round(lightness * 2.55), a + 128, b + 128))
        for inks in _overprints()
        for lightness, a, b in [_INKS["K" if "K" in inks else inks]]
    )
    straight = bytes(range(256))
    identity = struct.pack(">9i", *(65536 if i % 4 == 0 else 0 for i in range(9)))
    table = b"mft1" + bytes(4) + bytes((4, 3, 2, 0)) + identity + straight * 4 + grid + straight * 3
    return _profile(b"prtr", b"CMYK", b"Lab ", {b"wtpt": _xyz(_D50), b"A2B0": table})


def _overprints() -> list[str]:
    """All sixteen, in the order of a table whose last ink varies fastest."""
    return [
        "".join(ink for ink, on in zip("CMYK", f"{i:04b}", strict=True) if on == "1")
        for i in range(16)
    ]


def _matrix_profile(primaries: Sequence[tuple[float, float, float]], curve: bytes) -> bytes:
    tags = {b"wtpt": _xyz(_D50)}
    for channel, primary in zip((b"r", b"g", b"b"), primaries, strict=True):
        tags[channel + b"XYZ"] = _xyz(primary)
        tags[channel + b"TRC"] = curve
    return _profile(b"mntr", b"RGB ", b"XYZ ", tags)


def _profile(kind: bytes, space: bytes, connection: bytes, tags: dict[bytes, bytes]) -> bytes:
    tags = {
        b"desc": b"desc" + bytes(4) + struct.pack(">I", 5) + b"test\0" + bytes(78),
        b"cprt": b"text" + bytes(4) + b"none\0",
        **tags,
    }
    at = 128 + 4 + 12 * len(tags)
    index, body = struct.pack(">I", len(tags)), b""
    for name, data in tags.items():
        index += name + struct.pack(">II", at + len(body), len(data))
        body += data + bytes(-len(data) % 4)
    header = struct.pack(
        ">I4xI4s4s4s12x4s28x12s48x",
        at + len(body),
        0x02400000,
        kind,
        space,
        connection,
        b"acsp",
        _fixed(_D50),
    )
    return header + index + body


def _fixed(values: Sequence[float]) -> bytes:
    return b"".join(struct.pack(">i", round(value * 65536)) for value in values)


def _xyz(values: Sequence[float]) -> bytes:
    return b"XYZ " + bytes(4) + _fixed(values)


def _gamma(exponent: float) -> bytes:
    return b"curv" + bytes(4) + struct.pack(">IH", 1, round(exponent * 256))


def _srgb_curve() -> bytes:
    shares = [step / 1023 for step in range(1024)]
    light = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
    return b"curv" + bytes(4) + struct.pack(">I1024H", 1024, *(round(v * 65535) for v in light))
