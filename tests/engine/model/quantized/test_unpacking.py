"""How weights are unpacked: by Triton's kernels, within compiled graphs, and by torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode

from engine.memory.tracing.fakes import temporary
from engine.memory.tracing.live import Live
from engine.memory.tracing.work import Counter
from engine.model import packing
from engine.model.adapters import lora
from engine.model.packing import Packing
from jobs.spec.job_spec import JobSpec
from tests.support.cuda_stub.stub import REQUIRED_VARIABLE, Unavailable, find_python
from tests.support.engine.quantized import layer_of, some_weight
from tests.support.engine.weights import CPU
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from jobs.spec.values.value_types import BasePrecision

SCHEMES: tuple[BasePrecision, ...] = ("fp8", "fp8_scaled", "int8", "nf4")
# Bytes that a weight in bf16 costs: its packed bits, its share of a scale, and itself.
MOVED = {"nf4": 0.5 + 4 / 64 + 2, "int8": 3, "fp8_scaled": 3}


def ask(what: str, **variables: str) -> dict[str, Any]:
    """What `tests.support.engine.unpacking` prints, run where Triton is."""
    try:
        python = find_python()
    except Unavailable as problem:
        if os.environ.get(REQUIRED_VARIABLE):
            pytest.fail(f"{REQUIRED_VARIABLE} is set, but {problem}")
        pytest.skip(str(problem))
    done = subprocess.run(
        [python.path, "-m", "tests.support.engine.unpacking", what],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_unpacking_takes_is_counted_for_both_ways(
    scheme: BasePrecision, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One operation, with the bytes of our kernel, and bytes and memory of torch's operations."""
    monkeypatch.setattr(packing, "_AT_ONCE", 2**13)
    how, rows, columns = Packing(scheme), 64, 1024
    packed, scale = how.pack(some_weight(rows, columns))
    codes = how.code_table(dtype)
    counter = Counter()
    peaks = []
    for each in (how, replace(how, traced=True)):
        live = Live(temporary, counter)
        with FakeTensorMode() as mode:
            given = [t if t is None else mode.from_tensor(t) for t in (packed, scale, codes)]
            for tensor in filter(torch.is_tensor, given):
                live.ignore(tensor)
            with live:
                each.unpack(*given, dtype)
        peaks.append(live.most)
        work = counter.take()
        if not each.traced:
            by_torch = work
    assert work.kernels == 1
    assert work.bytes == 0
    assert work.unpacked_by_torch == pytest.approx(by_torch.bytes, rel=0.02)
    of_weight = rows * columns * dtype.itemsize
    stored = packed.numel() + (0 if scale is None else 4 * scale.numel())
    assert work.unpacked == stored + of_weight
    if dtype is torch.bfloat16 and scheme in MOVED:
        assert work.unpacked == pytest.approx(rows * columns * MOVED[scheme], rel=0.01)
    assert peaks[0] == peaks[1]


@pytest.mark.slow
def test_kernels_compute_what_torch_does() -> None:
    """Bit for bit, whatever the bytes, with and without a partial tile."""
    from tests.support.engine.unpacking import CASES, DTYPES

    found = ask("interpreted", TRITON_INTERPRET="1")
    assert found == dict.fromkeys(MOVED, CASES * len(DTYPES))


@pytest.mark.slow
def test_kernels_move_each_byte_once() -> None:
    """And round and keep subnormal numbers as torch does, compiled for Ampere to Blackwell."""
    from tests.support.engine.unpacking import THREADS

    found = ask("compiled")
    assert len(found) == 9
    for name, counts in found.items():
        scheme = name.split()[0]
        weights = counts["tile"] * (2 if scheme == "nf4" else 1)
        assert counts["packed"] * THREADS == counts["tile"], name
        assert counts["stored"] * THREADS == weights * 2, name
        moved = (counts["tile"] + 4 * counts["scales"]) / weights + 2
        assert moved == pytest.approx(MOVED[scheme], rel=2e-3), name
        assert counts["rounds to nearest"], name
        assert not counts["flushes subnormal numbers"], name


