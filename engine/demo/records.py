"""What is kept of the base's training: loss curves, and a state to resume from."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    import random
    from pathlib import Path

KEPT: Final = 100
"""Steps between two states from which an interrupted training resumes."""
EVERY: Final = 50
"""Steps between two points of a loss curve, each a mean."""


class Curve:
    """A loss curve, as means over `EVERY` steps; shown as it grows.

    Args:
        name: Of what is trained.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._losses: list[float] = []
        self._means: list[float] = []
        self._earlier = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_earlier": self._seconds()}

    def add(self, loss: torch.Tensor) -> None:
        """Note the loss of one more step."""
        self._losses.append(loss.item())
        if len(self._losses) == EVERY:
            self._means.append(round(sum(self._losses) / EVERY, 5))
            self._losses.clear()
            done = len(self._means) * EVERY
            print(f"{self._name} {done} {self._means[-1]} {self._seconds():.0f} s", flush=True)

    def write(self, base: Path, steps: int, **facts: Any) -> None:
        """Put it into `training.json`."""
        facts = {**facts, "steps": steps, "cpu_seconds": round(self._seconds())}
        record(base, self._name, {**facts, "loss_every": EVERY, "loss": self._means})

    def _seconds(self) -> float:
        """Processor time so far, before an interruption too."""
        return self._earlier + time.process_time()


class Kept:
    """What an interrupted training needs to resume, in a file beside the base.

    Args:
        base: The base.
        name: Of what is trained.
        pieces: Whatever has a state.
    """

    def __init__(self, base: Path, name: str, *pieces: Any) -> None:
        self._path = base.with_name(f"{base.name}-{name}.pt")
        self._name, self._pieces = name, pieces

    def restore(self, chance: random.Random) -> tuple[int, random.Random, Curve]:
        """Restore the pieces, and return the steps done, the RNG and the loss curve."""
        if not self._path.is_file():
            return 0, chance, Curve(self._name)
        done, chance, curve, drawn, *states = torch.load(self._path, weights_only=False)
        torch.set_rng_state(drawn)
        for piece, state in zip(self._pieces, states, strict=True):
            piece.load_state_dict(state)
        return done, chance, curve

    def keep(self, done: int, chance: random.Random, curve: Curve) -> None:
        """Write the file, every `KEPT` steps."""
        if done % KEPT:
            return
        states = [piece.state_dict() for piece in self._pieces]
        aside = self._path.with_suffix(".tmp")
        torch.save([done, chance, curve, torch.get_rng_state(), *states], aside)
        aside.replace(self._path)

    def forget(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)


def record(base: Path, name: str, facts: dict[str, Any]) -> None:
    """Put facts into `training.json`."""
    path = base / "training.json"
    records = json.loads(path.read_text()) if path.is_file() else {}
    records[name] = facts
    path.write_text(json.dumps(records) + "\n", encoding="utf-8")
