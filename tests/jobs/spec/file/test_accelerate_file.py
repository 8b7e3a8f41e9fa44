"""A job laid over an accelerate config: what fills in, is told, is refused, and stays."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from jobs import launch
from jobs.errors import SpecError
from jobs.run.rundir import RunDir
from jobs.spec.file.accelerate_file import merge_config
from jobs.spec.file.load import dump_spec, load_spec

if TYPE_CHECKING:
    from pathlib import Path

GOOD = {"pretrained_model_name_or_path": "m", "dataset": "d"}

# As `accelerate config` of version 1.15 writes it after "multi-GPU, FSDP, version 2, bf16".
FSDP2 = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: true
fsdp_config:
  fsdp_activation_checkpointing: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: FluxTransformerBlock,FluxSingleTransformerBlock
  fsdp_version: 2
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
# An older one, of FSDP v1.
FSDP1 = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_min_num_params: 1000000
  fsdp_offload_params: true
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_use_orig_params: true
gpu_ids: 0,1,2,3
mixed_precision: fp16
num_machines: 1
num_processes: 2
main_process_port: 29511
"""


def read(config: Any, **values: Any) -> tuple[dict[str, Any], list[str]]:
    data = yaml.safe_load(config) if isinstance(config, str) else config
    return merge_config(values, data, "acc.yaml")


def refusal(config: Any, **values: Any) -> str:
    with pytest.raises(SpecError) as caught:
        read(config, **values)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_file_fills_in_what_the_job_leaves_out(tmp_path: Path) -> None:
    path = tmp_path / "acc.yaml"
    path.write_text(FSDP2)
    notes: list[str] = []
    spec = load_spec(None, GOOD | {"accelerate_config": str(path)}, on_note=notes.append)
    assert notes == []
    assert (spec.num_processes, spec.mixed_precision, spec.fsdp_enable) == (2, "bf16", True)
    assert spec.fsdp_transformer_layer_cls_to_wrap == [
        "FluxTransformerBlock",
        "FluxSingleTransformerBlock",
    ]
    assert spec.fsdp_cpu_offload is False


def test_what_has_no_key_goes_into_the_launch(tmp_path: Path) -> None:
    path = tmp_path / "acc.yaml"
    path.write_text(FSDP2)
    spec = load_spec(None, GOOD | {"accelerate_config": str(path)})
    path.unlink()  # it is not needed again
    again = tmp_path / "job.yaml"
    again.write_text(dump_spec(spec))
    assert load_spec(again) == spec
    config = launch.build_launch(spec, RunDir(tmp_path), gpus=["GPU-a", "GPU-b"], run_id="r").config
    theirs = yaml.safe_load(FSDP2)
    for key in theirs.keys() - {"fsdp_config"}:
        assert config[key] == theirs[key], key
    assert config["fsdp_config"].items() >= (
        theirs["fsdp_config"].items() - {("fsdp_cpu_ram_efficient_loading", True)}
    )


def test_old_fsdp_is_translated_and_told() -> None:
    values, notes = read(FSDP1)
    assert values == {
        "fsdp_enable": True,
        "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
        "fsdp_backward_prefetch": 0,
        "fsdp_min_num_params": 1_000_000,
        "fsdp_cpu_offload": True,
        "fsdp_reshard_after_forward": False,
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "mixed_precision": "fp16",
        "num_machines": 1,
        "main_process_port": 29511,
        "gpus": [0, 1],  # of more GPUs than processes, the first
    }
    told = "\n".join(notes)
    assert "SHARD_GRAD_OP is read as fsdp_reshard_after_forward: false" in told
    assert "BACKWARD_PRE is read as fsdp_backward_prefetch: 0" in told
    assert "fsdp_use_orig_params: true has no effect" in told
    assert len(notes) == 3


