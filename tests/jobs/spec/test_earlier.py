"""Jobs that earlier versions wrote down whole, before training had shifts of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from jobs.spec.file.flags import to_flags
from jobs.spec.file.load import load_spec
from jobs.spec.job_spec import JobSpec, upgraded
from jobs.spec.rules.warnings import find_warnings
from jobs.spec.values.yaml_lines import dump_mapping

if TYPE_CHECKING:
    from pathlib import Path

BASE: dict[str, Any] = {"pretrained_model_name_or_path": "no/such", "dataset": "no/such"}


def earlier(**values: Any) -> dict[str, Any]:
    """A job as it was written down before there was `huber_schedule`."""
    written = JobSpec(**BASE | {"model_flavour": None} | values).to_dict()
    del written["huber_schedule"]
    return written


@pytest.mark.parametrize("family", ["flux", "sdxl"])
def test_a_job_without_a_threshold_gets_no_schedule_for_it(family: str) -> None:
    spec = JobSpec(**earlier(model_family=family))
    assert spec.huber_schedule == "snr", "the default"
    assert not any("huber" in warning for warning in find_warnings(spec))
    assert "huber_schedule" not in spec.to_dict(only_set=True)
    assert not any("huber" in flag for flag in to_flags(spec))


@pytest.mark.parametrize("loss", ["huber", "smooth_l1"])
def test_a_job_with_a_threshold_keeps_it_constant(loss: str) -> None:
    assert JobSpec(**earlier(loss_type=loss)).huber_schedule == "constant"


def test_a_job_is_upgraded_once() -> None:
    once = upgraded(earlier(timestep_sampling="shift"))
    assert once["flow_shift"] == "sampler"
    assert upgraded(once | {"flow_shift": None})["flow_shift"] is None
    assert upgraded(BASE) == BASE, "a person's file"


@pytest.mark.parametrize(
    ("flags", "shift", "schedule"),
    [
        ({}, "sampler", "constant"),
        ({"flow_shift": None}, None, "constant"),
        ({"flow-shift": "none"}, None, "constant"),
        ({"flow_shift": "3"}, 3.0, "constant"),
        ({"huber_schedule": "snr"}, "sampler", "snr"),
        ({"loss_type": "mse", "huber_schedule": None}, "sampler", "snr"),
    ],
)
def test_flags_win_over_what_a_job_is_upgraded_to(
    flags: dict[str, Any], shift: Any, schedule: str, tmp_path: Path
) -> None:
    """Of `edit ID --flow_shift=none`, and of `submit old.yaml` with flags."""
    path = tmp_path / "job.yaml"
    path.write_text(
        dump_mapping(earlier(model_family="flux2", timestep_sampling="shift", loss_type="huber"))
    )
    spec = load_spec(path, flags)
    assert (spec.flow_shift, spec.huber_schedule) == (shift, schedule)
