"""Define a prediction: bytes per rank and phase. The engine makes it; JSON carries it to the rest.

Imports no torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

SCHEMA: Final = 1  # version of `Predicted.values`
WORK_SCHEMA: Final = 1  # version of its `work`, see `engine.memory.walk`

# Phase → its name in a run's `memory` events (`engine.ranks.telemetry`).
MEASURED_AS: Final = {
    "load": "load",
    "text_cache": "encode",
    "latent_cache": "latents",
    "base": "base",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "step",
    "sample": "sample",
    "score": "score",
    "save": "save",
}

# Phase → the name shown to users, in the order of a run.
TITLES: Final = {
    "load": "loading",
    "text_cache": "encoding captions",
    "latent_cache": "caching latents",
    "base": "the base's forward",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer step",
    "sample": "sampling",
    "score": "scoring samples",
    "save": "saving",
}


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
        name: A key of `TITLES`. Phases that a job does not have, such as `sample`, are missing.
        parts: Memory by purpose at the phase's peak.
        note: The assumption behind it, in a few words; "" if there is none.
    """

    name: str
    parts: Parts
    note: str = ""

    @property
    def peak(self) -> int:
        """Return the most bytes that torch allocates at once."""
        return self.parts.total


@dataclass(frozen=True)
class Predicted:
    """The memory of a job on the rank that needs the most; all sizes in bytes.

    Attributes:
        strategy: single, ddp, fsdp2 or hsdp.
        ranks: World size.
        phases: In the order of a run.
        reserved: The least and most that torch's caching allocator will reserve.
        overheads: By name, in addition to `reserved` on a GPU; empty on CPU ranks.
        model: Class of the denoiser.
        parameters: Number of its parameters.
        trained: Number of trained parameters, of the model or the adapter.
        settings: The job's keys and values that affect the prediction.
        host: Host memory of one rank by name; `machine` is the sum over all ranks of one machine,
            and `present` the machine's memory, if known.
        disk: Disk space by name: `cache`, `checkpoint` (one), `checkpoints` (all that are kept),
            `export`; and `free` in the run's file system, if known.
        notes: Assumptions, as sentences for users.
        work: What a rank computes and moves in a step, see `engine.memory.walk`; empty if another
            version predicted it.
        by_card: Bytes → the same for ranks on GPUs of up to that much memory, the smallest first;
            this prediction is for larger ones.
    """

    strategy: str
    ranks: int
    phases: tuple[Phase, ...]
    reserved: tuple[int, int]
    overheads: Mapping[str, int] = field(default_factory=dict)
    model: str = ""
    parameters: int = 0
    trained: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    host: Mapping[str, int] = field(default_factory=dict)
    disk: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    work: Mapping[str, Any] = field(default_factory=dict)
    by_card: Mapping[int, Predicted] = field(default_factory=dict)

    def on(self, memory: int) -> Predicted:
        """Return the prediction for a rank on a GPU with this many bytes of memory."""
        fits = (other for most, other in self.by_card.items() if memory <= most)
        return next(fits, self)

    def with_cards(self, others: Mapping[str, Predicted]) -> Predicted:
        """Add the predictions for GPUs of up to these sizes (`{"16GB": …}`).

        Host memory is then that of a machine with all of them.
        """
        host = dict(self.host)
        for name in ("machine", "machine_least"):
            if name in host:
                host[name] += sum(other.host[name] - self.host[name] for other in others.values())
        return replace(self, host=host, by_card=_by_bytes(others))

    @property
    def largest(self) -> Phase:
        """Return the phase with the highest peak."""
        return max(self.phases, key=lambda phase: phase.peak)

    @property
    def peak(self) -> int:
        """Return the most that torch allocates at once, in bytes."""
        return self.largest.peak

    @property
    def device(self) -> tuple[int, int]:
        """Return the least and most that the driver will report: reserved plus overheads."""
        beside = sum(self.overheads.values())
        return self.reserved[0] + beside, self.reserved[1] + beside

    def phase(self, name: str) -> Phase | None:
        """Return a phase by name; None if the job does not have it."""
        return next((phase for phase in self.phases if phase.name == name), None)

    @property
    def values(self) -> dict[str, Any]:
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
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        own["by_card"] = {f"{m >> 30}GB": other.values for m, other in self.by_card.items()}
        lists = {name: [*getattr(self, name)] for name in ("reserved", "device", "notes")}
        derived = {"phases": phases, "peak": self.peak, "largest": self.largest.name}
        return {"schema": SCHEMA} | own | lists | derived

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Predicted:
        """Parse an answer or a stored prediction; fields that it lacks are empty.

        Raises:
            ValueError: It has another schema version, or is damaged.
        """
        try:
            if values["schema"] != SCHEMA:
                raise ValueError(f"a prediction of version {values['schema']}, not {SCHEMA}")
            phases = tuple(
                Phase(
                    str(phase["name"]),
                    Parts(**{name: int(size) for name, size in phase["parts"].items()}),
                    str(phase.get("note", "")),
                )
                for phase in values["phases"]
            )
            if not phases:
                raise ValueError("a prediction without phases")
            low, high = values["reserved"]
            work = values.get("work") or {}
            plain = {each.name: values[each.name] for each in fields(cls) if each.name in values}
            return cls(
                **plain
                | {
                    "ranks": int(values["ranks"]),
                    "phases": phases,
                    "reserved": (int(low), int(high)),
                    "overheads": dict(values["overheads"]),
                    "host": dict(values.get("host", {})),
                    "disk": dict(values.get("disk", {})),
                    "notes": tuple(map(str, values.get("notes", ()))),
                    "work": work if work.get("schema") == WORK_SCHEMA else {},
                    "by_card": _by_bytes(
                        {size: cls.of(v) for size, v in values.get("by_card", {}).items()}
                    ),
                }
            )
        except (LookupError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"a damaged prediction ({error!r})") from None


def _by_bytes(by_size: Mapping[str, Predicted]) -> dict[int, Predicted]:
    """Return the predictions by a GPU's bytes instead of `16GB`, the smallest first."""
    by_bytes = {
        int(size.removesuffix("GB")) << 30: prediction for size, prediction in by_size.items()
    }
    return {most: by_bytes[most] for most in sorted(by_bytes)}
