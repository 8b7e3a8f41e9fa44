"""Settings that follow from others, decided once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from jobs.spec.rules.lora_conflicts import trains_text
from jobs.spec.rules.strategy import SHARDING, world_size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jobs.spec.job_spec import JobSpec

# What one rank and several have otherwise, unless the person says it.
FOLLOWING: Final = ("strategy", "fsdp_enable", "unload_text_encoder", "cache_text_embeddings")
_OF_ONE_RANK: Final = ("auto", "single")  # strategies; the first leaves it open


def settle(spec: JobSpec) -> JobSpec:
    """Return the job with nothing left open about its text encoders.

    Several ranks encode all captions first and free the encoders, since a resident copy on each
    would take the memory that sharding saves. Freed encoders cannot encode, so freeing implies
    caching. Encoders that are trained stay, on every rank, and what they made is soon out of date.
    """
    several = world_size(spec) > 1
    unload = spec.unload_text_encoder
    if unload is None:
        unload = spec.cache_text_embeddings is not False
    unload = unload or several
    cache = unload or spec.cache_text_embeddings is not False
    if trains_text(spec):
        unload = cache = False
    if (cache, unload) == (spec.cache_text_embeddings, spec.unload_text_encoder):
        return spec
    return spec.model_copy(update={"cache_text_embeddings": cache, "unload_text_encoder": unload})


def follow_ranks(
    values: Mapping[str, Any], before: int, after: int, kept: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the changes when a job goes from one rank to several, or the other way round.

    Several ranks shard the model, and free its text encoders once their captions are cached; one
    rank cannot shard. Nothing changes between two and more.

    Args:
        values: Of the job, by key.
        before: How many ranks it had.
        after: How many it has.
        kept: What the keys in `FOLLOWING` were when the job was last as it is now, one rank or
            several; None if it never was.

    Returns:
        The new values of the keys that change.
    """
    if (before > 1) == (after > 1):
        return {}
    target: dict[str, Any]
    if kept is not None:
        target = {key: kept.get(key) for key in FOLLOWING}
    elif after > 1:
        freed = not values.get("text_encoder_lora_rank")  # those that are trained stay
        target = {"unload_text_encoder": True, "cache_text_embeddings": True} if freed else {}
        if values.get("fsdp_enable") is None and values.get("strategy") in (None, *_OF_ONE_RANK):
            target["strategy"] = SHARDING[0]
    else:
        target = {"strategy": _OF_ONE_RANK[0]}
        if values.get("fsdp_enable"):
            target["fsdp_enable"] = None
    changed = [key for key in FOLLOWING if key in target and target[key] != values.get(key)]
    return {key: target[key] for key in changed}


def find_overruled(spec: JobSpec) -> list[str]:
    """List the settings that the job turns off and `settle` turns on; a sentence each."""
    if trains_text(spec):
        return []  # what they say has no effect, and that is said
    settled = settle(spec)
    why = (
        f"{world_size(spec)} ranks"
        if world_size(spec) > 1
        else "unload_text_encoder: true frees the encoders before training"
    )
    return [
        f"{key}: forced on because of {why}"
        for key in ("cache_text_embeddings", "unload_text_encoder")
        if getattr(spec, key) is False and getattr(settled, key)
    ]
