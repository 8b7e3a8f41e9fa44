"""What no model explains: named constants, and the band of what the allocator reserves.

Taken from what others have measured (a GPU's context, NCCL's buffers) and from replays of traces
through a model of the caching allocator. `Overheads` is handed to `predict`, so that numbers
measured on a person's own machine can take the place of these.
"""

from __future__ import annotations

from dataclasses import dataclass

_MIB = 1 << 20


@dataclass(frozen=True)
class Overheads:
    """Bytes on a GPU besides tensors, and how much more than tensors torch reserves.

    Attributes:
        cuda_context: The driver's context and loaded kernels, of one process.
        cublas: Workspaces of cuBLAS and cuBLASLt.
        nccl: Buffers of a communicator, that of all ranks.
        nccl_more: Of each further one: HSDP's replicas, context-parallel groups.
        reserved_low: Reserved per allocated bytes at the peak, at the least.
        reserved_high: The same at the most.
        segment: Bytes that are reserved at once.
    """

    cuda_context: int = 400 * _MIB
    cublas: int = 40 * _MIB
    nccl: int = 800 * _MIB
    nccl_more: int = 400 * _MIB
    reserved_low: float = 1.03
    reserved_high: float = 1.25
    segment: int = 2 * _MIB

    def beside(self, communicators: int) -> dict[str, int]:
        """Name → bytes that the driver counts besides what torch reserves."""
        parts = {"cuda_context": self.cuda_context, "cublas": self.cublas}
        if communicators:
            parts["nccl"] = self.nccl + (communicators - 1) * self.nccl_more
        return parts

    def reserved(self, allocated: int) -> tuple[int, int]:
        """Bound what torch reserves on a GPU for a peak of allocated bytes: least and most."""
        low, high = (
            -(-int(allocated * factor) // self.segment) * self.segment
            for factor in (self.reserved_low, self.reserved_high)
        )
        return low, high


OVERHEADS = Overheads()
"""With `expandable_segments:True`, as jobs are launched."""
