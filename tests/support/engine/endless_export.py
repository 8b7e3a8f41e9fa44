"""`python -m engine.exports`, which says on its standard error that it waits, and never ends."""

from __future__ import annotations

import sys
import time
from typing import Any

from engine.exports import __main__ as tool
from engine.exports import writing


def _wait(_: Any) -> None:
    print("waits", file=sys.stderr, flush=True)
    while True:
        time.sleep(1)


if __name__ == "__main__":
    tool.prepare_process()
    writing.Writing.finish = _wait  # type: ignore[method-assign]
    tool.main(sys.argv[1:])
