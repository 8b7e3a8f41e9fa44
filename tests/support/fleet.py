"""Boxes of a fleet without ssh: a program of that name that runs what it is given, here."""

from __future__ import annotations

import json
import os
import stat
import threading
from typing import TYPE_CHECKING, Any

from jobs.fleet.config import Fleet
from jobs.fleet.lines import FORMAT
from jobs.fleet.watch import FleetWatch
from tests.support.waiting import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest

    from jobs.fleet.watch import BoxView

_SSH = """#!/bin/sh
printf '%s\\n' "$*" >> {root}/calls
while [ "$1" != -- ]; do shift; done
if [ -e {root}/"$2".away ]; then cat {root}/"$2".away >&2; exit 255; fi
export FSDP_TUI_HOME={root}/"$2"
exec sh -c "exec $3"
"""
# Says what is in its home, then what is written to a pipe there, until that is closed.
_BOX = """#!/bin/sh
cat "$FSDP_TUI_HOME/says"
exec cat "$FSDP_TUI_HOME/pipe"
"""
HEAD = {"fleet": FORMAT, "version": "9.9", "host": "big", "cores": 64, "interval": 5}
JOB = {"id": 3, "name": "cats", "state": "running", "step": 40, "total_steps": 200, "ranks": 2}
GPU = {"gpu": 0, "name": "H200", "memory_total": 2**37, "memory_used": 2**30, "utilisation": 97}


def lines(*rows: dict[str, Any]) -> str:
    """As a box prints them."""
    return "".join(json.dumps(row) + "\n" for row in rows)


class FakeBoxes:
    """A folder with a home for each box, and `ssh` first on the path.

    `command` is the path of a box that says what its home has in `says`.
    """

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.command = self._script("box", _BOX)
        self._script("ssh", _SSH.format(root=root))
        patch.setenv("PATH", f"{root}{os.pathsep}{os.environ['PATH']}")
        patch.setenv("XDG_RUNTIME_DIR", str(root))
        patch.setattr("tempfile.gettempdir", lambda: str(root))

    def _script(self, name: str, text: str) -> str:
        path = self.root / name
        path.write_text(text, encoding="utf-8")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    def script(self, name: str, body: str) -> str:
        """A program that a box has instead of fsdp-tui; its path."""
        return self._script(name, f"#!/bin/sh\n{body}\n")

    def says(self, name: str, *rows: dict[str, Any]) -> None:
        """What a box says as soon as it is asked."""
        home = self.root / name
        home.mkdir(exist_ok=True)
        (home / "says").write_text(lines(*rows), encoding="utf-8")
        if not (home / "pipe").exists():
            os.mkfifo(home / "pipe")

    def away(self, name: str, why: str | None) -> None:
        """Whether ssh fails, and with which words."""
        path = self.root / f"{name}.away"
        path.unlink() if why is None else path.write_text(why + "\n", encoding="utf-8")

    def calls(self) -> list[str]:
        """The arguments of each call of ssh."""
        path = self.root / "calls"
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []

    def fleet(self, *names: str, **box: Any) -> Fleet:
        """A fleet of such boxes."""
        own = {"command": self.command} | box
        return Fleet.model_validate({"machines": [{"name": name} | own for name in names]})


class Watching:
    """A fleet that is watched in a thread."""

    def __init__(self, fleet: Fleet) -> None:
        self.watch = FleetWatch(fleet)
        self._views: tuple[BoxView, ...] = ()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self.watch.run, args=(self._publish,))

    def __enter__(self) -> Watching:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.watch.close()
        self._thread.join()

    def _publish(self, views: tuple[BoxView, ...]) -> None:
        with self._changed:
            self._views = views
            self._changed.notify_all()

    def until(self, so: Callable[[BoxView], Any], which: int = 0) -> BoxView:
        """Wait for a box to be as wanted."""
        with self._changed:
            wanted = self._changed.wait_for(
                lambda: len(self._views) > which and so(self._views[which]), PATIENCE
            )
            assert wanted, self._views
            return self._views[which]
