"""Boxes that speak, end, come back, and say what nobody understands."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from select import select
from shutil import rmtree
from tempfile import mkdtemp
from typing import TYPE_CHECKING

import pytest

from jobs.fleet import ssh
from jobs.fleet.lines import Head, Snapshot
from jobs.fleet.ssh import runtime_folder, ssh_command, why_failed
from jobs.fleet.watch import BoxView, Link
from tests.support.fleet import GPU, HEAD, JOB, FakeBoxes, Watching, lines
from tests.support.waiting import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Iterator

LOOK = {"t": 1}


@pytest.fixture
def boxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeBoxes:
    return FakeBoxes(tmp_path, monkeypatch)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose path leaves room for a socket's name."""
    path = Path(mkdtemp(dir="/tmp"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))
    yield path
    rmtree(path)


def test_a_box_that_dies_and_comes_back(boxes: FakeBoxes) -> None:
    boxes.says("big", HEAD, JOB, GPU, LOOK)
    boxes.says("small", HEAD | {"interval": 3600}, LOOK)  # it says no more
    with Watching(boxes.fleet("big", "small")) as fleet:
        view = fleet.until(lambda view: view.status == "here")
        assert view.snapshot is not None
        assert [job.name for job in view.snapshot.jobs] == ["cats"]
        assert [gpu.utilisation for gpu in view.snapshot.gpus] == [97]
        with open(boxes.root / "big" / "pipe", "w", encoding="utf-8") as pipe:
            pipe.write(lines({"id": 3, "step": 41}))
            pipe.write(lines({"t": 6}))
            pipe.flush()
            view = fleet.until(lambda view: view.snapshot and view.snapshot.jobs[0].step == 41)
            assert view.heard is not None
            boxes.away("big", "ssh: connect to host big port 22: No route to host")
        view = fleet.until(lambda view: view.status == "away")
        assert view.snapshot is not None, "what was seen last is still shown"
        fleet.watch.retry()
        fleet.until(lambda view: "No route to host" in view.why)
        assert fleet.watch.views[1].status == "here"
        boxes.away("big", None)
        fleet.watch.retry()
        view = fleet.until(lambda view: view.status == "here")
        assert view.snapshot is not None
        assert view.snapshot.jobs[0].step == 40
        left = [link._process for link in fleet.watch.links]
    assert all(process is not None and process.returncode is not None for process in left)


def test_boxes_that_do_not_work(boxes: FakeBoxes) -> None:
    boxes.says("bad", HEAD, {"fleet": 1}, {"t": "noon"})
    old = boxes.script(
        "old",
        'if [ "$1" = --version ]; then echo "fsdp-tui, version 0.0.9"; exit 0; fi\n'
        'echo "fsdp-tui: No such option: --machine; see --help" >&2; exit 2',
    )
    evil = boxes.script("evil", "printf '\\033]0;owned\\007bad\\n' >&2; exit 3")
    long = boxes.script("long", "yes | tr -d '\\n'")
    commands = {
        "bad": boxes.command,
        "none": "/no/fsdp-tui",
        "old": old,
        "evil": evil,
        "long": long,
    }
    fleet = boxes.fleet(*commands)
    fleet = fleet.model_copy(
        update={
            "machines": tuple(
                box.model_copy(update={"command": commands[box.name]}) for box in fleet.machines
            )
        }
    )
    with Watching(fleet) as watching:
        whys = {}
        for which, name in enumerate(commands):
            wanted = "0.0.9" if name == "old" else ""
            view = watching.until(lambda v, w=wanted: v.status == "away" and w in v.why, which)
            whys[name] = view.why
            assert view.snapshot is None
            assert view.why.isprintable()
    assert "its looks end in another way" in whys["bad"]
    assert "set `command:` of none in machines.yaml" in whys["none"]
    assert whys["old"] == "its fsdp-tui is 0.0.9, too old for this; update it there"
    assert whys["evil"] == "?]0;owned?bad"
    assert "line of more than 64 KiB" in whys["long"]


def heard(link: Link, now: float) -> None:
    """Read until the box has ended a look."""
    while link.view.heard != now:
        ready, _, _ = select(link.files(), [], [], PATIENCE)
        assert ready
        link.read(ready[0], now)


