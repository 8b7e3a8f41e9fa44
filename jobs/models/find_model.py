"""Find a model on this machine, and its size."""

from __future__ import annotations

import json
import math
import stat
import struct
from typing import TYPE_CHECKING, Any, Final

from jobs.errors import SpecError
from jobs.paths import exists, expand
from jobs.run.rundir import read_json
from jobs.spec.families import FAMILIES, get_family
from jobs.spec.values.hub_names import INDEXES, HubName
from jobs.untrusted.files import LARGEST_JSON, read_regular

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from jobs.spec.families import Family
    from jobs.spec.keys.job import JobKeys


# -- damaged weights ------------------------------------------------------------------------
# Check a safetensors file using only its header and its size.


LONGEST_HEADER: Final = 100_000_000  # bytes; the format's own limit
BITS: Final = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}


class DamagedError(Exception):
    """A file is not a complete safetensors file; says why, in a few words."""


def find_damage(path: Path) -> str | None:
    """Return what is wrong with a file, in a few words; None if it is intact."""
    try:
        return _find_problem(*read_header(path))
    except DamagedError as error:
        return str(error)


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the tensors' header entries by name, and the bytes available for their data.

    Raises:
        DamagedError: The header cannot be read.
    """
    header, room = _read(path)
    header.pop("__metadata__", None)
    return header, room


def read_metadata(path: Path) -> dict[str, Any]:
    """Return the metadata of a file's header.

    Raises:
        DamagedError: The header cannot be read.
    """
    metadata = _read(path)[0].get("__metadata__")
    return metadata if isinstance(metadata, dict) else {}


def _read(path: Path) -> tuple[dict[str, Any], int]:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise DamagedError("it is not a regular file")
        with open(path, "rb") as file:
            start = file.read(8)
            room = status.st_size - 8
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= length <= min(room, LONGEST_HEADER):
                raise DamagedError("it is truncated, or not a safetensors file")
            header = json.loads(file.read(length))
    except OSError as error:
        raise DamagedError(f"it cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise DamagedError("its header is damaged") from None
    if not isinstance(header, dict):
        raise DamagedError("its header is damaged")
    return header, room - length


def elements_of(entry: Any) -> int:
    """Return the number of elements of the tensor in a header entry.

    Raises:
        DamagedError: The entry has no valid shape.
    """
    return math.prod(shape_of(entry))


def shape_of(entry: Any) -> tuple[int, ...]:
    """Return the shape of the tensor in a header entry.

    Raises:
        DamagedError: The entry has no valid shape. (Multiplying anything else could take any amount
            of memory: `"a"` times 10^9.)
    """
    shape = entry.get("shape") if isinstance(entry, dict) else None
    if not isinstance(shape, list) or not all(isinstance(n, int) and n >= 0 for n in shape):
        raise DamagedError("its header is damaged")
    return tuple(shape)


def _find_problem(header: dict[str, Any], room: int) -> str | None:
    """Return what is wrong with the tensors of a file that has `room` bytes for them, or None."""
    spans = []
    for name, tensor in header.items():
        try:
            begin, end = tensor["data_offsets"]
            elements, bits = elements_of(tensor), BITS.get(tensor["dtype"])
            sound = all(isinstance(offset, int) and offset >= 0 for offset in (begin, end))
        except (DamagedError, TypeError, KeyError, ValueError):
            sound = False
        if not sound or begin > end:
            return f"its header is damaged at {name[:80]!r}"
        if bits is not None and elements * bits > (end - begin) * 8:
            return f"{name[:80]!r} has fewer bytes than its shape needs"
        spans.append((begin, end, name))
    at = 0
    for begin, end, name in sorted(spans):
        if begin < at:
            return f"{name[:80]!r} overlaps another tensor"
        at = end
    return f"it is truncated: {room} of {at} bytes" if at > room else None


# -- find model -----------------------------------------------------------------------------


GGUF_HINT: Final = (
    "GGUF files are not read; use the model's bf16 weights, which base_precision: int8 or nf4 packs"
)


def find_model(name_or_path: str) -> Path:
    """Return a local model directory, or the snapshot of a hub id in the local cache.

    A hub id may have a revision: `ORG/NAME@REVISION`.

    Raises:
        SpecError: Neither exists.
    """
    path = expand(name_or_path)
    if exists(path) and path.is_dir():
        return path
    if exists(path):
        raise SpecError(
            f"{path} is a file, not a model directory",
            GGUF_HINT if path.suffix == ".gguf" else None,
        )
    if (name := HubName.read("model", name_or_path)) is not None:
        if (snapshot := name.find()) is not None:
            return snapshot
        raise SpecError(
            f"no such model: {name_or_path} is neither a directory nor in the hub cache",
            f"check the path, or run `fsdp-tui fetch {name_or_path}` first",
        )
    raise SpecError(f"no such model directory: {name_or_path}")


def index_of(root: Path) -> Path | None:
    """Return the file that lists a pipeline's components; None for other directories."""
    return next((root / name for name in INDEXES if exists(root / name)), None)


