"""What `jobs.launch` hands to accelerate, read by accelerate itself, which needs torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import yaml
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser

from jobs.launch import build_launch
from jobs.run.rundir import RunDir
from jobs.spec.file import accelerate_file
from jobs.spec.job_spec import JobSpec
from jobs.spec.rules import launch_conflicts

if TYPE_CHECKING:
    from pathlib import Path


def test_accelerate_takes_every_flag_and_the_config(tmp_path: Path) -> None:
    """Its own parsers are asked, so that a version with other names is noticed."""
    spec = JobSpec(
        pretrained_model_name_or_path="m",
        dataset="d",
        num_processes=2,
        fsdp_auto_wrap_policy="size",
        main_process_ip="::1",
        accelerate_extra_args="--tee 3 --debug --num_cpu_threads_per_process=5",
        accelerate_config={"rdzv_backend": "static", "same_network": True},
    )
    launch = build_launch(spec, RunDir(tmp_path), gpus=["GPU-a", "GPU-b"], run_id="r1")
    read = launch_command_parser().parse_args(launch.command[launch.command.index("launch") + 1 :])
    assert (read.tee, read.debug, read.num_cpu_threads_per_process) == ("3", True, 5)
    assert (read.fsdp_auto_wrap_policy, read.training_script) == ("SIZE_BASED_WRAP", "engine")
    assert sum("num_cpu_threads" in word for word in launch.command) == 1
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(launch.config))
    config = ClusterConfig.from_yaml_file(str(tmp_path / "a.yaml"))
    assert (config.same_network, config.main_process_ip) == (True, "::1")
    parser = {action.dest for action in launch_command_parser()._actions}
    assert {*launch_conflicts.SWITCHES, *launch_conflicts.WITH_VALUE} <= parser
    known = set(ClusterConfig.__dataclass_fields__) - set(accelerate_file.FOREIGN)
    ours = {*accelerate_file.SAME, *accelerate_file.READ, *accelerate_file.REST}
    assert known <= ours, "accelerate has learnt something new"
