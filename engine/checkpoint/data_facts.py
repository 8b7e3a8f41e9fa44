"""What a checkpoint remembers of its data, so that a run which begins from it can tell."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from jobs.resume import PLAN_VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.data.index.batch_plan import BatchPlan
    from engine.data.index.data_index import DataIndex


def data_facts(index: DataIndex, plan: BatchPlan) -> dict[str, Any]:
    """Collect what decides which samples a step trains on, besides the job's settings."""
    digest = hashlib.sha256()
    for sample in index.samples:
        digest.update(f"{sample.digest} {sample.row} {sample.group}\n".encode())
        for reference in sample.references:
            digest.update(f"{reference.digest}\n".encode())
        if sample.mask:
            digest.update(f"mask {sample.mask}\n".encode())
    return {
        "samples": len(index.samples),
        "steps_per_epoch": plan.steps_per_epoch,
        "plan": PLAN_VERSION,
        "draws_per_epoch": plan.draws_per_epoch,
        "digest": digest.hexdigest()[:16],
    }


def tell_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """In what the data is not what it was; None when it is, or when nothing is known of before."""
    if not before or before.get("digest") == now["digest"]:
        return None
    samples = f"{before.get('samples')} → {now['samples']} samples"
    if before.get("samples") == now["samples"]:
        samples = f"different ones among the {now['samples']} samples"
    return f"the data: {samples}, so steps train on different samples"
