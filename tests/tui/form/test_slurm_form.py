"""The form of a job for Slurm: what the cluster has, asked without holding anything up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.jobs.fake_slurm import FakeSlurm
from tests.support.tui.driven_app import field, form
from tests.support.tui.pilot import until
from tests.support.waiting import PATIENCE
from tui.form.screen import NewJobScreen

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.queue.store import Store

pytestmark = pytest.mark.usefixtures("no_processes")


async def test_partitions_are_offered_and_an_unknown_one_is_warned_about(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.backends.slurm.commands._SINFO_PATIENCE", PATIENCE)
    slurm = FakeSlurm.on_path(tmp_path / "slurm", monkeypatch)
    slurm.say("partitions", "gpu*|gpu:h100:8\ndebug|(null)\n")
    async with form(store) as (app, pilot):
        screen = app.screen
        assert isinstance(screen, NewJobScreen)
        await screen.go_to("slurm_partition")
        assert slurm.calls("sinfo") == 0, "nobody asks Slurm about a local job"
        field(app, "launcher").put("slurm")
        row = field(app, "slurm_partition")
        note = row.query_one(".note")
        await until(pilot, lambda: str(note.content) == "gpu (default), debug")  # type: ignore[attr-defined]
        row.control.focus()
        await pilot.press("d", "e")
        await until(pilot, lambda: row.control._suggestion == "debug")  # type: ignore[attr-defined]
        await pilot.press("tab")
        assert row.value == "debug"
        error = screen.query_one("#form-error")
        await pilot.press("x")
        await until(pilot, lambda: "Slurm lists no partition debugx" in str(error.content))  # type: ignore[attr-defined]
        assert screen.values["slurm_partition"] == "debugx", "typed by hand, it may stay"
        assert slurm.calls("sinfo") == 1
