"""`fsdp-tui web`: the dashboard in a browser."""

from __future__ import annotations

import importlib.util

import click

from jobs.errors import UserError
from jobs.queue.store import Store
from tui.cli.common.job_arguments import warn

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True,
              help="Address to listen on; other than loopback: open to the network.")  # fmt: skip
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True)
@click.option("--read-only", is_flag=True, help="Serve a read-only dashboard.")
def web(host: str, port: int, read_only: bool) -> None:
    """Serve the dashboard to a browser until Ctrl-C.

    There is no password: anyone who reaches the port controls the jobs, also
    other users of this machine. To connect from elsewhere, forward the port through SSH:

    \b
    ssh -L 8000:127.0.0.1:8000 this-machine      then open http://127.0.0.1:8000
    """
    if importlib.util.find_spec("textual_serve") is None:
        raise UserError("the web dashboard needs textual-serve", "pip install 'fsdp-tui[web]'")
    Store()  # what is wrong with the state directory is better said here than in the browser
    if host not in _LOOPBACK:
        who = "can see your jobs" if read_only else "controls your jobs as you"
        warn(
            f"{host} is not loopback, and there is no password: anyone who reaches port {port} "
            f"{who}; "
            f"`ssh -L {port}:127.0.0.1:{port}` is the safe way to a dashboard on loopback"
        )
    from tui.cli.machine.web_server import serve  # aiohttp takes a second

    serve(host, port, read_only=read_only)
