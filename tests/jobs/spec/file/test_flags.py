"""What flags mean, and what is said of those that mean nothing: a table. And back to flags."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import example, given, settings
from pydantic import ValidationError

from jobs import service
from jobs.errors import SpecError
from jobs.queue.states import State
from jobs.service.plan import plan_resume
from jobs.spec.file.flags import parse_flags, to_flags
from jobs.spec.file.load import dump_spec, load_spec
from jobs.spec.job_spec import JobSpec, field_names
from jobs.spec.rules.warnings import find_warnings
from tests.support.jobs.checkpoints import save_checkpoint
from tests.support.jobs.spec_strategies import REQUIRED, VALUES
from tests.support.tui.driven_app import form
from tests.support.tui.pilot import until
from tui.cli.commands import cli
from tui.form import draft

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from jobs.queue.store import Store

BASE = ["--pretrained_model_name_or_path=m", "--dataset=d"]
FULL, SHARDED = "FULL_STATE_DICT", "SHARDED_STATE_DICT"
BY_CLASS, BY_SIZE, NOTHING = "TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"
CLASSES = "fsdp_transformer_layer_cls_to_wrap"
POLICY, PREFETCH = "fsdp_auto_wrap_policy", "fsdp_backward_prefetch"
RESHARD, STATE_DICT = "fsdp_reshard_after_forward", "fsdp_state_dict_type"
PARALLEL = "context_parallel_comm_strategy"


def read(line: str, told: Callable[[str], None] = lambda note: None) -> JobSpec:
    """The job of a command line, as a shell splits it."""
    values, others = parse_flags([*BASE, *shlex.split(line)])
    assert others == []
    return load_spec(None, values, on_note=told)


def complaint(line: str) -> str:
    with pytest.raises(SpecError) as caught:
        read(line)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("flags: ")
    return text


# A command line, the key it sets, and to what.
UNDERSTOOD: list[tuple[str, str, Any]] = [
    # keys: hyphens, underscores, dots, any case, with and without an equals sign
    ("--fsdp_state_dict_type=FULL_STATE_DICT", STATE_DICT, FULL),
    ("--fsdp-state-dict-type=full_state_dict", STATE_DICT, FULL),
    ("--FSDP_STATE_DICT_TYPE=full", STATE_DICT, FULL),
    ("--Fsdp-State_Dict-Type FULL", STATE_DICT, FULL),
    ("--fsdp.state.dict.type=Full", STATE_DICT, FULL),
    ("--fsdp_state_dict_type=full-state-dict", STATE_DICT, FULL),
    ("--fsdp_state_dict_type='full state dict'", STATE_DICT, FULL),
    ("--fsdp_state_dict_type='\"FULL_STATE_DICT\"'", STATE_DICT, FULL),
    ("--fsdp_state_dict_type=StateDictType.FULL_STATE_DICT", STATE_DICT, FULL),
    ("--fsdp_state_dict_type=sharded", STATE_DICT, SHARDED),
    ("--fsdp_state_dict_type=Sharded-State-Dict", STATE_DICT, SHARDED),
    ("--fsdp_state_dict_type=' sharded '", STATE_DICT, SHARDED),
    # switches
    ("--fsdp_enable --num_processes=2", "fsdp_enable", True),
    ("--fsdp-enable --num-processes 2", "fsdp_enable", True),
    ("--fsdp_enable=true --num_processes=2", "fsdp_enable", True),
    ("--fsdp_enable=1 --num_processes=2", "fsdp_enable", True),
    ("--fsdp_enable yes --num_processes=2", "fsdp_enable", True),
    ("--fsdp_enable=ON --num_processes=2", "fsdp_enable", True),
    ("--fsdp_enable=Y --num_processes=2", "fsdp_enable", True),
    ("--fsdp_enable='\"True\"' --num_processes=2", "fsdp_enable", True),
    ("--fsdp_enable=false", "fsdp_enable", False),
    ("--fsdp_enable=0", "fsdp_enable", False),
    ("--fsdp_enable no", "fsdp_enable", False),
    ("--fsdp_enable=Off", "fsdp_enable", False),
    ("--no-fsdp-enable", "fsdp_enable", False),
    ("--no_fsdp_enable", "fsdp_enable", False),
    ("--fsdp_enable=None", "fsdp_enable", None),
    ("--fsdp_enable none", "fsdp_enable", None),
    ("--fsdp_enable=null", "fsdp_enable", None),
    ("--fsdp_enable=", "fsdp_enable", None),
    ("--gradient_checkpointing", "gradient_checkpointing", True),
    ("--gradient-checkpointing=t", "gradient_checkpointing", True),
    ("--gradient_checkpointing f", "gradient_checkpointing", False),
    ("--no-gradient-checkpointing", "gradient_checkpointing", False),
    ("--gradient_checkpointing --seed=3", "gradient_checkpointing", True),
    ("--fsdp_activation_checkpointing=1 --num_processes=2", "fsdp_activation_checkpointing", True),
    ("--fsdp_cpu_offload --num_processes=2", "fsdp_cpu_offload", True),
    ("--fsdp_cpu_offload=no", "fsdp_cpu_offload", False),
    ("--fsdp_limit_all_gathers", "fsdp_limit_all_gathers", True),
    ("--fsdp-limit-all-gathers=False", "fsdp_limit_all_gathers", False),
    ("--fsdp_cpu_ram_efficient_loading", "fsdp_cpu_ram_efficient_loading", True),
    ("--fsdp_cpu_ram_efficient_loading=off", "fsdp_cpu_ram_efficient_loading", False),
    ("--cache_text_embeddings=None", "cache_text_embeddings", None),
    ("--auto_resume", "auto_resume", True),
    # FSDP
    ("--fsdp_version=2", "fsdp_version", 2),
    ("--fsdp_version=1", "fsdp_version", 1),
    ("--fsdp_version=v2", "fsdp_version", 2),
    ("--fsdp_version FSDP2", "fsdp_version", 2),
    ("--fsdp_version='\"2\"'", "fsdp_version", 2),
    (f"--{RESHARD}", RESHARD, True),
    (f"--{RESHARD}=true", RESHARD, True),
    (f"--{RESHARD}=1", RESHARD, True),
    (f"--{RESHARD}=no", RESHARD, False),
    (f"--{RESHARD}=0", RESHARD, False),
    (f"--{RESHARD}=2 --num_processes=4", RESHARD, 2),
    (f"--{RESHARD} 2 --num_processes=4", RESHARD, 2),
    (f"--{RESHARD}='\"2\"' --num_processes=4", RESHARD, 2),
    (f"--no-{RESHARD.replace('_', '-')}", RESHARD, False),
    (f"--{POLICY}=TRANSFORMER_BASED_WRAP", POLICY, BY_CLASS),
    (f"--{POLICY}=transformer_based_wrap", POLICY, BY_CLASS),
    (f"--{POLICY}=transformer-based", POLICY, BY_CLASS),
    (f"--{POLICY}=Transformer", POLICY, BY_CLASS),
    (f"--{POLICY}=SIZE_BASED_WRAP", POLICY, BY_SIZE),
    (f"--{POLICY}=size", POLICY, BY_SIZE),
    (f"--{POLICY}='size based'", POLICY, BY_SIZE),
    (f"--{POLICY}=no", POLICY, NOTHING),
    (f"--{POLICY}=no-wrap", POLICY, NOTHING),
    (f"--{POLICY}=mine.policies.big_ones", POLICY, "mine.policies.big_ones"),
    (f"--{POLICY}=mine.policies:big_ones", POLICY, "mine.policies.big_ones"),
    (f"--{POLICY}='\"mine.policy\"'", POLICY, "mine.policy"),
    (f"--{CLASSES}=A", CLASSES, ["A"]),
    (f"--{CLASSES}=A,B", CLASSES, ["A", "B"]),
    (f"--{CLASSES}='A, B'", CLASSES, ["A", "B"]),
    (f'--{CLASSES}=\'"A", "B"\'', CLASSES, ["A", "B"]),
    (f"--{CLASSES}='\"A,B\"'", CLASSES, ["A", "B"]),
    (f'--{CLASSES}=\'["A", "B"]\'', CLASSES, ["A", "B"]),
    (f"--{CLASSES}='[A, B]'", CLASSES, ["A", "B"]),
    (f"--{CLASSES}=A --{CLASSES}=B", CLASSES, ["A", "B"]),
    (f"--{CLASSES} A,B --{CLASSES.replace('_', '-')} C", CLASSES, ["A", "B", "C"]),
    (f"--{CLASSES}='[\"A\"]' --{CLASSES}=B,C", CLASSES, ["A", "B", "C"]),
    (f"--{CLASSES}=None", CLASSES, None),
    (f"--{CLASSES}=", CLASSES, None),
    ("--fsdp_min_num_params=1_000_000", "fsdp_min_num_params", 1_000_000),
    ("--fsdp_forward_prefetch=2", "fsdp_forward_prefetch", 2),
    ("--fsdp_forward_prefetch=off", "fsdp_forward_prefetch", 0),
    (f"--{PREFETCH}=1", PREFETCH, 1),
    (f"--{PREFETCH}=0", PREFETCH, 0),
    # old words; what is told of them has a table of its own
    ("--fsdp_sharding_strategy=FULL_SHARD", RESHARD, True),
    ("--fsdp_sharding_strategy=shard-grad-op", RESHARD, False),
    ("--fsdp_sharding_strategy=2", RESHARD, False),
    ("--fsdp_sharding_strategy=NO_SHARD --num_processes=2", "strategy", "ddp"),
    ("--fsdp_sharding_strategy=NO_SHARD --fsdp_enable --num_processes=2", "fsdp_enable", None),
    (
        "--fsdp_sharding_strategy=HYBRID_SHARD --dp_replicate_size=2 --num_processes=4",
        "strategy",
        "hsdp",
    ),
    (
        "--fsdp_sharding_strategy=_HYBRID_SHARD_ZERO2 --dp_replicate_size=2 --num_processes=4",
        RESHARD,
        False,
    ),
    (f"--{RESHARD}=SHARD_GRAD_OP", RESHARD, False),
    (f"--{RESHARD}=FULL_SHARD", RESHARD, True),
    ("--fsdp_offload_params=true --num_processes=2", "fsdp_cpu_offload", True),
    ("--use_fsdp --num_processes=2", "fsdp_enable", True),
    (f"--{PREFETCH}=BACKWARD_PRE", PREFETCH, 0),
    (f"--{PREFETCH}=backward_post", PREFETCH, 0),
    (f"--{PREFETCH}=no-prefetch", PREFETCH, 0),
    ("--fsdp_backward_prefetch_policy=BACKWARD_PRE", PREFETCH, 0),
    ("--fsdp_forward_prefetch=true", "fsdp_forward_prefetch", 1),
    ("--fsdp_use_orig_params=true", "fsdp_enable", None),
    ("--gpu_ids=0,1", "gpus", [0, 1]),
    # devices and the launch
    ("--gpus=2", "gpus", 2),
    ("--gpus 2", "gpus", 2),
    ("--gpus='\"2\"'", "gpus", 2),
    ("--gpus=0,1", "gpus", [0, 1]),
    ("--gpus='0, 1'", "gpus", [0, 1]),
    ("--gpus='\"0,1\"'", "gpus", [0, 1]),
    ("--gpus='[0, 1]'", "gpus", [0, 1]),
    ("--gpus='[\"0\", 1]'", "gpus", [0, 1]),
    ("--gpus=0 --gpus=1", "gpus", [0, 1]),
    ("--gpus=0,1 --gpus 2", "gpus", [0, 1, 2]),
    ("--gpus=3,", "gpus", [3]),
    ("--gpus=cuda:0,cuda:1", "gpus", [0, 1]),
    ("--gpus=GPU-ab,GPU-cd", "gpus", ["GPU-ab", "GPU-cd"]),
    ("--gpus=none", "gpus", None),
    ("--num_processes=4", "num_processes", 4),
    ("--num-processes='\"4\"'", "num_processes", 4),
    ("--num_processes=None", "num_processes", None),
    ("--num_machines=1", "num_machines", 1),
    ("--machine_rank=0", "machine_rank", 0),
    ("--main_process_ip=10.0.0.1", "main_process_ip", "10.0.0.1"),
    ("--main_process_ip=None", "main_process_ip", None),
    ("--main-process-port=29500", "main_process_port", 29500),
    ("--main_process_port=null", "main_process_port", None),
    ("--accelerate_extra_args='--tee=3 --debug'", "accelerate_extra_args", ["--tee=3", "--debug"]),
    ("--accelerate_extra_args='[\"--tee=3\"]'", "accelerate_extra_args", ["--tee=3"]),
    (
        "--accelerate_extra_args=--debug --accelerate_extra_args='--tee 3'",
        "accelerate_extra_args",
        ["--debug", "--tee", "3"],
    ),
    ("--accelerate_extra_args=None", "accelerate_extra_args", None),
    (
        '--accelerate_config=\'{"rdzv_backend": "static"}\'',
        "accelerate_config",
        {"rdzv_backend": "static"},
    ),
    ("--accelerate_config='{same_network: true}'", "accelerate_config", {"same_network": True}),
    ("--accelerate_config=None", "accelerate_config", None),
    ("--deepspeed_config=none", "deepspeed_config", None),
    ("--context_parallel_size=1", "context_parallel_size", 1),
    ("--context_parallel_size=2 --num_processes=2", "context_parallel_size", 2),
    (f"--{PARALLEL}=AllToAll --context_parallel_size=2 --num_processes=2", PARALLEL, "alltoall"),
    (f"--{PARALLEL}=alltoall", PARALLEL, "alltoall"),
    (f"--{PARALLEL}=allgather", PARALLEL, "allgather"),
    ("--strategy=FSDP2 --num_processes=2", "strategy", "fsdp2"),
    ("--device=CPU", "device", "cpu"),
    # words, numbers and texts of other keys
    ("--mixed_precision=no", "mixed_precision", "no"),
    ("--mixed-precision BF16", "mixed_precision", "bf16"),
    ("--lr_scheduler=constant-with-warmup", "lr_scheduler", "constant_with_warmup"),
    ("--optimizer='\"adamw\"'", "optimizer", "adamw"),
    ("--optimizer=“sgd”", "optimizer", "sgd"),
    ("--optimizer=AdamW-8bit", "optimizer", "adamw_8bit"),
    ("--model_family=Qwen-Image", "model_family", "qwen_image"),
    ("--learning_rate=1e-4", "learning_rate", 1e-4),
    ("--learning_rate=' 5e-5 '", "learning_rate", 5e-5),
    ("--learning_rate='\"1.0e-3\"'", "learning_rate", 1e-3),
    ("--max_train_steps=1_000", "max_train_steps", 1000),
    ("--seed=1 --seed=2", "seed", 2),
    ("--lora_alpha=None", "lora_alpha", None),
    ("--lora_alpha=8", "lora_alpha", 8.0),
    ("--checkpoints_total_limit=none", "checkpoints_total_limit", None),
    ("--trigger_word=' sks cat '", "trigger_word", "sks cat"),
    ("--trigger_word='\" sks \"'", "trigger_word", " sks "),
    ('--trigger_word="it\'s"', "trigger_word", "it's"),
    ("--trigger_word='\"none\"'", "trigger_word", None),
    ("--validation_negative_prompt=None", "validation_negative_prompt", None),
    ("--validation_negative_prompt='\"none\"'", "validation_negative_prompt", "none"),
    ("--validation_negative_prompt=", "validation_negative_prompt", ""),
    ("--validation_resolution=768X512", "validation_resolution", "768x512"),
    ("--export_formats=Kohya", "export_formats", ["kohya"]),
    ("--export_formats=diffusers,kohya", "export_formats", ["diffusers", "kohya"]),
    (
        "--lora_target_modules=to_q --lora_target_modules=to_k",
        "lora_target_modules",
        ["to_q", "to_k"],
    ),
]


@pytest.mark.parametrize(("line", "key", "value"), UNDERSTOOD, ids=lambda v: str(v)[:60])
def test_a_flag_is_understood(line: str, key: str, value: Any) -> None:
    found = getattr(read(line), key)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("line", "prompts"),
    [
        ("--validation_prompts='a cat'", ["a cat"]),
        ("--validation_prompts='a cat, a dog'", ["a cat", "a dog"]),
        ('--validation_prompts=\'["a cat, asleep", "a dog"]\'', ["a cat, asleep", "a dog"]),
        ("--validation_prompts='a, b' --validation_prompts=c", ["a, b", "c"]),
        ("--validation_prompts='\"a cat, asleep\"'", ["a cat, asleep"]),
        ("--validation_prompts='[trigger]'", ["[trigger]"]),
        ("--validation_prompts='[trigger] a, [trigger]'", ["[trigger] a", "[trigger]"]),
        ("--validation_prompts='{prompt: a, seed: 3}'", [{"prompt": "a", "seed": 3}]),
        ("--validation_prompts='[{prompt: a, seed: 3}, b]'", [{"prompt": "a", "seed": 3}, "b"]),
        ("--validation_prompts=None", []),
        ("--validation_prompts=", []),
    ],
)
def test_prompts_are_understood(line: str, prompts: list[Any]) -> None:
    assert read(line).to_dict()["validation_prompts"] == prompts


@pytest.mark.parametrize(
    ("line", "paths"),
    [
        ("--datasets=/a,/b", [("/a", 1), ("/b", 1)]),
        ("--datasets='/a x3' --datasets=/b", [("/a", 3), ("/b", 1)]),
        ('--datasets=\'[{"path": "/a", "repeats": 3}]\'', [("/a", 3)]),
        ("--datasets='{path: /a, repeats: 2}' --datasets=/b", [("/a", 2), ("/b", 1)]),
    ],
)
def test_datasets_are_understood(line: str, paths: list[tuple[str, int]]) -> None:
    spec = read(f"--dataset= {line}")
    assert [(one.path, one.repeats) for one in spec.datasets or []] == paths


# A command line, and what is said.
REFUSED: list[tuple[str, str]] = [
    # keys
    (
        "--fsdp_reshard_after_foward",
        f'unknown key "fsdp_reshard_after_foward" (did you mean "{RESHARD}"?)',
    ),
    ("--learning-rat=1", 'unknown key "learning_rat" (did you mean "learning_rate"?)'),
    ("--zzz=1", 'unknown key "zzz"'),
    ("--seed", "seed: no value; use --seed=42"),
    ("--seed --fsdp_enable", "seed: no value; use --seed=42"),
    ("--dataset", "dataset: no value; use --dataset=TEXT"),
    ("--trigger_word", "trigger_word: no value"),
    ("--gpus", "gpus: no value; use --gpus=0,1"),
    ("seed=3", '"seed=3" is not a flag; use --seed=3'),
    ("-seed=3", '"-seed=3" is not a flag; use --seed=3'),
    ("-x", '"-x" is not a flag; flags start with two dashes'),
    ("--gpus 0 1", 'gpus: "1" is an extra value; separate several with commas: --gpus=0,1'),
    (f"--{CLASSES} A B", f'{CLASSES}: "B" is an extra value; separate several with commas'),
    ("--no_seed", 'unknown key "no_seed"'),
    # yes and no
    ("--fsdp_enable=tru", 'fsdp_enable: "tru" is not true or false (did you mean "true"?)'),
    ("--fsdp_enable=flase", 'fsdp_enable: "flase" is not true or false (did you mean "false"?)'),
    ("--gradient_checkpointing=2", 'gradient_checkpointing: "2" is not true or false'),
    ("--fsdp_cpu_offload=cpu", 'fsdp_cpu_offload: "cpu" is not true or false'),
    ("--fsdp_cpu_ram_efficient_loading=yess", '"yess" is not true or false (did you mean "yes"?)'),
    ("--fsdp_limit_all_gathers=", 'fsdp_limit_all_gathers: "" is not true or false'),
    ("--no-fsdp-enable=yes", 'unknown key "no_fsdp_enable" (did you mean "fsdp_enable"?)'),
    # words
    (
        "--fsdp_state_dict_type=ful",
        f'{STATE_DICT}: "ful" is not one of {SHARDED}, {FULL} (did you mean "{FULL}"?)',
    ),
    (
        "--fsdp_state_dict_type=LOCAL_STATE_DICT",
        f'"LOCAL_STATE_DICT" is not one of {SHARDED}, {FULL}',
    ),
    ("--fsdp_state_dict_type=None", f'"None" is not one of {SHARDED}'),
    ("--fsdp_auto_wrap_policy=TRANSFORMER_WRAPP", f'(did you mean "{BY_CLASS}"?)'),
    (
        "--fsdp_auto_wrap_policy=siz",
        '"siz" is not one of TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP, NO_WRAP, or the '
        'path of a callable, pkg.mod.name (did you mean "SIZE_BASED_WRAP"?)',
    ),
    ("--fsdp_auto_wrap_policy=transformer_auto_wrap_policy", f'(did you mean "{BY_CLASS}"?)'),
    ("--fsdp_auto_wrap_policy=mine.", '"mine." is not one of'),
    ("--fsdp_auto_wrap_policy=1.5", '"1.5" is not one of'),
    ("--fsdp_auto_wrap_policy=null", '"null" is not one of'),
    (f"--{PARALLEL}=ring", f'{PARALLEL}: "ring" is not one of allgather, alltoall'),
    (f"--{PARALLEL}=alltoal", '(did you mean "alltoall"?)'),
    (
        "--strategy=fsdp",
        '"fsdp" is not one of auto, single, ddp, fsdp2, hsdp (did you mean "fsdp2"?)',
    ),
    ("--mixed_precision=bf61", '(did you mean "bf16"?)'),
    ("--mixed_precision=None", '"None" is not one of no, bf16, fp16'),
    ("--mixed_precision=fp8", '"fp8" is not one of no, bf16, fp16'),
    ("--optimizer=adamm", '(did you mean "adamw"?)'),
    ("--lr_scheduler=cosin", '(did you mean "cosine"?)'),
    ("--device=gpu", '"gpu" is not one of auto, cuda, cpu (did you mean "cpu"?)'),
    ("--model_family=fluxx", 'unknown model_family "fluxx" (did you mean "flux"?); known: flux, '),
    ("--model_family=qwen", 'unknown model_family "qwen" (did you mean "qwen_image"?)'),
    ("--model_flavour=def", 'unknown model_flavour "def" of flux (did you mean "dev"?)'),
    ("--export_formats=kohia", "kohia"),
    # numbers
    ("--fsdp_version=3", "fsdp_version: input should be less than or equal to 2 (got "),
    ("--fsdp_version=two", "fsdp_version: expected a whole number"),
    (f"--{RESHARD}=maybe", f'{RESHARD}: "maybe" is not true, false or a number of shards'),
    (f"--{RESHARD}=1.5", f'{RESHARD}: "1.5" is not true, false or a number of shards'),
    (
        f"--{RESHARD}=3 --num_processes=4",
        f"{RESHARD}: 3 must be true, false, or a divisor of the 4",
    ),
    ("--fsdp_forward_prefetch=far", '"far" is not a number of units, true or false'),
    (
        f"--{PREFETCH}=BACKWARD_PR",
        '"BACKWARD_PR" is not a number of units, true or false (did you mean "BACKWARD_PRE"?)',
    ),
    (f"--{PREFETCH}=17", "less than or equal to 16"),
    ("--fsdp_min_num_params=0", "greater than or equal to 1"),
    ("--num_processes=two", "num_processes: expected a whole number"),
    ("--num_processes=0", "num_processes: input should be greater than or equal to 1"),
    ("--seed=None", "seed: expected a whole number"),
    ("--learning_rate=0,0001", "learning_rate: expected a number"),
    ("--max_train_steps=1.5", "max_train_steps: expected a whole number"),
    ("--main_process_port=70000", "main_process_port: input should be less than or equal to 65535"),
    (
        "--context_parallel_size=0",
        "context_parallel_size: input should be greater than or equal to 1",
    ),
    # lists and mappings
    ("--gpus=two", 'gpus: "two" is not a GPU; use indices such as 0,1'),
    ("--gpus=all", 'gpus: "all" is not a GPU'),
    ("--gpus=0,-1", 'gpus: "-1" is not a GPU'),
    ("--gpus=1.5", 'gpus: "1.5" is not a GPU'),
    ("--gpus=true", 'gpus: "true" is not a GPU'),
    ("--gpus=0,0", "gpus names the same GPU twice"),
    ("--gpus=0 --gpus=0", "gpus names the same GPU twice"),
    (f"--{CLASSES}='[A, B'", f'{CLASSES}: "[A, B" is not a list; its bracket is not closed'),
    (f"--{CLASSES}='[1, 2]'", f"{CLASSES}: entry 1: expected text"),
    ("--accelerate_extra_args='--tee \"3'", "is not a list of words (no closing quotation)"),
    ("--accelerate_extra_args='\"' --accelerate_extra_args=--debug", "not a list of words"),
    ("--accelerate_config='{'", 'accelerate_config: "{" is not a mapping, such as JSON\'s, or '),
    (
        "--accelerate_config=/no/such.yaml",
        "accelerate_config: no such accelerate config: /no/such.yaml",
    ),
    (
        '--validation_prompts=\'[{"prompt": "a", "stepps": 3}]\'',
        'unknown key "stepps" (did you mean "steps"?)',
    ),
    # the launch
    ("--num_machines=2", "num_machines: 2 is not supported: a local job runs on one machine"),
    ("--machine_rank=1", "machine_rank: 1 is not valid with 1 machine"),
    (
        "--accelerate_extra_args=--num_processes=8",
        "--num_processes is set by the job key num_processes",
    ),
    ("--accelerate_extra_args='--gpu_ids 0'", "--gpu_ids is set by the job key gpus"),
    ("--accelerate_extra_args=--use-fsdp", "--use_fsdp is set by the job key strategy"),
    (
        "--accelerate_extra_args=--use_deepspeed",
        "--use_deepspeed is set by the job key deepspeed_config",
    ),
    ("--accelerate_extra_args=--fsdp_use_orig_params=true", "FSDP is set by the job's fsdp_*"),
    ("--accelerate_extra_args=--dynamo_mode=max-autotune", "set torch_compile: true"),
    ("--accelerate_extra_args=--megatron_lm_tp_degree=2", "Megatron-LM is not supported"),
    ("--accelerate_extra_args=--tpu", "jobs run on NVIDIA GPUs"),
    ("--accelerate_extra_args=-m", '"-m" is not a flag that can be passed on'),
    ("--accelerate_extra_args=script.py", '"script.py" is not a flag that can be passed on'),
    ("--accelerate_extra_args=--tee", "--tee needs a value"),
    ("--accelerate_extra_args=--debug=3", "--debug is a switch"),
    ("--accelerate_extra_args=--enable_cpu_afinity", '(did you mean "enable_cpu_affinity"?)'),
    # old keys
    ("--fsdp_sharding_strategy=FULL_SHARDD", '(did you mean "FULL_SHARD"?)'),
    ("--fsdp_sharding_strategy=9", '"9" is not one of FULL_SHARD, SHARD_GRAD_OP, NO_SHARD'),
    (
        f"--fsdp_sharding_strategy=FULL_SHARD --{RESHARD}=false",
        f"fsdp_sharding_strategy: FULL_SHARD means {RESHARD}: true, which contradicts "
        f"{RESHARD}: false",
    ),
    (
        "--fsdp_sharding_strategy=HYBRID_SHARD --num_processes=4",
        "strategy: hsdp needs dp_replicate_size",
    ),
    ("--fsdp_offload_params=true --fsdp_cpu_offload=false", "contradicts fsdp_cpu_offload: false"),
    ("--fsdp_offload_params=perhaps", 'fsdp_cpu_offload: "perhaps" is not true or false'),
    ("--fsdp_use_orig_params=7", 'fsdp_use_orig_params: "7" is not true or false'),
    ("--fsdp_activation_checkpointing_offload=true", "activation offload is not supported"),
    ("--fsdp_ignored_modules=a.b", "every module is sharded"),
    # peers' errors
    (
        "--fsdp_enable --num_processes=2 --deepspeed_config=ds.json",
        "FSDP and DeepSpeed cannot be enabled simultaneously.",
    ),
    (
        "--strategy=fsdp2 --num_processes=2 --deepspeed_config='{\"zero_optimization\": {}}'",
        "FSDP and DeepSpeed cannot be enabled simultaneously.",
    ),
    ("--deepspeed_config=ds.json", "DeepSpeed is not supported"),
    ("--context_parallel_size=2", "Context parallelism requires FSDP2."),
    (
        "--context_parallel_size=2 --num_processes=2 --strategy=ddp",
        "Context parallelism requires FSDP2.",
    ),
    (
        "--context_parallel_size=2 --num_processes=2 --fsdp_enable=false",
        "Context parallelism requires FSDP2.",
    ),
    (
        "--context_parallel_size=2 --num_processes=2 --fsdp_version=1",
        "Context parallelism requires FSDP2.",
    ),
    (
        "--context_parallel_size=2 --num_processes=2 --deepspeed_config=ds.json",
        "Context parallelism requires FSDP2. Remove deepspeed_config",
    ),
]


@pytest.mark.parametrize(("line", "said"), REFUSED, ids=lambda text: text[:60])
def test_a_flag_that_means_nothing_is_told(line: str, said: str) -> None:
    assert said in complaint(line)


# A command line, and what it is read as, which is told.
TRANSLATED: list[tuple[str, str]] = [
    (
        "--fsdp_sharding_strategy=FULL_SHARD",
        f"fsdp_sharding_strategy: FULL_SHARD is read as {RESHARD}: true",
    ),
    (
        "--fsdp_sharding_strategy=2",
        f"fsdp_sharding_strategy: SHARD_GRAD_OP is read as {RESHARD}: false",
    ),
    (
        "--fsdp_sharding_strategy=no-shard --fsdp_enable --num_processes=2",
        "fsdp_sharding_strategy: NO_SHARD is read as strategy: ddp; fsdp_enable is ignored",
    ),
    (
        "--fsdp_sharding_strategy=HYBRID_SHARD --dp_replicate_size=2 --num_processes=4",
        f"fsdp_sharding_strategy: HYBRID_SHARD is read as strategy: hsdp, {RESHARD}: true",
    ),
    (f"--{RESHARD}=SHARD_GRAD_OP", f"{RESHARD}: SHARD_GRAD_OP is read as {RESHARD}: false"),
    (
        "--fsdp_offload_params=true --num_processes=2",
        "fsdp_offload_params: true is read as fsdp_cpu_offload: true",
    ),
    ("--use_fsdp --num_processes=2", "use_fsdp: true is read as fsdp_enable: true"),
    (
        "--fsdp_use_orig_params=false",
        "fsdp_use_orig_params: false has no effect; FSDP2 always keeps the original parameters",
    ),
    ("--fsdp_sync_module_states=true", "fsdp_sync_module_states: true has no effect; every rank"),
    (
        f"--{PREFETCH}=BACKWARD_PRE",
        f"{PREFETCH}: BACKWARD_PRE is read as {PREFETCH}: 0, FSDP2's implicit prefetch",
    ),
    ("--fsdp_backward_prefetch_policy=BACKWARD_POST", f"is read as {PREFETCH}: 0"),
    ("--fsdp_forward_prefetch=true", "is read as fsdp_forward_prefetch: 1, one unit ahead"),
    ("--gpu_ids=0,1", "gpu_ids: 0,1 is read as gpus: 0,1"),
    ("--gpu_ids=all", "gpu_ids: all has no effect; gpus: N uses any N free GPUs"),
]


@pytest.mark.parametrize(("line", "said"), TRANSLATED, ids=lambda text: text[:60])
def test_nothing_is_translated_in_silence(line: str, said: str) -> None:
    notes: list[str] = []
    read(line, notes.append)
    assert any(said in note for note in notes), notes
    assert not any("\n" in note for note in notes)


@pytest.mark.parametrize(
    "line",
    [
        "--fsdp_forward_prefetch=1",
        f"--{PREFETCH}=0",
        f"--{RESHARD}=true",
        "--fsdp_enable=false",
        "--gpus=0,1",
        f"--{PARALLEL}=allgather",
        "--fsdp_activation_checkpointing_offload=false",
    ],
)
def test_what_is_said_in_our_words_is_not_told(line: str) -> None:
    notes: list[str] = []
    read(line, notes.append)
    assert notes == []


@pytest.mark.parametrize(
    ("line", "warning"),
    [
        ("--fsdp_version=1 --num_processes=2", "fsdp_version: FSDP v1 is deprecated"),
        ("--fsdp_limit_all_gathers=no", "fsdp_limit_all_gathers: false has no effect; FSDP2"),
        ("--fsdp_cpu_ram_efficient_loading=no", "fsdp_cpu_ram_efficient_loading: false has no eff"),
        (f"--{PARALLEL}=alltoall", f"{PARALLEL}: no effect; needs context_parallel_size > 1"),
    ],
)
def test_what_runs_otherwise_is_warned_about(line: str, warning: str) -> None:
    (found,) = find_warnings(read(line))
    assert found.startswith(warning)


def outcome(key: str, values: dict[str, Any]) -> Any:
    """What a job has of a key's value; an error if it is refused."""
    try:
        return getattr(JobSpec(**values), key)
    except ValidationError as error:
        return error


