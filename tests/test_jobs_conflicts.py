"""Combinations that cannot run, as a table, and which strategy is chosen."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.conflicts import chosen_strategy, find_conflicts, world_size
from jobs.spec import JobSpec


def read(**values: Any) -> JobSpec:
    paths = {"pretrained_model_name_or_path": "m", "dataset": "d"}
    return JobSpec.model_validate(paths | values)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"num_processes": 2},
        {"gpus": 4},
        {"gpus": [0, 1]},
        {"gpus": ["GPU-a", "GPU-b"], "num_processes": 2},
        {"gpus": [0], "strategy": "single"},
        {"device": "cpu", "num_processes": 2, "strategy": "fsdp2"},
        {"num_processes": 2, "fsdp_enable": True, "strategy": "fsdp2"},
        {"num_processes": 2, "fsdp_enable": False, "strategy": "ddp"},
        {"num_processes": 1, "fsdp_enable": False},
        {"fsdp_transformer_layer_cls_to_wrap": ["A"]},
        {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"},
        {"lr_scheduler": "constant_with_warmup", "lr_warmup_steps": 5},
        {"lr_scheduler": "cosine", "lr_warmup_steps": 10, "max_train_steps": 10},
    ],
)
def test_what_can_run_has_no_conflict(values: dict[str, Any]) -> None:
    assert find_conflicts(read(**values)) == []


@pytest.mark.parametrize(
    ("values", "key", "said"),
    [
        ({"dataset": ""}, "dataset", "dataset is missing"),
        ({"pretrained_model_name_or_path": ""}, "pretrained_model_name_or_path", "is missing"),
        ({"gpus": 2, "device": "cpu"}, "gpus", "exclude each other"),
        ({"gpus": 0}, "gpus", "asks for none"),
        ({"gpus": []}, "gpus", "asks for none"),
        ({"gpus": -1}, "gpus", "asks for none"),
        ({"gpus": [1, 1]}, "gpus", "the same GPU twice"),
        ({"gpus": [0, 1], "num_processes": 3}, "num_processes", "3 but gpus names 2"),
        ({"gpus": 4, "num_processes": 2}, "num_processes", "2 but gpus names 4"),
        ({"num_processes": 2, "fsdp_enable": True, "strategy": "ddp"}, "strategy", "contradict"),
        ({"num_processes": 2, "fsdp_enable": False, "strategy": "fsdp2"}, "strategy", "contradict"),
        ({"num_processes": 2, "strategy": "single"}, "strategy", "runs one rank, not 2"),
        ({"strategy": "fsdp2"}, "strategy", "two or more ranks"),
        ({"strategy": "ddp", "gpus": [3]}, "strategy", "two or more ranks"),
        ({"fsdp_enable": True}, "strategy", "two or more ranks"),
        ({"fsdp_version": 1}, "fsdp_version", "use fsdp_version: 2"),
        ({"fsdp_state_dict_type": "full"}, "fsdp_state_dict_type", "use SHARDED_STATE_DICT"),
        ({"fsdp_transformer_layer_cls_to_wrap": ["A"], "fsdp_auto_wrap_policy": "NO_WRAP"},
         "fsdp_transformer_layer_cls_to_wrap", "needs fsdp_auto_wrap_policy"),
        ({"mixed_precision": "fp16"}, "mixed_precision", "use bf16 or no"),
        ({"cache_text_embeddings": False}, "cache_text_embeddings", "always encoded once"),
        ({"unload_text_encoder": False}, "unload_text_encoder", "always freed"),
        ({"lr_warmup_steps": 5}, "lr_warmup_steps", "use constant_with_warmup"),
        ({"lr_warmup_steps": 11, "lr_scheduler": "linear", "max_train_steps": 10},
         "lr_warmup_steps", "is more than max_train_steps (10)"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_one_conflict(values: dict[str, Any], key: str, said: str) -> None:
    (conflict,) = find_conflicts(read(**values))
    assert conflict.key == key
    assert said in conflict.message
    assert "\n" not in conflict.message


def test_several_conflicts_are_all_found() -> None:
    spec = read(dataset="", mixed_precision="fp16", fsdp_version=1)
    assert [c.key for c in find_conflicts(spec)] == ["dataset", "fsdp_version", "mixed_precision"]


@pytest.mark.parametrize(
    ("values", "ranks"),
    [
        ({}, 1),
        ({"num_processes": 3}, 3),
        ({"gpus": 4}, 4),
        ({"gpus": [5, 7]}, 2),
        ({"gpus": [5, 7], "num_processes": 2}, 2),
    ],
)
def test_the_number_of_ranks(values: dict[str, Any], ranks: int) -> None:
    assert world_size(read(**values)) == ranks


@pytest.mark.parametrize(
    ("values", "strategy", "why"),
    [
        ({}, "single", "one rank"),
        ({"num_processes": 2}, "fsdp2", "1/2 of the weights"),
        ({"num_processes": 2, "fsdp_enable": True}, "fsdp2", "fsdp_enable is on"),
        ({"num_processes": 2, "fsdp_enable": False}, "ddp", "fsdp_enable is off"),
        ({"num_processes": 1, "fsdp_enable": False}, "single", "one rank"),
        ({"gpus": 2, "strategy": "ddp"}, "ddp", "as asked"),
    ],
)
def test_the_strategy_and_why(values: dict[str, Any], strategy: str, why: str) -> None:
    chosen, reason = chosen_strategy(read(**values))
    assert chosen == strategy
    assert why in reason
