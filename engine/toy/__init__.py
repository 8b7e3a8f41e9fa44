"""Small real models and captioned images, written to disk: for demos, tests and first tries."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from engine.toy.images import write_pictures
from jobs.errors import UserError
from jobs.spec.families import get_family

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

DTYPES = ("float32", "bfloat16", "float16")

MARK = ".toy.json"
"""In a directory that this module wrote, and wrote to the end: with what settings."""


@dataclass(frozen=True)
class ToyPaths:
    """Where a toy was written.

    Attributes:
        model: In the layout of `save_pretrained`.
        data: Images, each with its caption beside it.
        control: Their conditioning images, by the same names, of models that take some.
    """

    model: Path
    data: Path
    control: Path | None = None


def write_toy(
    directory: Path,
    family: str = "flux",
    *,
    flavour: str | None = None,
    pictures: int = 240,
    size: int = 96,
    seed: int = 0,
    dtype: str = "float32",
    hidden_scale: int = 1,
    force: bool = False,
) -> ToyPaths:
    """Write `directory`/model and `directory`/data, each complete or not at all.

    For models that take conditioning images, `directory`/control as well. What already exists,
    written by an earlier call, stays as it is.

    Args:
        directory: Created if it is missing.
        family: One of `jobs.spec.families.FAMILIES`.
        flavour: The published model whose layout it has; default: the family's usual one.
        pictures: How many.
        size: Pixels of an image's short side.
        seed: Of weights and images; same seed, same bytes.
        dtype: Of the weights, one of `DTYPES`.
        hidden_scale: Makes the model this many times as wide (16: 2 GB in float32).
        force: Overwrite all.

    Raises:
        UserError: An argument is out of range, the directory cannot be written, or something
            in it is in the way.
    """
    flavour = check_family(family, flavour)
    _check(pictures=pictures, size=size, dtype=dtype, hidden_scale=hidden_scale)

    def write_model(model_dir: Path) -> None:
        # torch and diffusers take seconds to import: not before there is something to write.
        writer = import_module(f"engine.toy.families.{family}")
        writer.write(model_dir, flavour=flavour, seed=seed, dtype=dtype, hidden_scale=hidden_scale)

    def write_data(data_dir: Path) -> None:
        write_pictures(data_dir, count=pictures, size=size, seed=seed)

    def write_control(data_dir: Path) -> None:
        write_pictures(data_dir, count=pictures, size=size, seed=seed, before=True)

    takes = get_family(family, flavour).references_of(flavour)
    control = directory / "control" if takes is not None else None
    paths = ToyPaths(model=directory / "model", data=directory / "data", control=control)
    data_settings = {"pictures": pictures, "size": size, "seed": seed}
    model_settings: dict[str, int | str] = {
        "family": family,
        "flavour": flavour,
        "seed": seed,
        "dtype": dtype,
        "hidden_scale": hidden_scale,
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path in filter(None, (paths.data, paths.control, paths.model)):
            check_place(path)
        install(paths.data, write_data, data_settings, force=force)
        if paths.control is not None:
            install(paths.control, write_control, data_settings, force=force)
        install(paths.model, write_model, model_settings, force=force)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UserError(
            f"cannot write the toy model to {directory} ({reason})", "choose another directory"
        ) from error
    return paths


def is_complete(path: Path) -> bool:
    """Whether `path` is a directory that `write_toy` wrote to the end."""
    return (path / MARK).is_file()


def check_family(family: str, flavour: str | None) -> str:
    """Return the flavour, or the family's usual one.

    Raises:
        SpecError: There is no such family or flavour.
    """
    facts = get_family(family, flavour)
    return flavour or next(iter(facts.flavours))


def _check(*, pictures: int, size: int, dtype: str, hidden_scale: int) -> None:
    """Refuse arguments that make no toy.

    Raises:
        UserError: Says which and what would be right.
    """
    if dtype not in DTYPES:
        raise UserError(f"no dtype {dtype!r} for a toy", f"known: {', '.join(DTYPES)}")
    for name, value, low, high in (
        ("pictures", pictures, 1, 1_000_000),
        ("size", size, 16, 4096),
        ("hidden_scale", hidden_scale, 1, 64),
    ):
        if not low <= value <= high:
            raise UserError(f"{name} is {value}", f"use a number from {low} to {high}")


def check_place(path: Path) -> None:
    """Refuse to write over what is not ours.

    Raises:
        UserError: There is something at `path`, and it is not a toy or an empty directory.
    """
    if not os.path.lexists(path) or is_complete(path):
        return
    if path.is_symlink() or not path.is_dir() or any(path.iterdir()):
        raise UserError(
            f"{path} already exists and is not a toy model", "move it or choose another directory"
        )


def install(
    path: Path, write: Callable[[Path], None], settings: Mapping[str, int | str], *, force: bool
) -> None:
    """Have `write` fill a directory beside `path`, then give it the name `path`.

    Args:
        path: Free, an empty directory, or a toy's.
        write: Called with a new empty directory.
        settings: Kept in the mark.
        force: Replace a toy that is there.
    """
    if is_complete(path) and not force:
        return
    aside = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)  # Of an interrupted process that had our number.
    aside.mkdir()
    try:
        write(aside)
        (aside / MARK).write_text(json.dumps(settings) + "\n", encoding="utf-8")
        _take_place(aside, path, force=force)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _take_place(aside: Path, path: Path, *, force: bool) -> None:
    """Rename `aside` to `path`, out of the way of an old toy and beside other writers."""
    if force and is_complete(path):
        old = path.with_name(f"{path.name}.old-{os.getpid()}")
        path.rename(old)
        aside.rename(path)
        shutil.rmtree(old, ignore_errors=True)
        return
    try:
        aside.rename(path)
    except OSError:
        if not is_complete(path):  # Complete: another process was faster, and its toy is as good.
            raise
