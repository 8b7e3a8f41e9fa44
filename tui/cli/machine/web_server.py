"""Serve the dashboard to browsers. Each gets a process of its own, as each terminal does."""

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

_GRACE: Final = 1.0  # seconds that open browsers get when it ends
_MOST: Final = 16  # dashboards at a time, of 30 to 70 MiB each
_TOKEN: Final = "token"
_NAMES_OF_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")


def serve(host: str, port: int, *, read_only: bool, token: str = "") -> None:
    """Serve until Ctrl-C or SIGTERM, to who knows the token if there is one.

    Raises:
        UserError: The address cannot be listened at.
    """
    command = [sys.executable, "-m", "tui", *(["--read-only"] if read_only else [])]
    # textual-serve starts it through a shell, which is to leave nothing between the two.
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
        # aiohttp tells at length what the number says; names that are unknown have none above 0.
        number = error.errno or 0
        reason = os.strerror(number) if number > 0 else error.strerror
        raise UserError(f"cannot listen on {host}:{port} ({reason})", "try --port") from error


class DashboardServer(Server):
    """textual-serve, which refuses pages of other sites and says where it is.

    A browser lets any site open websockets to any address, loopback too, and its owner's name
    server call that address its own: a page that a person visits could so control the jobs.

    Attributes:
        token: What the first request must bring, and a cookie each later one; "" for none.
    """

    token = ""
    open = 0  # dashboards

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
        cookie = f"fsdp-tui-{self.port}"  # a browser has the same cookies for all ports of a host
        if self._is_token(request.cookies.get(cookie, "")):
            return await handler(request)
        if not self._is_token(request.query.get(_TOKEN, "")):
            raise web.HTTPForbidden(text="open the address with the token that fsdp-tui printed")
        # To an address without it, which may be seen.
        welcome = web.HTTPFound("/" + request.path.lstrip("/"))
        welcome.set_cookie(cookie, self.token, httponly=True, samesite="Strict")
        raise welcome

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self.token.encode())

    async def handle_index(self, request: web.Request) -> Any:
        # Where the browser is, through SSH on another port, or on 0.0.0.0: not where this is.
        self.public_url = f"{request.scheme}://{request.host}"
        return await super().handle_index(request)

    async def handle_websocket(self, request: web.Request) -> web.WebSocketResponse:
        """Give a browser its dashboard, unless very many have one."""
        if self.open >= _MOST:
            raise web.HTTPServiceUnavailable(text=f"{_MOST} dashboards are open; close one")
        self.open += 1
        try:
            return await super().handle_websocket(request)
        finally:
            self.open -= 1

    async def on_startup(self, app: web.Application) -> None:
        """Without textual-serve's own banner."""


def refuse(listening: str, host: str, origin: str | None, *, token: bool) -> str:
    """Why a request is refused, or "". Pure.

    Args:
        listening: The address that is listened at.
        host: Whom the browser thinks it talks to, with the port.
        origin: The site whose page asks, if the browser says.
        token: Whether only who knows a token gets in. A page of another site does not, by whatever
            name it calls this machine.
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
    """Whether only this machine can reach the address, such as 127.0.0.2."""
    named = listening in _NAMES_OF_LOOPBACK
    return named or (_is_address(listening) and ipaddress.ip_address(listening).is_loopback)


def _is_address(name: str) -> bool:
    """Whether it is a number, which no name server can make up."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
