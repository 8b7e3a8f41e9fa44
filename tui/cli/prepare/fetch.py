"""`fsdp-tui fetch`, and the prompt of `submit` and `run` to fetch what is missing."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Final

import click

from jobs.errors import UserError
from jobs.hub import fetches
from jobs.hub.wanted import ask_sizes, find_missing, names_in, question
from jobs.machine.engine_tools import ToolError
from jobs.spec.data_tool import NOT_NEEDED
from jobs.spec.values.hub_names import HubName, StoreUrl, is_url, why_refused
from jobs.units import size
from tui.cli.echo import ProgressLine, echo
from tui.cli.job_arguments import JSON, read_job, warn

if TYPE_CHECKING:
    from jobs.hub.fetches import Fetch
    from jobs.spec.job_spec import DataPlanKeys

FETCH: Final = click.option(
    "--fetch", is_flag=True, help="Fetch a missing model or dataset without asking."
)
_INTERRUPTED: Final = 130


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME …]")
@click.option("--dataset", "datasets", is_flag=True, help="The names are names of datasets.")
@click.option(
    "--job",
    "job_file",
    type=click.Path(),
    metavar="JOB.yaml",
    help="Fetch what this job file names.",
)
@click.option("--dry-run", "--dry_run", is_flag=True, help="Only say how much would be fetched.")
@click.option("--background", is_flag=True, help="Do not wait for the end.")
@JSON
def fetch(
    names: tuple[str, ...],
    datasets: bool,
    job_file: str | None,
    dry_run: bool,
    background: bool,
    as_json: bool,
) -> int:
    """Fetch models or datasets from the Hugging Face hub, or datasets from an object store.

    Names are ORG/NAME or ORG/NAME@REVISION; a dataset may have a folder: ORG/NAME/FOLDER, or be an
    address such as s3://BUCKET/FOLDER. Only the files that a job reads are fetched, into the usual
    cache (HF_HOME; of stores, XDG_CACHE_HOME). It continues when the connection closes; Ctrl-C
    stops it, and the same command continues after the last complete file.

    \b
    fsdp-tui fetch black-forest-labs/FLUX.1-dev
    fsdp-tui fetch --dataset ORG/NAME
    fsdp-tui fetch s3://BUCKET/FOLDER
    fsdp-tui fetch --job job.yaml --dry-run
    """
    hub_names = [_read(text, datasets=datasets) for text in names]
    if job_file is not None:
        hub_names += names_in(read_job((job_file,), ignoring=NOT_NEEDED))
    if not hub_names and job_file is None:
        raise click.UsageError("name a model, or pass --job JOB.yaml")
    fetched = []
    for name in dict.fromkeys(hub_names):
        missing, total = fetches.ask_size(name)
        if (missing or isinstance(name, StoreUrl)) and not dry_run:
            fetched.append(_fetch(name, background=background) | {"bytes": total})
        else:
            fetched.append(
                {"name": str(name), "kind": name.kind, "bytes": total, "missing": missing}
            )
        if not as_json:
            _tell(fetched[-1], name)
    if as_json:
        echo(json.dumps(fetched))
    return 0


def offer(spec: DataPlanKeys, *, fetch: bool, dry_run: bool = False) -> list[HubName]:
    """Offer to fetch what a job lacks; return what the user agreed to.

    The hub is not queried if nobody could answer the prompt.
    """
    ask = sys.stdin.isatty() and sys.stderr.isatty()
    if not (fetch or dry_run or ask) or not (missing := find_missing(spec)):
        return []
    sizes = ask_sizes(missing)
    if dry_run:
        for name, count in sizes.items():
            echo(f"fsdp-tui: would fetch {name}: {size(count)}", err=True)
    elif sizes and not fetch:
        click.confirm(question(sizes), default=True, abort=True, err=True)
    return list(sizes)


def _read(text: str, *, datasets: bool) -> HubName:
    kind, name = "dataset" if datasets or is_url(text) else "model", text
    if text.startswith("datasets/"):
        kind, name = "dataset", text.removeprefix("datasets/")
    if why := why_refused(text):
        raise UserError(why)
    hub_name = HubName.read(kind, name)  # type: ignore[arg-type]
    if hub_name is None:
        raise UserError(f"{text} is not a name of the hub", "use ORG/NAME or ORG/NAME@REVISION")
    return hub_name


def _fetch(name: HubName, *, background: bool) -> dict[str, object]:
    if background:
        fetches.start(name)
        return {"name": str(name), "kind": name.kind, "state": "fetching"}
    warned = ""

    with fetches.waiting_for(name), ProgressLine(f"fetching {name}") as line:
        fetches.start(name)  # a job that is stopped in the meantime ignores it

        def tell(now: Fetch) -> None:
            nonlocal warned
            if now.state == "waiting" and now.reason != warned:
                warned = now.reason
                line.clear()
                warn(f"{now.reason}; trying again")
            line(now.done, now.total, str(now))

        try:
            ended = fetches.wait(name, tell)
        except KeyboardInterrupt:
            fetches.end(name)
            line.clear()
            echo(f"fsdp-tui: stopped; `fsdp-tui fetch {name}` continues", err=True)
            raise SystemExit(_INTERRUPTED) from None
    if ended.state != "done":
        raise ToolError(f"{name} could not be fetched: {ended.reason}")
    if ended.reason:
        warn(f"{name} has changed since it was fetched last: {ended.reason}")
    return {"name": str(name), "kind": name.kind, "path": ended.path}


def _tell(facts: dict[str, object], name: HubName) -> None:
    if path := facts.get("path"):
        echo(path)
    elif facts.get("state"):
        echo(f"{name} is being fetched")
    elif missing := facts["missing"]:
        echo(f"{name}: {size(float(str(missing)))} to fetch of {size(float(str(facts['bytes'])))}")
    else:
        echo(name.find() or f"{name} is on this machine")
