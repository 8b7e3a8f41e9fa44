"""`fsdp-tui web`: the dashboard in a browser."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import secrets
from pathlib import Path
from typing import Final

import click

from jobs.errors import UserError
from jobs.queue.store import Store
from tui.cli.job_arguments import warn

_FIRST_PERSON: Final = 1000  # the lowest uid of regular users on all common systems
_NOBODY: Final = 65534
_NO_LOGIN: Final = ("nologin", "false")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@click.command()
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on; all but loopback are open to the network.",
)
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True)
@click.option("--read-only", is_flag=True, help="Serve a read-only dashboard.")
@click.option(
    "--token/--no-token",
    default=None,
    help="Ask for the token in the printed address; on by default where other users "
    "have accounts, or beyond loopback.",
)
def web(host: str, port: int, read_only: bool, token: bool | None) -> None:
    """Serve the dashboard to a browser until Ctrl-C.

    Without a token, anyone who can reach the port controls your jobs, including other users of
    this machine. From elsewhere, forward the port through SSH instead of opening it:

    \b
    ssh -L 8000:127.0.0.1:8000 this-machine      then open http://127.0.0.1:8000
    """
    if importlib.util.find_spec("textual_serve") is None:
        raise UserError("the web dashboard needs textual-serve", "pip install 'fsdp-tui[web]'")
    Store()  # report state directory problems here rather than in the browser
    if token is None:
        token = host not in _LOOPBACK or others_have_accounts()
    if host not in _LOOPBACK:
        who = "can see your jobs" if read_only else "controls your jobs as you"
        secret = (
            "the token is sent unencrypted: anyone who intercepts it"
            if token
            else (f"there is no password: anyone who can reach port {port}")
        )
        warn(
            f"{host} is not loopback, and {secret} {who}; "
            f"`ssh -L {port}:127.0.0.1:{port}` is the safe way to a dashboard on loopback"
        )
    from tui.cli.machine.web_server import serve  # aiohttp takes a second to import

    serve(host, port, read_only=read_only, token=secrets.token_urlsafe(24) if token else "")


def others_have_accounts(proc: Path = Path("/proc"), homes: Path = Path("/home")) -> bool:
    """Guess whether other users can log in to this machine.

    A directory service may not list its accounts, so processes and home directories count too.
    """
    seen = {entry.pw_uid for entry in pwd.getpwall() if not entry.pw_shell.endswith(_NO_LOGIN)}
    for path in (*proc.glob("[0-9]*"), *homes.glob("*")):
        with contextlib.suppress(OSError):
            seen.add(path.stat().st_uid)
    return any(_FIRST_PERSON <= uid < _NOBODY and uid != os.getuid() for uid in seen)
