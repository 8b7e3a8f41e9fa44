"""What the engine's own commands (`python -m engine.…`) have in common."""

from __future__ import annotations

import argparse
from typing import NoReturn


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line on standard error."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"fsdp-tui: {message}\n")
