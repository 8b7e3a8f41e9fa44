"""The order in which test files start."""

from __future__ import annotations

from typing import Final

# The slowest files, slowest first. A file is the unit that a worker takes: started last, one of
# these would keep one worker busy for minutes while the other has nothing left to do.
SLOWEST_FIRST: Final = (
    "cuda/test_jobs.py",
    "cuda/test_launched.py",
    "families/test_ranks.py",
    "e2e/test_training.py",
    "engine/test_parity.py",
    "tui/test_walkthrough.py",
    "engine/test_resume_ranks.py",
    "tui/test_bytes.py",
    "e2e/test_data.py",
    "engine/test_checkpoint_kills.py",
    "tui/test_snapshots.py",
    "engine/test_memory_ranks.py",
    "engine/test_memory.py",
    "tui/test_every_key.py",
    "tui/test_habits.py",
    "cli/test_export.py",
    "engine/test_context_parallel.py",
    "engine/test_data_ranks.py",
    "e2e/test_replay.py",
    "e2e/test_full_disk.py",
    "cli/test_detect.py",
    "engine/test_blocks.py",
    "engine/test_checkpoints.py",
    "families/test_families.py",
    "engine/test_toy.py",
    "jobs/test_estimate.py",
    "e2e/test_fault_matrix.py",
    "e2e/test_imports.py",
    "doctor/test_ranks.py",
    "engine/test_text_encoders.py",
    "engine/test_sampling_ranks.py",
    "engine/test_exports_ranks.py",
    "engine/test_exports_memory.py",
    "jobs/test_flags.py",
    "jobs/test_specfile.py",
)
