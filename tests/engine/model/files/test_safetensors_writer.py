"""The streaming writer of safetensors files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from engine.model.files.safetensors_writer import DTYPE_NAMES, SafetensorsWriter
from engine.model.files.weight_files import stored_tensors

if TYPE_CHECKING:
    from pathlib import Path


def numbers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Distinct small numbers, which every dtype can hold."""
    count = torch.Size(shape).numel()
    return (
        (torch.arange(count) % 2 if dtype is torch.bool else torch.arange(count))
        .to(dtype)
        .reshape(shape)
    )


def test_every_dtype_comes_back_from_safetensors_whatever_the_order(tmp_path: Path) -> None:
    # Odd sizes of narrow types first: what follows must be aligned all the same.
    tensors = {f"a{n}.{d}": numbers(d, 3, n + 1) for n, d in enumerate(reversed(DTYPE_NAMES))}
    tensors |= {"scalar": torch.tensor(2.5), "none": torch.empty(0, 4), "ä": torch.ones(1)}
    path = tmp_path / "x.safetensors"
    facts = {name: (t.dtype, t.shape) for name, t in tensors.items()}
    with SafetensorsWriter(path, facts, {"step": "3"}) as writer:
        for name in reversed(tensors):
            writer.add(name, tensors[name])
    back = load_file(path)
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype is tensor.dtype
        assert torch.equal(back[name].view(-1), tensor.view(-1)), name
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"step": "3"}
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0


def test_the_engines_own_reader_agrees_on_the_places(tmp_path: Path) -> None:
    tensor = torch.randn(5, 7)
    path = tmp_path / "model.safetensors"
    with SafetensorsWriter(path, {"w": (tensor.dtype, tensor.shape)}) as writer:
        writer.add("w", tensor.t().contiguous().t())  # not contiguous
    place = stored_tensors(tmp_path)["w"]
    stored = path.read_bytes()[place.start :]
    assert stored == tensor.numpy().tobytes()


def test_a_missing_tensor_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    facts = dict.fromkeys(("a", "b"), (torch.float32, (2,)))
    writer = SafetensorsWriter(path, facts)
    writer.add("a", torch.ones(2))
    with pytest.raises(ValueError, match="lacks 1 tensors, among them b"):
        writer.close()
    assert not path.exists()


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("c", torch.ones(2), "c is not announced"),
        ("a", torch.ones(3), "announced as torch.float32"),
        ("a", torch.ones(2, dtype=torch.float16), "a is torch.float16"),
        ("b", torch.ones(2), "b was added before"),
    ],
)
def test_what_was_not_announced_is_refused_and_the_file_removed(
    tmp_path: Path, name: str, tensor: torch.Tensor, words: str
) -> None:
    path = tmp_path / "x.safetensors"
    facts = dict.fromkeys(("a", "b"), (torch.float32, (2,)))

    def write() -> None:
        with SafetensorsWriter(path, facts) as writer:
            writer.add("b", torch.ones(2))
            writer.add(name, tensor)

    with pytest.raises(ValueError, match=words):
        write()
    assert not path.exists()
