"""Mounts of one folder that remember what they saw, as clients of a network file system do."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

REMEMBERS = "attr_timeout=60,entry_timeout=60,negative_timeout=60"
NO_SHARED_MEMORY = "direct_io"


@contextmanager
def mounted(source: Path, at: Path, options: str) -> Iterator[Path]:
    """Mount a folder again; skips the test where that cannot be done."""
    if shutil.which("bindfs") is None or not os.path.exists("/dev/fuse"):
        pytest.skip("needs bindfs and FUSE")
    source.mkdir(exist_ok=True)
    at.mkdir()
    done = subprocess.run(
        ["bindfs", "-o", options, str(source), str(at)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"bindfs cannot mount here: {done.stderr.strip()}")
    try:
        yield at
    finally:
        subprocess.run(["fusermount", "-u", "-z", str(at)], check=False)
