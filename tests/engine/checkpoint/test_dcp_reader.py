"""Files of a checkpoint that would run code when they are read as torch reads them."""

from __future__ import annotations

import os
import pickle
from pathlib import PosixPath
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.metadata import Metadata

from engine.checkpoint import sharded
from engine.checkpoint.dcp_reader import INDEX, read_index
from engine.exports.source import ShardedCheckpoint
from jobs.errors import UserError
from jobs.run.checkpoint_files import Checkpoint

if TYPE_CHECKING:
    from pathlib import Path


class Evil:
    """Makes a folder where it is unpickled."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.made),)


def state() -> dict[str, Any]:
    return {
        "model": {"w": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)},
        "optimizer": {"w.lr": 1e-3, "betas": (0.9, 0.99), "on": None, "word": "a", "list": [1]},
    }


def save(path: Path, values: dict[str, Any]) -> Path:
    state_dict_saver.save(values, checkpoint_id=path, no_dist=True)
    return path


def test_what_torch_writes_is_read_as_it_was(tmp_path: Path) -> None:
    path, found = save(tmp_path / "step-1", state()), state()
    found["model"] = {name: torch.zeros_like(one) for name, one in found["model"].items()}
    found["optimizer"] = dict.fromkeys(found["optimizer"], 0)
    sharded.read_tensors(found, path, 1)
    assert found["optimizer"] == state()["optimizer"]
    assert all(torch.equal(one, state()["model"][name]) for name, one in found["model"].items())


def test_an_index_runs_nothing(tmp_path: Path) -> None:
    path, made = save(tmp_path / "step-1", state()), tmp_path / "made"
    (path / INDEX).write_bytes(pickle.dumps(Metadata({}, planner_data=Evil(made))))
    with pytest.raises(UserError, match=r"\.metadata cannot be read \(it would run posix\.mkdir\)"):
        sharded.read_tensors(state(), path, 1)
    with pytest.raises(UserError, match="it would run"):
        ShardedCheckpoint(Checkpoint(1, path, 1, "sharded", 1, False, 0.0, {}), ema=False)
    assert not made.exists()


@pytest.mark.parametrize("name", ["../other/__0_0.distcp", "/etc/passwd", "..", ""])
def test_an_index_names_files_beside_it_alone(tmp_path: Path, name: str) -> None:
    path = save(tmp_path / "step-1", state())
    index = read_index(path)
    for place in index.storage_data.values():
        place.relative_path = name
    (path / INDEX).write_bytes(pickle.dumps(index))
    with pytest.raises(UserError, match="it names the file"):
        read_index(path)


@pytest.mark.parametrize("data", [b"", b"\x80", b"junk", pickle.dumps(3), pickle.dumps([{}])])
def test_a_damaged_index_is_a_sentence(tmp_path: Path, data: bytes) -> None:
    (tmp_path / INDEX).write_bytes(data)
    with pytest.raises(UserError, match=r"cannot be read \(.+\)"):
        read_index(tmp_path)


def test_the_state_of_an_optimizer_runs_nothing(tmp_path: Path) -> None:
    made, values = tmp_path / "made", state()
    values["optimizer"]["w.lr"] = Evil(made)
    path = save(tmp_path / "step-1", values)
    assert not made.exists()
    with pytest.raises(UserError, match=r"w\.lr .*cannot be read \(it would run posix\.mkdir\)"):
        sharded.read_tensors(state(), path, 1)
    assert not made.exists()


class Twice:
    """A path of another one, twice."""

    def __init__(self, path: Any) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return PosixPath, (self.path, self.path)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\x80\x04Nr\0\0\0\1.", "its object 0 says that it is object 16777216"),
        (pickle.dumps(Twice(Twice("a"))), "it has a path that is not made of texts"),
    ],
)
def test_an_index_takes_no_more_memory_than_it_is_large(
    tmp_path: Path, data: bytes, said: str
) -> None:
    (tmp_path / INDEX).write_bytes(data)
    with pytest.raises(UserError, match=said):
        read_index(tmp_path)
