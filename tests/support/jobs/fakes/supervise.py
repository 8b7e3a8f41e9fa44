"""The real supervisor, with a fake launcher and shorter waits.

Importing what it needs takes far longer than most of the jobs of tests do. So `python supervise.py`
is a server that has imported it and forks supervisors, for the tests of a process and whatever
they start.

Everything that a test wants to be different is said in `FAKE_*` environment variables, which
supervisor, launcher and ranks inherit:

    FAKE_STEP_SECONDS     how long a step takes
    FAKE_RANKS            what ranks do besides training (see `fakes/rank.py`)
    FAKE_LAUNCHER         what the launcher does besides launching (see `fakes/launcher.py`)
    FAKE_TERM_GRACE, FAKE_FAILURE_GRACE, FAKE_STACKS_TAKE
                          seconds, in the place of the supervisor's own
    FAKE_TROUBLE          `build` or `housekeeping`: this raises in the supervisor
    FAKE_GATES            a folder: once it holds `haste`, nine seconds of the supervisor's clock
                          pass with each heartbeat of rank 0
"""

from __future__ import annotations

import errno
import gc
import json
import os
import socket
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

# All that a supervisor imports: what is missing here, each one imports by itself, which takes ten
# times as long as everything else that it does.
from jobs.backends.local import dispatch, ranks, report  # noqa: F401
from jobs.backends.local.__main__ import supervise
from jobs.launch import Launch
from jobs.machine.processes import RUN_ID_VARIABLE, ProcessId
from jobs.queue.store import SERVICE, Store
from jobs.run.rundir import RunDir
from jobs.spec.rules.strategy import world_size
from jobs.supervise import supervisor

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

    from jobs.queue.store import Job
    from jobs.run.rundir import RankStatus
    from jobs.spec.job_spec import JobSpec

HERE = Path(__file__).resolve().parent
ADDRESS = "FSDP_TUI_TESTS_SERVER"  # in the environment; an abstract socket
_HASTE = 4.0  # seconds; a supervisor that is not scheduled for ten begins to count again

_server: subprocess.Popen[str] | None = None


# -- asking for a supervisor -----------------------------------------------------------------


def start_supervisor(job: Job) -> None:
    """Stands in for `jobs.backends.local.dispatch._start_supervisor`."""
    if ADDRESS not in os.environ:
        _start_server()
    run_dir = job.run_dir
    run_dir.create()
    wish = {
        "job": job.id,
        "cwd": str(run_dir.root),
        "log": str(run_dir.supervisor_log),
        "env": os.environ | {"FSDP_TUI_HOME": str(run_dir.root.parent.parent)},
    }
    with socket.socket(socket.AF_UNIX) as server:
        server.connect("\0" + os.environ[ADDRESS])
        server.sendall(json.dumps(wish).encode() + b"\n")
        assert server.recv(1) == b"+", "no supervisor was started"


def _start_server() -> None:
    global _server
    # Its own group: who presses Ctrl-C wants the tests to end, and they end it. It belongs to no
    # state directory, and neither do supervisors before they are in theirs.
    _server = subprocess.Popen(
        [sys.executable, __file__],
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
        env={name: value for name, value in os.environ.items() if name != "FSDP_TUI_HOME"},
    )
    assert _server.stdout is not None
    os.environ[ADDRESS] = _server.stdout.readline().strip()


def stop_server() -> None:
    """End this process's server, if it has one; the supervisors go on."""
    global _server
    if _server is not None:
        _server.kill()
        _server.communicate()
        del os.environ[ADDRESS]
        _server = None


# -- the server ------------------------------------------------------------------------------


def serve() -> None:
    """Fork a supervisor for each line that comes; end with the process that started this one."""
    starter = os.getppid()
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0fsdp-tui-tests-{os.getpid()}-{time.monotonic_ns()}")
        server.listen(64)
        server.settimeout(1.0)
        print(server.getsockname()[1:].decode(), flush=True)
        while os.getppid() == starter:
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG) != (0, 0):
                    pass
            try:
                asker, _ = server.accept()
            except TimeoutError:
                continue
            with asker, asker.makefile("rb") as lines:
                asker.settimeout(None)
                wish = json.loads(lines.readline())
                if os.fork() == 0:
                    _become_supervisor(asker, **wish)


