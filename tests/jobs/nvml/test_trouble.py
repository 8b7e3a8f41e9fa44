"""GPUs and drivers that come and go, forks, threads, and what a look costs."""

from __future__ import annotations

import collections
import os
import re
import threading
from typing import TYPE_CHECKING, Any

import pynvml
import pytest

from jobs.machine import devices
from tests.support.nvml_stub.stub import GIB, gpu, uuid
from tests.support.waiting import PATIENCE

if TYPE_CHECKING:
    from tests.support.nvml_stub.stub import StubNvml

pytest_plugins = ["tests.support.nvml_stub.fixture"]

# -- trouble -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    ["*", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetPciInfo"],
)
def test_a_lost_gpu_keeps_its_place_and_name(
    nvml: StubNvml, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    monkeypatch.setattr(devices, "_SLOW", 0.0)
    on_bus = nvml.write_shuffled()
    devices.gpus()
    nvml.write_shuffled(at={3: {"errors": {function: "GPU_IS_LOST"}}})
    found = devices.gpus()
    assert [card.uuid for card in found] == on_bus
    assert [card.index for card in found if card.problem is not None] == [3]
    assert found[3].problem is not None
    assert "is lost" in found[3].problem
    assert found[3].unusable == found[3].problem
    assert (found[3].utilisation, found[3].memory_total) == (None, found[0].memory_total)
    assert (found[2].utilisation, found[4].utilisation) == (0, 0)
    assert {card.name for card in found} == {"NVIDIA H200"}


def test_a_lost_gpu_is_not_asked_on(nvml: StubNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    # Each question to such a GPU can take the driver a long time.
    nvml.write([{}, gpu(1, errors={"nvmlDeviceGetUtilizationRates": "GPU_IS_LOST"})])
    calls = count_calls(monkeypatch, "nvmlDeviceGetPowerUsage")
    devices.gpus()
    assert calls["nvmlDeviceGetPowerUsage"] == 1


def test_a_gpu_lost_before_the_first_look(nvml: StubNvml) -> None:
    nvml.write([{}, gpu(1, errors={"*": "GPU_IS_LOST"}), gpu(2)])
    first, lost, last = devices.gpus()
    assert (first.uuid, last.uuid, last.index) == (uuid(0), uuid(2), 2)
    assert lost.unusable is not None
    assert devices.find("GPU-1", [first, lost, last]) is None  # no stand-in passes for a UUID


def test_a_gpu_with_an_unknown_error(nvml: StubNvml) -> None:
    nvml.write([gpu(errors={"nvmlDeviceGetHandleByIndex": "UNKNOWN"}), gpu(1)])
    assert [card.problem for card in devices.gpus()] == ["cannot be reached (Unknown Error)", None]


def test_the_driver_goes_and_comes_back(nvml: StubNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.write(2)
    assert len(devices.gpus()) == 2
    nvml.write(2, errors=dict.fromkeys(("nvmlDeviceGetCount", "nvmlInitWithFlags"), "UNKNOWN"))
    assert devices.gpus() == []
    nvml.write(3)
    assert devices.gpus() == []  # it is not asked again so soon
    monkeypatch.setattr(devices._driver, "retry_at", 0.0)
    assert len(devices.gpus()) == 3


def test_a_driver_that_is_missing_is_not_looked_for_at_every_look(
    nvml: StubNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.write(2, errors={"nvmlInitWithFlags": "DRIVER_NOT_LOADED"})
    calls = count_calls(monkeypatch, "nvmlInit")
    for _ in range(5):
        assert devices.gpus() == []
    assert calls["nvmlInit"] == 1


def test_a_forked_child_opens_the_driver_anew(nvml: StubNvml) -> None:
    # The stub, stricter than the driver, answers no process but the one that initialised it.
    nvml.write(4)
    assert len(devices.gpus()) == 4
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, bytes([len(devices.gpus())]))
        finally:  # no exception may carry on with the tests in here
            os._exit(0)
    os.close(write)
    seen = os.read(read, 1)
    os.close(read)
    os.waitpid(child, 0)
    assert seen == b"\4"
    assert len(devices.gpus()) == 4


def test_a_fork_waits_for_the_look_of_another_thread(
    nvml: StubNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.write(1)
    inside, go_on, order = threading.Event(), threading.Event(), []
    real = pynvml.nvmlDeviceGetCount

    def slow() -> int:
        inside.set()
        assert go_on.wait(PATIENCE)
        order.append("look")
        return int(real())

    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", slow)
    looking = threading.Thread(target=devices.gpus)
    looking.start()
    assert inside.wait(PATIENCE)
    threading.Timer(0.05, go_on.set).start()
    child = os.fork()
    if child == 0:
        os._exit(0)
    order.append("fork")
    os.waitpid(child, 0)
    looking.join()
    assert order == ["look", "fork"]


# -- cost --------------------------------------------------------------------------------------


def count_calls(monkeypatch: pytest.MonkeyPatch, *names: str) -> collections.Counter[str]:
    calls: collections.Counter[str] = collections.Counter()
    for name in names:
        real = getattr(pynvml, name)

        def counted(*args: Any, _name: str = name, _real: Any = real) -> Any:
            calls[_name] += 1
            return _real(*args)

        monkeypatch.setattr(pynvml, name, counted)
    return calls


def test_what_hardly_changes_is_asked_rarely(
    nvml: StubNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.write(8)
    slow = (
        "nvmlDeviceGetName",
        "nvmlDeviceGetPciInfo",
        "nvmlDeviceGetEnforcedPowerLimit",
        "nvmlDeviceGetMaxClockInfo",
        "nvmlDeviceGetMigMode",
    )
    monkeypatch.setattr(devices, "_SLOW", 1e9)
    calls = count_calls(monkeypatch, *slow, "nvmlDeviceGetUtilizationRates", "nvmlInit")
    for _ in range(5):
        devices.gpus()
    assert [calls[name] for name in slow] == [8] * len(slow)
    assert calls["nvmlDeviceGetUtilizationRates"] == 40
    assert calls["nvmlInit"] == 1
    monkeypatch.setattr(devices, "_SLOW", 0.0)
    nvml.write([gpu(index, power_limit=450) for index in range(8)])
    assert {card.power_limit for card in devices.gpus()} == {450.0}


def test_what_a_driver_lacks_is_asked_once(nvml: StubNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "nvmlDeviceGetCurrentClocksEventReasons"
    nvml.write(8, errors={name: "FUNCTION_NOT_FOUND"})
    calls = count_calls(monkeypatch, name)
    for _ in range(3):
        devices.gpus()
    assert calls[name] == 1
    nvml.write(0, errors={"nvmlDeviceGetCount": "UNKNOWN"})
    devices.gpus()
    nvml.write(8)  # a newer driver
    devices._driver.retry_at = 0.0
    devices.gpus()
    assert calls[name] == 9


def test_another_gpu_in_the_same_place_is_not_taken_for_the_first(nvml: StubNvml) -> None:
    nvml.write([gpu(0, name="NVIDIA A100")])
    devices.gpus()
    nvml.write([gpu(1, name="NVIDIA H200")])
    assert [(card.uuid, card.name) for card in devices.gpus()] == [(uuid(1), "NVIDIA H200")]


def test_a_look_at_eight_gpus_asks_little(nvml: StubNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dashboard asks every second; `tests/bench/dashboard.py` measures that."""
    nvml.write([gpu(i, processes=[{"pid": os.getpid(), "memory": GIB}]) for i in range(8)])
    monkeypatch.setattr(devices, "_SLOW", 1e9)
    devices.gpus()
    functions = [name for name in dir(pynvml) if re.match("nvml(Init|Device|System)", name)]
    calls = count_calls(monkeypatch, *functions)
    devices.gpus()
    assert calls["nvmlDeviceGetCount"] == 1
    assert calls.total() - 1 <= 8 * 13, calls
    assert max(calls.values()) <= 16, "each question once, but for two clocks"


def test_threads_may_look_at_once(nvml: StubNvml) -> None:
    nvml.write(8)
    counts: list[int] = []

    def look() -> None:
        counts.extend(len(devices.gpus()) for _ in range(20))

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [8] * 80
