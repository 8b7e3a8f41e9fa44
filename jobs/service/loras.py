"""Inspect, merge, resize and extract LoRA files, for the command line."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.errors import UserError
from jobs.machine.engine_tools import Progress, ask
from jobs.models.find_model import find_model
from jobs.paths import exists

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_TOOL = "engine.loras"


def info(file: str) -> dict[str, Any]:
    """Return facts about a LoRA file: family, names, ranks, alphas, precision, norms and header.

    Raises:
        UserError: The file is missing or damaged.
    """
    return _ask(["info", f"{_path(file)}"])


def merge(
    files: Sequence[str],
    output: Path,
    *,
    into: str | None = None,
    component: str | None = None,
    rank: int | None = None,
    dtype: str | None = None,
    progress: Progress = lambda done, total: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Merge LoRAs into one, or into a model.

    Args:
        files: Each a path, or `PATH=WEIGHT`.
        output: The path to write; must not exist.
        into: The model; None to merge into one LoRA.
        component: Their denoiser, if the model has two.
        rank: The maximum rank of the LoRA; None for the sum of all ranks.
        dtype: `fp32`, `bf16` or `fp16`; None for the first file's.
        progress: Called with the completed and the total units.
        cancelled: Polled several times a second; True cancels and removes what was written.

    Raises:
        UserError: The files do not match, or the output cannot be written.
    """
    weighted = [_weighted(file) for file in files]
    if into is not None and (rank is not None or dtype is not None):
        raise UserError(
            "--rank and --dtype are for a merged LoRA: a model keeps its own precision",
            "remove them, or --into",
        )
    if into is None and component is not None:
        raise UserError("--component is for a model with two denoisers", "give it --into")
    words = ["merge", *(path for path, _ in weighted)]
    words += [f"--weight={weight!r}" for _, weight in weighted]
    words += [] if into is None else [f"--into={_model(into)}"]
    options = {"component": component, "rank": rank, "dtype": dtype}
    made = _ask(words, output, progress, cancelled, **options)
    idle = [path for path, weight in weighted if not weight]
    return made | {"warnings": [f"{path} has weight 0 and adds nothing" for path in idle]}


def resize(
    file: str,
    output: Path,
    *,
    rank: int | None = None,
    energy: float | None = None,
    dtype: str | None = None,
    progress: Progress = lambda done, total: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Write the closest LoRA of a lower rank.

    Args:
        file: The LoRA.
        output: The path to write; must not exist.
        rank: The maximum rank of a layer.
        energy: Instead of `rank`, the share of each layer's squared singular values to keep.
        dtype: `fp32`, `bf16` or `fp16`; None for the file's.
        progress: Called with the completed and the total units.
        cancelled: Polled several times a second; True cancels and removes what was written.

    Raises:
        UserError: The file is not a plain LoRA, or the output cannot be written.
    """
    _check_one(rank, energy)
    words = ["resize", _path(file)]
    return _ask(words, output, progress, cancelled, rank=rank, energy=energy, dtype=dtype)


def extract(
    tuned: str,
    base: str,
    output: Path,
    *,
    rank: int | None = None,
    energy: float | None = None,
    component: str | None = None,
    dtype: str | None = None,
    progress: Progress = lambda done, total: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Write the LoRA that best approximates the difference of two models.

    Args:
        tuned: The model after training.
        base: The model before training.
        output: The path to write; must not exist.
        rank: The maximum rank of a layer.
        energy: Instead of `rank`, the share of each layer's squared singular values to keep.
        component: The denoiser, for models with two.
        dtype: `fp32`, `bf16` or `fp16`; bf16 by default.
        progress: Called with the completed and the total units.
        cancelled: Polled several times a second; True cancels and removes what was written.

    Raises:
        UserError: The models do not match, or the output cannot be written.
    """
    _check_one(rank, energy)
    words = ["extract", _model(tuned), _model(base)]
    options = {"rank": rank, "energy": energy, "component": component, "dtype": dtype}
    return _ask(words, output, progress, cancelled, **options)


def _ask(
    words: list[str],
    output: Path | None = None,
    progress: Progress = lambda done, total: None,
    cancelled: Callable[[], bool] = lambda: False,
    **options: object,
) -> dict[str, Any]:
    """Run the engine's LoRA tool.

    Args:
        words: The command and its operands.
        output: The path to write.
        progress: Called with the completed and the total units.
        cancelled: Polled several times a second.
        options: Its options; None values are skipped.
    """
    if output is not None:
        options["output"] = _path(str(output))
    words += [f"--{name}={value}" for name, value in options.items() if value is not None]

    def report(line: str) -> None:
        match line.split():
            case ["lora", done, total] if done.isdigit() and total.isdigit():
                progress(int(done), int(total))

    with tempfile.TemporaryDirectory(prefix="fsdp-tui-") as folder:
        return ask(_TOOL, words, Path(folder, "answer"), report, cancelled)


def _check_one(rank: int | None, energy: float | None) -> None:
    if (rank is None) == (energy is None):
        raise UserError("give either --rank or --energy")
    if energy is not None and not 0 < energy <= 1:
        raise UserError("--energy is a share of all, above 0 and at most 1")


def _weighted(text: str) -> tuple[str, float]:
    """Split `PATH` or `PATH=WEIGHT` into file and weight; a path may contain `=`.

    Raises:
        UserError: The weight is not a finite number.
    """
    path, equals, last = text.rpartition("=")
    if not equals or exists(Path(_path(text))):
        return _path(text), 1.0
    try:
        weight = float(last)
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise UserError(
            f"{text}: {last or 'nothing'} is no weight", "for example style.safetensors=0.8"
        )
    return _path(path), weight


def _model(text: str) -> str:
    """Return the directory of a model, given as a path or as the name of a downloaded one."""
    path = _path(text)
    return path if exists(Path(path)) else str(find_model(text))


def _path(text: str) -> str:
    """Return an absolute path, so that none can be mistaken for an option."""
    try:
        return str(Path(text).expanduser().absolute())
    except RuntimeError:
        raise UserError(f"{text}: no such home directory") from None
