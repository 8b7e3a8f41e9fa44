"""Locate exports, and read the facts stored in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from jobs.errors import UserError
from jobs.run.rundir import read_json

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.run.rundir import RunDir

# Facts about an export, written last, before it is renamed into place.
FACTS_FILE: Final = "export.json"


def export_facts(path: Path) -> dict[str, Any] | None:
    """Read an export's facts: job, step, ema, files; None if fsdp-tui did not write it."""
    return read_json(path / FACTS_FILE)


def default_place(run_dir: RunDir, step: int, *, ends: bool, ema_left_out: bool) -> Path:
    """Return the default directory for the export of a checkpoint.

    `export/` belongs to the run itself, for its final weights. It is also used for the newest
    checkpoint of a run that ended without an export; every other step has its own directory.

    Args:
        run_dir: The run.
        step: The checkpoint's step.
        ends: Whether it is the newest checkpoint and the run has ended.
        ema_left_out: Whether there are averaged weights but they are not exported.
    """
    if ends and not ema_left_out:
        before = (export_facts(run_dir.export) or {}).get("step")
        if before == step or not run_dir.export.exists():
            return run_dir.export
    name = f"{run_dir.export.name}-step-{step}" + ("-no-ema" if ema_left_out else "")
    return run_dir.root / name


def check_place(path: Path, facts: dict[str, Any]) -> None:
    """Refuse to replace anything but an earlier export with the same facts.

    Args:
        path: The export's destination.
        facts: The new export's `job`, `step`, `ema`, `dtype` and `single_file`.

    Raises:
        UserError: The destination contains something else.
    """
    try:
        if not path.exists() or (path.is_dir() and not any(path.iterdir())):
            return
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror})") from None
    before = export_facts(path)
    if before is None:
        raise UserError(f"{path} already exists and is not an export", "choose another --output")
    # Exports of earlier versions do not record their kind; all were directories.
    before = {"single_file": False} | before
    other = {name for name, value in facts.items() if before.get(name) != value}
    if other:
        words = {
            "ema": "with averaged weights" if before.get("ema") else "without averaged weights",
            "dtype": f"in dtype {before.get('dtype')}",
            "single_file": f"as {'a single file' if before['single_file'] else 'a directory'}",
        }
        how = "".join(f" {text}" for name, text in words.items() if name in other)
        raise UserError(
            f"{path} contains an export of job {before.get('job')} after step {before.get('step')}"
            f"{how}",
            "choose another --output, or remove it",
        )
