"""The `python` of processes that the product starts: stands for a process of the server.

It has the pid that the launcher knows. What the launcher gave it goes to the server, signals that
it gets go to the rank, and it ends as the rank does, by the same signal if by one. When it is
killed, the server kills the rank.
"""

import _thread
import json
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import NoReturn

FORWARDED = ("SIGTERM", "SIGINT", "SIGQUIT", "SIGHUP", "SIGUSR1", "SIGUSR2")


def main(server: str) -> NoReturn:
    """Args: server: Path of its socket."""
    if "-m" not in sys.argv[1:3]:  # what libraries run: no module of ours
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    signals = {getattr(signal, name) for name in FORWARDED}
    ignored = {one for one in signals if signal.getsignal(one) is signal.SIG_IGN}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # `forward` takes them
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(server)
    os.umask(umask := os.umask(0))
    request = {
        "argv": sys.argv[1:],
        "environment": dict(os.environ),
        "cwd": os.getcwd(),
        "leads": os.getsid(0) == os.getpid(),
        "ignored": sorted(ignored),
        "umask": umask,
    }
    socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
    pid = int(connection.recv(64) or 0)

    def forward() -> None:
        while True:
            number = signal.sigwait(signals - ignored)
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    # A handler would run in this thread, between two instructions of Python: never, if the signal
    # comes after the last of them and before the call below begins to wait.
    if pid:
        _thread.start_new_thread(forward, ())
    said = connection.recv(64) if pid else b""
    status = int(said) if said else signal.SIGKILL  # the server is gone
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number} - {signal.SIGKILL})
        signal.raise_signal(number)
    os._exit(os.waitstatus_to_exitcode(status))