@pytest.mark.parametrize("word", ["off", "no", "false"])
def test_a_word_for_no_means_the_same_in_a_file_and_in_a_flag(word: str) -> None:
    """Of every key, but for those of text, which take the word itself as a flag."""
    for key in field_names():
        in_file = outcome(key, yaml.safe_load(f"{key}: {word}"))
        flag = outcome(key, parse_flags([f"--{key}={word}"])[0])
        if not isinstance(in_file, ValidationError):
            assert flag == in_file, key
        elif not isinstance(flag, ValidationError):
            assert word in str(flag), key
    for key in ("max_grad_norm", "checkpointing_steps", "validation_steps"):
        assert outcome(key, {key: word}) == 0
        assert outcome(key, yaml.safe_load(f"{key}: {word}")) == 0
    assert outcome(POLICY, {POLICY: word}) == NOTHING


def test_the_table_is_long() -> None:
    assert len(UNDERSTOOD) + len(REFUSED) + len(TRANSLATED) >= 250


def test_flags_win_over_a_file_in_old_words_too(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"pretrained_model_name_or_path: m\ndataset: d\n{RESHARD}: true\n")
    spec = load_spec(path, parse_flags(["--fsdp_sharding_strategy=SHARD_GRAD_OP"])[0])
    assert spec.fsdp_reshard_after_forward is False


