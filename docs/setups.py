"""Rank setups of common jobs on common GPUs: the made part of memory-and-estimate.md.

`python docs/setups.py` predicts what is not in `setups.json` yet, which takes minutes, and keeps it
there; the table follows from these predictions and from the rates in `jobs/memory/cards.py`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from jobs.memory.calibration import Calibration  # noqa: E402
from jobs.memory.estimate import Estimate, place_of  # noqa: E402
from jobs.memory.predicted import Predicted  # noqa: E402
from jobs.memory.question import (  # noqa: E402
    Refused,
    Server,
    arranged,
    differs_by_card,
    of_cards,
    predict,
)
from jobs.spec.job_spec import JobSpec  # noqa: E402
from jobs.spec.rules.steps import accumulation_steps  # noqa: E402
from tui.text.estimate_text import better, keys_text, span, verdict  # noqa: E402
from tui.text.format import gib  # noqa: E402

if TYPE_CHECKING:
    from jobs.memory.ranking import Ranking, Setup

KEPT: Final = ROOT / "docs" / "setups.json"
_LORA: Final[dict[str, Any]] = {"model_type": "lora", "lora_rank": 16}
_FULL: Final[dict[str, Any]] = {"model_type": "full"}
_USUAL: Final[dict[str, Any]] = {
    "dataset": ".",
    "resolution": 1024,
    "mixed_precision": "bf16",
    "gradient_checkpointing": True,
}
_VALUES: Final = ("strategy", "ranks", "phases", "reserved", "device", "overheads", "work")

# GPU, number, what is trained, and its keys.
JOBS: Final = (
    ("4090", 2, "FLUX.1 LoRA", _LORA | {"model_family": "flux"}),
    ("4090", 1, "FLUX.1 LoRA", _LORA | {"model_family": "flux"}),
    ("3090", 2, "FLUX.1 LoRA", _LORA | {"model_family": "flux"}),
    ("5090", 2, "FLUX.1 LoRA", _LORA | {"model_family": "flux"}),
    ("a6000", 2, "FLUX.1 LoRA", _LORA | {"model_family": "flux"}),
    ("a100", 2, "FLUX.1 LoRA", _LORA | {"model_family": "flux"}),
    ("h100", 2, "FLUX.1 LoRA", _LORA | {"model_family": "flux"}),
    ("h100", 8, "FLUX.1 full", _FULL | {"model_family": "flux"}),
    ("4090", 2, "PixArt-Sigma full", _FULL | {"model_family": "pixart_sigma"}),
    ("l4", 4, "PixArt-Sigma LoRA", _LORA | {"model_family": "pixart_sigma"}),
)

# GPUs of several sizes, and what is trained on them.
_BATCH: Final = {"global_batch_size": 12}
_UNLIKE: Final = ("4080,4090", "3090,a6000", "3090,3090,a6000")
_TRAINED: Final = (
    ("FLUX.1", {"model_family": "flux"}),
    ("Qwen-Image", {"model_family": "qwen_image"}),
    (
        "Wan 14B, 17 frames of 480 px",
        {"model_family": "wan", "model_flavour": "2.1-t2v-14b", "resolution": 480}
        | {"num_frames": 17},
    ),
)


class Memory:
    """Predictions that are kept, or else made and then kept.

    Args:
        server: Predicts what is not kept; None to raise instead.
    """

    def __init__(self, server: Server | None = None) -> None:
        self._server = server
        self.kept: dict[str, Any] = {}
        if KEPT.exists():
            self.kept = json.loads(KEPT.read_text(encoding="utf-8"))

    def keep(self) -> None:
        """Write what is known."""
        lines = (f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(self.kept.items()))
        KEPT.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")

    def predict(self, strategy: str, ranks: int, spec: JobSpec) -> Predicted | Refused:
        """Return a job's prediction.

        Raises:
            KeyError: It is not kept; `python docs/setups.py` makes it.
        """
        key = " ".join(
            (
                *(spec.model_family, spec.model_type, strategy, str(ranks)),
                spec.base_precision,
                str(spec.gradient_checkpointing and spec.gradient_checkpointing_interval),
                str(spec.swap_blocks),
                *(("accumulates",) if accumulation_steps(spec) > 1 else ()),
            )
        )
        if key not in self.kept and self._server is not None:
            result = predict(spec, self._server, strategy=strategy, ranks=ranks)
            values = result.values if isinstance(result, Predicted) else {"error": result.error}
            self.kept[key] = {name: values[name] for name in (*_VALUES, "error") if name in values}
        values = self.kept[key]
        if "error" in values:
            return Refused(strategy, ranks, values["error"])
        return Predicted.of(values | {"schema": 1})


class _Kept(Estimate):
    """An estimate whose predictions come from a `Memory`."""

    memory: Memory

    def predict(self, strategy: str, ranks: int, spec: JobSpec | None = None) -> Any:
        asked = spec or self.spec
        if differs_by_card(asked, strategy):
            return of_cards(asked, lambda one: self.predict(strategy, ranks, one))
        return self.memory.predict(strategy, ranks, asked)


def rank(card: str, count: int, keys: dict[str, Any], memory: Memory) -> Ranking:
    """Rank the setups of a job on GPUs of a model.

    Raises:
        ValueError: It cannot be ranked; says why.
    """
    spec = JobSpec.model_validate(_USUAL | keys | {"gpus": count})
    place = place_of(spec, (), card=card)
    asked = _Kept(spec, place, Server(), Calibration())
    asked.memory = memory
    ranking = asked.ranking()
    if isinstance(ranking, str):
        raise ValueError(ranking)
    return ranking


def table() -> str:
    """Return the table of all jobs."""
    memory = Memory()
    rows = [
        "| GPUs | job | as it is | fastest that fits | why | without its loss |",
        "|---|---|---|---|---|---|",
    ]
    for card, count, title, keys in JOBS:
        ranking = rank(card, count, keys, memory)
        own, best, exact = ranking.own, ranking.fastest, ranking.exact
        choice = better(ranking)
        name = place_of(JobSpec(), (), card=card).rooms[0].name
        cells = [
            f"{count} × {name}",
            title,
            _cell(own, named=True) + ("" if own.fits else "; does not fit"),
            "none" if best is None else _cell(best) if choice else "as it is",
            choice[1] if choice else "",
            "" if best is None or not best.loses else "nothing fits" if not exact else _cell(exact),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def unlike() -> str:
    """Return the table of LoRAs on GPUs of several sizes."""
    memory = Memory()
    rows = [
        "| GPUs | LoRA | `fsdp2`, each rank | `ddp`, each rank | `swap_blocks` | stays on the "
        "larger GPU | a step | `batch_shares` | a step with these |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for card in _UNLIKE:
        for title, keys in _TRAINED:
            rows.append(f"| {' | '.join(_on_unlike(card, title, keys, memory))} |")
    return "\n".join(rows)


def _on_unlike(card: str, title: str, keys: dict[str, Any], memory: Memory) -> list[str]:
    ranks = card.count(",") + 1
    spec = JobSpec.model_validate(_USUAL | _LORA | keys | _BATCH | {"num_processes": ranks})
    place = place_of(spec, (), card=card)
    asked = _Kept(spec, place, Server(), Calibration())
    asked.memory = memory
    cells = [" + ".join(room.name for room in place.rooms), title]
    shards = asked.predict("fsdp2", ranks)
    fit = asked.fit(shards)
    cells.append(f"{gib(fit.high)} GiB, {_pace(asked, shards, spec)}: {verdict(fit)}")
    swapping = asked.swapping(arranged(spec, "ddp", ranks, on_gpus=True))
    if swapping is None or not isinstance(swapping.swap_blocks, dict):
        return [*cells, "does not fit", *[""] * 5]
    own = asked.predict("ddp", ranks, swapping)
    each = dict.fromkeys(gib(one.high) for one in asked.each(own))
    cells += [f"{', '.join(each)} GiB", keys_text({"": swapping.swap_blocks})[2:]]
    there = [own.on(room.total).phases for room in place.rooms]
    held = [phase.parts.parameters for phases in there for phase in phases if phase.name == "load"]
    cells.append(f"{gib(max(held) - min(held))} GiB more")
    sharing = asked.sharing(swapping)
    assert sharing is not None
    cells += [_pace(asked, own, swapping), keys_text({"": sharing.batch_shares})[2:]]
    return [*cells, _pace(asked, own, sharing)]


def _pace(asked: Estimate, predicted: Predicted, spec: JobSpec) -> str:
    seconds = asked.seconds(predicted, spec)
    assert not isinstance(seconds, str), seconds
    return f"{span(seconds.low, seconds.high)} s"


def _cell(setup: Setup, *, named: bool = False) -> str:
    keys = "" if named or not setup.changes else f" (`{keys_text(setup.changes)}`)"
    seconds = span(setup.seconds.low, setup.seconds.high)
    lost = f"; {setup.loses}" if setup.loses else ""
    return f"{seconds} s: {setup.title}{keys}{lost}"


def main() -> None:
    """Predict what is missing; delete `setups.json` first to predict everything again."""
    server = Server(patience=900)
    memory = Memory(server)
    for card, count, title, keys in JOBS:
        ranking = rank(card, count, keys, memory)
        print(f"{count} × {card} {title}: {len(ranking.setups)} setups", flush=True)
        memory.keep()
    for card in _UNLIKE:
        for title, keys in _TRAINED:
            print(_on_unlike(card, title, keys, memory), flush=True)
            memory.keep()
    server.close()


if __name__ == "__main__":
    main()
