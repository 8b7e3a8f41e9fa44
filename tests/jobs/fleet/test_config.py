"""`machines.yaml`: what can stand in it, and what must not."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from jobs.errors import NotFoundError, UserError
from jobs.fleet import config
from jobs.fleet.config import EXAMPLE, Box, Fleet, config_file, read_fleet

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def file(home: Path) -> Path:
    path = config_file()
    path.parent.mkdir(parents=True)
    return path


def test_the_example_is_read(file: Path) -> None:
    assert read_fleet() == Fleet()
    file.write_text(EXAMPLE, encoding="utf-8")
    fleet = read_fleet()
    assert fleet.machines == (
        Box(name="trainer1", ssh="trainer1"),
        Box(name="trainer2", ssh="me@10.0.0.7", command="~/venv/bin/fsdp-tui"),
    )
    assert fleet.find("trainer2").ssh == "me@10.0.0.7"
    with pytest.raises(NotFoundError, match=r'no machine "trainer3".*did you mean "trainer'):
        fleet.find("trainer3")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("machines: [-oProxyCommand=evil]", "machines: 0: name: "),
        ("machines: [{name: a, ssh: -oProxyCommand=evil}]", "is no machine that ssh could"),
        ("machines: [{name: a, ssh: 'b c'}]", "is no machine that ssh could"),
        ('machines: [{name: a, command: "b\\u001b[2J"}]', "is no command"),
        ("machines: [{name: a, port: 3}]", "machines: 0: port: Extra inputs"),
        ("machines: [a, a]", '"a" is listed twice'),
        ("boxes: [a]", "boxes: Extra inputs"),
        ("machines: [1]", "machines: 0: "),
        ("interval: 0", "interval: "),
        ("- a", "valid dictionary"),
        ("machines: [", "is not valid YAML"),
    ],
)
def test_what_cannot_be_used(file: Path, text: str, why: str) -> None:
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as error:
        read_fleet()
    assert why in str(error.value)
    assert str(file) in str(error.value)


def test_others_may_not_say_which_commands_run(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text(EXAMPLE, encoding="utf-8")
    file.chmod(0o664)
    with pytest.raises(UserError, match="chmod go-w"):
        read_fleet()
    file.chmod(0o600)
    owner = file.stat().st_uid
    monkeypatch.setattr("os.geteuid", lambda: owner + 1)
    if owner:
        with pytest.raises(UserError, match="belongs to someone else"):
            read_fleet()
    status = os.stat_result([0o600, 0, 0, 1, owner + 2, 0, 0, 0, 0, 0])
    with pytest.raises(UserError, match="belongs to someone else"):
        config._check_ours(status)
