"""Settings that follow from others, decided once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs.strategy import world_size

if TYPE_CHECKING:
    from jobs.spec import JobSpec


def settle(spec: JobSpec) -> JobSpec:
    """The job with nothing left open about its text encoders.

    Several ranks encode all captions first and free the encoders, since a resident copy on each
    would take the memory that sharding saves. Freed encoders cannot encode, so freeing implies
    caching.
    """
    several = world_size(spec) > 1
    unload = spec.unload_text_encoder
    if unload is None:
        unload = spec.cache_text_embeddings is not False
    unload = unload or several
    cache = unload or spec.cache_text_embeddings is not False
    if (cache, unload) == (spec.cache_text_embeddings, spec.unload_text_encoder):
        return spec
    return spec.model_copy(update={"cache_text_embeddings": cache, "unload_text_encoder": unload})


def clean(spec: JobSpec) -> tuple[JobSpec, list[str]]:
    """The job without what means nothing beside the rest, so that saved jobs stay clean.

    Returns:
        The job, and what was taken out, a sentence each.
    """
    key = "context_parallel_comm_strategy"
    default = type(spec).model_fields[key].default
    if spec.context_parallel_size > 1 or spec.context_parallel_comm_strategy == default:
        return spec, []
    note = f"{key}: no effect with context_parallel_size: 1; saved as {default}"
    return spec.model_copy(update={key: default}), [note]


def find_overruled(spec: JobSpec) -> list[str]:
    """What the job turns off and `settle` turns on; a sentence each."""
    settled = settle(spec)
    why = (
        f"{world_size(spec)} ranks"
        if world_size(spec) > 1
        else "unload_text_encoder: true, after which no caption can be encoded"
    )
    return [
        f"{key}: on all the same, because of {why}"
        for key in ("cache_text_embeddings", "unload_text_encoder")
        if getattr(spec, key) is False and getattr(settled, key)
    ]
