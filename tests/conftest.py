"""What all tests share: a state directory of their own, fake models and pictures, a watchman."""

from __future__ import annotations

import gc
import io
import json
import os
import random
import signal
import struct
import sys
import threading
import time
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from PIL import Image

from tests.support.jobs.fakes.supervise import start_nothing, stop_server
from tests.support.left_over import end_all_of, name_of, processes_of, threads_since
from tests.support.order import SLOWEST_FIRST
from tests.support.paths import FAKE_MEMORY, ROOT
from tests.support.waiting import PATIENCE, eventually

# Before anything imports torch: two test files and their ranks share the machine, and threads that
# wait for each other on busy cores take many times as long as one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The hundreds of processes that tests start would each compile our modules anew, a third of the
# time that a command line takes to start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

from jobs.queue.store import Store
from jobs.spec.file.load import load_spec
from tests.support.forks import client as forks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from jobs.spec.job_spec import JobSpec


def pytest_configure() -> None:
    """One server of forks for all workers; it starts when a test first needs it."""
    sys.dont_write_bytecode = False  # else pytest compiles all tests anew, half of its start
    gc.disable()  # until all is imported: see `pytest_collection_finish`
    # A shell has what it runs in the background ignore these two, and so would all that is started
    # here: what tests press Ctrl-C in would not notice.
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGQUIT, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    # How long an example takes says nothing on a busy machine.
    settings.register_profile(
        "patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("patient")
    forks.prepare()


def pytest_unconfigure() -> None:
    forks.leave()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start slow files first; within a file, and among the others, the order stays."""
    place = {ROOT / "tests" / name: number for number, name in enumerate(SLOWEST_FIRST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))


def pytest_collection_finish() -> None:
    """What is imported by now stays: to look at it in each collection takes a fifth of the time."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000, 20, 50)


_file = ""  # of the test before


def pytest_runtest_logstart(location: tuple[str, int | None, str]) -> None:
    """Have later collections pass over what the files before have left.

    The engine collects garbage several times in each job, which otherwise takes a second each time
    in a process that has run many tests.
    """
    global _file
    if location[0] != _file:
        _file = location[0]
        gc.collect()  # first, because nothing that is frozen is collected anymore
        gc.freeze()


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Draw the same random numbers in a test, whatever tests this process has run before."""
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if torch := sys.modules.get("torch"):  # not of its GPUs, which would be asked for each time
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_thread_outlives_its_test() -> Iterator[None]:
    """Wait for the threads of a test, because they would work into the next one, and its patches.

    A test fails if it leaves one that does not end.
    """
    before = set(threading.enumerate())
    yield
    eventually(lambda: not threads_since(before), told=lambda: threads_since(before))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state directory and a cache of the test's own; every child process inherits them."""
    path = tmp_path / "home"
    path.mkdir(mode=0o700)
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    monkeypatch.setenv("FSDP_TUI_HOME", str(path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("FSDP_TUI_CPU_JOBS", raising=False)
    # Nobody predicts memory behind the test's back, which takes torch and seconds.
    fake = (sys.executable, "-S", str(FAKE_MEMORY))
    monkeypatch.setattr("jobs.memory.question.COMMAND", fake)
    monkeypatch.setattr("jobs.memory.question._shared", servers := [])
    # No queue keeper behind the test's back, and a short-lived one in its child processes.
    monkeypatch.setattr("jobs.service.ensure_keepers", lambda store: None)
    monkeypatch.setenv("FSDP_TUI_RUNNER_IDLE", "1")
    yield path
    for server in servers:
        server.close()


@pytest.fixture
def store(home: Path) -> Store:
    """An empty jobs database in `home`."""
    return Store(home)


@pytest.fixture
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without GPUs, whatever the real one has."""
    monkeypatch.setattr("jobs.machine.devices.gpus", list)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Jobs that get as far as `starting` and no further: no process; their ids, in order."""
    return start_nothing(monkeypatch)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> str:
    """All that is started from here, down to a job's ranks, has imported everything already.

    See `tests.support.forks`. For what a process does, not for what it imports; the interpreter.
    """
    python = forks.python()
    monkeypatch.setattr(sys, "executable", python)
    monkeypatch.setenv("PYTHON_EXEC", python)
    return python


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[..., Path]:
    """Writes directories that look like diffusers models and pass the preflight check.

    Called as `make_model(name="model", pipeline="FluxPipeline", suffix=".safetensors",
    parts=("transformer", "vae"))`; `parts` are the subfolders that are written at all.
    """

    def write(
        name: str = "model",
        *,
        pipeline: str = "FluxPipeline",
        suffix: str = ".safetensors",
        parts: tuple[str, ...] = ("transformer", "vae"),
    ) -> Path:
        root = tmp_path / name
        root.mkdir()
        (root / "model_index.json").write_text(json.dumps({"_class_name": pipeline}))
        for part in parts:
            (root / part).mkdir()
            (root / part / "config.json").write_text("{}")
            empty = b"{}"  # a safetensors file without tensors: length of the header, header
            weights = root / part / f"diffusion_pytorch_model{suffix}"
            weights.write_bytes(struct.pack("<Q", len(empty)) + empty)
        return root

    return write


@cache
def plain_png(color: tuple[int, int, int]) -> bytes:
    """A picture that is large enough for the default resolution."""
    content = io.BytesIO()
    Image.new("RGB", (512, 512), color).save(content, "PNG", compress_level=1)
    return content.getvalue()


@pytest.fixture
def make_data(tmp_path: Path) -> Callable[..., Path]:
    """Writes folders of plain pictures: `make_data(name="data", pictures=3, captions=True)`."""

    def write(name: str = "data", *, pictures: int = 3, captions: bool = True) -> Path:
        root = tmp_path / name
        root.mkdir()
        for number in range(pictures):
            (root / f"{number}.png").write_bytes(plain_png((40 * number % 256, 90, 120)))
            if captions:
                (root / f"{number}.txt").write_text(f"picture number {number}\n")
        return root

    return write


@pytest.fixture
def job_values(
    home: Path, make_model: Callable[..., Path], make_data: Callable[..., Path]
) -> dict[str, Any]:
    """A job on two CPU ranks that passes every check, as it would stand in a YAML file."""
    return {
        "name": "t",
        "pretrained_model_name_or_path": str(make_model()),
        "dataset": str(make_data()),
        "device": "cpu",
        "num_processes": 2,
        "max_train_steps": 5,
        "mixed_precision": "no",
    }


@pytest.fixture
def job_spec(job_values: dict[str, Any]) -> JobSpec:
    """`job_values`, read."""
    return load_spec(None, job_values)


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `model` (FLUX.1's toy, three blocks) and `data` (24 images, captioned)."""
    from tests.support.engine.toys import write_small_toy

    root = tmp_path_factory.mktemp("toy")
    write_small_toy(root, pictures=24)
    return root


@pytest.fixture(scope="session")
def toy_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `cache_dir` of jobs on `toy`, for tests that look at something else than caching."""
    return tmp_path_factory.mktemp("toy-cache")


@pytest.fixture(scope="session", autouse=True)
def _no_process_outlives_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fails the session when a process of a test is still running at its end (and ends it)."""
    yield
    stop_server()
    base = tmp_path_factory.getbasetemp()
    deadline = time.monotonic() + PATIENCE
    while (left := processes_of(base)) and time.monotonic() < deadline:
        time.sleep(0.05)
    if left:
        names = [name_of(process) for process in left]
        end_all_of(base)
        pytest.fail("processes outlived the tests:\n" + "\n".join(names))