@pytest.mark.parametrize(
    ("scheme", "adapted"), [*((scheme, False) for scheme in SCHEMES), ("nf4", True)]
)
def test_a_compiled_layer_keeps_no_unpacked_weight(scheme: BasePrecision, adapted: bool) -> None:
    """AOTAutograd keeps one that forward and backward unpack alike, as Inductor would run it."""
    layer, weight = layer_of(scheme, some_weight(), torch.float32)
    model = torch.nn.Sequential(layer)
    if adapted:
        lora.add_lora(model, JobSpec(lora_rank=2, mixed_precision="no"), "0")
        for parameter in lora.lora_parameters(model).values():
            torch.nn.init.zeros_(parameter)
    outputs: list[list[Any]] = []

    def note(graph: torch.fx.GraphModule, _: Any) -> Any:
        (output,) = graph.graph.find_nodes(op="output")
        outputs.append([node.meta["val"] for node in output.args[0] if node is not None])
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=note, partition_fn=min_cut_rematerialization_partition)
    x = torch.randn(5, 192, requires_grad=True)
    torch._dynamo.reset()
    out = torch.compile(model, backend=backend)(x)
    out.square().sum().backward()
    forward, _ = outputs
    kept = [tuple(value.shape) for value in forward[1:] if value.is_floating_point()]
    assert weight.shape not in kept
    assert tuple(weight.shape)[::-1] not in kept
    assert torch.equal(out, torch.nn.functional.linear(x, weight, layer.bias))
    torch.testing.assert_close(x.grad, 2 * out.detach() @ weight)


def test_what_torch_needs_beyond_the_weight_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the memory that is predicted, of torch's kernels, also holds where Triton unpacks."""
    assert packing._AT_ONCE * 4 == 16 * 2**20
    monkeypatch.setattr(packing, "_AT_ONCE", 2**10)
    for scheme in SCHEMES:
        how = Packing(scheme)
        given = *how.pack(some_weight(64, 512)), how.code_table(torch.bfloat16)
        live = Live()
        for tensor in given:
            if tensor is not None:
                live.ignore(tensor)
        with live:
            weight = how.unpack_by_torch(*given, torch.bfloat16)
        assert live.activations == weight.nbytes
        assert live.most <= weight.nbytes + (4 * 2**10 if scheme == "nf4" else 0)


def test_only_what_a_kernel_can_read_is_given_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither fp8, for which torch needs one kernel as well, nor the CPU's, nor other layouts."""
    given: list[str] = []

    def kernel(*args: Any) -> torch.Tensor:
        given.append(args[-1])
        return torch.empty(0)

    monkeypatch.setattr(packing, "find_kernel", lambda index: (kernel, ""))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # as a CPU tensor's

    class OnGpu(torch.Tensor):
        is_cuda = True

    for scheme in SCHEMES:
        how = Packing(scheme)
        packed, scale = how.pack(some_weight())
        codes = how.code_table(torch.bfloat16)
        expected = how.unpack(packed, scale, codes, torch.bfloat16)
        subclass = packed.as_subclass(OnGpu)
        found = how.unpack(subclass, scale, codes, torch.bfloat16)
        assert torch.equal(found.as_subclass(torch.Tensor), expected)
    assert not given


def test_a_kernel_is_tried_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it fails, computes something else or cannot be, torch unpacks, and the log says why."""

    def right(*given: Any) -> torch.Tensor:
        return Packing(given[-1]).unpack_by_torch(*given[:-1])

    assert packing._is_equal(right, CPU)
    assert not packing._is_equal(lambda *given: right(*given) + 1, CPU)
    capability = [9, 0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: tuple(capability))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setitem(sys.modules, "engine.model.unpack_kernels", None)
    gpu = torch.device("cuda", 0)
    for words in ("fails (ModuleNotFoundError: import of engine", "needs an NVIDIA GPU of compute"):
        packing.find_kernel.cache_clear()
        assert packing.find_kernel(0)[0] is None
        assert packing.unpacked_by(gpu).startswith(f"torch, since Triton {words}")
        capability[:] = 7, 5
    packing.find_kernel.cache_clear()
    assert packing.unpacked_by(CPU) == "torch"
