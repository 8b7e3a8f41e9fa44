"""Files that are complete or absent: written aside, read back, and then given their name."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from engine.exports.readback import VerifiedFile
from jobs import units
from jobs.errors import UserError
from jobs.run.rundir import sync

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from engine.exports.source import Fact

_SPARE_BYTES: Final = 16 * 2**20  # of headers, JSON and the file system's own


def check_room(output: Path, needed: int) -> None:
    """Refuse an output that exists, or that the disk has no room for.

    Args:
        output: The file or directory.
        needed: Bytes.

    Raises:
        UserError: So it is.
    """
    if os.path.lexists(output):
        raise UserError(f"{output} exists", "choose another --output, or remove it")
    if not output.parent.is_dir():
        raise UserError(f"{output.parent} is not a directory")
    with in_sentences(output), tempfile.TemporaryFile(dir=output.parent):
        free = shutil.disk_usage(output.parent).free
    if needed + _SPARE_BYTES > free:
        raise UserError(
            f"{output} takes {units.size(needed)}, and {units.size(free)} are free",
            "free some space, or choose an --output elsewhere",
        )


@contextmanager
def aside_file(
    output: Path, facts: Mapping[str, Fact], header: Mapping[str, str]
) -> Iterator[VerifiedFile]:
    """Open a file under another name; at the end it is checked and renamed, or removed.

    Raises:
        UserError: It cannot be written.
    """
    aside = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    with in_sentences(output):
        file = VerifiedFile(aside, facts, header)
        try:
            yield file
            file.close()
            file.check()
            os.rename(aside, output)
            sync(output.parent)
        finally:
            file.abandon()
            aside.unlink(missing_ok=True)


@contextmanager
def in_sentences(output: Path) -> Iterator[None]:
    """Make a sentence of what the system says of files."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise UserError(
            f"cannot write {output} ({error.strerror or error})",
            "free some space, or choose an --output elsewhere" if full else None,
        ) from error
