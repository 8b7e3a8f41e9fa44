"""Parse a prediction of `python -m engine.memory`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

SCHEMA: Final = 1  # version of the output of `engine.memory.prediction`
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
    "save": "save",
}

# Phase → the name shown to users.
TITLES: Final = {
    "load": "loading",
    "text_cache": "encoding captions",
    "latent_cache": "caching latents",
    "base": "the base's forward",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer step",
    "sample": "sampling",
    "save": "saving",
}


@dataclass(frozen=True)
class PhasePeak:
    """The peak that torch allocates in a phase, in bytes, and its parts."""

    name: str
    peak: int
    parts: Mapping[str, int] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Predicted:
    """The memory of the rank that needs the most; all sizes in bytes.

    Attributes:
        strategy: single, ddp, fsdp2 or hsdp.
        ranks: World size.
        phases: In the order of a run.
        reserved: The least and most that torch will reserve.
        device: The least and most that the driver will report: `reserved` plus the overheads.
        overheads: By name; empty on CPU ranks.
        host: Host memory by name; `machine` is the total of all ranks.
        disk: By name.
        notes: Assumptions, as sentences for users.
        values: The complete answer, as JSON values.
        by_card: Bytes → the same for ranks on GPUs of up to that much memory, the smallest first;
            this prediction is for larger ones.
    """

    strategy: str
    ranks: int
    phases: tuple[PhasePeak, ...]
    reserved: tuple[int, int]
    device: tuple[int, int]
    overheads: Mapping[str, int]
    host: Mapping[str, int]
    disk: Mapping[str, int]
    notes: tuple[str, ...]
    values: Mapping[str, Any]
    by_card: Mapping[int, Predicted] = field(default_factory=dict)

    def on(self, memory: int) -> Predicted:
        """Return the prediction for a rank on a GPU with this many bytes of memory."""
        fits = (other for most, other in self.by_card.items() if memory <= most)
        return next(fits, self)

    def with_cards(self, others: Mapping[str, Predicted]) -> Predicted:
        """Add the predictions for GPUs of up to these sizes, the smallest first (`{"16GB": …}`).

        Host memory is then that of a machine with all of them.
        """
        host = dict(self.host)
        for name in ("machine", "machine_least"):
            if name in host:
                host[name] += sum(other.host[name] - self.host[name] for other in others.values())
        by_card = {size: dict(other.values) for size, other in others.items()}
        return Predicted.of(dict(self.values) | {"host": host, "by_card": by_card})

    @property
    def work(self) -> Mapping[str, Any] | None:
        """Return what a step computes and moves; None if another version predicted it."""
        work = self.values.get("work")
        current = isinstance(work, dict) and work.get("schema") == WORK_SCHEMA
        return work if current else None

    @property
    def largest(self) -> PhasePeak:
        """Return the phase with the highest peak."""
        return max(self.phases, key=lambda phase: phase.peak)

    @property
    def peak(self) -> int:
        """Return the most that torch allocates at once, in bytes."""
        return self.largest.peak

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Predicted:
        """Parse an answer or a stored prediction.

        Raises:
            ValueError: It has another schema version, or is damaged.
        """
        try:
            if values["schema"] != SCHEMA:
                raise ValueError(f"a prediction of version {values['schema']}, not {SCHEMA}")
            phases = tuple(
                PhasePeak(
                    str(phase["name"]),
                    int(phase["peak"]),
                    dict(phase["parts"]),
                    str(phase.get("note", "")),
                )
                for phase in values["phases"]
            )
            if not phases:
                raise ValueError("a prediction without phases")
            return cls(
                strategy=str(values["strategy"]),
                ranks=int(values["ranks"]),
                phases=phases,
                reserved=_band(values["reserved"]),
                device=_band(values["device"]),
                overheads=dict(values["overheads"]),
                host=dict(values["host"]),
                disk=dict(values["disk"]),
                notes=tuple(map(str, values["notes"])),
                values=values,
                by_card=dict(
                    sorted(
                        (int(size.removesuffix("GB")) << 30, cls.of(other))
                        for size, other in values.get("by_card", {}).items()
                    )
                ),
            )
        except (LookupError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"a damaged prediction ({error!r})") from None


def _band(values: Any) -> tuple[int, int]:
    low, high = values
    return int(low), int(high)
