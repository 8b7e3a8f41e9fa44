"""Write small real models and captioned images to disk: for demos, tests and first tries."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from engine.toy.images import makes_videos, write_layers, write_pictures, write_videos
from jobs.errors import UserError
from jobs.spec.families import get_family

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

DTYPES = ("float32", "bfloat16", "float16")

MARK = ".toy.json"
"""Name of the file that marks a directory as completely written, and holds its settings."""


@dataclass(frozen=True)
class ToyPaths:
    """Paths of a written toy.

    Attributes:
        model: In the layout of `save_pretrained`.
        data: Images, each with a caption file.
        control: Their conditioning images, with the same names, for models that take them; of
            models that make layers, a folder `1` and so on for each of them.
        videos: Videos, each with a caption file, for models that make them.
    """

    model: Path
    data: Path
    control: Path | None = None
    videos: Path | None = None


def write_toy(
    directory: Path,
    family: str = "flux",
    *,
    flavour: str | None = None,
    pictures: int = 240,
    videos: int = 0,
    size: int = 96,
    seed: int = 0,
    dtype: str = "float32",
    hidden_scale: int = 1,
    force: bool = False,
) -> ToyPaths:
    """Write `directory`/model and `directory`/data, each completely or not at all.

    For models that take conditioning images, write `directory`/control as well, and for models that
    make videos, `directory`/videos. Directories written by an earlier call are kept.

    Args:
        directory: Created if it is missing.
        family: One of `jobs.spec.families.FAMILIES`.
        flavour: The published model whose layout to use; default: the family's main one.
        pictures: Number of images.
        videos: Number of videos, if the family makes them and PyAV is installed.
        size: Pixels of an image's short side.
        seed: Seed of weights and images; the same seed gives the same bytes.
        dtype: Dtype of the weights, one of `DTYPES`.
        hidden_scale: Factor on the model's width (16: 2 GB in float32).
        force: Overwrite everything.

    Raises:
        UserError: An argument is out of range, the directory cannot be written, or it contains
            other files.
    """
    flavour = check_family(family, flavour)
    _check(pictures=pictures, videos=videos, size=size, dtype=dtype, hidden_scale=hidden_scale)

    def write_model(model_dir: Path) -> None:
        # torch and diffusers take seconds to import, so import them only if there is something to
        # write.
        writer = import_module(f"engine.toy.families.{family}")
        writer.write(model_dir, flavour=flavour, seed=seed, dtype=dtype, hidden_scale=hidden_scale)

    def write_data(data_dir: Path) -> None:
        write_pictures(data_dir, count=pictures, size=size, seed=seed)

    facts = get_family(family, flavour)
    takes, moving = facts.references_of(flavour), facts.frame_step > 0 and makes_videos()
    fps = facts.defaults_of(flavour).get("fps", 25.0)

    def write_moving(data_dir: Path, *, before: bool = False) -> None:
        options = {"fps": fps, "sound": facts.sound, "before": before}
        write_videos(data_dir, count=videos, size=size, seed=seed, **options)

    def write_control(data_dir: Path) -> None:
        if takes is not None and takes.layers:
            write_layers(data_dir, count=pictures, size=size, seed=seed)
        else:
            write_pictures(data_dir, count=pictures, size=size, seed=seed, before=True)
            if takes is not None and takes.videos and moving:
                write_moving(data_dir, before=True)

    control = directory / "control" if takes is not None else None
    paths = ToyPaths(
        model=directory / "model",
        data=directory / "data",
        control=control,
        videos=directory / "videos" if moving and videos else None,
    )
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
        for path in filter(None, (paths.data, paths.control, paths.videos, paths.model)):
            check_place(path)
        install(paths.data, write_data, data_settings, force=force)
        if paths.control is not None:
            install(paths.control, write_control, data_settings, force=force)
        if paths.videos is not None:
            install(paths.videos, write_moving, data_settings, force=force)
        install(paths.model, write_model, model_settings, force=force)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UserError(
            f"cannot write the toy model to {directory} ({reason})", "choose another directory"
        ) from error
    return paths


def is_complete(path: Path) -> bool:
    """Return whether `path` is a directory that `write_toy` wrote completely."""
    return (path / MARK).is_file()


def check_family(family: str, flavour: str | None) -> str:
    """Return the flavour, or the family's main one.

    Raises:
        SpecError: There is no such family or flavour.
    """
    facts = get_family(family, flavour)
    return flavour or next(iter(facts.flavours))


def _check(*, pictures: int, videos: int, size: int, dtype: str, hidden_scale: int) -> None:
    """Reject arguments out of range.

    Raises:
        UserError: Names the argument and its range.
    """
    if dtype not in DTYPES:
        raise UserError(f"no dtype {dtype!r} for a toy", f"known: {', '.join(DTYPES)}")
    for name, value, low, high in (
        ("pictures", pictures, 1, 1_000_000),
        ("videos", videos, 0, 1000),
        ("size", size, 16, 4096),
        ("hidden_scale", hidden_scale, 1, 64),
    ):
        if not low <= value <= high:
            raise UserError(f"{name} is {value}", f"use a number from {low} to {high}")


def check_place(path: Path) -> None:
    """Refuse to overwrite other files.

    Raises:
        UserError: `path` exists, and is neither a toy nor an empty directory.
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
    """Call `write` with a temporary directory next to `path`, then rename it to `path`.

    Args:
        path: Unused, an empty directory, or a toy's.
        write: Called with a new empty directory.
        settings: Stored in the mark.
        force: Replace an existing toy.
    """
    if is_complete(path) and not force:
        return
    aside = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)  # Left by an interrupted process with the same pid.
    aside.mkdir()
    try:
        write(aside)
        (aside / MARK).write_text(json.dumps(settings) + "\n", encoding="utf-8")
        _take_place(aside, path, force=force)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _take_place(aside: Path, path: Path, *, force: bool) -> None:
    """Rename `aside` to `path`, replacing an old toy and tolerating concurrent writers."""
    if force and is_complete(path):
        old = path.with_name(f"{path.name}.old-{os.getpid()}")
        path.rename(old)
        aside.rename(path)
        shutil.rmtree(old, ignore_errors=True)
        return
    try:
        aside.rename(path)
    except OSError:
        if not is_complete(path):  # Another process may have written an equal toy first.
            raise
