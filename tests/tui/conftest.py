"""Fixtures of the dashboard's tests."""

from __future__ import annotations

import pytest

from tests.support.tui.made_up_runs import nothing_starts
from tui.form.beside import Look


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch, no_gpus: None) -> None:
    """Nothing starts, and all is looked at every few milliseconds."""
    nothing_starts(monkeypatch)
    monkeypatch.setenv("FSDP_TUI_HOST", "node")
    # Predicting memory takes a process with torch.
    monkeypatch.setattr("tui.form.beside.look", lambda values, *_: Look(values))
    monkeypatch.setattr("tui.job.panes.overview.find_fits", lambda *_: [])
