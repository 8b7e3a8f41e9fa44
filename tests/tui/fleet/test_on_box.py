"""`--on BOX` and `fleet`: what is sent to a box, and what of its answer is printed."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import threading
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import yaml

from jobs.errors import UserError
from jobs.fleet.config import config_file
from tests.support.fleet import GPU, HEAD, JOB, FakeBoxes
from tests.support.waiting import eventually
from tui.cli import on_box
from tui.cli.commands import cli

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# It says with which words it was called, and what it was sent.
_ECHOES = """for word; do printf '<%s>' "$word"; done
printf '\\n\\033[31mred\\033[0m \\033]0;owned\\007 \\033[2J\\n'
cat
echo 'fsdp-tui: warning: \\033[2Jold' >&2
exit 3"""


@pytest.fixture
def boxes(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeBoxes:
    made = FakeBoxes(tmp_path, monkeypatch)
    path = config_file()
    path.parent.mkdir(parents=True)
    echoes = made.script("echoes", _ECHOES)
    machines = [
        {"name": "big", "command": made.command},
        {"name": "echo", "command": echoes},
        {"name": "none", "command": "/no/fsdp-tui"},
    ]
    path.write_text(yaml.safe_dump({"machines": machines}), encoding="utf-8")
    made.away("none", "ssh: connect to host none port 22: No route to host")
    return made


def run(*words: str) -> Any:
    return cli.main(list(words), standalone_mode=False, prog_name="fsdp-tui")


def test_words_arrive_as_they_are_and_nothing_steers_the_terminal(
    boxes: FakeBoxes, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run("--on", "echo", "show", "$(id)", "--as", "yaml", "it's", "--", "-x")
    out, err = capsys.readouterr()
    assert status == 3
    assert out.splitlines()[0] == "<show><$(id)><--as><yaml><it's><--><-x>"
    assert out.splitlines()[1] == "\x1b[31mred\x1b[0m ?]0;owned? ?[2J"
    assert err == "fsdp-tui: warning: ?[2Jold\n"
    assert boxes.calls()[0].startswith("-T ")


def test_a_job_file_of_this_machine_is_sent(
    boxes: FakeBoxes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("name: cats\n", encoding="utf-8")
    run("--on", "echo", "submit", "--json", "--name", str(job), str(job), "--lora_rank=8")
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"<submit><--json><--name><{job}><-><--lora_rank=8>"
    assert out[2] == "name: cats"
    run("--on", "echo", "submit", "there.yaml", "--new_key", "3")
    assert "<submit><there.yaml><--new_key><3>" in capsys.readouterr().out
    with pytest.raises(UserError, match="submit it, then follow it"):
        run("--on", "echo", "run", str(job))


def test_a_file_of_this_machine_is_not_mistaken_for_one_there(
    boxes: FakeBoxes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.yaml", "b.yaml", "3"):
        (tmp_path / name).write_text("name: cats\n", encoding="utf-8")
    for words in (
        ("import", "ai-toolkit", "--json", "a.yaml"),
        ("doctor", "a.yaml"),
        ("submit", "a.yaml", "b.yaml"),
    ):
        with pytest.raises(UserError, match=r"a\.yaml is on this machine, and"):
            run("--on", "echo", *words)
    assert boxes.calls() == []
    for words in (
        ("import", "ai-toolkit", "there.yaml", "-o", "a.yaml"),
        ("import", "--help"),
        ("import", "newer-tool", "a.yaml"),
        ("show", "3"),
        ("toy", str(tmp_path)),
        ("diff", "3", "4", "--newer-option"),
    ):
        assert run("--on", "echo", *words) == 3


def test_what_a_box_prints_is_whole(boxes: FakeBoxes, capsys: pytest.CaptureFixture[str]) -> None:
    """However its pieces come, and whatever it ends in."""
    reading, writing = os.pipe()
    to = io.StringIO()
    source = os.fdopen(reading, "rb")
    copying = threading.Thread(target=on_box._Copy(source, to).run, daemon=True)
    copying.start()
    for piece in (
        b"50 %\x1b",
        b"[",
        b"K\r60 %\x1b[K\r\x1b[3",
        b"1mred\x1b[0m \xc3",
        b"\xa9\xe2\x82",
    ):
        before = len(to.getvalue())
        os.write(writing, piece)
        if piece not in (b"[",):
            eventually(lambda before=before: len(to.getvalue()) > before)
    os.write(writing, b" \x1b[3")
    os.close(writing)
    copying.join()
    source.close()
    assert to.getvalue() == "50 %\r60 %\r\x1b[31mred\x1b[0m é\ufffd ?[3"


def test_warnings_that_cannot_be_printed_stop_nothing(
    boxes: FakeBoxes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A box that cannot write them would wait for us without end."""
    boxes.script("echoes", "yes | head -c 500000 >&2; echo done; echo lost >&2; exit 255")
    closed = io.StringIO()
    closed.close()
    with monkeypatch.context() as patch:
        patch.setattr("sys.stderr", closed)
        patch.setattr(on_box, "echo", lambda text, **_: print(text))
        assert run("--on", "echo", "list") == 1
    assert capsys.readouterr().out == "done\nfsdp-tui: echo is away: lost\n"


