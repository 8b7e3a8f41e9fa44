"""Constants shared by `python -m engine.data` and its callers (`jobs.machine.engine_tools`)."""

from __future__ import annotations

from typing import Final

# Keys that a job may lack if only its data is checked; tokens are not counted then.
NOT_NEEDED: Final = ("pretrained_model_name_or_path",)

STRIP_GAP: Final = 6
"""Pixels left of, between, right of and below the images of a strip."""
