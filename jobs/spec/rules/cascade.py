"""Resolve settings that follow from others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from jobs.spec.rules.lora_conflicts import trains_text
from jobs.spec.rules.strategy import SHARDING, world_size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jobs.spec.job_spec import JobSpec

# Keys whose default differs between one rank and several.
FOLLOWING: Final = ("strategy", "fsdp_enable", "unload_text_encoder", "cache_text_embeddings")
# strategies for one rank; the first leaves the choice open
_OF_ONE_RANK: Final = ("auto", "single")


def settle(spec: JobSpec) -> JobSpec:
    """Return the job with its text-encoder settings resolved.

    With several ranks, all captions are encoded first and the encoders freed, since a copy on each
    rank would take the memory that sharding saves. Freed encoders cannot encode, so freeing implies
    caching. Trained encoders stay on every rank, and their outputs are not cached because they
    change.
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
    """Return the changes when a job goes from one rank to several, or vice versa.

    Several ranks shard the model and free its text encoders once the captions are cached; one rank
    cannot shard. Nothing changes between two and more.

    Args:
        values: The job's values, by key.
        before: Number of ranks before.
        after: Number of ranks now.
        kept: Values of the keys in `FOLLOWING` from when the job last was on this side (one rank or
            several); None if it never was.

    Returns:
        The new values of the keys that change.
    """
    if (before > 1) == (after > 1):
        return {}
    target: dict[str, Any]
    if kept is not None:
        target = {key: kept.get(key) for key in FOLLOWING}
    elif after > 1:
        freed = not values.get("text_encoder_lora_rank")  # trained encoders stay
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
    """List the settings that the job turns off but `settle` turns on; one sentence each."""
    if trains_text(spec):
        return []  # these keys have no effect, which is reported elsewhere
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
