"""What the doctor says of packages, limits, disks, the hub, variables, the terminal, the queue."""

from __future__ import annotations

import errno
import fcntl
import inspect
import json
import os
import re
import sqlite3
import struct
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from jobs import service
from jobs.doctor.checks import disks, queue, software
from jobs.doctor.checks import queue as job
from jobs.doctor.checks.disks import (
    Disk,
    checkpoint_bytes,
    checkpoints_kept,
    judge_clock,
    judge_disk,
    judge_room,
    look,
    nearest,
)
from jobs.doctor.checks.environment import (
    judge_locked_memory,
    judge_memory,
    judge_open_files,
    judge_shared_memory,
    judge_variables,
)
from jobs.doctor.checks.terminal import Tmux, ask_tmux, is_utf8, judge_terminal
from jobs.doctor.examine import Finding, Patient, Verdict
from jobs.doctor.nvml import Nvml
from jobs.errors import UserError
from jobs.machine.cgroups import memory_rooms
from jobs.machine.devices import Gpu
from jobs.machine.residence import kind_among
from jobs.preflight import check_job
from jobs.preflight.versions import TESTED
from jobs.spec.file.load import load_spec
from jobs.spec.job_spec import JobSpec
from jobs.units import size
from tests.support.waiting import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from jobs.queue.store import Store

MIB = 2**20
GIB = 2**30


def told(found: Iterable[Finding]) -> list[tuple[str, str]]:
    return [(str(finding.verdict), finding.name) for finding in found]


def one(found: Iterable[Finding]) -> Finding:
    (finding,) = found
    return finding


# -- packages ------------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Versions of what is installed; a test says which."""
    versions: dict[str, str] = {}
    wanted = software.Requirements(
        ">=3.11", ("torch>=2.12,<3", "numpy>=1.26"), {"video": ("av>=15,<19",)}
    )
    monkeypatch.setattr(software, "read_requirements", lambda: wanted)
    monkeypatch.setattr(software, "installed", versions.get)
    monkeypatch.setattr("jobs.preflight.versions.installed", versions.get)
    return versions


@pytest.mark.parametrize(
    ("torch", "verdict", "text"),
    [
        ("2.12.0", "ok", "all 2"),
        ("2.13.0+cpu", "ok", "all 2"),
        ("2.14.0.dev20260101+cu130", "ok", "all 2"),
        ("2.11.1", "fail", "2.11.1 is too old"),
        ("2.98.0", "warn", "2.98.0 is newer than fsdp-tui was tested with (2.12 to 2."),
        ("3.0.0", "warn", "3.0.0 is newer than fsdp-tui was tested with"),
        (None, "fail", "is not installed"),
    ],
)
def test_packages_must_be_in_range(
    torch: str | None, verdict: str, text: str, installed: dict[str, str]
) -> None:
    installed |= {"numpy": "2.4.0"} | ({"torch": torch} if torch else {})
    finding = one(software.check_packages(Patient()))
    assert finding.verdict == verdict
    assert text in finding.found
    if verdict != "ok":
        assert finding.advice in (
            "pip install 'torch<3,>=2.12'",
            f"pip install 'torch>=2.12,<2.{TESTED['torch'].newest[1] + 1}'",
        )


def test_an_extra_need_not_be_there_but_must_fit(installed: dict[str, str]) -> None:
    finding = one(software.check_extras(Patient()))
    assert finding.verdict is Verdict.OK
    assert "not installed: video (av)" in finding.found
    installed["av"] = "14.0"
    assert told(software.check_extras(Patient())) == [("warn", "av"), ("ok", "extras")]


def test_ranges_are_those_of_pyproject(tmp_path: Path) -> None:
    wanted = software.read_requirements()
    assert any(text.startswith("torch>=") for text in wanted.needed)
    assert wanted.extras.keys() == {"optimizers", "datasets", "video"}
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "other"\n')
    assert software._checkout(tmp_path / "pyproject.toml") is None
    assert software._checkout(tmp_path / "none.toml") is None


