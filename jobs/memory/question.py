"""Answer what a job needs: from the cache, or else from the prediction process."""

from __future__ import annotations

import atexit
import hashlib
import itertools
import json
import os
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pydantic import ValidationError

from jobs.errors import SpecError, UserError
from jobs.machine.child import end_child, start_child
from jobs.machine.engine_tools import Cancelled, ToolError
from jobs.memory.predicted import SCHEMA, Predicted
from jobs.models.model_config import find_target
from jobs.models.model_files import check_config
from jobs.models.scorers import configs_of
from jobs.paths import cache_home
from jobs.run.rundir import read_json, write_atomic
from jobs.spec.families import FAMILIES, references_of
from jobs.spec.keys.prompts import layers_of
from jobs.spec.rules.cascade import settle
from jobs.spec.rules.conflicts import find_conflicts
from jobs.spec.rules.steps import accumulation_steps, is_whole_batch, periodic_saves
from jobs.spec.rules.strategy import SHARDING, replicas_of, world_size
from jobs.spec.values.datasets import Dataset
from jobs.spec.values.field import facts_of
from jobs.spec.values.quoted_text import most_quoted_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import IO

    from jobs.spec.job_spec import JobSpec
    from jobs.spec.keys.job import JobKeys


_Answer = TypeVar("_Answer")


# -- client ---------------------------------------------------------------------------------
# The one warm process that predicts. It starts on first use and ends when its standard input is
# closed, so it cannot outlive us however we end.


COMMAND: Final = (sys.executable, "-m", "engine.memory")
PATIENCE: Final = 180.0  # seconds for an answer; a large model on a busy login node takes 20
_POLL_INTERVAL: Final = 0.1  # seconds between two checks for cancellation
_NICE: Final = 10  # it shares the CPU with training and with other users of a login node
_GRACE: Final = 2.0  # seconds to exit after its input is closed
_STDERR_TAIL: Final = 2000  # bytes read from the end of its standard error


class Died(ToolError):
    """The process exited without answering."""


class Server:
    """Client of `python -m engine.memory`, one request at a time. Thread-safe.

    A cancelled request is not sent; the answer to one that was already sent is dropped.

    Args:
        command: The command to start.
        patience: Seconds to wait for an answer.
    """

    def __init__(self, command: Sequence[str] | None = None, patience: float = PATIENCE) -> None:
        self._command = command
        self._patience = patience
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._rest = b""
        self._outstanding = 0  # requests sent but not yet answered; answers arrive in order
        self._numbers = itertools.count(1)
        self._request_lock = threading.Lock()
        # so that `close` also ends a process that is still starting
        self._process_lock = threading.Lock()
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Return the pid of the process; None if it is not running."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def ask(
        self, request: dict[str, Any], cancelled: Callable[[], bool] = lambda: False
    ) -> dict[str, Any]:
        """Send a request and return the answer (see `engine.memory`), without its `id`.

        Args:
            request: The request, without an `id`.
            cancelled: Polled many times a second, in the caller's thread.

        Raises:
            SpecError: The request cannot be answered: a bad job, or an unknown model.
            ToolError: The process failed twice, or timed out.
            Cancelled: `cancelled` returned True.
        """
        deadline = time.monotonic() + self._patience
        while not self._request_lock.acquire(timeout=_POLL_INTERVAL):
            _raise_if_done(cancelled, deadline)
        try:
            try:
                answer = self._ask(request, cancelled, deadline)
            except Died:  # it may have been killed from outside; a new one may work
                answer = self._ask(request, cancelled, deadline)
        finally:
            self._request_lock.release()
        if "error" in answer:
            raise SpecError(str(answer["error"]), answer.get("hint"))
        return answer

    def close(self) -> None:
        """End the process and do not start another."""
        self._closed = True
        with self._process_lock:
            self._end()

    def _ask(
        self, request: dict[str, Any], cancelled: Callable[[], bool], deadline: float
    ) -> dict[str, Any]:
        process = self._running()
        while self._outstanding:  # answers to cancelled requests arrive first
            self._read(process, cancelled, deadline)
            self._outstanding -= 1
        line = json.dumps(request | {"id": next(self._numbers)}) + "\n"
        assert process.stdin is not None
        try:
            process.stdin.write(line.encode())
            process.stdin.flush()
        except OSError:
            raise self._exit_error() from None
        self._outstanding += 1
        answer = self._read(process, cancelled, deadline)
        self._outstanding -= 1
        answer.pop("id", None)
        return answer

    def _read(
        self, process: subprocess.Popen[bytes], cancelled: Callable[[], bool], deadline: float
    ) -> dict[str, Any]:
        """Read the next line that is a JSON object; skip other lines."""
        assert process.stdout is not None
        with selectors.DefaultSelector() as waiting:
            waiting.register(process.stdout, selectors.EVENT_READ)
            while True:
                line, newline, rest = self._rest.partition(b"\n")
                if newline:
                    self._rest = rest
                    with suppress(ValueError):
                        if isinstance(answer := json.loads(line), dict):
                            return answer
                    continue
                try:
                    _raise_if_done(cancelled, deadline)
                except ToolError:
                    self._end()  # the process hangs
                    raise
                if not waiting.select(_POLL_INTERVAL):
                    continue
                if not (data := os.read(process.stdout.fileno(), 1 << 16)):
                    raise self._exit_error()
                self._rest += data

    # -- the process -----------------------------------------------------------------------

    def _running(self) -> subprocess.Popen[bytes]:
        with self._process_lock:
            if self._closed:
                raise ToolError("prediction cancelled: the dashboard is closing")
            if self._process is not None and self._process.poll() is None:
                return self._process
            self._end()
            self._rest, self._outstanding = b"", 0
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the process
            process = self._process = start_child(
                self._command or COMMAND,
                {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,  # the terminal's Ctrl-C must reach only the caller
            )
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, _NICE)
        forget_old()  # while it imports torch
        return process

    def _exit_error(self) -> Died:
        last_line = ""
        if self._errors is not None:
            end = self._errors.seek(0, os.SEEK_END)
            self._errors.seek(max(0, end - _STDERR_TAIL))
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
            last_line = lines[-1] if lines else ""
        self._end()
        return Died(f"python -m engine.memory failed: {last_line or 'it exited without an answer'}")

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError, ValueError):
                if pipe is not None:
                    pipe.close()
        end_child(process, _GRACE)
        if self._errors is not None:
            self._errors.close()
            self._errors = None


