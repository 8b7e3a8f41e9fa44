"""Ranks that shard a model by a person's own policy: `test_wrap_policy.py`."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from engine.parallel.sharding import shard
from engine.ranks.world import leave_world, start_world
from jobs.errors import UserError
from jobs.spec.job_spec import JobSpec
from tests.support.engine.wrap_policies import Model


def look(rank: int, ranks: int, policies: list[str], folder: str) -> None:
    """Shard by each policy; writes what came of it to `<rank>.json`."""
    torch.set_num_threads(1)
    found = {policy: _case(policy, ranks) for policy in policies}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    leave_world()


def _case(policy: str, ranks: int) -> dict[str, object]:
    spec = JobSpec(
        num_processes=ranks,
        strategy="fsdp2",
        device="cpu",
        mixed_precision="no",
        fsdp_auto_wrap_policy=policy,
        model_type="full",
    )
    torch.manual_seed(0)
    reference, model = Model(), Model()
    model.load_state_dict(reference.state_dict())
    try:
        units = shard(model, spec, start_world(spec))
    except UserError as error:
        return {"error": str(error)}
    pictures = torch.randn(4, 8)
    reference(pictures).square().mean().backward()
    model(pictures).square().mean().backward()
    worst = 0.0
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert isinstance(mine.grad, DTensor)
        assert theirs.grad is not None
        worst = max(worst, (mine.grad.full_tensor() - theirs.grad).abs().max().item())
    return {"units": units, "worst": worst}
