"""What leaves this machine: public keys of a job, and nothing that any other key says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine import families
from engine.exports.recipe import Recipe, describe
from engine.tracking.follower import config_values
from jobs.hub.push import CardFacts, write_card
from jobs.spec.job_spec import JobSpec, field_names, is_public
from jobs.spec.keys.prompts import ValidationPrompt
from jobs.spec.values.datasets import Dataset
from jobs.untrusted.secrets import HIDDEN, without_secrets

KEYS = Path(__file__).with_name("public_keys.txt")
STYLES = ("diffusers", "kohya", "comfyui")


def marked(key: str) -> Any:
    """A value of a key that is found wherever it goes, as long as it is of the key's own kind."""
    mark = f"private-{key}"
    if key == "validation_prompts":
        return [ValidationPrompt(prompt=mark)]
    if key == "datasets":
        return [Dataset(path=f"/{mark}", repeats=2, mask_path=f"/{mark}")]
    if key in ("pretrained_model_name_or_path", "dataset"):
        return f"/{mark}/model"
    kind = str(JobSpec.model_fields[key].annotation)
    if "list[" in kind and key != "gpus":
        return [mark, f"export API_KEY={mark}"]
    return {mark: mark} if kind.startswith("dict[") else mark


def test_no_value_of_a_key_that_is_not_public_leaves() -> None:
    checked, shown = [], []
    for key in field_names():
        usual = JobSpec.model_fields[key].default
        if is_public(key) or isinstance(usual, bool | int) or key in ("device", "launcher"):
            continue  # of those that are not, numbers, switches and choices have no secret
        if key in ("report_to", "gpus", "main_process_port", "slurm_signal_seconds"):
            continue
        values = JobSpec(dataset="/data").model_dump() | {key: marked(key)}
        values |= {"dataset": ""} if key == "datasets" else {}
        spec = JobSpec.model_construct(**values)
        checked.append(key)
        texts = [write_card(spec, CardFacts("me/x", 3)), json.dumps(config_values(spec))]
        for style in STYLES:
            recipe = Recipe(spec, families.load("flux"), Path("/model"), 3, ema=False)
            texts.append(json.dumps(describe(recipe, style)))
        shown += [key for text in texts if f"private-{key}" in text]
    assert len(checked) > 20
    assert shown == []


def test_who_adds_a_key_says_whether_anyone_may_read_it() -> None:
    """The list is what is public; see `KeyFacts.public`, and then add to the list or not."""
    assert [key for key in field_names() if is_public(key)] == KEYS.read_text().split()


@pytest.mark.parametrize(
    "secret",
    [
        "github_pat_" + "a1" * 20,
        "glpat-" + "a1" * 10,
        "xoxb-12345-" + "a1" * 10,
        "AIza" + "a1" * 18,
        "hf_" + "a" * 34,
        "https://me:pa/ss@host/x",
        "https://me:p@ss@host/x",
        "https://token@host/x",
    ],
)
def test_secrets_are_known_by_their_look(secret: str) -> None:
    assert secret.split("//")[-1].split("host")[0] not in without_secrets(f"it said {secret}", {})


@pytest.mark.parametrize(
    "name", ["DB_PASS", "GITHUB_PAT", "COMET_KEY", "WANDB_API_KEY", "MY_TOKEN", "SMTP_PASSWORD"]
)
def test_secrets_are_known_by_the_name_of_their_variable(name: str) -> None:
    assert without_secrets("it said opensesame1", {name: "opensesame1"}) == f"it said {HIDDEN}"


@pytest.mark.parametrize("name", ["KEYBOARD", "PATH", "COMPASS", "TOKENIZERS_PARALLELISM"])
def test_other_variables_are_no_secrets(name: str) -> None:
    assert without_secrets("it said opensesame1", {name: "opensesame1"}) == "it said opensesame1"