def _raise_if_done(cancelled: Callable[[], bool], deadline: float) -> None:
    if cancelled():
        raise Cancelled
    if time.monotonic() > deadline:
        raise ToolError("the memory prediction timed out; try again")


_shared: list[Server] = []
_SHARED_LOCK: Final = threading.Lock()


def shared() -> Server:
    """Return this process's server, which all callers share."""
    with _SHARED_LOCK:
        if not _shared:
            _shared.append(Server())
            atexit.register(_shared[0].close)
        return _shared[0]


# -- cache ----------------------------------------------------------------------------------
# Predictions are cached on disk, one small file each, shared by all processes.


_MAX_FILES: Final = 2000  # cached files of about 4 KB each; the oldest are deleted
_PACKAGES: Final = ("torch", "diffusers", "transformers", "peft", "fsdp-tui")


def cache_folder() -> Path:
    return cache_home() / "memory"


def key_of(spec: JobSpec, config: Mapping[str, Any] | None = None) -> str:
    """Return the cache key of a prediction.

    Args:
        spec: The job, with its strategy and ranks resolved.
        config: The denoiser's config; default: the one of the job's model. It is part of the key
            because the same path may hold another model tomorrow.

    Raises:
        UserError: Its model is unknown or missing.
    """
    config = _config_of(spec) if config is None else config
    facts = facts_of(type(spec))
    kept = {key: value for key, value in sorted(spec.to_dict().items()) if facts[key].memory}
    # The number of ranks matters, but must be normalized: several keys can spell it. Steps change
    # no memory, but disk by the checkpoints that they leave. Models that score samples are counted
    # once they are here.
    counts = [spec.num_processes, periodic_saves(spec), *configs_of(spec)]
    if spec.model_family == "hunyuanvideo15":  # prompts are among the keys
        counts.append(most_quoted_tokens(spec, training=True))
    text = json.dumps([SCHEMA, engine_version(), *counts, kept, config], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:40]


def cached(key: str) -> Predicted | None:
    """Read the prediction cached under a key; None if there is none, or it is damaged."""
    values = read_json(cache_folder() / f"{key}.json")
    try:
        return Predicted.of(values) if values is not None else None
    except ValueError:
        return None


