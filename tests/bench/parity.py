"""`python tests/bench/parity.py`: the parity table with the differences that were reached.

Every layout with every optimizer; `tests/engine/parallel/test_parity.py` asserts of most of them
that no difference is more than 1e-5. Then the rows as docs/training.md has them, how far bf16 is
from fp32, and the gradients of context parallelism.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.engine.parity import HALF, LAYOUTS, Case, Table, all_cases, train_all
from tests.support.engine.ranks import context_parallel
from tests.support.engine.toy_jobs import start_ranks
from tests.support.engine.toys import write_small_toy
from tests.support.forks import client as forks

SHARDED_LORA: Final = "fsdp2 2, sharded lora"


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="bench-parity-") as scratch:
        toy, root = Path(scratch) / "toy", Path(scratch) / "runs"
        write_small_toy(toy, pictures=24)
        root.mkdir()
        cases = all_cases()
        table = train_all(toy, root, [*cases, *HALF])
        print("largest relative difference from one process with the same global batch")
        print(f"{'training':6}{'optimizer':>10}{'':3}{'layout':40}{'losses':>10}{'tensors':>10}")
        for case in [*cases, *HALF]:
            tensors = f"{of_tensors(table, case):10.1e}" if case.optimizer == "sgd" else ""
            notes = " ".join(
                note for note in (case.precision, case.extra) if note not in ("no", "")
            )
            layout = f"{case.layout} {notes}"
            print(
                f"{case.model_type:8}{case.optimizer:>8}   {layout:40}"
                f"{of_losses(table, case, case.reference):10.1e}{tensors}",
                flush=True,
            )
        print("\n| layout | LoRA, SGD: tensors | full, SGD: tensors | LoRA, AdamW | full, AdamW |")
        for layout in [*LAYOUTS, SHARDED_LORA]:
            print(f"| {layout} | {' | '.join(documented(table, layout))} |")
        half = [case for case in HALF if case.precision == "bf16"]
        worst = max(of_losses(table, c, replace(c.reference, precision="no")) for c in half)
        print(f"\nbf16 against fp32, losses: {worst:.2%}")
        print(f"context parallelism, gradients: {of_context_parallelism(root):.1e}")


def documented(table: Table, layout: str) -> list[str]:
    """A row of docs/training.md, rounded as there; empty where a layout has no such training."""
    trainings = ("lora",) if layout == SHARDED_LORA else ("lora", "full")
    cells = []
    for optimizer in ("sgd", "adamw"):
        for training in ("lora", "full"):
            case = Case(layout, training, optimizer)
            if training not in trainings:
                cells.append("")
            elif optimizer == "sgd":
                cells.append(f"{of_tensors(table, case):.0e}")
            else:
                cells.append(f"{of_losses(table, case, case.reference):.0e}")
    return ["0" if cell == "0e+00" else cell.replace("e-0", "e-") for cell in cells]


def of_losses(table: Table, case: Case, reference: Case) -> float:
    """Over all steps."""
    pairs = zip(table.losses(case), table.losses(reference), strict=True)
    return max(abs(mine - expected) / (abs(expected) or 1) for mine, expected in pairs)


def of_context_parallelism(root: Path) -> float:
    """The largest relative difference of a gradient in fp32, over all ways to split samples."""
    cases = [case for case in context_parallel.CASES if not case.autocast and case.factor is None]
    results = root / "context.json"
    for ranks in (2, 4):
        chosen = [case for case in cases if case.ranks == ranks]
        meeting = f"{root}/meeting-{ranks}"
        start_ranks(context_parallel.work, ranks, chosen, meeting, results).join()
    found = json.loads(results.read_text())
    return max(float(found[case.name]["gradient"]) for case in cases)


def of_tensors(table: Table, case: Case) -> float:
    """Over all trained tensors, each relative to its own largest value."""
    mine, expected = table.trained(case), table.trained(case.reference)
    return max(
        float((tensor - expected[name]).abs().max() / expected[name].abs().max())
        for name, tensor in mine.items()
    )


if __name__ == "__main__":
    forks.prepare()
    try:
        main()
    finally:
        forks.leave()