def test_installed_without_a_checkout_the_metadata_says(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [
        "torch<3,>=2.11",
        "av>=15; extra == 'video'",
        "pytest; extra == 'test'",
        "tomli; python_version < '3'",
    ]
    monkeypatch.setattr(software, "_checkout", lambda path: None)
    monkeypatch.setattr(software.metadata, "requires", lambda name: texts)
    wanted = software.read_requirements()
    assert wanted.needed == ("torch<3,>=2.11",)
    assert wanted.extras["video"] == ("av>=15; extra == 'video'",)

    def missing(name: str) -> None:
        raise software.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(software.metadata, "requires", missing)
    with pytest.raises(UserError, match="not installed"):
        software.read_requirements()


# -- limits --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (judge_shared_memory(64 * MIB, 64 * MIB, writable=True, ranks=8), "fail"),  # docker's usual
        (judge_shared_memory(64 * GIB, 100 * MIB, writable=True, ranks=2), "fail"),
        (judge_shared_memory(512 * MIB, 512 * MIB, writable=True, ranks=2), "warn"),
        (judge_shared_memory(64 * GIB, 60 * GIB, writable=False, ranks=2), "fail"),
        (judge_shared_memory(64 * GIB, 60 * GIB, writable=True, ranks=8), "ok"),
        (judge_open_files(256, 4096), "fail"),
        (judge_open_files(1024, 524288), "warn"),
        (judge_open_files(65536, 65536), "ok"),
        (judge_open_files(-1, -1), "ok"),
        (judge_locked_memory(8 * MIB, infiniband=True), "warn"),
        (judge_locked_memory(8 * MIB, infiniband=False), "ok"),
        (judge_locked_memory(-1, infiniband=True), "ok"),
        (judge_memory(1 * GIB, 64 * GIB, None), "fail"),
        (judge_memory(8 * GIB, 64 * GIB, None), "warn"),
        (judge_memory(60 * GIB, 64 * GIB, None), "ok"),
        (judge_memory(60 * GIB, 64 * GIB, (1 * GIB, 4 * GIB)), "fail"),
    ],
)
def test_limits(found: Finding, verdict: str) -> None:
    assert found.verdict == verdict, found
    assert (found.advice is None) == (verdict == "ok")


def test_advice_on_open_files_depends_on_who_may_raise_them() -> None:
    assert judge_open_files(1024, 524288).advice == "ulimit -n 524288 before fsdp-tui starts"
    assert judge_open_files(1024, -1).advice == "ulimit -n 65536 before fsdp-tui starts"
    assert "limits.conf" in (judge_open_files(1024, 1024).advice or "")


def test_control_groups_of_both_versions(tmp_path: Path) -> None:
    inner = tmp_path / "v2" / "pod" / "box"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("1000\n")
    (inner / "memory.current").write_text("700\n")
    (inner / "memory.stat").write_text("anon 1\ninactive_file 200\n")
    (inner.parent / "memory.max").write_text("max\n")
    (inner.parent / "memory.current").write_text("900\n")
    own = tmp_path / "own"
    own.write_text("0::/pod/box\n")
    assert memory_rooms(own, tmp_path / "v2") == [(500, 1000)]
    old = tmp_path / "v1" / "memory" / "box"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("300\n")
    (old / "memory.usage_in_bytes").write_text("400\n")
    own.write_text("5:cpu:/x\n4:memory:/box\n")
    assert memory_rooms(own, tmp_path / "v1") == [(0, 300)]
    assert memory_rooms(tmp_path / "none", tmp_path) == []


def test_sizes() -> None:
    assert [size(n) for n in (8, 65536, 64 * MIB, 1.5 * GIB, 140 * GIB, 999 * MIB)] == [
        "8 B",
        "64 KiB",
        "64 MiB",
        "1.5 GiB",
        "140 GiB",
        "999 MiB",
    ]
    assert size(10**400).endswith(" TiB"), "what a damaged file may hold"


