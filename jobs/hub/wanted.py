"""Find the models and datasets that a job names, and which must be fetched to this machine."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, Final

from jobs.errors import UserError
from jobs.hub import fetches
from jobs.machine.engine_tools import ToolError
from jobs.models.find_model import find_index
from jobs.models.scorers import is_scorer, missing_of, scorers_of
from jobs.paths import exists, expand
from jobs.run.rundir import read_json, write_atomic
from jobs.spec.values.datasets import sources_of
from jobs.spec.values.hub_names import HubName, StoreUrl, is_offline
from jobs.units import size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from jobs.queue.job import Job
    from jobs.run.rundir import RunDir
    from jobs.spec.job_spec import DataPlanKeys

_WHAT: Final = {"model": "its model", "dataset": "its dataset"}


def names_in(spec: DataPlanKeys) -> list[HubName]:
    """Return the models and the datasets that must be fetched, because no such path exists."""
    models = [spec.pretrained_model_name_or_path, *scorers_of(spec).values()]
    sources = [("dataset", text) for text in sources_of(spec)]
    texts = [*(("model", path) for path in models), *sources]
    names = [
        name
        for kind, text in texts
        if (name := HubName.read(kind, text)) is not None and not exists(expand(text))  # type: ignore[arg-type]
    ]
    return list(dict.fromkeys(names))


def find_missing(spec: DataPlanKeys) -> list[HubName]:
    """Return the names that are not cached, or not completely as far as can be checked offline."""
    return [name for name in names_in(spec) if not _is_complete(name)]


def copies_of_stores(spec: DataPlanKeys) -> list[str]:
    """Say for each store that a job reads how old its copy is: no job looks for changes."""
    stores = [name for name in names_in(spec) if isinstance(name, StoreUrl) and name.find()]
    return [
        f"{name} is used as it was on {time.strftime('%F %H:%M', time.localtime(name.looked_at))}; "
        f"`fsdp-tui fetch {name}` looks for changes"
        for name in stores
    ]


def _is_complete(name: HubName) -> bool:
    root = name.find()
    if isinstance(name, StoreUrl):
        return root is not None  # a snapshot is complete; only a newer one may be cut off
    if root is None or fetches.is_cut_off(name):
        return False
    if name.kind == "dataset":
        return True
    if is_scorer(read_json(root / "config.json")):
        return not missing_of(root)
    index = find_index(root) or {}
    parts = [part for part, entry in index.items() if isinstance(entry, list) and all(entry)]
    return bool(index) and all((root / part).is_dir() for part in parts)


def ask_sizes(
    names: Iterable[HubName], cancelled: Callable[[], bool] = lambda: False
) -> dict[HubName, int]:
    """Query the missing bytes of each name; complete ones are skipped.

    Empty if the hub is disabled or does not answer; the job is then checked without it.

    Raises:
        UserError: One cannot be downloaded; one sentence.
        Cancelled: `cancelled` returned True.
    """
    offline, sizes = is_offline(), {}
    for name in names:
        if offline and not isinstance(name, StoreUrl):
            continue
        try:
            sizes[name] = fetches.ask_size(name, cancelled)[0]
        except ToolError:  # no network
            return {}
        except UserError as error:
            # More likely, it is a mistyped folder.
            if name.kind == "dataset" and not isinstance(name, StoreUrl):
                raise UserError(f"no such dataset folder: {name}; and {error}") from None
            raise
    # A snapshot may lack nothing but being published.
    return {name: count for name, count in sizes.items() if count or isinstance(name, StoreUrl)}


def question(sizes: Mapping[HubName, int]) -> str:
    """Ask for confirmation: `FLUX.1-dev is not on this machine: fetch 31.4 GiB?`."""
    names = " and ".join(
        str(name) if isinstance(name, StoreUrl) else name.repo.partition("/")[2] for name in sizes
    )
    verb = "is" if len(sizes) == 1 else "are"
    return f"{names} {verb} not on this machine: fetch {size(sum(sizes.values()))}?"


# -- waiting jobs -------------------------------------------------------------------------


def note(run_dir: RunDir, names: Iterable[HubName]) -> None:
    """Record the downloads that a queued job waits for; none if `names` is empty.

    Forgets how earlier downloads ended, so that only a running or future one decides about the job.
    """
    absent = list(names)
    values = [{"kind": name.kind, "name": str(name)} for name in absent]
    if values:
        for name in absent:
            fetches.forget_ended(name)
        write_atomic(waits_file(run_dir), json.dumps({"waits_for": values}) + "\n", durable=True)
    else:
        forget(run_dir)


def forget(run_dir: RunDir) -> None:
    """Record that a job no longer waits."""
    waits_file(run_dir).unlink(missing_ok=True)


def noted(run_dir: RunDir) -> list[HubName]:
    """Return the downloads that a queued job waits for."""
    path = waits_file(run_dir)
    values: Any = (read_json(path) or {}).get("waits_for") if path.exists() else None
    names = [
        HubName.read(
            "dataset" if entry.get("kind") == "dataset" else "model", str(entry.get("name"))
        )
        for entry in (values if isinstance(values, list) else [])
        if isinstance(entry, dict)
    ]
    return [name for name in names if name is not None]


def why_waiting(run_dir: RunDir) -> tuple[str, bool]:
    """Return why a queued job cannot start yet, resuming a download that a reboot interrupted.

    Returns:
        The reason, "" if there is none, and whether it makes the job fail.

    Raises:
        UserError: A download cannot be started.
    """
    for name in noted(run_dir):
        # check this first, so that the status read next is the final one
        runs = fetches.is_under_way(name)
        now = fetches.look_at(name)
        ended = now is not None and now.state in ("failed", "done")
        if not ended and not runs:
            if fetches.has_just_started(name):
                return (
                    f"waiting for {_WHAT[name.kind]}: its fetch does not run; trying again in a "
                    f"minute; see {fetches.log_of(name)}"
                ), False
            fetches.start(name)
            return f"waiting for {_WHAT[name.kind]}: listing its files", False
        if now is None:
            return f"waiting for {_WHAT[name.kind]}: listing its files", False
        if now.state == "failed":
            return f"{_WHAT[name.kind]} could not be fetched: {now.reason}", True
        if now.state != "done":
            return f"waiting for {_WHAT[name.kind]}: {now}", False
    return "", False


def end_unwanted(job: Job, queue: Iterable[Job]) -> None:
    """End the downloads of a job that left the queue, unless another job or user waits for them."""
    needed = {name for other in queue if other.id != job.id for name in noted(other.run_dir)}
    for name in noted(job.run_dir):
        if name not in needed and not fetches.is_waited_for(name):
            fetches.end(name)
    forget(job.run_dir)


def waits_file(run_dir: RunDir) -> Path:
    """Return the file that lists the downloads a queued job waits for."""
    return run_dir.root / "fetch.json"
