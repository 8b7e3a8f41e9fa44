"""What other trainers say when something cannot be, and what is said here, before a job is queued.

One row for each error that the documents of our peers name, through submit, and through resume
where it can come up there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from jobs import service
from jobs.errors import UserError
from jobs.machine.devices import Gpu
from jobs.memory.host_memory import check_host_memory
from jobs.queue.states import State
from jobs.spec.file.load import load_spec
from jobs.spec.job_spec import JobSpec
from jobs.units import size
from tests.support.jobs.checkpoints import save_checkpoint
from tests.support.tui.detection import flux

if TYPE_CHECKING:
    from jobs.queue.store import Store

GIB = 2**30
FLUX = 11_900_000_000  # parameters
TWO_GPUS = {"device": "auto", "gpus": 2, "mixed_precision": "bf16"}
NEEDS_RAM = TWO_GPUS | {"model_type": "full", "fsdp_cpu_offload": True}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, started: list[int]) -> None:
    """Two GPUs, 64 GiB of host memory, and a model of FLUX.1's size whose blocks are known."""
    gpus = [Gpu(n, f"GPU-{n}", "H200", 140 * GIB, memory_used=0) for n in range(2)]
    monkeypatch.setattr("jobs.machine.devices.gpus", lambda: gpus)
    monkeypatch.setattr("jobs.memory.host_memory.host_bytes", lambda: 64 * GIB)
    monkeypatch.setattr("jobs.memory.host_memory.count_parameters", lambda path: FLUX)
    monkeypatch.setattr("jobs.preflight.check_job.detect_blocks", lambda **_: flux())


ROWS: list[tuple[dict[str, Any], str]] = [
    (
        TWO_GPUS | {"strategy": "fsdp2", "deepspeed_config": "ds.json"},
        "FSDP and DeepSpeed cannot be enabled simultaneously. Remove deepspeed_config",
    ),
    (
        TWO_GPUS | {"strategy": "ddp", "context_parallel_size": 2},
        "Context parallelism requires FSDP2. Set strategy: fsdp2 and fsdp_version: 2",
    ),
    (
        TWO_GPUS | {"fsdp_version": 1, "context_parallel_size": 2},
        "Context parallelism requires FSDP2. Set strategy: fsdp2 and fsdp_version: 2",
    ),
    ({"model_family": "fluxx"}, 'unknown model_family "fluxx" (did you mean "flux"?); known: '),
    # blocks that were detected in the model that the job had before
    (
        TWO_GPUS | {"fsdp_transformer_layer_cls_to_wrap": ["JointTransformerBlock"]},
        'fsdp_transformer_layer_cls_to_wrap: "JointTransformerBlock" is not in the model '
        '(did you mean "FluxTransformerBlock"?)',
    ),
    (
        NEEDS_RAM,
        "fsdp_cpu_offload: the job needs at least 177 GiB of host memory for weights, gradients "
        "and optimizer state; this machine has 64.0 GiB; remove fsdp_cpu_offload",
    ),
]


@pytest.mark.parametrize(("changes", "said"), ROWS, ids=lambda v: str(v)[:50])
def test_it_is_said_before_the_job_is_queued(
    store: Store, job_values: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    values = {k: v for k, v in (job_values | changes).items() if k != "num_processes"}
    with pytest.raises(UserError) as caught:
        service.submit(store, load_spec(None, values))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert store.all() == []


def test_a_resume_on_a_machine_with_too_little_host_memory_is_refused(
    store: Store, job_values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {k: v for k, v in (job_values | NEEDS_RAM).items() if k != "num_processes"}
    with monkeypatch.context() as larger:
        larger.setattr("jobs.memory.host_memory.host_bytes", lambda: 512 * GIB)
        job = service.submit(store, load_spec(None, values))
    store.change(job.id, State.STOPPED, "was stopped")
    save_checkpoint(job.run_dir, 3)
    with pytest.raises(UserError) as caught:
        service.resume(store, job.id)
    assert "177 GiB of host memory for weights, gradients and optimizer" in str(caught.value)
    assert store.get(job.id).state is State.STOPPED


@pytest.mark.parametrize(
    ("changes", "on_gpus", "gib"),
    [
        ({"num_processes": 2, "model_type": "full", "fsdp_cpu_offload": True}, True, 177.3),
        (
            {
                "num_processes": 2,
                "model_type": "full",
                "fsdp_cpu_offload": True,
                "optimizer": "sgd",
            },
            True,
            88.7,
        ),
        ({"num_processes": 2, "fsdp_cpu_offload": True}, True, 22.2),
        (
            {
                "num_processes": 4,
                "strategy": "hsdp",
                "dp_replicate_size": 2,
                "fsdp_cpu_offload": True,
            },
            True,
            44.3,
        ),
        ({"num_processes": 2, "strategy": "ddp"}, False, 44.3),
        ({"num_processes": 2}, False, 22.2),
        ({"mixed_precision": "no"}, False, 44.3),
    ],
)
def test_the_least_that_is_kept_in_host_memory(
    job_values: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    on_gpus: bool,
    gib: float,
) -> None:
    model = job_values["pretrained_model_name_or_path"]
    spec = JobSpec(pretrained_model_name_or_path=model, **changes)
    monkeypatch.setattr("jobs.memory.host_memory.host_bytes", lambda: int((gib + 0.2) * GIB))
    check_host_memory(spec, on_gpus=on_gpus)
    monkeypatch.setattr("jobs.memory.host_memory.host_bytes", lambda: int((gib - 0.2) * GIB))
    with pytest.raises(UserError, match=f"at least {size(gib * GIB)} "):
        check_host_memory(spec, on_gpus=on_gpus)


def test_ranks_on_gpus_without_offload_need_nothing_of_it(
    job_values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.memory.host_memory.host_bytes", lambda: 0)
    model = job_values["pretrained_model_name_or_path"]
    spec = JobSpec(pretrained_model_name_or_path=model, num_processes=2, model_type="full")
    check_host_memory(spec, on_gpus=True)
    with pytest.raises(UserError, match="of host memory"):
        check_host_memory(spec, on_gpus=False)
