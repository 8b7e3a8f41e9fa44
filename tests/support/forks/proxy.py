"""The `python` of ranks that a real launcher starts: stands for a process of the server.

It has the pid that the launcher knows. What the launcher gave it goes to the server, signals that
it gets go to the rank, and it ends as the rank does, by the same signal if by one. When it is
killed, the server kills the rank.
"""

import json
import os
import signal
import socket
import sys
from contextlib import suppress
from types import FrameType
from typing import NoReturn

FORWARDED = ("SIGTERM", "SIGINT", "SIGQUIT", "SIGHUP", "SIGUSR1", "SIGUSR2")


def main(server: str) -> NoReturn:
    """Args: server: Path of its socket."""
    signals = {getattr(signal, name) for name in FORWARDED}
    ignored = {one for one in signals if signal.getsignal(one) is signal.SIG_IGN}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # until there is somebody to forward them to
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(server)
    os.umask(umask := os.umask(0))
    request = {
        "argv": sys.argv[1:], "environment": dict(os.environ), "cwd": os.getcwd(),
        "leads": os.getsid(0) == os.getpid(), "ignored": sorted(ignored), "umask": umask,
    }  # fmt: skip
    socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
    pid = int(connection.recv(64) or 0)

    def forward(number: int, _: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    for one in signals - ignored:
        signal.signal(one, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    said = connection.recv(64) if pid else b""
    status = int(said) if said else signal.SIGKILL  # the server is gone
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))