# -- disks ---------------------------------------------------------------------------------


def disk(**values: Any) -> Disk:
    usual = {"kind": "ext4", "free": 500 * GIB, "inodes": None, "problem": None}
    return Disk(**{"path": Path("/d"), **usual, **values})


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (disk(), "ok"),
        (disk(inodes=10**7), "ok"),
        (disk(free=10 * GIB), "warn"),
        (disk(free=200 * MIB), "fail"),
        (disk(inodes=12), "warn"),
        (disk(problem="Disk quota exceeded"), "fail"),
    ],
)
def test_room_on_a_disk(found: Disk, verdict: str) -> None:
    finding = one(judge_disk("state", Path("/d/e"), found))
    assert finding.verdict == verdict
    assert (finding.advice is None) == (verdict == "ok")


@pytest.mark.parametrize(("skew", "verdict"), [(0.0, "ok"), (-0.5, "ok"), (90.0, "warn")])
def test_clocks(skew: float, verdict: str) -> None:
    finding = one(judge_clock(disk(skew=skew)))
    assert finding.verdict == verdict
    if verdict == "warn":
        assert "90 s ahead of" in finding.found
    assert list(judge_clock(disk(problem="full"))) == []


def test_a_file_is_really_written_and_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = look(tmp_path / "not" / "there" / "yet")
    assert found.path == tmp_path
    assert found.problem is None
    assert found.free > 0
    assert list(tmp_path.iterdir()) == []

    def full(descriptor: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "fsync", full)
    assert look(tmp_path).problem == "Disk quota exceeded"
    assert list(tmp_path.iterdir()) == []


def test_the_innermost_file_system_counts() -> None:
    mounted = [("/", "ext4"), ("/home", "nfs4"), ("/home/me/fast", "xfs"), ("/home", "ceph")]
    assert kind_among(Path("/home/me/x"), mounted) == "ceph"
    assert kind_among(Path("/home/me/fast/x"), mounted) == "xfs"
    assert kind_among(Path("/homes/me"), mounted) == "ext4"
    assert kind_among(Path("/x"), []) == "?"
    assert nearest(Path("/no/such/place")) == Path("/")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("ext4", [("ok", "state"), ("ok", "clock")]),
        ("nfs4", [("ok", "state"), ("ok", "database"), ("ok", "clock")]),
        ("tmpfs", [("ok", "state"), ("warn", "state"), ("ok", "clock")]),
    ],
)
def test_where_the_database_may_be(
    kind: str, expected: list[tuple[str, str]], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disks, "look", lambda place: disk(kind=kind))
    assert told(disks.check_state_disk(Patient())) == expected


