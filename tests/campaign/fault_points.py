"""Every file operation of every command that changes the queue, broken: killed there, refused by a
full disk from there on, or failed once by a disk with an error.

After each, without the fault: the database is whole; what the command said is true: with status 0
it did all that it does without a fault, with another nothing, or it says what; a kill left one or
the other; nothing lies around that `doctor` does not list; and the same command, given again, comes
to the same end. Operations are those of the command's own process that change something in the
state directory or the cache; a write is torn in its middle by a kill and by a full disk.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import yaml
from PIL import Image

from jobs.doctor.orphans import find_orphans
from jobs.queue.states import State
from jobs.queue.store import Store
from jobs.run.rundir import event
from tests.campaign.faults import Broken
from tests.campaign.journal import dice
from tests.support.jobs.checkpoints import save_checkpoint
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from tests.campaign.journal import Journal

SOURCE: Final = Path(__file__).with_suffix(".c")
FAULTS: Final = {"kill": 1, "ENOSPC": 2, "EIO": 3}
COMMANDS: Final[dict[str, str]] = {
    "submit": "submit {job} --name=new",
    "edit": "edit 1 --max_train_steps=7 --name=other",
    "hold": "hold 1",
    "release": "release 3",
    "move": "move 2 --first",
    "move both": "move 1 --last --priority=5",
    "pause": "pause",
    "pause off": "pause --off",
    "stop queued": "stop 2",
    "stop active": "stop 4",
    "resume": "resume 5",
    "resume changed": "resume 6 --max_train_steps=90",
    "resume from": "resume 7 --from=2",
    "remove": "remove 6 --yes",
    "remove row": "remove 6 --keep-files",
    "prune": "prune --keep-last=1 --yes",
    "delete": "checkpoints 7 --delete 2 --yes",
    "save now": "save-now 4",
    "export": "export 8",
    "export again": "export 9 --dtype=bf16",
    "push": "push 7",
}
# A job is removed, moved or resumed for good with its row; these say so with another status.
_SAYS_SO: Final = ("is removed, but", "removed 4 jobs, but", "step-2 deleted, but", "is pushed to")
_DONE_ALREADY: Final = (0, 2)
_COLUMNS: Final = (
    "id name state ranks wanted total_steps run_dir attempt stop_level priority held shares"
    " auto_resume gpus"
)
_JOBS: Final = ("one", "two", "held", "active", "stopped", "failed", "completed")
_TRAINED: Final = ("trained", "exported")


@dataclass(frozen=True)
class Point:
    """An operation to break.

    Attributes:
        command: Its name in `COMMANDS`.
        fault: Its name in `FAULTS`.
        at: The number of the operation, from 1.
    """

    command: str
    fault: str
    at: int

    def __str__(self) -> str:
        return f"{self.command}/{self.fault}"


@dataclass(frozen=True)
class Picture:
    """What a state directory holds, without times and random names."""

    rows: dict[int, Any]
    files: dict[int, Any]
    settings: dict[str, str]
    orphans: frozenset[str]

    def differs(self, other: Picture) -> str:
        """Name what differs, orphans aside; "" if nothing does."""
        found = [
            f"job {number}: {ours.get(number, 'none')} / {theirs.get(number, 'none')}"
            for ours, theirs in ((self.rows, other.rows), (self.files, other.files))
            for number in sorted({*ours, *theirs})
            if ours.get(number) != theirs.get(number)
        ]
        if self.settings != other.settings:
            found.append(f"{self.settings} / {other.settings}")
        return "; ".join(found)[:400]


class Place:
    """A state directory as it was before each command, and a process that runs the commands."""

    def __init__(self) -> None:
        memory = Path("/dev/shm")
        folder = memory if os.access(memory, os.W_OK) else None
        self._folder = tempfile.TemporaryDirectory(prefix="fault-points-", dir=folder)
        self.base = Path(self._folder.name)
        self.root, self.kept = self.base / "root", self.base / "kept"
        self.home = self.root / "home"
        library = self.base / "fault_points.so"
        subprocess.run(
            ["gcc", "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"], check=True
        )
        self._runner = self._start(library)
        # A process that has torch forks slowly, and only exports need it.
        self._exporter = self._start(library, self.base)
        self._ends: dict[str, Picture] = {}
        self._prepare()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for runner in (self._runner, self._exporter):
            runner.communicate()
        self._folder.cleanup()

    def _start(self, *words: Path) -> subprocess.Popen[str]:
        with (self.base / "log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.campaign.faulted", *map(str, words)],
                cwd=ROOT,
                env=os.environ | {"LD_PRELOAD": str(words[0]), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    # -- a command -------------------------------------------------------------------------

    def run(self, words: Sequence[str], fault: int = 0, at: int = 0) -> dict[str, Any]:
        """Run a command on the state directory as it is."""
        asked = {
            "words": list(words),
            "root": str(self.root),
            "fault": fault,
            "at": at,
            "out": str(self.base / "out"),
            "err": str(self.base / "err"),
            "environment": {
                "FSDP_TUI_HOME": str(self.home),
                "XDG_CACHE_HOME": str(self.root / "cache"),
                "XDG_CONFIG_HOME": str(self.root / "config"),
            },
        }
        runner = self._exporter if words[0] == "export" else self._runner
        assert runner.stdin is not None
        assert runner.stdout is not None
        runner.stdin.write(json.dumps(asked) + "\n")
        runner.stdin.flush()
        answer: dict[str, Any] = json.loads(runner.stdout.readline())
        return answer

    def words(self, command: str) -> list[str]:
        return COMMANDS[command].format(job=self.base / "job.yaml").split()

    def restore(self) -> None:
        """Make everything as it was before any command."""
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.copytree(self.kept, self.root, symlinks=True)

    def end_of(self, command: str) -> Picture:
        """What a command leads to without a fault."""
        if command not in self._ends:
            self.restore()
            done = self.run(self.words(command))
            if done["status"] != 0:
                raise RuntimeError(f"{command}: {done}")
            self._ends[command] = self.picture()
        return self._ends[command]

    @cached_property
    def before(self) -> Picture:
        self.restore()
        return self.picture()

    def points(self, commands: Sequence[str] = tuple(COMMANDS)) -> list[Point]:
        """List every operation of the commands, once for each fault."""
        found = []
        for command in commands:
            for fault, number in FAULTS.items():
                self.restore()
                count = self.run(self.words(command), number)["count"]
                found += [Point(command, fault, at + 1) for at in range(count)]
        return found

    # -- what is looked at -----------------------------------------------------------------

    def picture(self) -> Picture:
        """Look at the state directory, by SQLite and the file system alone.

        Raises:
            Broken: The database is damaged.
        """
        with closing(sqlite3.connect(self.home / "jobs.db")) as db:
            db.row_factory = sqlite3.Row
            whole = db.execute("PRAGMA integrity_check").fetchone()[0]
            if whole != "ok":
                raise Broken(f"the database is damaged: {whole}")
            rows = list(db.execute("SELECT * FROM jobs ORDER BY priority DESC, queued, id"))
            settings = {row["name"]: row["value"] for row in db.execute("SELECT * FROM settings")}
            changes = Counter(
                (row["job"], row["after"]) for row in db.execute("SELECT * FROM history")
            )
        waiting = [row["id"] for row in rows if row["state"] == State.QUEUED]
        pictured, files = {}, {}
        for row in rows:
            State(row["state"])
            place = waiting.index(row["id"]) if row["id"] in waiting else None
            noted = {after: n for (job, after), n in changes.items() if job == row["id"]}
            pictured[row["id"]] = ([row[name] for name in _COLUMNS.split()], place, noted)
            files[row["id"]] = _files(Path(row["run_dir"]))
        ours = {Path(row["run_dir"]).name for row in rows}
        orphans = frozenset({path.name for path in (self.home / "runs").iterdir()} - ours)
        return Picture(pictured, files, settings, orphans)

    # -- what is there before a command ----------------------------------------------------

    def _prepare(self) -> None:
        for name in ("home", "cache", "config"):
            (self.root / name).mkdir(parents=True, mode=0o700)
        job = self.base / "job.yaml"
        job.write_text(yaml.safe_dump(_values(self.base)))
        self._demand("pause")
        for name in _JOBS:
            self._demand("submit", str(job), f"--name={name}")
        self._demand("export", "--help")  # the toy is made by then
        for name in _TRAINED:
            self._demand("submit", str(self.base / "toy.json"), f"--name={name}")
        self._settle(Store(self.home))
        shutil.copytree(self.root, self.kept)

    def _demand(self, *words: str) -> None:
        done = self.run(words)
        if done["status"] != 0:
            raise RuntimeError(f"{words}: {done}")

    def _settle(self, store: Store) -> None:
        _end(store)
        for number in range(len(_JOBS) + 1, len(_JOBS) + len(_TRAINED) + 1):
            job = store.get(number)
            store.change(number, State.STOPPED, "asked to")
            shutil.copytree(self.base / "saved", job.run_dir.checkpoints)
        self._demand("export", str(number))


def _values(base: Path) -> dict[str, Any]:
    """A job that passes every check, with its model and its pictures."""
    model, data = base / "model", base / "data"
    for part in ("transformer", "vae"):
        (model / part).mkdir(parents=True)
        (model / part / "config.json").write_text("{}")
        none = struct.pack("<Q", 2) + b"{}"
        (model / part / "diffusion_pytorch_model.safetensors").write_bytes(none)
    (model / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    data.mkdir()
    Image.new("RGB", (512, 512)).save(data / "a.png")
    (data / "a.txt").write_text("a picture")
    return {
        "pretrained_model_name_or_path": str(model),
        "dataset": str(data),
        "device": "cpu",
        "num_processes": 2,
        "max_train_steps": 5,
        "mixed_precision": "no",
    }


def _end(store: Store) -> None:
    """Give the jobs their states; two have trained, and one was exported."""
    held, active, stopped, failed, completed = (store.get(number) for number in range(3, 8))
    store.hold(held.id, True)
    store.change(stopped.id, State.STOPPED, "asked to")
    for job, end in ((active, None), (failed, State.FAILED), (completed, State.STOPPED)):
        store.claim(job.id, [], "starting on CPU ranks")
        store.change(job.id, State.RUNNING, "all ranks are up")
        run_dir = job.run_dir
        run_dir.events.write_text(event("start", step=0) + event("step", step=1, loss=0.5))
        run_dir.rank_log(0).write_text("trained\n")
        if job is completed:
            for step in (2, 3, 4):
                save_checkpoint(run_dir, step)
            run_dir.export.mkdir()
            facts = {"job": "completed", "step": 4, "ema": False}
            (run_dir.export / "export.json").write_text(json.dumps(facts))
        if end is not None:
            store.change(job.id, end, "for some reason")
    with store.write() as db:  # long ago, so that whoever looks gives it a supervisor
        db.execute("UPDATE jobs SET started=1 WHERE id=?", (active.id,))


def _files(root: Path) -> Any:
    """What a run directory holds, without logs and what is hidden."""
    if not root.exists():
        return "gone"
    found = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_file() and not any(part.startswith(".") for part in Path(name).parts):
            found[name] = sha256(path.read_bytes()).hexdigest()[:12]
    return found


def trial(journal: Journal, number: int, place: Place, points: Sequence[Point]) -> None:
    """Break one operation of one command."""
    point = points[number]
    last = ""
    try:
        last = _break(place, point)
    except Broken as error:
        journal.note(number, str(point), f"{point.at}: {error}")
    else:
        journal.note(number, str(point), at=point.at, broken=last)


def shuffled(points: list[Point], seed: int) -> list[Point]:
    """Return the points in the order of a campaign: any beginning of it is a sample."""
    order = list(points)
    dice("fault-points", seed, 0).shuffle(order)
    return order


def _break(place: Place, point: Point) -> str:
    """Break an operation, and check what became of it.

    Returns:
        The operation in words.

    Raises:
        Broken: Something that was promised does not hold.
    """
    words, before, after = place.words(point.command), place.before, place.end_of(point.command)
    place.restore()
    done = place.run(words, FAULTS[point.fault], point.at)
    what = f"{done['last']}, status {done['status']} {done['err'].strip()[-300:]!r}"
    if not done["last"]:
        raise Broken(f"nothing was broken: {done['count']} operations")
    store = Store(place.home)  # as any command opens it, and settles what a kill left
    now = place.picture()
    listed = {orphan.path.name for orphan in find_orphans(store)}
    try:
        if unlisted := now.orphans - after.orphans - listed:
            raise Broken(f"the doctor does not list {', '.join(sorted(unlisted))}")
        _check(done, now, before, after)
        _check_again(place, words, now, before, after)
    except Broken as error:
        raise Broken(f"{error} ({what})") from None
    return str(done["last"])


def _check(done: dict[str, Any], now: Picture, before: Picture, after: Picture) -> None:
    """Check what a command did, and what it said."""
    status, text = done["status"], done["err"]
    _check_text(done)
    nothing, all_of_it = now.differs(before), now.differs(after)
    if status == 0 and all_of_it:
        raise Broken(f"status 0, but not done: {all_of_it}")
    if status > 0 and nothing and (all_of_it or not any(words in text for words in _SAYS_SO)):
        raise Broken(f"failed, but something is done: {nothing}")
    if nothing and all_of_it and not _is_some_of_them(now, before, after):
        raise Broken(f"half done: {nothing}, and {all_of_it}")


def _check_text(done: dict[str, Any]) -> None:
    text = done["err"]
    if "Traceback" in text or "Error:" in text:
        raise Broken("a traceback")
    if done["status"] > 0 and not text.startswith("fsdp-tui: "):
        raise Broken("no sentence")
    if done["status"] not in (-9, 0, 1, 2):
        raise Broken("no status of ours")


def _is_some_of_them(now: Picture, before: Picture, after: Picture) -> bool:
    """Whether each job is as before or as after: one command for several jobs, killed between."""
    return {*before.rows} - {*after.rows} > {*before.rows} - {*now.rows} and all(
        now.rows.get(number) in (before.rows[number], after.rows.get(number))
        and now.files.get(number) in (before.files[number], after.files.get(number))
        for number in before.rows
    )


def _check_again(
    place: Place, words: Sequence[str], now: Picture, before: Picture, after: Picture
) -> None:
    """Give the same command again, without a fault."""
    done = place.run(words)
    _check_text(done)
    again = place.picture()
    if now.differs(after):
        if done["status"] != 0:
            raise Broken(f"again: status {done['status']} {done['err'].strip()!r}")
        if differs := again.differs(after):
            raise Broken(f"again, another end: {differs}")
    elif done["status"] not in _DONE_ALREADY:
        raise Broken(f"again, though done: status {done['status']} {done['err'].strip()!r}")


def table(journal: Journal) -> str:
    """What a campaign found, a line a command."""
    lines = [f"{'':<16}" + "".join(f"{fault:>18}" for fault in FAULTS)]
    for command in COMMANDS:
        cells = [f"{command}/{fault}" for fault in FAULTS]
        found = [f"{journal.broke[c]} of {journal.counts[c]} broke" for c in cells]
        lines.append(f"{command:<16}" + "".join(f"{cell:>18}" for cell in found))
    return "\n".join(lines)
