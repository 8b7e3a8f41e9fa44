"""Many jobs on stub GPUs, a process per rank: `python -m tests.support.cuda_stub.ranks PLAN.json`.

The plan says which toys to write, `{family or family:flavour: directory}`, and has a list of
groups, `{"ranks": 2, "jobs": {run directory: {"values": …, "full_in": phase}}}`. The libraries are
imported once, and each group's ranks are forked from there. Beside what a job itself writes, each
rank leaves `cuda.<rank>.json` in the run directory, with what its steps asked of the device. A job
that fails leaves what a failing rank always leaves, and its ranks go: the others would wait for one
in a collective. The jobs behind it are done by new ranks.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests.support.cuda_stub.counting import Counting
from tests.support.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_PATIENCE: Final = 600.0  # seconds for one group; a slow machine under load, not an expectation


def main() -> int:
    plan = json.loads(Path(sys.argv[1]).read_text())
    # Libraries look for GPUs while they are imported; having asked CUDA, torch is never forked.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    _import_all()
    del os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]
    gc.collect()
    gc.freeze()  # each job collects garbage several times; what was imported is none
    _forked(_write_toys, plan["toys"])
    for group in plan["groups"]:
        left = dict(group["jobs"])
        while left:
            _run(group["ranks"], left)
            begun = [name for name in left if Path(name, "begun").exists()]
            if not begun:
                return 1  # the ranks did not even meet
            for name in begun:
                del left[name]
    return 0


def _import_all() -> None:
    """What ranks need, before they are forked; nothing here touches the device."""
    from tests.support.forks.server import preload

    preload()  # first: it hides GPUs from libraries that ask them for their properties
    import diffusers.guiders
    import diffusers.loaders.peft  # noqa: F401
    import PIL.Image
    import torch._dynamo.backends.debugging
    import torch.distributed.checkpoint._fsspec_filesystem  # noqa: F401
    import transformers.models.clip.modeling_clip
    import transformers.models.t5.modeling_t5  # noqa: F401
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    import tests.support.cuda_stub.numbers  # noqa: F401

    PIL.Image.init()
    register_optimizer_step_pre_hook(_zero_gradients_in_host_memory)
    _take_all_for_right()


def _take_all_for_right() -> None:
    """What a kernel returns is what lay in the stub's memory before: at times NaN, never equal."""
    from engine.data.encode import latents, tensor_cache, texts
    from engine.model import base_matmul, packing
    from engine.sample import sampler

    base_matmul._is_right = lambda *_: True
    packing._is_equal = lambda *_: True
    for module in (latents, tensor_cache, texts, sampler):
        module.nonfinite = lambda tensors: []  # type: ignore[attr-defined]


def _zero_gradients_in_host_memory(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Of parameters offloaded to the host, which really computes with what the device left there.

    A gradient is what lay in the stub's memory before; a white image there is not a number.
    """
    from engine.model.files.weights import local_part

    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and (own := local_part(parameter.grad)).is_cpu:
                own.zero_()


def _forked(do: Callable[..., None], *words: Any) -> None:
    """In a process of its own, whose threads nobody inherits; end if it fails."""
    pid = os.fork()
    if not pid:
        try:
            do(*words)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        sys.exit(f"{do.__name__} failed")


def _write_toys(toys: dict[str, str]) -> None:
    from engine.toy import write_toy
    from jobs.spec.families import FAMILIES
    from tests.support.cuda_stub.rehearsal import side_of
    from tests.support.engine.toys import write_small_toy

    for family, place in toys.items():
        if ":" in family:
            from tests.support.engine.families import Case

            Case(family, Path(place).parent).values()  # which names the data that it writes
            continue
        flavour = next(iter(FAMILIES[family].flavours))
        if family == "flux":  # in most jobs
            write_small_toy(Path(place), pictures=4)
            continue
        write_toy(Path(place), family, flavour=flavour, pictures=4, size=side_of(family))


def _run(ranks: int, jobs: dict[str, dict[str, Any]]) -> None:
    """Fork the ranks, and end them all when one has failed."""
    port = free_port()
    pids = set()
    for rank in range(ranks):
        pid = os.fork()
        if not pid:
            _rank(rank, ranks, port, jobs)
        pids.add(pid)
    deadline = time.monotonic() + _PATIENCE
    while pids:
        pid, status = os.waitpid(-1, os.WNOHANG)
        pids.discard(pid)
        if (pid and status) or time.monotonic() > deadline:
            for other in pids:
                os.kill(other, signal.SIGKILL)
        if not pid:
            time.sleep(0.05)


def _rank(rank: int, ranks: int, port: int, jobs: dict[str, dict[str, Any]]) -> None:
    """Do the jobs as one rank, in an environment as the launcher sets it; never returns."""
    if ranks > 1:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    try:
        well = all(_job(rank, Path(name), job) for name, job in jobs.items())
    except BaseException:
        traceback.print_exc()
        well = False
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(not well)  # threads of NCCL would outlive an orderly end


def _job(rank: int, root: Path, job: dict[str, Any]) -> bool:
    """Do one job; whether it ended well."""
    import torch

    from engine.model.kernels import choose_backends
    from engine.ranks.failure import record_failure
    from engine.ranks.telemetry import Telemetry
    from engine.ranks.world import start_world
    from engine.run_job import run_job
    from jobs.run.rundir import RunDir
    from jobs.spec.file.load import load_spec

    run_dir = RunDir(root)
    run_dir.create()
    Path(root, "begun").touch()
    begun = time.process_time()
    torch.cuda.empty_cache()  # the memory of the job before
    telemetry = Telemetry(run_dir, rank)
    try:
        spec = load_spec(None, job["values"])
        # Of four ranks, so that groups that shard are as large as those that replicate.
        os.environ["CUDA_STUB_SPLIT"] = str(spec.dp_replicate_size or 0)
        choose_backends(spec)
        with Counting(job["full_in"]) as counting:
            run_job(spec, run_dir, start_world(spec), telemetry)
    except BaseException as error:
        record_failure(run_dir, rank, error, telemetry)
        return False
    telemetry.close()
    found = counting.found() | {"cpu_seconds": time.process_time() - begun}
    Path(root, f"cuda.{rank}.json").write_text(json.dumps(found))
    gc.collect()
    gc.freeze()  # what is left of it is no garbage of the next
    return True


if __name__ == "__main__":
    sys.exit(main())
