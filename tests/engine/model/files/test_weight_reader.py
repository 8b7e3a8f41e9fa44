"""Reading ranges of files into tensors: in pieces, converted, and when a file is not as it was."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from engine.model.files import weight_reader
from engine.model.files.weight_files import stored_tensors
from engine.model.files.weight_reader import Reading, read_all
from jobs.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

NUMBERS = torch.arange(60, dtype=torch.float32).view(10, 6)


def stored(directory: Path, tensor: torch.Tensor = NUMBERS) -> Reading:
    """All of a tensor that is in a file, to be read into zeros."""
    save_file({"before": torch.ones(3), "x": tensor}, directory / "a.safetensors")
    place = stored_tensors(directory)["x"]
    return Reading(place, 0, torch.zeros(tensor.shape, dtype=tensor.dtype))


@pytest.mark.parametrize("chunk", [8, 16, 64, 1 << 20])
@pytest.mark.parametrize("in_file", [torch.float32, torch.bfloat16])
def test_what_is_read_in_pieces_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, in_file: torch.dtype
) -> None:
    monkeypatch.setattr(weight_reader, "_CHUNK_BYTES", chunk)
    reading = stored(tmp_path, NUMBERS.to(in_file))
    target = torch.zeros(10, 6)
    rows = torch.zeros(4, 6)
    done: list[int] = []
    read = read_all(
        [Reading(reading.source, 0, target), Reading(reading.source, 18, rows)], done.append
    )
    assert torch.equal(target, NUMBERS)
    assert torch.equal(rows, NUMBERS[3:7])
    assert read == (60 + 24) * in_file.itemsize
    assert done == [1, 2]


def test_a_target_may_lie_in_memory_in_another_order(tmp_path: Path) -> None:
    reading = stored(tmp_path)
    target = torch.zeros(6, 10).t()
    assert read_all([Reading(reading.source, 0, target)], lambda done: None) == 240
    assert torch.equal(target, NUMBERS)


def test_a_rank_without_rows_reads_nothing(tmp_path: Path) -> None:
    reading = stored(tmp_path)
    empty = Reading(reading.source, 60, torch.zeros(0, 6))
    done: list[int] = []
    assert read_all([empty], done.append) == 0
    assert done == [1]


def test_a_file_that_is_gone_or_cannot_be_read_is_named(tmp_path: Path) -> None:
    reading = stored(tmp_path)
    file = reading.source.file
    file.rename(tmp_path / "b.safetensors")
    with pytest.raises(UserError, match=rf"cannot read {file} \(No such file or directory\)"):
        read_all([reading], lambda done: None)
    file.mkdir()  # can be opened, but not read
    with pytest.raises(UserError, match=rf"cannot read {file} \(Is a directory\)"):
        read_all([reading], lambda done: None)


def test_a_file_that_became_shorter_is_named(tmp_path: Path) -> None:
    reading = stored(tmp_path)
    file = reading.source.file
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(UserError, match=rf"{file} was truncated while being read"):
        read_all([reading], lambda done: None)


def test_a_number_too_large_for_fp16_is_found_in_any_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_reader, "_CHUNK_BYTES", 16)
    fits = stored(tmp_path)
    target = torch.zeros(10, 6, dtype=torch.float16)
    read_all([Reading(fits.source, 0, target)], lambda done: None)
    assert torch.equal(target.float(), NUMBERS)
    numbers = NUMBERS.clone()
    numbers[-1, -1] = 1e5
    reading = stored(tmp_path, numbers)
    half = Reading(reading.source, 0, torch.zeros(10, 6, dtype=torch.float16))
    with pytest.raises(UserError, match="x contains a value too large for float16"):
        read_all([half], lambda done: None)
    infinite = stored(tmp_path, torch.full((2,), float("inf"), dtype=torch.float16))
    read_all([infinite], lambda done: None)  # as it is in the file
    assert infinite.target.isinf().all()
    single = stored(tmp_path, torch.full((2,), float("inf")))
    rounded = Reading(single.source, 0, torch.zeros(2, dtype=torch.bfloat16))
    read_all([rounded], lambda done: None)  # bf16 has the same range
    assert rounded.target.isinf().all()
