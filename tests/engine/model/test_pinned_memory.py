"""Host memory that is registered with CUDA; CUDA itself is stood in for."""

from __future__ import annotations

import gc

import pytest
import torch

from engine.model.files import weights


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Address → bytes of what is registered now."""
    found: dict[int, int] = {}
    monkeypatch.setattr(weights, "pin_memory", found.__setitem__)
    monkeypatch.setattr(weights, "unpin_memory", found.pop)
    return found


def test_shards_take_what_they_need_and_no_power_of_two(registered: dict[int, int]) -> None:
    wanted = [
        torch.empty(shape, dtype=dtype, device="meta")
        for shape, dtype in (
            ((1025, 1024), torch.float32),
            ((0, 7), torch.float32),
            ((3,), torch.bfloat16),
            ((513,), torch.bfloat16),
        )
    ]
    memory = weights.PinnedMemory(weights.bytes_of(wanted))
    (size,) = registered.values()
    needed = sum(tensor.nbytes for tensor in wanted)
    assert needed <= size <= needed + 512 * len(wanted)
    taken = [memory.take_like(tensor) for tensor in wanted]
    assert [(t.shape, t.dtype) for t in taken] == [(t.shape, t.dtype) for t in wanted]
    (address,) = registered
    for number, tensor in enumerate(taken):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, "saving copies whole storages"
        tensor.fill_(number)
        if tensor.numel():
            assert address <= tensor.data_ptr() <= address + size - tensor.nbytes
            assert tensor.data_ptr() % 512 == address % 512
    assert [float(t.float().mean()) for t in taken if t.numel()] == [0.0, 2.0, 3.0]


def test_it_is_given_back_with_the_last_tensor(registered: dict[int, int]) -> None:
    memory = weights.PinnedMemory(4096)
    first, second = (memory.take_like(torch.empty(8, device="meta")) for _ in range(2))
    del memory, first
    gc.collect()
    assert registered
    second.fill_(1.0)
    del second
    gc.collect()
    assert not registered


def test_memory_that_cuda_refuses_is_ordinary_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: int, size: int) -> None:
        raise RuntimeError("Registering memory failed with cudaError: 2.")

    monkeypatch.setattr(weights, "pin_memory", refuse)
    taken = weights.PinnedMemory(4096).take_like(torch.empty(8, device="meta"))
    assert taken.fill_(2.0).sum() == 16.0
