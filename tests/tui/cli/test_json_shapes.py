"""What scripts read is what the documentation says."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from jobs.queue.states import State
from tests.support.paths import ROOT
from tests.support.tui.made_up_runs import FakeGpus, add_job, write_steps

if TYPE_CHECKING:
    import pytest

    from jobs.queue.store import Store
    from tests.support.tui.shell import Shell


def documented(heading: str) -> set[str]:
    """Return the fields of the table below a line of the section about JSON."""
    text = (ROOT / "docs" / "command-line.md").read_text()
    table = text.partition("## JSON")[2].partition(heading)[2].partition("\n\n")[2].split("\n\n")[0]
    names = [cell.split("|")[1] for cell in table.splitlines()[2:]]
    return {name for cell in names for name in re.findall(r"`(\w+)`", cell)}


def test_jobs_have_the_fields_that_are_documented(shell: Shell, store: Store) -> None:
    job = add_job(store, state=State.RUNNING)
    write_steps(job, 20)
    (listed,) = shell.json("list")
    shown = shell.json("show", str(job.id))
    assert set(listed) == documented("`list` (a list of these)")
    assert set(shown) == set(listed) | documented("`show` also has")


def test_gpus_have_the_fields_that_are_documented(
    shell: Shell, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = FakeGpus(2).gpus
    monkeypatch.setattr("jobs.machine.devices.gpus", lambda: gpus)
    for gpu in shell.json("gpus"):
        assert set(gpu) == documented("`gpus` (a list of these)")
