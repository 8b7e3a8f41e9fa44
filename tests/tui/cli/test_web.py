"""`fsdp-tui web`: who may use it, and that a browser really gets the dashboard."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import socket
import subprocess
import sys
from contextlib import closing
from types import SimpleNamespace
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.support.paths import ROOT
from tests.support.ports import free_port
from tests.support.waiting import PATIENCE

aiohttp = pytest.importorskip("aiohttp")
pytest.importorskip("textual_serve")

from tui.cli import commands as cli  # noqa: E402
from tui.cli.machine import web as web_command  # noqa: E402
from tui.cli.machine import web_server  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.mark.parametrize(
    ("listening", "host", "origin", "refused"),
    [
        ("127.0.0.1", "127.0.0.1:8000", None, False),
        ("127.0.0.1", "localhost:9000", "http://localhost:9000", False),  # ssh -L 9000:…
        ("::1", "[::1]:8000", "http://[::1]:8000", False),
        ("127.0.0.1", "evil.example:8000", None, True),  # its name server says 127.0.0.1
        ("127.0.0.2", "evil.example:8000", None, True),
        ("127.0.0.2", "127.0.0.2:8000", None, False),
        ("127.0.0.1", "127.0.0.1:8000", "http://evil.example", True),
        ("127.0.0.1", "127.0.0.1:8000", "http://127.0.0.1:3000", True),
        ("127.0.0.1", "127.0.0.1:8000", "null", True),
        ("0.0.0.0", "node7:8000", "http://node7:8000", False),
        ("0.0.0.0", "node7:8000", "https://evil.example", True),
        ("0.0.0.0", "10.0.0.7:8000", "http://10.0.0.7:8000", False),
        ("0.0.0.0", "evil.example:8000", "http://evil.example:8000", True),  # whose name is ours
        ("box.lan", "box.lan:8000", "http://box.lan:8000", False),
    ],
)
def test_who_may_use_it(
    listening: str,
    host: str,
    origin: str | None,
    refused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(web_server, "_own_names", lambda: ("node7",))
    assert bool(web_server.refuse(listening, host, origin, token=False)) is refused


def test_with_a_token_any_name_will_do() -> None:
    """A page that calls us by its own name does not know it."""
    for host in ("evil.example:8000", "alias.lan:8000"):
        assert not web_server.refuse("0.0.0.0", host, f"http://{host}", token=True)
    assert web_server.refuse("0.0.0.0", "a.lan:8000", "http://evil.example", token=True)


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["fsdp-tui", "web", *words])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0), capsys.readouterr().err


def test_without_textual_serve_it_says_what_to_install(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tui.cli.machine.web.importlib.util.find_spec", lambda name: None)
    status, err = run(monkeypatch, capsys)
    assert status == 2
    assert "pip install 'fsdp-tui[web]'" in err


def test_beyond_loopback_it_warns(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served: list[tuple[str, int, bool, bool]] = []
    monkeypatch.setattr(
        "tui.cli.machine.web_server.serve",
        lambda host, port, *, read_only, token: served.append((host, port, read_only, bool(token))),
    )
    monkeypatch.setattr("tui.cli.machine.web.others_have_accounts", lambda: False)
    beyond = ("--host", "0.0.0.0", "--port", "8123")
    status, err = run(monkeypatch, capsys, *beyond)
    assert status == 0
    assert "the token is sent unencrypted: anyone who intercepts it controls your jobs" in err
    assert "ssh -L 8123:127.0.0.1:8123" in err
    status, err = run(monkeypatch, capsys, *beyond, "--no-token")
    assert "anyone who can reach port 8123 controls your jobs" in err
    assert run(monkeypatch, capsys, "--read-only") == (0, "")
    monkeypatch.setattr("tui.cli.machine.web.others_have_accounts", lambda: True)
    assert run(monkeypatch, capsys) == (0, "")
    assert run(monkeypatch, capsys, "--no-token") == (0, "")
    assert served == [
        ("0.0.0.0", 8123, False, True),
        ("0.0.0.0", 8123, False, False),
        ("127.0.0.1", 8000, True, False),
        ("127.0.0.1", 8000, False, True),
        ("127.0.0.1", 8000, False, False),
    ]


def test_other_people_show_by_accounts_processes_and_homes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accounts = [(0, "/bin/bash"), (33, "/usr/sbin/nologin"), (1500, "/usr/sbin/nologin")]
    monkeypatch.setattr(
        "tui.cli.machine.web.pwd.getpwall",
        lambda: [SimpleNamespace(pw_uid=uid, pw_shell=shell) for uid, shell in accounts],
    )
    monkeypatch.setattr("tui.cli.machine.web.os.getuid", lambda: 1001)
    proc, homes = tmp_path / "proc", tmp_path / "home"
    for folder in (proc / "77", homes / "ann"):
        folder.mkdir(parents=True)
    assert web_command.others_have_accounts(proc, homes) is (os.geteuid() >= 1000)
    accounts.append((1002, "/bin/zsh"))
    assert web_command.others_have_accounts(proc, homes)
    accounts.pop()
    if os.geteuid() == 0:
        os.chown(homes / "ann", 1002, -1)
        assert web_command.others_have_accounts(proc, homes)


async def test_with_a_token_only_who_knows_it_gets_in(monkeypatch: pytest.MonkeyPatch) -> None:
    made = pytest.importorskip("aiohttp.test_utils")
    server = web_server.DashboardServer("true", "127.0.0.1", 8000)
    server.token = "open-sesame"
    jar = aiohttp.CookieJar(unsafe=True)  # also keeps those of addresses
    app = made.TestServer(await server._make_app())
    async with made.TestClient(app, cookie_jar=jar) as client:
        for path in ("/", "/?token=wrong", "/?token=\u00e9", "/ws", "/static/css/xterm.css"):
            assert (await client.get(path)).status == 403, path
        first = await client.get("/?token=open-sesame", allow_redirects=False)
        assert (first.status, first.headers["Location"]) == (302, "/")
        assert "HttpOnly" in first.headers["Set-Cookie"]
        assert "SameSite=Strict" in first.headers["Set-Cookie"]
        page = await client.get("/")
        assert page.status == 200
        assert "open-sesame" not in await page.text()


async def test_so_many_dashboards_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    made = pytest.importorskip("aiohttp.test_utils")
    server = web_server.DashboardServer("true", "127.0.0.1", 8000)
    server.open = web_server._MOST
    async with made.TestClient(made.TestServer(await server._make_app())) as client:
        refused = await client.get("/ws")
        assert (refused.status, await refused.text()) == (503, "16 dashboards are open; close one")
        assert server.open == web_server._MOST


def test_a_port_that_is_taken_is_one_line(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(socket.socket()) as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        status, err = run(monkeypatch, capsys, "--port", str(port))
    assert status == 2
    assert err == (
        f"fsdp-tui: cannot listen on 127.0.0.1:{port} (Address already in use); try --port\n"
    )


def test_the_command_survives_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    """textual-serve starts it through one."""
    commands: list[str] = []
    monkeypatch.setattr(sys, "executable", "/opt/my python; x/bin/python")
    monkeypatch.setattr(web_server.web, "run_app", lambda app, **_: app.close())
    monkeypatch.setattr(
        web_server.DashboardServer,
        "__init__",
        lambda self, command, *_, **__: commands.append(command),
    )
    monkeypatch.setattr(web_server.DashboardServer, "_make_app", Closed)
    web_server.serve("127.0.0.1", 8000, read_only=True)
    assert shlex.split(commands[0]) == [
        "exec",
        "/opt/my python; x/bin/python",
        "-m",
        "tui",
        "--read-only",
    ]


class Closed:
    """Stands in for the web application."""

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def served(home: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A real server on loopback, and its address."""
    command = [sys.executable, "-m", "tui", "web", "--port", str(free_port()), "--read-only"]
    command.append("--no-token")
    environ = {key: value for key, value in os.environ.items() if key != "TEXTUAL_DRIVER"}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        cwd=home,
        env=environ | {"PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    address = process.stdout.readline().split()[0]
    yield process, address
    process.terminate()
    process.wait(PATIENCE)


async def test_a_browser_gets_the_dashboard(served: tuple[subprocess.Popen[str], str]) -> None:
    process, address = served
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{address}/") as page:
            assert page.status == 200
            text = await page.text()
            assert f'"{address.replace("http", "ws")}/ws"' in text
        async with session.get(f"{address}/", headers={"Host": "evil.example"}) as page:
            assert page.status == 403
        with pytest.raises(aiohttp.WSServerHandshakeError):
            await session.ws_connect(f"{address}/ws", headers={"Origin": "http://evil.example"})
        async with session.ws_connect(f"{address}/ws?width=100&height=30") as socket_:
            seen = b""
            async for message in socket_:
                if message.type is aiohttp.WSMsgType.BINARY:
                    seen += message.data
                if b"No jobs yet" in seen and b"read-only" in seen:
                    break
            dashboards = psutil.Process(process.pid).children(recursive=True)
            assert len(dashboards) == 1
    await ended(dashboards)


async def ended(processes: list[psutil.Process]) -> None:
    """Wait until these are no more; meanwhile the browser's side goes on."""
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, PATIENCE)
    for one in alive:
        one.kill()
    assert not alive, "a dashboard outlives its browser or its server"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
async def test_dashboards_end_with_the_server(
    served: tuple[subprocess.Popen[str], str], how: signal.Signals
) -> None:
    process, address = served
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(f"{address}/ws?width=100&height=30") as socket_,
    ):
        seen = b""
        async for message in socket_:
            if message.type is aiohttp.WSMsgType.BINARY:
                seen += message.data
            if b"No jobs yet" in seen:
                break
        dashboards = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(how)
        status = await asyncio.to_thread(process.wait, PATIENCE)
        assert status == (0 if how is signal.SIGINT else -how)
        await ended(dashboards)
