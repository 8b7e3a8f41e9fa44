"""Wrap policies as people write them, for `test_wrap_policy.py` and its ranks."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)


class Block(torch.nn.Module):
    """A repeated block with something in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 32)
        self.second = torch.nn.Linear(32, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # (B, 8) -> (B, 8)
        changed: torch.Tensor = self.second(torch.relu(self.first(hidden)))
        return hidden + changed


class Model(torch.nn.Module):
    """Blocks in a list, and a head that is large."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(blocks))
        self.head = torch.nn.Linear(8, 100)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # (B, 8) -> (B, 100)
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(hidden)
        return logits


def blocks(module: torch.nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return recurse or isinstance(module, Block)


def one_of_blocks(module: torch.nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    """Does not look into blocks, so nothing in them is chosen."""
    return not isinstance(module, Block) if recurse else isinstance(module, torch.nn.Linear)


def by_rank(module: torch.nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    kind = Block if os.environ.get("RANK") == "0" else torch.nn.Linear
    return recurse or isinstance(module, kind)


def containers(module: torch.nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return recurse or isinstance(module, torch.nn.ModuleList)


def nothing(module: torch.nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return recurse


def breaks(module: torch.nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    raise KeyError("a bad day")


def more(module: torch.nn.Module, recurse: bool, nonwrapped_numel: int, depth: int) -> bool:
    return True


def other_names(layer: Any, deep: Any, numel: Any) -> bool:
    return True


by_size = functools.partial(size_based_auto_wrap_policy, min_num_params=500)
by_small_size = functools.partial(size_based_auto_wrap_policy, min_num_params=250)
by_class = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
by_policy = ModuleWrapPolicy({Block})
without_call = CustomPolicy(lambda module: False)
number = 3
