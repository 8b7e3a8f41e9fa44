"""`fsdp-tui edit`, `submit --template` and `templates`, as people type them."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING, Any

import click
import pytest
import yaml

from jobs.queue.states import State
from jobs.spec.file.load import load_spec
from jobs.spec.file.templates import find_template, save_template, templates_home

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.queue.store import Store
    from jobs.spec.job_spec import JobSpec
    from tests.support.tui.shell import Shell


@pytest.fixture
def waiting(shell: Shell, store: Store, job_file: Path) -> int:
    """A job that waits in the queue, and is held there."""
    store.pause(True)
    return int(shell.json("submit", str(job_file))["id"])


def spec_of(store: Store, job: int) -> JobSpec:
    return load_spec(store.get(job).run_dir.job_file)


@pytest.fixture
def editor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Editor:
    """What `$EDITOR` does, one call after the other; as in a terminal."""
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return Editor(monkeypatch, tmp_path)


class Editor:
    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self._patch, self._folder = patch, folder

    def does(self, *scripts: str) -> None:
        """Each a shell command that gets the file as `$1`."""
        for number, script in enumerate(scripts):
            (self._folder / f"edit-{number}").write_text(script)
        program = self._folder / "editor"
        program.write_text(
            f"#!/bin/sh\ncd {self._folder}\nnext=$(ls edit-[0-9] | head -n 1)\n"
            "mv $next done-$next\n. ./done-$next\n"
        )
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        self._patch.setenv("EDITOR", str(program))
        self._patch.delenv("VISUAL", raising=False)


def test_a_queued_job_is_changed_by_flags(shell: Shell, store: Store, waiting: int) -> None:
    told = shell.json("edit", str(waiting), "--max-train-steps", "7", "--seed=9")
    assert (told["id"], told["state"]) == (waiting, "queued")
    spec = spec_of(store, waiting)
    assert (spec.max_train_steps, spec.seed) == (7, 9)
    assert store.get(waiting).total_steps == 7


def test_a_dry_run_changes_nothing(shell: Shell, store: Store, waiting: int) -> None:
    status, out, _ = shell("edit", str(waiting), "--seed=9", "--dry-run")
    assert status == 0
    assert yaml.safe_load(out)["seed"] == 9
    assert shell.json("edit", str(waiting), "--seed=9", "--dry-run")["seed"] == 9
    assert spec_of(store, waiting).seed != 9


def test_the_jobs_before_it_are_changed(
    shell: Shell, store: Store, waiting: int, job_file: Path
) -> None:
    second, third = (int(shell.json("submit", str(job_file))["id"]) for _ in range(2))
    assert shell.json("edit", str(third), f"--after={waiting},{second}")["state"] == "queued"
    assert [number for number, _ in store.get(third).follows] == [waiting, second]
    assert store.history(third)[-1].reason == "changed: after"
    shell("edit", str(third), "--seed=9")
    assert len(store.get(third).follows) == 2
    for words, told in (
        (f"{third}", f"job {third} cannot wait for itself"),
        (f"{second},99", "no job 99"),
        ("cats", '"cats" is not a job id'),
    ):
        status, _, errors = shell("edit", str(third), "--after", words)
        assert (status, told in errors) == (2, True)
    for circle in ("--dry-run", "--json"):
        status, _, errors = shell("edit", str(waiting), "--after", str(third), circle)
        assert status == 2
        assert f"job {third}, which waits for job {waiting}" in errors
    shell("edit", str(third), "--after=None")
    assert not store.get(third).follows


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--learning_rate=fast"], "learning_rate"),
        (["--sed=3"], 'did you mean "seed"'),
        (["other.yaml"], '"other.yaml" is not a --key=value flag'),
        ([], "nothing to change; pass --key=value flags"),  # no terminal for an editor
    ],
)
def test_what_is_wrong_changes_nothing(
    shell: Shell, store: Store, waiting: int, words: list[str], told: str
) -> None:
    before = spec_of(store, waiting)
    status, _, err = shell("edit", str(waiting), *words)
    assert status == 2
    assert told in err
    assert len(err.splitlines()) == 1
    assert spec_of(store, waiting) == before


def test_only_what_waits_can_be_changed(shell: Shell, store: Store, waiting: int) -> None:
    store.change(waiting, State.STOPPED, "taken out")
    status, _, err = shell("edit", str(waiting), "--seed=9")
    assert status == 2
    assert f"job {waiting} is stopped; only a queued job can be edited" in err


def test_the_file_is_changed_in_an_editor(
    shell: Shell, store: Store, waiting: int, editor: Editor, tmp_path: Path
) -> None:
    editor.does('sed -i "s/max_train_steps: 100/max_train_steps: 50/" "$1"')
    status, out, err = shell("edit", str(waiting))
    assert (status, out) == (0, f"job {waiting} changed\n"), err
    assert spec_of(store, waiting).max_train_steps == 50
    assert not list(tmp_path.glob("fsdp-tui-edit-*"))


def test_who_saves_nothing_changes_nothing(
    shell: Shell, store: Store, waiting: int, editor: Editor
) -> None:
    editor.does("true")
    assert shell("edit", str(waiting))[:2] == (0, f"job {waiting} is unchanged\n")
    assert store.history(waiting)[-1].reason != "resubmitted unchanged"


@pytest.mark.parametrize("again", [True, False])
def test_a_mistake_in_the_editor_costs_nothing(
    shell: Shell,
    store: Store,
    waiting: int,
    editor: Editor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    again: bool,
) -> None:
    monkeypatch.setattr(click, "confirm", lambda *args, **options: again)
    editor.does('echo "sed: 3" >> "$1"', 'sed -i "s/^sed: /seed: /" "$1"')
    status, _, err = shell("edit", str(waiting))
    assert 'unknown key "sed"' in err
    assert spec_of(store, waiting).seed == (3 if again else 42)
    left = list(tmp_path.glob("fsdp-tui-edit-*/job.yaml"))
    if again:
        assert (status, left) == (0, [])
    else:
        assert status == 2
        assert f"your text is in {left[0]}" in err


def test_a_job_that_starts_meanwhile_keeps_what_was_written(
    shell: Shell,
    store: Store,
    waiting: int,
    editor: Editor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    editor.does('echo "seed: 3" >> "$1"')
    edit = click.edit

    def slow(**options: Any) -> Any:
        store.change(waiting, State.STOPPED, "taken out")
        return edit(**options)

    monkeypatch.setattr(click, "edit", slow)
    status, _, err = shell("edit", str(waiting))
    assert status == 2
    assert "not queued" in err
    (left,) = tmp_path.glob("fsdp-tui-edit-*/job.yaml")
    assert f"your text is in {left}" in err


# -- templates -----------------------------------------------------------------------------


def test_a_job_begins_from_a_template(
    shell: Shell, store: Store, job_values: dict[str, Any]
) -> None:
    store.pause(True)
    save_template("My tiny", job_values | {"seed": 5, "lora_rank": 2})
    told = shell.json("submit", "--template", "my tiny", "--seed=6")
    spec = spec_of(store, told["id"])
    assert (spec.lora_rank, spec.seed) == (2, 6)


def test_a_family_is_a_template(shell: Shell, job_values: dict[str, Any]) -> None:
    flags = [f"--{key}={value}" for key, value in job_values.items()]
    told = shell.json("submit", "--template", "flux/schnell", *flags, "--dry-run")
    assert told["model_flavour"] == "schnell"


def test_what_cannot_be_begun_from_is_told(shell: Shell, job_file: Path) -> None:
    save_template("tiny", {"seed": 5})
    status, _, err = shell("submit", "--template", "tinny")
    assert status == 2
    assert 'no template "tinny" (did you mean "tiny"' in err
    status, _, err = shell("submit", str(job_file), "--template", "tiny")
    assert status == 2
    assert "cannot be combined" in err
    (templates_home() / "tiny.yaml").write_text("sed: 3\n")
    status, _, err = shell("submit", "--template", "tiny")
    assert status == 2
    assert 'line 1: unknown key "sed"' in err


def test_templates_are_listed(shell: Shell) -> None:
    save_template("tiny", {"seed": 5})
    listed = shell.json("templates")
    assert listed[0]["name"] == "tiny"
    assert listed[0]["values"] == {"seed": 5}
    assert "flux/dev" in [one["name"] for one in listed]
    status, out, _ = shell("templates")
    assert status == 0
    assert out.startswith("tiny ")
    assert str(templates_home()) in out
    for one in listed:
        assert find_template(one["name"]).name == one["name"]


def test_an_id_that_is_none_is_told_where_to_look(shell: Shell, store: Store, waiting: int) -> None:
    for words, told in [
        (["show", "demo"], '"demo" is not a job id; `fsdp-tui list` shows the ids'),
        (["show", "t"], f"(job {waiting} has this name); `fsdp-tui list` shows the ids"),
        (["stop", "9" * 30], "is not a job id"),
        (["logs", "-1"], "-1"),
        (["show", "99"], "`fsdp-tui list` shows the jobs"),
    ]:
        status, _, err = shell(*words)
        assert status == 2
        assert told in err
    assert shell("show", f"#{waiting}")[0] == 0
