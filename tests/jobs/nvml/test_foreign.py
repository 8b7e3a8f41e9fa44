"""Whose processes hold the GPUs: what the driver says, what is known of them, who is foreign."""

from __future__ import annotations

import getpass
import os
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.backends.local.placement import Request, Start, Wait, place
from jobs.machine import devices
from jobs.machine.devices import Gpu, GpuProcess, foreign_users
from tests.support.nvml_stub.stub import GIB, gpu, start_holder, uuid

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.nvml_stub.stub import StubNvml

pytest_plugins = ["tests.support.nvml_stub.fixture"]

NOBODY = 2**22 + 1  # above the kernel's highest pid, so nobody here


@contextmanager
def holder(folder: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    process = start_holder(folder, *words)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def in_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this process lived in a pid namespace that is not the host's."""
    monkeypatch.setattr(devices, "_FIRST_PID_NAMESPACE", "pid:[1]")


# -- what is known of a process ----------------------------------------------------------------


def test_a_process_is_shown_with_user_and_command(nvml: StubNvml, tmp_path: Path) -> None:
    with holder(tmp_path, "train_unet.py", "--lr", "1e-4") as other:
        nvml.write([{}, gpu(1, processes=[{"pid": other.pid, "memory": 30 * GIB}])])
        first, second = devices.gpus()
        assert first.processes == ()
        [process] = second.processes
        assert (process.pid, process.memory) == (other.pid, 30 * GIB)
        assert process.user == getpass.getuser()
        assert process.command is not None
        assert process.command.endswith(" train_unet.py --lr 1e-4")
        [(card, line)] = foreign_users([first, second], ours=()).items()
        assert card == uuid(1)
        assert line.startswith(f"{getpass.getuser()}: python")
        assert line.endswith(f" train_unet.py --lr 1e-4 (pid {other.pid}, 30.0 GiB)")


def test_a_process_that_is_not_here_has_no_name(nvml: StubNvml) -> None:
    nvml.write([gpu(processes=[{"pid": NOBODY, "memory": GIB}])])
    assert devices.gpus()[0].processes == (GpuProcess(NOBODY, GIB),)


def test_a_pid_of_the_host_is_not_taken_for_one_of_the_container(
    nvml: StubNvml, tmp_path: Path, in_a_container: None
) -> None:
    idle = subprocess.Popen(["sleep", "60"])  # does not compute, so the driver cannot mean it
    try:
        with holder(tmp_path) as other:
            held = [{"pid": idle.pid, "memory": 1}, {"pid": other.pid, "memory": 2}]
            nvml.write([gpu(processes=held)])
            stranger, translated = devices.gpus()[0].processes
    finally:
        idle.kill()
        idle.wait()
    assert (stranger.pid, stranger.user, stranger.command) == (idle.pid, None, None)
    assert translated.command is not None
    assert translated.command.endswith(" train.py")


def test_memory_that_the_driver_may_not_tell(nvml: StubNvml) -> None:
    # None from the driver; 0 is what some drivers say in containers.
    nvml.write([gpu(processes=[{"pid": NOBODY, "memory": None}, {"pid": NOBODY + 1, "memory": 0}])])
    assert [process.memory for process in devices.gpus()[0].processes] == [None, None]


def test_a_process_that_draws_and_computes_is_listed_once(nvml: StubNvml) -> None:
    nvml.write(
        [
            gpu(
                processes=[
                    {"pid": NOBODY, "memory": 5, "kind": "graphics"},
                    {"pid": NOBODY, "memory": 5},
                    {"pid": NOBODY + 1, "memory": 6, "kind": "graphics"},
                ]
            )
        ]
    )
    assert devices.gpus()[0].processes == (
        GpuProcess(NOBODY, 5),
        GpuProcess(NOBODY + 1, 6, "graphics"),
    )


def test_a_command_line_cannot_steer_the_terminal(nvml: StubNvml, tmp_path: Path) -> None:
    with holder(tmp_path, "train.py", "\x1b]0;gotcha\x07", "a\nb") as other:
        nvml.write([gpu(processes=[{"pid": other.pid, "memory": 1}])])
        [process] = devices.gpus()[0].processes
    assert process.command is not None
    assert process.command.isprintable()
    assert process.command.endswith("train.py ]0;gotcha a b")


def test_command_lines_are_read_rarely(
    nvml: StubNvml, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reads = []
    real = psutil.Process.cmdline

    def counted(self: psutil.Process) -> list[str]:
        if self.pid == other.pid:  # a thread of another test may read others
            reads.append(self.pid)
        return real(self)

    monkeypatch.setattr(psutil.Process, "cmdline", counted)
    monkeypatch.setattr(devices, "_SLOW", 1e9)
    with holder(tmp_path) as other:
        nvml.write([gpu(i, processes=[{"pid": other.pid, "memory": 1}]) for i in range(8)])
        for _ in range(3):
            assert all(found.processes[0].command for found in devices.gpus())
        assert reads == [other.pid]
        monkeypatch.setattr(devices._driver, "owners_until", 0.0)  # commands can change
        devices.gpus()
        assert reads == [other.pid] * 2


# -- who is a stranger -------------------------------------------------------------------------


def card(index: int, *processes: GpuProcess, used: int | None = 0) -> Gpu:
    return Gpu(index, uuid(index), "NVIDIA H200", 140 * GIB, memory_used=used, processes=processes)


def test_ours_are_no_strangers() -> None:
    present = [card(0, GpuProcess(7, GIB)), card(1, GpuProcess(7, GIB), GpuProcess(8, GIB))]
    assert foreign_users(present, ours={7}) == {uuid(1): "pid 8 (1.0 GiB)"}
    assert foreign_users(present, ours={7, 8}) == {}
    assert foreign_users([card(0, GpuProcess(7, GIB), used=70 * GIB)], ours={7}) == {}


def test_a_gpu_that_a_job_holds_is_never_foreign() -> None:
    # In a container the driver's pid of our own rank is a number that means nobody here.
    rank = GpuProcess(NOBODY, GIB)
    present = [card(0, rank), card(1, rank), card(2, used=GIB)]
    assert set(foreign_users(present, ours={7}, claimed={uuid(0), uuid(2)})) == {uuid(1)}


def test_a_desktop_does_not_use_a_gpu_and_a_renderer_does() -> None:
    present = [
        card(0, GpuProcess(1, 300 * 2**20, "graphics"), used=300 * 2**20),
        card(1, GpuProcess(2, 9 * GIB, "graphics"), used=9 * GIB),
    ]
    assert foreign_users(present, ours=()) == {uuid(1): "pid 2 (9.0 GiB)"}


def test_memory_held_by_nobody_who_can_be_seen_is_foreign() -> None:
    present = [card(0, used=70 * GIB), card(1, used=200 * 2**20), card(2, used=None)]
    assert foreign_users(present, ours=()) == {uuid(0): "hidden processes (70.0 GiB)"}


def test_the_line_names_the_largest_and_counts_the_rest() -> None:
    users = [
        GpuProcess(1, GIB, user="ann", command="/usr/bin/python3 small.py"),
        GpuProcess(2, 40 * GIB, user="bob", command="/opt/bin/python3 big.py --out " + "x" * 90),
        GpuProcess(3, None, user="cat", command="serve"),
    ]
    [line] = foreign_users([card(0, *users)], ours=()).values()
    big, small = line.split("; ")
    assert big.startswith("bob: python3 big.py --out xxx")
    assert big.endswith("x… (pid 2, 40.0 GiB)")
    assert small == "ann: python3 small.py (pid 1, 1.0 GiB) and 1 more"
    assert "\n" not in line


@given(
    held=st.lists(st.lists(st.integers(1, 6), max_size=3), max_size=6),
    ours=st.sets(st.integers(1, 6)),
    claimed=st.sets(st.integers(0, 5)),
)
def test_foreign_is_exactly_what_someone_else_holds(
    held: list[list[int]], ours: set[int], claimed: set[int]
) -> None:
    present = [
        card(index, *(GpuProcess(pid, GIB) for pid in pids)) for index, pids in enumerate(held)
    ]
    expected = {
        uuid(index) for index, pids in enumerate(held) if set(pids) - ours and index not in claimed
    }
    assert set(foreign_users(present, ours, {uuid(index) for index in claimed})) == expected


def test_placement_passes_by_gpus_of_strangers(nvml: StubNvml, tmp_path: Path) -> None:
    with holder(tmp_path) as other:
        nvml.write([gpu(0, processes=[{"pid": other.pid, "memory": GIB}]), {}, {}])
        present = devices.gpus()
    foreign = foreign_users(present, ours={os.getpid()})
    names = [found.uuid for found in present]
    two, three = Request(1, 2), Request(1, 3)
    assert place([two], {}, names, foreign=foreign) == [Start(1, (uuid(1), uuid(2)))]
    assert isinstance(place([three], {}, names, foreign=foreign)[0], Wait)
