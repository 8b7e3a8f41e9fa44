"""Devices without a driver, and which of them an inherited choice shows.

What the driver says is tested against a stub of its library in `test_nvml_*.py`.
"""

from __future__ import annotations

import pytest

from jobs.machine import devices
from jobs.machine.devices import Gpu


def machine(count: int) -> list[Gpu]:
    return [Gpu(index=n, uuid=f"GPU-{n}0ab", name="H", memory_total=1) for n in range(count)]


def test_a_machine_without_a_driver_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_nvml", lambda: None)
    assert devices.gpus() == []


@pytest.mark.parametrize(
    ("setting", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("-1", []),
        ("2", [2]),
        ("2,3", [2, 3]),
        ("3, 0", [0, 3]),
        ("0,-1,2", [0]),
        ("GPU-10ab", [1]),
        ("GPU-1", [1]),
        ("GPU-10ab,3", [1, 3]),
        ("9", []),
    ],
)
def test_an_inherited_choice_of_gpus_is_respected(setting: str | None, indices: list[int]) -> None:
    assert [gpu.index for gpu in devices.visible(machine(4), setting)] == indices


def test_the_host_is_described_in_possible_numbers() -> None:
    host = devices.host()
    assert host.cores >= 1
    assert 0 <= host.cpu_percent <= 100
    assert 0 < host.memory_used < host.memory_total
