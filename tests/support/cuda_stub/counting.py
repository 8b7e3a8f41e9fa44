"""Count what each step of a job asks of the device, and say where it waits for it."""

from __future__ import annotations

import collections
import ctypes
import os
import sys
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# In the order of the enum in cuda_stub.c.
NAMES: Final = (
    "launches",
    "casts",
    "gemms",
    "h2d",
    "h2d_pageable",
    "d2h",
    "d2d",
    "h2d_bytes",
    "d2h_bytes",
    "syncs",
    "nccl",
    "memsets",
    "mallocs",
    "host_allocs",
    "bad_devices",
    "h2d_aside",  # bytes, on a stream that does not compute
)
# Packages whose versions decide how many kernels a step launches.
_DECIDING: Final = ("torch", "diffusers", "transformers", "peft")
_LITTLE: Final = 4 << 20  # bytes; less than a toy transformer
_OURS: Final = ("/engine/", "/diffusers/", "/peft/", "/fully_shard/", "/_fsdp", "/optim/", "/amp/")


# Phases in which libraries read what they have computed: it is done on the CPU as well (`numbers`).
_READ_BACK: Final = ("encode", "sample")


class Counting:
    """While it is entered, every step and every phase of it is counted.

    Args:
        full_in: Phase from which on the device gives no memory beyond what it has given;
            "start" for all of the job.

    The engine is not asked to report this, so three of its methods are wrapped for the time being.
    """

    def __init__(self, full_in: str | None = None) -> None:
        self._full_in = full_in
        self._library = ctypes.CDLL(None)
        self._library.cuda_stub_count.restype = ctypes.c_long
        self._library.cuda_stub_used.restype = ctypes.c_long
        self._steps: list[dict[str, int]] = []
        self._phases: dict[str, list[dict[str, int]]] = collections.defaultdict(list)
        self._syncs: collections.Counter[str] = collections.Counter()
        self._memory: dict[str, int] = {}
        self._phase = ""
        self._in_step = False
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> Counting:
        from engine.ranks.telemetry import Peaks
        from engine.train.optimizer_step import Stepper
        from engine.train.validation_loss import ValidationLoss

        os.environ.pop("CUDA_STUB_BYTES", None)
        if self._full_in == "start":
            os.environ["CUDA_STUB_BYTES"] = str(_LITTLE)
        # Kept, so that it is not collected while the library may call it.
        self._callback = ctypes.CFUNCTYPE(None)(self._waited)
        self._library.cuda_stub_on_sync(self._callback)
        self._behind = self._snapshot(background=1)
        self._held_before = (
            _held()
        )  # by what libraries keep of jobs before, such as tables of angles
        run, phase, measure = Stepper.run, Peaks.phase, ValidationLoss.measure
        counting = self

        def counted_run(*words: Any) -> Any:
            return counting._run(run, *words)

        @contextmanager
        def counted_phase(peaks: Peaks, name: str, **how: bool) -> Iterator[None]:
            with phase(peaks, name, **how), counting._counted(name), counting._computed(name):
                yield

        def counted_measure(*words: Any) -> Any:
            with counting._counted("validate"):
                return measure(*words)

        Stepper.run, Peaks.phase = counted_run, counted_phase  # type: ignore[method-assign]
        ValidationLoss.measure = counted_measure  # type: ignore[method-assign]

        def undo() -> None:
            Stepper.run, Peaks.phase = run, phase  # type: ignore[method-assign]
            ValidationLoss.measure = measure  # type: ignore[method-assign]

        self._undo.append(undo)
        return self

    def __exit__(self, *_: object) -> None:
        self._library.cuda_stub_on_sync(None)
        for undo in self._undo:
            undo()

    def found(self) -> dict[str, Any]:
        """What was counted, ready for JSON."""
        return {
            "steps": self._steps,
            "phases": self._phases,
            "syncs": dict(self._syncs.most_common()),
            "memory": self._memory,
            "totals": self._snapshot(),
            "behind": _difference(self._behind, self._snapshot(background=1)),
            "versions": {name: version(name) for name in _DECIDING},
        }

    def _snapshot(self, background: int = 0) -> dict[str, int]:
        return {
            name: self._library.cuda_stub_count(place, background)
            for place, name in enumerate(NAMES)
        }

    def _run(self, run: Callable[..., Any], *words: Any) -> Any:
        before, self._in_step = self._snapshot(), True
        self._syncs.clear()  # of the last step alone
        try:
            return run(*words)
        finally:
            self._in_step = False
            self._steps.append(_difference(before, self._snapshot()))
            self._memory["held"] = _held() - self._held_before

    @contextmanager
    def _counted(self, name: str) -> Iterator[None]:
        if name == self._full_in and "CUDA_STUB_BYTES" not in os.environ:
            _give_back()
            os.environ["CUDA_STUB_BYTES"] = str(self._library.cuda_stub_used(self._device()))
        before, self._phase = self._snapshot(), name
        try:
            yield
        finally:
            self._phase = ""
            self._phases[name].append(_difference(before, self._snapshot()))
            self._memory[name] = self._library.cuda_stub_used(self._device())

    def _computed(self, phase: str) -> AbstractContextManager[Any]:
        """In phases whose numbers are read; not while it trains, where everything counts."""
        from tests.support.cuda_stub.numbers import Numbers

        return Numbers() if phase in _READ_BACK else nullcontext()

    @staticmethod
    def _device() -> int:
        import torch

        return torch.cuda.current_device()

    def _waited(self) -> None:
        """The host waits for the device: remember where, innermost of our and libraries' frames."""
        if not self._in_step:
            return
        places: list[str] = []
        frame = sys._getframe().f_back  # None on a thread of autograd's
        while frame is not None and len(places) < 2:
            file = frame.f_code.co_filename
            if any(part in file for part in _OURS):
                folder, name = file.rsplit("/", 2)[-2:]
                places.append(f"{folder}/{name}:{frame.f_lineno}")
            frame = frame.f_back
        self._syncs[f"{self._phase or 'step'}: {' < '.join(places) or 'backward'}"] += 1


def _give_back() -> None:
    """What torch has of the device and does not use, such as what jobs before have needed."""
    import torch

    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def _held() -> int:
    """Bytes of tensors on the device. Without cuBLAS's 32 MiB a handle: toys weigh less."""
    import torch

    if not torch.cuda.is_initialized():
        return 0
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def _difference(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: after[name] - before[name] for name in before if after[name] != before[name]}
