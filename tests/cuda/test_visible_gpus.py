"""The CUDA stub's GPUs are those of the NVML stub, whatever hides some of them."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING, Final

import pytest

from tests.support.nvml_stub.stub import gpu

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cuda_stub.stub import StubCuda
    from tests.support.nvml_stub.stub import StubNvml

pytest_plugins = ["tests.support.nvml_stub.fixture", "tests.support.cuda_stub.fixture"]
PATIENCE: Final = 300.0  # seconds; a slow machine under load, not an expectation


UUIDS = """\
import json, os, sys
import torch
from jobs.machine import devices
for place, value in enumerate(json.loads(sys.argv[1])):
    if os.fork():
        os.wait()
        continue
    if value is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = value
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    seen = [f"GPU-{properties.uuid}" for properties in found]
    with open(f"{sys.argv[2]}/{place}.json", "w") as file:
        json.dump([seen, [gpu.uuid for gpu in devices.gpus()]], file)
    os._exit(0)
"""


def test_cuda_and_nvml_agree_which_gpus_are_visible(
    stub_cuda: StubCuda, nvml_stub: StubNvml, tmp_path: Path
) -> None:
    """Also where the driver lists them in another order than they have on the bus."""
    on_bus = nvml_stub.write_shuffled()
    variables: dict[str | None, list[int]] = {
        None: list(range(8)),
        "": [],
        "5,2": [5, 2],
        "1,9,2": [1],
        "-1": [],
        on_bus[6]: [6],
        f"{on_bus[6]},{on_bus[0][:12]}": [6, 0],
        f"{on_bus[4]},GPU-none,{on_bus[0]}": [4],
    }
    ordered = nvml_stub.environment | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    subprocess.run(
        [stub_cuda.python, "-c", UUIDS, json.dumps(list(variables)), str(tmp_path)],
        env=stub_cuda.environment(ordered),
        cwd=tmp_path,
        timeout=PATIENCE,
        check=True,
    )
    for place, (value, indices) in enumerate(variables.items()):
        cuda, nvml = json.loads((tmp_path / f"{place}.json").read_text())
        assert cuda == [on_bus[index] for index in indices], value
        assert sorted(nvml) == sorted(cuda), value


TAKEN = """\
import os, sys
os.environ |= {"LOCAL_RANK": sys.argv[1], "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
from engine.ranks.world import take_gpu
from jobs.spec.job_spec import JobSpec
take_gpu(JobSpec(optimizer="adamw_8bit"))
import torch
from contextlib import suppress
with suppress(ImportError):
    import torchao.prototype.mx_formats.kernels
print(torch.cuda.current_device())
"""


@pytest.mark.parametrize(
    ("rank", "device"),
    [
        ("1", "1"),
        pytest.param("0", "0", marks=pytest.mark.slow),
        pytest.param("7", "0", marks=pytest.mark.slow),
    ],
)
def test_a_rank_takes_its_own_gpu_before_libraries_ask_for_one(
    stub_cuda: StubCuda, nvml_stub: StubNvml, rank: str, device: str
) -> None:
    """What there is no GPU for, `start_world` reports."""
    nvml_stub.write([gpu(0), gpu(1)])
    done = subprocess.run(
        [stub_cuda.python, "-c", TAKEN, rank],
        env=stub_cuda.environment(nvml_stub.environment),
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert done.stdout.split()[-1] == device
