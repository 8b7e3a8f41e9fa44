"""Boxes that speak, end, come back, and say what nobody understands."""

from __future__ import annotations

import os
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import TYPE_CHECKING

import pytest

from jobs.fleet.lines import Head, Told
from jobs.fleet.link import BoxView
from jobs.fleet.ssh import runtime_folder, ssh_command, why_failed
from tests.support.fleet import GPU, HEAD, JOB, FakeBoxes, Watching, lines

if TYPE_CHECKING:
    from collections.abc import Iterator

LOOK = {"t": 1}


@pytest.fixture
def boxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeBoxes:
    return FakeBoxes(tmp_path, monkeypatch)


def test_a_box_that_dies_and_comes_back(boxes: FakeBoxes) -> None:
    boxes.says("big", HEAD, JOB, GPU, LOOK)
    boxes.says("small", HEAD, LOOK)
    with Watching(boxes.fleet("big", "small")) as fleet:
        view = fleet.until(lambda view: view.status == "here")
        assert view.told is not None
        assert [job.name for job in view.told.jobs] == ["cats"]
        assert [gpu.utilisation for gpu in view.told.gpus] == [97]
        with open(boxes.root / "big" / "pipe", "w", encoding="utf-8") as pipe:
            pipe.write(lines({"id": 3, "step": 41}))
            pipe.write(lines({"t": 6}))
            pipe.flush()
            view = fleet.until(lambda view: view.told and view.told.jobs[0].step == 41)
            assert view.heard is not None
            boxes.away("big", "ssh: connect to host big port 22: No route to host")
        view = fleet.until(lambda view: view.status == "away")
        assert view.told is not None, "what was seen last is still shown"
        fleet.watch.retry()
        fleet.until(lambda view: "No route to host" in view.why)
        assert fleet.watch.views[1].status == "here"
        boxes.away("big", None)
        fleet.watch.retry()
        view = fleet.until(lambda view: view.status == "here")
        assert view.told is not None
        assert view.told.jobs[0].step == 40
        ssh = [link._process for link in fleet.watch.links]
    assert all(process is not None and process.returncode is not None for process in ssh)


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
            assert view.told is None
            assert view.why.isprintable()
    assert "its looks end in another way" in whys["bad"]
    assert "set `command:` of none in machines.yaml" in whys["none"]
    assert whys["old"] == "its fsdp-tui is 0.0.9, too old for this; update it there"
    assert whys["evil"] == "?]0;owned?bad"
    assert "line of more than 64 KiB" in whys["long"]


def test_a_box_that_misses_looks_is_silent(boxes: FakeBoxes) -> None:
    told = Told(Head.model_validate(HEAD), (), ())
    view = BoxView(boxes.fleet("big").machines[0], "here", told=told, heard=100.0)
    assert [view.status_at(100.0 + late) for late in (0, 10, 11)] == ["here", "here", "silent"]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose path leaves room for a socket's name."""
    path = Path(mkdtemp(dir="/tmp"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))
    yield path
    rmtree(path)


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
        (1, "fsdp-tui: the disk is full\n", "the disk is full"),
        (137, "", "fsdp-tui there ended with status 137"),
        (-9, "", "ssh was ended by signal 9"),
    ],
)
def test_why_a_box_is_away(boxes: FakeBoxes, status: int, said: str, why: str) -> None:
    assert why in why_failed(boxes.fleet("big").machines[0], status, said)
