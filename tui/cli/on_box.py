"""`fsdp-tui --on BOX …`: run any command with another machine's fsdp-tui, over ssh."""

from __future__ import annotations

import codecs
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

import click

from jobs.errors import SpecError, UserError
from jobs.fleet.config import read_fleet
from jobs.fleet.ssh import FAILED, is_too_old, shared_answers, ssh_command, why_failed
from jobs.fleet.watch import ENDS_IN
from jobs.machine.child import end_child
from jobs.spec.file.flags import parse_flags
from jobs.spec.values.yaml_lines import STDIN
from jobs.untrusted.files import read_regular
from tui.cli.echo import Stream, echo, in_colours
from tui.cli.job_arguments import JobCommand
from tui.fleet.visit import visit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from jobs.fleet.config import Box


_FULL_SCREEN: Final = ("demo", "edit")
# These commands prompt, or run until Ctrl-C, so the box needs this terminal's input.
_TALKING: Final = ("run", "logs", "list", "remove", "prune", "cache", "checkpoints")
_REFUSED: Final = {
    "web": "forward its port: ssh -L 8000:localhost:8000 BOX fsdp-tui web",
    "fleet": "its screen is on this one",
    "completion": "it is for shells of this machine",
}
_LINE_END: Final = "\x1b[K"  # end of progress lines; no other control sequence of a box passes


def open_on(name: str, flags: Sequence[str]) -> int:
    """Open the dashboard of a box in this terminal.

    Raises:
        UserError: There is no such box.
    """
    return visit(read_fleet().find(name), flags)


def run_on(name: str, words: list[str], here: click.Command | None = None) -> int:
    """Run a command on a box and filter what it prints.

    Args:
        name: The box.
        words: The command, its options and arguments.
        here: The local command of that name, which knows the options.

    Returns:
        The command's exit status; 1 if the box cannot be reached.

    Raises:
        UserError: There is no such box, or the command cannot run over ssh.
    """
    box = read_fleet().find(name)
    at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if why := _REFUSED.get(words[0]):
        raise UserError(f"`{words[0]}` cannot run on another machine", why)
    if words[0] in _FULL_SCREEN and at_terminal:
        return visit(box, words)
    words, job = _with_job_file(words, here)
    if stays := _stays_here(here, words):
        raise _not_sent(stays, words)
    talks = words[0] in _TALKING and at_terminal
    ask, share = sys.stdin.isatty(), shared_answers(box)
    command = ssh_command(box, words, terminal=talks, ask=ask, share=share)
    inherits = talks or (STDIN in words and job is None)
    feed = None if inherits else subprocess.DEVNULL if job is None else subprocess.PIPE
    return _run(box, command, feed, job)


def _with_job_file(
    words: list[str], command: click.Command | None
) -> tuple[list[str], bytes | None]:
    """Replace a local job file's name with `-`; return the arguments and the file's contents.

    Args:
        words: The command and its arguments.
        command: The local command of that name.

    Raises:
        UserError: The file cannot be read or sent.
    """
    if not isinstance(command, JobCommand) or {"-h", "--help"} & set(words):
        return words, None
    local = next((name for name in _others(command, words) if Path(name).is_file()), None)
    if local is None:
        return words, None
    if words[0] == "run":
        raise UserError(
            f"{local} is on this machine, and `run` needs the input for Ctrl-C",
            "submit it, then follow it: `--on BOX logs ID --follow`",
        )
    try:
        job = read_regular(Path(local))
    except OSError as error:
        raise UserError(f"cannot read {local} ({error.strerror})") from error
    for place in (at for at, word in enumerate(words) if word == local):
        sent = [*words[:place], STDIN, *words[place + 1 :]]
        if _others(command, sent) == [STDIN]:  # else it is the value of a flag
            return sent, job
    raise _not_sent(local, words)


def _not_sent(local: str, words: Sequence[str]) -> UserError:
    return UserError(
        f"{local} is on this machine, and `{words[0]}` would read a file of that name on the other",
        "copy it there, and run it there with ssh",
    )


