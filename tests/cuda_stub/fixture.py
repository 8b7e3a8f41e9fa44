"""Fixtures that play GPUs to compute on: `stub_cuda`, and `stub_gpus` with NVML beside it."""

from __future__ import annotations

import os

import pytest

from tests.cuda_stub.stub import (
    REQUIRED_VARIABLE,
    StubCuda,
    Unavailable,
    build,
    find_python,
)



@pytest.fixture(scope="session")
def stub_cuda(tmp_path_factory: pytest.TempPathFactory) -> StubCuda:
    """The compiled stub; skips what needs it where it cannot be had, or fails if it must be."""
    try:
        python = find_python()
        return StubCuda(build(tmp_path_factory.mktemp("cuda"), python), python)
    except Unavailable as problem:
        if os.environ.get(REQUIRED_VARIABLE):
            pytest.fail(f"{REQUIRED_VARIABLE} is set, but {problem}")
        pytest.skip(str(problem))
