"""Damaged safetensors files are told of before a job is queued, by their headers alone."""

from __future__ import annotations

import json
import os
import struct
from typing import TYPE_CHECKING, Any

import pytest

from jobs.errors import SpecError
from jobs.models.find_model import count_parameters, find_damage
from jobs.preflight.check_job import check_model

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.spec.job_spec import JobSpec


def tensor(begin: int, end: int, shape: list[int] | None = None, dtype: str = "U8") -> Any:
    size = [end - begin] if shape is None else shape
    return {"dtype": dtype, "shape": size, "data_offsets": [begin, end]}


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


@pytest.mark.parametrize(
    ("header", "room", "length", "said"),
    [
        ({}, 0, None, None),
        (
            {"__metadata__": {"a": "b"}, "x": tensor(0, 4), "y": tensor(4, 8, [2], "F16")},
            8,
            None,
            None,
        ),
        ({"x": tensor(0, 4, [1], "a kind of the future")}, 4, None, None),
        ({"x": tensor(0, 8)}, 7, None, "it is truncated: 7 of 8 bytes"),
        ({"x": tensor(0, 4), "y": tensor(2, 8)}, 8, None, "'y' overlaps another tensor"),
        ({"x": tensor(0, 4, [1000])}, 4, None, "'x' has fewer bytes than its shape needs"),
        ({"x": tensor(0, 4, ["a", 10**9])}, 4, None, "its header is damaged at 'x'"),  # type: ignore[list-item]
        ({"x": tensor(0, 4, [10**9, 10**9])}, 4, None, "'x' has fewer bytes than its shape needs"),
        ({"x": tensor(4, 0, [])}, 4, None, "its header is damaged at 'x'"),
        ({"x": tensor(-4, 4, [])}, 4, None, "its header is damaged at 'x'"),
        ({"x": {"dtype": []}}, 4, None, "its header is damaged at 'x'"),
        ({"x": 3}, 4, None, "its header is damaged at 'x'"),
        ([1], 4, None, "its header is damaged"),
        (b"[" * 100_000, 4, None, "its header is damaged"),
        (b"\xff\xff", 4, None, "its header is damaged"),
        ({}, 0, 2**63, "it is truncated, or not a safetensors file"),
        ({}, 0, 0, "it is truncated, or not a safetensors file"),
    ],
)
def test_a_damaged_file_is_found(
    tmp_path: Path, header: Any, room: int, length: int | None, said: str | None
) -> None:
    assert find_damage(write(tmp_path / "a", header, bytes(room), length)) == said


def test_a_shape_that_is_text_takes_no_memory(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", {"x": tensor(0, 4, ["a", 10**13])}, bytes(4))  # type: ignore[list-item]
    assert count_parameters(tmp_path) is None


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert find_damage(tmp_path / "pipe") == "it is not a regular file"
    assert find_damage(tmp_path / "none") == "it cannot be read: No such file or directory"
    (tmp_path / "empty").touch()
    assert find_damage(tmp_path / "empty") == "it is truncated, or not a safetensors file"


@pytest.mark.parametrize("part", ["transformer", "vae"])
def test_a_job_with_damaged_weights_is_refused(job_spec: JobSpec, part: str, no_gpus: None) -> None:
    from pathlib import Path

    folder = Path(job_spec.pretrained_model_name_or_path) / part
    (file,) = folder.glob("*.safetensors")
    check_model(job_spec)
    write(file, {"x": tensor(0, 8)})
    with pytest.raises(SpecError, match="is damaged: it is truncated: 0 of 8 bytes"):
        check_model(job_spec)
