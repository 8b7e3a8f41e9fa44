"""What replays a job: its file, its flags, and a script with the bare launch line."""

from __future__ import annotations

import json
import shlex
import subprocess
from dataclasses import replace as with_changes
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from jobs import launch, service
from jobs.errors import UserError
from jobs.machine import bytecode
from jobs.machine.processes import RUN_ID_VARIABLE
from jobs.service.replay import replay, replay_facts
from jobs.spec.file.flags import parse_flags
from jobs.spec.file.load import load_spec
from jobs.spec.rules.strategy import STRATEGY_VARIABLE
from tests.support.waiting import PATIENCE

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.queue.store import Job, Store

pytestmark = pytest.mark.usefixtures("no_gpus", "started")


@pytest.fixture
def submitted(store: Store, job_values: dict[str, Any]) -> Job:
    more = {
        "trigger_word": 'it\'s "sks"',
        "strategy": "fsdp2",
        "lora_alpha": 3.5,
        "validation_prompts": ["a cat, asleep\n", {"prompt": "[trigger]", "seed": 3}],
        "accelerate_config": {"rdzv_backend": "static"},
        "accelerate_extra_args": ["--tee", "3"],
    }
    return service.submit(store, load_spec(None, job_values | more))


def test_the_file_and_the_flags_are_the_job(submitted: Job, tmp_path: Path) -> None:
    spec = load_spec(submitted.run_dir.job_file)
    again = tmp_path / "again.yaml"
    again.write_text(replay(submitted, "yaml"))
    assert load_spec(again) == spec
    words = shlex.split(replay(submitted, "flags"))
    values, others = parse_flags(words)
    assert load_spec(None, values) == spec
    assert others == []
    assert replay_facts(submitted, "flags") == words
    assert replay_facts(submitted, "yaml") == spec.to_dict()


def test_a_shell_makes_the_files_and_gets_the_whole_line(submitted: Job, tmp_path: Path) -> None:
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    (bin_ / "accelerate").write_text('#!/bin/sh\nprintf "%s\\n" "$@"; env >&2\n')
    (bin_ / "accelerate").chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", replay(submitted, "accelerate")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE,
        env={"PATH": f"{bin_}:/usr/bin:/bin"},
    )
    facts = replay_facts(submitted, "accelerate")
    assert done.stdout.splitlines() == facts["command"][1:]
    assert done.stdout.splitlines()[-3:] == ["-m", "engine", "t-by-hand"]
    assert "--tee=3" in facts["command"]
    for key, value in facts["environment"].items():
        assert f"{key}={value}" in done.stderr.splitlines()
    folder = tmp_path / "t-by-hand"
    assert load_spec(folder / "job.yaml") == load_spec(submitted.run_dir.job_file)
    config = yaml.safe_load((folder / "accelerate.yaml").read_text())
    assert (config["rdzv_backend"], config["distributed_type"]) == ("static", "FSDP")


def test_no_supervisor_may_take_the_ranks_for_its_own(submitted: Job) -> None:
    assert RUN_ID_VARIABLE not in replay_facts(submitted, "accelerate")["environment"]


def test_where_byte_code_is_kept_here_is_of_no_use_elsewhere(
    submitted: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = dict.fromkeys(bytecode.VARIABLES, "x")
    monkeypatch.setattr(launch, "bytecode_variables", lambda: kept)
    assert not replay_facts(submitted, "accelerate")["environment"].keys() & kept.keys()


def test_what_auto_came_to_is_kept(store: Store, job_values: dict[str, Any]) -> None:
    job = service.submit(store, load_spec(None, job_values))
    assert "--use_fsdp" in replay_facts(job, "accelerate")["command"]
    launched = {"environment": {STRATEGY_VARIABLE: "ddp: a full copy fits"}}
    job.run_dir.launch_file.write_text(json.dumps(launched))
    assert "--multi_gpu" in replay_facts(job, "accelerate")["command"]


def test_gpus_are_named_as_the_job_does_or_by_number(
    store: Store, job_values: dict[str, Any]
) -> None:
    job = service.submit(store, load_spec(None, job_values))
    on_gpus = with_changes(job, wanted=2, gpus=["GPU-of-this-machine", "GPU-and-another"])
    facts = replay_facts(on_gpus, "accelerate")
    assert "--gpu_ids=0,1" in facts["command"]
    assert "CUDA_VISIBLE_DEVICES" not in facts["environment"]


@pytest.mark.parametrize("form", ["yaml", "flags"])
def test_for_others_there_is_only_what_is_public(
    store: Store, job_values: dict[str, Any], form: Any
) -> None:
    secret = {"slurm_setup": ["export WANDB_API_KEY=abc"], "validation_prompts": ["my own face"]}
    job = service.submit(store, load_spec(None, job_values | secret | {"learning_rate": 3e-5}))
    text = replay(job, form, public=True)
    assert "learning_rate" in text
    private = [*map(str, secret["slurm_setup"]), "my own face", str(job_values["dataset"])]
    assert [value for value in private if value in text] == []
    assert json.dumps(replay_facts(job, form, public=True)).count("abc") == 0


@pytest.mark.parametrize("form", ["accelerate", "sbatch"])
def test_a_launch_is_not_for_others(submitted: Job, form: Any) -> None:
    with pytest.raises(UserError, match="--public goes with --as yaml or flags"):
        replay(submitted, form, public=True)
