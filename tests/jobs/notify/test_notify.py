"""Users are notified when a job ends or stalls, and no secret of theirs is leaked."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from jobs.errors import UserError
from jobs.notify import Announcer, NotifyConfig, config_file, deliver, read_config
from jobs.queue.states import State
from tests.support.jobs.lab import opened
from tests.support.waiting import eventually
from tui.cli.machine.settings import notify

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.queue.store import Store

TOKEN = "sekrit-0123456789"
FACTS = {"FSDP_TUI_TITLE": "Job 1 failed: cats", "FSDP_TUI_MESSAGE": "no room"}


def configure(text: str, mode: int = 0o600) -> None:
    config_file().parent.mkdir(parents=True, exist_ok=True)
    config_file().write_text(text)
    config_file().chmod(mode)


def test_a_command_gets_the_facts_and_its_failure_is_told(tmp_path: Path) -> None:
    out = tmp_path / "out"
    config = NotifyConfig(command=f'echo "$FSDP_TUI_TITLE: $FSDP_TUI_MESSAGE" > {out}')
    assert list(deliver(config, FACTS)) == [("command", "")]
    assert out.read_text() == "Job 1 failed: cats: no room\n"
    failing = NotifyConfig(command=f"echo {TOKEN}; exit 3")
    assert list(deliver(failing, FACTS)) == [("command", "exit status 3")]


def test_services_are_told_through_apprise_which_never_names_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[dict[str, Any]] = []

    class Apprise:
        def add(self, url: str) -> bool:
            self.url = url
            return url.startswith("ntfy://")

        def notify(self, **words: str) -> bool:
            if "down" in self.url:
                raise ConnectionError(self.url)
            told.append(words)
            return "lost" not in self.url

    module = ModuleType("apprise")
    module.Apprise = Apprise  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "apprise", module)
    urls = [f"ntfy://{TOKEN}", f"ntfy://{TOKEN}/lost", f"ntfy://{TOKEN}/down", f"what://{TOKEN}"]
    assert list(deliver(NotifyConfig(urls=urls), FACTS)) == [
        ("url 1", ""),
        ("url 2", "was not delivered"),
        ("url 3", "failed (ConnectionError)"),
        ("url 4", "is no address that apprise knows"),
    ]
    assert told[0] == {"title": "Job 1 failed: cats", "body": "no room"}
    monkeypatch.setitem(sys.modules, "apprise", None)
    ((what, wrong),) = deliver(NotifyConfig(urls=urls), FACTS)
    assert (what, "pip install" in wrong) == ("urls", True)


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        (f"command: {TOKEN}", 0o644, "may be read by others; chmod 600"),
        (f"commando: {TOKEN}", 0o600, "commando: Extra inputs"),
        (f"urls: {TOKEN}", 0o600, "urls: Input should be a valid list"),
        (f"on: [{TOKEN}]", 0o600, "on.0: Input should be"),
        (f"command: [{TOKEN}", 0o600, "is not a YAML mapping"),
        (f"- {TOKEN}", 0o600, "is not a YAML mapping"),
    ],
)
def test_what_is_wrong_with_the_file_is_said_without_its_values(
    home: Path, text: str, mode: int, said: str
) -> None:
    configure(text, mode)
    with pytest.raises(UserError) as caught:
        read_config()
    assert said in str(caught.value)
    assert TOKEN not in str(caught.value)


def test_without_a_file_nobody_is_told(home: Path) -> None:
    assert read_config() is None


def test_a_stall_is_announced_once_until_there_is_progress(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure("command: 'true'\nstalled_after: 60\n")
    announced: list[str] = []
    one = Announcer(SimpleNamespace(), announced.append)  # type: ignore[arg-type]
    monkeypatch.setattr(Announcer, "announce", lambda self, event, why: announced.append(why))

    one.check_stall(59)
    assert announced == []
    one.check_stall(61)
    one.check_stall(62)
    assert announced == ["no rank made progress for 61 s"]
    one.check_stall(0)
    one.check_stall(70)
    assert len(announced) == 2


def test_the_command_line_sends_a_test(home: Path) -> None:
    configure("command: exit 4\n")
    done = CliRunner().invoke(notify, standalone_mode=False)
    assert (done.return_value, done.output) == (1, "command: exit status 4\n")


def test_the_end_of_a_job_is_announced_and_its_run_knows_no_secret(
    store: Store,
    job_values: dict[str, Any],
    no_gpus: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    words = "$FSDP_TUI_EVENT $FSDP_TUI_JOB_ID $FSDP_TUI_JOB_NAME: $FSDP_TUI_REASON"
    configure(f"on: [completed]\ncommand: 'echo \"{words}\" > {out}; : {TOKEN}'\n")
    with opened(store, job_values, monkeypatch, tmp_path / "gates") as lab:
        job = lab.submit(max_train_steps=3)
        lab.wait(job, State.COMPLETED)
        log = job.run_dir.logs / "notify.log"
        eventually(lambda: log.exists() and "command: notified" in log.read_text())
        assert out.read_text() == f"completed {job.id} t: trained 3 steps\n"
        files = [path for path in job.run_dir.root.rglob("*") if path.is_file()]
        assert len(files) > 3
        assert not [path for path in files if TOKEN.encode() in path.read_bytes()]
