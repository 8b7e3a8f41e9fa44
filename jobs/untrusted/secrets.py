"""Tokens, passwords and addresses that carry them: recognized, and kept out of what is written."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

HIDDEN: Final = "(not shown)"
SECRET_NAME: Final = re.compile(
    r"token(?!iz|s|_drop|_len)|secret|passw|credential|(?<![a-z])(pass|pat|key|pwd)(?![a-z])|apikey"
    r"|accesskey|auth(?!or)|webhook|dsn",
    re.IGNORECASE,
)
# Tokens by their beginnings, and addresses with a user, whose password may hold any character.
SECRET_VALUE: Final = re.compile(
    r"\b(hf|ghp|gho|ghs|sk|nvapi|wandb_v\d|glpat|github_pat)[-_][A-Za-z0-9_-]{20,}"
    r"|\bxox[a-z]-[A-Za-z0-9-]{10,}|\bAIza[A-Za-z0-9_-]{30,}|\bya29\.[A-Za-z0-9_-]{20,}"
    r"|AKIA[A-Z0-9]{12,}|://[^/\s@]+@|://[^/\s:@]*:\S+@"
)
_SHORTEST: Final = 8  # characters; shorter values are words


def without_secrets(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Remove tokens from a text, and the values of variables that are named as secrets."""
    for name, value in environment.items():
        if len(value) >= _SHORTEST and SECRET_NAME.search(name):
            text = text.replace(value, HIDDEN)
    return SECRET_VALUE.sub(HIDDEN, text)
