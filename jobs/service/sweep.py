"""Sweeps: one job described once, queued once for each combination of some keys' values."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from jobs import service
from jobs.errors import SpecError, UserError
from jobs.queue.sweeps import NOT_SWEPT, short_text
from jobs.service.edit import free_name
from jobs.service.plan import plan_submit
from jobs.spec.file.load import load_spec
from jobs.spec.job_spec import JobSpec, field_names, takes_many
from jobs.spec.rules.cascade import settle
from jobs.spec.values.spellings import as_list, did_you_mean, normal_key
from jobs.supervise.median import LEAST_OTHERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from jobs.queue.store import Job, Store
    from jobs.service.plan import Plan
    from jobs.spec.values.hub_names import HubName

MOST: Final = 100
"""Jobs that are queued without being asked for twice."""
_LONGEST_NAME: Final = 64  # characters; as jobs.spec.keys.job has it


# -- what is swept --------------------------------------------------------------------------


def read_sweeps(texts: Iterable[str]) -> tuple[dict[str, list[Any]], str]:
    """Read `KEY=VALUE,VALUE`, once for each key, and the group's name where a text is no more.

    Values of a key that takes a list or a mapping are separated by semicolons, if any of them has
    a comma.

    Raises:
        SpecError: A key is unknown, has no values, or comes twice.
    """
    swept: dict[str, list[Any]] = {}
    group = ""
    for text in texts:
        key, equals, values = text.partition("=")
        if not equals:
            group = text.strip()
            continue
        name = normal_key(key)
        if name in swept:
            raise SpecError(f"sweep: {name} is given twice; list all its values once")
        swept[name] = read_values(check_key(name), values)
    return swept, group


def check_key(name: str) -> str:
    """Return the key.

    Raises:
        SpecError: It cannot be swept.
    """
    if name not in field_names():
        raise SpecError(f'sweep: unknown key "{name}"{did_you_mean(name, field_names())}')
    if name in NOT_SWEPT:
        raise SpecError(f"sweep: {name} cannot be swept; it is made from what differs")
    return name


def read_values(name: str, text: str) -> list[Any]:
    """Split the values of a key.

    Raises:
        SpecError: There are none.
    """
    has_commas = takes_many(name) or "dict[" in str(JobSpec.model_fields[name].annotation)
    several = has_commas and ";" in text
    values: list[Any] = []
    for value in [part.strip() for part in text.split(";")] if several else as_list(text):
        if value not in ("", *values):
            values.append(value)
    if not values:
        raise SpecError(f"sweep: {name}: no values; use {name}=A,B,C")
    return values


def check_count(swept: Mapping[str, Sequence[Any]], hint: str) -> int:
    """Return how many jobs a sweep has.

    Raises:
        UserError: They are more than anyone queues in passing; the hint says how to do it.
    """
    count = math.prod(len(values) for values in swept.values())
    if count > MOST:
        raise UserError(f"the sweep has {count} jobs, more than {MOST}", hint)
    return count


@dataclass(frozen=True)
class Sweep:
    """The jobs of a sweep.

    Attributes:
        name: Of the group.
        specs: The jobs, settled; each has a name of its own.
    """

    name: str
    specs: list[JobSpec]


def expand(
    store: Store,
    values: Mapping[str, Any],
    swept: Mapping[str, Sequence[Any]],
    *,
    group: str = "",
    read: Callable[[Mapping[str, Any]], JobSpec] = lambda values: load_spec(None, values),
) -> Sweep:
    """Describe a job for each combination of values.

    Args:
        store: The jobs, whose sweeps' names are taken.
        values: Of the job, by key.
        swept: Key → its values.
        group: What the sweep is called; by default as the job.
        read: Reads a job, given its values.

    Raises:
        SpecError: A job cannot run as written; it is named by what it differs in.
    """
    base = str(values.get("name") or "job")
    taken = set(store.sweeps().values())
    own_group = str(values.get("sweep") or "")
    if own_group and base.startswith(own_group):  # a copy of a job of the sweep, which grows
        base = own_group
    group = group or own_group or free_name(base, taken)
    specs: list[JobSpec] = []
    names: set[str] = set()
    for combination in itertools.product(*swept.values()):
        own = dict(zip(swept, combination, strict=True))
        words = ", ".join(f"{key}={value}" for key, value in own.items())
        try:
            spec = settle(read({**values, **own, "name": base, "sweep": group}))
        except SpecError as error:
            raise SpecError(f"sweep, {words}: {error.message}", error.hint) from None
        read_back = spec.to_dict()
        name = free_name(_name(base, {key: read_back[key] for key in own}), names)
        names.add(name)
        specs.append(spec.model_copy(update={"name": name}))
    _check_distinct(specs, swept)
    return Sweep(group, specs)


def _check_distinct(specs: Sequence[JobSpec], swept: Mapping[str, Sequence[Any]]) -> None:
    seen: dict[str, str] = {}
    for spec in specs:
        facts = str({**spec.to_dict(), "name": ""})
        if facts in seen:
            raise SpecError(
                f"sweep: {seen[facts]} and {spec.name} would be the same job; give each value of "
                f"{' and '.join(swept)} once"
            )
        seen[facts] = spec.name


def plan_all(
    store: Store,
    sweep: Sweep,
    fetched: Callable[[JobSpec], Sequence[HubName]],
    follows: Sequence[int] = (),
) -> list[Plan]:
    """Check every job of a sweep, before any is queued.

    Args:
        store: The jobs.
        sweep: The jobs to be.
        fetched: What of the hub a job waits for.
        follows: Jobs that must complete before any of them starts.

    Raises:
        UserError: A job cannot run; it is named.
    """
    plans = []
    for spec in sweep.specs:
        try:
            plans.append(plan_submit(store, spec, fetched(spec), follows))
        except UserError as error:
            raise type(error)(f"{spec.name}: {error.message}", error.hint) from None
    return plans


def queue_all(store: Store, plans: Sequence[Plan]) -> list[Job]:
    """Queue the jobs of plans, in this order: all of them, or none.

    Raises:
        UserError: Files of one cannot be written; nothing was queued.
    """
    jobs = store.add_all([service.new_job(plan) for plan in plans])
    service.start_if_free(store, jobs[0])
    return [store.get(job.id) for job in jobs]


def advice(sweep: Sweep) -> list[str]:
    """Return what a person should know of a sweep as a whole, a line each."""
    rule = "stop_worse_than_median_after"
    judged = [spec for spec in sweep.specs if getattr(spec, rule) is not None]
    if judged and len(sweep.specs) <= LEAST_OTHERS:
        return [
            f"{rule}: no job will be stopped: it takes {LEAST_OTHERS} others to compare with, and "
            f"the sweep has {len(sweep.specs)} jobs"
        ]
    return []


def _name(base: str, own: Mapping[str, Any]) -> str:
    """Return a job's name: the sweep's, and what the job differs in."""
    parts = "-".join(short_text(key, value, between="") for key, value in own.items())
    tail = re.sub(r"-{2,}", "-", re.sub(r"[^A-Za-z0-9._-]", "-", parts)).strip("-")[
        -_LONGEST_NAME // 2 :
    ]
    return f"{base[: _LONGEST_NAME - len(tail) - 1]}-{tail}"
