"""Damage texts, bytes and JSON in the ways that files are damaged, and in worse ones."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from tests.support.tui.hostile import EVIL

if TYPE_CHECKING:
    import random

_ODD: Final[tuple[Any, ...]] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    2**64,
    -(2**63),
    10**400,
    0.5,
    -0.0,
    1e308,
    1e-320,
    float("nan"),
    float("inf"),
    "",
    " ",
    "0",
    "nan",
    "9" * 5000,
    "\0",
    "a\0b",
    "\ud800",
    EVIL,
    "~",
    "/dev/zero",
    "/dev/stdin",
    "/proc/self/mem",
    "../../..",
    "x" * 100_000,
    [],
    {},
    [[]],
    [None],
    {"": None},
    "on",
    "2026-01-01",
    "1:2:3",
    "0x1f",
    "1e3",
    "!!python/none",
    "*a",
    "é" * 300,
)
_TOKENS: Final = (
    b"\0",
    b"\xff",
    b"\n",
    b"\r",
    b"{",
    b"}",
    b"[" * 200,
    b"]",
    b'"',
    b":",
    b",",
    b"-",
    b"&a ",
    b"*a",
    b"<<: ",
    b"!!str ",
    b"%",
    b"\xef\xbb\xbf",
    b"\xff\xfe",
    b"9" * 400,
    b"\x1b]0;x\x07",
    b"- " * 300,
    b"? ",
    b"|\n",
    b"e999999",
    b"\\ud800",
    b"\xed\xa0\x80",
    b"../",
    b"#",
)


def odd_value(rng: random.Random, depth: int = 3) -> Any:
    """Something that a careful reader expects, and others do not."""
    kind = rng.random()
    if depth and kind < 0.12:
        return [odd_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    if depth and kind < 0.2:
        return {str(odd_value(rng, 0))[:99]: odd_value(rng, depth - 1) for _ in range(2)}
    if kind < 0.3:
        return rng.randint(-(10 ** rng.randint(0, 25)), 10 ** rng.randint(0, 25))
    if kind < 0.36:
        value: Any = []
        for _ in range(rng.choice((5, 40, 900))):
            value = [value]
        return value
    return rng.choice(_ODD)


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Bytes with a few things changed, cut, doubled or put in."""
    found = bytearray(data)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3, 8))):
        at, kind = rng.randrange(len(found) + 1), rng.randrange(6)
        length = min(len(found) - at, rng.choice((1, 2, 4, 8, 64, 1000)))
        if kind == 0:
            del found[at:]
        elif kind == 1:
            del found[at : at + length]
        elif kind == 2:
            found[at : at + length] = rng.randbytes(length)
        elif kind == 3:
            found[at:at] = rng.choice(_TOKENS)
        elif kind == 4:
            found[at:at] = found[at : at + length] * rng.choice((1, 3, 50))
        elif at < len(found):
            found[at] ^= 1 << rng.randrange(8)
    return bytes(found)


def odd_json(rng: random.Random, value: Any) -> Any:
    """A tree in which a few values and keys are others."""
    if rng.random() < 0.07:
        return odd_value(rng)
    if isinstance(value, dict):
        made = {
            (key if rng.random() > 0.03 else str(odd_value(rng, 0))[:200]): odd_json(rng, one)
            for key, one in value.items()
            if rng.random() > 0.04
        }
        if rng.random() < 0.1:
            made[str(odd_value(rng, 0))[:50]] = odd_value(rng)
        return made
    if isinstance(value, list):
        return [odd_json(rng, one) for one in value if rng.random() > 0.04]
    return value


def json_bytes(rng: random.Random, value: Any) -> bytes:
    """An odd tree as it may stand in a file, now and then damaged as bytes too."""
    text = json.dumps(odd_json(rng, value), indent=rng.choice((None, 2)))
    data = text.encode("utf-8", "surrogatepass")
    return damaged(rng, data) if rng.random() < 0.3 else data
