"""Jobs on stub GPUs as a person starts them: command line, supervisor, `accelerate launch`.

The first start has nothing of the tests in it; the processes of the others are forked (see
`tests.support.jobs.real_jobs`).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from jobs import service
from jobs.machine.processes import with_run_id
from jobs.queue.store import Store
from jobs.run.eventlog import EventLog
from tests.support.forks import client as forks
from tests.support.nvml_stub.stub import GIB, StubNvml, gpu, uuid
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from jobs.run.rundir import RunDir
    from tests.support.cuda_stub.stub import StubCuda

pytest_plugins = ["tests.support.nvml_stub.fixture", "tests.support.cuda_stub.fixture"]
pytestmark = [pytest.mark.e2e, pytest.mark.slow]
PATIENCE = 600.0  # seconds; a slow machine under load, not an expectation
ENDS = ("completed", "stopped", "failed", "lost")


@dataclass
class Machine:
    """A machine with stub GPUs, and one state directory."""

    home: Path
    toy: Path
    cuda: StubCuda
    nvml: StubNvml

    @property
    def store(self) -> Store:
        return Store(self.home / "state")

    def tui(self, *words: str, forked: bool = True) -> str:
        """What `fsdp-tui …` prints, run by the interpreter whose torch is built for CUDA.

        Args:
            words: The command.
            forked: Whether it and all that it starts is forked (see `tests.support.forks`).
        """
        environment = self.cuda.environment(self.nvml.environment)
        finite = ROOT / "tests" / "support" / "cuda_stub" / "launched"
        environment["PYTHONPATH"] = f"{finite}{os.pathsep}{environment['PYTHONPATH']}"
        python, own = self.cuda.python, {}
        if forked:
            # Libraries look for GPUs while they are imported; having asked CUDA, torch is never
            # forked.
            imports = environment | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
            own["PYTHON_EXEC"] = python = forks.python_like(python, imports)
        own |= {
            "FSDP_TUI_HOME": str(self.home / "state"),
            "XDG_CACHE_HOME": str(self.home / "cache"),
            "FSDP_TUI_RUNNER_IDLE": "2",
        }
        done = subprocess.run(
            [python, "-m", "tui", *words],
            env=environment | own,
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def submit(self, *, forked: bool = True, **changes: Any) -> int:
        values = {
            "pretrained_model_name_or_path": str(self.toy / "model"),
            "dataset": str(self.toy / "data"),
            "resolution": 64,
            "max_sequence_length": 64,
            "lora_rank": 4,
            "checkpointing_steps": 0,
            "validation_num_inference_steps": 2,
        }
        path = self.home / "job.yaml"
        path.write_text(yaml.safe_dump(values | changes))
        return int(self.tui("submit", str(path), forked=forked))

    def until(self, job: int, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, self.store.get(job)
            time.sleep(0.05)

    def wait(self, job: int) -> str:
        """The reason of its end."""
        self.until(job, lambda: str(self.store.get(job).state) in ENDS)
        return self.store.get(job).reason

    def stop_after(self, job: int, step: int) -> int:
        """Stop once that step is done; where it stopped."""
        events = EventLog(self.run_dir(job).events)

        def reached() -> bool:
            events.poll()
            assert not self.store.get(job).state.ended, self.store.get(job).reason
            return events.last is not None and events.last.step >= step

        self.until(job, reached)
        service.stop(self.store, job)
        reason = self.wait(job)
        assert str(self.store.get(job).state) == "stopped", reason
        (newest,) = self.run_dir(job).complete_checkpoints()[-1:]
        assert newest[0] >= step
        return newest[0]

    def completes(self, job: int, last: int) -> None:
        """Wait for its last step, a sample and an export; no step is missing or done twice."""
        assert self.wait(job) == f"trained {last} steps"
        files = self.run_dir(job)
        steps = [step.step for step in EventLog(files.events).read_all().steps]
        assert steps == list(range(1, last + 1))
        assert files.complete_checkpoints()[-1][0] == last
        assert (files.samples / f"step-{last}" / "00.png").exists()
        assert (files.export / "pytorch_lora_weights.safetensors").exists()

    def run_dir(self, job: int) -> RunDir:
        return self.store.get(job).run_dir

    def devices(self, job: int) -> list[tuple[str, str | None]]:
        return [(s.device, s.device_uuid) for s in self.run_dir(job).rank_statuses()]


@pytest.fixture(scope="module")
def machine(
    tmp_path_factory: pytest.TempPathFactory,
    stub_cuda: StubCuda,
    nvml_stub_library: Path,
    toy: Path,
) -> Iterator[Machine]:
    home = tmp_path_factory.mktemp("machine")
    (home / "state").mkdir(mode=0o700)
    machine = Machine(home, toy, stub_cuda, StubNvml(nvml_stub_library, home / "gpus.txt"))
    machine.nvml.write(4)
    yield machine
    for job in machine.store.all():
        for process in with_run_id(job.run_id):
            process.signal(signal.SIGKILL)


def test_one_gpu_then_four_then_two(machine: Machine) -> None:
    """Train, save and stop on one GPU; resume there, sample and export; go on with four and two."""
    job = machine.submit(
        forked=False,
        name="moves",
        gpus=1,
        max_train_steps=5000,
        validation_prompts=["a red circle"],
    )
    first = machine.stop_after(job, 1)
    assert machine.devices(job) == [("cuda:0", uuid(0))]
    launch = json.loads(machine.run_dir(job).launch_file.read_text())
    assert "--num_processes=1" in launch["command"]

    machine.tui("resume", str(job), f"--max_train_steps={first + 2}")
    machine.completes(job, first + 2)
    assert machine.devices(job) == [("cuda:0", uuid(0))]

    four = ["--gpus=4", "--strategy=hsdp", "--dp_replicate_size=2", "--max_train_steps=5000"]
    machine.tui("resume", str(job), *four)
    second = machine.stop_after(job, first + 3)
    assert machine.devices(job) == [(f"cuda:{rank}", uuid(rank)) for rank in range(4)]

    last = second + 2
    two = ["--gpus=[3, 1]", "--strategy=fsdp2", "--dp_replicate_size=", f"--max_train_steps={last}"]
    machine.tui("resume", str(job), *two)
    machine.completes(job, last)
    chosen = [(f"cuda:{rank}", uuid(index)) for rank, index in enumerate((3, 1))]
    assert machine.devices(job) == chosen
    assert not with_run_id(machine.store.get(job).run_id)


def test_a_full_gpu_ends_the_job_with_one_sentence(machine: Machine) -> None:
    """Of two GPUs one has hardly any memory left; the rank on the other one does not outlive it."""
    total = 80 * GIB
    machine.nvml.write(
        [
            gpu(
                index,
                memory_total=total,
                memory_used=(total - 4 * 2**20) * (index == 1),
                memory_reserved=0,
            )
            for index in range(2)
        ]
    )
    job = machine.submit(name="full", gpus=2, share_gpus=True, strategy="fsdp2", max_train_steps=3)
    reason = machine.wait(job)
    assert str(machine.store.get(job).state) == "failed"
    # Where exactly depends on what other tests have cached; `test_jobs.py` knows each place.
    full = r"rank 1 ran out of GPU memory (in|while) [^:]+: CUDA out of memory\. "
    assert re.match(full, reason), reason
    assert not with_run_id(machine.store.get(job).run_id), "no rank is left"
