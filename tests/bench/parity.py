"""`python tests/bench/parity.py`: the parity table with the differences that were reached.

Every layout with every optimizer; `tests/engine/parallel/test_parity.py` asserts of most of them
that no difference is more than 1e-5.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.engine.parity import HALF, Case, Table, all_cases, train_all
from tests.support.engine.toys import write_small_toy


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
                f"{of_losses(table, case):10.1e}{tensors}",
                flush=True,
            )


def of_losses(table: Table, case: Case) -> float:
    """Over all steps."""
    pairs = zip(table.losses(case), table.losses(case.reference), strict=True)
    return max(abs(mine - expected) / abs(expected) for mine, expected in pairs)


def of_tensors(table: Table, case: Case) -> float:
    """Over all trained tensors, each relative to its own largest value."""
    mine, expected = table.trained(case), table.trained(case.reference)
    return max(
        float((tensor - expected[name]).abs().max() / expected[name].abs().max())
        for name, tensor in mine.items()
    )


if __name__ == "__main__":
    main()
