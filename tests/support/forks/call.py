"""`python -m tests.support.forks.call FILE`: call what is pickled in a file."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

if __name__ == "__main__":
    target, words = pickle.loads(Path(sys.argv[1]).read_bytes())
    target(*words)
