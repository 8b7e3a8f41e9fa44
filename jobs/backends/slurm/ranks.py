"""Control a job's ranks in a Slurm allocation: the tasks of one `srun`, on any number of nodes.

Their supervisor runs inside the allocation. Slurm ends an allocation at its time limit, on
cancellation or on preemption, and reveals which one only afterwards, if at all.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from jobs.backends.slurm import commands
from jobs.backends.slurm.script import PYTHON_VARIABLE, on_gpus, per_machine
from jobs.errors import UserError
from jobs.hub.wanted import names_in
from jobs.launch import auto_room, loopback_variables, rank_variables, versions
from jobs.machine import devices, processes
from jobs.memory.calibration import keep
from jobs.queue.neighbors import record_home
from jobs.queue.states import State
from jobs.run.fence import FENCE_VARIABLE, taken_over
from jobs.run.rundir import event, read_json, read_tail, write_atomic
from jobs.run.why_failed import rank_exits
from jobs.spec.file.load import load_spec
from jobs.spec.rules.strategy import AS_ASKED, chosen_strategy, launched_strategy, world_size
from jobs.spec.values.hub_names import pin_snapshots
from jobs.supervise.port import Attempt, Outcome, UnreachableError
from jobs.trackers import start_trackers

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from jobs.backends.slurm.records import Allocation
    from jobs.run.rundir import RankStatus, RunDir
    from jobs.spec.job_spec import JobSpec
    from jobs.supervise.port import Report

POLL_INTERVAL: Final = 0.5  # seconds
ASK_EVERY: Final = 5.0  # seconds
# srun's messages if the controller is down, has just come back, or is ending the job.
_REFUSED: Final = re.compile(
    r"Unable to create step|Unable to confirm allocation|Expired or invalid job"
)
_PARTIAL_LAUNCH: Final = "Application launch failed"  # a node did not respond
KILL_TIMEOUT: Final = 40.0  # seconds for srun to end its tasks
TRACKERS_TIMEOUT: Final = 60.0  # seconds for trackers to report the end
VERDICT_TIMEOUT: Final = 600.0  # seconds for Slurm to complete an end that starts with SIGTERM
_REFUSALS: Final = 10  # number of refused starts of the ranks
_NO_MORE_STEPS: Final = "already completing or completed"


@dataclass
class SlurmRanks:
    """Implement `jobs.supervise.port.Ranks` for a job in its allocation.

    Attributes:
        run_dir: The run directory.
        allocation: Slurm's job id and restart count.
        report: Where the supervisor reports.
        time_up: Whether the time limit is near.
        sigterm_received: Whether Slurm sent SIGTERM: a cancellation or a preemption.
    """

    run_dir: RunDir
    allocation: Allocation
    report: Report
    time_up: bool = False
    sigterm_received: bool = False
    _slurm_is_ending: bool = False  # whether Slurm says that it is ending the allocation
    _signalled: bool = False  # whether we signaled all ranks
    _ended_by_us: set[int] = field(default_factory=set)
    _refusals: int = 0
    _attempt: Attempt | None = None
    _trackers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _sent_at: float = float("-inf")
    _first_checkpoint: int | None = None

    def __post_init__(self) -> None:
        self._first_checkpoint = self._newest()

    def adopt(self) -> Attempt | None:
        """Return None: ranks do not outlive their supervisor, whose end ends all steps."""
        return None

    def launch(self, restarts: int) -> Attempt:
        spec, run_id = load_spec(self.run_dir.job_file), f"slurm-{self.allocation}"
        self._signalled, self._ended_by_us = False, set()
        self._attempt = start_step(spec, self.run_dir, self.allocation, run_id, restarts)
        try:
            self._trackers = start_trackers(spec, self.run_dir)
        except OSError as error:
            self.report.log(f"cannot start a tracker: {error}")
        return self._attempt

    def rest(self, attempt: Attempt) -> None:
        with suppress(subprocess.TimeoutExpired):
            if attempt.child is not None:
                attempt.child.wait(POLL_INTERVAL)

    def leave_if_replaced(self) -> None:
        """End the ranks of a partitioned-off node: only the new supervisor judges the job."""
        if other := taken_over(self.run_dir.root, str(self.allocation)):
            self.report.log(f"allocation {other} of this job has taken over; ending the ranks")
            self.end_all()
            raise SystemExit(1)

    def gone(self, statuses: Sequence[RankStatus]) -> set[int]:
        """Rely on srun's exit reports only: pids of other nodes mean nothing here."""
        return {rank_exit.rank for rank_exit in rank_exits(self.run_dir)}

    def dump_stacks(self, statuses: Sequence[RankStatus]) -> None:
        commands.signal_steps(self.allocation.id, "USR1")

    def terminate(self, attempt: Attempt) -> None:
        if time.monotonic() - self._sent_at < ASK_EVERY:
            raise UnreachableError("Slurm did not respond a moment ago")
        try:
            with suppress(UserError):  # for example because the ranks have just ended
                commands.signal_steps(self.allocation.id, "TERM")
        except UnreachableError:
            self._sent_at = time.monotonic()
            raise
        self._signalled = True

    def kill(self, attempt: Attempt, ranks: Collection[int] | None = None) -> None:
        """End all tasks, whichever ranks were asked for: srun does that on SIGTERM, and reports
        them.
        """
        if ranks is None:
            self._signalled = True
        else:
            self._ended_by_us |= set(ranks)
        child = attempt.child
        if child is None:
            return
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(KILL_TIMEOUT)
        except subprocess.TimeoutExpired:
            child.kill()

    def clean_up(self, attempt: Attempt, *, healthy: bool, stop_request: Callable[[], int]) -> bool:
        """Collect the errors of ranks other than the first; no process outlives srun."""
        add_errors(self.run_dir)
        return False

    def end_all(self) -> None:
        if self._attempt is not None:
            self.kill(self._attempt)

    def must_end(self) -> str:
        if self.time_up:
            return "the time limit is near: "
        return "Slurm ends the job: " if self.sigterm_received or self._slurm_is_ending else ""

    def reconsider(self, outcome: Outcome, give_up: Callable[[], bool]) -> Outcome | None:
        """Return the outcome; None to retry a step that Slurm refused (perhaps its controller is
        down).
        """
        ending = bool(self.must_end()) or self.report.stop_request() > 0
        if not was_refused(self.run_dir) or ending or self._refusals >= _REFUSALS:
            return outcome
        self._refusals += 1
        self.report.log(f"no step: {outcome.reason}")
        self.report.set_state(State.STARTING, "waiting for Slurm to start the ranks")

        def ends() -> bool:
            self.leave_if_replaced()
            return give_up()

        state = await_answer(self.allocation.id, ends)
        if state is None:
            return Outcome(State.STOPPED, "stopped before the ranks started")
        if not state:
            return Outcome(State.LOST, f"Slurm no longer knows job {self.allocation.id}")
        if state == "RUNNING":
            self.report.set_state(State.STARTING, "starting ranks")
            return None
        self._slurm_is_ending = True
        return outcome

    # -- the end ---------------------------------------------------------------------------

    def conclude(self, outcome: Outcome) -> Outcome:
        """Decide the outcome of an end that the user did not request."""
        for tracker in self._trackers:
            with suppress(subprocess.TimeoutExpired):
                tracker.wait(TRACKERS_TIMEOUT)
        if self.report.stop_request() or outcome.by_rule or outcome.state is State.COMPLETED:
            return outcome
        spec = self._attempt.spec if self._attempt else load_spec(self.run_dir.job_file)
        retries = outcome.worth_retrying and spec.max_restarts > 0 and spec.slurm_requeue
        if outcome.state is not State.STOPPED and not (self.time_up and retries):
            terminated = not self._signalled and were_terminated(self.run_dir, self._ended_by_us)
            if self.sigterm_received or terminated or self._is_ending():
                self._await_verdict()
            return outcome
        if self.sigterm_received or not self.time_up:
            # This is a cancellation, or a preemption that signals only the ranks. Exiting now would
            # look like a normal end to Slurm, and it would not requeue a preempted job.
            self.report.set_state(State.STOPPING, f"{outcome.reason}; waiting for Slurm")
            if not self._await_verdict():
                reason = f"someone sent SIGTERM to the ranks; {outcome.reason}"
                return Outcome(State.STOPPED, reason)
            return outcome
        if self._newest() in (None, self._first_checkpoint):
            reason = "the time limit came before the job got to a new checkpoint; raise slurm_time"
            return Outcome(State.FAILED, reason)
        stopped = Outcome(State.STOPPED, f"time limit; {outcome.reason}")
        return self._requeue(stopped) if spec.slurm_requeue else stopped

    def _requeue(self, stopped: Outcome) -> Outcome:
        """Requeue the job, which ends this process; if that fails, the job has stopped."""
        self.report.set_state(State.STOPPING, f"{stopped.reason}; requeueing")
        while not self.report.stop_request():
            self.report.heartbeat(())
            try:
                commands.requeue(self.allocation.id)
            except UnreachableError as error:  # retry until the time limit
                self.report.log(f"cannot requeue yet: {error}")
                time.sleep(ASK_EVERY)
            except UserError as error:
                reason = f"{stopped.reason}; Slurm refused to requeue: {error}"
                return Outcome(State.STOPPED, reason)
            else:
                self._await_verdict()
                break
        return stopped

    def _is_ending(self) -> bool:
        """Return whether Slurm is ending this allocation, and therefore killed the ranks.

        A job past its limit stays RUNNING for up to a minute, but Slurm starts no more steps.
        """
        if _NO_MORE_STEPS in read_tail(self.run_dir.launcher_log, 4096):
            return True
        with suppress(UnreachableError):
            return commands.state_of(self.allocation.id) not in ("RUNNING", "")
        return False

    def _await_verdict(self) -> bool:
        """Wait for Slurm to end this process; return False if it does not in `VERDICT_TIMEOUT`."""
        until = time.monotonic() + VERDICT_TIMEOUT
        while time.monotonic() < until:
            self.leave_if_replaced()
            self.report.heartbeat(())
            if self.report.stop_request():
                return True
            with suppress(UnreachableError):
                if commands.state_of(self.allocation.id) == "CANCELLED":
                    return True
            time.sleep(ASK_EVERY)
        return False

    def _newest(self) -> int | None:
        newest = self.run_dir.latest_checkpoint()
        return newest[0] if newest else None


