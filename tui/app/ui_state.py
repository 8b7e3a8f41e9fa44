"""What the dashboard remembers of a person's last choices, across sessions.

Saved when a choice is made, since SIGHUP ends a dashboard without a word. A choice changes its own
entry alone, so that two dashboards do not undo each other's.
"""

from __future__ import annotations

import fcntl
import json
import threading
from typing import TYPE_CHECKING, Any, Final

from jobs.run.rundir import read_json, write_atomic

if TYPE_CHECKING:
    from pathlib import Path

_FILE: Final = "ui.json"
_LOCK: Final = "ui.lock"
_VERSION: Final = 1


class UiState:
    """Choices by name: JSON values. Any thread may use it.

    Args:
        home: The state directory.
        writable: Whether choices are kept; a read-only dashboard keeps none.
    """

    def __init__(self, home: Path, *, writable: bool = True) -> None:
        self._home = home
        self._writable = writable
        self._lock = threading.Lock()  # never held while the disk is waited for
        self._saving = threading.Lock()
        self._values = self._read()
        self._changed: dict[str, Any] = {}

    def get(self, name: str, default: Any = None) -> Any:
        """Return the last choice; the default unless it is of the default's type."""
        value = self._values.get(name, default)
        return value if default is None or isinstance(value, type(default)) else default

    def put(self, name: str, value: Any) -> bool:
        """Choose; whether that is news, which `save` then has to write."""
        with self._lock:
            if self._values.get(name) == value:
                return False
            self._values[name] = self._changed[name] = value
            return self._writable

    def save(self) -> None:
        """Write what was chosen since the last time, over what others wrote meanwhile.

        Raises:
            OSError: It cannot be written; what was chosen counts for this session.
        """
        with self._saving, open(self._home / _LOCK, "a", encoding="utf-8") as lock:
            # Freed when the file is closed, also when this process dies.
            fcntl.flock(lock, fcntl.LOCK_EX)
            with self._lock:
                changed = dict(self._changed)
            if changed and not self._is_newer():
                text = json.dumps({"version": _VERSION, "values": self._read() | changed}, indent=1)
                write_atomic(self._home / _FILE, text + "\n")
            with self._lock:  # what was chosen meanwhile is still to be written
                for name, value in changed.items():
                    if self._changed[name] == value:
                        del self._changed[name]

    def _read(self) -> dict[str, Any]:
        """Read the file; empty if it is damaged or of another version."""
        stored = read_json(self._home / _FILE) or {}
        values = stored.get("values") if stored.get("version") == _VERSION else None
        return values if isinstance(values, dict) else {}

    def _is_newer(self) -> bool:
        """Whether a newer fsdp-tui wrote it, whose choices are to stay."""
        version = (read_json(self._home / _FILE) or {}).get("version")
        return isinstance(version, int) and version > _VERSION
