"""GPUs that people have, by their memory."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Final

from jobs.memory.fit import Room
from jobs.run.rundir import read_json

_MIB: Final = 1 << 20

# What the driver shows of them, which is less than what is printed on the box.
CARDS: Final[dict[int, Room]] = {
    24: Room("24 GB", 24_564 * _MIB),  # RTX 4090; a 3090 and an A10 have a little less or more
    48: Room("48 GB", 46_068 * _MIB),  # L40S and A6000 with ECC on; without it 49,140
    80: Room("80 GB", 81_559 * _MIB),  # H100; an A100 has 81,920
    141: Room("141 GB", 143_771 * _MIB),  # H200
}

USUAL: Final = 80
"""What most people train large models on: held against where there is no GPU and none is named."""

IN_TABLES: Final = (24, 48, 80)

KINDS: Final[dict[str, dict[str, str]]] = {
    "lora": {"model_type": "lora"},
    "lora_8bit": {"model_type": "lora", "base_precision": "int8"},
    "lora_4bit": {"model_type": "lora", "base_precision": "nf4"},
    "full": {"model_type": "full"},
}
"""What is trained, by its name in the table, and the keys of a job that say so."""

# How many of them each family needs; `python tests/bench/cards.py` writes it.
CARDS_FILE: Final = Path(__file__).resolve().parent.parent / "models" / "published" / "cards.json"


@cache
def read_smallest() -> dict[str, Any]:
    """Family → `flavour`, and for each of `KINDS` card → smallest number of them.

    For the family's first flavour at its usual resolution, batch 1, with activation checkpointing.
    """
    stored = read_json(CARDS_FILE) or {}
    families = stored.get("families") if stored.get("schema") == 1 else None
    return families if isinstance(families, dict) else {}
