"""What `python -m engine.data` and those who ask it (`jobs.machine.engine_tools`) agree on."""

from __future__ import annotations

from typing import Final

# What a job may lack when only its data is checked; then no tokens are counted.
NOT_NEEDED: Final = ("pretrained_model_name_or_path",)

STRIP_GAP: Final = 6
"""Pixels left of, between, right of and below the images of a strip."""