@pytest.fixture(params=[signal.SIGTERM, signal.SIGHUP])
def number(request: pytest.FixtureRequest) -> Iterator[int]:
    """A signal that ends this process, whatever tests before this one have made of it."""
    before = signal.signal(request.param, signal.SIG_DFL)
    yield request.param
    signal.signal(request.param, before)


def test_a_signal_ends_ssh_too(boxes: FakeBoxes, number: int) -> None:
    boxes.script("echoes", 'echo $$ > "$FSDP_TUI_HOME.pid"; exec sleep 6000')
    file = boxes.root / "echo.pid"

    def end() -> None:
        eventually(lambda: file.exists() and file.read_text().endswith("\n"))
        os.kill(os.getpid(), number)

    ending = threading.Thread(target=end, daemon=True)
    ending.start()
    with pytest.raises(SystemExit) as ended:
        run("--on", "echo", "list")
    ending.join()
    assert ended.value.code == 128 + number
    pid = int(file.read_text())
    eventually(lambda: not psutil.pid_exists(pid))
    assert signal.getsignal(number) is signal.SIG_DFL


def test_a_signal_while_ssh_starts_ends_it_too(
    boxes: FakeBoxes, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    boxes.script("echoes", "exec sleep 6000")
    started: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def signalled(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(start(*args, **options))
        os.kill(os.getpid(), number)  # as if it came before anyone knows which process it is
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", signalled)
    with pytest.raises(SystemExit) as ended:
        run("--on", "echo", "list")
    assert ended.value.code == 128 + number
    assert started[0].poll() is not None


def test_a_job_is_read_from_standard_input(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"name: cats\nlora_rank: many\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))
    with pytest.raises(UserError, match=r"standard input: .*line 2: lora_rank"):
        run("submit", "-", "--dry-run")


def test_what_cannot_be_done_is_said(boxes: FakeBoxes, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="`web` cannot run on another machine; forward its port"):
        run("--on", "big", "web")
    with pytest.raises(UserError, match='no machine "bog"'):
        run("--on", "bog", "list")
    assert boxes.calls() == []
    assert run("--on", "none", "list") == 1
    assert "none is away: ssh: connect to host none" in capsys.readouterr().err
    boxes.away("none", None)
    assert run("--on", "none", "list") == 1
    assert "set `command:` of none" in capsys.readouterr().err


def test_all_machines_once(boxes: FakeBoxes, capsys: pytest.CaptureFixture[str]) -> None:
    boxes.says("big", HEAD, JOB | {"name": "cats\x1b[2J"}, GPU | {"job": 3}, {"t": 1})
    assert run("fleet") == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out
    rows = [line.split() for line in out.splitlines()]
    assert rows[1] == ["big", "here", "0", "of", "1", "free", "1", "running"]
    assert "No route to host" in out
    assert rows[-1][:4] == ["big", "3", "cats?[2J", "running"]
    assert run("fleet", "--json") == 1
    facts = json.loads(capsys.readouterr().out)
    assert [one["status"] for one in facts] == ["here", "away", "away"]
    assert facts[0]["jobs"][0]["step"] == 40