def test_a_box_that_hangs_is_tried_again(boxes: FakeBoxes, short: Path) -> None:
    """Its ssh lives; the connection that all share may be what hangs, so it is gone around."""
    boxes.says("big", HEAD, JOB, LOOK)
    link = Link(boxes.fleet("big").machines[0], 5.0)
    link.run_due(100.0)
    heard(link, 101.0)
    link.run_due(130.0)
    assert link.view.status_at(130.0) == "silent"
    first = link._process
    assert first is not None
    link.run_due(132.0)
    assert (link.view.status, link.view.why) == ("away", "no answer within 30 s")
    assert link.view.snapshot is not None
    link.run_due(135.0)
    heard(link, 136.0)
    assert first.wait(PATIENCE) != 0
    hung = link._process
    link.retry_now(137.0)
    assert link._process is hung, "it speaks"
    link.retry_now(150.0)
    link.run_due(150.0)
    assert link._process is not hung
    heard(link, 151.0)
    link.forget(time.monotonic() + PATIENCE)
    shared = ["ControlPath=none" not in call for call in boxes.calls()]
    assert shared == [True, False, True]


def test_an_ssh_that_does_not_end_holds_up_nobody(boxes: FakeBoxes) -> None:
    (boxes.root / "big").mkdir()
    os.mkfifo(boxes.root / "big" / "pipe")
    stays = boxes.script("stays", f"trap '' TERM; echo '{{'; exec cat {boxes.root}/big/pipe")
    link = Link(boxes.fleet("big", command=stays).machines[0], 5.0)
    link.run_due(100.0)
    process = link._process
    assert process is not None
    assert select(link.files(), [], [], PATIENCE)[0]
    link.read(link.files()[0], 101.0)
    assert link.view.status == "away"
    assert process.poll() is None, "it was not waited for"
    assert link.due == 103.0
    link.run_due(103.0)
    assert process.wait(PATIENCE) == -signal.SIGKILL
    link.run_due(105.0)
    assert link._ending == []
    link.forget(time.monotonic())


def test_a_shared_connection_that_hangs_is_not_used(
    boxes: FakeBoxes, short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = boxes.fleet("big").machines[0]
    assert ssh.shared_answers(box), "there is none yet"
    assert boxes.calls() == []
    socket = ssh._socket(box)
    assert socket is not None
    socket.touch()
    monkeypatch.setattr(ssh, "_ANSWERS_WITHIN", PATIENCE)
    assert ssh.shared_answers(box)
    assert boxes.calls() == [f"-O check -o ControlPath={socket} -- big"]
    boxes.script("ssh", "exec sleep 1000")
    monkeypatch.setattr(ssh, "_ANSWERS_WITHIN", 0.05)
    assert not ssh.shared_answers(box)
    assert "ControlPath=none" in ssh_command(box, [], share=False)


def test_a_box_that_misses_looks_is_silent(boxes: FakeBoxes) -> None:
    snapshot = Snapshot(Head.model_validate(HEAD), (), ())
    view = BoxView(boxes.fleet("big").machines[0], "here", snapshot=snapshot, heard=100.0)
    assert [view.status_at(100.0 + late) for late in (0, 10, 11)] == ["here", "here", "silent"]


def test_how_ssh_is_called(boxes: FakeBoxes, short: Path) -> None:
    box = boxes.fleet("big", ssh="me@10.0.0.7", command="~/bin/fsdp-tui").machines[0]
    command = ssh_command(box, ["show", "3; rm -rf $HOME"])
    assert command[-3:] == ["--", "me@10.0.0.7", "~/bin/fsdp-tui show '3; rm -rf $HOME'"]
    assert "BatchMode=yes" in command
    folder = short / "fsdp-tui"
    assert any(word.startswith(f"ControlPath={folder}/") for word in command)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert "BatchMode=yes" not in ssh_command(box, [], ask=True, terminal=True)
    folder.chmod(0o777)  # others could offer a connection of their own
    (boxes.root / f"fsdp-tui-{os.geteuid()}").write_text("")
    assert runtime_folder() is None
    assert "ControlPath=none" in ssh_command(box, [])


@pytest.mark.parametrize(
    ("status", "said", "why"),
    [
        (255, "", "the connection was lost"),
        (255, "me@big: Permission denied (publickey).", "log in once (enter)"),
        (255, "a\nHost key verification failed.\n", "its host key is not known"),
        (
            255,
            "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.\n",
            "its host key has changed",
        ),
        (1, "fsdp-tui: the disk is full\n", "the disk is full"),
        (137, "", "fsdp-tui there ended with status 137"),
        (-9, "", "ssh was ended by signal 9"),
    ],
)
def test_why_a_box_is_away(boxes: FakeBoxes, status: int, said: str, why: str) -> None:
    assert why in why_failed(boxes.fleet("big").machines[0], status, said)
