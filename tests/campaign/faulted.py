"""Runs commands of `fsdp-tui` in forks of one process that has imported everything, each with one
file operation broken: `python -m tests.campaign.faulted LIBRARY [FOLDER]`, with the
library preloaded. A folder gets a toy model and a checkpoint of it, for exports.

A line of JSON on standard input is a command, one on standard output what became of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, Final

_PATIENCE: Final = 60  # seconds of a command


def main() -> None:
    """Serve commands until standard input ends."""
    library = ctypes.CDLL(sys.argv[1])
    library.fault_last.restype = ctypes.c_char_p
    os.environ.pop("LD_PRELOAD")  # what a command starts is not meant
    _start_nothing()
    _import_all()
    if len(sys.argv) > 2:
        _export_here(Path(sys.argv[2]))
    for line in sys.stdin:
        print(json.dumps(_run(library, json.loads(line))), flush=True)


def _start_nothing() -> None:
    """Leave out keepers, supervisors, GPUs and the hub: a point is to take milliseconds."""
    for name in ("jobs.backends.keeper", "jobs.backends.local.dispatch"):
        importlib.import_module(name).start_detached = lambda *_, **__: None  # type: ignore[attr-defined]
    importlib.import_module("jobs.machine.devices").gpus = list  # type: ignore[attr-defined]
    hub = importlib.import_module("jobs.hub.push")
    hub.upload = lambda *_, **__: ("me/t", "https://hub/me/t")  # type: ignore[attr-defined]


def _import_all() -> None:
    from tui.cli import commands

    for section in commands.COMMANDS.values():
        for place in section.values():
            if place.startswith("tui.cli.job."):
                importlib.import_module(place.partition(":")[0])
    for name in ("jobs.backends.local.backend", "jobs.service.plan"):
        importlib.import_module(name)


def _export_here(folder: Path) -> None:
    """Make what is exported; the tool is part of the process that is broken."""
    from engine import checkpoint
    from engine.exports.__main__ import main as export
    from engine.train.optimizer import build_optimizer, build_scheduler
    from engine.train.train_state import TrainState
    from jobs.errors import UserError
    from jobs.machine.engine_tools import ToolError
    from jobs.spec.file.load import load_spec
    from tests.support.engine.exports import ALONE, trained_model
    from tests.support.engine.toy_jobs import toy_values
    from tests.support.engine.toys import write_small_toy

    toy = folder / "toy"
    toy.mkdir()
    write_small_toy(toy, pictures=1)
    values = toy_values(toy, dataset=str(folder / "data"), resolution=512)
    (folder / "toy.json").write_text(json.dumps(values))
    spec = load_spec(None, values)
    model = trained_model(spec, toy / "model")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = build_optimizer(spec, trained, ALONE.device)
    training = TrainState(model, optimizer, build_scheduler(spec, optimizer), None)
    training.step = 4
    checkpoint.write(checkpoint.collect(training, spec, 1), folder / "saved" / "step-4", ALONE)

    def ask(module: str, arguments: list[str], *_: object) -> Any:
        out, err = io.StringIO(), io.StringIO()
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                status = export(arguments)
        except Exception as error:  # in a process of its own, its last line
            raise ToolError(f"python -m {module} failed: {error}") from None
        last = (err.getvalue().splitlines() or [""])[-1]
        if status == 2:
            raise UserError(last.removeprefix("fsdp-tui: "))
        if status != 0:
            raise ToolError(f"python -m {module} failed: {last}")
        return json.loads(out.getvalue().splitlines()[-1])

    importlib.import_module("jobs.export").ask = ask  # type: ignore[attr-defined]


def _run(library: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """Run a command in a fork; its status is negative where a signal ended it."""
    out, err = Path(asked["out"]), Path(asked["err"])
    pid = os.fork()
    if pid == 0:
        _become(asked, out, err)
        library.fault_arm(asked["root"].encode(), asked["fault"], asked["at"])
        _command(asked["words"])
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return {
        "status": status,
        "count": library.fault_count(),
        "last": library.fault_last().decode(errors="replace"),
        "out": out.read_text(errors="replace"),
        "err": err.read_text(errors="replace"),
    }


def _become(asked: dict[str, Any], out: Path, err: Path) -> None:
    signal.alarm(_PATIENCE)
    for number, path, flags in (
        (0, Path(os.devnull), os.O_RDONLY),
        (1, out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        (2, err, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
    ):
        descriptor = os.open(path, flags, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.update(asked["environment"])
    sys.argv = ["fsdp-tui", *asked["words"]]


def _command(words: list[str]) -> None:
    """Run the command line as `python -m tui` does, and leave."""
    from tui.cli import commands

    status: Any = 1
    try:
        commands.main()
    except SystemExit as leaving:
        status = leaving.code
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(status if isinstance(status, int) else 1)


if __name__ == "__main__":
    main()
