"""Start Python processes on the server: ranks that call a function, and ranks of real launches."""

from __future__ import annotations

import json
import os
import pickle
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from fcntl import LOCK_EX, flock
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests.support.forks import proxy
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_PYTHON: Final = sys.executable  # whatever a test puts in its place
PATIENCE: Final = 1500.0  # seconds; a slow machine under load, not an expectation
VARIABLE: Final = "FSDP_TUI_TESTS_FORKS"  # the server's directory, for all workers of a session
_ROOM: Final = 1 << 16  # bytes for the environment of what is forked
_LINE: Final = 3500  # and for its command line, which becomes one path: at most 4096
# What libraries read when they are imported, as `jobs.launch` sets it.
_LAUNCHED: Final = {
    "PYTHONSAFEPATH": "1",
    "PYTHONUNBUFFERED": "1",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "DIFFUSERS_VERBOSITY": "error",
    "ACCELERATE_USE_CPU": "true",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
}

_leases: dict[Path, socket.socket] = {}  # by the server's directory
_connections: list[socket.socket] = []  # the leases, and of whatever a test has not waited for
_started: list[subprocess.Popen[bytes]] = []
_owned: list[str] = []  # directories


def prepare() -> None:
    """Choose the server's directory; by the process whose children the workers are."""
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = tempfile.mkdtemp(prefix="forks-")
        _owned.append(os.environ[VARIABLE])


def leave() -> None:
    """Let the servers go, at the end of a session; each leaves with the last one that needs it."""
    _leases.clear()
    while _connections:
        _connections.pop().close()
    while _started:
        _started.pop().wait()
    while _owned:
        shutil.rmtree(_owned.pop())


def directory() -> Path:
    """Where the server's socket is; it runs from now on until this process lets it go."""
    return _serving(Path(os.environ[VARIABLE]), _PYTHON, os.environ | _LAUNCHED)


def python() -> str:
    """An interpreter for `torch.distributed.run`, as its variable PYTHON_EXEC names one."""
    return str(directory() / "python")


def python_like(interpreter: str, environment: Mapping[str, str]) -> str:
    """The same of a server that another interpreter runs, with variables that it imports with."""
    name = sha256(repr((interpreter, sorted(environment.items()))).encode()).hexdigest()[:12]
    place = Path(os.environ[VARIABLE]) / name
    place.mkdir(exist_ok=True)
    return str(_serving(place, interpreter, environment) / "python")


def _serving(place: Path, interpreter: str, environment: Mapping[str, str]) -> Path:
    if place not in _leases:
        with open(place / "lock", "w") as lock:
            flock(lock, LOCK_EX)
            try:
                _leases[place] = _connect(place)
            except (FileNotFoundError, ConnectionRefusedError):  # not yet, or no longer
                _start(place, interpreter, environment)
                _leases[place] = _connect(place)
    return place


