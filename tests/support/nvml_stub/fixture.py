"""Fixtures that play GPUs: `nvml_stub` for child processes, `nvml` for the test's own process."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import pynvml
import pytest

from jobs.machine import devices
from tests.support.nvml_stub.stub import STATE_VARIABLE, NoCompiler, StubNvml, build

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def nvml_stub_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled stub; tests that need it are skipped where nothing can compile it."""
    try:
        return build(tmp_path_factory.mktemp("nvml"))
    except NoCompiler as problem:
        pytest.skip(str(problem))


@pytest.fixture
def nvml_stub(nvml_stub_library: Path, tmp_path: Path) -> StubNvml:
    """No GPUs at first; a test writes its own, and starts processes in `environment`."""
    return StubNvml(nvml_stub_library, tmp_path / "gpus.txt")


@pytest.fixture
def nvml(nvml_stub: StubNvml, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubNvml]:
    """The same inside this process, with nothing remembered from before or left behind.

    pynvml keeps the library it loaded in a module variable and the functions it looked up in
    another; both are put back, so that tests on real GPUs in the same session meet the real one.
    """
    monkeypatch.setenv(STATE_VARIABLE, str(nvml_stub.state))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL(str(nvml_stub.library)))
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.setattr(devices, "_driver", devices._Driver())
    devices._is_local_pid.cache_clear()
    yield nvml_stub
    if devices._driver.ready:
        pynvml.nvmlShutdown()
    devices._is_local_pid.cache_clear()
