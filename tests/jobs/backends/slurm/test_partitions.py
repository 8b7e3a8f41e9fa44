"""What `sinfo` says of partitions, and what is made of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from jobs.backends.slurm import commands
from jobs.backends.slurm.commands import Partition, ask_partitions, in_words, unknown_partition
from jobs.service.plan import plan_submit
from jobs.spec.file.load import load_spec

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.queue.store import Store
    from tests.support.jobs.fake_slurm import FakeSlurm

SAID = """\
debug|(null)
gpu*|gpu:a100:4(S:0-1),shard:8
gpu*|gpu:nvidia_h100_80gb_hbm3:8(S:0,2-3)
old|gpu:2(S:0),craynetwork:4
mig|gpu:1g.10gb:7,gpu:a100:1
"""


def test_partitions_and_their_gpus_are_read(slurm: FakeSlurm) -> None:
    slurm.say("partitions", SAID)
    assert ask_partitions() == (
        Partition("gpu", default=True, gpus=("a100", "nvidia_h100_80gb_hbm3")),
        Partition("debug"),
        Partition("mig", gpus=("1g.10gb", "a100")),
        Partition("old", gpus=("",)),
    )


def test_there_are_none_without_an_answer(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert ask_partitions() == ()
    slurm.say("partitions", SAID)
    slurm.away()
    assert ask_partitions() == ()
    slurm.away(away=False)
    slurm.say("slow", "")
    monkeypatch.setattr(commands, "_SINFO_PATIENCE", 0.1)
    assert ask_partitions() == ()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ask_partitions() == ()


@pytest.mark.parametrize(
    ("name", "warned"),
    [
        (None, ""),
        ("gpu", ""),
        ("debug,gpu", ""),
        ("gpus", "no partition gpus; it has gpu (default), debug"),
        ("gpu,a,b", "no partitions a, b; it has"),
    ],
)
def test_an_unknown_partition_is_warned_about(name: str | None, warned: str) -> None:
    there = (Partition("gpu", default=True), Partition("debug"))
    told = unknown_partition(name, there)
    assert warned in told
    assert bool(warned) == bool(told)
    assert unknown_partition(name, ()) == ""


def test_a_long_list_is_cut() -> None:
    there = [Partition(f"p{n}") for n in range(9)]
    assert in_words(there) == "p0, p1, p2, p3, p4, p5 and 3 more"


def test_submit_warns_and_goes_on(
    store: Store, slurm: FakeSlurm, job_values: dict[str, Any]
) -> None:
    values = job_values | {"launcher": "slurm", "slurm_partition": "gpus"}
    assert plan_submit(store, load_spec(None, values)).warnings == []
    slurm.say("partitions", SAID)
    (warning,) = plan_submit(store, load_spec(None, values)).warnings
    assert warning.startswith("slurm_partition: Slurm lists no partition gpus; it has gpu")
    asked = slurm.calls("sinfo")
    local = values | {"launcher": "local", "slurm_partition": None}
    assert plan_submit(store, load_spec(None, local)).warnings == []
    assert slurm.calls("sinfo") == asked
