"""`settings.yaml`: what is understood, what is told about the rest, and keys of one's own."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tui.cli import commands
from tui.keys.actions import ACTIONS, footer_actions
from tui.keys.keymap import NamedBinding, known_bindings, settle_keymap
from tui.settings import Settings, as_file, read_settings, settings_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def write(home: Path) -> Callable[[str], Path]:
    """Writes the settings file."""

    def write(text: str) -> Path:
        path = settings_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


@pytest.fixture
def run(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs a command in this process: exit status, output, errors."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fsdp-tui", *words])
        with pytest.raises(SystemExit) as caught:
            commands.main()
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return run


# -- reading -------------------------------------------------------------------------------


def test_without_a_file_the_defaults_count(home: Path) -> None:
    read = read_settings()
    assert read.settings == Settings()
    assert read.problems == ()
    assert not settings_file().exists()


def test_values_may_be_written_as_people_do(write: Callable[[str], Path]) -> None:
    write(
        "Refresh-Seconds: 2\nnotifications: off\nvim_keys: no\nascii: auto\ncolours: 256\n"
        "theme:\nkeymap: {jobs.stop_job: 'ctrl+x', list.first: 1}\n"
    )
    read = read_settings()
    assert read.problems == ()
    settings = read.settings
    assert (settings.refresh_seconds, settings.refresh_is_set) == (2.0, True)
    assert settings.notifications == "off"
    assert settings.vim_keys is False
    assert settings.ascii is None
    assert settings.colours == "256"
    assert settings.theme is None
    assert settings.keymap == {"jobs.stop_job": "ctrl+x", "list.first": "1"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("refresh_second: 3\n", 'line 1: unknown key "refresh_second" (did you mean "refresh_se'),
        ("theme: nord\nnotifications: bel\n", "line 2: notifications: \"bel\" is not 'bell', 'os"),
        ("refresh_seconds: 0.01\n", "refresh_seconds: input should be greater than or equal to"),
        ("refresh_seconds: .nan\n", "refresh_seconds: input should be "),
        ("ascii: maybe\n", 'ascii: "maybe" is not auto, true or false'),
        ("keymap: [a]\n", "keymap: input should be a valid dictionary"),
        ("keymap: {a: [b]}\n", "keymap: a: input should be a valid string"),
        ("theme: [\n", "line 1 is not `key: value` in YAML: theme: ["),
        ("just words\n", "line 1 is not `key: value` in YAML: just words"),
        ("theme: a\ntheme: b\n", "set twice"),
        ("\x00", "line 1 is not `key: value` in YAML: ?"),
        ("pictures: kity\n", "pictures: \"kity\" is not 'auto', 'kitty', 'sixel' or"),
        ("yes: 1\n", 'unknown key "true"'),  # YAML reads these as something else
        ("theme: nord\n0x10: 1\n", 'unknown key "16"'),
        ("<<: {no_such: 1}\n", 'unknown key "no_such"'),
    ],
)
def test_what_is_wrong_is_told_and_has_its_default(
    write: Callable[[str], Path], text: str, told: str
) -> None:
    path = write(text)
    read = read_settings()
    assert len(read.problems) == 1
    assert str(path) in read.problems[0]
    assert told in read.problems[0]
    assert read.settings.refresh_seconds == 1.0
    assert read.settings.notifications == "bell"


def test_a_mistake_in_one_key_leaves_the_others(write: Callable[[str], Path]) -> None:
    write("theme: nord\nrefresh_seconds: fast\nmouse: false\nnothing: 1\n")
    read = read_settings()
    assert (read.settings.theme, read.settings.mouse) == ("nord", False)
    assert len(read.problems) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        "theme: [nord\n",  # ends nowhere
        "theme nord\n",
        "mouse: false\nmouse: true\n",
        "theme: a: b\n",
        "no_such_key: 1\n",
        "keymap: {jobs.stop_job: [x]}\n",
        "# caf\xe9\ntheme: 3: 4\n",
        "refresh_seconds: 2026-99-99\n",
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_a_mistake_anywhere_leaves_read_only(home: Path, wrong: str, first: bool) -> None:
    path = settings_file()
    path.parent.mkdir(parents=True)
    careful = "read_only: true\nkeymap:\n  jobs.start_job: ctrl+s\n"
    if "keymap" in wrong:
        careful = "read_only: true\n"
    text = careful + wrong if first else wrong + careful
    path.write_bytes(text.encode("latin-1"))
    read = read_settings()
    assert read.settings.read_only
    assert read.settings.keymap == ({} if "keymap" in wrong else {"jobs.start_job": "ctrl+s"})
    assert len(read.problems) == 1
    assert str(path) in read.problems[0]


def test_a_wrong_entry_of_the_keymap_leaves_the_others(write: Callable[[str], Path]) -> None:
    write("keymap:\n  jobs.stop_job: [x]\n  jobs.new_job: ctrl+n\n")
    read = read_settings()
    assert read.settings.keymap == {"jobs.new_job": "ctrl+n"}
    assert len(read.problems) == 1


@pytest.mark.parametrize(
    "text",
    [
        "read_only: [\n",
        "read_only: true\nread_only: false\n",
        "read_only: false\nread_only: true\n",
        "read-only: : true\n",
        "read_only: true\n\ttheme: nord\n",
    ],
)
def test_in_doubt_it_is_read_only(write: Callable[[str], Path], text: str) -> None:
    write(text)
    read = read_settings()
    assert read.settings.read_only
    assert len(read.problems) == 1


def test_who_wants_to_be_careful_and_misspells_it_is_careful(write: Callable[[str], Path]) -> None:
    write("read_only: yess\n")
    read = read_settings()
    assert read.settings.read_only
    assert len(read.problems) == 1


def test_a_file_that_cannot_be_read_is_told(write: Callable[[str], Path]) -> None:
    path = write("")
    path.unlink()
    path.mkdir()
    read = read_settings()
    assert read.settings == Settings()
    (problem,) = read.problems
    assert problem.endswith("all settings are ignored, including read_only")


def test_every_setting_has_help_and_stands_in_the_file_to_edit() -> None:
    text = as_file()
    for name, field in Settings.model_fields.items():
        assert field.description, name
        assert f"\n# {name}:" in text
    uncommented = "".join(
        line.removeprefix("# ") + "\n"
        for line in text.splitlines()
        if line.removeprefix("# ").partition(":")[0] in Settings.model_fields
    )
    values = {k: v for k, v in yaml.safe_load(uncommented).items() if v is not None}
    values["ascii"] = None
    assert Settings(**values) == Settings()


# -- keys ----------------------------------------------------------------------------------


def settled(keymap: dict[str, str], **more: Any) -> tuple[dict[str, str], tuple[str, ...]]:
    known = {
        name: NamedBinding(name, keys, name, places)
        for name, keys, places in (
            ("jobs.stop", ("x",), {"Dashboard"}),
            ("jobs.start", ("s",), {"Dashboard"}),
            ("list.down", ("j", "down"), {"List"}),
            ("list.quick", ("J",), {"List"}),
            ("app.help", ("question_mark", "f1"), {"Dashboard", "App"}),
        )
    }
    found = settle_keymap(Settings(keymap=keymap, **more), known)
    return found.keys, found.problems


def test_an_action_gets_other_keys() -> None:
    assert settled({"jobs.stop": "ctrl+x, ?"})[1] == (
        "keymap: question_mark is already the key of app.help; jobs.stop keeps x",
    )
    assert settled({"jobs.stop": "ctrl+x,f7"}) == ({"jobs.stop": "ctrl+x,f7"}, ())


def test_keys_may_be_swapped_and_are_free_elsewhere() -> None:
    assert settled({"jobs.stop": "s", "jobs.start": "x"}) == (
        {"jobs.stop": "s", "jobs.start": "x"},
        (),
    )
    assert settled({"list.down": "x"}) == ({"list.down": "x"}, ())


def test_of_two_that_want_a_key_the_first_gets_it() -> None:
    keys, problems = settled({"jobs.stop": "f7", "jobs.start": "f7"})
    assert keys == {"jobs.stop": "f7"}
    assert problems == ("keymap: f7 is already the key of jobs.stop; jobs.start keeps s",)


def test_a_refusal_that_takes_another_choice_away_is_told_too() -> None:
    keys, problems = settled({"jobs.stop": "s", "jobs.start": "f1"})
    assert keys == {}
    assert len(problems) == 2


def test_unknown_actions_and_missing_keys_are_told() -> None:
    keys, problems = settled({"jobs.stpo": "y", "list.down": " , "})
    assert keys == {}
    assert 'no action "jobs.stpo" (did you mean "jobs.stop"?)' in problems[0]
    assert "list.down has no key; it keeps j, down" in problems[1]


def test_without_vim_keys_only_what_has_another_key_loses_its_letter() -> None:
    assert settled({}, vim_keys=False) == ({"list.down": "down"}, ())


def test_every_action_of_the_table_can_have_other_keys() -> None:
    known = known_bindings()
    for action in ACTIONS:
        assert action.id in known, action.name
    assert settle_keymap(Settings(), known).problems == ()


def test_the_footer_shows_a_persons_own_keys() -> None:
    shown = {one.name: one.shown for one in footer_actions(keymap={"jobs.stop_job": "ctrl+x,f7"})}
    assert shown["stop_job"] == "^x"
    assert shown["start_job"] == "s"


# -- the command ---------------------------------------------------------------------------


def test_the_command_shows_what_is_set_with_its_help(
    write: Callable[[str], Path], run: Callable[..., tuple[int, str, str]]
) -> None:
    write("refresh_seconds: 2\nnotification: off\nkeymap: {jobs.stopjob: y}\n")
    status, out, err = run("settings")
    assert status == 0
    assert "refresh_seconds: 2 *" in out
    assert "notifications: bell\n" in out
    for field in Settings.model_fields.values():
        assert (field.description or "").split()[0] in out
    assert 'unknown key "notification" (did you mean "notifications"?)' in err
    assert 'no action "jobs.stopjob" (did you mean "jobs.stop_job"?)' in err


def test_the_command_speaks_json_and_writes_a_file_once(
    run: Callable[..., tuple[int, str, str]],
) -> None:
    assert run("settings", "--path")[1].strip() == str(settings_file())
    assert run("settings", "--init")[:2] == (0, f"{settings_file()}\n")
    assert read_settings() == read_settings(settings_file())
    status, _, err = run("settings", "--init")
    assert status == 2
    assert "already exists" in err
    told = json.loads(run("settings", "--json")[1])
    assert told["exists"] is True
    assert told["values"]["refresh_seconds"] == 1.0
    assert told["problems"] == []
    assert set(told["help"]) == set(Settings.model_fields)
    ids = {one["id"]: one["keys"] for one in json.loads(run("settings", "--keys", "--json")[1])}
    assert ids["jobs.stop_job"] == ["x"]


def test_flags_of_the_dashboard_are_refused_with_a_command(
    run: Callable[..., tuple[int, str, str]],
) -> None:
    status, _, err = run("--read-only", "list")
    assert status == 2
    assert "--read-only and --ascii apply to the dashboard" in err
