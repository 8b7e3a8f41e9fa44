"""Which noise levels the scripts draw, and how they weight them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from jobs.imports.common import models
from jobs.imports.common.draft import as_number, is_off

if TYPE_CHECKING:
    from jobs.imports.common.draft import Draft

_UNIFORM: Final = ("uniform", "uniform_shift")
# Scripts draw among the steps of a FlowMatchEulerDiscreteScheduler, which shifts those of these
# families alike at all sizes. The others' are shifted by tokens, and only while sampling; Sana's
# are not, since the class does not know `flow_shift`.
_SHIFTS: Final[dict[str, float | str | None]] = {
    "sd3": None,  # the family's is its scheduler's
    "lumina2": 1 / 6,  # its 6, of the share of data that the script calls sigma
    "z_image": "sampler",
    "hidream": 3.0,
}
# A scheme's weight times sigma squared, where that is not just sigma squared; None for no key's.
_PRECONDITIONED: Final = {"sigma_sqrt": "none", "cosmap": None}


def weighting(draft: Draft, key: str, value: Any) -> None:
    """Set how sigma is drawn, and how it weights the loss."""
    word = str(value).strip().lower()
    if models.family_of(draft).objective != "flow":
        draft.unneeded(key, "only for flow-matching models")
    elif word == "mode" and models.family_of(draft).name in _SHIFTS:
        draft.values["timestep_sampling"] = "mode"
        draft.unsupported(key, "timestep_sampling: mode is not shifted, and the script's is")
    elif word == "mode":
        draft.take(key, "timestep_sampling", "mode")
    elif word in ("none", "logit_normal", "sigma_sqrt", "cosmap"):
        name = models.family_of(draft).name
        plain, moved = ("logit_normal", "shift") if word == "logit_normal" else _UNIFORM
        how = "with the model scheduler's shift" if name in _SHIFTS else "drawn as in the script"
        draft.take(key, "timestep_sampling", moved if name in _SHIFTS else plain, how)
        if shift := _SHIFTS.get(name):
            draft.values["flow_shift"] = shift
        if word == "sigma_sqrt" and name == "lumina2":
            draft.unsupported(key, "loss_weighting follows the noise, the script's the data")
        elif word in ("sigma_sqrt", "cosmap"):
            draft.values.setdefault("loss_weighting", word)
    else:
        draft.unsupported(key, "set timestep_sampling and loss_weighting")


def preconditioned(draft: Draft, key: str, value: Any) -> None:
    """Weight by sigma squared, as SD3's scripts do unless told otherwise.

    They compare the data that the velocity implies, whose error is sigma times the velocity's.
    """
    scheme = str(draft.get("weighting_scheme")).strip().lower()
    if is_off(value) or as_number(value) == 0:
        draft.unneeded(key, "the loss is computed on the predicted velocity")
    elif models.family_of(draft).name != "sd3":
        draft.unsupported(key, "the loss is computed on the predicted velocity")
    elif (weight := _PRECONDITIONED.get(scheme, "sigma_squared")) is None:
        draft.unsupported(key, f"loss_weighting: {scheme} is used alone, not times sigma squared")
    else:
        draft.take(key, "loss_weighting", weight, f"with weighting_scheme: {scheme}")


def mode_scale(draft: Draft, key: str, value: Any) -> None:
    if str(draft.get("weighting_scheme")).strip().lower() == "mode":
        draft.take(key, "mode_scale", value)
    else:
        draft.unneeded(key, "only for weighting_scheme: mode")


def mean(draft: Draft, key: str, value: Any) -> None:
    """Invert the mean, which counts from the noisy end there."""
    number = as_number(value)
    if number is None:
        draft.unreadable(key, "not a number")
    elif models.family_of(draft).name == "lumina2":
        draft.take(key, "logit_mean", number, "0 is noise there, and 1 in the script's table")
    else:
        draft.take(key, "logit_mean", -number or 0.0, "sign inverted: 0 is noise there")
