"""Real jobs through the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import yaml

from jobs.machine.processes import with_run_id
from jobs.queue.store import Store
from jobs.run.eventlog import EventLog
from jobs.run.rundir import RunDir
from tests.support.engine.toy_jobs import toy_values
from tests.support.forks import client as forks

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs.run.events import Step


PATIENCE = 400.0  # seconds; a slow machine under load, not an expectation


@dataclass
class Bench:
    """One state directory, shared by the jobs of this file (and so their caches).

    Attributes:
        home: An existing directory.
        toy: Holds `model` and `data`.
        forked: Whether the command line, and all that it starts, down to the ranks, is forked from
            the server that has imported everything (see `tests.support.forks`). The process tree is
            then another; all else is real.
        above: Whether what is above the ranks is forked as well.
    """

    home: Path
    toy: Path
    forked: bool = True
    above: bool = True

    @property
    def python(self) -> str:
        return forks.python() if self.forked and self.above else sys.executable

    @property
    def environment(self) -> dict[str, str]:
        forked = {"PYTHON_EXEC": forks.python()} if self.forked else {}
        return (
            os.environ
            | forked
            | {
                "FSDP_TUI_HOME": str(self.home / "state"),
                "XDG_CACHE_HOME": str(self.home / "cache"),
                "FSDP_TUI_CPU_JOBS": "1",
                "FSDP_TUI_RUNNER_IDLE": "2",
            }
        )

    @property
    def store(self) -> Store:
        return Store(self.home / "state")

    def cli(self, *words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.python, "-m", "tui", *words],
            env=self.environment,
            cwd=cwd or self.home,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )

    def job_file(self, **changes: Any) -> Path:
        path = self.home / "job.yaml"
        path.write_text(yaml.safe_dump(toy_values(self.toy, **{"num_processes": 2} | changes)))
        return path

    def submit(self, **changes: Any) -> int:
        done = self.cli("submit", str(self.job_file(**changes)))
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    def show(self, job: int) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads(self.cli("show", str(job), "--json").stdout)
        return facts

    def wait(self, job: int, *states: str) -> dict[str, Any]:
        self.until(lambda: self.store.get(job).state in states)
        return self.show(job)

    def run(self, **changes: Any) -> Run:
        """Run a job to its end."""
        job = self.submit(**changes)
        self.wait(job, "completed", "stopped", "failed", "lost")
        facts = self.show(job)
        assert facts["state"] == "completed", facts["reason"]
        return Run(job, RunDir(Path(facts["run_dir"])))

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, self.cli("list").stdout
            time.sleep(0.05)

    def wait_for_step(self, job: int, step: int) -> None:
        events = EventLog(self.store.get(job).run_dir.events)

        def reached() -> bool:
            events.poll()
            assert not self.store.get(job).state.ended, self.show(job)
            return events.last is not None and events.last.step >= step

        self.until(reached)

    def processes(self, job: int) -> list[psutil.Process]:
        return [psutil.Process(p.pid) for p in with_run_id(self.store.get(job).run_id)]


@dataclass(frozen=True)
class Run:
    """A finished job."""

    job: int
    files: RunDir

    @property
    def steps(self) -> list[Step]:
        return list(EventLog(self.files.events).read_all().steps)

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in EventLog(self.files.events).read_all().steps]

    @property
    def norms(self) -> list[float | None]:
        return [step.grad_norm for step in EventLog(self.files.events).read_all().steps]