def _become_supervisor(
    asker: socket.socket, job: int, cwd: str, log: str, env: dict[str, str]
) -> NoReturn:
    """Leave the server, and be as if the product had started this process."""
    status = 1
    try:
        os.setsid()
        os.chdir(cwd)
        asker.sendall(b"+")
        os.closerange(3, 64)
        for number, path, mode in (
            (0, os.devnull, os.O_RDONLY),
            (1, log, os.O_WRONLY | os.O_APPEND | os.O_CREAT),
        ):
            file = os.open(path, mode, 0o600)
            os.dup2(file, number)
            os.close(file)
        os.dup2(1, 2)
        os.environ.clear()
        os.environ.update(env)
        disguise()
        supervise(Store(patience=SERVICE), job)
        status = 0
    except BaseException:
        traceback.print_exc()
    os._exit(status)


# -- the disguise ----------------------------------------------------------------------------


def start_nothing(patch: pytest.MonkeyPatch) -> list[int]:
    """No job gets a supervisor; the ids of those that would have got one, as they come."""
    started: list[int] = []
    patch.setattr(
        "jobs.backends.local.dispatch._start_supervisor", lambda job: started.append(job.id)
    )
    return started


def build(spec: JobSpec, run_dir: RunDir, *, gpus: Sequence[str], run_id: str) -> Launch:
    """Stands in for `jobs.launch.build_launch`."""
    if os.environ.get("FAKE_TROUBLE") == "build":
        raise ArithmeticError("an error that nobody thought of")
    command = [
        sys.executable,
        str(HERE / "launcher.py"),
        str(run_dir.root),
        str(world_size(spec)),
        str(spec.max_train_steps),
        str(spec.stop_grace_seconds),
    ]
    return Launch(command, {RUN_ID_VARIABLE: run_id})


def _no_space(*_: Any) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Hasty:
    """The module `time`, for a supervisor whose clock can be made to run; see `FAKE_GATES`."""

    def __init__(self, gate: Path) -> None:
        self._gate, self._gained, self._beat = gate, 0.0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def monotonic(self) -> float:
        return time.monotonic() + self._gained

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
        if self._gate.exists():
            while (beat := self._newest()) == self._beat and self._lives():
                time.sleep(seconds)
            self._beat = beat
            self._gained += _HASTE

    def _newest(self) -> int:
        """Changes with each heartbeat of rank 0."""
        try:
            return os.stat("ranks/0.json").st_mtime_ns
        except OSError:
            return 0

    def _lives(self) -> bool:
        statuses = RunDir(Path.cwd()).rank_statuses()
        return any(r.rank == 0 and ProcessId(r.pid, r.started).alive() for r in statuses)


def _when_noticed(stock: Any) -> Any:
    """`_end_the_stranded`, once the launcher has noticed who died.

    The real grace is long enough for that. Else the launcher might name a rank that was ended.
    """

    def end_the_stranded(self: Any, attempt: Any, statuses: list[RankStatus]) -> None:
        dead = [s.rank for s in statuses if not ProcessId(s.pid, s.started).alive()]
        if all(Path(f".ended-{rank}").exists() for rank in dead):
            stock(self, attempt, statuses)

    return end_the_stranded


def disguise() -> None:
    """In this process, jobs get fake launchers, and supervisors wait less."""
    ranks.build_launch = build  # type: ignore[assignment]
    dispatch._start_supervisor = start_supervisor
    dispatch._QUEUE_IS_FREE_WITHIN = 60.0  # type: ignore[misc]  # a busy test may hold it
    settings: Any = supervisor
    patched: Any = ranks
    patched.POLL_INTERVAL = 0.03
    settings.HOUSEKEEPING_EVERY = 0.1
    settings.TERM_GRACE = float(os.environ.get("FAKE_TERM_GRACE", "30"))
    settings.FAILURE_GRACE = float(os.environ.get("FAKE_FAILURE_GRACE", "30"))
    settings.STACK_DUMP_TIME = float(os.environ.get("FAKE_STACKS_TAKE", "0.1"))
    settings.Supervisor._end_the_stranded = _when_noticed(supervisor.Supervisor._end_the_stranded)
    if gates := os.environ.get("FAKE_GATES"):
        settings.time = patched.time = Hasty(Path(gates, "haste"))
    if os.environ.get("FAKE_TROUBLE") == "housekeeping":
        settings.cap_logs = _no_space


if __name__ == "__main__":
    serve()
