"""`python tests/bench/cards.py`: the smallest number of GPUs that each family needs.

Writes `jobs/models/published/cards.json`, from which `fsdp-tui families` and the documents take it.
With names of families only these are computed, and printed beside what the file says.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from jobs.memory.calibration import Calibration
from jobs.memory.cards import CARDS, CARDS_FILE, IN_TABLES, read_smallest
from jobs.memory.client import Server
from jobs.memory.estimate import Estimate, Place
from jobs.spec.families import FAMILIES
from jobs.spec.job_spec import JobSpec


def smallest(server: Server, family: str, flavour: str, model_type: str) -> dict[str, int | None]:
    """How many of each card: default resolution, batch 1, activation checkpointing, bf16."""
    spec = JobSpec(
        model_family=family,
        model_flavour=flavour,
        model_type=model_type,
        dataset=".",
        gradient_checkpointing=True,
        train_batch_size=1,
        strategy="auto",
    )
    # Of no machine, and so without what earlier runs of this one have measured.
    asked = Estimate(spec, Place(True, (CARDS[80],), here=False), server, Calibration())
    return {str(card): asked.fewest(CARDS[card]) for card in IN_TABLES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    chosen = parser.parse_args().families
    found: dict[str, Any] = {}
    server = Server(patience=1800)
    for name in chosen or FAMILIES:
        flavour = next(iter(FAMILIES[name].flavours))
        begun = time.perf_counter()
        found[name] = {"flavour": flavour} | {
            kind: smallest(server, name, flavour, kind) for kind in ("lora", "full")
        }
        print(name, found[name], f"{time.perf_counter() - begun:.1f} s", flush=True)
    server.close()
    if chosen:
        known = read_smallest()
        for name in chosen:
            print("same" if known.get(name) == found[name] else f"the file: {known.get(name)}")
        return
    CARDS_FILE.write_text(json.dumps({"schema": 1, "families": found}, indent=1) + "\n")
    print(f"wrote {CARDS_FILE}", file=sys.stderr)


if __name__ == "__main__":
    main()