def test_the_job_counts_and_each_conflict_is_told() -> None:
    values, notes = read(
        FSDP2,
        mixed_precision="fp16",
        num_processes=4,
        fsdp_state_dict_type="full",
        fsdp_reshard_after_forward=True,
    )
    assert (values["mixed_precision"], values["num_processes"]) == ("fp16", 4)
    assert values["fsdp_state_dict_type"] == "full"
    assert sorted(notes) == [
        "accelerate_config: acc.yaml says fsdp_state_dict_type: SHARDED_STATE_DICT; "
        "the job's full is used",
        "accelerate_config: acc.yaml says mixed_precision: bf16; the job's fp16 is used",
        "accelerate_config: acc.yaml says num_processes: 2; the job's num_processes: 4 is used",
    ]


@pytest.mark.parametrize(
    ("config", "job", "has", "told"),
    [
        ({"num_processes": 2}, {"gpus": [3, 4]}, {"gpus": [3, 4]}, []),
        ({"num_processes": 4}, {"gpus": 2}, {"gpus": 2}, ["the job's gpus: 2 is used"]),
        ({"gpu_ids": "0,1"}, {"num_processes": 2}, {"num_processes": 2}, ["says gpus: 0,1"]),
        ({"gpu_ids": "all", "num_processes": 2}, {}, {"num_processes": 2}, []),
        ({"gpu_ids": 3, "num_processes": 1}, {}, {"gpus": [3]}, []),
        ({"use_cpu": True}, {}, {"device": "cpu"}, []),
        ({"distributed_type": "MULTI_CPU"}, {}, {"device": "cpu"}, []),
        ({"use_cpu": True}, {"gpus": 2}, {"gpus": 2}, ["says device: cpu"]),
        ({"distributed_type": "MULTI_GPU"}, {}, {}, []),
        (
            {"distributed_type": "FSDP"},
            {"strategy": "ddp"},
            {"strategy": "ddp"},
            ["is for FSDP; the job's strategy: ddp is used"],
        ),
        ({"distributed_type": "FSDP"}, {"strategy": "fsdp2"}, {"strategy": "fsdp2"}, []),
        ({"distributed_type": "DistributedType.FSDP"}, {}, {"fsdp_enable": True}, []),
        (
            {"dynamo_config": {"dynamo_backend": "INDUCTOR"}},
            {},
            {"torch_compile": True, "torch_compile_backend": "inductor"},
            [],
        ),
        ({"dynamo_backend": "NO"}, {}, {}, []),
        (
            {"dynamo_config": {"dynamo_backend": "EAGER"}},
            {"torch_compile": False},
            {"torch_compile": False, "torch_compile_backend": "eager"},
            ["says torch_compile: True"],
        ),
        (
            {"dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_mode": "max-autotune"}},
            {},
            {
                "torch_compile": True,
                "torch_compile_backend": "inductor",
                "accelerate_config": {"dynamo_config": {"dynamo_mode": "max-autotune"}},
            },
            ["dynamo_mode: max-autotune has no effect"],
        ),
        (
            {
                "parallelism_config": {
                    "parallelism_config_cp_size": 2,
                    "parallelism_config_cp_comm_strategy": "alltoall",
                    "parallelism_config_tp_size": 1,
                }
            },
            {},
            {"context_parallel_size": 2, "context_parallel_comm_strategy": "alltoall"},
            [],
        ),
        (
            {"parallelism_config": {"dp_replicate_size": 2}},
            {},
            {"dp_replicate_size": 2, "strategy": "hsdp"},
            [],
        ),
        (
            {"fsdp_config": {"version": 2, "reshard_after_forward": False}},
            {},
            {"fsdp_version": 2, "fsdp_reshard_after_forward": False},
            [],
        ),
        ({"fsdp_config": {}, "deepspeed_config": {}, "megatron_lm_config": {}}, {}, {}, []),
        ({"main_process_ip": None, "mixed_precision": False}, {}, {"mixed_precision": False}, []),
        (
            {"quantum_backend": 3},
            {},
            {"accelerate_config": {"quantum_backend": 3}},
            ['"quantum_backend" is passed to accelerate unchanged'],
        ),
    ],
)
def test_settings_one_by_one(
    config: dict[str, Any], job: dict[str, Any], has: dict[str, Any], told: list[str]
) -> None:
    values, notes = read(config, **job)
    assert values == has
    assert len(notes) == len(told)
    for note, said in zip(notes, told, strict=True):
        assert said in note


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"distributed_type": "DEEPSPEED"}, "FSDP and DeepSpeed cannot be enabled simultaneously"),
        ({"deepspeed_config": {"zero_stage": 3}}, "DeepSpeed is not supported"),
        ({"distributed_type": "MEGATRON_LM"}, "Megatron-LM is not supported"),
        ({"megatron_lm_config": {"tp": 2}}, "Megatron-LM is not supported"),
        ({"distributed_type": "XLA"}, "the file is for TPUs"),
        ({"distributed_type": "MULTI_NPU"}, "MULTI_NPU, and jobs run on NVIDIA GPUs"),
        ({"compute_environment": "AMAZON_SAGEMAKER"}, "is for AMAZON_SAGEMAKER"),
        ({"mpirun_config": {"mpirun_hostfile": "h"}}, "not mpirun"),
        ({"fp8_config": {"backend": "TE"}}, "fp8 is not supported"),
        ({"mixed_precision": "fp8"}, 'mixed_precision: "fp8" is not one of no, bf16, fp16'),
        ({"num_procesess": 2}, 'unknown key "num_procesess" (did you mean "num_processes"?)'),
        ({"num_processes": "many"}, "acc.yaml: num_processes: expected a whole number"),
        ({"fsdp_config": {"fsdp_sharding_strategy": "FULL"}}, '"FULL" is not one of FULL_SHARD'),
        ({"fsdp_config": {"fsdp_min_num_param": 3}}, '(did you mean "fsdp_min_num_params"?)'),
        ({"fsdp_config": [1]}, "fsdp_config should be a mapping"),
        ({"fsdp_config": {"activation_checkpointing_offload": True}}, "offload is not supported"),
        ({"parallelism_config": {"tp_size": 2}}, "only context_parallel_size is supported"),
        ({"use_cpu": "perhaps"}, "use_cpu"),
    ],
)
def test_what_is_not_run_here_is_refused(config: dict[str, Any], said: str) -> None:
    assert said in refusal(config)
    assert refusal(config).startswith("accelerate_config: acc.yaml")


