"""Checkpoints for tests: real files and a true manifest, without torch."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from jobs.run.checkpoint_files import STATE_FILE
from jobs.run.rundir import MANIFEST

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.run.rundir import RunDir


def save_checkpoint(
    run_dir: RunDir,
    step: int,
    spec: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    **manifest: Any,
) -> Path:
    """A complete checkpoint of about 1 kB, that a job described by `spec` wrote."""
    path = run_dir.checkpoint(step)
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(bytes([step % 256]) * 1000)
    (path / STATE_FILE).write_text(
        json.dumps({"step": step, "spec": spec or {}, "data": data or {}})
    )
    files = {
        file.name: {
            "bytes": file.stat().st_size,
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        }
        for file in path.iterdir()
    }
    facts = {"step": step, "files": files, "layout": "sharded", "world_size": 2, "ema": False}
    (path / MANIFEST).write_text(json.dumps(facts | manifest))
    return path
