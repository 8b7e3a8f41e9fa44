"""Run tests on mutants, each in a fork of this process, which has imported the libraries.

A program of its own: `python trials.py`, in a copy of the repository, with a JSON object a line on
standard input (`file`, `source`, `tests`, `seconds`), and one a line on standard output (`outcome`,
`by`, `cpu`). Nothing of the repository is imported here, so that each fork imports the mutant. The
mutant is written into the copy: processes that tests start run it, too.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import os
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

_JOBS: Final = (
    "pytest",
    "hypothesis.strategies",
    "hypothesis.stateful",
    "xdist",
    "pytest_asyncio",
    "pydantic",
    "yaml",
    "psutil",
    "click.testing",
    "pynvml",
    "PIL.Image",
    "sqlite3",
    "textual.app",
    "syrupy",
    "pytest_textual_snapshot",
)
_ENGINE: Final = (
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "accelerate",
    "torch.distributed.checkpoint.staging",
    "accelerate.utils.fsdp_utils",
    "peft",
    "datasets",
    "safetensors.torch",
    "transformers",
    "diffusers",
    "diffusers.training_utils",
    "diffusers.models.transformers.transformer_flux",
    "diffusers.loaders.lora_pipeline",
    "diffusers.pipelines.flux.pipeline_flux",
    "transformers.models.clip.modeling_clip",
    "transformers.models.clip.tokenization_clip",
    "transformers.models.t5.modeling_t5",
    "transformers.models.t5.tokenization_t5",
    "tokenizers",
)
_HOME: Final = b"FSDP_TUI_HOME="

# The cache of compiled code goes by seconds and size; two mutants may share both.
_stamps = itertools.count(1_000_000_000)


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # also: no thread of torch's is lost in a fork
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in _JOBS + (_ENGINE if "engine" in sys.argv[1:] else ()):
        importlib.import_module(name)
    gc.freeze()  # pytest collects garbage five times at its end, and what was imported is none
    for line in sys.stdin:
        print(json.dumps(_try(**json.loads(line))), file=answers, flush=True)


def _try(file: str, source: str, tests: list[str], seconds: float) -> dict[str, Any]:
    """Run test files, one after the other, on another source of a file; it is put back then."""
    before = Path(file).read_text()
    _write(Path(file), source)
    begun = _spent()
    answer: dict[str, Any] = {}
    for one in tests:
        answer = _run(one, seconds)
        if answer["outcome"] != "survives":
            break
    _write(Path(file), before)
    return answer | {"cpu": _spent() - begun}


def _run(tests: str, seconds: float) -> dict[str, Any]:
    """What becomes of a test file, in a fork."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as scratch:
        pid = os.fork()
        if not pid:
            _test(tests, Path(scratch), seconds)
        status = _wait(pid, seconds)
        _end_all(pid, scratch)
        said = (Path(scratch) / "log").read_text(errors="replace")
    if status is None or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU):
        return {"outcome": "hangs", "by": tests, "said": said[-3000:]}
    if status == 0:
        return {"outcome": "survives", "by": "", "said": said[-3000:]}
    failed = [
        line.split(" ")[1] for line in said.splitlines() if line.startswith(("FAILED ", "ERROR "))
    ]
    return {"outcome": "dies", "by": failed[0] if failed else "", "said": said[-3000:]}


def _spent() -> float:
    """CPU-seconds of all forks that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    stamp = next(_stamps)
    os.utime(path, (stamp, stamp))


def _test(tests: str, scratch: Path, seconds: float) -> None:
    """In the fork."""
    code = 99
    try:
        os.setsid()
        log = os.open(scratch / "log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 2))
        pytest = importlib.import_module("pytest")
        words = [
            "-x",
            "-q",
            "-n0",
            "-p",
            "no:cacheprovider",
            "--no-header",
            "-m",
            "not slow and not e2e",
            f"--basetemp={scratch / 'tmp'}",
            tests,
        ]
        code = int(pytest.main(words))
        sys.stdout.flush()
    finally:
        os._exit(code)


def _wait(pid: int, seconds: float) -> int | None:
    """The fork's status; None if it had to be ended. Long, since the machine may be busy."""
    deadline = time.monotonic() + 10 * seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _end_all(session: int, scratch: str) -> None:
    """End what a mutant left running: of its session, or with a state directory of its own."""
    below = _HOME + scratch.encode() + b"/"
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        try:
            ours = os.getsid(pid) == session or any(
                one.startswith(below) for one in (entry / "environ").read_bytes().split(b"\0")
            )
            if ours and pid != os.getpid():
                os.kill(pid, signal.SIGKILL)
        except OSError:  # gone, or another user's
            continue


if __name__ == "__main__":
    main()
