"""`python -m tests.support.forks.server LISTENER PADDING`: forks processes with all imports done.

Ranks import torch, diffusers, transformers and peft, which takes many times as long as they train a
toy. This process has imported them, and runs nothing: who connects sends the command line, the
environment, the working directory and the standard streams of a Python process, which is forked and
does from there on what the command line says. It leaves when nobody is connected any more.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import random
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

LARGEST: Final = 1 << 18  # bytes of a request
FIRST_COMES_WITHIN: Final = 60.0  # seconds

# What families' ranks import, and torch when it first shards, saves or recomputes; then what the
# processes around ranks do.
PRELOADED: Final = (
    "engine.run_job",
    "engine.exports.__main__",
    "engine.toy",
    "diffusers.loaders.lora_pipeline",
    "torch.distributed.checkpoint.state_dict",
    "torch.testing._internal.distributed.fake_pg",
    "accelerate.commands.accelerate_cli",
    "engine.memory.__main__",
    "engine.start.loopback",
    "jobs.backends.local.dispatch",
    "jobs.backends.local.ranks",
    "tui.cli.commands",
    "tui.cli.job.show",
    "tui.cli.job.submit",
)
FORKS: Final = "PYTHON_EXEC"  # what torch's launcher starts ranks with, and here all others too


class Server:
    """Forks for whoever connects; a connection lives as long as its process."""

    def __init__(self, listener: socket.socket) -> None:
        self.selector = selectors.DefaultSelector()
        self.listener = listener
        self.selector.register(listener, selectors.EVENT_READ, self.accept)
        self.processes: dict[socket.socket, int] = {}
        self.connections: set[socket.socket] = set()
        self.waiting: dict[int, socket.socket] = {}  # by the descriptor of the process

    def serve(self) -> None:
        """Until the last connection is closed."""
        patience: float | None = FIRST_COMES_WITHIN
        while events := self.selector.select(patience):
            for key, _ in events:
                key.data(key.fileobj)
            patience = None if self.connections or self.waiting else 0

    def accept(self, _: Any) -> None:
        connection, _address = self.listener.accept()
        self.connections.add(connection)
        self.selector.register(connection, selectors.EVENT_READ, self.hear)

    def hear(self, connection: socket.socket) -> None:
        """A request, or the end of who asked: what runs for them ends too."""
        try:
            message, streams, _, _ = socket.recv_fds(connection, LARGEST, 3)
        except OSError:
            message, streams = b"", []
        if message:
            self.start(connection, json.loads(message), streams)
            return
        self.selector.unregister(connection)
        self.connections.remove(connection)
        if connection in self.processes:
            os.kill(self.processes[connection], signal.SIGKILL)  # a zombie at worst
        else:
            connection.close()

    def start(self, connection: socket.socket, request: Any, streams: list[int]) -> None:
        pid = os.fork()
        if pid == 0:
            become(self, request, streams)
        for stream in streams:
            os.close(stream)
        self.processes[connection] = pid
        handle = os.pidfd_open(pid)
        self.waiting[handle] = connection
        self.selector.register(handle, selectors.EVENT_READ, self.ended)
        with suppress(OSError):
            connection.send(str(pid).encode())

    def ended(self, handle: int) -> None:
        """Tell who asked for a process how it ended."""
        connection = self.waiting.pop(handle)
        _, status = os.waitpid(self.processes.pop(connection), 0)
        self.selector.unregister(handle)
        os.close(handle)
        with suppress(OSError):
            connection.send(str(status).encode())
        if connection not in self.connections:
            connection.close()


def become(server: Server, request: Any, streams: list[int]) -> None:
    """Go on as the process that was asked for. Does not return."""
    status = 1
    try:
        server.selector.close()
        for used in (server.listener, *server.connections):
            used.close()
        for handle in server.waiting:
            os.close(handle)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        dress(request)
        status = run(request["argv"])
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def dress(request: Any) -> None:
    """Take over what a process has from whoever starts it."""
    if request["leads"]:
        os.setsid()
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    os.umask(request["umask"])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    show([sys.executable, *request["argv"]], request["environment"])
    words = [word for word in request["argv"] if word != "-u"]
    if FORKS in os.environ and words[:2] != ["-m", "engine"]:  # a rank starts none
        sys.executable = os.environ[FORKS]  # what starts more of our processes forks them
        memory = importlib.import_module("jobs.memory.question")
        memory.COMMAND = (sys.executable, *memory.COMMAND[1:])  # type: ignore[misc]
    random.seed()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]


def show(argv: list[str], environment: dict[str, str]) -> None:
    """Let `/proc/PID/cmdline` and `/proc/PID/environ` say what they would of a new process.

    They show what lies where the kernel put the server's own, which was padded to have room.
    `os.environ` must have been filled before: what libc kept of the server's lies there too.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first, last, begin, end = map(int, fields[45:49])
    variables = b"".join(os.fsencode(f"{n}={v}") + b"\0" for n, v in environment.items())
    assert len(variables) <= end - begin, "the environment is too large"
    ctypes.memmove(begin, variables.ljust(end - begin, b"\0"), end - begin)
    words = b"".join(os.fsencode(word) + b"\0" for word in argv)
    # All of it has to be words: the first is a path, which leading slashes do not change.
    line = words.rjust(last - first, b"/")
    assert len(line) == last - first, "the command line is too long"
    ctypes.memmove(first, line, len(line))


def run(argv: list[str]) -> int:
    """What `python` does with these words; returns the exit status."""
    while argv and argv[0] == "-u":  # standard streams are unbuffered anyway
        argv = argv[1:]
    assert argv[0] == "-m", argv
    sys.argv = argv[1:]
    try:
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        traceback.print_exc()
        if isinstance(error, KeyboardInterrupt):  # Python ends by the signal, for a shell to see
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        return 1
    return 0


def preload() -> None:
    _import_torchao()
    for name in PRELOADED:
        importlib.import_module(name)
        if name.endswith("__main__"):
            del sys.modules[name]  # else who runs it is warned that it is here already
    from engine import families
    from jobs.spec.families import FAMILIES

    for name in FAMILIES:
        family = families.load(name)
        family.pipeline_class()
        family.transformer_class()


def _import_torchao() -> None:
    """Import it while no GPU is visible: with some versions of torch it asks the first one for its
    properties, and a process that has asked CUDA cannot fork ranks."""
    from torch.utils._triton import has_triton

    visible = os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with suppress(ImportError):
        import torchao.prototype.mx_formats.kernels  # noqa: F401
    del os.environ["CUDA_VISIBLE_DEVICES"]
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    has_triton.cache_clear()


def main() -> None:
    listener = socket.socket(fileno=int(sys.argv[1]))
    preload()
    gc.collect()
    gc.freeze()  # a collection would touch, and so copy, every page that is shared
    assert threading.active_count() == 1, threading.enumerate()
    Server(listener).serve()


if __name__ == "__main__":
    main()
