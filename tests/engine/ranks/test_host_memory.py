"""Host memory that is left, where a container allows less than the machine has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil
import pytest

from engine.ranks.world import available_memory

if TYPE_CHECKING:
    from pathlib import Path

MIB = 2**20


def group(directory: Path, files: dict[str, str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(text + "\n")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        available = 1000 * MIB

    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory)


def test_the_narrowest_group_around_the_process_counts(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("0::/outer/inner\n")
    group(tmp_path / "fs/outer/inner", {"memory.max": "max", "memory.current": str(90 * MIB)})
    limits = {"memory.max": str(200 * MIB), "memory.current": str(150 * MIB)}
    group(tmp_path / "fs/outer", limits | {"memory.stat": f"anon 1\ninactive_file {30 * MIB}"})
    assert available_memory(own, tmp_path / "fs") == 80 * MIB


def test_older_control_groups_are_read(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("5:cpu:/job\n4:memory:/job\n")
    limits = {"memory.limit_in_bytes": str(64 * MIB), "memory.usage_in_bytes": str(4 * MIB)}
    group(tmp_path / "fs/memory/job", limits)
    assert available_memory(own, tmp_path / "fs") == 60 * MIB


def test_a_container_sees_its_own_limit_at_the_root(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("0::/\n")
    group(tmp_path / "fs", {"memory.max": str(10 * MIB), "memory.current": str(12 * MIB)})
    assert available_memory(own, tmp_path / "fs") == 0


def test_without_groups_the_machine_counts(tmp_path: Path) -> None:
    assert available_memory(tmp_path / "missing", tmp_path) == 1000 * MIB
