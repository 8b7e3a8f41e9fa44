"""Look through pickles that others may have written, before they are loaded."""

from __future__ import annotations

import pickle
import pickletools
from typing import Final

_REMEMBERS: Final = frozenset({"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"})


def check_pickle(data: bytes) -> None:
    """Refuse a pickle whose numbers take much more memory than it has bytes.

    Python reserves room for as many objects as the largest number of one says, so that five bytes
    take 32 GB (true of 3.13). Picklers count them from 0 on.

    Raises:
        ValueError: It is torn, or not a pickle.
        pickle.UnpicklingError: It would take more.
    """
    count = 0
    for opcode, number, _ in pickletools.genops(data):
        if opcode.name in _REMEMBERS:
            if number is not None and number > count:
                raise pickle.UnpicklingError(f"its object {count} says that it is object {number}")
            count += 1
