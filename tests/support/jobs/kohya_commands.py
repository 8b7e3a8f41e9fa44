"""Commands of sd-scripts and musubi-tuner, and what became of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from jobs.imports.common.import_report import Kind
from jobs.imports.imported import import_kohya
from tests.support.paths import IMPORT_EXAMPLES

if TYPE_CHECKING:
    from jobs.imports.imported import Imported

EXAMPLES: Final = IMPORT_EXAMPLES / "kohya"
FLAGS: Final = json.loads((EXAMPLES / "flags.json").read_text())
"""Tool → the flags of all its parsers."""
SDXL: Final = "sdxl_train_network.py --network_module networks.lora --network_train_unet_only"
FLUX: Final = "flux_train_network.py --network_module networks.lora_flux --network_train_unet_only"
ANIMA: Final = (
    "anima_train_network.py --network_module networks.lora_anima --network_train_unet_only"
)
WAN: Final = "wan_train_network.py --task t2v-14B --dit a --network_module networks.lora_wan"


def of(command: str) -> Imported:
    """Import a command; one without flags is no training for a shell script's reader."""
    command = command if "--" in command else f"{command} --seed 1"
    return import_kohya([f"accelerate launch {command}" if ".py" in command else command])


def lost(imported: Imported) -> set[str]:
    """Keys that the report names as not supported."""
    entries = [*imported.report.entries, *imported.report.assumed]
    return {entry.key for entry in entries if entry.kind is Kind.UNSUPPORTED}
