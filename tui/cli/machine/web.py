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
              help="Address to listen at; others than loopback let the network in.")  # fmt: skip
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True)
@click.option("--read-only", is_flag=True, help="Let the browser look only.")
def web(host: str, port: int, read_only: bool) -> None:
    """The dashboard in a browser, until Ctrl-C.

    There is no password: whoever reaches the port controls the jobs, other users of this machine
    too. From elsewhere, forward the port through SSH instead of opening it:

    \b
    ssh -L 8000:127.0.0.1:8000 this-machine      then open http://127.0.0.1:8000
    """
    if importlib.util.find_spec("textual_serve") is None:
        raise UserError("the web dashboard needs textual-serve", "pip install 'fsdp-tui[web]'")
    Store()  # what is wrong with the state directory is better said here than in the browser
    if host not in _LOOPBACK:
        who = "looks at your jobs" if read_only else "controls your jobs, as you"
        warn(
            f"{host} is not loopback, and there is no password: whoever reaches port {port} {who}; "
            f"`ssh -L {port}:127.0.0.1:{port}` reaches a dashboard on loopback safely"
        )
    from tui.cli.machine.web_server import serve  # aiohttp takes a second

    serve(host, port, read_only=read_only)
