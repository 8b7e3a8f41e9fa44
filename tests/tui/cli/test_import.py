"""`fsdp-tui import`: where the job goes and where the report, exit status, shapes of JSON."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest
import yaml
from click.testing import CliRunner, Result

from jobs.imports.common.import_report import Kind
from tests.support.paths import IMPORT_EXAMPLES
from tui.cli import commands
from tui.cli.prepare.import_job import import_job

if TYPE_CHECKING:
    from pathlib import Path

EXAMPLES = IMPORT_EXAMPLES
CONFIG = EXAMPLES / "simpletuner" / "flux-lora" / "config.json"
TRAINING = EXAMPLES / "ai-toolkit" / "flux-lora.yaml"
ONETRAINER = EXAMPLES / "onetrainer" / "flux-lora.json"
PIPE = EXAMPLES / "diffusion-pipe" / "flux-lora.toml"
SCRIPT = EXAMPLES / "diffusers-script" / "flux-lora.sh"
COMMAND = "accelerate launch --num_processes=2 train_dreambooth_lora_flux.py --rank=8 --seed 3"


def run(*words: object) -> Result:
    return CliRunner().invoke(import_job, [str(word) for word in words])


def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object
) -> str:
    """What the whole command says on bad input: status 2, one line on standard error."""
    monkeypatch.setattr(sys, "argv", ["fsdp-tui", "import", *map(str, words)])
    with pytest.raises(SystemExit) as caught:
        commands.main()
    out, err = capsys.readouterr()
    assert (caught.value.code, out, err.count("\n")) == (2, "", 1)
    return err


@pytest.mark.parametrize(
    "words",
    [
        ("simpletuner", CONFIG),
        ("ai-toolkit", TRAINING),
        ("onetrainer", ONETRAINER),
        ("diffusion-pipe", PIPE),
        ("diffusers-script", SCRIPT),
    ],
)
def test_the_job_is_printed_and_the_report_stands_beside_it(words: tuple[object, ...]) -> None:
    done = run(*words)
    assert done.exit_code == 0  # also with keys that are not supported
    job = yaml.safe_load(done.stdout)
    assert job["pretrained_model_name_or_path"] == "black-forest-labs/FLUX.1-dev"
    assert "to fill in" in done.stderr
    everything = words[0] in ("diffusion-pipe", "diffusers-script")  # is supported
    assert (Kind.UNSUPPORTED.heading in done.stderr) is not everything
    assert "hf_AbCdEf" not in done.output


def test_the_report_says_what_was_and_what_is() -> None:
    said = run("simpletuner", CONFIG).stderr
    assert "  lora_rank: 32\n" in said
    assert "multidatabackend.json[0].repeats: 4 → repeats: 5  (here the first pass counts" in said
    assert "  base_model_precision: int8-quanto → base_precision: int8\n" in said
    assert "  optimizer_config → adam_epsilon: 1e-06, weight_decay: 0.01" in said
    assert "unknown (1)\n  potters_own_key: 3" in said
    assert "  multidatabackend.json[0]: resolution_type, id," in said
    assert max(map(len, said.splitlines())) < 330


def test_the_job_goes_to_a_file_and_never_over_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "job.yaml"
    done = run("ai-toolkit", TRAINING, "-o", target)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith("flux-lora.yaml (ai-toolkit) → ")
    assert target.read_text().startswith("# From flux-lora.yaml (ai-toolkit).\nname: tin_robots-v1")
    target.write_text("mine")
    assert "already exists" in refused(monkeypatch, capsys, "ai-toolkit", TRAINING, "-o", target)
    assert target.read_text() == "mine"
    assert run("ai-toolkit", TRAINING, "-o", target, "--force").exit_code == 0
    assert "tin_robots" in target.read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["job.yaml"]


def test_places_that_cannot_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_bytes(TRAINING.read_bytes())
    for target, said in (
        (tmp_path, "is a directory"),
        (tmp_path / "nowhere" / "job.yaml", "cannot write"),
        (config, "is the file being imported"),
    ):
        words = ("ai-toolkit", config, "-o", target, "--force")
        assert said in refused(monkeypatch, capsys, *words)
    assert config.read_bytes() == TRAINING.read_bytes()


def test_json_says_everything() -> None:
    done = run("simpletuner", CONFIG, "--json")
    facts = json.loads(done.stdout)
    assert set(facts) == {"tool", "source", "job", "yaml", "written", "report"}
    assert (facts["tool"], facts["written"], done.stderr) == ("SimpleTuner", None, "")
    assert yaml.safe_load(facts["yaml"]) == facts["job"]
    assert set(facts["report"]) == {
        "taken_over",
        "translated",
        "not_supported",
        "not_needed",
        "not_known",
        "could_not_be_read",
        "assumed",
        "to_fill_in",
        "warnings",
    }
    (unknown,) = facts["report"]["not_known"]
    assert (unknown["key"], unknown["value"], unknown["ours"]) == ("potters_own_key", "3", {})


@pytest.mark.parametrize("words", [[COMMAND], ["--", *COMMAND.split()], COMMAND.split()])
def test_a_command_may_be_one_word_or_many(words: list[str]) -> None:
    done = run("diffusers-script", *words)
    job = yaml.safe_load(done.stdout)
    assert (job["num_processes"], job["lora_rank"], job["seed"]) == (2, 8, 3)


@pytest.mark.parametrize(
    ("words", "family"),
    [
        (["kohya", EXAMPLES / "kohya" / "sdxl-lora.toml"], "sdxl"),
        ([EXAMPLES / "kohya" / "sdxl-lora.toml"], "sdxl"),
        (
            ["kohya", *["accelerate", "launch", "sdxl_train_network.py", "--network_dim", "8"]],
            "sdxl",
        ),
        (["musubi-tuner", EXAMPLES / "kohya" / "wan-lora.sh"], "wan"),
        ([EXAMPLES / "kohya" / "wan-lora.sh"], "wan"),
        (["musubi-tuner", "--", *["python", "wan_train_network.py", "--dit", "a"]], "wan"),
    ],
)
def test_kohya_s_tools_are_read_from_files_and_words(words: list[object], family: str) -> None:
    done = run(*words)
    assert (done.exit_code, yaml.safe_load(done.stdout)["model_family"]) == (0, family)


def test_options_stand_in_front_of_the_words_of_a_command(tmp_path: Path) -> None:
    target = tmp_path / "job.yaml"
    done = run("diffusers-script", "-o", target, "--json", "--", *COMMAND.split())
    assert json.loads(done.stdout)["written"] == str(target)
    assert yaml.safe_load(target.read_text())["lora_rank"] == 8


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("simpletuner", "nowhere.json"), "no such file: nowhere.json"),
        (("simpletuner", TRAINING), "is a configuration of ai-toolkit"),
        (("ai-toolkit", CONFIG), "is a configuration of SimpleTuner"),
        (("ai-toolkit", EXAMPLES), "is a directory"),
        (("diffusers-script", "python"), "no such file: python"),
        (("kohya", EXAMPLES / "kohya" / "wan-lora.sh"), "is of musubi-tuner, not of kohya's"),
        (("musubi-tuner", EXAMPLES / "kohya" / "sdxl-lora.toml"), "not of musubi-tuner"),
        (("kohya", EXAMPLES / "kohya" / "dataset.toml"), "only describes datasets"),
        (("diffusers-script",), "Missing argument"),
        (("something-else", CONFIG), "No such command"),
        (("simpletuner",), "Missing argument"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    words: tuple[object, ...],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = refused(monkeypatch, capsys, *words)
    assert any(part in line for part in said.split("|")), line
