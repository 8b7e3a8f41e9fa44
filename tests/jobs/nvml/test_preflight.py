"""What preflight says of GPUs that no job may have, read through the real pynvml."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from jobs.errors import SpecError
from jobs.preflight.check_job import check_devices
from jobs.spec.file.load import load_spec
from tests.support.nvml_stub.stub import GIB, gpu

if TYPE_CHECKING:
    from tests.support.nvml_stub.stub import StubNvml

pytest_plugins = ["tests.support.nvml_stub.fixture"]

MIG = [
    {
        "uuid": "MIG-1111",
        "name": "1g.10gb",
        "gpu_instance": 9,
        "memory_total": GIB,
        "memory_used": 0,
    }
]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ([1], "GPU 1 is in MIG mode"),
        (["MIG-1"], "MIG-1 is a MIG instance: GPU 1 is in MIG mode"),
        ([0, 2], "GPU 2 is lost"),
        (2, "asks for 2 GPUs, and this machine has 1 that jobs may use (GPU 1 is in MIG mode"),
        ([9], "no GPU 9"),
    ],
)
def test_gpus_that_no_job_may_have(
    nvml: StubNvml, job_values: dict[str, Any], asked: int | list[int | str], said: str
) -> None:
    nvml.write([{}, gpu(1, mig_mode=True, mig=MIG), gpu(2, errors={"*": "GPU_IS_LOST"})])
    del job_values["num_processes"]
    spec = load_spec(None, job_values | {"device": "auto", "gpus": asked})
    with pytest.raises(SpecError) as caught:
        check_devices(spec)
    assert said in str(caught.value)