def test_an_old_word_in_a_file_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("pretrained_model_name_or_path: m\ndataset: d\nfsdp_ignored_modules: x\n")
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    assert f"{path}: line 3: fsdp_ignored_modules: every module is sharded" in str(caught.value)


# -- three doors ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"context_parallel_size": 2},
            "Context parallelism requires FSDP2. Set strategy: fsdp2 and fsdp_version: 2",
        ),
        (
            {"context_parallel_size": 2, "num_processes": 2, "strategy": "ddp"},
            "Context parallelism requires FSDP2. Set strategy: fsdp2 and fsdp_version: 2",
        ),
        (
            {"context_parallel_size": 2, "num_processes": 2, "fsdp_enable": False},
            "Context parallelism requires FSDP2. Set strategy: fsdp2 and fsdp_version: 2",
        ),
        (
            {"context_parallel_size": 2, "num_processes": 2, "fsdp_version": 1},
            "Context parallelism requires FSDP2. Set strategy: fsdp2 and fsdp_version: 2",
        ),
        (
            {"context_parallel_size": 2, "num_processes": 2, "deepspeed_config": "ds.json"},
            "Context parallelism requires FSDP2. Remove deepspeed_config",
        ),
        (
            {"num_processes": 2, "fsdp_enable": True, "deepspeed_config": "ds.json"},
            "FSDP and DeepSpeed cannot be enabled simultaneously. Remove deepspeed_config",
        ),
        ({"num_machines": 2, "num_processes": 2}, "num_machines: 2 is not supported: "),
        ({"model_family": "fluks"}, 'unknown model_family "fluks" (did you mean "flux"?)'),
        ({"fsdp_state_dict_type": "ful"}, 'fsdp_state_dict_type: "ful" is not one of '),
    ],
)
def test_form_flags_and_file_say_the_same(
    tmp_path: Path, values: dict[str, Any], said: str
) -> None:
    whole = {"pretrained_model_name_or_path": "m", "dataset": "d"} | values
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(whole))
    with pytest.raises(SpecError) as of_file:
        load_spec(path)
    with pytest.raises(SpecError) as of_flags:
        load_spec(None, parse_flags([f"--{key}={value}" for key, value in whole.items()])[0])
    of_form = draft.find_problems({key: str(value) for key, value in whole.items()})
    assert said in str(of_file.value)
    assert said in str(of_flags.value)
    assert said in "; ".join(draft.problems_beside(of_form, ()))


