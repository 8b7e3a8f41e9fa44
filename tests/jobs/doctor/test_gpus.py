"""What the doctor says of GPUs, read through the real pynvml, and of the torch for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pynvml
import pytest

from jobs.doctor.checks.gpus import (
    check_gpus,
    check_names,
    connected_by_nvlink,
    judge_health,
    judge_paths,
    judge_peers,
    judge_presence,
    judge_use,
    matrix,
)
from jobs.doctor.checks.software import TorchFacts, check_backends, judge_torch
from jobs.doctor.examine import Finding, Patient, Verdict
from jobs.doctor.nvml import Board, Nvml, count_on_bus, read_driver
from jobs.machine.devices import Gpu
from tests.support.nvml_stub.stub import GIB, gpu, uuid

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tests.support.nvml_stub.stub import StubNvml

pytest_plugins = ["tests.support.nvml_stub.fixture"]

MIG = [{"uuid": "MIG-1", "name": "1g", "gpu_instance": 9, "memory_total": GIB, "memory_used": 0}]


def told(found: Iterable[Finding]) -> list[tuple[str, str, str]]:
    return [(str(finding.verdict), finding.name, finding.found) for finding in found]


@pytest.fixture
def bus(tmp_path: Path) -> Path:
    """A PCI bus with two NVIDIA GPUs, an NVSwitch of theirs, and someone else's card."""
    root = tmp_path / "pci"
    for name, vendor, kind in (
        ("0000:01:00.0", "0x10de", "0x030200"),
        ("0000:02:00.0", "0x10de", "0x030000"),
        ("0000:03:00.0", "0x10de", "0x068000"),
        ("0000:04:00.0", "0x1002", "0x030000"),
    ):
        (root / name).mkdir(parents=True)
        (root / name / "vendor").write_text(f"{vendor}\n")
        (root / name / "class").write_text(f"{kind}\n")
    return root


def test_gpus_are_counted_without_a_driver(bus: Path, tmp_path: Path) -> None:
    assert count_on_bus(bus) == 2
    assert count_on_bus(tmp_path / "nothing") == 0


# -- through pynvml ------------------------------------------------------------------------


def test_an_older_driver_that_knows_little_is_no_trouble(
    nvml: StubNvml, home: Path, tmp_path: Path
) -> None:
    nvml.write(8, driver="580.95.05")
    found = read_driver(tmp_path)
    assert (found.driver, found.counted, len(found.gpus)) == ("580.95.05", 8, 8)
    assert found.paths == {}
    assert found.boards[uuid(3)] == Board(uuid(3))
    assert told(check_gpus(Patient(nvml=found))) == [("ok", "GPUs", "8 × NVIDIA H200, 140 GiB")]


def test_trouble_of_single_gpus(nvml: StubNvml, home: Path, tmp_path: Path) -> None:
    nvml.write(
        [
            {},
            gpu(1, mig_mode=True, mig=MIG),
            gpu(2, errors={"*": "GPU_IS_LOST"}),
            gpu(3, memory_used=90 * GIB),
            gpu(4, reasons=0x40 | 0x08),
            gpu(5, name="NVIDIA A100", memory_total=80 * GIB),
        ]
    )
    nvml_facts = read_driver(tmp_path)
    found = told(check_gpus(Patient(nvml=nvml_facts)))
    assert found[0][0] == "warn", "GPUs of several kinds"
    assert "4 × NVIDIA H200, 140 GiB" in found[0][2]
    assert "1 × NVIDIA A100, 80.0 GiB" in found[0][2]
    by_name = {name: (verdict, text) for verdict, name, text in found[1:]}
    assert by_name["GPU 1"][0] == "warn"
    assert "in MIG mode" in by_name["GPU 1"][1]
    assert by_name["GPU 2"][0] == "fail"
    assert "is lost" in by_name["GPU 2"][1]
    assert "used by others" in by_name["GPU 3"][1]
    assert by_name["GPU 4"] == ("warn", "is slowed down (heat)")


