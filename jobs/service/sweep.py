"""Sweeps: one job described once, queued once for each combination of some keys' values."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from jobs import service
from jobs.errors import SpecError, UserError
from jobs.queue.sweeps import NOT_SWEPT, short_text
from jobs.service.edit import free_name
from jobs.service.plan import plan_submit
from jobs.spec.families import experts_of
from jobs.spec.file.load import dump_spec, load_spec
from jobs.spec.job_spec import JobSpec, field_names, takes_many
from jobs.spec.rules.cascade import settle
from jobs.spec.values.spellings import as_list, did_you_mean, normal_key
from jobs.supervise.median import LEAST_OTHERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from jobs.queue.job import NewJob
    from jobs.queue.store import Job, Store
    from jobs.run.rundir import RunDir
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
        made = name in ("name", "sweep")
        why = "it is made from what differs" if made else "set it for all jobs"
        raise SpecError(f"sweep: {name} cannot be swept; {why}")
    return name


def read_values(name: str, text: str) -> list[Any]:
    """Split the values of a key.

    Raises:
        SpecError: There are none.
    """
    mapping = "dict[" in str(JobSpec.model_fields[name].annotation)
    several = (takes_many(name) or mapping) and ";" in text
    parts = [part.strip() for part in text.split(";")] if several else as_list(text)
    listed = several or text.strip().startswith("[")
    if mapping and not listed and all(":" in part for part in parts):
        parts = [text.strip()]  # `16GB:24,24GB:8` is one mapping
    values: list[Any] = []
    for value in parts:
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
        pairs: The places in `specs` of jobs that train the two experts of one model.
    """

    name: str
    specs: list[JobSpec]
    pairs: list[tuple[int, int]] = field(default_factory=list)


def expand(
    store: Store,
    values: Mapping[str, Any],
    swept: Mapping[str, Sequence[Any]],
    *,
    group: str = "",
    read: Callable[[Mapping[str, Any]], JobSpec] = lambda values: load_spec(None, values),
) -> Sweep:
    """Describe a job for each combination of values; with `both_experts`, one for each expert.

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
    made = Sweep(group, [])
    names: set[str] = set()
    for combination in itertools.product(*swept.values()):
        own = dict(zip(swept, combination, strict=True))
        words = ", ".join(f"{key}={value}" for key, value in own.items())
        given = {**values, **own, "name": base, "sweep": group}
        try:
            spec = settle(read(given))
            parts = {"": spec}
            if spec.both_experts and (flavours := experts_of(spec)):
                if spec.other_expert:
                    raise SpecError(
                        "both_experts: the two jobs will name each other as the other expert",
                        "remove other_expert, or both_experts to queue one job",
                    )
                given["both_experts"] = False
                parts = {
                    flavour.rpartition("-")[2]: settle(read(given | {"model_flavour": flavour}))
                    for flavour in flavours
                }
                made.pairs.append((len(made.specs), len(made.specs) + 1))
        except SpecError as error:
            where = f"sweep, {words}" if words else base
            raise SpecError(f"{where}: {error.message}", error.hint) from None
        for expert, spec in parts.items():
            read_back = spec.to_dict()
            name = free_name(_name(base, {key: read_back[key] for key in own}, expert), names)
            names.add(name)
            made.specs.append(spec.model_copy(update={"name": name}))
    _check_distinct(made.specs, swept)
    return made


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


def queue_all(
    store: Store, plans: Sequence[Plan], pairs: Sequence[tuple[int, int]] = ()
) -> list[Job]:
    """Queue the jobs of plans, in this order: all of them, or none.

    Args:
        store: The jobs.
        plans: The plans.
        pairs: See `Sweep`.

    Raises:
        UserError: Files of one cannot be written; nothing was queued.
    """
    new = [service.new_job(plan) for plan in plans]
    for pair in pairs:
        _introduce(new, plans, pair)
    jobs = store.add_all(new)
    service.start_if_free(store, jobs[0])
    return [store.get(job.id) for job in jobs]


def _introduce(new: list[NewJob], plans: Sequence[Plan], pair: tuple[int, int]) -> None:
    """Let the job files of two experts name each other's run directory.

    Both have one only when the second is prepared, which therefore writes the first file again.
    """
    places: dict[int, RunDir] = {}

    def prepare(own: int, first: Callable[[RunDir], None], run_dir: RunDir) -> None:
        first(run_dir)
        places[own] = run_dir
        if len(places) < len(pair):
            return
        for place, other in (pair, pair[::-1]):
            named = {"other_expert": str(places[other].root)}
            text = dump_spec(plans[place].spec.model_copy(update=named))
            service.write_job_file(places[place], text)

    for place in pair:
        new[place] = replace(new[place], prepare=partial(prepare, place, new[place].prepare))


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


def _name(base: str, own: Mapping[str, Any], expert: str) -> str:
    """Return a job's name: the sweep's, what the job differs in, and which expert it trains."""
    words = [short_text(key, value, between="") for key, value in own.items()]
    parts = "-".join(filter(None, [*words, expert]))
    tail = re.sub(r"-{2,}", "-", re.sub(r"[^A-Za-z0-9._-]", "-", parts)).strip("-")[
        -_LONGEST_NAME // 2 :
    ]
    return f"{base[: _LONGEST_NAME - len(tail) - 1]}-{tail}"
