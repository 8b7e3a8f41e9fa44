"""One prediction, as `python -m engine.memory` says it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

SCHEMA: Final = 1  # of what `engine.memory.prediction` says

# Phase → its name in a run's `memory` events (`engine.ranks.telemetry`).
MEASURED_AS: Final = {
    "load": "load",
    "text_cache": "encode",
    "latent_cache": "latents",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "step",
    "sample": "sample",
    "save": "save",
}

# What people read for the phases.
TITLES: Final = {
    "load": "loading",
    "text_cache": "encoding captions",
    "latent_cache": "caching latents",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer step",
    "sample": "sampling",
    "save": "saving",
}


@dataclass(frozen=True)
class PhasePeak:
    """The most that torch has allocated in a phase, in bytes, and of what it is made."""

    name: str
    peak: int
    parts: Mapping[str, int] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Predicted:
    """What the rank needs that needs the most; all sizes in bytes.

    Attributes:
        strategy: single, ddp, fsdp2 or hsdp.
        ranks: World size.
        phases: In the order of a run.
        reserved: What torch will have reserved, least and most.
        device: What the driver will show: `reserved` and the overheads.
        overheads: By name; empty on CPU ranks.
        host: Host memory by name; `machine` is that of all ranks.
        disk: By name.
        notes: What was assumed, in sentences.
        values: The full answer, as JSON values.
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

    @property
    def largest(self) -> PhasePeak:
        """The phase that needs the most."""
        return max(self.phases, key=lambda phase: phase.peak)

    @property
    def peak(self) -> int:
        """The most that torch has allocated at once."""
        return self.largest.peak

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Predicted:
        """Read an answer, or a stored prediction.

        Raises:
            ValueError: It is of another version, or damaged.
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
            )
        except (LookupError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"a damaged prediction ({error!r})") from None


def _band(values: Any) -> tuple[int, int]:
    low, high = values
    return int(low), int(high)
