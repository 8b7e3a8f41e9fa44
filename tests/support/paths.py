"""Where things are that tests start or read."""

from __future__ import annotations

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]  # of the repository
SUPPORT: Final = ROOT / "tests" / "support"
FAKE_MEMORY: Final = SUPPORT / "jobs" / "fake_memory.py"  # answers like `python -m engine.memory`
IMPORT_EXAMPLES: Final = SUPPORT / "jobs" / "other_tools"  # configurations of other tools
RANKS: Final = SUPPORT / "engine" / "ranks"  # scripts and functions that ranks run
