"""A Slurm of shell scripts: `sbatch`, `squeue`, `sinfo`, `scancel`, `scontrol`, `srun` on PATH.

A job is a folder with a file for each column. Tests move jobs from state to state themselves;
`start` runs the batch script as a node would.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.support.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

_HEAD = """#!/bin/sh
if [ -e "$FAKE_SLURM/away" ]; then
  echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2; exit 1
fi
echo "$(basename "$0") $*" >> "$FAKE_SLURM/calls"
"""
_SQUEUE = """
column() { cat "$1"; }
row() {
  for c in name state reason restarts starts nodes; do
    printf '\\037'; cat "$FAKE_SLURM/jobs/$1/$c"
  done
}
if [ "$2" = --jobs ]; then
  if [ ! -d "$FAKE_SLURM/jobs/$3" ]; then
    echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1
  fi
  cat "$FAKE_SLURM/jobs/$3/state"; exit 0
fi
if [ "$2" = --states=PENDING ]; then
  if [ -e "$FAKE_SLURM/waiting" ]; then cat "$FAKE_SLURM/waiting"; fi; exit 0
fi
if [ -e "$FAKE_SLURM/listing" ]; then cat "$FAKE_SLURM/listing"; exit 0; fi
for d in "$FAKE_SLURM"/jobs/*/; do
  [ -d "$d" ] || continue
  id=$(basename "$d"); printf '%s' "$id"; row "$id"; printf '\\037\\n'
done
"""
_SBATCH = """
for script; do :; done
if [ -e "$FAKE_SLURM/refuse" ]; then cat "$FAKE_SLURM/refuse" >&2; exit 1; fi
id=1; while ! mkdir "$FAKE_SLURM/jobs/$id" 2>/dev/null; do id=$((id+1)); done
cd "$FAKE_SLURM/jobs/$id"
sed -n 's/^#SBATCH --job-name=//p' "$script" | tr -d '\\n' > name
printf PENDING > state; printf None > reason; printf 0 > restarts; printf N/A > starts
printf '' > nodes; cp "$script" script
if [ -e "$FAKE_SLURM/mute" ]; then
  echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv" >&2; exit 1
fi
echo "$id"
"""
_SCANCEL = """
for id; do :; done
case "$1" in
--signal=*) echo "$1 $id" >> "$FAKE_SLURM/signals"; exit 0;;
esac
if [ ! -d "$FAKE_SLURM/jobs/$id" ]; then
  echo "scancel: error: Kill job error on job id $id: Invalid job id specified" >&2; exit 1
fi
printf CANCELLED > "$FAKE_SLURM/jobs/$id/state"
cd "$FAKE_SLURM/jobs/$id"
if [ -e pid ]; then /bin/kill -KILL -- "-$(cat pid)"; fi
"""
_SCONTROL = """
cd "$FAKE_SLURM/jobs/$2" || exit 1
n=$(cat restarts); printf '%s' $((n+1)) > restarts; printf PENDING > state
if [ -e pid ]; then /bin/kill -KILL -- "-$(cat pid)"; fi
"""
_SINFO = """
if [ -e "$FAKE_SLURM/partitions" ]; then cat "$FAKE_SLURM/partitions"; fi
if [ -e "$FAKE_SLURM/slow" ]; then exec sleep 60; fi
"""


@dataclass
class FakeSlurm:
    """The cluster of a test."""

    root: Path
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @classmethod
    def on_path(cls, root: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
        """Make it, and let this process and its children find it."""
        (root / "jobs").mkdir(parents=True)
        (root / "bin").mkdir()
        scripts = {"squeue": _SQUEUE, "sbatch": _SBATCH, "scancel": _SCANCEL, "scontrol": _SCONTROL}
        scripts["sinfo"] = _SINFO
        for name, text in scripts.items():
            _write(root / "bin" / name, _HEAD + text)
        rank = ROOT / "tests" / "support" / "jobs" / "fakes" / "srun.py"
        _write(root / "bin" / "srun", f'#!/bin/sh\nexec {sys.executable} {rank} "$@"\n')
        monkeypatch.setenv("FAKE_SLURM", str(root))
        monkeypatch.setenv("PATH", f"{root / 'bin'}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        return cls(root)

    def ids(self) -> list[str]:
        return sorted((path.name for path in (self.root / "jobs").iterdir()), key=int)

    def set(self, slurm_id: str, state: str, **columns: object) -> None:
        for name, value in {"state": state, **columns}.items():
            (self.root / "jobs" / slurm_id / name).write_text(str(value))

    def get(self, slurm_id: str, column: str) -> str:
        return (self.root / "jobs" / slurm_id / column).read_text().strip()

    def forget(self, slurm_id: str) -> None:
        """As Slurm does some minutes after a job has ended."""
        (self.root / "jobs" / slurm_id).rename(self.root / f"forgotten-{slurm_id}")

    def away(self, *, away: bool = True) -> None:
        """Take the controller away, or bring it back."""
        self.say("away", "" if away else None)

    def say(self, name: str, text: str | None) -> None:
        if text is None:
            (self.root / name).unlink(missing_ok=True)
        else:
            (self.root / name).write_text(text)

    def calls(self, command: str) -> int:
        path = self.root / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return sum(line.startswith(f"{command} ") for line in lines)

    def signals(self) -> list[str]:
        """What `scancel` was to send, and where to."""
        return (self.root / "signals").read_text().splitlines()

    def start(self, slurm_id: str) -> subprocess.Popen[bytes]:
        """Run the batch script of a job, as the first node of its allocation does."""
        folder = self.root / "jobs" / slurm_id
        self.set(slurm_id, "RUNNING", nodes="n[1-2]")
        environment = os.environ | {
            "SLURM_JOB_ID": slurm_id,
            "SLURM_JOB_NAME": self.get(slurm_id, "name"),
            "SLURM_RESTART_COUNT": self.get(slurm_id, "restarts"),
        }
        with open(folder / "log", "ab") as log:
            batch = subprocess.Popen(
                ["/bin/bash", str(folder / "script")],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        (folder / "pid").write_text(str(batch.pid))
        self.started.append(batch)
        return batch

    def end(self, slurm_id: str, state: str | None = None) -> None:
        """Wait for the batch script, and say how it ended, as Slurm would."""
        status = self.started[-1].wait()
        self.set(slurm_id, state or ("FAILED" if status else "COMPLETED"))

    def clean_up(self) -> None:
        for batch in self.started:
            if batch.poll() is None:
                os.killpg(batch.pid, signal.SIGKILL)
            batch.wait()


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)
