"""Keys for experiment trackers."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, get_args

from pydantic import BeforeValidator

from jobs.spec.keys.groups import TRACKING
from jobs.spec.rules.no_effect import not_tracked
from jobs.spec.values.field import Keys, field
from jobs.spec.values.spellings import as_choice, as_list, as_none, as_off
from jobs.spec.values.value_types import OptionalText

Tracker = Literal[
    "tensorboard",
    "wandb",
    "trackio",
    "mlflow",
    "comet_ml",
    "aim",
    "clearml",
    "dvclive",
    "swanlab",
]
_SPELLINGS: Final = {"comet": "comet_ml", "weights_and_biases": "wandb"}


def read_trackers(value: Any) -> Any:
    """Read one name or several; `none` means no tracker."""
    value = as_list(as_off(value))
    if not isinstance(value, list | tuple):
        return [] if value is None else value
    names = [as_choice(word, (*get_args(Tracker), *_SPELLINGS)) for word in map(str, value)]
    names = [_SPELLINGS.get(name, name) for name in names if as_none(name)]
    return list(dict.fromkeys(names))


class TrackingKeys(Keys):
    """A part of `jobs.spec.job_spec.JobSpec`."""

    report_to: Annotated[list[Tracker], BeforeValidator(read_trackers)] = field(
        [],
        TRACKING,
        "Experiment trackers: tensorboard, wandb, trackio, mlflow, comet_ml, aim, clearml, "
        "dvclive, swanlab, or several; none turns tracking off. Log in to a service with its own "
        "command first.",
        resume="same",
        memory=False,
        words=get_args(Tracker),
        public=False,
    )
    tracker_project_name: str = field(
        "fsdp-tui",
        TRACKING,
        "Project that runs are grouped under.",
        resume="same",
        no_effect=not_tracked,
        memory=False,
        min_length=1,
        max_length=128,
    )
    tracker_run_name: OptionalText = field(
        None,
        TRACKING,
        "Name of the run in trackers (default: the job's ID and name).",
        resume="same",
        no_effect=not_tracked,
        memory=False,
    )
    logging_dir: OptionalText = field(
        None,
        TRACKING,
        "Directory of trackers that write files; each job gets a subdirectory (default: "
        "tracking/ in the run directory).",
        resume="same",
        no_effect=not_tracked,
        memory=False,
        path=True,
    )
