"""The bare launch line that `show --as accelerate` prints trains the toy, by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from jobs import service
from jobs.run.eventlog import EventLog
from jobs.run.rundir import RunDir
from jobs.service.replay import replay
from jobs.spec.file.load import load_spec
from tests.support.engine.toy_jobs import toy_values

if TYPE_CHECKING:
    from jobs.queue.store import Store

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.usefixtures("no_gpus")]
PATIENCE = 600.0  # seconds; a slow machine under load, not an expectation
# Stands for accelerate's command; see the fixture `forked`.
ACCELERATE = """#!/bin/sh
exec "$PYTHON_EXEC" -m accelerate.commands.accelerate_cli "$@"
"""


@pytest.fixture
def environment(tmp_path: Path, forked: str) -> dict[str, str]:
    """In which `accelerate` is at hand."""
    script = tmp_path / "bin" / "accelerate"
    script.parent.mkdir()
    script.write_text(ACCELERATE)
    script.chmod(0o700)
    paths = [script.parent, Path(sys.prefix, "bin")]
    return os.environ | {"PATH": os.pathsep.join([*map(str, paths), os.environ["PATH"]])}


def ended(root: Path) -> int:
    """The last step of a run that completed."""
    run_dir = RunDir(root)
    log = EventLog(run_dir.events).read_all()
    assert "completed" in (run_dir.rank_log(0).read_text()), run_dir.rank_log(0).read_text()
    assert (run_dir.export / "pytorch_lora_weights.safetensors").is_file()
    assert log.last is not None
    return log.last.step


def test_the_line_trains(
    store: Store, toy: Path, tmp_path: Path, started: list[int], environment: dict[str, str]
) -> None:
    values = toy_values(toy, max_train_steps=2, num_processes=1, name="hand")
    job = service.submit(store, load_spec(None, values))
    done = subprocess.run(
        ["bash", "-ec", replay(job, "accelerate")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert ended(tmp_path / "hand-by-hand") == 2


def test_a_config_file_of_the_persons_own_launches_the_engine(
    toy: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    """A run directory with nothing but a job file, and their file as it is."""
    root = tmp_path / "run"
    root.mkdir()
    config = tmp_path / "mine.yaml"
    config.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nmixed_precision: 'no'\n"
        "num_processes: 1\nnum_machines: 1\nuse_cpu: true\n"
    )
    values = toy_values(toy, max_train_steps=2, accelerate_config=str(config))
    (root / "job.yaml").write_text(yaml.safe_dump(values))
    done = subprocess.run(
        ["accelerate", "launch", "--config_file", str(config), "-m", "engine", str(root)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        env=environment | {"XDG_CACHE_HOME": str(tmp_path / "cache")},
    )
    assert done.returncode == 0, done.stderr
    assert ended(root) == 2
