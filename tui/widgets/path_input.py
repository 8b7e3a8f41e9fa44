"""A path input with completion: tab or the right arrow accepts the suggestion."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from typing import TYPE_CHECKING, Any, ClassVar

from textual.binding import Binding
from textual.suggester import Suggester
from textual.widgets import Input

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def complete_path(text: str, suffixes: Sequence[str] | None = ()) -> str | None:
    """Return the text with the last path component completed; None if nothing matches.

    Reads the disk. Directories come first and end with a slash; `~` and `$VAR` stay as typed.

    Args:
        text: What was typed.
        suffixes: Extensions of matching files; empty for directories only, None for any file.
    """
    head, slash, tail = text.rpartition("/")
    folder = os.path.expandvars(os.path.expanduser(head + slash)) if slash else "."
    if not slash and tail == "~":
        return "~/"
    matches: list[tuple[bool, str]] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                hidden = entry.name.startswith(".") and not tail.startswith(".")
                if hidden or not entry.name.startswith(tail) or not _is_text(entry.name):
                    continue
                if entry.is_dir():
                    matches.append((False, f"{entry.name}/"))
                elif suffixes is None or entry.name.endswith(tuple(suffixes)):
                    matches.append((True, entry.name))
    except (OSError, ValueError):
        return None
    return f"{head}{slash}{min(matches)[1]}" if matches else None


def _is_text(name: str) -> bool:
    """Return whether a file name can be displayed and stored in a job file: printable UTF-8."""
    return name.isprintable()


class PathSuggester(Suggester):
    """Suggests paths, looked up in a thread one at a time, or matching words.

    Args:
        suffixes: As `complete_path` takes them.
        words: Other suggestions besides paths.
    """

    def __init__(
        self,
        suffixes: Sequence[str] | None = (),
        words: Callable[[], Sequence[str]] = lambda: (),
    ) -> None:
        super().__init__(use_cache=False, case_sensitive=True)
        self._suffixes = suffixes
        self._words = words
        self._one_look = asyncio.Lock()
        self._typed = ""

    async def get_suggestion(self, value: str) -> str | None:
        self._typed = value
        async with self._one_look:  # a hanging file system blocks one thread, not many
            if value != self._typed or not value:
                return None
            path = await in_daemon(lambda: complete_path(value, self._suffixes))
        words = (word for word in self._words() if word.startswith(value) and word != value)
        return path or next(words, None)


async def in_daemon(look: Callable[[], Any]) -> Any:
    """Run a function in a daemon thread, which does not delay the program's exit.

    Return its result, or None if it fails.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def tell(result: Any) -> None:
        if not future.done():
            future.set_result(result)

    def run() -> None:
        result = None
        try:
            result = look()
        finally:
            with contextlib.suppress(RuntimeError):  # the program has ended in the meantime
                loop.call_soon_threadsafe(tell, result)

    threading.Thread(target=run, daemon=True).start()
    return await future


class PathInput(Input):
    """An input whose tab key accepts the suggestion, or moves on if there is none."""

    BINDINGS: ClassVar = [
        Binding(
            "tab",
            "take",
            "complete",
            show=False,
            id="path.complete",
            tooltip="Accept suggestion, or go to the next field",
        )
    ]

    def action_take(self) -> None:
        if self._suggestion and self.cursor_at_end and self._suggestion != self.value:
            self.action_cursor_right()
        else:
            self.screen.focus_next()
