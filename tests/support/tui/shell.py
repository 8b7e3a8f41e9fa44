"""The command line as a person types it."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tui.cli import commands


class Shell:
    """Runs `fsdp-tui` with words, in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._patch, self._capsys = monkeypatch, capsys

    def __call__(self, *words: str) -> tuple[int, str, str]:
        """Exit status, standard output, standard error."""
        self._patch.setattr(sys, "argv", ["fsdp-tui", *words])
        with pytest.raises(SystemExit) as ended:
            commands.main()
        out, err = self._capsys.readouterr()
        return int(str(ended.value.code or 0)), out, err

    def json(self, *words: str) -> Any:
        status, out, err = self(*words, "--json")
        assert status == 0, err
        return json.loads(out)