# -- one launch --------------------------------------------------------------------------


def start_step(
    spec: JobSpec, run_dir: RunDir, allocation: Allocation, run_id: str, restarts: int
) -> Attempt:
    """Start all ranks, one task each, and record it in `launch.json`.

    Raises:
        OSError: `srun` cannot be started.
    """
    before = read_json(run_dir.launch_file) or {}
    run_dir.forget_attempt()
    pin_snapshots(names_in(spec), run_dir.root)
    record_home(run_dir)
    strategy, reason = _strategy(spec, before)
    address = spec.main_process_ip or socket.gethostname()
    environment = rank_variables(spec, run_dir, run_id, strategy, reason, on_gpus=on_gpus(spec))
    environment |= {
        FENCE_VARIABLE: str(allocation),
        "FSDP_TUI_LOCAL_RANKS": str(per_machine(spec)),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(spec.main_process_port or _free_port()),
    }
    if spec.num_machines == 1:
        environment |= loopback_variables(os.environ) | {"MASTER_ADDR": "127.0.0.1"}
    command = srun_command(spec, run_dir, os.environ)
    offset = run_dir.events.stat().st_size if run_dir.events.exists() else 0
    run_dir.launcher_log.write_bytes(b"")
    with open(run_dir.launcher_log, "ab") as log:
        child = subprocess.Popen(
            command,
            env=_inheritable(os.environ) | environment,
            cwd=run_dir.root,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    processes.wait_for_by_hand(child.pid)
    kills = processes.kernel_oom_kills()
    attempt = Attempt(spec, shlex.join(command), None, child, offset, restarts, kills)
    record = {
        "command": command,
        "environment": environment,
        "gpus": [],
        "run_id": run_id,
        "slurm": {"job": allocation.id, "restart": allocation.restart},
        "restarts": restarts,
        "events_offset": offset,
        "oom_kills": kills,
        "launcher": None,
        "started": time.time(),
        "versions": versions(),
    }
    write_atomic(run_dir.launch_file, json.dumps(record, indent=2) + "\n", durable=True)
    keep(run_dir, spec, strategy, world_size(spec), on_gpus=on_gpus(spec))
    return attempt


def was_refused(run_dir: RunDir) -> bool:
    """Return whether Slurm refused the step or failed to start all ranks; not the job's fault."""
    output = read_tail(run_dir.launcher_log)
    none = _REFUSED.search(output) is not None and not run_dir.rank_statuses()
    return none or _PARTIAL_LAUNCH in output


def were_terminated(run_dir: RunDir, ended_by_us: Collection[int]) -> bool:
    """Return whether a SIGTERM that we did not send ended ranks.

    A preemption first sends one to the ranks only; ranks that are starting cannot save.
    """
    ends = [rank_exit for rank_exit in rank_exits(run_dir) if rank_exit.rank not in ended_by_us]
    return any(rank_exit.code == -signal.SIGTERM for rank_exit in ends)


def await_answer(slurm_id: str, ends: Callable[[], bool]) -> str | None:
    """Query the state of a job that got no step until Slurm responds.

    Args:
        slurm_id: Slurm's job id.
        ends: Polled about every half second; True ends the wait.

    Returns:
        The state; "" if Slurm does not know the job, None if `ends` ended the wait.
    """
    asked_at = time.monotonic()
    while not ends():
        if time.monotonic() - asked_at >= ASK_EVERY:
            asked_at = time.monotonic()
            with suppress(UnreachableError):
                return commands.state_of(slurm_id)
        time.sleep(min(POLL_INTERVAL, ASK_EVERY))
    return None


def srun_command(spec: JobSpec, run_dir: RunDir, environment: Mapping[str, str]) -> list[str]:
    """Return the command that starts the ranks. Pure.

    Args:
        spec: The job.
        run_dir: Its run directory.
        environment: May name the ranks' interpreter, for example one in a container.
    """
    python = shlex.split(environment.get(PYTHON_VARIABLE, "")) or [sys.executable]
    return [
        "srun",
        f"--nodes={spec.num_machines}",
        f"--ntasks={world_size(spec)}",
        f"--ntasks-per-node={per_machine(spec)}",
        "--distribution=block",  # neighboring ranks share a machine
        # each rank sees all GPUs of its node and uses the one with its local rank
        "--gpu-bind=none",
        "--kill-on-bad-exit=0",  # the other ranks may still have to report an error or save
        # Not --unbuffered: it gives tasks a terminal, and ranks without one write logs.
        "--wait=0",  # rank 0 may have more to write than the others
        *(spec.slurm_srun_args or []),
        *python,
        "-m",
        "jobs.backends.slurm.task",
        str(run_dir.root),
    ]


def _strategy(spec: JobSpec, before: Mapping[str, object]) -> tuple[str, str]:
    """Return the strategy and its reason; a restart keeps the first choice of `auto`."""
    environment = before.get("environment")
    strategy, reason = launched_strategy(environment if isinstance(environment, dict) else {})
    if spec.strategy == "auto" and strategy and reason != AS_ASKED:
        return strategy, reason
    names = [gpu.uuid for gpu in devices.gpus()] if on_gpus(spec) else []
    mine = names[: per_machine(spec)]
    return chosen_strategy(spec, auto_room(spec, mine))


def _free_port() -> int:
    """Return a free port of this node, for rank 0 to listen on."""
    with socket.socket() as listening:
        listening.bind(("", 0))
        return int(listening.getsockname()[1])


def _inheritable(environment: Mapping[str, str]) -> dict[str, str]:
    dropped = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {
        key: value
        for key, value in environment.items()
        if key not in dropped and not key.startswith(("ACCELERATE_", "TORCHELASTIC_"))
    }


def add_errors(run_dir: RunDir) -> None:
    """Append the errors of ranks other than the first to the events, after all ranks have ended."""
    errors = [error for error in run_dir.rank_errors() if error["rank"]]
    with suppress(OSError), open(run_dir.events, "a", encoding="utf-8") as file:
        for error in errors:
            dropped = ("t", "kind", "trace")
            file.write(event("error", **{k: v for k, v in error.items() if k not in dropped}))
