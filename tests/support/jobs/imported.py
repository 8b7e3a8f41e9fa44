"""What tests of imports share: entries of a report, and odd values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from jobs.imports.common.import_report import Kind

if TYPE_CHECKING:
    from jobs.imports.common.import_report import Entry
    from jobs.imports.imported import Imported

ODD: Final[list[Any]] = [
    "",
    "None",
    [],
    {},
    [None],
    [{}],
    {"a": {"b": 1}},
    "maybe",
    -1,
    0,
    1e400,
    float("nan"),
    True,
    "1e-4",
    "ü 😀\u2028",
    10**400,
    "x" * 300,
    "$HOME `ls`",
    ["a", 1],
    "a/b\\c",
    "~nobody-here/x",
]


def entries(imported: Imported, key: str) -> list[Entry]:
    return [entry for entry in imported.report.entries if entry.key == key]


def entry(imported: Imported, key: str) -> Entry:
    (found,) = entries(imported, key)
    return found


def check(imported: Imported, key: str, expected: dict[str, Any] | Kind) -> None:
    found = entry(imported, key)
    assert found.why or found.kind in (Kind.TAKEN, Kind.TRANSLATED)
    if isinstance(expected, Kind):
        assert found.kind is expected, found
        return
    values = imported.spec.model_dump(mode="json")
    prompts = [{"prompt": one} for one in values["validation_prompts"] if isinstance(one, str)]
    values["validation_prompts"] = prompts or values["validation_prompts"]
    for name, value in expected.items():
        wanted = pytest.approx(value) if isinstance(value, float) else value
        assert values[name] == wanted, found
