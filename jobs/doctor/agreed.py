"""Constants shared by the doctor's processes and the processes that start them."""

from __future__ import annotations

from typing import Final

END: Final = "end"
"""The key of the last line that `python -m jobs.doctor` prints."""

RESULT: Final = "allreduce.json"
"""What rank 0 of `python -m engine.doctor.allreduce` leaves in its run directory: `sizes`, a list
of `bytes`, `seconds` and `bus` (bytes a second), and `gathered`, the same of one all-gather."""
