"""With this folder in PYTHONPATH, a real runner or dashboard starts fake ranks.

Both are started as `python -m …` by the product itself, so nothing else can reach into them.
"""

import sys
from pathlib import Path

if {"jobs.backends.keeper", "tui"} & set(sys.orig_argv):
    sys.path.append(str(Path(__file__).resolve().parents[5]))
    from tests.support.jobs.fakes.supervise import disguise

    disguise()
