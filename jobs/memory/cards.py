"""Memory and rates of common GPUs, from the manufacturer's data sheets. Pure.

Sources: NVIDIA's data sheets of the data center GPUs (V100, T4, A10, A30, A40, A100, L4, L40, L40S,
H100, H200, B200) and of RTX A6000 and RTX 6000 Ada; its white papers on GA102, Ada, Blackwell and
RTX PRO Blackwell for the others. Rates of tensor cores are dense, without sparsity, and accumulate
in fp32. Memory is the total that the driver reports, which is less than what is advertised.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Card:
    """A GPU model.

    Attributes:
        key: Its name on the command line, by whose words a driver's name or a Slurm type is known.
        name: Its display name.
        mebibytes: Its memory.
        half: FLOP/s of products in bf16 (fp16, if it has no bf16), in 10¹².
        single: FLOP/s of products in TF32 (fp32, if it has no TF32), in 10¹².
        eight: FLOP/s of products in fp8, in 10¹²; 0 if it has none.
        bandwidth: Of its memory, in GB/s.
        pcie: Generation of PCI Express.
        nvlink: Both directions together, in GB/s; 0 if it has none.
        bridged: Whether NVLink needs a bridge, which few machines have.
        peers: Whether GPUs read each other's memory over PCIe; GeForce drivers do not allow it.
        bf16: Whether it computes in bf16.
        flash: FLOP/s up to which flash attention 2 can use the GPU, in 10¹²; 0 for those in bf16.
    """

    key: str
    name: str
    mebibytes: int
    half: float
    single: float
    eight: float
    bandwidth: float
    pcie: int
    nvlink: float = 0
    bridged: bool = False
    peers: bool = True
    bf16: bool = True
    flash: float = 0


# Flash attention 2 has none of the instructions that came with Hopper: it reaches 320 forward and
# 278 backward on an H200 (docs/gpu.md), three quarters and two thirds of this.
_OLD_FLASH: Final = 430

# The longest keys first: the first one of which a name has all words is the GPU. Of models in
# several sizes, the smallest is meant by the bare name.
_TABLE: Final = (
    # key             name            MiB   bf16  TF32   fp8  GB/s PCIe NVLink, bridged, peers, bf16
    Card("rtx-pro-6000", "RTX PRO 6000", 97_887, 504, 252, 1007, 1792, 5),
    Card("a100-80gb-pcie", "A100 80GB PCIe", 81_920, 312, 156, 0, 1935, 4, 600, True),
    Card("rtx-6000-ada", "RTX 6000 Ada", 49_140, 364, 182, 728, 960, 4),
    Card("a100-80gb", "A100 80GB", 81_920, 312, 156, 0, 2039, 4, 600),
    Card("a100-pcie", "A100 40GB PCIe", 40_960, 312, 156, 0, 1555, 4, 600, True),
    Card("h100-pcie", "H100 PCIe", 81_559, 756, 378, 1513, 2000, 5, 600, True, flash=_OLD_FLASH),
    Card("h100-nvl", "H100 NVL", 95_830, 835, 418, 1671, 3900, 5, 600, True, flash=_OLD_FLASH),
    Card("h200-nvl", "H200 NVL", 143_771, 836, 418, 1671, 4800, 5, 900, True, flash=_OLD_FLASH),
    Card("v100-32gb", "V100 32GB", 32_510, 125, 15.7, 0, 900, 3, 300, bf16=False),
    Card("gh200", "GH200", 97_871, 989, 495, 1979, 4000, 5, 900, flash=_OLD_FLASH),
    Card("gb200", "GB200", 189_471, 2500, 1250, 5000, 8000, 5, 1800, flash=_OLD_FLASH),
    Card("b200", "B200", 183_359, 2250, 1125, 4500, 7700, 5, 1800, flash=_OLD_FLASH),
    Card("h200", "H200", 143_771, 989, 495, 1979, 4800, 5, 900, flash=_OLD_FLASH),
    Card("h100", "H100", 81_559, 989, 495, 1979, 3350, 5, 900, flash=_OLD_FLASH),
    Card("a100", "A100 40GB", 40_960, 312, 156, 0, 1555, 4, 600),
    Card("l40s", "L40S", 46_068, 362, 183, 733, 864, 4),
    Card("l40", "L40", 46_068, 181, 90.5, 362, 864, 4),
    Card("l4", "L4", 23_034, 121, 60, 242, 300, 4),
    Card("a6000", "RTX A6000", 46_068, 155, 77.4, 0, 768, 4, 112.5, True),
    Card("a40", "A40", 46_068, 150, 74.8, 0, 696, 4, 112.5, True),
    Card("a30", "A30", 24_576, 165, 82, 0, 933, 4, 200, True),
    Card("a10g", "A10G", 23_028, 70, 35, 0, 600, 4),
    Card("a10", "A10", 23_028, 125, 62.5, 0, 600, 4),
    Card("v100", "V100", 16_160, 125, 15.7, 0, 900, 3, 300, bf16=False),
    Card("t4", "T4", 15_109, 65, 8.1, 0, 320, 3, bf16=False),
    Card("5090", "RTX 5090", 32_607, 209, 105, 419, 1792, 5, peers=False),
    Card("5080", "RTX 5080", 16_303, 113, 56.3, 225, 960, 5, peers=False),
    Card("4080", "RTX 4080", 16_376, 97.5, 48.7, 195, 717, 4, peers=False),
    Card("4090", "RTX 4090", 24_564, 165, 82.6, 330, 1008, 4, peers=False),
    Card("3090", "RTX 3090", 24_576, 71, 35.6, 0, 936, 4, 112.5, True, peers=False),
)
CARDS: Final = {card.key: card for card in _TABLE}

# Other chips whose names have one of these besides the words of a card.
_OTHERS: Final = {"ti", "super", "laptop", "max", "d"}
# A MIG slice (3g.20gb) or a virtual GPU (A100-20C) has a part of a card's memory and rates.
_PART: Final = re.compile(r"\d+[gcq]")
_PREFIX: Final = re.compile(r"^(geforce|tesla|quadro)?(rtx)?(?=[a-z]?\d)")


def is_part(name: str) -> bool:
    """Return whether a driver's name or a Slurm type is that of a part of a GPU."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    return "mig" in words or any(map(_PART.fullmatch, words))


def card_named(name: str, *, alike: bool = False) -> Card | None:
    """Return the card of a driver's name or a Slurm type; None if it is no whole one of the table.

    Args:
        name: For example `NVIDIA A100-SXM4-80GB`, `NVIDIA GeForce RTX 4090` or `rtx_4090`.
        alike: Also accept variants of the card, whose memory is alike but not the rates.
    """
    written = re.split(r"[^a-z0-9]+", name.lower())
    words = {*written, *(_PREFIX.sub("", word) for word in written)}
    if is_part(name) or (not alike and words & _OTHERS):
        return None
    return next((card for card in _TABLE if words.issuperset(card.key.split("-"))), None)
