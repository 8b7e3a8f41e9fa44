"""Ranks that train toys and count their live tensors: what `test_memory_ranks.py` starts."""

from __future__ import annotations

import gc
import json
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate import cpu_offload_with_hook
from torch.distributed.distributed_c10d import _resolve_process_group

from engine import run_job
from engine.checkpoint import saver
from engine.families.flux import Flux
from engine.memory.tracing.live import Live, storage_of
from engine.model.files.weights import PinnedMemory
from engine.ranks.telemetry import Telemetry
from engine.ranks.world import leave_world, start_world
from engine.sample import sampler
from jobs.run.rundir import RunDir
from jobs.spec.file.load import load_spec
from tests.support.engine.memory import resizes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_OF_A_STEP = ("base", "forward", "backward", "step")


class OwnTensors(Live):
    """Without gloo's copy of what it reduces and scatters, which NCCL does not make.

    It is made inside of the collective, and first seen when that splits it. And without what
    ranks pickle to agree on a checkpoint: they talk through the host. Where tensors are gathered
    one by one, as for a checkpoint of whole files, gloo's thread has released each before the next:
    on a busy machine it may hold one while the next is gathered.
    """

    saving = False
    linked = 0.0  # bytes over this rank's link, as nccl-tests counts them

    def add(self, tensor: torch.Tensor) -> None:
        if self.saving and tensor.dtype is torch.uint8:
            self.ignore(tensor)
        super().add(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.split.Tensor and storage_of(args[0]) not in self.alive():
            self.ignore(args[0])
        if func.namespace == "c10d":
            self.linked += _linked(func, args)
        if func is torch.ops._c10d_functional.all_gather_into_tensor.default:
            func = _gather
        return super().__torch_dispatch__(func, types, args, kwargs)


def _gather(source: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    """Gather as the functional collective does; return once no thread of gloo holds the result."""
    whole = source.new_empty(ranks * source.size(0), *source.shape[1:])
    lent = whole.detach()
    held = weakref.ref(lent)
    _resolve_process_group(group)._allgather_base(lent, source.contiguous()).wait()
    del lent
    while held() is not None:
        time.sleep(1e-4)
    return whole


def _linked(func: Any, args: tuple[Any, ...]) -> float:
    """Return the bytes that a collective moves over a rank's link."""
    match func.overloadpacket.__name__:
        case "_allgather_base_":
            return float(args[0].nbytes - args[1].nbytes)
        case "_reduce_scatter_base_":
            return float(args[1].nbytes - args[0].nbytes)
        case "alltoall_base_":
            own = dist.get_group_rank(dist.ProcessGroup.unbox(args[2]), dist.get_rank())
            return float(args[1].element_size() * (sum(args[4]) - args[4][own]))
        case "allreduce_":
            ranks = dist.ProcessGroup.unbox(args[1]).size()
            return sum(2 * tensor.nbytes * (ranks - 1) / ranks for tensor in args[0])
    return 0.0


class Counting:
    """`engine.ranks.telemetry.Peaks` that counts live tensors instead of pages.

    Gloo's threads may hold a buffer for a moment after a collective has ended. That can only add,
    so of several steps the one with the least counts; not the first, before there is any state.
    The same for phases around the steps.
    """

    measure = "tensors"
    doing = None

    def __init__(self, live: OwnTensors) -> None:
        self._live = live
        self._steps: list[dict[str, int]] = [{}]
        self._around: dict[str, int] = {}

    @property
    def phases(self) -> dict[str, int]:
        steps = [step for step in self._steps if "step" in step][1:]
        found = {name: min(step[name] for step in steps) for name in steps[0]} if steps else {}
        return found | self._around

    @contextmanager
    def phase(self, name: str, *, measured: bool = True) -> Iterator[None]:
        # Of a save the thread that saves is counted, and not who waits for it.
        if name == "save" or not measured:
            yield
            return
        self._live.reset()
        before = self._live.linked
        yield
        if name in _OF_A_STEP:
            step = self._steps[-1]
            step["linked"] = step.get("linked", 0) + round(self._live.linked - before)
            step[name] = max(step.get(name, 0), self._live.most)
            if name == "step":
                self._steps.append({})
        else:
            self.note(name)

    def note(self, name: str) -> None:
        """A phase around the steps has ended."""
        self._around[name] = min(self._around.get(name, self._live.most), self._live.most)

    def memory(self) -> dict[str, int | None]:
        return {}


def train(rank: int, ranks: int, cases: dict[str, dict[str, Any]], folder: str) -> None:
    """Train each case; writes phase → bytes of each to `<rank>.json`."""
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-5)  # gloo's threads need the interpreter to let go of a buffer
    found = {name: _count(name, values, rank, folder) for name, values in cases.items()}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    leave_world()


def _count(name: str, values: dict[str, Any], rank: int, folder: str) -> dict[str, int]:
    gc.collect()
    gc.freeze()  # each job collects garbage several times; what is left of those before is none
    run_dir = RunDir(Path(folder, name))
    run_dir.create()
    spec = load_spec(None, values)
    telemetry = Telemetry(run_dir, rank)
    live = OwnTensors()
    counting = Counting(live)
    with ExitStack() as stack:
        for bent in (
            live,
            resizes(live),
            patch.object(run_job, "Peaks", lambda device: counting),
            patch.object(saver, "ThreadPoolExecutor", _counted_threads(live, counting)),
            patch.object(sampler, "cpu_offload_with_hook", _waiting(live)),
            patch.object(PinnedMemory, "take_like", _of_the_host(live, PinnedMemory.take_like)),
            patch.object(
                PinnedMemory, "bytes_between", _of_the_host(live, PinnedMemory.bytes_between)
            ),
            patch.object(Flux, "load_vae", _read_by_the_host(live, Flux.load_vae)),
            patch.object(
                Flux, "load_text_pipeline", _read_by_the_host(live, Flux.load_text_pipeline)
            ),
        ):
            stack.enter_context(bent)
        run_job.run_job(spec, run_dir, start_world(spec), telemetry)
    telemetry.close()
    return counting.phases


def _counted_threads(live: OwnTensors, counting: Counting) -> type[ThreadPoolExecutor]:
    """Threads in which tensors are counted too: a mode is of one thread."""

    class Counted(ThreadPoolExecutor):
        def submit(self, call: Any, /, *args: Any, **kwargs: Any) -> Any:
            if call is int:  # the saver looks, before training, whether there can be a thread
                return super().submit(call, *args, **kwargs)

            def counted() -> Any:
                live.saving = True
                with live:
                    live.reset()
                    result = call(*args, **kwargs)
                    counting.note("save")
                live.saving = False
                return result

            return super().submit(counted)

    return Counted


def _of_the_host(live: Live, take: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a function whose tensors would be in host memory, also of a rank on a GPU."""

    def taken(*args: Any) -> torch.Tensor:
        tensor = take(*args)
        live.drop({storage_of(tensor)})
        live.ignore(tensor)
        return tensor

    return taken


def _read_by_the_host(live: Live, load: Callable[..., Any]) -> Callable[..., Any]:
    """What a library takes while it reads files is no matter of the device."""

    def read(*args: Any, **kwargs: Any) -> Any:
        model = load(*args, **kwargs)
        live.reset()
        return model

    return read


def _waiting(live: Live) -> Callable[..., Any]:
    """`cpu_offload_with_hook`, after which a model is counted only while it would be on a GPU."""

    def offload(model: torch.nn.Module, device: torch.device) -> Any:
        model, hook = cpu_offload_with_hook(model, device)
        tensors = [*model.parameters(), *model.buffers()]
        inner: Any = hook.hook
        comes, goes = inner.pre_forward, hook.offload

        def count(*args: Any, **kwargs: Any) -> Any:
            live.drop({storage_of(tensor) for tensor in tensors})
            for tensor in tensors:
                live.add(tensor)
            return comes(*args, **kwargs)

        def wait() -> None:
            goes()
            live.drop({storage_of(tensor) for tensor in tensors})
            for tensor in tensors:
                live.ignore(tensor)

        inner.pre_forward, hook.offload = count, wait
        wait()
        live.reset()
        return model, hook

    return offload
