"""Keys as the command line shows them: tables, help, what shells are offered; and the documents."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner, Result

from jobs.errors import UserError
from jobs.queue.states import State
from jobs.spec.job_spec import JobSpec, field_choices, field_group
from tests.support.paths import ROOT
from tests.support.tui.made_up_runs import add_job
from tests.support.tui.shell import Shell
from tests.support.waiting import PATIENCE
from tui.cli.commands import CommandGroup, cli
from tui.cli.completion import _SHELLS

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.queue.store import Store

pytestmark = pytest.mark.usefixtures("home")
FIELDS = list(JobSpec.model_fields)


def run(*words: str, **environment: str) -> Result:
    return CliRunner().invoke(cli, list(words), env=environment, prog_name="fsdp-tui")


# -- keys ----------------------------------------------------------------------------------


def test_every_key_is_listed_once_with_its_group() -> None:
    found = json.loads(run("keys", "--json").output)
    assert [one["key"] for one in found] == FIELDS
    for one in found:
        assert one["group"] == field_group(one["key"])
        assert one["values"]
        assert one["help"]
        assert set(field_choices(one["key"])) <= set(one["words"])


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("lora_rank", "number ≥ 1 ≤ 4096"),
        ("learning_rate", "number > 0 ≤ 10"),
        ("flow_shift", "number > 0 ≤ 1000000, or sampler"),
        ("mixed_precision", "no · bf16 · fp16"),
        ("fsdp_enable", "true or false"),
        ("fsdp_reshard_after_forward", "true or false, or a number"),
        ("gpus", "number or list"),
        ("validation_prompts", "list"),
        ("validation_resolution", "number or text"),
        ("dataset", "text"),
        ("accelerate_config", "file or mapping"),
        ("lora_rank_pattern", "mapping"),
    ],
)
def test_what_a_key_may_be(key: str, values: str) -> None:
    (found,) = json.loads(run("keys", key, "--json").output)
    assert found["values"] == values


def test_keys_are_chosen_by_name_and_by_group() -> None:
    found = json.loads(run("keys", "FSDP", "--lora-rank".lstrip("-"), "--json").output)
    groups = {one["group"] for one in found}
    assert groups == {"fsdp", "lora"}
    assert [one["key"] for one in found if one["group"] == "lora"] == ["lora_rank"]
    result = run("keys", "fsdq")
    assert isinstance(result.exception, UserError)
    assert str(result.exception) == 'unknown key or group "fsdq" (did you mean "fsdp"?)'


def test_ways_to_draw_noise_levels_are_seen_beside_their_key() -> None:
    text = run("keys", "timestep_sampling", COLUMNS="70").output
    (row,) = [line for line in text.splitlines() if line.strip().startswith("shift, s = 6")]
    assert row.endswith("  34%")
    assert "█" in row
    assert max(map(len, text.splitlines())) <= 70
    assert "s = 6" not in run("keys", "training").output


def test_a_person_reads_lines_that_fit() -> None:
    text = run("keys", COLUMNS="60").output
    assert "  learning_rate  (number > 0 ≤ 10; default: 0.0001)" in text
    assert max(map(len, text.splitlines())) <= 60


def test_the_reference_has_the_tables_of_the_code() -> None:
    text = (ROOT / "docs" / "job-keys.md").read_text(encoding="utf-8")
    match = re.search(r"<!-- keys: .*? -->\n(.*?)\n<!-- /keys -->", text, re.S)
    assert match is not None
    assert match[1] == run("keys", "--markdown").output.rstrip("\n"), "run `python docs/make.py`"
    two = run("keys", "--markdown", "devices", "fsdp").output.rstrip("\n")
    assert [line for line in two.splitlines() if line.startswith("#")] == [
        "### devices",
        "### fsdp",
    ]
    assert all(part in match[1] for part in two.split("\n\n### "))


def test_the_documents_say_the_exit_statuses() -> None:
    page = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    for status in ("| 0 |", "| 1 |", "| 2 |", "| 3 |", "| 4 |", "| 130 |"):
        assert status in page
        assert f"  {status.strip('| ')}  " in run("--help").output


# -- help ----------------------------------------------------------------------------------


def test_help_names_every_command_under_a_heading() -> None:
    text = run("--help").output
    for name in cli.commands:
        assert re.search(rf"^  {name} ", text, re.M), name
        assert run(name, "--help").exit_code == 0


def test_a_command_whose_module_fails_is_not_called_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fails_when_imported.py").write_text("{}['missing']")
    monkeypatch.syspath_prepend(tmp_path)
    group = CommandGroup(sections={"Begin": {"broken": "fails_when_imported:command"}})
    assert "broken" in group.commands
    with pytest.raises(KeyError, match="missing"):
        group.main(["broken"], standalone_mode=False)
    assert "Did you mean 'broken'?" in CliRunner().invoke(group, ["brokn"]).output


def test_help_of_submit_teaches_how_to_write_flags() -> None:
    text = run("submit", "--help").output
    for word in (
        "[JOB.yaml] [--key=value …]",
        "fsdp-tui keys",
        "--lora-rank 8",
        "--no-KEY",
        "None",
    ):
        assert word in text


# -- completion ----------------------------------------------------------------------------


def complete(shell: str, *words: str) -> list[str]:
    """What is offered for the last word."""
    whole = " ".join(["fsdp-tui", *words])
    variables = {
        "_FSDP_TUI_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": whole,
        "COMP_CWORD": words[-1] if shell == "fish" else str(len(words)),
    }
    lines = run(**variables).output.splitlines()
    if shell == "zsh":  # three lines each: kind, value, help
        return lines[1::3]
    return [line.partition(",")[2].partition("\t")[0] for line in lines if line]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["subm"], ["submit"]),
        (["submit", "--optim"], ["--optimizer"]),
        (["run", "--optimizer", "adamw_8"], ["adamw_8bit"]),
        (["submit", "--optimizer=adamw_8"], ["adamw_8bit"]),
        (["submit", "--optimizer", "=", "adamw_8"], ["adamw_8bit"]),
        (["submit", "--strategy", "FS"], ["fsdp2"]),
        (["submit", "--flow_shift", "s"], ["sampler"]),
        (["data", "--fsdp_enable", "t"], ["true"]),
        (["resume", "3", "--model_family", "qw"], ["qwen_image"]),
        (["submit", "--fsdp_auto_wrap_policy", "size"], ["SIZE_BASED_WRAP"]),
        (["submit", "--dry"], ["--dry-run", "--dry_run"]),
        (["submit", "job.y"], ["job.y"]),
        (["completion", "z"], ["zsh"]),
    ],
)
def test_bash_completes(words: list[str], offered: list[str]) -> None:
    assert complete("bash", *words) == offered


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_the_whole_word(shell: str) -> None:
    assert complete(shell, "submit", "--optimizer=adamw_8") == ["--optimizer=adamw_8bit"]
    assert complete(shell, "submit", "--optimi") == ["--optimizer"]
    assert complete(shell, "run", "--optimizer", "adamw_8") == ["adamw_8bit"]


def test_jobs_are_offered_by_id(store: Store) -> None:
    from jobs.queue.job import Terms

    job = store.add(name="cats", terms=Terms(1, None, 5), run_id="r", prepare=lambda run_dir: None)
    assert complete("bash", "show", str(job.id)) == [str(job.id)]
    assert complete("bash", "stop", "9") == []


def test_what_runs_is_offered_to_be_stopped(store: Store) -> None:
    waits, _ended = add_job(store), add_job(store, state=State.FAILED)
    assert complete("bash", "stop", "") == [str(waits.id)]
    runs = add_job(store, state=State.RUNNING)
    assert complete("bash", "stop", "") == [str(runs.id)], "what waits only where nothing runs"


@pytest.mark.parametrize("group", ["cache", "import"])
def test_a_group_alone_prints_its_help(
    group: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = Shell(monkeypatch, capsys)(group)
    lines = (out + err).splitlines()
    assert lines[0].startswith(f"Usage: fsdp-tui {group} ")
    assert "Commands:" in lines
    assert status in (0, 2), "as click's version has it"


@pytest.mark.parametrize("shell", _SHELLS)
def test_a_script_is_printed(shell: str) -> None:
    result = run("completion", shell)
    assert result.exit_code == 0
    assert f"_FSDP_TUI_COMPLETE={shell}_complete" in result.output


def test_bash_itself_completes(tmp_path: Path) -> None:
    """Bash breaks words at `=`; its own variables are set as it sets them."""
    script = f"""
        fsdp-tui() {{ {sys.executable} -m tui "$@"; }}
        export -f fsdp-tui
        PATH={tmp_path}:$PATH
        eval "$(fsdp-tui completion bash)"
        COMP_WORDS=(fsdp-tui submit --optimizer = adamw_8) COMP_CWORD=4
        _fsdp_tui_completion fsdp-tui
        echo "${{COMPREPLY[*]}}"
    """
    (tmp_path / "fsdp-tui").write_text(f'#!/bin/sh\nexec {sys.executable} -m tui "$@"\n')
    (tmp_path / "fsdp-tui").chmod(0o755)
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
        cwd=ROOT,
    )
    assert done.stdout.split() == ["adamw_8bit"]
