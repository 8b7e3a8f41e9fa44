"""Checkpoints: complete or absent, on any number of ranks, in either layout.

`contents` says what is in one, `sharded` and `full` how its tensors lie on disk, `write` makes it
complete, `saver` decides when and how, `choose` finds the one to begin from, `restore` loads it.
"""

from engine.checkpoint.choose import choose_start
from engine.checkpoint.contents import collect
from engine.checkpoint.restore import load
from engine.checkpoint.saver import Saver
from engine.checkpoint.write import write

__all__ = ["Saver", "choose_start", "collect", "load", "write"]
