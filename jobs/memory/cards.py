"""GPUs that people have, by their memory."""

from __future__ import annotations

import re
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

# The same by a word of a GPU's name, in MiB; where there are several sizes, of the smallest.
_BY_WORD: Final = {
    "a10": 23_028,
    "a10g": 23_028,
    "a30": 24_576,
    "a40": 46_068,
    "a100": 40_960,
    "a6000": 46_068,
    "b200": 183_359,
    "h100": 81_559,
    "h200": 143_771,
    "l4": 23_034,
    "l40": 46_068,
    "l40s": 46_068,
    "t4": 15_109,
    "v100": 16_160,
    "3090": 24_576,
    "4090": 24_564,
    "5090": 32_607,
}
_SIZES: Final = {24: 24_564, 40: 40_960, 48: 46_068, 80: 81_559, 141: 143_771}


def room_of_type(name: str) -> Room | None:
    """Return the memory of a GPU by its Slurm type; None if the type does not tell.

    Args:
        name: Such as `a100`, `rtx_4090`, `nvidia_a100-sxm4-80gb`, `1g.10gb`.
    """
    # Without the maker's prefixes; a size in the name, also that of a MIG slice, decides.
    words = re.split(r"[^a-z0-9]+", name.lower())
    if printed := [int(word[:-2]) for word in words if re.fullmatch(r"[1-9]\d{0,2}gb", word)]:
        mebibytes = _SIZES.get(printed[-1])
        return Room(name, mebibytes * _MIB if mebibytes else printed[-1] * 10**9)
    for word in words:
        if mebibytes := _BY_WORD.get(
            re.sub(r"^(geforce|tesla|quadro)?(rtx)?(?=[a-z]?\d)", "", word)
        ):
            return Room(name, mebibytes * _MIB)
    return None


@cache
def read_smallest() -> dict[str, Any]:
    """Family → `flavour`, and for each of `KINDS` card → smallest number of them.

    For the family's first flavour at its usual resolution, batch 1, with activation checkpointing.
    """
    stored = read_json(CARDS_FILE) or {}
    families = stored.get("families") if stored.get("schema") == 1 else None
    return families if isinstance(families, dict) else {}
