"""Measure how accurate predictions were on this machine: the ratio of measured to predicted."""

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
from jobs.memory.cards import card_named
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
# The prediction is stored in the run directory when the run starts, next to the measurements.


PREDICTION_SCHEMA: Final = 1


@dataclass(frozen=True)
class Compared:
    """Predicted and measured peak of one phase, in bytes; one measurement per rank."""

    phase: str
    predicted: int
    measured: tuple[int, ...] = ()

    @property
    def ratio(self) -> float | None:
        """Return the largest measurement of any rank divided by the prediction."""
        if not self.measured or self.predicted <= 0:
            return None
        return max(self.measured) / self.predicted


def path_of(run_dir: RunDir) -> Path:
    return run_dir.root / "prediction.json"


def read(run_dir: RunDir) -> Predicted | None:
    """Read a run's prediction for the rank that needs the most; None if there is none."""
    stored = read_json(path_of(run_dir)) or {}
    try:
        if stored.get("schema") != PREDICTION_SCHEMA:
            return None
        predicted = Predicted.of(stored["prediction"])
    except (ValueError, LookupError, TypeError):
        return None
    if not predicted.by_card:
        return predicted
    cards = {status.gpu_memory for status in run_dir.rank_statuses()}
    each = [predicted.on(memory) for memory in cards if memory]
    return max(each, key=lambda of_rank: of_rank.peak, default=predicted)


def keep(run_dir: RunDir, spec: JobSpec, strategy: str, ranks: int, *, on_gpus: bool) -> None:
    """Write the prediction of a run that has just started. Returns at once and never fails.

    A prediction that is not cached is computed in a thread next to the run. CPU ranks need the
    processors themselves, so it is skipped for them. The thread and its process end with ours.
    """
    with suppress(Exception):  # no error here may end a training run
        path_of(run_dir).unlink(missing_ok=True)  # left by an attempt with other settings
        predicted = recall(spec, strategy, ranks, on_gpus=on_gpus)
        if predicted is not None:
            _write(run_dir, predicted)
        elif on_gpus:
            work = (run_dir, spec, strategy, ranks)
            threading.Thread(target=_predict, args=work, name="predict", daemon=True).start()


def _predict(run_dir: RunDir, spec: JobSpec, strategy: str, ranks: int) -> None:
    server = Server()
    atexit.register(server.close)  # otherwise it would notice our exit only after it has answered
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
        "prediction": predicted.values,
    }
    write_atomic(path_of(run_dir), json.dumps(entry) + "\n")


def compare(
    predicted: Predicted, measure: str, peaks: Mapping[str, Sequence[int]]
) -> list[Compared]:
    """Pair the predicted and measured peaks, phase by phase. Pure.

    Args:
        predicted: The prediction for one rank.
        measure: What `peaks` counts. A resident set (`rss`, on CPU ranks) includes Python and its
            libraries, so it is not compared.
        peaks: The run's phase names → bytes of each rank.
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
    """Collect what `show --json` prints about a run's prediction; None if there is none."""
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
PHASES: Final = ("forward", "backward", "optimizer")  # phases that set the peak of most jobs
_NEWEST: Final = 50  # newest runs that are used
_LONGEST: Final = 400  # lines; a longer file is rewritten with only the newest ones
_RARE: Final = ('"beside"', '"link"', '"speed"')  # of a self-test or `doctor`, not of each run
_FEW: Final = 8  # of these that are kept
_PLAUSIBLE_RATIOS: Final = (0.5, 2.0)  # others have another cause, such as a shared GPU
_HIGH_SHARE: Final = 0.9  # share of runs that stay below the upper end of the band


