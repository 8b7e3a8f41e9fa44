"""Rules for other tools' experiment tracker keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, get_args

from jobs.imports.common.draft import is_off, named, needless, when
from jobs.imports.common.training_keys import OWN_DIRECTORIES
from jobs.spec.keys.tracking import Tracker, read_trackers

if TYPE_CHECKING:
    from jobs.imports.common.draft import Draft, Rule

_OFF: Final = "no tracker is used"


def report_to(draft: Draft, key: str, value: Any) -> None:
    """One tracker or several, as accelerate's scripts name them."""
    if is_off(value):
        draft.unneeded(key, "off is the default")
        return
    names = read_trackers(value if isinstance(value, list) else str(value))
    supported = [name for name in names if name in get_args(Tracker)]
    if supported:
        others = ", ".join(str(name) for name in names if name not in supported)
        draft.take(key, "report_to", supported, f"without {others}" if others else "")
    else:
        draft.unsupported(key, f"set report_to: {', '.join(get_args(Tracker))}, or several")


def wandb(draft: Draft, key: str, value: Any) -> None:
    """Take the switch for Weights & Biases."""
    if is_off(value):
        draft.unneeded(key, "off is the default")
    else:
        draft.take(key, "report_to", ["wandb"], "the equivalent value")


def of_trackers(ours: str) -> Rule:
    """Make a rule for a key that has an effect only if there is a tracker.

    It must run after the rule of the key that names the tracker.
    """
    return when(lambda draft: draft.values.get("report_to"), named(ours), _OFF)


def logging_dir(draft: Draft, key: str, value: Any) -> None:
    """Take a separate log directory; one below the output is part of the run directory here."""
    if draft.values.get("report_to") and str(value).startswith(("/", "~")):
        draft.take(key, "logging_dir", value)
    else:
        draft.unneeded(key, OWN_DIRECTORIES)


RULES: Final[dict[str, Rule]] = {
    "report_to": report_to,
    "tracker_project_name": of_trackers("tracker_project_name"),
    "tracker_name": of_trackers("tracker_project_name"),
    "tracker_run_name": of_trackers("tracker_run_name"),
    "tracker_image_layout": needless("each prompt has its own images"),
    "logging_dir": logging_dir,
}
