"""Read ranges of stored tensors directly into their destination memory.

Measured on 2.3 GB of fp32 and 2 ranks: with `os.preadv`, a rank's memory grows only by its shard.
With a memory mapping (`safetensors.get_slice`, and torch's `HuggingFaceStorageReader`, which uses
it), it grows by twice that until the file is closed, since mapped pages count toward the process
unless another process maps the same ones. `tests/bench/load.py` shows both.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import torch

from engine.model.files.published_packing import scale_of
from jobs.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from engine.model.files.weight_files import StoredTensor
    from engine.model.packing import Packing

# Four reads at a time took a third to a half of the time of one at a time on a cold disk.
_THREADS: Final = 4
_CHUNK_BYTES: Final = 16 * 2**20  # per read, and the size of a thread's buffer if it needs one
# Bytes that are read, and packed, at a time: on a CPU as much as its caches hold. Packing takes ten
# times as much memory.
_PACKED_BYTES: Final = {"cpu": (2**19, 2**19), "cuda": (_CHUNK_BYTES, 4 * 2**20)}


@dataclass(frozen=True)
class Reading:
    """A range to read into one tensor.

    Attributes:
        source: The stored tensor.
        first: The first element to read, in row-major order; the size of `target` gives their
            number.
        target: A plain tensor of any float dtype, on any device; or rows of a packed weight.
        packing: How `target` is packed; None if it is not.
        scale: The same rows of its scale; None if it has none.
    """

    source: StoredTensor
    first: int
    target: torch.Tensor
    packing: Packing | None = None
    scale: torch.Tensor | None = None


def read_all(readings: list[Reading], progress: Callable[[int], None]) -> int:
    """Perform all readings, several at a time.

    Args:
        readings: Readings with non-overlapping targets.
        progress: Called from this thread with the number of readings done.

    Returns:
        Bytes read.

    Raises:
        UserError: A file cannot be read or is shorter than its header says, or a value in it is too
            large for float16.
    """
    total = 0
    with ExitStack() as opened:
        files: dict[Path, int] = {}
        for file in {reading.source.file for reading in readings}:
            try:
                files[file] = os.open(file, os.O_RDONLY)
            except OSError as error:
                raise UserError(f"cannot read {file} ({error.strerror})") from None
            opened.callback(os.close, files[file])
        reader = _Reader(files)
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="weights") as pool:
            futures = [pool.submit(reader.read, reading) for reading in readings]
            try:
                for done, future in enumerate(as_completed(futures), 1):
                    total += future.result()
                    progress(done)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return total


class _Reader:
    """Reads on several threads, each with its own buffer if the data needs one."""

    def __init__(self, files: dict[Path, int]) -> None:
        self._files = files
        self._own = threading.local()

    @torch.no_grad()
    def read(self, reading: Reading) -> int:
        """Fill one target, and return the bytes read."""
        source, target = reading.source, reading.target.detach()
        if not target.numel():
            return 0  # a rank without rows
        if reading.packing is not None:
            return self._pack(reading, reading.packing)
        if not target.is_contiguous():
            whole = torch.empty_like(target, memory_format=torch.contiguous_format)
            read = self.read(Reading(source, reading.first, whole))
            target.copy_(whole)
            return read
        flat = target.view(-1)
        at = source.start + reading.first * source.dtype.itemsize
        if flat.device.type == "cpu" and flat.dtype is source.dtype:
            self._fill(source.file, at, flat)
        else:
            self._fill_through_buffer(source, at, flat)
        return flat.numel() * source.dtype.itemsize

    def _pack(self, reading: Reading, packing: Packing) -> int:
        """Read a buffer of rows at a time, and pack them in parts on the target's device."""
        if reading.source.packed is not None:
            return self._copy_packed(reading, packing)
        source, target = reading.source, reading.target.detach()
        columns, width = source.row_elements, source.dtype.itemsize
        own = None if reading.scale is None else reading.scale.detach()
        at = source.start + reading.first * width
        buffers = self._buffers(target.device)
        read, packed_bytes = _PACKED_BYTES[target.device.type]
        part = max(1, packed_bytes // (columns * width))
        step = max(1, min(read, buffers.size) // (columns * width))
        for begin in range(0, len(target), step):
            end = min(len(target), begin + step)
            chunk = buffers.take(source.dtype)[: (end - begin) * columns]
            self._fill(source.file, at + begin * columns * width, chunk)
            rows = chunk.view(-1, columns).to(target.device, non_blocking=True)
            buffers.sent()
            for first in range(begin, end, part):
                last = min(end, first + part)
                packed, scale = packing.pack(rows[first - begin : last - begin])
                target[first:last].copy_(packed)
                if own is not None and scale is not None:
                    own[first:last].copy_(scale)
        return len(target) * columns * width

    def _copy_packed(self, reading: Reading, packing: Packing) -> int:
        """Read rows that are already packed in the file unchanged, and their scales."""
        source, target = reading.source, reading.target.detach()
        columns = source.row_elements
        first = reading.first // columns
        at = source.start + reading.first // packing.per_byte
        self._fill_through_buffer(replace(source, dtype=torch.uint8), at, target.view(-1))
        if reading.scale is not None:
            scale = scale_of(source, self._read_small)
            reading.scale.detach().copy_(scale[first : first + len(target)])
        return target.numel()

    def _read_small(self, source: StoredTensor) -> torch.Tensor:
        """Return a tensor in host memory."""
        whole = torch.empty(source.shape, dtype=source.dtype)
        self._fill(source.file, source.start, whole.view(-1))
        return whole

    def _fill_through_buffer(self, source: StoredTensor, at: int, flat: torch.Tensor) -> None:
        """Read chunk by chunk, and convert or move each."""
        buffers = self._buffers(flat.device)
        step = buffers.size // source.dtype.itemsize
        for begin in range(0, flat.numel(), step):
            part = flat[begin : begin + step]
            chunk = buffers.take(source.dtype)[: part.numel()]
            self._fill(source.file, at + begin * source.dtype.itemsize, chunk)
            part.copy_(chunk, non_blocking=True)  # a GPU also converts it
            buffers.sent()
            if part.dtype is torch.float16 and source.dtype is not torch.float16:
                _check_finite(part, source)

    def _fill(self, file: Path, at: int, flat: torch.Tensor) -> None:
        """Read the size of a contiguous CPU tensor directly into it."""
        memory = flat.view(torch.uint8).numpy().data
        done = 0
        while done < len(memory):
            try:
                got = os.preadv(self._files[file], [memory[done : done + _CHUNK_BYTES]], at + done)
            except OSError as error:
                raise UserError(f"cannot read {file} ({error.strerror})") from None
            if got == 0:
                raise UserError(f"{file} was truncated while being read")
            done += got

    def _buffers(self, device: torch.device) -> _Buffers:
        """Return this thread's buffers for a device."""
        by_device: dict[str, _Buffers] = self._own.__dict__.setdefault("buffers", {})
        if device.type not in by_device:
            if device.type == "cuda":
                # A new thread starts on GPU 0; pinning there would create a context on it for every
                # rank.
                torch.cuda.set_device(device)
            by_device[device.type] = _Buffers(device)
        return by_device[device.type]


class _Buffers:
    """Two halves of a buffer, of which one is read into while the GPU copies from the other.

    For a CPU it is one.

    Args:
        device: Where what is read goes to.

    Attributes:
        size: Bytes that `take` returns.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        memory = torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=self._on_gpu)
        self._halves = list(memory.chunk(2 if self._on_gpu else 1))
        self._copied: list[torch.cuda.Event | None] = [None] * len(self._halves)
        self.size = len(self._halves[0])

    def take(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the half that was sent first, once it is copied."""
        self._halves.append(self._halves.pop(0))
        self._copied.append(self._copied.pop(0))
        copied = self._copied[-1]
        if copied is not None and not copied.query():
            copied.synchronize()
        return self._halves[-1].view(dtype)

    def sent(self) -> None:
        """Remember that copies of what `take` returned are on their way."""
        if self._on_gpu:
            self._copied[-1] = torch.cuda.current_stream().record_event()


def _check_finite(part: torch.Tensor, source: StoredTensor) -> None:
    if not torch.isfinite(part).all():
        raise UserError(
            f"{source.file}: {source.name} contains a value too large for float16",
            "set mixed_precision: bf16",
        )