def find_index(root: Path) -> dict[str, Any] | None:
    """Return a pipeline's index as `plain_index` does; None if there is none, or it is damaged."""
    path = index_of(root)
    index = read_json(path) if path is not None else None
    return None if index is None else plain_index(index)


def plain_index(index: Mapping[str, Any]) -> dict[str, Any]:
    """Return an index of either kind in the form of a stock pipeline's.

    Each component is `[library, class]`. Modular blocks also list where to load it from, which is
    dropped, since its files are in the model's own directory; they may name the class only there.
    Only components are lists: a setting that is one, as Krea 2's numbers of layers, is a tuple.
    Components that no job of the family reads are skipped.
    """
    pipeline = index.get("_class_name")
    unused = {
        n for family in FAMILIES.values() if pipeline in family.pipelines for n in family.unused
    }

    def plain(entry: Any) -> Any:
        if not isinstance(entry, list):
            return entry
        if len(entry) == 3 and isinstance(entry[2], dict):
            return entry[2].get("type_hint") or entry[:2]
        named = all(part is None or isinstance(part, str) for part in entry)
        return entry if named else tuple(entry)

    return {name: plain(entry) for name, entry in index.items() if name not in unused}


def denoiser_of(root: Path, family: Family, flavour: str | None) -> Path:
    """Return a model's directory of the denoiser that a flavour trains.

    Args:
        root: The model; exports have it in the usual place, where a published one may not.
        family: Its family.
        flavour: Its flavour.
    """
    entry = family.flavours.get(flavour or "")
    own = root / entry.folder if entry and entry.folder else None
    return own if own and exists(own / "config.json") else root / family.component_of(flavour)


def find_denoiser(spec: JobKeys) -> Path:
    """Return the directory of the denoiser that a job trains.

    Raises:
        SpecError: There is no such model, or no such family.
    """
    root = find_model(spec.pretrained_model_name_or_path)
    return denoiser_of(root, get_family(spec.model_family), spec.model_flavour)


def count_parameters(component: Path) -> int | None:
    """Count the elements of all tensors in a component's safetensors files; None if unknown."""
    shapes = read_shapes(component) or {}
    return sum(map(math.prod, shapes.values())) or None


def read_shapes(component: Path) -> dict[str, tuple[int, ...]] | None:
    """Return name → shape of all tensors in a component's safetensors files; None if unknown.

    Reads only the files' headers: 8 bytes with the length of a JSON object, and that object.
    """
    indices = sorted(component.glob("*.safetensors.index.json"))
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        if indices:
            listed = set(json.loads(read_regular(indices[0], LARGEST_JSON))["weight_map"].values())
            files = [component / name for name in sorted(listed)]
        else:
            files = sorted(component.glob("*.safetensors"))[:1]
        for path in files:
            shapes |= {name: shape_of(entry) for name, entry in read_header(path)[0].items()}
    except (
        DamagedError,
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ):
        return None
    return shapes or None


# -- find lora ------------------------------------------------------------------------------
# Find the file of a LoRA that a job names.


# The file names that diffusers and peft use.
_USUAL: Final = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors")


def find_lora(place: str) -> Path | None:
    """Return the LoRA file at a path; None if there is none.

    In a directory, that is the file which diffusers or peft would read, or else the only one.
    """
    path = expand(place)
    if not path.is_dir():
        return path if path.is_file() else None
    files = {file.name: file for file in path.glob("*.safetensors") if file.is_file()}
    usual = next((files[name] for name in _USUAL if name in files), None)
    return usual or (next(iter(files.values())) if len(files) == 1 else None)
