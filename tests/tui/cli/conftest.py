"""Fixtures of the command line's tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.support.tui.shell import Shell

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def shell(
    no_gpus: None,
    started: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Shell:
    return Shell(monkeypatch, capsys)


@pytest.fixture
def job_file(tmp_path: Path, job_values: dict[str, Any]) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job_values | {"max_train_steps": 100}))
    return path