def remember(key: str, predicted: Predicted) -> None:
    """Store a prediction. A full disk is not an error here; this is only a cache."""
    with suppress(OSError):
        cache_folder().mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(cache_folder() / f"{key}.json", json.dumps(predicted.values))


def forget_old(most: int = _MAX_FILES) -> None:
    """Delete all but the `most` newest predictions."""
    with suppress(OSError):
        files = sorted(cache_folder().glob("*.json"), key=_written, reverse=True)
        for path in files[most:]:
            path.unlink(missing_ok=True)


def _written(path: Path) -> float:
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


@lru_cache(maxsize=1)
def engine_version() -> str:
    """Return a hash of everything that determines predictions: the engine and its libraries.

    Stats some 200 files, once per process, and reads none of them.
    """
    root = Path(__file__).resolve().parents[2]
    facts = hashlib.sha256()
    for part in ("engine", "jobs"):
        for path in sorted((root / part).rglob("*.py")):
            with suppress(OSError):
                stat = path.stat()
                facts.update(
                    f"{path.relative_to(root)} {stat.st_size} {stat.st_mtime_ns}\n".encode()
                )
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            facts.update(f"{package} {version(package)}\n".encode())
    return facts.hexdigest()[:16]


# -- question -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refused:
    """Why there is no prediction for a strategy and a number of ranks."""

    strategy: str
    ranks: int
    error: str
    hint: str | None = None


def arranged(spec: JobSpec, strategy: str, ranks: int, *, on_gpus: bool) -> JobSpec:
    """Return the job with this strategy on `ranks` ranks, without the keys of other strategies.

    Raises:
        SpecError: Such a job is invalid.
    """
    sharding = strategy in SHARDING
    replicas = max(2, replicas_of(spec, strategy)) if strategy == "hsdp" else 1
    changes: dict[str, Any] = {
        "strategy": strategy,
        "num_processes": ranks,
        "gpus": None,
        "fsdp_enable": None,
        "device": "cuda" if on_gpus else "cpu",
        "dp_replicate_size": replicas if strategy == "hsdp" else None,
    }
    if sharding:
        changes |= {"swap_blocks": 0, "batch_shares": 1}
    else:
        changes |= {"lora_placement": "replicated", "context_parallel_size": 1}
        if spec.fsdp_activation_checkpointing:  # has the same effect without FSDP
            changes |= {"fsdp_activation_checkpointing": False, "gradient_checkpointing": True}
    if not (sharding and on_gpus):
        changes["fsdp_cpu_offload"] = spec.fsdp_cpu_offload and sharding
    there = spec.model_copy(update=changes)
    if not is_whole_batch(there):  # for memory it matters only whether a rank accumulates
        forwards = accumulation_steps(there)
        changes |= {"global_batch_size": None, "gradient_accumulation_steps": forwards}
    number, shards = spec.fsdp_reshard_after_forward, ranks // replicas
    if type(number) is int and number != 1 and not (number < shards and shards % number == 0):
        changes["fsdp_reshard_after_forward"] = True
    try:
        # Settle it as the queue does, so that the start of the job finds the prediction the form
        # cached.
        return settle(type(spec).model_validate(spec.to_dict() | changes))
    except ValidationError as error:
        raise SpecError(f"{strategy} on {ranks} ranks: {error.errors()[0]['msg']}") from None


def _config_of(spec: JobKeys) -> dict[str, Any]:
    """Return the config of a job's denoiser.

    Raises:
        UserError: The model is unknown or missing.
    """
    # A hub id and its cached snapshot have the same config, hence the same prediction.
    return find_target(
        spec.model_family, spec.model_flavour, spec.pretrained_model_name_or_path or None
    ).config


def differs_by_card(spec: JobSpec, strategy: str) -> bool:
    """Return whether ranks on GPUs of other sizes need other memory."""
    return isinstance(spec.swap_blocks, dict) and strategy not in SHARDING