# -- and back ------------------------------------------------------------------------------


@given(values=VALUES)
@example(values={"trigger_word": " sks\t", "validation_negative_prompt": '"quoted"'})
@example(values={"trigger_word": "“”", "validation_negative_prompt": "None"})
@example(values={"validation_prompts": ["\x85", "[a]", "{prompt: b}", "--seed=3"]})
@example(values={"lora_target_modules": []})
@example(values={"lora_target_modules": ["none"], "cache_dir": "/no/such \1"})
@example(values={"fsdp_transformer_layer_cls_to_wrap": ["a,b", "'c'", " "]})
@settings(max_examples=40)
def test_form_file_flags_and_file_are_one_job(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]
) -> None:
    path = tmp_path_factory.getbasetemp() / "round.yaml"
    first = draft.as_yaml(REQUIRED | values)
    path.write_text(first, encoding="utf-8")
    job = load_spec(path)
    line = shlex.join(to_flags(job))
    again = load_spec(None, parse_flags(shlex.split(line))[0])
    assert again == job
    assert dump_spec(again, only_set=True) == first


def test_flags_are_as_a_person_would_write_them() -> None:
    spec = read(
        "--gpus=0,1 --fsdp_transformer_layer_cls_to_wrap=A,B --learning_rate=1e-3 "
        "--validation_prompts='[\"a cat\"]' --gradient_checkpointing --trigger_word='it is'"
    )
    assert to_flags(spec) == [
        "--pretrained_model_name_or_path=m",
        "--dataset=d",
        "--learning_rate=0.001",
        "--gradient_checkpointing=true",
        "--gpus=[0, 1]",
        "--fsdp_transformer_layer_cls_to_wrap=A,B",
        "--trigger_word=it is",
        '--validation_prompts=["a cat"]',
    ]


