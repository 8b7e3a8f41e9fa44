"""Serve the dashboard to browsers, each with a process of its own."""

from __future__ import annotations

import ipaddress
import os
import secrets
import shlex
import socket
import sys
from functools import cache
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from aiohttp import web
from textual_serve.server import Server

from jobs.errors import UserError
from tui.cli.echo import echo

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_GRACE: Final = 1.0  # seconds for open browsers to close
_MOST: Final = 16  # dashboards at a time; each takes 30 to 70 MiB
_TOKEN: Final = "token"
_NAMES_OF_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")


def serve(host: str, port: int, *, read_only: bool, token: str = "") -> None:
    """Serve until Ctrl-C or SIGTERM; with a token, only to clients that know it.

    Raises:
        UserError: The address cannot be bound.
    """
    command = [sys.executable, "-m", "tui", *(["--read-only"] if read_only else [])]
    # textual-serve starts the command through a shell; exec removes that shell.
    server = DashboardServer(f"exec {shlex.join(command)}", host, port, title="fsdp-tui")
    server.token = token
    shown = f"[{host}]" if ":" in host else host
    query = f"/?{_TOKEN}={token}" if token else ""

    def tell(_: str) -> None:
        echo(f"http://{shown}:{port}{query}  (Ctrl-C to stop; jobs keep running)")

    try:
        web.run_app(
            server._make_app(),
            host=host,
            port=port,
            print=tell,
            access_log=None,
            shutdown_timeout=_GRACE,
        )
    except OSError as error:
        # aiohttp logs in detail what the number says; unknown names are at level 0.
        number = error.errno or 0
        reason = os.strerror(number) if number > 0 else error.strerror
        raise UserError(f"cannot listen on {host}:{port} ({reason})", "try --port") from error


class DashboardServer(Server):
    """A textual-serve server that rejects pages of other sites and prints its address.

    Browsers let any site open websockets to any address, including loopback, and the site's
    owner can point a host name at that address. A visited page could control the jobs that way.

    Attributes:
        token: Required by the first request, and as a cookie by later ones; "" for none.
    """

    token = ""
    open = 0  # number of open dashboards

    async def _make_app(self) -> web.Application:
        app = await super()._make_app()
        app.middlewares.append(self._guard)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        origin = request.headers.get("Origin")
        if refusal := refuse(self.host, request.host, origin, token=bool(self.token)):
            raise web.HTTPForbidden(text=refusal)
        if not self.token:
            return await handler(request)
        cookie = f"fsdp-tui-{self.port}"  # a browser shares cookies between all ports of a host
        if self._is_token(request.cookies.get(cookie, "")):
            return await handler(request)
        if not self._is_token(request.query.get(_TOKEN, "")):
            raise web.HTTPForbidden(text="open the address with the token that fsdp-tui printed")
        # Redirect to an address without the token, since addresses are visible.
        welcome = web.HTTPFound("/" + request.path.lstrip("/"))
        welcome.set_cookie(cookie, self.token, httponly=True, samesite="Strict")
        raise welcome

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self.token.encode())

    async def handle_index(self, request: web.Request) -> Any:
        # The address the browser uses, which differs from ours behind SSH or on 0.0.0.0.
        self.public_url = f"{request.scheme}://{request.host}"
        return await super().handle_index(request)

    async def handle_websocket(self, request: web.Request) -> web.WebSocketResponse:
        """Connect a browser to a dashboard, unless too many are open."""
        if self.open >= _MOST:
            raise web.HTTPServiceUnavailable(text=f"{_MOST} dashboards are open; close one")
        self.open += 1
        try:
            return await super().handle_websocket(request)
        finally:
            self.open -= 1

    async def on_startup(self, app: web.Application) -> None:
        """Start without textual-serve's banner."""


def refuse(listening: str, host: str, origin: str | None, *, token: bool) -> str:
    """Return why a request is refused, or "". Pure.

    Args:
        listening: The address that the server is bound to.
        host: The Host header, with the port.
        origin: The Origin header, if the browser sends one.
        token: Whether a token is required. Pages of other sites do not have it, whatever host
            name they use.
    """
    name = urlsplit(f"//{host}").hostname or ""
    here = _is_loopback(listening)
    names = _NAMES_OF_LOOPBACK if here else (*_NAMES_OF_LOOPBACK, listening, *_own_names())
    if (here or not token) and name not in names and not _is_address(name):
        where = "http://127.0.0.1" if here else "this machine's IP address"
        return f"this is not {name}; open {where} with its port"
    if origin is not None and urlsplit(origin).netloc != host:
        return "pages of other sites may not use the dashboard"
    return ""


@cache
def _own_names() -> tuple[str, ...]:
    return socket.gethostname().lower(), socket.getfqdn().lower()


def _is_loopback(listening: str) -> bool:
    """Return whether only this machine can reach the address, such as 127.0.0.2."""
    named = listening in _NAMES_OF_LOOPBACK
    return named or (_is_address(listening) and ipaddress.ip_address(listening).is_loopback)


def _is_address(name: str) -> bool:
    """Return whether the host is a numeric address, which no name server can forge."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