def test_a_hidden_gpu_is_told(
    nvml: StubNvml, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.write(4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
    found = read_driver(tmp_path)
    assert [one.index for one in found.gpus] == [1, 3]
    ((verdict, _, text),) = told(check_gpus(Patient(nvml=found)))
    assert verdict == "ok"
    assert "hides 2 more" in text
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    ((verdict, _, text),) = told(check_gpus(Patient(nvml=read_driver(tmp_path))))
    assert (verdict, text) == ("warn", "CUDA_VISIBLE_DEVICES='' hides all 4")


@pytest.mark.parametrize(
    ("error", "verdict", "advice"),
    [
        ("LIB_RM_VERSION_MISMATCH", "fail", "while the system was running: reboot"),
        ("NO_PERMISSION", "fail", "/dev/nvidia"),
        ("DRIVER_NOT_LOADED", "fail", "load the NVIDIA driver"),
        ("LIBRARY_NOT_FOUND", "warn", "--gpus all"),
    ],
)
def test_a_driver_that_does_not_answer(
    error: str, verdict: str, advice: str, nvml: StubNvml, bus: Path, tmp_path: Path
) -> None:
    nvml.write(2, errors={"nvmlInitWithFlags": error})
    (finding,) = judge_presence(read_driver(bus), None)
    assert finding.verdict == verdict
    assert finding.advice is not None
    assert advice in finding.advice
    (finding,) = judge_presence(read_driver(tmp_path / "no bus"), None)
    assert finding.verdict is Verdict.OK, "a machine without GPUs needs no driver"


def test_health_and_connections_as_a_driver_tells_them(
    nvml: StubNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers that the compiled stub does not have are put into pynvml itself."""
    nvml.write(4)

    def peers(one: Any, other: Any, index: int) -> int:
        assert index == pynvml.NVML_P2P_CAPS_INDEX_NVLINK
        near = abs(place(one) - place(other)) == 1 and {place(one), place(other)} != {1, 2}
        return pynvml.NVML_P2P_STATUS_OK if near else pynvml.NVML_P2P_STATUS_NOT_SUPPORTED

    def place(handle: Any) -> int:
        return int(pynvml.nvmlDeviceGetIndex(handle))

    def link(handle: Any, number: int) -> int:
        if number >= 12:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return 0 if (place(handle), number) == (3, 11) else 1

    def remapped(handle: Any) -> tuple[int, int, int, int]:
        return (0, 0, int(place(handle) == 1), int(place(handle) == 2))

    monkeypatch.setattr(pynvml, "nvmlSystemGetCudaDriverVersion_v2", lambda: 12080)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCudaComputeCapability", lambda h: (9, 0))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetPersistenceMode", lambda h: int(place(h) < 2))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetPowerManagementDefaultLimit", lambda h: 900_000)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTotalEccErrors", lambda h, k, c: 5 * (place(h) == 0))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetRemappedRows", remapped)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetNvLinkState", link)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetP2PStatus", peers)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTopologyCommonAncestor", lambda one, other: 50)
    found = read_driver(tmp_path)
    assert found.cuda == (12, 8)
    assert found.boards[uuid(3)] == Board(
        uuid(3),
        (9, 0),
        persistent=False,
        usual_limit=900.0,
        errors=0,
        remapping="",
        links=12,
        links_up=11,
    )
    assert found.paths[uuid(0), uuid(1)] == found.paths[uuid(1), uuid(0)] == "NV12"
    assert found.paths[uuid(2), uuid(3)] == "NV11"
    assert found.paths[uuid(1), uuid(2)] == "SYS"
    health = told(judge_health(found))
    assert ("fail", "GPU 0", "had 5 uncorrectable memory errors") in health
    assert ("warn", "GPU 1", "has bad memory that is remapped at the next reset") in health
    assert ("fail", "GPU 2", "has bad memory and no spare rows left") in health
    assert ("warn", "GPU 3", "11 of its 12 NVLinks work") in health
    assert ("warn", "GPU 0", "is limited to 700 W instead of 900 W") in health
    assert any(name == "persistence" and "GPU 2, 3" in text for _, name, text in health)
    finding = judge_paths(found.gpus, found.paths)
    assert finding.verdict is Verdict.WARN
    assert (
        "GPUs 0–2, 0–3, 1–2, 1–3 are connected only by the link between processors" in finding.found
    )
    assert finding.lines[1].split() == ["0", "·", "NV12", "SYS", "SYS"]


# -- pure ----------------------------------------------------------------------------------

PAIR = (Gpu(0, "a", "H", 1), Gpu(1, "b", "H", 1))


def both(kind: str) -> dict[tuple[str, str], str]:
    return {("a", "b"): kind, ("b", "a"): kind}


@pytest.mark.parametrize(
    ("kind", "text", "nvlink"),
    [
        ("NV18", "between any two GPUs: NVLink (NV18)", True),
        ("SYS", "between any two GPUs: the link between processors", False),
        ("PIX", "between any two GPUs: one PCIe switch", False),
    ],
)
def test_a_machine_of_one_kind_of_connection_is_one_line(
    kind: str, text: str, nvlink: bool
) -> None:
    finding = judge_paths(PAIR, both(kind))
    assert (finding.verdict, finding.found, finding.lines) == (Verdict.OK, text, ())
    assert connected_by_nvlink(PAIR, both(kind)) is nvlink
    assert not connected_by_nvlink(PAIR[:1], both(kind))
    assert not connected_by_nvlink(PAIR, {})


def test_the_matrix_of_eight_gpus_fits_80_columns() -> None:
    kinds = {(a, b): "NV18" for a in range(8) for b in range(8) if a != b}
    shown = list(matrix(range(8), kinds))
    assert len(shown) == 9
    assert max(map(len, shown)) + 19 <= 80


def test_our_own_jobs_are_not_strangers() -> None:
    found = told(judge_use([Gpu(0, "a", "H", 1, memory_used=9 * GIB)], {"a": 4}))
    assert found == [("ok", "in use", "by your jobs: GPU 0 (job 4)")]


def test_devices_that_are_named_must_exist() -> None:
    nvml = Nvml(counted=2, gpus=PAIR)
    found = list(check_names(Patient(gpus=("1", "5"), nvml=nvml)))
    assert told(found) == [("fail", "--gpus", "no GPU 5 on this machine")]
    assert found[0].advice == "choose from: 0 (a), 1 (b)"


H200 = {"uuid": "a", "name": "H200", "memory": 1, "capability": [9, 0]}
GT710 = {"uuid": "b", "name": "GT 710", "memory": 1, "capability": [3, 5]}
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "compute_120")
NEW = Nvml(2, 2, driver="580.1", cuda=(13, 0), gpus=PAIR)
OLD = Nvml(2, 2, driver="535.1", cuda=(12, 2), gpus=PAIR)
NO_GPUS = Nvml()


def torch(**values: Any) -> TorchFacts:
    usual = {"cuda": "13.0", "devices": (H200, H200), "architectures": ARCHITECTURES}
    return TorchFacts(**{"version": "2.13.0", **usual, **values})


CPU_BUILD = TorchFacts("2.13.0+cpu")


@pytest.mark.parametrize(
    ("facts", "nvml", "verdict", "text"),
    [
        (torch(), NEW, "ok", "580.1, for CUDA up to 13.0"),
        (torch(cuda="12.8"), NEW, "ok", "2.13.0, built for CUDA 12.8"),
        (torch(cuda="12.8"), OLD, "ok", "535.1, for CUDA up to 12.2"),  # any 12 will do
        (torch(), OLD, "fail", "supports CUDA up to 12.2, but torch is built for 13.0"),
        (CPU_BUILD, NEW, "fail", "a CPU-only build, but this machine has 2 GPUs"),
        (CPU_BUILD, NO_GPUS, "ok", "2.13.0+cpu, a CPU-only build"),
        (CPU_BUILD, None, "ok", "2.13.0+cpu, a CPU-only build"),
        (torch(devices=None, error="x"), NO_GPUS, "ok", "2.13.0, built for CUDA 13.0"),
        (
            torch(devices=None, error="Error 802: system not yet initialized"),
            NEW,
            "fail",
            "torch cannot use the GPUs: Error 802",
        ),
        (torch(devices=(H200,)), NEW, "fail", "torch sees 1 of 2 GPUs"),
        (torch(devices=(H200, GT710)), NEW, "fail", "GT 710 (device 1, sm_35)"),
        (torch(hip="6.4", cuda=None), NO_GPUS, "warn", "AMD"),
        (torch(seconds=40.0), NEW, "warn", "took 40 s"),
    ],
)
def test_torch_driver_and_gpus_must_fit(
    facts: TorchFacts, nvml: Nvml | None, verdict: str, text: str
) -> None:
    found = list(judge_torch(facts, nvml))
    worst = max(found, key=lambda finding: ["ok", "warn", "fail"].index(finding.verdict))
    assert worst.verdict == verdict, told(found)
    assert any(text in finding.found for finding in found if finding.verdict == verdict)


def test_the_fabric_manager_is_named() -> None:
    facts = torch(devices=None, error="CUDA error 802: system not yet initialized")
    assert any("fabricmanager" in (one.advice or "") for one in judge_torch(facts, NEW))


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        (("sm_80",), [8, 6], True),
        (("sm_86",), [8, 0], False),
        (("sm_80", "compute_80"), [9, 0], True),
        (("sm_80",), [9, 0], False),
        (("sm_90a",), [9, 0], True),
        (("sm_100", "sm_120"), [12, 0], True),
        ((), [3, 5], True),
    ],
)
def test_kernels_for_a_gpu(
    architectures: tuple[str, ...], capability: list[int], runs: bool
) -> None:
    device = H200 | {"capability": capability}
    found = judge_torch(torch(architectures=architectures, devices=(device, device)), NEW)
    assert any(finding.name == "kernels" for finding in found) is not runs


@pytest.mark.parametrize(
    ("facts", "wheel", "verdict", "text"),
    [
        (torch(nccl=(2, 27, 3)), "2.27.3", "ok", "2.27.3"),
        (torch(nccl=(2, 27, 3)), None, "ok", "2.27.3"),
        (torch(nccl=(2, 18, 1)), "2.27.3", "warn", "2.18.1 is loaded, but torch came with 2.27.3"),
        (torch(nccl=None), None, "fail", "built without it"),
        (CPU_BUILD, None, "ok", "gloo"),
    ],
)
def test_the_nccl_that_is_loaded(
    facts: TorchFacts, wheel: str | None, verdict: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.doctor.checks.software._wheel_of_nccl", lambda cuda: wheel)
    (finding,) = check_backends(Patient(torch=facts))
    assert finding.verdict == verdict
    assert text in finding.found


def test_gpus_that_cannot_reach_each_other() -> None:
    devices = (H200 | {"uuid": "b"}, H200)  # torch's order is not ours
    assert judge_peers(PAIR, torch(devices=devices)).verdict is Verdict.OK
    finding = judge_peers(PAIR, torch(devices=devices, apart=((0, 1), (1, 0))))
    assert finding.verdict is Verdict.WARN
    assert finding.found.startswith("GPUs 0–1 cannot access")
    assert finding.facts["apart"] == [[0, 1]]