# -- where notes are heard -----------------------------------------------------------------


def test_submit_warns_of_what_it_translated(job_values: dict[str, Any], no_gpus: None) -> None:
    words = [f"--{key}={value}" for key, value in job_values.items()]
    result = CliRunner().invoke(
        cli, ["submit", "--dry-run", "--json", *words, "--fsdp_sharding_strategy=SHARD_GRAD_OP"]
    )
    assert result.exit_code == 0
    assert result.stderr == (
        "fsdp-tui: warning: fsdp_sharding_strategy: SHARD_GRAD_OP is read as "
        "fsdp_reshard_after_forward: false\n"
    )
    assert yaml.safe_load(result.stdout)["fsdp_reshard_after_forward"] is False


def test_a_resume_warns_too(
    store: Store, job_values: dict[str, Any], no_gpus: None, started: list[int]
) -> None:
    job = service.submit(store, load_spec(None, job_values))
    store.change(job.id, State.STOPPED, "was stopped")
    save_checkpoint(job.run_dir, 3)
    plan = plan_resume(store, job.id, parse_flags(["--fsdp_sharding_strategy=SHARD_GRAD_OP"])[0])
    assert plan.spec.fsdp_reshard_after_forward is False
    assert any("SHARD_GRAD_OP is read as" in warning for warning in plan.warnings)
    assert plan_resume(store, job.id).warnings == []


async def test_the_form_tells_what_it_read_of_a_file(
    store: Store, job_values: dict[str, Any], tmp_path: Path
) -> None:
    given = tmp_path / "given.yaml"
    given.write_text(yaml.safe_dump(job_values | {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}))
    async with form(store) as (app, pilot):
        await pilot.press("ctrl+o")
        await until(pilot, lambda: app.screen.query("#path"))
        app.screen.query_one("#path").value = str(given)  # type: ignore[attr-defined]
        await pilot.press("enter")
        await until(pilot, lambda: len(app._notifications) > 0)
        assert [note.message for note in app._notifications] == [
            "fsdp_sharding_strategy: SHARD_GRAD_OP is read as fsdp_reshard_after_forward: false"
        ]
