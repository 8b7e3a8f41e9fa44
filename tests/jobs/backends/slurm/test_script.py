"""The batch script, the command of the ranks, and what `auto` comes to over several machines."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from jobs.backends.slurm.hand_in import signal_seconds
from jobs.backends.slurm.ranks import srun_command
from jobs.backends.slurm.script import script_by_hand, script_of
from jobs.errors import SpecError
from jobs.run.rundir import RunDir
from jobs.run.why_failed import RankExit, rank_exits
from jobs.spec.file.load import load_spec
from jobs.spec.job_spec import JobSpec
from jobs.spec.rules.strategy import Room, chosen_strategy, replicas_of
from jobs.spec.values.yaml_lines import read_mapping

SLURM: dict[str, Any] = {
    "pretrained_model_name_or_path": "no/such",
    "dataset": "no/such",
    "launcher": "slurm",
    "num_machines": 2,
    "num_processes": 16,
}
GIB = 2**30


def spec(**changes: Any) -> JobSpec:
    return load_spec(None, SLURM | changes)


def test_the_script() -> None:
    text = script_of(
        spec(
            slurm_partition="gpu",
            slurm_time="12:00:00",
            slurm_extra_args="--exclude n7 --mem=0",
            slurm_setup=["module load cuda"],
        ),
        RunDir(Path("/home/me/runs 100%/1-t")),
        name="fsdp-tui-1-ab-0",
        python="/env/bin/python",
        home=Path("/home/me"),
    )
    assert text.splitlines() == [
        "#!/bin/bash",
        "#SBATCH --job-name=fsdp-tui-1-ab-0",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=8",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --partition=gpu",
        "#SBATCH --time=12:00:00",
        "#SBATCH --signal=B:USR2@300",
        '#SBATCH --output="/home/me/runs 100%%/1-t/logs/supervisor.log"',
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",
        "#SBATCH --exclude n7",
        "#SBATCH --mem=0",
        "",
        "trap '' USR2",
        "module load cuda",
        "export FSDP_TUI_HOME=/home/me",
        "export PYTHONSAFEPATH=1",
        '[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK',
        "exec /env/bin/python -m jobs.backends.slurm.warden '/home/me/runs 100%/1-t'",
    ]


def test_on_the_cpu_no_gpu_is_asked_for() -> None:
    text = script_by_hand(spec(device="cpu", slurm_requeue=False, slurm_signal_seconds=60))
    assert "gpus-per-node" not in text
    assert "--no-requeue" in text
    assert "--signal=B:USR2@60" in text


def test_a_script_by_hand_brings_its_job(tmp_path: Path) -> None:
    """The shell itself takes it apart, down to the warden that would start."""
    bash = shutil.which("bash")
    assert bash is not None
    asked = spec(name="it", trigger_word="it's $HOME", slurm_setup=["python() { echo $*; }"])
    script = script_by_hand(asked).replace("exec python", "python")
    done = subprocess.run(
        [bash, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "-m jobs.backends.slurm.warden it-by-hand\n"
    values, _ = read_mapping(tmp_path / "it-by-hand" / "job.yaml")
    assert JobSpec(**values) == asked


def test_ranks_may_run_in_a_container() -> None:
    command = srun_command(
        spec(slurm_srun_args="--container-image=a.sqsh"),
        RunDir(Path("/runs/1-t")),
        {"FSDP_TUI_PYTHON": "apptainer exec 'my image.sif' python"},
    )
    assert command[-8:] == [
        "--container-image=a.sqsh",
        *("apptainer", "exec", "my image.sif", "python"),
        *("-m", "jobs.backends.slurm.task", "/runs/1-t"),
    ]
    assert "--unbuffered" not in command, "ranks with a terminal write no log"


def test_the_signal_comes_early_enough_for_the_longest_save(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    assert signal_seconds(run_dir) == 300
    run_dir.events.write_text(
        '{"t": 1, "kind": "checkpoint", "step": 1, "seconds": 400.5}\n'
        '{"t": 2, "kind": "checkpoint", "step": 2, "seconds": 9}\n{"kind": "checkpoint'
    )
    assert signal_seconds(run_dir) == 861


@pytest.mark.parametrize(
    ("changes", "room", "strategy"),
    [
        ({}, None, "hsdp"),
        ({"fsdp_enable": True}, None, "hsdp"),
        ({"num_processes": 2}, None, "fsdp2"),
        ({}, Room(12 * 10**9, 80 * GIB), "ddp"),
        ({}, Room(32 * 10**9, 24 * GIB), "hsdp"),
        ({}, Room(90 * 10**9, 24 * GIB), "fsdp2"),
        ({"num_machines": 1}, Room(32 * 10**9, 24 * GIB), "fsdp2"),
    ],
)
def test_auto_gives_each_machine_a_replica_where_it_fits(
    changes: dict[str, Any], room: Room | None, strategy: str
) -> None:
    job = spec(mixed_precision="bf16", **changes)
    assert chosen_strategy(job, room)[0] == strategy
    assert replicas_of(job, strategy) == (2 if strategy == "hsdp" else 1)


def test_hsdp_needs_no_number_of_replicas_over_machines() -> None:
    assert replicas_of(spec(strategy="hsdp")) == 2
    assert replicas_of(spec(strategy="hsdp", dp_replicate_size=4)) == 4
    with pytest.raises(SpecError, match="leaves nothing to shard"):
        spec(strategy="hsdp", num_processes=2)


def test_how_ranks_ended_by_what_srun_says(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.create()
    run_dir.launcher_log.write_text(
        "srun: error: n2: tasks 2-3: Exited with exit code 1\n"
        "srun: error: n1: task 1: Killed\n"
        "srun: error: n1: task 0: Segmentation fault (core dumped)\n"
        "srun: error: n1: task 1: Exited with exit code 9\n"
    )
    assert rank_exits(run_dir) == [
        RankExit(1, -9),
        RankExit(0, -11),
        RankExit(2, 1),
        RankExit(3, 1),
    ]
    run_dir.launcher_log.write_text("srun: error: n1: task 1: Out Of Memory\n")
    assert rank_exits(run_dir) == [RankExit(1, -9)]