def of_cards(spec: JobSpec, ask: Callable[[JobSpec], _Answer]) -> Predicted | _Answer:
    """Predict for ranks on each size of GPU.

    Args:
        spec: The job, which differs by card.
        ask: Predicts a job with one number of swapped blocks.

    Returns:
        The prediction, or the first answer that is none.
    """
    assert isinstance(spec.swap_blocks, dict)
    by_size: dict[str, Predicted] = {}
    for size, count in ({"": 0} | spec.swap_blocks).items():
        answer = ask(spec.model_copy(update={"swap_blocks": count}))
        if not isinstance(answer, Predicted):
            return answer
        by_size[size] = answer
    return by_size.pop("").with_cards(by_size)


def recall(spec: JobSpec, strategy: str, ranks: int, *, on_gpus: bool) -> Predicted | None:
    """Return a job's cached prediction, or None. Starts no process and never fails."""
    if differs_by_card(spec, strategy):
        return of_cards(spec, lambda alike: recall(alike, strategy, ranks, on_gpus=on_gpus))
    try:
        return cached(key_of(arranged(spec, strategy, ranks, on_gpus=on_gpus)))
    except (UserError, OSError):
        return None


def predict(
    spec: JobSpec,
    server: Server,
    *,
    strategy: str,
    ranks: int | None = None,
    on_gpus: bool = True,
    refresh: bool = False,
    cancelled: Callable[[], bool] = lambda: False,
) -> Predicted | Refused:
    """Predict what one rank of a job needs.

    Args:
        spec: The job; a published model need not be on this machine.
        server: Predicts what is not cached.
        strategy: One of single, ddp, fsdp2, hsdp.
        ranks: World size, if not the job's own.
        on_gpus: Whether the ranks run on GPUs, whatever this machine has.
        refresh: Predict again and replace the cached answer.
        cancelled: Polled many times a second, in the caller's thread.

    Raises:
        SpecError: This model cannot be predicted.
        ToolError: The prediction failed.
        Cancelled: `cancelled` returned True.
    """
    ranks = ranks or world_size(spec)
    if differs_by_card(spec, strategy):
        return of_cards(
            spec,
            lambda alike: predict(
                alike,
                server,
                strategy=strategy,
                ranks=ranks,
                on_gpus=on_gpus,
                refresh=refresh,
                cancelled=cancelled,
            ),
        )
    try:
        job = arranged(spec, strategy, ranks, on_gpus=on_gpus)
    except SpecError as error:
        return Refused(strategy, ranks, error.message, error.hint)
    complete, config = _complete(job), _config_of(job)
    if (refused := _why_refused(complete, config)) is not None:
        return Refused(strategy, ranks, *refused)
    key = key_of(job, config)
    if not refresh and (stored := cached(key)) is not None:
        return stored
    request = {"job": complete.to_dict(), "ranks": [ranks], "strategies": [strategy]}
    answer = server.ask(request, cancelled)
    try:
        for values in answer["predictions"]:
            predicted = Predicted.of(values)
            remember(key, predicted)
            return predicted
        (first, *_) = answer["failed"]
        return Refused(strategy, ranks, str(first["error"]), first.get("hint"))
    except (ValueError, LookupError, TypeError) as error:
        raise ToolError(f"unexpected answer from python -m engine.memory: {error!r}") from None


def _complete(spec: JobSpec) -> JobSpec:
    """Fill in the required paths, which a prediction does not read.

    A model that needs conditioning images or layers gets as many as samples have by default.
    """
    values: dict[str, Any] = {}
    if not (spec.dataset or spec.datasets):
        takes = references_of(spec)
        if takes is not None and takes.required and not takes.masks:
            suffixes = [f"_{number + 1}" for number in range(layers_of(spec) or 1)]
            values["datasets"] = [Dataset(path=os.devnull, conditioning_suffix=suffixes)]
        else:
            values["dataset"] = os.devnull
    if not spec.pretrained_model_name_or_path:
        family = FAMILIES[spec.model_family]
        flavour = spec.model_flavour or next(iter(family.flavours))
        values["pretrained_model_name_or_path"] = family.flavours[flavour].hub_id
    return spec.model_copy(update=values)


def _why_refused(spec: JobSpec, config: Mapping[str, Any]) -> tuple[str, str | None] | None:
    """Return why `submit` would reject a complete job, and a hint; None if it would not."""
    if conflicts := find_conflicts(spec):
        return "; ".join(conflict.message for conflict in conflicts), None
    try:
        check_config(spec, config)
    except SpecError as error:
        return error.message, error.hint
    return None
