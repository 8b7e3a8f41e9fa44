"""Fixtures that play GPUs to compute on: `stub_cuda`, and `rehearsal`, a file's jobs on them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.support.cuda_stub.rehearsal import Rehearsal
from tests.support.cuda_stub.stub import (
    REQUIRED_VARIABLE,
    StubCuda,
    Unavailable,
    build,
    find_python,
)
from tests.support.nvml_stub.stub import StubNvml

if TYPE_CHECKING:
    from pathlib import Path


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


@pytest.fixture(scope="module")
def rehearsal(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    stub_cuda: StubCuda,
    nvml_stub_library: Path,
) -> Rehearsal:
    """The file's `JOBS`, done: those that its chosen tests name, and those that these resume."""
    jobs = request.module.JOBS
    here = [item for item in request.session.items if item.path == request.node.path]
    params = [item.callspec.params.values() for item in here if hasattr(item, "callspec")]
    chosen = {word for words in params for word in request.module.needed_for(*words)}
    root = tmp_path_factory.mktemp("rehearsal")
    done = Rehearsal(root, stub_cuda, StubNvml(nvml_stub_library, root / "gpus.txt"))
    done.run({name: job for name, job in jobs.items() if name in chosen})
    return done
