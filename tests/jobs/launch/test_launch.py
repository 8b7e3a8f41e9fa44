"""The command line and environment that start a job's ranks."""

from __future__ import annotations

import py_compile
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from jobs.launch import (
    ALLOCATOR_VARIABLES,
    HOST_ALLOCATOR,
    Launch,
    build_launch,
    full_environment,
    versions,
)
from jobs.machine import bytecode
from jobs.machine.processes import RUN_ID_VARIABLE
from jobs.run.rundir import RunDir
from jobs.spec.job_spec import JobSpec

if TYPE_CHECKING:
    from collections.abc import Iterator


def build(tmp_path: Path, gpus: list[str] | None = None, **values: Any) -> Launch:
    paths = {"pretrained_model_name_or_path": "m", "dataset": "d"}
    spec = JobSpec.model_validate(paths | values)
    return build_launch(spec, RunDir(tmp_path), gpus=gpus or [], run_id="r1")


def flags(launch: Launch) -> dict[str, str]:
    words = launch.command[launch.command.index("launch") + 1 : -3]
    assert all(word.startswith("--") for word in words)
    return {key: value for key, _, value in (word[2:].partition("=") for word in words)}


def test_two_sharded_ranks_on_the_cpu(tmp_path: Path) -> None:
    launch = build(tmp_path, num_processes=2, strategy="fsdp2", mixed_precision="no")
    given = flags(launch)
    assert launch.command[-3:] == ["-m", "engine", str(tmp_path)]
    assert given["num_processes"] == "2"
    assert given["main_process_port"] == "0", "any free port: two jobs may start at once"
    assert given["mixed_precision"] == "no"
    assert given["fsdp_version"] == "2"
    assert "use_fsdp" in given
    assert "gpu_ids" not in given
    assert launch.environment["ACCELERATE_USE_CPU"] == "true"
    assert launch.environment["CUDA_VISIBLE_DEVICES"] == ""
    assert launch.environment[RUN_ID_VARIABLE] == "r1"


def test_gpus_are_chosen_by_uuid(tmp_path: Path) -> None:
    launch = build(tmp_path, ["GPU-b", "GPU-a"], num_processes=2)
    assert flags(launch)["gpu_ids"] == "GPU-b,GPU-a"
    assert launch.environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert "ACCELERATE_USE_CPU" not in launch.environment


@pytest.mark.parametrize(
    ("values", "fsdp", "multi"),
    [
        ({}, False, False),
        ({"num_processes": 2, "strategy": "ddp"}, False, True),
        ({"num_processes": 2}, True, False),
    ],
)
def test_the_strategy_decides_what_accelerate_is_told(
    tmp_path: Path, values: dict[str, Any], fsdp: bool, multi: bool
) -> None:
    given = flags(build(tmp_path, **values))
    assert ("use_fsdp" in given, "multi_gpu" in given) == (fsdp, multi)


def test_what_the_person_says_of_fsdp_is_handed_on(tmp_path: Path) -> None:
    given = flags(
        build(
            tmp_path,
            num_processes=2,
            fsdp_reshard_after_forward=False,
            fsdp_transformer_layer_cls_to_wrap="A,B",
        )
    )
    assert given["fsdp_reshard_after_forward"] == "false"
    assert given["fsdp_transformer_layer_cls_to_wrap"] == "A,B"
    sized = flags(
        build(
            tmp_path,
            num_processes=2,
            fsdp_auto_wrap_policy="size_based",
            fsdp_min_num_params=77,
        )
    )
    assert sized["fsdp_auto_wrap_policy"] == "SIZE_BASED_WRAP"
    assert sized["fsdp_min_num_params"] == "77"
    assert "fsdp_transformer_layer_cls_to_wrap" not in sized


def test_elastic_waits_as_long_as_the_person_does(tmp_path: Path) -> None:
    """Else it kills ranks thirty seconds after SIGTERM, in the middle of a save."""
    launch = build(tmp_path, stop_grace_seconds=1234.5)
    assert launch.environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "1234"


def test_nothing_of_another_launch_is_inherited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = {
        "RANK": "3",
        "WORLD_SIZE": "8",
        "MASTER_PORT": "1",
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "1",
        "TORCHELASTIC_RUN_ID": "x",
        "CUDA_VISIBLE_DEVICES": "7",
    }
    for name, value in others.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("FSDP_TUI_HOME", "/somewhere")
    monkeypatch.setenv("KEPT", "yes")
    environment = full_environment(build(tmp_path))
    assert not environment.keys() & (others.keys() - {"CUDA_VISIBLE_DEVICES"})
    assert environment["CUDA_VISIBLE_DEVICES"] == "", "our choice, not the inherited one"
    assert environment["FSDP_TUI_HOME"] == "/somewhere"
    assert environment["KEPT"] == "yes"
    assert environment["PYTHONSAFEPATH"] == "1"