def test_values_that_no_flag_could_carry_are_refused(tmp_path: Path) -> None:
    (tmp_path / "acc.yaml").write_text("tpu_name: !!binary gA==\n")
    with pytest.raises(SpecError, match="not a mapping of plain values"):
        load_spec(None, GOOD | {"accelerate_config": str(tmp_path / "acc.yaml")})


def test_several_machines_are_refused_in_the_same_words(tmp_path: Path) -> None:
    path = tmp_path / "acc.yaml"
    path.write_text("distributed_type: FSDP\nnum_machines: 2\nnum_processes: 4\n")
    with pytest.raises(SpecError, match="num_machines: 2 is not supported"):
        load_spec(None, GOOD | {"accelerate_config": str(path)})


def test_a_file_is_found_beside_the_job_and_may_be_json(tmp_path: Path) -> None:
    (tmp_path / "acc.json").write_text(json.dumps({"num_processes": 3}, indent="\t"))
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump(GOOD | {"accelerate_config": "acc.json"}))
    assert load_spec(job).num_processes == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [", "is not valid YAML"),
        ("- 1", "expected `key: value` lines"),
        ("num_processes: 1\nnum-processes: 2", "set twice"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "acc.yaml").write_text(text)
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump(GOOD | {"accelerate_config": "acc.yaml"}))
    with pytest.raises(SpecError) as caught:
        load_spec(job)
    assert str(caught.value).startswith(f"{job}: line 1: accelerate_config: ")
    assert said in str(caught.value)
