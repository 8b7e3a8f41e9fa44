"""What a played driver says through the real pynvml: values, order, names, MIG instances."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from jobs.machine import devices
from jobs.preflight.check_job import check_devices
from jobs.spec.file.load import load_spec
from tests.support.nvml_stub.stub import GIB, gpu, uuid

if TYPE_CHECKING:
    from tests.support.nvml_stub.stub import StubNvml

pytest_plugins = ["tests.support.nvml_stub.fixture"]


def test_all_values_of_a_gpu(nvml: StubNvml) -> None:
    nvml.write(
        [
            {
                "uuid": "GPU-aa",
                "name": "NVIDIA H100 80GB HBM3",
                "pci": [0, 0x3B, 0],
                "memory_total": 80 * GIB,
                "memory_used": 41 * GIB,
                "memory_reserved": GIB,
                "utilisation": 97,
                "temperature": 64,
                "power": 612.5,
                "power_limit": 700,
                "clock": 1755,
                "clock_limit": 1980,
                "memory_clock": 2619,
                "reasons": 0x4 | 0x20,
            }
        ]
    )
    [found] = devices.gpus()
    assert found == devices.Gpu(
        index=0,
        uuid="GPU-aa",
        name="NVIDIA H100 80GB HBM3",
        pci="00000000:3B:00.0",
        memory_total=80 * GIB,
        memory_used=41 * GIB,
        utilisation=97,
        temperature=64,
        power=612.5,
        power_limit=700.0,
        clock=1755,
        clock_limit=1980,
        memory_clock=2619,
        throttle="power limit, heat",
    )
    assert found.unusable is None


def test_missing_values_are_none(nvml: StubNvml) -> None:
    keys = (
        "name",
        "pci",
        "memory_total",
        "memory_used",
        "utilisation",
        "temperature",
        "power",
        "power_limit",
        "clock",
        "clock_limit",
        "memory_clock",
        "reasons",
        "mig_mode",
    )
    nvml.write([dict.fromkeys(keys), {}])
    first, second = devices.gpus()
    assert first == devices.Gpu(0, uuid(0), "GPU", 0)
    assert (second.uuid, second.utilisation, second.name) == (uuid(1), 0, "NVIDIA H200")


@pytest.mark.parametrize("count", [0, 1, 8, 16])
def test_as_many_as_there_are(nvml: StubNvml, count: int) -> None:
    nvml.write(count)
    assert [found.index for found in devices.gpus()] == list(range(count))


def test_a_driver_that_lacks_the_newer_functions(nvml: StubNvml) -> None:
    new = (
        "nvmlDeviceGetMemoryInfo_v2",
        "nvmlDeviceGetComputeRunningProcesses_v3",
        "nvmlDeviceGetGraphicsRunningProcesses_v3",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetTemperatureV",
    )
    nvml.write(
        [
            gpu(
                memory_used=GIB,
                memory_reserved=3,
                reasons=0x80,
                processes=[{"pid": 2**22, "memory": 7}],
            )
        ],
        errors=dict.fromkeys(new, "FUNCTION_NOT_FOUND"),
    )
    [found] = devices.gpus()
    assert found.memory_used == GIB + 3  # the old function cannot tell the driver's share apart
    assert found.processes == (devices.GpuProcess(2**22, 7),)
    assert (found.throttle, found.temperature) == ("power brake", 31)


def test_a_driver_that_lost_the_older_functions(nvml: StubNvml) -> None:
    nvml.write(1, errors={"nvmlDeviceGetTemperature": "FUNCTION_NOT_FOUND"})
    assert devices.gpus()[0].temperature == 31


@pytest.mark.parametrize(
    ("reasons", "words"),
    [
        (0x0, ""),
        (0x1, ""),
        (0x2, ""),
        (0x4, "power limit"),
        (0x8, "hardware slowdown"),
        (0x8 | 0x40, "heat"),
        (0x20 | 0x40, "heat"),
        (0x8 | 0x80 | 0x1, "power brake"),
    ],
)
def test_throttle_in_words(nvml: StubNvml, reasons: int, words: str) -> None:
    nvml.write([gpu(reasons=reasons)])
    assert devices.gpus()[0].throttle == words


# -- which is which ----------------------------------------------------------------------------


def test_the_index_is_the_order_on_the_bus(nvml: StubNvml) -> None:
    on_bus = nvml.write_shuffled()
    assert on_bus != sorted(on_bus)  # else the order of UUIDs would pass for it
    found = devices.gpus()
    assert [(card.index, card.uuid) for card in found] == list(enumerate(on_bus))
    assert found[4].pci == "00000001:14:00.0"


def test_indices_become_uuids(nvml: StubNvml, job_values: dict[str, Any]) -> None:
    on_bus = nvml.write_shuffled()
    job_values["device"] = "auto"
    job_values |= {"gpus": [6, on_bus[1], on_bus[2][:10]], "num_processes": 3}
    spec = load_spec(None, job_values)
    assert check_devices(spec) == [on_bus[6], on_bus[1], on_bus[2]]


@pytest.mark.parametrize(
    ("setting", "shown"),
    [
        (None, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("3", [3]),
        ("6,1", [1, 6]),
        (" 0 , 2 ", [0, 2]),
        ("0,2,-1,1", [0, 2]),  # CUDA's own example
        ("0,8,1", [0]),
        ("0,,1", [0]),
        ("1,", [1]),
        ("5,5", [5]),
        ("{5}", [5]),
        ("{7},{0}", [0, 7]),
        ("{3:12}", [3]),
        ("{3:12},{4:8}", [3, 4]),
        ("2,{4:12}", [2, 4]),
        ("GPU-", []),  # fits all of them, so it names none
        ("GPU-ffffffff-0000", []),
        ("{1},GPU-ffffffff-0000,{2}", [1]),
        ("gpu", []),
    ],
)
def test_an_inherited_choice(
    nvml: StubNvml, monkeypatch: pytest.MonkeyPatch, setting: str | None, shown: list[int]
) -> None:
    on_bus = nvml.write_shuffled()
    if setting is not None:
        for index, name in enumerate(on_bus):
            setting = setting.replace(f"{{{index}}}", name)
            for length in (8, 12):
                setting = setting.replace(f"{{{index}:{length}}}", name[:length])
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    found = devices.gpus()
    assert [card.index for card in found] == shown
    assert [card.uuid for card in found] == [on_bus[index] for index in shown]


# -- MIG ---------------------------------------------------------------------------------------

MIG = [
    {
        "uuid": "MIG-11111111-aaaa",
        "name": "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "gpu_instance": 9,
        "memory_total": 10 * GIB,
        "memory_used": GIB,
        "processes": [{"pid": 2**22, "memory": GIB}],
    },
    {
        "uuid": "MIG-22222222-bbbb",
        "name": "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "gpu_instance": 1,
        "compute_instance": 2,
        "memory_total": 40 * GIB,
        "memory_used": 0,
    },
]


def test_mig_instances_are_named_and_not_for_jobs(nvml: StubNvml) -> None:
    nvml.write([{}, gpu(1, mig_mode=True, mig=MIG)])
    whole, divided = devices.gpus()
    assert (whole.mig_mode, whole.mig, whole.unusable) == (False, (), None)
    assert [(part.uuid, part.name[-7:], part.memory_total) for part in divided.mig] == [
        ("MIG-11111111-aaaa", "1g.10gb", 10 * GIB),
        ("MIG-22222222-bbbb", "3g.40gb", 40 * GIB),
    ]
    assert divided.utilisation is None  # the driver does not know it
    assert divided.unusable is not None
    assert "is in MIG mode" in divided.unusable
    assert [(process.pid, process.mig) for process in divided.processes] == [
        (2**22, "MIG-11111111-aaaa")
    ]


def test_a_divided_gpu_without_instances_is_not_for_jobs(nvml: StubNvml) -> None:
    nvml.write([gpu(mig_mode=True)])
    [found] = devices.gpus()
    assert found.mig == ()
    assert found.unusable is not None


@pytest.mark.parametrize(
    ("setting", "shown"),
    [
        ("MIG-22222222-bbbb", {1: ["MIG-22222222-bbbb"]}),
        ("MIG-2", {1: ["MIG-22222222-bbbb"]}),
        (f"MIG-{uuid(1)}/9/0", {1: ["MIG-11111111-aaaa"]}),
        (f"MIG-{uuid(0)}/9/0", {}),
        ("MIG-", {}),
        ("0,MIG-11111111-aaaa", {0: [], 1: ["MIG-11111111-aaaa"]}),
        ("1", {1: ["MIG-11111111-aaaa", "MIG-22222222-bbbb"]}),
    ],
)
def test_an_inherited_choice_of_instances(
    nvml: StubNvml, monkeypatch: pytest.MonkeyPatch, setting: str, shown: dict[int, list[str]]
) -> None:
    nvml.write([{}, gpu(1, mig_mode=True, mig=MIG)])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    assert {card.index: [part.uuid for part in card.mig] for card in devices.gpus()} == shown
