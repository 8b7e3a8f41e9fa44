"""A rank that trains nothing and tells everything; `launcher.py` forks it.

It writes its status, rank 0 also events and checkpoints, through `jobs.run.rundir`, as the engine
does; stops at a step boundary when it is asked to, by file or by SIGTERM; and goes on after the
newest complete checkpoint. When another rank has died it waits for it in vain, as in a collective,
and then no SIGTERM moves it.

`FAKE_RANKS` holds words, separated by spaces, that change this. One that begins with `N:` concerns
rank N only:

    ignore-stop    does not look at the request file
    ignore-term    ignores SIGTERM
    die-on-term    is ended by SIGTERM at once, without a save
    hang@S         stands still at step S, for good, as in a collective: its heart still beats
    freeze@S       the same, without a heartbeat
    hold@S         stands still at step S until FAKE_GATES holds `train`
    crash@S        fails at step S with an error file
    exit@S         exits with status 7 at step S, without a word
    leave@S        exits with status 0 at step S, without a word
    save@S         saves at step S and goes on
    never-up       stays in the phase `start`
    imports        is in the phase `import` until it is up
    once           the above only in a run without a checkpoint

and more of the environment:

    FAKE_SAVE_EVERY    a checkpoint after every so many steps; else only at the end
    FAKE_STEP_BYTES    the data of the checkpoint of step N is N times as large
    FAKE_GATES         a folder: until it holds `start`, ranks stay in the phase `start`; until it
                       holds `save`, they stand in the middle of a save; until it holds `full`,
                       rank 0 keeps the disk full after a save that found no more space
    FAKE_LOCKSTEP      no rank begins a step before all have ended the one before
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from jobs.machine.processes import ProcessId
from jobs.machine.procfs import started_at
from jobs.run.fence import FENCE_VARIABLE, check_fence, taken_over
from jobs.run.rundir import MANIFEST, RankStatus, RunDir, event, write_atomic

SAVE_EVERY = int(os.environ.get("FAKE_SAVE_EVERY", "0"))
CHUNK = 1 << 16


class Rank:
    """One fake rank."""

    def __init__(self, run_dir: RunDir, rank: int, ranks: int, steps: int) -> None:
        self.run_dir, self.rank, self.ranks, self.steps = run_dir, rank, ranks, steps
        newest = run_dir.latest_checkpoint()
        self.step = newest[0] if newest else 0
        self.words = _words(rank, fresh=newest is None)
        self.started = started_at(os.getpid()) or 0.0
        self.phase, self.progressed = "start", time.time()
        self.terminated = False
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # as `engine.__main__`
        if "ignore-term" in self.words:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        elif "die-on-term" not in self.words:
            signal.signal(signal.SIGTERM, self._note_termination)

    def run(self) -> int:
        self.tell("import" if "imports" in self.words else "start")
        # As ranks do when they join their process group: nobody begins before all are there.
        while "never-up" in self.words or self.held_at("start") or self.is_early():
            self.wait()
        self.emit("start", step=self.step)
        self.log(f"starting after step {self.step}")
        self.emit("phase", name="train", state="begin", total=self.steps)
        while self.step < self.steps:
            self.tell("train")
            if (status := self.misbehave()) is not None:
                return status
            stop = self.wants_to_stop()
            while self.misses_a_rank() or self.is_ahead():
                self.wait()
            if stop:
                return self.end("stopped")
            time.sleep(float(os.environ.get("FAKE_STEP_SECONDS", "0.05")))
            self.step += 1
            self.emit("step", step=self.step, loss=1.0 / self.step, seconds=0.05)
            self.log(f"step {self.step}/{self.steps}")
            if SAVE_EVERY and self.step % SAVE_EVERY == 0:
                self.save()
        return self.end("completed")

    def wants_to_stop(self) -> bool:
        asked = self.run_dir.requested("stop") and "ignore-stop" not in self.words
        return asked or self.terminated

    def misses_a_rank(self) -> bool:
        """Whether another rank died in the middle of its work."""
        return any(
            other.phase != "end" and not ProcessId(other.pid, other.started).alive()
            for other in self.run_dir.rank_statuses()
        )

    def is_early(self) -> bool:
        return len(self.run_dir.rank_statuses()) < self.ranks

    def is_ahead(self) -> bool:
        if "FAKE_LOCKSTEP" not in os.environ:
            return False
        others = self.run_dir.rank_statuses()
        return any(s.step < self.step and s.phase != "end" for s in others)

    def held_at(self, gate: str) -> bool:
        gates = os.environ.get("FAKE_GATES")
        return gates is not None and not Path(gates, gate).exists()

    def misbehave(self) -> int | None:
        """Do what this step brings; an exit status if that is the end."""
        at = f"@{self.step}"
        if "save" + at in self.words:
            self.save()
            self.tell("train")
        while "hold" + at in self.words and self.held_at("train"):
            self.wait()
        while "hang" + at in self.words:
            self.wait()
        while "freeze" + at in self.words:
            time.sleep(0.05)
        if "crash" + at in self.words:
            self.log("Traceback (most recent call last):")
            record: dict[str, Any] = {
                "t": time.time(),
                "rank": self.rank,
                "type": "ValueError",
                "message": "a bad day",
                "phase": "train",
                "step": self.step,
            }
            write_atomic(self.run_dir.rank_error(self.rank), json.dumps(record))
            return 1
        if "exit" + at in self.words:
            self.log("so long")
            return 7
        return 0 if "leave" + at in self.words else None

    def end(self, reason: str) -> int:
        self.save()
        self.emit("end", reason=reason, step=self.step)
        self.log(reason)
        self.tell("end")
        return 0

    def save(self) -> None:
        """A collective, as in the engine: without all ranks nothing is completed."""
        if self.run_dir.checkpoint(self.step).exists():
            return
        self.tell("save")
        aside = self.run_dir.checkpoints / f".step-{self.step}.tmp"
        if self.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            self.write_data(aside)
        while self.held_at("save") or self.misses_a_rank():
            self.wait()
        if self.rank == 0:
            check_fence(self.run_dir.root)
            publish_checkpoint(aside, self.run_dir.checkpoint(self.step), self.step)
            self.emit("checkpoint", step=self.step)

    def write_data(self, aside: Path) -> None:
        """As the engine does when there is no space: tidy up, say so, exit at once."""
        try:
            write_data(aside, self.step)
        except OSError as error:
            while self.held_at("full"):
                time.sleep(0.02)
            shutil.rmtree(aside)
            record = {
                "t": time.time(),
                "rank": self.rank,
                "type": "OSError",
                "message": str(error),
                "phase": "save",
                "step": self.step,
            }
            write_atomic(self.run_dir.rank_error(self.rank), json.dumps(record))
            os._exit(1)

    def tell(self, phase: str | None = None) -> None:
        """Write the status; without a phase, only the heart beats."""
        if taken_over(self.run_dir.root):
            os._exit(1)
        if phase is not None:
            self.phase, self.progressed = phase, time.time()
        status = RankStatus(
            rank=self.rank,
            pid=os.getpid(),
            started=self.started,
            host="node",
            device="cpu",
            phase=self.phase,
            step=self.step,
            heartbeat=time.time(),
            progressed=self.progressed,
        )
        with suppress(OSError):  # as the engine: a full disk must not end the training
            write_atomic(self.run_dir.rank_file(self.rank), status.to_json())

    def wait(self) -> None:
        time.sleep(0.05)
        self.tell()

    def emit(self, kind: str, **values: Any) -> None:
        if self.rank == 0:
            whose = {"allocation": os.environ.get(FENCE_VARIABLE, "")}
            with open(self.run_dir.events, "a", encoding="utf-8") as file:
                file.write(event(kind, **values, **whose))

    def log(self, text: str) -> None:
        with (
            suppress(OSError),
            open(self.run_dir.rank_log(self.rank), "a", encoding="utf-8") as file,
        ):
            file.write(text + "\n")

    def _note_termination(self, *_: Any) -> None:
        self.terminated = True


def write_data(directory: Path, step: int) -> None:
    """The data of a checkpoint; on the disk when this returns."""
    size = step * int(os.environ.get("FAKE_STEP_BYTES", "1000"))
    with open(directory / "data.bin", "wb", buffering=0) as file:
        for offset in range(0, size, CHUNK):
            file.write(bytes([step % 256]) * min(CHUNK, size - offset))
        os.fsync(file.fileno())


def publish_checkpoint(aside: Path, final: Path, step: int) -> None:
    """Add the manifest, and rename into place."""
    files = {
        path.name: {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in aside.iterdir()
    }
    (aside / MANIFEST).write_text(json.dumps({"step": step, "files": files}))
    aside.rename(final)


def _words(rank: int, *, fresh: bool) -> set[str]:
    found = set()
    for word in os.environ.get("FAKE_RANKS", "").split():
        whose, colon, rest = word.rpartition(":")
        if not colon or whose == str(rank):
            found.add(rest)
    return found if fresh or "once" not in found else set()