def test_the_config_file_overrules_the_persons_default(tmp_path: Path) -> None:
    assert build(tmp_path, num_processes=2).config["use_cpu"] is True
    on_gpus = build(tmp_path, ["GPU-a", "GPU-b"], num_processes=2).config
    assert (on_gpus["use_cpu"], on_gpus["num_processes"]) == (False, 2)
    assert on_gpus["gpu_ids"] == "GPU-a,GPU-b"


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({}, "NO"),
        ({"num_processes": 2, "strategy": "ddp"}, "MULTI_GPU"),
        ({"num_processes": 2}, "FSDP"),
        ({"num_processes": 4, "strategy": "hsdp", "dp_replicate_size": 2}, "FSDP"),
    ],
)
def test_the_config_file_alone_says_what_the_flags_say(
    tmp_path: Path, values: dict[str, Any], kind: str
) -> None:
    launch = build(tmp_path, **values, main_process_port=29511, mixed_precision="no")
    given, config = flags(launch), launch.config
    assert config["distributed_type"] == kind
    for key in ("num_processes", "num_machines", "machine_rank", "main_process_port"):
        assert str(config[key]) == given[key]
    assert config["mixed_precision"] == given["mixed_precision"] == "no"
    assert ("fsdp_config" in config) == ("use_fsdp" in given)
    for key, value in config.get("fsdp_config", {}).items():
        assert given[key] == str(value).lower() or given[key] == value


def test_a_callable_policy_is_the_engines_business(tmp_path: Path) -> None:
    given = flags(build(tmp_path, num_processes=2, fsdp_auto_wrap_policy="mine.policy"))
    assert given["fsdp_auto_wrap_policy"] == "NO_WRAP"


def test_the_versions_of_what_decides_the_numbers_are_recorded() -> None:
    assert {"python", "torch", "accelerate", "diffusers", "peft"} <= set(versions())


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a package without byte code, which stands for what ranks import."""
    file = tmp_path / "site" / "made_up_package" / "__init__.py"
    file.parent.mkdir(parents=True)
    file.write_text("x = 1\n")
    monkeypatch.syspath_prepend(file.parents[1])
    monkeypatch.setattr(bytecode, "_PACKAGES", [file.parent.name, "one_that_is_not_installed"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in bytecode.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    return file


def import_as_a_rank(package: Path, launch: Launch) -> str:
    """Import the package with a launch's environment; where its byte code is."""
    script = f"import {package.parent.name} as found; print(found.__cached__)"
    environment = full_environment(launch) | {"PYTHONPATH": str(package.parents[1])}
    done = subprocess.run(
        [sys.executable, "-S", "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_byte_code_that_python_keeps_is_left_to_it(package: Path, tmp_path: Path) -> None:
    launch = build(tmp_path)
    assert not launch.environment.keys() & set(bytecode.VARIABLES)
    assert Path(import_as_a_rank(package, launch)).parent == package.parent / "__pycache__"


@pytest.mark.parametrize("obstacle", ["variable", "read-only"])
def test_byte_code_that_python_would_not_keep_is_kept_in_our_cache(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, obstacle: str
) -> None:
    beside = package.parent / "__pycache__"
    if obstacle == "variable":
        monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    else:  # a file, since everything is writable for root
        beside.touch()
    kept = Path(import_as_a_rank(package, build(tmp_path)))
    assert kept.is_relative_to(tmp_path / "cache" / "fsdp-tui" / "bytecode")
    assert kept.is_file()
    assert beside.exists() == (obstacle == "read-only"), "nothing is written beside the source"


def test_byte_code_that_is_there_is_read_whatever_the_variable_says(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = py_compile.compile(str(package))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    launch = build(tmp_path)
    assert "PYTHONPYCACHEPREFIX" not in launch.environment
    assert import_as_a_rank(package, launch) == compiled


def test_a_place_for_byte_code_that_the_person_chose_stays(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = tmp_path / "chosen"
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(chosen))
    monkeypatch.setattr(sys, "pycache_prefix", str(chosen))  # as Python does when it starts
    (package.parent / "__pycache__").touch()
    kept = Path(import_as_a_rank(package, build(tmp_path)))
    assert kept.is_relative_to(chosen)
    assert kept.is_file()


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_a_persons_own_allocator_options_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for one in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(one, raising=False)
    launch = build(tmp_path, ["GPU-a"])
    assert launch.environment["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.setenv(name, "max_split_size_mb:128")
    assert not build(tmp_path, ["GPU-a"]).environment.keys() & ALLOCATOR_VARIABLES


@pytest.mark.parametrize(
    ("gpus", "values", "host"),
    [
        (0, {"num_processes": 2}, True),
        (0, {}, True),
        (1, {}, False),
        (2, {"strategy": "fsdp2"}, False),
        (2, {"strategy": "fsdp2", "fsdp_cpu_offload": True}, True),
        (1, {"swap_blocks": 4}, True),
        (2, {"strategy": "ddp", "swap_blocks": 4}, True),
        (2, {"strategy": "fsdp2", "swap_blocks": 4}, False),
        (1, {"model_type": "full", "swap_blocks": 4}, False),
    ],
)
def test_ranks_with_weights_in_host_memory_give_freed_blocks_back(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    values: dict[str, Any],
    host: bool,
) -> None:
    for name in HOST_ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    values = {"num_processes": max(1, gpus)} | values
    there = [f"GPU-{number}" for number in range(gpus)]
    given = build(tmp_path, there, **values).environment
    assert (
        HOST_ALLOCATOR.items() <= given.items()
        if host
        else (not HOST_ALLOCATOR.keys() & given.keys())
    )
    for name in HOST_ALLOCATOR:  # a person's own choice stays
        monkeypatch.setenv(name, "mine")
        assert name not in build(tmp_path, there, **values).environment


def test_torch_writes_what_it_remembers_of_collectives_into_the_run_directory(
    tmp_path: Path,
) -> None:
    given = build(tmp_path, ["GPU-a", "GPU-b"], num_processes=2).environment
    assert given["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "logs" / "flight_")
    assert int(given["TORCH_FR_BUFFER_SIZE"]) > 0
    assert given["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "true"
