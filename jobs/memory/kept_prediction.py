"""The prediction in a run's directory: written at its start, and what was measured beside it."""

from __future__ import annotations

import atexit
import json
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from jobs.errors import UserError
from jobs.machine.engine_tools import ToolError
from jobs.memory.client import Server
from jobs.memory.predicted import MEASURED_AS, Predicted
from jobs.memory.question import predict, recall
from jobs.run.rundir import read_json, write_atomic

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from jobs.run.rundir import RunDir
    from jobs.spec.job_spec import JobSpec

SCHEMA: Final = 1


@dataclass(frozen=True)
class Compared:
    """A phase: what was predicted, and what each rank measured, in bytes."""

    phase: str
    predicted: int
    measured: tuple[int, ...] = ()

    @property
    def ratio(self) -> float | None:
        """What the rank that took the most measured, over what was predicted."""
        if not self.measured or self.predicted <= 0:
            return None
        return max(self.measured) / self.predicted


def path_of(run_dir: RunDir) -> Path:
    return run_dir.root / "prediction.json"


def read(run_dir: RunDir) -> Predicted | None:
    """Read a run's prediction; None while there is none."""
    stored = read_json(path_of(run_dir)) or {}
    try:
        return Predicted.of(stored["prediction"]) if stored.get("schema") == SCHEMA else None
    except (ValueError, LookupError, TypeError):
        return None


def keep(run_dir: RunDir, spec: JobSpec, strategy: str, ranks: int, *, on_gpus: bool) -> None:
    """See that a run that has just started gets its prediction. Returns at once, and never fails.

    What is not known already is predicted beside the run, in a thread; on CPU ranks it is not,
    since they need the processors themselves. The thread and its process end with ours.
    """
    with suppress(Exception):  # whatever it is, no training may end of it
        path_of(run_dir).unlink(missing_ok=True)  # of an attempt with other settings
        predicted = recall(spec, strategy, ranks, on_gpus=on_gpus)
        if predicted is not None:
            _write(run_dir, predicted)
        elif on_gpus:
            work = (run_dir, spec, strategy, ranks)
            threading.Thread(target=_predict, args=work, name="predict", daemon=True).start()


def _predict(run_dir: RunDir, spec: JobSpec, strategy: str, ranks: int) -> None:
    server = Server()
    atexit.register(server.close)  # it would notice our end only once it has answered
    try:
        with suppress(UserError, ToolError, OSError):
            predicted = predict(spec, server, strategy=strategy, ranks=ranks, on_gpus=True)
            if isinstance(predicted, Predicted):
                _write(run_dir, predicted)
    finally:
        server.close()
        atexit.unregister(server.close)


def _write(run_dir: RunDir, predicted: Predicted) -> None:
    entry = {"schema": SCHEMA, "t": round(time.time(), 3), "prediction": dict(predicted.values)}
    write_atomic(path_of(run_dir), json.dumps(entry) + "\n")


def compare(
    predicted: Predicted, measure: str, peaks: Mapping[str, Sequence[int]]
) -> list[Compared]:
    """Predicted beside measured, phase by phase. Pure.

    Args:
        predicted: Of one rank.
        measure: What `peaks` counts. A resident set (`rss`, of CPU ranks) holds Python and its
            libraries too, and is not compared.
        peaks: The run's names of phases → bytes of each rank.
    """
    comparable = measure == "allocated"
    return [
        Compared(
            phase.name,
            phase.peak,
            tuple(peaks.get(MEASURED_AS.get(phase.name, ""), ())) if comparable else (),
        )
        for phase in predicted.phases
    ]


def facts(
    run_dir: RunDir, measure: str, peaks: Mapping[str, Sequence[int]]
) -> dict[str, Any] | None:
    """Collect what `show --json` prints of a run's prediction; None where there is none."""
    predicted = read(run_dir)
    return facts_of(predicted, measure, peaks) if predicted is not None else None


def facts_of(
    predicted: Predicted, measure: str, peaks: Mapping[str, Sequence[int]]
) -> dict[str, Any]:
    """Return a prediction with what was measured, as JSON values. Pure."""
    return {
        "strategy": predicted.strategy,
        "ranks": predicted.ranks,
        "peak": predicted.peak,
        "device": list(predicted.device),
        "phases": [
            {
                "name": phase.phase,
                "predicted": phase.predicted,
                "measured": list(phase.measured),
                "ratio": phase.ratio and round(phase.ratio, 4),
            }
            for phase in compare(predicted, measure, peaks)
        ],
    }