def _stays_here(command: click.Command | None, words: Sequence[str]) -> str:
    """Return an argument that names a local file but would be read on the box; "" if none."""
    while isinstance(command, click.Group):
        at = next((at for at, word in enumerate(words) if at and word in command.commands), 0)
        command, words = (command.commands[words[at]], words[at:]) if at else (None, words)
    if command is None:
        return ""
    context = click.Context(command, resilient_parsing=True, **command.context_settings)
    try:
        given = command.make_parser(context).parse_args(list(words[1:]))[0]
    except click.UsageError:  # the box may know this option
        return ""
    read = [
        given.get(argument.name)
        for argument in command.params
        if isinstance(argument, click.Argument) and isinstance(argument.type, click.Path)
    ]
    return next((name for name in read if isinstance(name, str) and Path(name).is_file()), "")


def _others(command: click.Command, words: Sequence[str]) -> list[str]:
    """Return the arguments that are neither options of the command nor job keys."""
    try:
        context = command.make_context(words[0], list(words[1:]))
        return parse_flags(context.params.get("words", ()))[1]
    except (click.UsageError, SpecError):  # the box may know this option
        return []


@contextmanager
def _signals_raise() -> Iterator[Callable[[], None]]:
    """Make signals that end this process end ssh too; ignored ones, as under nohup, stay ignored.

    They raise only after the yielded function was called: before that, no process is known.
    """
    came: list[int] = []
    waits = True

    def end(number: int, _: object) -> None:
        came.append(number)
        if not waits:
            raise SystemExit(128 + number)

    def raise_now() -> None:
        nonlocal waits
        waits = False
        if came:
            raise SystemExit(128 + came[0])

    ending = (signal.SIGTERM, signal.SIGHUP)
    numbers = [number for number in ending if signal.getsignal(number) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, end)
    try:
        yield raise_now
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _run(box: Box, command: Sequence[str], feed: int | None, job: bytes | None) -> int:
    with _signals_raise() as raise_signals:
        return _run_ssh(box, command, feed, job, raise_signals)


def _run_ssh(
    box: Box,
    command: Sequence[str],
    feed: int | None,
    job: bytes | None,
    raise_signals: Callable[[], None],
) -> int:
    try:
        process = subprocess.Popen(
            command, stdin=feed, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    except OSError as error:
        raise UserError(f"cannot run ssh ({error.strerror})") from error
    assert process.stdout is not None
    assert process.stderr is not None
    errors = _Copy(process.stderr, sys.stderr)
    beside = threading.Thread(target=errors.run_beside, daemon=True)
    try:
        raise_signals()
        beside.start()
        if job is not None and process.stdin is not None:
            with suppress(BrokenPipeError), process.stdin:
                process.stdin.write(job)
        _Copy(process.stdout, sys.stdout).run()
        status = process.wait()
    except BaseException:
        end_child(process, grace=ENDS_IN)
        raise
    beside.join()
    if is_too_old(status, errors.end):
        echo(f"fsdp-tui: the fsdp-tui of {box.name} is too old for this", err=True)
    if status in (FAILED, 127):
        why = why_failed(box, status, errors.end)
        echo(
            f"fsdp-tui: {box.name} is away: {why}" if status == FAILED else f"fsdp-tui: {why}",
            err=True,
        )
        return 1
    return status


class _Copy:
    """Copies output of a box as it arrives; keeps colors, drops other control sequences."""

    def __init__(self, source: IO[bytes], to: IO[str]) -> None:
        self._source, self._to = source, to
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._text = Stream(_LINE_END)
        self.end = ""  # last sequence of the chunk

    def run(self) -> None:
        """Copy until end-of-file.

        Raises:
            OSError: The local output is closed.
        """
        while data := os.read(self._source.fileno(), 1 << 16):
            self._print(self._text.take(self._decoder.decode(data)))
        self._print(self._text.take(self._decoder.decode(b"", final=True)) + self._text.end())

    def run_beside(self) -> None:
        """Copy until end-of-file; read on if local output fails, since a full pipe blocks ssh."""
        try:
            self.run()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                while data := os.read(self._source.fileno(), 1 << 16):
                    self._note(in_colours(self._decoder.decode(data)))

    def _print(self, text: str) -> None:
        self._note(text)
        self._to.write(text)
        self._to.flush()

    def _note(self, text: str) -> None:
        self.end = (self.end + text)[-4096:]
