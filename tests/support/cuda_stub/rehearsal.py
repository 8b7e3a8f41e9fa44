"""Many jobs on stub GPUs, done at once for all tests of a file, and what became of each."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from jobs.models.scorers import CLIP, DINO
from jobs.run.eventlog import EventLog
from jobs.run.rundir import RunDir
from jobs.spec.families import FAMILIES
from tests.support.cuda_stub.stub import ROOT
from tests.support.engine.scorers import write_clip, write_dino
from tests.support.nvml_stub.stub import gpu

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.support.cuda_stub.stub import StubCuda
    from tests.support.nvml_stub.stub import StubNvml

STEPS: Final = 3
_PATIENCE: Final = 1500.0  # seconds; a slow machine under load, not an expectation
_GPUS: Final = (16, 24, 24, 24)  # GiB
TOY: Final = "{toy}"  # in a job's values: the directory of its toy


@dataclass(frozen=True)
class Job:
    """A toy job.

    Attributes:
        ranks: How many GPUs it has.
        values: What its file says beyond `values_of`.
        resumes: The job whose last checkpoint it begins with.
        full_in: Phase in which its GPUs run out of memory; see `counting`.
        cached_by: A job before it that has encoded its texts and pictures.
        adapted_by: A job before it whose export is its training adapter.
    """

    ranks: int
    values: Mapping[str, Any]
    resumes: str | None = None
    full_in: str | None = None
    cached_by: str | None = None
    adapted_by: str | None = None

    @property
    def family(self) -> str:
        return str(self.values.get("model_family", "flux"))

    @property
    def toy(self) -> str:
        """Its family, or `family:flavour` of another than the usual one."""
        flavour = self.values.get("model_flavour")
        return f"{self.family}:{flavour}" if flavour else self.family


@dataclass(frozen=True)
class Outcome:
    """What became of a job."""

    run_dir: RunDir
    ranks: int
    output: Path

    @property
    def error(self) -> str:
        """The traceback of a rank that failed; empty if none did."""
        texts = [str(error["trace"]) for error in self.run_dir.rank_errors()]
        if not texts and not all(self._counts(rank).exists() for rank in range(self.ranks)):
            texts = [self.output.read_text()[-3000:]]
        return "\n".join(texts)

    @cached_property
    def log(self) -> EventLog:
        return EventLog(self.run_dir.events).read_all()

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.run_dir.events.read_text().splitlines()]

    @cached_property
    def counts(self) -> list[dict[str, Any]]:
        """What each rank asked of its device; see `counting`."""
        return [json.loads(self._counts(rank).read_text()) for rank in range(self.ranks)]

    def _counts(self, rank: int) -> Path:
        return self.run_dir.root / f"cuda.{rank}.json"


class Rehearsal:
    """Does jobs below one directory.

    Args:
        root: Where toys, caches and run directories are.
        cuda: The stub.
        nvml: The one beside it.
    """

    def __init__(self, root: Path, cuda: StubCuda, nvml: StubNvml) -> None:
        self.root = root
        self._cuda = cuda
        self._nvml = nvml
        self._ranks: dict[str, int] = {}
        nvml.write([gpu(n, memory_total=size << 30) for n, size in enumerate(_GPUS)])

    def run(self, jobs: Mapping[str, Job]) -> None:
        """Do all of them, those with equally many ranks in the same processes."""
        toys = {job.toy: str(self._place_of(job.toy)) for job in jobs.values()}
        groups: dict[tuple[bool, int], dict[str, Any]] = {}
        for name, job in jobs.items():
            self._ranks[name] = job.ranks
            groups.setdefault((job.resumes is not None, job.ranks), {})[str(self.root / name)] = {
                "values": self.values_of(job.toy, num_processes=job.ranks)
                | json.loads(json.dumps(job.values).replace(TOY, toys[job.toy]))
                | self._begin(job),
                "full_in": job.full_in,
            }
        plan = {
            "toys": dict(sorted(toys.items())),
            "groups": [{"ranks": key[1], "jobs": groups[key]} for key in sorted(groups)],
        }
        (self.root / "plan.json").write_text(json.dumps(plan))
        with (self.root / "output.txt").open("w") as output:
            done = subprocess.run(
                [
                    self._cuda.python,
                    "-m",
                    "tests.support.cuda_stub.ranks",
                    str(self.root / "plan.json"),
                ],
                env=self._cuda.environment(self._nvml.environment),
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=_PATIENCE,
                check=False,
            )
        assert not done.returncode, (self.root / "output.txt").read_text()[-4000:]

    def _begin(self, job: Job) -> dict[str, Any]:
        if job.adapted_by is not None:
            return {"training_adapter": str(self.root / job.adapted_by / "export")}
        if job.values.get("validation_scores"):
            return {
                key: str(write(self.root / key))
                for key, write in ((CLIP, write_clip), (DINO, write_dino))
            }
        if job.resumes is None:
            return {}
        start = RunDir(self.root / job.resumes).checkpoint(STEPS)
        return {"resume_from_checkpoint": str(start), "max_train_steps": STEPS + 2}

    def __getitem__(self, name: str) -> Outcome:
        return Outcome(RunDir(self.root / name), self._ranks[name], self.root / "output.txt")

    def _place_of(self, toy: str) -> Path:
        return self.root / "toys" / toy.replace(":", "-")

    def values_of(self, toy: str, **changes: Any) -> dict[str, Any]:
        """A small job on a toy, in bf16 on GPUs. One of another flavour names its own data."""
        family, _, flavour = toy.partition(":")
        place = self._place_of(toy)
        return {
            "name": family.replace("_", "-"),
            "model_family": family,
            "pretrained_model_name_or_path": str(place / "model"),
            **({} if flavour else {"dataset": str(place / "data")}),
            "cache_dir": str(self.root / "cache"),
            "device": "cuda",
            "resolution": side_of(family),
            "max_sequence_length": 64,
            "lora_rank": 4,
            "max_train_steps": STEPS,
            "checkpointing_steps": 0,
            "validation_num_inference_steps": 2,
            **changes,
        }


def side_of(family: str) -> int:
    """Pixels of a toy's pictures; of families whose VAE shrinks a lot, more."""
    flavour = next(iter(FAMILIES[family].flavours))
    return 64 if FAMILIES[family].latent_step_of(flavour) <= 16 else 128


def prompt_of(family: str) -> dict[str, Any]:
    return {"prompt": "a red circle", "num_frames": FAMILIES[family].shortest, "seed": 3}
