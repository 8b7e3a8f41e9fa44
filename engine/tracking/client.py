"""Adapt accelerate's trackers: how each one resumes a run and logs images."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from PIL import Image

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from accelerate.tracking import GeneralTracker

    from jobs.run.rundir import RunDir
    from jobs.spec.keys.tracking import TrackingKeys

# Trackers that can drop what was logged after the step that a run resumes from. The others already
# have the repeated steps, and must not get them twice.
TAKES_BACK: Final = frozenset({"tensorboard"})
# Trackers whose settings cannot change, or which would show the change as another run.
_SET_ONCE: Final = frozenset({"tensorboard", "mlflow"})
_SHORT_ID: Final = 21  # characters of SwanLab's ids


@dataclass
class Client:
    """One tracker of one run, open.

    Attributes:
        name: Its name in `report_to`.
        tracker: accelerate's tracker.
        offline: Whether it could not reach its service, and stores data on disk.
    """

    name: str
    tracker: GeneralTracker
    offline: bool = False

    @property
    def run_id(self) -> str | None:
        """Return the service's id of the run, if the service chooses it."""
        match self.name:
            case "mlflow":
                return str(self.tracker.tracker.info.run_id)
            case "aim":
                return str(self.tracker.tracker.hash)
            case "clearml":
                return str(self.tracker.tracker.id)
        return None

    def configure(self, values: dict[str, Any], *, again: bool) -> None:
        """Store the job's keys.

        Args:
            values: Plain values by key.
            again: Whether an earlier attempt of the job stored them already.
        """
        if not (again and self.name in _SET_ONCE):
            self.tracker.store_init_configuration(values)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.tracker.log(dict(values), step=step)

    def log_images(self, images: Mapping[str, Path], step: int) -> None:
        """Send images to trackers that support them."""
        send = getattr(self.tracker, "log_images", None)
        if send is None:
            return
        for name, path in images.items():
            with Image.open(path) as opened:
                picture = opened.convert("RGB")
            match self.name:
                case "tensorboard":
                    send({name: np.asarray(picture)[None]}, step=step, dataformats="NHWC")
                case "aim" | "clearml":
                    send({name: picture}, step=step)
                case _:
                    send({name: [picture]}, step=step)

    def finish(self) -> None:
        self.tracker.finish()


def open_client(
    name: str,
    spec: TrackingKeys,
    run_dir: RunDir,
    *,
    run_id: str,
    again: bool,
    resumed: int | None,
) -> Client:
    """Start a tracker, or continue the run that an earlier attempt of the job started.

    Args:
        name: Its name in `report_to`.
        spec: The job.
        run_dir: The job's run directory.
        run_id: Id of the run, new or from an earlier attempt.
        again: Whether an earlier attempt started it.
        resumed: The step that the attempt starts from; None if it has already logged.

    Raises:
        Exception: Any exception that the tracker raises.
    """
    PartialState(cpu=True)  # tells accelerate's trackers that this is the main process
    options = _options(name, spec, run_dir, run_id=run_id, again=again, resumed=resumed)
    try:
        return Client(name, _start(name, spec, run_dir, options))
    except Exception as error:
        if name != "wandb" or os.environ.get("WANDB_MODE"):
            raise
        print(f"wandb: {type(error).__name__}: recording offline")
        options["mode"] = "offline"
        return Client(name, _start(name, spec, run_dir, options), offline=True)


def _start(
    name: str, spec: TrackingKeys, run_dir: RunDir, options: dict[str, Any]
) -> GeneralTracker:
    place = str(spec.logging_dir or run_dir.tracking)
    os.makedirs(place, exist_ok=True)
    os.chdir(place)  # some trackers write to the working directory
    kind = LOGGER_TYPE_TO_CLASS[name]
    project = spec.tracker_project_name
    if name == "tensorboard":
        project = run_dir.root.name if spec.logging_dir else name
    if kind.requires_logging_directory:
        options = {"logging_dir": place, **options}
    tracker = kind(project, **options)
    tracker.start()
    return tracker


def _options(
    name: str, spec: TrackingKeys, run_dir: RunDir, *, run_id: str, again: bool, resumed: int | None
) -> dict[str, Any]:
    """Return a tracker's start options, except the project."""
    title = spec.tracker_run_name or run_dir.root.name
    place = spec.logging_dir or str(run_dir.tracking)
    match name:
        case "tensorboard":
            return {"purge_step": resumed + 1} if again and resumed is not None else {}
        case "wandb":
            return {"name": title, "id": run_id, "resume": "allow", "dir": place}
        case "trackio":
            return {"name": title, "resume": "allow"}
        case "mlflow":
            return {"run_name": title, "run_id": run_id if again else None}
        case "comet_ml":
            return {"experiment_key": run_id}
        case "aim":
            return {"run_hash": run_id if again else None, "experiment": title}
        case "clearml":
            return {
                "project_name": spec.tracker_project_name,
                "task_name": title,
                "continue_last_task": run_id if again else False,
            }
        case "dvclive":
            folder = os.path.join(place, run_dir.root.name if spec.logging_dir else name)
            return {"dir": folder, "resume": again, "save_dvc_exp": False}
        case "swanlab":
            return {
                "experiment_name": title,
                "id": run_id[:_SHORT_ID],
                "resume": "allow",
                "logdir": os.path.join(place, "swanlab"),
            }
    return {}
