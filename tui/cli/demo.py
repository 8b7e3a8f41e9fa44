"""`fsdp-tui demo`: a toy model, captioned pictures, and a LoRA job on two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Final

from jobs import service
from jobs.errors import UserError
from jobs.machine import devices
from jobs.machine.bytecode import bytecode_variables
from jobs.queue.states import ACTIVE, State
from jobs.spec.file.load import load_spec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from jobs.queue.store import Job, Store

NAME: Final = "demo"
RANKS: Final = 2
JOB: Final[dict[str, Any]] = {
    "name": NAME,
    "model_type": "lora",
    "model_family": "flux",
    "model_flavour": "dev",
    "resolution": 64,
    "train_batch_size": 8,
    "max_train_steps": 600,
    "learning_rate": 3e-3,
    "lr_scheduler": "cosine",
    "mixed_precision": "no",
    "lora_rank": 16,
    "num_processes": RANKS,
    "strategy": "fsdp2",
    "max_sequence_length": 32,
    "checkpointing_steps": 200,
    "checkpoints_total_limit": 2,
    "validation_prompts": [
        "a red circle on a blue background",
        "a green star on a white background",
    ],
    "validation_steps": 200,
    "validation_num_inference_steps": 20,
}


def start_demo(store: Store, say: Callable[[str], None]) -> Job:
    """The demo job: the one that is queued or running, or a new one.

    Args:
        store: The jobs.
        say: Tells the person what takes a while.
    """
    service.refresh(store)
    for job in store.in_states([State.QUEUED, *ACTIVE]):
        if job.name == NAME:
            return job
    root = store.home / "demo"
    if not ((root / "model").is_dir() and (root / "data").is_dir()):
        say(f"writing a toy FLUX.1 and captioned images to {root} (first use, about 20 s) …")
    where = write_toy(root, "flux")
    enough = len(devices.gpus()) >= RANKS
    values = JOB | {
        "pretrained_model_name_or_path": where["model"],
        "dataset": where["data"],
        "device": "auto" if enough else "cpu",
    }
    return service.submit(store, load_spec(None, values))


def write_toy(directory: Path, family: str, flavour: str | None = None) -> dict[str, str]:
    """Write a toy, in a process of its own, since it takes torch.

    Returns:
        `model` and `data`: the two directories.

    Raises:
        UserError: It cannot be written there, or there is no toy of this family.
    """
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "engine.toy",
            str(directory.absolute()),
            "--family",
            family,
            *(["--flavour", flavour] if flavour else []),
            "--json",
        ],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONSAFEPATH": "1"} | bytecode_variables(),
        check=False,
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise UserError(lines[-1].removeprefix("fsdp-tui: "))
    where: dict[str, str] = json.loads(done.stdout.strip().splitlines()[-1])
    return where
