"""`python -m tests.campaign KIND`: see the package."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

from tests.campaign.journal import Journal

KINDS: Final = ("faults", "real", "slurm", "fuzz", "fault-points")


def main() -> int:
    """Run trials; the status says whether anything was broken in one."""
    parser = argparse.ArgumentParser(prog="tests.campaign", description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--trials", type=int, default=100, help="of fuzz: inputs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hours", type=float, help="begin no trial after that")
    parser.add_argument("--journal", type=Path, help="what was done; goes on after it")
    parser.add_argument("--only", type=int, nargs="*", help="these trials, whatever was done")
    asked = parser.parse_args()
    path = asked.journal if asked.only is None else None
    journal = Journal(path, asked.kind, asked.seed)
    run(journal, asked.trials, asked.hours, asked.only)
    print(journal.summary())
    return bool(journal.broken)


def run(
    journal: Journal, trials: int, hours: float | None = None, only: list[int] | None = None
) -> None:
    """Trials of the journal's kind."""
    if journal.kind == "fuzz":
        from tests.campaign import fuzz

        fuzz.prepare()
        for batch in only if only is not None else journal.trials(-(-trials // fuzz.BATCH), hours):
            fuzz.fuzz(journal, batch)
        return
    if journal.kind == "fault-points":
        from tests.campaign import fault_points

        with fault_points.Place() as place:
            points = fault_points.shuffled(place.points(), journal.seed)
            count = min(trials, len(points))
            for number in only if only is not None else journal.trials(count, hours):
                fault_points.trial(journal, number, place, points)
        print(fault_points.table(journal))
        return
    if journal.kind == "faults":
        from tests.campaign.faults import trial
    elif journal.kind == "slurm":
        from tests.campaign.slurm_faults import trial
    else:
        from tests.campaign.real import trial
    for number in only if only is not None else journal.trials(trials, hours):
        trial(journal, number)


if __name__ == "__main__":
    sys.exit(main())
