"""How right predictions were on this machine: what was measured over what was predicted."""

from __future__ import annotations

import atexit
import json
import os
import statistics
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from jobs.errors import UserError
from jobs.machine.engine_tools import ToolError
from jobs.memory.predicted import MEASURED_AS, Predicted
from jobs.memory.question import Server, predict, recall
from jobs.paths import state_home
from jobs.run.rundir import read_json, write_atomic

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from jobs.run.rundir import RunDir
    from jobs.spec.job_spec import JobSpec


# -- kept prediction ------------------------------------------------------------------------
# The prediction in a run's directory: written at its start, and what was measured beside it.


PREDICTION_SCHEMA: Final = 1


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
        return (
            Predicted.of(stored["prediction"])
            if stored.get("schema") == PREDICTION_SCHEMA
            else None
        )
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
    entry = {
        "schema": PREDICTION_SCHEMA,
        "t": round(time.time(), 3),
        "prediction": dict(predicted.values),
    }
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


# -- calibration ----------------------------------------------------------------------------


SCHEMA: Final = 1
PHASES: Final = ("forward", "backward", "optimizer")  # what most jobs are as large as
_NEWEST: Final = 50  # runs that count
_LONGEST: Final = 400  # lines, beyond which the file is rewritten with the newest
_BELIEVED: Final = (0.5, 2.0)  # ratios outside are of something else, such as a shared GPU
_HIGH_SHARE: Final = 0.9  # of the runs stay below the upper end of the band


@dataclass(frozen=True)
class Calibration:
    """Measured over predicted, of the newest runs.

    Attributes:
        runs: How many.
        peak: Ratio of the largest phase of each run, the oldest first.
        phases: Phase → ratios.
        beside: What the newest self-test found on a GPU besides what torch reserves (the driver,
            cuBLAS, NCCL), less what was assumed; bytes. By whether there were several ranks.
    """

    runs: int = 0
    peak: tuple[float, ...] = ()
    phases: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    beside: Mapping[bool, int] = field(default_factory=dict)

    @property
    def usual(self) -> float:
        """The median ratio; 1 while nothing is known."""
        return statistics.median(self.peak) if self.peak else 1.0

    @property
    def factor(self) -> float:
        """By what the upper end of a band is raised, at least 1: few runs took more than this."""
        if not self.peak:
            return 1.0
        ordered = sorted(self.peak)
        return max(1.0, ordered[min(len(ordered) - 1, int(len(ordered) * _HIGH_SHARE))])

    def corrected(self, predicted: Predicted) -> Predicted:
        """Return a prediction for GPUs with overheads as measured, where they were."""
        more = self.beside.get(predicted.ranks > 1)
        if more is None or not predicted.overheads:
            return predicted
        assumed = sum(predicted.overheads.values())
        more = max(more, -assumed)
        low, high = predicted.device
        return replace(
            predicted,
            overheads={"driver_and_libraries": assumed + more},
            device=(low + more, high + more),
        )

    def in_words(self) -> str:
        """Return a sentence for the user; "" while nothing is known."""
        if not self.runs:
            return ""
        runs = f"{self.runs} run{'s' if self.runs > 1 else ''}"
        off = round((self.usual - 1) * 100)
        if not off:
            return f"runs on this machine matched the prediction within 1% ({runs})"
        more = "more" if off > 0 else "less"
        return f"runs on this machine used {abs(off)}% {more} than predicted ({runs})"


def file() -> Path:
    return state_home() / "calibration.jsonl"


def record(run_dir: RunDir) -> bool:
    """Note how right the prediction of a run on GPUs was, when it ends; whether it was noted."""
    predicted = read(run_dir)
    statuses = run_dir.rank_statuses()
    if predicted is None or not statuses or any(s.allocated is None for s in statuses):
        return False  # nothing predicted, or CPU ranks, whose resident sets are not comparable
    names = set.intersection(*({*(status.peaks or {})} for status in statuses))
    peaks = {name: [(status.peaks or {})[name] for status in statuses] for name in names}
    ratios = {
        phase.phase: phase.ratio
        for phase in compare(predicted, "allocated", peaks)
        if phase.ratio is not None
    }
    if not set(PHASES) <= set(ratios):
        return False  # it ended before it had trained a step
    largest = max(PHASES, key=lambda name: _peak(predicted.phases, name))
    entry = {
        "schema": SCHEMA,
        "t": round(time.time()),
        "model": predicted.values.get("model"),
        "strategy": predicted.strategy,
        "ranks": predicted.ranks,
        "peak": round(ratios[largest], 4),
        "phases": {name: round(ratio, 4) for name, ratio in ratios.items()},
    }
    _append(json.dumps(entry) + "\n")
    return True


def record_beside(ranks: int, measured: int, predicted: Predicted) -> None:
    """Note what a self-test found on a GPU besides what torch reserves, in bytes."""
    more = measured - sum(predicted.overheads.values())
    entry = {"schema": SCHEMA, "t": round(time.time()), "ranks": ranks, "beside": more}
    _append(json.dumps(entry) + "\n")


def read_calibration(path: Path | None = None) -> Calibration:
    """Read the newest runs' ratios; none if there are none, or the file is damaged."""
    peak: list[float] = []
    phases: dict[str, list[float]] = {}
    everything = _entries(path or file())
    beside = {
        entry["ranks"] > 1: entry["beside"]
        for entry in everything
        if isinstance(entry.get("beside"), int) and isinstance(entry.get("ranks"), int)
    }
    entries = [entry for entry in everything if _believed(entry.get("peak"))]
    for entry in entries[-_NEWEST:]:
        peak.append(float(entry["peak"]))
        phases_of = entry.get("phases")
        for name, ratio in phases_of.items() if isinstance(phases_of, dict) else ():
            if _believed(ratio):
                phases.setdefault(str(name), []).append(float(ratio))
    by_phase = {name: tuple(ratios) for name, ratios in phases.items()}
    return Calibration(len(peak), tuple(peak), by_phase, beside)


def _peak(phases: Any, name: str) -> int:
    return next((phase.peak for phase in phases if phase.name == name), 0)


def _believed(ratio: object) -> bool:
    low, high = _BELIEVED
    return isinstance(ratio, int | float) and low <= ratio <= high


def _entries(path: Path) -> list[dict[str, Any]]:
    entries = []
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    for line in lines:
        with suppress(ValueError):
            entry = json.loads(line)
            if isinstance(entry, dict) and entry.get("schema") == SCHEMA:
                entries.append(entry)
    return entries


def _append(line: str) -> None:
    """One write of one line: supervisors of several jobs may end at once."""
    path = file()
    if path.exists() and len(lines := path.read_text(errors="replace").splitlines()) > _LONGEST:
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        rare = [entry for entry in lines[:-_NEWEST] if '"beside"' in entry]
        temporary.write_text("\n".join(rare[-2:] + lines[-_NEWEST:]) + "\n")
        os.replace(temporary, path)
    with open(path, "a", encoding="utf-8") as out:
        out.write(line)
