"""`python tests/bench/cards.py`: the smallest number of GPUs that each size of a family needs.

Writes `jobs/models/published/cards.json`, from which `fsdp-tui families` and the documents take it.
With names of families only these are computed, and printed beside what the file says; so are all of
them with `--check`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from jobs.memory.calibration import Calibration
from jobs.memory.estimate import Estimate, Place
from jobs.memory.fit import CARDS, CARDS_FILE, IN_TABLES, KINDS, read_smallest
from jobs.memory.question import Server
from jobs.models.published_sizes import by_size
from jobs.spec.families import FAMILIES
from jobs.spec.job_spec import JobSpec
from jobs.spec.values.datasets import Dataset


def smallest(server: Server, family: str, flavour: str, kind: str) -> dict[str, int | None]:
    """How many of each card: default resolution, batch 1, activation checkpointing, bf16."""
    takes = FAMILIES[family].references_of(flavour)
    beside = {"conditioning_path": ["."]} if takes is not None and takes.required else {}
    spec = JobSpec(
        model_family=family,
        model_flavour=flavour,
        datasets=[Dataset(path=".", **beside)],
        gradient_checkpointing=True,
        train_batch_size=1,
        strategy="auto",
        **KINDS[kind],
    )
    # Of no machine, and so without what earlier runs of this one have measured.
    asked = Estimate(spec, Place(True, (CARDS[80],), here=False), server, Calibration())
    return {str(card): asked.fewest(CARDS[card]) for card in IN_TABLES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument("--check", action="store_true", help="all of them, and write nothing")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), help="others stay as they are")
    asked = parser.parse_args()
    chosen = list(FAMILIES) if asked.check else asked.families
    found: dict[str, Any] = {}
    server = Server(patience=1800)
    for name in chosen or FAMILIES:
        first, *others = by_size(FAMILIES[name]).values()
        begun = time.perf_counter()
        known = read_smallest().get(name, {})
        found[name] = {"flavour": first[0]} | {
            kind: smallest(server, name, first[0], kind) if kind in asked.kinds else known[kind]
            for kind in KINDS
        }
        if others:
            sizes = known.get("sizes", {})
            found[name]["sizes"] = {
                flavour: {
                    kind: smallest(server, name, flavour, kind)
                    if kind in asked.kinds or flavour not in sizes
                    else sizes[flavour][kind]
                    for kind in KINDS
                }
                for flavour, *_ in others
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