@dataclass(frozen=True)
class Calibration:
    """Measured over predicted memory of the newest runs.

    Attributes:
        runs: Number of runs.
        peak: Ratio of the largest phase of each run, oldest first.
        phases: Phase → ratios.
        beside: Bytes on a GPU outside torch's reservation (the driver, cuBLAS, NCCL) that the
            newest self-test measured, minus the assumed bytes. Keyed by whether there were several
            ranks.
        links: GPU → bytes per second of the newest all-reduce's bus bandwidth.
        speeds: GPU → measured over computed seconds of the newest self-test's steps on one GPU.
    """

    runs: int = 0
    peak: tuple[float, ...] = ()
    phases: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    beside: Mapping[bool, int] = field(default_factory=dict)
    links: Mapping[str, float] = field(default_factory=dict)
    speeds: Mapping[str, float] = field(default_factory=dict)

    @property
    def usual(self) -> float:
        """Return the median ratio; 1 if there are no runs."""
        return statistics.median(self.peak) if self.peak else 1.0

    @property
    def factor(self) -> float:
        """Return the factor (at least 1) for the upper end of a band; few runs needed more."""
        if not self.peak:
            return 1.0
        ordered = sorted(self.peak)
        return max(1.0, ordered[min(len(ordered) - 1, int(len(ordered) * _HIGH_SHARE))])

    def corrected(self, predicted: Predicted) -> Predicted:
        """Return a GPU prediction with measured instead of assumed overheads, if they were
        measured.
        """
        more = self.beside.get(predicted.ranks > 1)
        if more is None or not predicted.overheads:
            return predicted
        assumed = sum(predicted.overheads.values())
        more = max(more, -assumed)
        return replace(
            predicted,
            overheads={"driver_and_libraries": assumed + more},
            by_card={size: self.corrected(other) for size, other in predicted.by_card.items()},
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
    """Record the accuracy of a finished GPU run's prediction; return whether it was recorded."""
    predicted = read(run_dir)
    statuses = run_dir.rank_statuses()
    if predicted is None or not statuses or any(s.allocated is None for s in statuses):
        return False  # no prediction, or CPU ranks, whose resident sets are not comparable
    names = set.intersection(*({*(status.peaks or {})} for status in statuses))
    peaks = {name: [(status.peaks or {})[name] for status in statuses] for name in names}
    ratios = {
        phase.phase: phase.ratio
        for phase in compare(predicted, "allocated", peaks)
        if phase.ratio is not None
    }
    if not set(PHASES) <= set(ratios):
        return False  # the run ended before its first step
    largest = max(PHASES, key=lambda name: _peak(predicted.phases, name))
    entry = {
        "schema": SCHEMA,
        "t": round(time.time()),
        "model": predicted.model,
        "strategy": predicted.strategy,
        "ranks": predicted.ranks,
        "peak": round(ratios[largest], 4),
        "phases": {name: round(ratio, 4) for name, ratio in ratios.items()},
    }
    _append(json.dumps(entry) + "\n")
    return True


def record_beside(ranks: int, measured: int, predicted: Predicted) -> None:
    """Record the bytes that a self-test found on a GPU outside torch's reservation."""
    more = measured - sum(predicted.overheads.values())
    entry = {"schema": SCHEMA, "t": round(time.time()), "ranks": ranks, "beside": more}
    _append(json.dumps(entry) + "\n")


def record_rate(kind: str, gpu: str, rate: float) -> None:
    """Record a rate that was measured on this machine.

    Args:
        kind: `link` (bytes per second) or `speed` (measured over computed seconds).
        gpu: The driver's name of the GPUs.
        rate: The rate.
    """
    if (card := card_named(gpu)) is not None:
        entry = {"schema": SCHEMA, "t": round(time.time()), kind: rate, "gpu": card.key}
        _append(json.dumps(entry) + "\n")


def read_calibration(path: Path | None = None) -> Calibration:
    """Read the ratios of the newest runs; empty if the file is missing or damaged."""
    peak: list[float] = []
    phases: dict[str, list[float]] = {}
    everything = _entries(path or file())
    beside = {
        entry["ranks"] > 1: entry["beside"]
        for entry in everything
        if isinstance(entry.get("beside"), int) and isinstance(entry.get("ranks"), int)
    }
    rates: dict[str, dict[str, float]] = {"link": {}, "speed": {}}
    for entry in everything:
        for kind, of_gpu in rates.items():
            rate = entry.get(kind)
            if isinstance(rate, int | float) and (kind == "link" or _is_plausible(rate)):
                of_gpu[str(entry.get("gpu"))] = float(rate)
    entries = [entry for entry in everything if _is_plausible(entry.get("peak"))]
    for entry in entries[-_NEWEST:]:
        peak.append(float(entry["peak"]))
        phases_of = entry.get("phases")
        for name, ratio in phases_of.items() if isinstance(phases_of, dict) else ():
            if _is_plausible(ratio):
                phases.setdefault(str(name), []).append(float(ratio))
    by_phase = {name: tuple(ratios) for name, ratios in phases.items()}
    return Calibration(len(peak), tuple(peak), by_phase, beside, rates["link"], rates["speed"])


def _peak(phases: Any, name: str) -> int:
    return next((phase.peak for phase in phases if phase.name == name), 0)


def _is_plausible(ratio: object) -> bool:
    low, high = _PLAUSIBLE_RATIOS
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
    """Append one line in a single write, because supervisors of several jobs may end at once."""
    path = file()
    if path.exists() and len(lines := path.read_text(errors="replace").splitlines()) > _LONGEST:
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        rare = [entry for entry in lines[:-_NEWEST] if any(word in entry for word in _RARE)]
        temporary.write_text("\n".join(rare[-_FEW:] + lines[-_NEWEST:]) + "\n")
        os.replace(temporary, path)
    with open(path, "a", encoding="utf-8") as out:
        out.write(line)