def test_checkpoints_must_fit(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.doctor.checks.disks.count_parameters", lambda path: 12 * 10**9)
    spec = JobSpec(
        pretrained_model_name_or_path=str(make_model()),
        model_type="full",
        max_train_steps=2000,
        checkpointing_steps=500,
    )
    each = 12 * 10**9 * 12  # fp32 weights and two moments
    assert one(judge_room(spec, each - 1)).verdict is Verdict.FAIL
    assert one(judge_room(spec, 3 * each)).verdict is Verdict.WARN
    assert one(judge_room(spec, 4 * each)).verdict is Verdict.OK
    monkeypatch.setattr("jobs.doctor.checks.disks.count_parameters", lambda path: None)
    assert list(judge_room(spec, 1)) == []
    assert list(judge_room(JobSpec(pretrained_model_name_or_path="/no"), 1)) == []


def test_a_checkpoint_of_an_adapter_is_as_large_as_its_factors(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = {
        "blocks.0.to_q.weight": (3072, 3072),
        "blocks.0.to_q.bias": (3072,),
        "blocks.0.experts.1.w1.weight": (3072, 3072),
        "proj_out.weight": (64, 3072),
    }
    monkeypatch.setattr("jobs.doctor.checks.disks.read_shapes", lambda path: shapes)
    job = {"pretrained_model_name_or_path": str(make_model()), "model_type": "lora"}

    def parameters(**values: Any) -> int:
        size = checkpoint_bytes(JobSpec(**job | values))
        assert size is not None
        return size // 12  # fp32 weights and two moments

    assert parameters(lora_rank=16) == 16 * 6144
    assert parameters(lora_rank=16, lora_experts=True) == 2 * 16 * 6144
    lokr = {"lora_variant": "lokr", "lora_rank": 16}
    assert parameters(**lokr) == 48 * 48 + 16 * 128
    assert parameters(**lokr, lokr_full_matrix=True, lokr_factor=8) == 8 * 8 + 384 * 384
    assert parameters(**lokr, lokr_full_matrix=True, lokr_factor=1) == 1 + 3072 * 3072


def test_how_many_checkpoints_there_are_at_once() -> None:
    def kept(**values: Any) -> int:
        return checkpoints_kept(JobSpec(max_train_steps=1100, **values))

    assert kept(checkpointing_steps=500) == 3
    assert kept(checkpointing_steps=0) == 1
    assert kept(checkpointing_steps=100, checkpoints_total_limit=2) == 3


# -- the hub -------------------------------------------------------------------------------


def test_a_token_is_told_and_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("hf_secret")
    file.chmod(0o600)
    found = [
        one(disks.judge_token("hf_secret", file, {})),
        one(disks.judge_token("hf_secret", file, {"HF_TOKEN": "hf_secret"})),
        one(disks.judge_token(None, file, {})),
        one(disks.judge_token("hf secret", file, {})),
    ]
    file.chmod(0o644)
    found.append(one(disks.judge_token("hf_secret", file, {})))
    assert [str(finding.verdict) for finding in found] == ["ok", "ok", "ok", "fail", "warn"]
    assert "secret" not in str([finding.to_dict() for finding in found])


def test_the_cache_is_measured_as_far_as_there_is_time(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "a").write_bytes(bytes(100))
    (tmp_path / "link").symlink_to("blobs/a")
    total, whole = disks.measure(tmp_path)
    assert whole
    assert 100 < total < 200, "what links lead to counts once"
    assert disks.measure(tmp_path, seconds=-1.0) == (0, False)
    assert disks.measure(tmp_path / "none") == (0, True)


# -- variables -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "verdict", "name"),
    [
        ({}, "ok", "variables"),
        ({"PATH": "/bin", "HOME": "/home/me"}, "ok", "variables"),
        ({"NCCL_P2P_DISABLE": "1"}, "warn", "NCCL_P2P_DISABLE"),
        ({"NCCL_P2P_DISABLE": "0"}, "ok", "set"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "warn", "CUDA_LAUNCH_BLOCKING"),
        ({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, "warn", "TORCH_DISTRIBUTED_DEBUG"),
        ({"TORCH_DISTRIBUTED_DEBUG": "OFF"}, "ok", "set"),
        ({"NCCL_DEBUG": "INFO"}, "warn", "NCCL_DEBUG"),
        ({"NCCL_DEBUG": "WARN"}, "ok", "set"),
        ({"NCCL_SOCKET_IFNAME": "ib"}, "fail", "NCCL_SOCKET_IFNAME"),
        ({"NCCL_SOCKET_IFNAME": "^docker,lo"}, "ok", "set"),
        ({"NCCL_SOCKET_IFNAME": "et"}, "ok", "set"),
        ({"NCCL_SOCKET_IFNAME": "=et"}, "fail", "NCCL_SOCKET_IFNAME"),
        ({"NCCL_SOCKET_IFNAME": "=eth0"}, "ok", "set"),
        ({"GLOO_SOCKET_IFNAME": "eth"}, "fail", "GLOO_SOCKET_IFNAME"),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"},
            "warn",
            "PYTORCH_CUDA_ALLOC_CONF",
        ),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, "warn", "PYTORCH_ALLOC_CONF"),
        ({"TMPDIR": "/no/such/place"}, "fail", "TMPDIR"),
        (
            {"WORLD_SIZE": "4", "ACCELERATE_USE_CPU": "1", "FSDP_VERSION": "1"},
            "ok",
            "not passed on",
        ),
        ({"FSDP_TUI_HOME": "/x", "FSDP_TUI_RUNNER_IDLE": "1"}, "ok", "variables"),
    ],
)
def test_variables_that_bite(environ: dict[str, str], verdict: str, name: str) -> None:
    finding = next(judge_variables(environ, ["lo", "eth0"]))
    assert (finding.verdict, finding.name) == (verdict, name)


