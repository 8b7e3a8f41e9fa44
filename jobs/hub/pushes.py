"""Store the progress of a job's pushes in its run directory."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from jobs.run.rundir import read_json, write_atomic

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.run.rundir import RunDir


@dataclass(frozen=True)
class Push:
    """Progress of a job's pushes.

    Attributes:
        repo: The target repository, once it is known.
        pushed: Steps of the pushed checkpoints.
        url: URL of the latest commit.
        problem: Why the latest attempt failed; "" after a success.
    """

    repo: str = ""
    pushed: list[int] = field(default_factory=list)
    url: str = ""
    problem: str = ""

    @classmethod
    def read(cls, run_dir: RunDir) -> Push:
        """Read the stored progress; an empty one if it is missing or unusable."""
        values: dict[str, Any] = read_json(pushes_file(run_dir)) or {}
        try:
            steps = [int(step) for step in values["pushed"]]
            return cls(str(values["repo"]), steps, str(values["url"]), str(values["problem"]))
        except (LookupError, TypeError, ValueError):
            return cls()

    def keep(self, run_dir: RunDir) -> Push:
        """Write the progress to the run directory."""
        pushes_file(run_dir).parent.mkdir(mode=0o700, exist_ok=True)
        write_atomic(pushes_file(run_dir), json.dumps(asdict(self)) + "\n", durable=True)
        return self


def go_back(run_dir: RunDir, step: int) -> None:
    """Forget that later steps were pushed, because they will be trained again."""
    before = Push.read(run_dir)
    kept = [pushed for pushed in before.pushed if pushed <= step]
    if kept != before.pushed:
        replace(before, pushed=kept).keep(run_dir)


def pushes_file(run_dir: RunDir) -> Path:
    """Return the path of the progress file."""
    return run_dir.root / "hub" / "push.json"
