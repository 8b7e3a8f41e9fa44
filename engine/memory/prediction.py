"""Define the prediction: bytes per rank and phase, as JSON values. Imports no torch.

`jobs.memory.predicted` reads these values.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final

from jobs.memory.predicted import SCHEMA

if TYPE_CHECKING:
    from collections.abc import Mapping


PHASES: Final = (
    "load",
    "text_cache",
    "latent_cache",
    "base",
    "forward",
    "backward",
    "optimizer",
    "sample",
    "save",
)
"""In the order of a run. Phases that a job does not have, such as `sample`, are missing."""


@dataclass(frozen=True)
class Parts:
    """A rank's device memory at one moment by purpose, in bytes.

    Attributes:
        parameters: Memory held permanently: the rank's shards or the full model, and buffers.
        gathered: Parameters of units that are unsharded at that moment, and all-gather buffers.
        gradients: Gradients, and reduce-scatter buffers.
        optimizer: The optimizer's state, and a moving average on the device.
        activations: Tensors that forward keeps for backward, and a running block's working memory.
        workspace: Temporary memory of the step itself: of the optimizer, of buckets, of loading.
    """

    parameters: int = 0
    gathered: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    workspace: int = 0

    @property
    def total(self) -> int:
        """Return the sum of all parts."""
        return sum(getattr(self, part.name) for part in fields(self))


@dataclass(frozen=True)
class Phase:
    """A phase of a run.

    Attributes:
        name: One of `PHASES`.
        parts: Memory by purpose at the phase's peak.
        note: The assumption behind it, in a few words; "" if there is none.
    """

    name: str
    parts: Parts
    note: str = ""

    @property
    def peak(self) -> int:
        """Return the most bytes allocated at once."""
        return self.parts.total


@dataclass(frozen=True)
class Prediction:
    """The memory of a job on the rank that needs the most.

    Attributes:
        model: Class of the denoiser.
        parameters: Number of its parameters.
        trained: Number of trained parameters, of the model or the adapter.
        strategy: single, ddp, fsdp2 or hsdp.
        ranks: World size.
        settings: The job's keys and values that affect the prediction.
        phases: In the order of a run.
        reserved: Lower and upper bound of what torch's caching allocator will have reserved.
        overheads: Bytes by name in addition to `reserved` on a GPU; empty for CPU ranks.
        host: Bytes of host memory of one rank by name; `machine` is the sum over all ranks of one
            machine, and `present` the machine's memory, if known.
        disk: Bytes on disk by name: `cache`, `checkpoint` (one), `checkpoints` (all that are kept),
            `export`; and `free` in the run's file system, if known.
        notes: Assumptions, as sentences for users.
        work: What a rank computes and moves in a step, see `engine.memory.walk`.
    """

    model: str
    parameters: int
    trained: int
    strategy: str
    ranks: int
    settings: Mapping[str, Any]
    phases: tuple[Phase, ...]
    reserved: tuple[int, int]
    overheads: Mapping[str, int] = field(default_factory=dict)
    host: Mapping[str, int] = field(default_factory=dict)
    disk: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    work: Mapping[str, Any] = field(default_factory=dict)

    @property
    def peak(self) -> int:
        """Return the most bytes allocated at once, over all phases."""
        return self.largest.peak

    @property
    def largest(self) -> Phase:
        """Return the phase that needs the most memory."""
        return max(self.phases, key=lambda phase: phase.peak)

    @property
    def device(self) -> tuple[int, int]:
        """Return bounds of the memory that the driver shows: reserved plus overheads."""
        beside = sum(self.overheads.values())
        return self.reserved[0] + beside, self.reserved[1] + beside

    def phase(self, name: str) -> Phase | None:
        """Return a phase by name; None if the job does not have it."""
        return next((phase for phase in self.phases if phase.name == name), None)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, including the derived `peak`, `largest` and `device`."""
        phases = [
            {
                "name": phase.name,
                "peak": phase.peak,
                "parts": asdict(phase.parts),
                "note": phase.note,
            }
            for phase in self.phases
        ]
        return {
            "schema": SCHEMA,
            "model": self.model,
            "parameters": self.parameters,
            "trained": self.trained,
            "strategy": self.strategy,
            "ranks": self.ranks,
            "settings": dict(self.settings),
            "phases": phases,
            "peak": self.peak,
            "largest": self.largest.name,
            "reserved": list(self.reserved),
            "device": list(self.device),
            "overheads": dict(self.overheads),
            "host": dict(self.host),
            "disk": dict(self.disk),
            "notes": list(self.notes),
            "work": dict(self.work),
        }