def _connect(place: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(str(place / "socket"))
    _connections.append(connection)
    return connection


def _start(place: Path, interpreter: str, environment: Mapping[str, str]) -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        (place / "socket").unlink(missing_ok=True)
        listener.bind(str(place / "socket"))
        listener.listen(64)
        log = stack.enter_context(open(place / "log", "w"))
        # Nothing of the test that happens to be the first: it goes on when that has ended.
        others = ("FSDP_TUI_", "XDG_")
        inherited = {n: v for n, v in environment.items() if not n.startswith(others)}
        variables = {"PYTHONPATH": f"{ROOT}{os.pathsep}{environment.get('PYTHONPATH', '')}"}
        command = [interpreter, "-m", "tests.support.forks.server", str(listener.fileno())]
        server = subprocess.Popen(
            [*command, "-" * _LINE],
            env=inherited | variables | {"PADDING": "-" * _ROOM},
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            start_new_session=True,
        )
        _started.append(server)
    script = place / "python.new"
    # Shell first, then Python: a line that begins with #! takes no path with spaces.
    begin = f"#!/bin/sh\n'''exec' {shlex.quote(_PYTHON)} -IS \"$0\" \"$@\"\n' '''\n"
    end = f"main({str(place / 'socket')!r})\n"
    script.write_text(f"{begin}{Path(proxy.__file__).read_text()}\n{end}")
    script.chmod(0o700)
    script.rename(place / "python")


class RanksFailedError(Exception):
    """A rank ended with something else than 0.

    Attributes:
        codes: Exit status by rank, negative for a signal; of those that ended by themselves.
    """

    def __init__(self, codes: dict[int, int], said: str) -> None:
        super().__init__(f"exit status by rank: {codes}\n{said}")
        self.codes = codes


@dataclass
class Ranks:
    """Ranks that run a function.

    Attributes:
        pids: By rank.
        output: Takes what they print.
        codes: Of those that have ended, by rank; negative for a signal.
        keep: What they need this process to keep.
    """

    output: Path
    pids: list[int] = field(default_factory=list)
    codes: dict[int, int] = field(default_factory=dict)
    keep: Any = None
    _connections: list[socket.socket] = field(default_factory=list)

    def join(self, patience: float = PATIENCE) -> None:
        """Wait until all have left, for so many seconds.

        Raises:
            RanksFailedError: One of them failed; the others are ended.
        """
        deadline = time.monotonic() + patience
        while len(self.codes) < len(self.pids):
            self._look(0.02)
            if any(self.codes.values()) or time.monotonic() > deadline:
                failed = dict(self.codes)
                self.kill()
                raise RanksFailedError(failed, self.output.read_text(errors="replace")[-6000:])
        self.kill()
        if any(self.codes.values()):
            raise RanksFailedError(self.codes, self.output.read_text(errors="replace")[-6000:])

    def all_alive(self) -> bool:
        self._look(0)
        return not self.codes

    def kill(self) -> None:
        """End those that are left, and wait for it."""
        for rank, connection in enumerate(self._connections):
            if rank not in self.codes:
                connection.shutdown(socket.SHUT_WR)  # the server kills what nobody asks for
        while len(self.codes) < len(self.pids):
            self._look(1)
        for connection in self._connections:
            connection.close()

    def _look(self, seconds: float) -> None:
        """Hear of those that have ended, waiting for so long."""
        for rank, connection in enumerate(self._connections):
            if rank in self.codes:
                continue
            connection.settimeout(seconds or 1e-6)
            try:
                said = connection.recv(64)
            except TimeoutError:
                continue
            status = int(said) if said else signal.SIGKILL
            self.codes[rank] = os.waitstatus_to_exitcode(status)


def start(target: Callable[..., None], words: list[tuple[Any, ...]], **each: list[str]) -> Ranks:
    """Fork `target(rank, *words[rank])`, for every rank, from the server.

    Args:
        target: What can be imported here and by the server.
        words: Its arguments, by rank; what can be pickled.
        each: Variables of the environment: name → value by rank.
    """
    place = directory()
    call = Path(tempfile.mkdtemp(dir=place))
    started = Ranks(call / "output")
    for rank, own in enumerate(words):
        (call / str(rank)).write_bytes(pickle.dumps((target, (rank, *own))))
        variables = {name: values[rank] for name, values in each.items()}
        request = {
            "argv": ["-m", "tests.support.forks.call", str(call / str(rank))],
            # Not the person's caches, where a test has none of its own.
            "environment": {"XDG_CACHE_HOME": str(call)}
            | dict(os.environ)
            | {"PYTHONSAFEPATH": "1"}
            | variables,
            "cwd": os.getcwd(),
            "leads": False,
            "ignored": [],
            "umask": 0o022,
        }
        connection = _connect(place)
        with open(os.devnull) as nothing, open(started.output, "a") as output:
            streams = [nothing.fileno(), output.fileno(), output.fileno()]
            socket.send_fds(connection, [json.dumps(request).encode()], streams)
        started._connections.append(connection)
    for connection in started._connections:
        said = connection.recv(64)
        assert said, (place / "log").read_text()[-3000:]
        started.pids.append(int(said))
    return started
