"""Values of a job file as people read them. Pure, and without Textual."""

from __future__ import annotations

import json
from typing import Any

from tui.text.format import MISSING


def in_words(value: Any) -> str:
    """Format a value as in a job file, on one line."""
    if value in (None, "", [], {}):
        return MISSING
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False)
    return str(value)
