"""Find the config for block detection: a file, a directory, a hub id or a flavour."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from jobs.errors import SpecError
from jobs.models.find_model import BITS, DamagedError, elements_of, find_model, read_header
from jobs.paths import exists, expand
from jobs.run.rundir import read_json
from jobs.spec.families import FAMILIES, get_family
from jobs.spec.values.hub_names import INDEXES
from jobs.spec.values.value_types import read_family

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.spec.families import Family


# Components of a pipeline that can be trained, in search order.
_DENOISERS: Final = ("transformer", "unet", "prior")
# By dtype name in a config; published weights without one are bf16.
_BYTES: Final = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
_COUNTS_LAYERS: Final = re.compile(r"layers|blocks|depth")
_MOST_LAYERS: Final = 1000
_SHOWN: Final = 1e30
_LARGEST_SIZE: Final = 100_000_000  # limit for a vocabulary, a context length or a width
_PUBLISHED_BYTES: Final = 2


@dataclass(frozen=True)
class Target:
    """A model config to inspect.

    Attributes:
        model_family: The requested family.
        model_flavour: The requested flavour, or the family's first.
        name: The model's name for users: a path or a hub id.
        config: The parsed config.
        dtype_bytes: Bytes of one parameter as stored.
    """

    model_family: str | None
    model_flavour: str | None
    name: str
    config: dict[str, Any]
    dtype_bytes: int

    def key(self, schema: int) -> str:
        """Return the cache key of a detection.

        Other configs or library versions may have other blocks.
        """
        facts = [
            schema,
            self.model_family,
            self.model_flavour,
            self.name,
            self.config,
            *map(_version, ("diffusers", "transformers")),
        ]
        text = json.dumps(facts, sort_keys=True)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:40]


def find_target(
    model_family: str | None = None,
    model_flavour: str | None = None,
    pretrained_model: str | None = None,
) -> Target:
    """Find the config, without network access.

    Args:
        model_family: The expected family, or the one whose published model to use.
        model_flavour: A published model of the family; its first if None.
        pretrained_model: A config.json, a directory with one, a pipeline, or a hub id.

    Raises:
        SpecError: There is none, or it belongs to another family; the message says what to pass
            instead.
    """
    if model_flavour and not model_family:
        raise SpecError(f"model_flavour {model_flavour} needs a model_family")
    family = get_family(read_family(model_family), model_flavour) if model_family else None
    if pretrained_model:
        name, config, folder = _resolve(pretrained_model)
        flavour = model_flavour
    elif family is not None:
        flavour = model_flavour or next(iter(family.flavours), None)
        name, config, folder = _published(family, flavour)
    else:
        raise SpecError(
            "no model given", "pass a model_family, a directory, a config.json or a hub id"
        )
    config = _with_class(config, family, name)
    return Target(
        family.name if family else None, flavour, name, config, _stored_bytes(folder, config)
    )


def _resolve(text: str) -> tuple[str, dict[str, Any], Path | None]:
    """Return name, config and directory of the model that the user named."""
    path = expand(text)
    if exists(path) and not path.is_dir():
        if path.name in INDEXES:
            return _resolve(str(path.parent))
        return str(path.absolute()), _read(path), path.parent
    try:
        root = find_model(text)
        folder = _component(root)
        config = _read(folder / "config.json")
    except SpecError:  # incomplete in the hub's cache
        if exists(path) or (published := _of_hub_id(text)) is None:
            raise
        return text, published, None
    return str(root.absolute()) if exists(path) else text, config, folder


def _component(root: Path) -> Path:
    """Return the directory with the denoiser's config.

    In a pipeline, it is a subfolder; otherwise the directory itself.
    """
    if exists(root / "config.json"):
        return root
    own = [flavour.folder for family in FAMILIES.values() for flavour in family.flavours.values()]
    names = (*_DENOISERS, *filter(None, own))
    if folder := next((root / n for n in names if exists(root / n / "config.json")), None):
        return folder
    others = sorted(path.parent.name for path in root.glob("*/config.json"))
    raise SpecError(
        f"{root} has neither a config.json nor a {' or '.join(_DENOISERS[:2])} with one",
        f"it has {', '.join(others)}; use one of them" if others else "use a model directory",
    )


def _published(family: Family, flavour: str | None) -> tuple[str, dict[str, Any], Path | None]:
    """Return a flavour's config: from the hub's cache if it is there, else the shipped one."""
    published = family.flavours.get(flavour or "")
    if published is None:
        raise SpecError(
            f"{family.title} has no published model",
            "set pretrained_model_name_or_path to a directory or a config.json",
        )
    try:
        return _resolve(published.hub_id)
    except SpecError:
        raise SpecError(
            f"the config of {family.title} {flavour} ({published.hub_id}) is not available",
            "set pretrained_model_name_or_path to a directory or a config.json, or run "
            f"`fsdp-tui fetch {published.hub_id}` first",
        ) from None


def _of_hub_id(hub_id: str) -> dict[str, Any] | None:
    """Read a published config that is shipped with the package, so that nothing is downloaded."""
    name = hub_id.partition("@")[0].replace("/", "--")  # any revision
    file = files("jobs") / "models" / "published" / f"{name}.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def _read(path: Path) -> dict[str, Any]:
    config = read_json(path)
    if config is None:
        raise SpecError(
            f"{path} cannot be read as a JSON object", "use a model directory or its config.json"
        )
    return config


def _with_class(config: dict[str, Any], family: Family | None, name: str) -> dict[str, Any]:
    """Add the family's class to a config that does not name one.

    Raises:
        SpecError: The class is unknown, or belongs to another family.
    """
    _check_sizes(config, name)
    class_name = config.get("_class_name")
    if family is None:
        if class_name or config.get("model_type"):
            return config
        raise SpecError(
            f"{name} is not a model: its config has neither _class_name nor model_type",
            "use the config.json of a diffusers model or of a transformers text encoder",
        )
    if not class_name and not config.get(
        "model_type"
    ):  # the engine assumes the family's class, too
        return config | {"_class_name": family.transformer}
    if class_name in family.other_names:
        return config | {"_class_name": family.transformer}
    if class_name not in family.transformers:
        fits = [
            other.name
            for other in FAMILIES.values()
            if class_name in (*other.transformers, *other.other_names)
        ]
        raise SpecError(
            f"{name} is a {class_name or config['model_type']}, not the {family.transformer} of a "
            f"{family.title} model",
            f"set model_family: {fits[0]}" if fits else "remove model_family to detect it",
        )
    return config


def _check_sizes(config: dict[str, Any], name: str) -> None:
    """Reject implausible sizes, which would exhaust memory when the model is built.

    Raises:
        SpecError: It has more layers than any model, or larger ones.
    """
    for key, value in config.items():
        most = _MOST_LAYERS if _COUNTS_LAYERS.search(key) else _LARGEST_SIZE
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int | float) and number > most:
                size = f"{number:.3g}" if number < _SHOWN else f"over {_SHOWN:.0e}"
                raise SpecError(
                    f"{name}: {key} is {size}, and the limit is {most:,}",
                    "download the model's config.json again",
                )


def _stored_bytes(folder: Path | None, config: dict[str, Any]) -> int:
    """Return the bytes of most parameters, from the first weight file's header or the config."""
    if folder is not None:
        # Prefer the plain file over a copy in another precision next to it.
        weights = sorted(folder.glob("*.safetensors"), key=lambda path: (len(path.name), path.name))
        # Ignore damaged weights: training reports them, and blocks can be detected without them.
        with suppress(DamagedError, LookupError, TypeError):
            kinds: Counter[str] = Counter()
            for path in weights[:1]:
                for tensor in read_header(path)[0].values():
                    kinds[tensor["dtype"]] += elements_of(tensor)
            if kinds:
                return max(1, BITS.get(kinds.most_common(1)[0][0], 8 * _PUBLISHED_BYTES) // 8)
    named = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    return _BYTES.get(named, _PUBLISHED_BYTES)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "?"
