"""A rank on the CPUs beside its GPU; the machine and the GPU are made up, the threads are real."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from engine.ranks.world import stay_near_gpu

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CPUS = sorted(os.sched_getaffinity(0))
pytestmark = pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")


@pytest.fixture
def pci(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Two GPUs, of which this is rank 1's; and afterwards, all CPUs again."""
    places = [
        SimpleNamespace(pci_domain_id=0, pci_bus_id=bus, pci_device_id=0) for bus in (0x1A, 0xC1)
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", places.__getitem__)
    monkeypatch.setenv("LOCAL_RANK", "1")
    (tmp_path / "0000:c1:00.0").mkdir()
    yield tmp_path
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread), CPUS)


def beside(pci: Path, cpus: str) -> None:
    (pci / "0000:c1:00.0" / "local_cpulist").write_text(f"{cpus}\n", encoding="ascii")


def test_all_threads_go_where_the_ranks_own_gpu_is(
    pci: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside(pci, f"{CPUS[-1]},100000-100003")
    monkeypatch.setenv("ACCELERATE_CPU_AFFINITY", "1")
    seen: list[set[int]] = []
    ready, go = threading.Event(), threading.Event()

    def started_before() -> None:
        ready.set()
        go.wait()
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=started_before)
    thread.start()
    ready.wait()
    said = stay_near_gpu(on_cpu=False, pci=pci)
    go.set()
    thread.join()
    assert said.startswith(f"on 1 of {len(CPUS)} CPUs")
    assert "0000:c1:00.0" in said
    assert [os.sched_getaffinity(0), *seen] == [{CPUS[-1]}] * 2
    assert "ACCELERATE_CPU_AFFINITY" not in os.environ, "accelerate would move it again"


@pytest.mark.parametrize(
    "cpus",
    [
        f"{CPUS[0]}-{CPUS[-1]}",  # one socket
        "100000-100007",  # a container has none of these
        "",
        "none",
    ],
)
def test_nothing_moves_where_that_gains_nothing(pci: Path, cpus: str) -> None:
    beside(pci, cpus)
    assert stay_near_gpu(on_cpu=False, pci=pci) == ""
    assert sorted(os.sched_getaffinity(0)) == CPUS


def test_nothing_moves_without_a_gpu_or_a_word_of_the_kernel(
    pci: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stay_near_gpu(on_cpu=False, pci=pci) == ""
    beside(pci, str(CPUS[0]))
    assert stay_near_gpu(on_cpu=True, pci=pci) == ""
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert stay_near_gpu(on_cpu=False, pci=pci) == "", "what is wrong is told elsewhere"
    assert sorted(os.sched_getaffinity(0)) == CPUS
