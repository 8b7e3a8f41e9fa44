"""What is predicted: bytes per rank, phase by phase, as JSON values. Imports no torch.

`jobs.memory.predicted` reads what this writes.
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
    "forward",
    "backward",
    "optimizer",
    "sample",
    "save",
)
"""In the order of a run. Those that a job does not have, such as `sample`, are missing."""


@dataclass(frozen=True)
class Parts:
    """What a rank's device memory is made of at one moment, in bytes.

    Attributes:
        parameters: What the rank holds all the time: its shards, or the whole model; buffers.
        gathered: Parameters of units that are whole at that moment, and what gathers them.
        gradients: Gradients, and what reduces them.
        optimizer: The optimizer's state, and a moving average that is kept there.
        activations: What forward keeps for backward, and what a block needs while it runs.
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
        """All of them together."""
        return sum(getattr(self, part.name) for part in fields(self))


@dataclass(frozen=True)
class Phase:
    """A phase of a run.

    Attributes:
        name: One of `PHASES`.
        parts: At the moment of its peak.
        note: What it counts on, in a few words; empty where nothing is assumed.
    """

    name: str
    parts: Parts
    note: str = ""

    @property
    def peak(self) -> int:
        """The most bytes allocated at once."""
        return self.parts.total


@dataclass(frozen=True)
class Prediction:
    """What one rank of a job needs, the one that needs the most.

    Attributes:
        model: Class of the denoiser.
        parameters: How many it has.
        trained: How many of them, or of the adapter, are trained.
        strategy: single, ddp, fsdp2 or hsdp.
        ranks: World size.
        settings: What of the job decides, as its own keys and values.
        phases: In the order of a run.
        reserved: What torch's caching allocator will have reserved, from the least to the most.
        overheads: Name → bytes that come on top of `reserved` on a GPU; none on CPU ranks.
        host: What is kept in host memory, by name, in bytes of one rank; `machine` is that of all
            ranks of one machine together, and `present` what the machine has, if that was looked
            up.
        disk: Bytes on disk by name: `cache`, `checkpoint` (one), `checkpoints` (as many as are
            kept), `export`; and `free` where the run's directory is, if that was looked up.
        notes: What was assumed, in sentences for a person.
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

    @property
    def peak(self) -> int:
        """The most bytes allocated at once, over all phases."""
        return self.largest.peak

    @property
    def largest(self) -> Phase:
        """The phase that needs the most."""
        return max(self.phases, key=lambda phase: phase.peak)

    @property
    def device(self) -> tuple[int, int]:
        """What the driver will show for this rank: reserved and overheads, least and most."""
        beside = sum(self.overheads.values())
        return self.reserved[0] + beside, self.reserved[1] + beside

    def phase(self, name: str) -> Phase | None:
        """Return a phase by name; None if the job does not have it."""
        return next((phase for phase in self.phases if phase.name == name), None)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, with what follows from them (`peak`, `largest`, `device`) beside."""
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
        }
