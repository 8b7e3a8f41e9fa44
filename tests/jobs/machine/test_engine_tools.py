"""Answers of the engine's tools."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from jobs.machine.engine_tools import ToolError, ask

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("program", "answer"),
    [
        ("print('{}')", {}),
        ("print('Do you wish to run the code? [y/N]'); print('{\"a\": 1}')", {"a": 1}),
        ("print('[warning] {'); print('{\"a\": 1}')", {"a": 1}),
        ("print('nothing')", None),
        ("pass", None),
    ],
)
def test_what_libraries_print_is_no_answer(
    program: str, answer: dict[str, int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tool_of_a_test.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def run() -> dict[str, int]:
        return ask("tool_of_a_test", [], tmp_path / "answer", lambda line: None, lambda: False)

    if answer is not None:
        assert run() == answer
        return
    with pytest.raises(ToolError, match="its answer is not a JSON object"):
        run()
