"""Content-addressed files of tensors: written atomically, verified, shared by jobs and ranks.

The name of a file is a hash of everything that decides its content, so two jobs that need the
same latents find each other's, a killed run leaves only complete files, and a changed image or
caption simply has another name. A checksum in the header shows whether the content is what was
written.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
import uuid
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Literal

from jobs.errors import NotFiniteError, UserError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch

State = Literal["sound", "missing", "damaged"]

_SCHEMA: Final = 2
_SAMPLED_BLOCKS: Final = 64
_BLOCK: Final = 64 << 10
_CHECKSUM: Final = "crc32"
_SEEN_WITHIN: Final = 90.0  # seconds; NFS may serve a cached answer for up to 60
_LOOK_EVERY: Final = 0.5  # seconds
_ABANDONED: Final = 3600.0  # seconds after which an unfinished file counts as abandoned


class CacheError(RuntimeError):
    """A cached file went bad while the job ran. Starting again heals it, so `max_restarts` may."""


class TensorCache:
    """One kind of cached tensors (`latents` or `text`) below the cache directory."""

    def __init__(self, root: Path, kind: str) -> None:
        self.kind = kind
        self.root = root / kind
        self.root.mkdir(parents=True, exist_ok=True)

    def key(self, **facts: Any) -> str:
        """Return the name for content that these facts decide; they must be JSON values."""
        text = json.dumps({"schema": _SCHEMA, **facts}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:40]

    def path(self, key: str) -> Path:
        return self.root / key[:2] / f"{key}.safetensors"

    def check(self, key: str) -> State:
        """Read the entire file and compare its checksum; remove a file that is wrong.

        A file with non-finite values is removed too; earlier versions may have written it.
        """
        from safetensors.torch import load

        path = self.path(key)
        try:
            content = path.read_bytes()
            if _sound(content) and not nonfinite(load(content)):
                return "sound"
        except FileNotFoundError:
            return "missing"
        except OSError:  # may be a matter of the moment: it stays, and is written over
            return "damaged"
        with suppress(OSError):
            path.unlink()
        return "damaged"

    def write(self, key: str, tensors: dict[str, torch.Tensor]) -> None:
        """Write aside, then rename; whoever else writes the same key writes the same content.

        Raises:
            UserError: The disk is full, or may not be written.
            NotFiniteError: A tensor has values that are not finite; no file is written.
        """
        from safetensors.torch import save

        if bad := nonfinite(tensors):
            raise NotFiniteError(
                f"{', '.join(bad)} for the cache {self.root} have values that are not finite",
                "resume the job to compute them again",
            )

        path = self.path(key)
        content = save(tensors)
        content = save(tensors, metadata={_CHECKSUM: _checksum(content)})
        aside = path.with_name(f".{key}.{uuid.uuid4().hex[:12]}.tmp")
        try:
            path.parent.mkdir(exist_ok=True)
            aside.write_bytes(content)
            os.replace(aside, path)
        except OSError as error:
            raise UserError(
                f"cannot write to the cache {self.root} ({error.strerror or error})",
                "free space, or set cache_dir to another directory; cached files are kept",
            ) from error
        finally:
            with suppress(OSError):
                aside.unlink(missing_ok=True)

    def read(self, key: str) -> dict[str, torch.Tensor]:
        """Return the tensors of a file that was there when the job began.

        Raises:
            CacheError: It has gone or is damaged; a damaged one is removed, so that the next
                attempt computes it again.
        """
        from safetensors.torch import load

        path = self.path(key)
        try:
            content = _read_again(path)
        except OSError as error:
            raise CacheError(
                f"{path} cannot be read ({error.strerror}) although the job cached it; resume the "
                "job to recompute it"
            ) from None
        if not _sound(content):
            path.unlink(missing_ok=True)
            raise CacheError(
                f"{path} was damaged after the job checked it, and was deleted; check the disk, "
                "then resume the job to recompute it"
            )
        return load(content)

    def sweep(self) -> None:
        """Remove unfinished files of killed writers."""
        for path in self.root.glob("*/.*.tmp"):
            try:
                if time.time() - path.stat().st_mtime > _ABANDONED:
                    path.unlink()
            except OSError:  # another job is sweeping too
                continue


def _read_again(path: Path) -> bytes:
    """Read a file that exists, though another machine may have written it just now.

    A network file system may remember for a minute that there was none. Listing the directory asks
    the server; a file that is listed is waited for.

    Raises:
        OSError: It is not there, or cannot be read.
    """
    until = time.monotonic() + _SEEN_WITHIN
    while True:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            if path.name not in os.listdir(path.parent) or time.monotonic() > until:
                raise
            time.sleep(_LOOK_EVERY)


def nonfinite(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors that hold a NaN or an infinity; waits for their device.

    By their extremes, which either of them reaches: `isfinite` takes 50 times as long on a CPU.
    """
    return [
        name
        for name, tensor in tensors.items()
        if tensor.is_floating_point()
        and tensor.numel()
        and not all(math.isfinite(extreme) for extreme in tensor.detach().aminmax())
    ]


def fingerprint(directory: Path) -> str:
    """Identify a model component: all of its JSON files, its weights by size and samples.

    Reading 64 blocks of a 9 GB encoder takes milliseconds; reading all of it, seconds per rank.
    """
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        if not path.is_file():
            continue
        size = path.stat().st_size
        digest.update(f"{path.relative_to(directory)}:{size}".encode())
        with open(path, "rb") as file:
            if size <= _SAMPLED_BLOCKS * _BLOCK:
                digest.update(file.read())
                continue
            for block in range(_SAMPLED_BLOCKS):
                file.seek((size - _BLOCK) * block // (_SAMPLED_BLOCKS - 1))
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()[:24]


def _checksum(content: bytes) -> str:
    """Of a safetensors file's tensors: names, types, shapes and bytes; not of its metadata."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    names = json.dumps(header, sort_keys=True).encode()
    return f"{zlib.crc32(memoryview(content)[8 + length :], zlib.crc32(names)):08x}"


def _sound(content: bytes) -> bool:
    """Whether a file's checksum is that of its tensors."""
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > len(content) - 8:
        return False
    try:
        header = json.loads(content[8 : 8 + length])
        return bool(header["__metadata__"][_CHECKSUM] == _checksum(content))
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
