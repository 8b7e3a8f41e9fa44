"""The order in which test files start."""

from __future__ import annotations

from typing import Final

# The slowest files, slowest first. A file is the unit that a worker takes: started last, one of
# these would keep one worker busy for minutes while the other has nothing left to do.
SLOWEST_FIRST: Final = (
    "cuda/test_jobs.py",
    "cuda/test_launched.py",
    "engine/families/test_ranks.py",
    "e2e/test_training.py",
    "engine/parallel/test_parity.py",
    "tui/test_walkthrough.py",
    "engine/checkpoint/test_resume_ranks.py",
    "tui/terminal/test_bytes.py",
    "e2e/test_data.py",
    "engine/checkpoint/test_checkpoint_kills.py",
    "tui/test_snapshots.py",
    "engine/memory/test_memory_ranks.py",
    "engine/memory/test_memory.py",
    "tui/test_habits.py",
    "tui/cli/test_export.py",
    "engine/parallel/test_context_parallel.py",
    "engine/data/test_data_ranks.py",
    "e2e/test_replay.py",
    "e2e/test_full_disk.py",
    "tui/cli/test_detect.py",
    "engine/blocks/test_blocks.py",
    "engine/checkpoint/test_checkpoints.py",
    "engine/families/test_families.py",
    "engine/toy/test_toy.py",
    "jobs/memory/test_estimate.py",
    "e2e/test_fault_matrix.py",
    "e2e/test_imports.py",
    "jobs/doctor/test_ranks.py",
    "engine/model/encoders/test_text_encoders.py",
    "engine/sample/test_sampling_ranks.py",
    "engine/exports/test_exports_ranks.py",
    "engine/exports/test_exports_memory.py",
    "jobs/spec/file/test_flags.py",
    "jobs/spec/file/test_load.py",
)
