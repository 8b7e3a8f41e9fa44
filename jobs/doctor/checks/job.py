"""The job: what `submit` would refuse, all of it at once, and what it would wait for."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from jobs.backends import backend
from jobs.doctor.checks.keeper import claimed
from jobs.doctor.finding import Finding, Verdict, fail, ok, warn
from jobs.errors import UserError
from jobs.machine.gpu import foreign_users
from jobs.memory.host_memory import check_host_memory
from jobs.preflight.check_job import check_devices, check_model
from jobs.preflight.compiler import check_compiler
from jobs.preflight.dataset import check_dataset
from jobs.preflight.wrapped_classes import check_block_names, check_wrap_policy
from jobs.spec.file.load import load_spec
from jobs.spec.rules.cascade import settle
from jobs.spec.rules.strategy import world_size
from jobs.spec.rules.warnings import find_warnings
from jobs.trackers import check_trackers
from jobs.units import gpus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from jobs.doctor.patient import Patient
    from jobs.machine.gpu import Gpu
    from jobs.spec.job_spec import JobSpec, RecipeKeys

_OTHERWISE: Final = "change it in the job file"


def read_job(patient: Patient) -> Iterator[Finding]:
    """Read the job file."""
    if patient.job is None:
        return
    notes: list[str] = []
    try:
        spec = load_spec(patient.job, on_note=notes.append)
    except UserError as error:
        yield _refused("job file", error)
        return
    warnings = notes + find_warnings(spec)
    patient.spec = settle(spec)
    for text in warnings:
        yield warn("job file", text, _OTHERWISE)
    if not warnings:
        yield ok(
            "job file",
            f"{patient.job}: {spec.name}, {spec.model_family}, "
            f"{spec.model_type}, {world_size(spec)} ranks",
        )


def check_job(patient: Patient) -> Iterator[Finding]:
    """Run all checks of `jobs.preflight.check_job.check`, beyond the first that fails."""
    spec = patient.spec
    if spec is None:
        return
    model = list(_tried("model", partial(check_model, settings=True), spec))
    yield from model
    if model[0].verdict is Verdict.OK:  # else there is nothing to look for blocks in
        yield from _tried("blocks", check_block_names, spec)
    yield from _tried("wrap policy", check_wrap_policy, spec)
    yield from _tried("dataset", check_dataset, spec, "{} images and videos")
    yield from _tried("trackers", check_trackers, spec)
    if spec.launcher == "slurm":  # this machine's devices say nothing of the nodes
        slurm = backend(spec.launcher)
        yield from _tried("slurm", lambda _: slurm.request(spec) and "sbatch is there", spec)
    elif patient.nvml is not None:  # else the driver hangs, and would again
        yield from check_job_gpus(spec, patient.nvml.gpus)
        on_gpus = spec.device != "cpu" and bool(patient.nvml.gpus)
        yield from _tried("compiler", partial(check_compiler, on_gpus=on_gpus), spec)
        yield from _tried("host memory", partial(check_host_memory, on_gpus=on_gpus), spec)


def check_job_gpus(spec: RecipeKeys, present: Sequence[Gpu]) -> Iterator[Finding]:
    """Whether the job's GPUs are there, and whether it would have to wait for them."""
    try:
        requested = check_devices(spec)
    except UserError as error:
        yield _refused("devices", error)
        return
    if requested is None:
        yield ok("devices", f"{world_size(spec)} CPU ranks")
        return
    claims = claimed()
    others = {} if spec.share_gpus else foreign_users(present, (), claims)
    taken = {gpu.uuid: _holder(gpu, claims, others) for gpu in present}
    usable = [gpu for gpu in present if gpu.unusable is None]
    if isinstance(requested, int):
        free = [gpu for gpu in usable if not taken[gpu.uuid]]
        now = min(requested, len(free))
        words = f"{gpus(requested)}, of which {now} {'is' if now == 1 else 'are'} free now"
        waits = now < requested
    else:
        mine = [gpu for gpu in usable if gpu.uuid in requested]
        busy = [f"GPU {gpu.index} {taken[gpu.uuid]}" for gpu in mine if taken[gpu.uuid]]
        words = f"GPU {', '.join(str(gpu.index) for gpu in mine)}; " + ("; ".join(busy) or "free")
        waits = bool(busy)
    if waits:
        yield warn("devices", words, "the job waits in the queue until they are free")
    else:
        yield ok("devices", words)


def _holder(gpu: Gpu, claims: dict[str, int], others: dict[str, str]) -> str:
    if gpu.uuid in claims:
        return f"is held by job {claims[gpu.uuid]}"
    return f"is used by {others[gpu.uuid]}" if gpu.uuid in others else ""


def _tried(
    name: str, check: Callable[[JobSpec], object], spec: JobSpec, words: str = "{}"
) -> Iterator[Finding]:
    """Yield the outcome of one of preflight's checks; nothing where there is nothing to tell."""
    try:
        result = check(spec)
    except UserError as error:
        yield _refused(name, error)
        return
    if result is not None:
        yield ok(name, words.format(result))


def _refused(name: str, error: UserError) -> Finding:
    return fail(name, error.message, error.hint or _OTHERWISE)
