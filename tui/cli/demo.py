"""`fsdp-tui demo` and `toy`: small models to experiment with.

The demo starts from a small trained model and teaches it hearts with a LoRA on two ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from jobs import service
from jobs.errors import UserError
from jobs.machine import devices
from jobs.machine.bytecode import bytecode_variables
from jobs.queue.states import ACTIVE, State
from jobs.queue.store import Store
from jobs.spec.file.load import load_spec
from tui.app.start import open_dashboard
from tui.cli.echo import echo
from tui.cli.job.follow import follow_job
from tui.cli.job_arguments import JSON

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs.queue.store import Job

NAME: Final = "demo"
RANKS: Final = 2
JOB: Final[dict[str, Any]] = {
    "name": NAME,
    "model_type": "lora",
    "model_family": "flux",
    "model_flavour": "dev",
    "resolution": 64,
    "train_batch_size": 16,
    "max_train_steps": 300,
    "learning_rate": 2e-3,
    "lr_scheduler": "cosine",
    "adam_beta2": 0.99,
    "timestep_sampling": "shift",
    "flow_shift": 6,
    "mixed_precision": "no",
    "lora_rank": 32,
    "num_processes": RANKS,
    "strategy": "fsdp2",
    "max_sequence_length": 16,
    "checkpointing_steps": 100,
    "checkpoints_total_limit": 2,
    "validation_on_startup": True,
    "validation_steps": 25,
    "validation_num_inference_steps": 20,
}


@click.command()
@click.option(
    "--headless", is_flag=True, help="Follow the job here instead of opening the dashboard."
)
def demo(headless: bool) -> int:
    """Teach a small FLUX.1 to draw hearts: a LoRA on 2 ranks, in about 2 minutes without a GPU."""
    store = Store()
    job = start_demo(store, say=echo)
    if headless:
        status = follow_job(store, job.id)
    else:
        open_dashboard(store, select=job.id)
        status = 0
    for line in results_of(job):
        echo(line)
    return status


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--family", default="flux", show_default=True, help="Model family.")
@click.option("--flavour", help="Model flavour (default: the family's main one).")
@JSON
def toy(directory: Path, family: str, flavour: str | None, as_json: bool) -> None:
    """Write a small real model (DIRECTORY/model) and captioned images (DIRECTORY/data).

    Models that make videos get some of them too (DIRECTORY/videos), if PyAV is installed, with
    sound if they make it. DIRECTORY/control has conditioning images for models that take them.
    """
    where = write_toy(directory, family, flavour)
    echo(json.dumps(where) if as_json else "\n".join(where.values()))


def start_demo(store: Store, say: Callable[[str], None]) -> Job:
    """Return the demo job that is queued or running, or submit a new one.

    Args:
        store: The jobs.
        say: Called with a message before slow operations.
    """
    service.refresh(store)
    for job in store.in_states([State.QUEUED, *ACTIVE]):
        if job.name == NAME:
            return job
    root = store.home / "demo"
    if not ((root / "base").is_dir() and (root / "hearts").is_dir()):
        say(f"writing a small trained FLUX.1 and images of hearts to {root} (first use) …")
    where = _ask_engine("engine.demo", root.absolute())
    enough = len(devices.gpus()) >= RANKS
    values = JOB | {
        "pretrained_model_name_or_path": where["model"],
        "dataset": where["data"],
        "validation_prompts": where["prompts"],
        "device": "auto" if enough else "cpu",
    }
    return service.submit(store, load_spec(None, values))


def results_of(job: Job) -> list[str]:
    """Score the demo's samples at its first and its newest complete step, one line each.

    Empty until two steps have all samples: a run may be writing some now, or was stopped early.
    """
    counts = _ask_engine("engine.demo.judge", job.run_dir.samples)
    totals = [step.get("hearts", 0) + step.get("others", 0) for step in counts]
    steps = [step for step, total in zip(counts, totals, strict=True) if total == max(totals)]
    if len(steps) < 2:
        return []
    return [
        f"step {step['step']:>3}: {step['hearts_right']} of {step['hearts']} hearts and "
        f"{step['others_right']} of {step['others']} other shapes drawn correctly"
        for step in (steps[0], steps[-1])
    ] + [f"images: {job.run_dir.samples}"]


def write_toy(directory: Path, family: str, flavour: str | None = None) -> dict[str, str]:
    """Write a toy in a subprocess, since it needs torch.

    Returns:
        The directories: `model`, `data`, and where there are such `control` and `videos`.

    Raises:
        UserError: The directory cannot be written, or the family has no toy.
    """
    flags = ["--family", family, *(["--flavour", flavour] if flavour else []), "--json"]
    where: dict[str, str] = _ask_engine("engine.toy", directory.absolute(), *flags)
    return where


def _ask_engine(module: str, directory: Path, *flags: str) -> Any:
    """Run an engine command and return the JSON values that it prints last.

    Raises:
        UserError: It fails; the message is its last line on standard error.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, str(directory), *flags],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONSAFEPATH": "1"} | bytecode_variables(),
        check=False,
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise UserError(lines[-1].removeprefix("fsdp-tui: "))
    return json.loads(done.stdout.strip().splitlines()[-1])