def test_a_folder_that_hides_our_packages(tmp_path: Path) -> None:
    for name in ("ours/engine", "theirs/torch", "harmless/stuff"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "__init__.py").touch()
    checkout = Path(disks.__file__).resolve().parents[3]

    def found(*entries: Path) -> list[tuple[str, str]]:
        path = os.pathsep.join(map(str, entries))
        return told(judge_variables({"PYTHONPATH": path}, []))

    assert found(tmp_path / "harmless") == [("ok", "set")]
    assert found(checkout) == [("ok", "set")]
    assert found(tmp_path / "ours") == [("fail", "PYTHONPATH")]
    assert found(tmp_path / "harmless", tmp_path / "theirs") == [("warn", "PYTHONPATH")]
    assert found(tmp_path / "none") == [("ok", "set")]


def test_libraries_that_come_before_those_of_torch(tmp_path: Path) -> None:
    for name in ("cuda/libcudart.so.12", "stubs/libcuda.so", "driver/libcuda.so.1", "mine/libx.so"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()

    def found(name: str) -> Finding:
        return next(judge_variables({"LD_LIBRARY_PATH": str(tmp_path / name)}, []))

    assert found("cuda").verdict is Verdict.WARN
    assert "libcudart" in found("cuda").found
    assert found("stubs").verdict is Verdict.FAIL
    assert found("driver").verdict is Verdict.OK
    assert found("mine").verdict is Verdict.OK


# -- the terminal --------------------------------------------------------------------------

GOOD = {"TERM": "xterm-256color", "COLORTERM": "truecolor", "LANG": "en_US.UTF-8"}


@pytest.mark.parametrize(
    ("changes", "size", "tmux", "worries"),
    [
        ({}, (120, 40), None, []),
        ({"TERM": "dumb"}, (120, 40), None, ["terminal"]),
        ({"TERM": ""}, (120, 40), None, ["terminal"]),
        ({}, (79, 40), None, ["terminal"]),
        ({"COLORTERM": ""}, (80, 24), None, ["colours"]),
        ({"COLORTERM": "", "NO_COLOR": "1"}, (80, 24), None, []),
        ({"LC_ALL": "POSIX"}, (80, 24), None, ["locale"]),
        ({"LANG": ""}, (80, 24), None, ["locale"]),
        ({"STY": "1.pts"}, (80, 24), None, ["screen"]),
        ({}, (80, 24), Tmux(True, True), []),
        ({}, (80, 24), Tmux(False, False), ["tmux", "tmux"]),
        ({}, (80, 24), Tmux(None, None), []),
    ],
)
def test_what_a_terminal_can_show(
    changes: dict[str, str], size: tuple[int, int], tmux: Tmux | None, worries: list[str]
) -> None:
    found = list(judge_terminal(GOOD | changes, size, tmux))
    assert [finding.name for finding in found if finding.verdict is not Verdict.OK] == worries
    assert all(finding.verdict is not Verdict.FAIL for finding in found), "jobs need no terminal"


@pytest.mark.parametrize("value", ["en_US.UTF-8", "C.utf8", "de_DE.utf8@euro"])
def test_locales_that_take_utf8(value: str) -> None:
    assert is_utf8({"LANG": value})
    assert not is_utf8({"LANG": value, "LC_ALL": "C"})
    assert is_utf8({"LANG": "C", "LC_CTYPE": value})


@pytest.mark.parametrize(
    ("features", "overrides", "tmux"),
    [
        ("256,RGB,clipboard on", "", Tmux(True, True)),
        ("256,clipboard off", "", Tmux(False, False)),
        ("256 on", "xterm*:Tc", Tmux(True, True)),
    ],
)
def test_tmux_is_asked(
    features: str, overrides: str, tmux: Tmux, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "tmux"
    answers = f"case $1 in display*) echo '{features}';; *) echo '{overrides}';; esac"
    script.write_text(f"#!/bin/sh\n{answers}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("jobs.doctor.checks.terminal._TMUX_WITHIN", PATIENCE)
    assert ask_tmux() == tmux
    script.unlink()
    assert ask_tmux() == Tmux()


# -- the queue -----------------------------------------------------------------------------


def test_no_database_is_none_made(home: Path) -> None:
    assert told(queue.check_database(Patient())) == [("ok", "database")]
    assert told(queue.check_keeper(Patient())) == [("ok", "queue keeper")]
    assert queue.claimed() == {}
    assert list(home.iterdir()) == []


def test_exports_of_earlier_versions_that_name_what_is_private(home: Path) -> None:
    assert list(queue.check_exports(Patient())) == []
    said = {"1-a": {"lora_rank": 4}, "2-b": {"slurm_setup": ["export KEY=x"], "lora_rank": 4}}
    for name, values in said.items():
        (home / "runs" / name / "export").mkdir(parents=True)
        header = json.dumps({"__metadata__": {"fsdp_tui.job": json.dumps(values)}}).encode()
        text = struct.pack("<Q", len(header)) + header
        (home / "runs" / name / "export" / "x.safetensors").write_bytes(text)
    (home / "runs" / "1-a" / "export" / "damaged.safetensors").write_bytes(b"x")
    finding = one(queue.check_exports(Patient()))
    assert finding.verdict is Verdict.WARN
    assert "those of 2-b name private settings in their headers (slurm_setup)" in finding.found


def test_a_database_that_is_none(home: Path) -> None:
    (home / "jobs.db").write_bytes(b"no database, but long enough to be looked at\n" * 99)
    finding = one(queue.check_database(Patient()))
    assert finding.verdict is Verdict.FAIL
    assert "file is not a database" in finding.found


def test_a_locked_database_is_not_called_damaged(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "_BUSY", 0.0)
    with closing(sqlite3.connect(store.path, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode=TRUNCATE")
        db.execute("BEGIN EXCLUSIVE")
        finding = one(queue.check_database(Patient()))
    assert finding.verdict is Verdict.FAIL
    assert "is locked by another process" in finding.found
    assert finding.advice == "try again in a moment"


def test_a_database_of_a_newer_version(store: Store) -> None:
    with sqlite3.connect(store.path) as db:
        db.execute("PRAGMA user_version=99")
    with pytest.raises(UserError, match="newer version"):
        list(queue.check_database(Patient()))


def test_jobs_that_wait_without_a_keeper(store: Store, job_values: dict[str, Any]) -> None:
    store.pause(True)
    service.submit(store, load_spec(None, job_values))
    found = list(queue.check_database(Patient()))
    assert told(found) == [("ok", "database"), ("warn", "queue")]
    assert found[0].facts == {"jobs": 1, "active": 0, "queued": 1}
    finding = one(queue.check_keeper(Patient()))
    assert finding.verdict is Verdict.WARN
    assert "1 jobs are queued" in finding.found


HOLD = """\
import fcntl, sys
lock = open(sys.argv[1], "a")
fcntl.flock(lock, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_the_keeper_is_found_by_its_lock_which_is_not_touched(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = home / "runner.lock"
    words = [sys.executable, "-c", HOLD, str(lock), "jobs.backends.keeper"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert queue.keeper_of(lock) == holder.pid
        finding = one(queue.check_keeper(Patient()))
        assert finding.verdict is Verdict.OK
        assert f"pid {holder.pid}" in finding.found
        monkeypatch.setattr(queue, "newest_code", lambda: 1e12)
        finding = one(queue.check_keeper(Patient()))
        assert finding.verdict is Verdict.WARN
        assert finding.advice is not None
        assert finding.advice.startswith(f"kill {holder.pid}")
    assert queue.keeper_of(lock) is None
    with open(lock) as mine:
        fcntl.flock(mine, fcntl.LOCK_SH)
        assert queue.keeper_of(lock) is None, "whoever holds it must be a keeper"


# -- the job -------------------------------------------------------------------------------


def examine_job(path: Path, nvml: Nvml | None = None) -> list[Finding]:
    patient = Patient(job=path, nvml=nvml or Nvml())
    return [*job.read_job(patient), *job.check_job(patient)]


def write(path: Path, values: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(values))
    return path


def test_a_job_that_can_run(job_values: dict[str, Any], tmp_path: Path) -> None:
    found = examine_job(write(tmp_path / "job.yaml", job_values))
    assert told(found) == [("ok", name) for name in ("job file", "model", "dataset", "devices")]


def test_a_job_file_that_cannot_be_read_is_a_failure(tmp_path: Path) -> None:
    (finding,) = examine_job(write(tmp_path / "job.yaml", {"train_batchsize": 1}))
    assert finding.verdict is Verdict.FAIL
    assert 'did you mean "train_batch_size"' in finding.found


def test_all_that_is_wrong_with_a_job_is_told_at_once(
    job_values: dict[str, Any], tmp_path: Path, no_gpus: None
) -> None:
    wrong = {
        "pretrained_model_name_or_path": "/no/model",
        "dataset": "/no/data",
        "validation_prompts": ["a"],
        "validation_scores": ["clip_t"],
        "validation_clip_model": "/no/clip",
        "device": "auto",
        "gpus": [0, 1],
    }
    found = examine_job(write(tmp_path / "job.yaml", job_values | wrong))
    names = ("model", "scoring models", "dataset", "devices")
    assert told(found)[1:] == [("fail", name) for name in names]
    assert all(finding.advice for finding in found[1:])


def test_nothing_that_a_job_is_refused_for_is_forgotten() -> None:
    """A check that is added to preflight belongs into `jobs.doctor.checks.queue` too."""
    source = inspect.getsource(check_job.check) + inspect.getsource(check_job.check_here)
    names = set(re.findall(r"\bcheck_\w+", source)) - {"check_here"}
    assert names >= {"check_model", "check_devices"}
    assert names <= vars(job).keys()


def test_what_a_job_would_wait_for(
    job_values: dict[str, Any], monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    gpus = [Gpu(0, "a", "H", 1), Gpu(1, "b", "H", 1, memory_used=40 * GIB), Gpu(2, "c", "H", 1)]
    monkeypatch.setattr("jobs.machine.devices.gpus", lambda: gpus)
    monkeypatch.setattr(job, "claimed", lambda: {"a": 3})
    del job_values["device"], job_values["num_processes"]

    def devices(**values: Any) -> tuple[str, str]:
        spec = load_spec(None, job_values | values)
        finding = one(job.check_job_gpus(spec, gpus))
        return str(finding.verdict), finding.found

    assert devices(gpus=1) == ("ok", "1 GPU, of which 1 is free now")
    assert devices(gpus=2) == ("warn", "2 GPUs, of which 1 is free now")
    assert devices(gpus=2, share_gpus=True) == ("ok", "2 GPUs, of which 2 are free now")
    assert devices(gpus=[0, 2])[0] == "warn"
    assert "GPU 0 is held by job 3" in devices(gpus=[0, 2])[1]
    assert devices(gpus=[2]) == ("ok", "GPU 2; free")
    assert devices(gpus=[7])[0] == "fail"
