"""Parse the entries of `datasets`, and detect folder layouts."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from jobs.paths import exists, expand
from jobs.spec.values import dataset_files
from jobs.spec.values.hub_names import HubName, is_url
from jobs.spec.values.resolutions import OptionalResolutions
from jobs.spec.values.spellings import as_list, as_mapping, as_none, normal_key
from jobs.spec.values.value_types import Bool, Share

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from jobs.spec.job_spec import InputKeys, JobSpec
    from jobs.spec.keys.data import DataKeys


Layout = Literal["folder", "arrow", "parquet", "webdataset"]

# The placeholder for the trigger word in captions and prompts.
TRIGGER: Final = "[trigger]"
_KOHYA: Final = re.compile(r"(?P<repeats>[1-9]\d{0,3})_(?P<name>\S.*)")
_REPEATS: Final = re.compile(r"^(?P<path>.+?)\s+[x×](?P<repeats>\d+)$")

# Keys for the location of conditioning images, of which a dataset has one, and other tools' names
# for them.
CONDITIONING: Final = ("conditioning_path", "conditioning_suffix", "conditioning_column")

Role = Literal["control", "fill_mask", "reference"]
"""What a conditioning image is to a model that makes videos from control videos.

A `fill_mask` is white where the model fills in the video; `mask_path` is of loss masks instead.
"""
_OTHER_NAMES: Final = {
    "control_path": "conditioning_path",
    "control_directory": "conditioning_path",
    "control_suffix": "conditioning_suffix",
    "control_column": "conditioning_column",
    "cond_image_column": "conditioning_column",
    "conditioning_image_column": "conditioning_column",
    "layer_path": "conditioning_path",
    "layer_suffix": "conditioning_suffix",
    "layer_column": "conditioning_column",
    "do_i2v": "first_frame",
    "is_i2v": "first_frame",
}


def _read_texts(value: Any) -> Any:
    """Read a list of strings; a single string becomes a list of one."""
    value = as_none(value)
    return [value] if isinstance(value, str) else value


Texts = Annotated[
    list[Annotated[str, Field(min_length=1)]] | None,
    Field(min_length=1),
    BeforeValidator(_read_texts),
]
Roles = Annotated[list[Role] | None, Field(min_length=1), BeforeValidator(_read_texts)]


def roles_of(named: Sequence[Role] | None, count: int) -> tuple[Role, ...]:
    """Return the role of each of some conditioning images: the first is the control by default."""
    if named:
        return tuple(named)
    return tuple("reference" if number else "control" for number in range(count))


class Dataset(BaseModel):
    """One source of samples.

    Attributes:
        path: A folder of images or videos, a directory of the `datasets` library, a hub name, or
            an address in an object store.
        repeats: How often each sample occurs in an epoch.
        weight: Its share of all drawn samples, relative to the other datasets' weights. The epoch
            then lasts until every dataset has been used completely.
        resolution: One or several, overriding the job's.
        trigger_word: Overrides the job's.
        caption: For its samples that have none.
        caption_column: Column with captions, in metadata files and tables.
        image_column: Column with images, in tables.
        split: The split of a table; by default `train`, or the only one.
        regularization: Whether it shows what the model should not forget. Its samples are drawn as
            often as all others together, and `prior_loss_weight` weights their loss.
        loss_weight: Weight of the loss of its samples.
        loss_weight_column: Column with a weight per sample, in metadata files and tables.
        mask_path: A folder with the masks of its images, matched by name.
        conditioning_path: Folders with a conditioning image for each sample, matched by name.
        conditioning_suffix: Suffix that turns a sample's name into that of its conditioning image
            in the same folder, for example `_control`.
        conditioning_column: Columns with conditioning images in tables, or with their paths in
            metadata files.
        conditioning_roles: What each of these is, for models that take videos; see `roles_of`.
        first_frame: Whether the model is given the first frame of each video; a number is the
            share of the micro-batches in which it is.
        last_frame: The same of the last frame, and of the micro-batches with the first.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    path: str = Field(min_length=1)
    repeats: int = Field(1, ge=1, le=10_000)
    weight: float | None = Field(None, gt=0, le=1e6)
    resolution: OptionalResolutions = None
    trigger_word: Annotated[str | None, BeforeValidator(as_none)] = None
    caption: Annotated[str | None, BeforeValidator(as_none)] = None
    caption_column: str | None = None
    image_column: str | None = None
    split: str | None = None
    regularization: Bool = False
    loss_weight: float = Field(1.0, gt=0, le=1000)
    loss_weight_column: str | None = None
    mask_path: str | None = None
    conditioning_path: Texts = None
    conditioning_suffix: Texts = None
    conditioning_column: Texts = None
    conditioning_roles: Roles = None
    first_frame: Share = False
    last_frame: Share = False

    _spellings: dict[str, str] = PrivateAttr(default_factory=dict)  # key → other tools' name for it

    @model_validator(mode="wrap")
    @classmethod
    def _read_names(cls, value: Any, read: ModelWrapValidatorHandler[Self]) -> Self:
        """Read other tools' names of keys, and keep them for the job file."""
        if not isinstance(value, dict):
            return read(value)
        entry = read({_OTHER_NAMES.get(key, key): own for key, own in value.items()})
        entry._spellings.update({_OTHER_NAMES[key]: key for key in value if key in _OTHER_NAMES})
        return entry

    def __eq__(self, other: object) -> bool:
        """Compare what the keys mean, however they are spelled."""
        return isinstance(other, Dataset) and self.__dict__ == other.__dict__

    @property
    def named_layers(self) -> bool:
        """Return whether what lies beside its samples was named as their layers."""
        return any(name.startswith("layer_") for name in self._spellings.values())

    def name_of(self, key: str) -> str:
        """Return the name by which a key was read."""
        return self._spellings.get(key, key)

    @property
    def references(self) -> int:
        """Return the number of conditioning images of each sample."""
        return max(len(folders or ()) for folders in (getattr(self, name) for name in CONDITIONING))

    @property
    def roles(self) -> tuple[Role, ...]:
        """Return what each of them is."""
        return roles_of(self.conditioning_roles, self.references)

    @property
    def sources(self) -> list[str]:
        """Return where its files come from: its path, and addresses of masks and conditions."""
        more = (self.mask_path or "", *(self.conditioning_path or ()))
        return [self.path, *(text for text in more if is_url(text))]

    @model_serializer(mode="wrap")
    def _without_defaults(self, as_is: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write what differs from the defaults, by the names that it was read by."""
        usual = {name: field.default for name, field in type(self).model_fields.items()}
        return {
            self._spellings.get(name, name): value
            for name, value in as_is(self).items()
            if value != usual[name]
        }


def read_datasets(value: Any) -> Any:
    """Read a list of mappings or paths, or comma-separated paths.

    `PATH x3` sets three repeats.
    """
    value = as_none(value)
    if isinstance(value, dict):
        value = [value]
    value = as_list(value)
    if not isinstance(value, (list, tuple)):
        return value
    return [_entry(entry) for entry in value]


def datasets_of(spec: InputKeys) -> list[Dataset]:
    """Return the job's datasets, in order; `dataset` becomes a list of one.

    A downloaded dataset of the hub or of a store gets the path of its folder in the cache.
    """
    entries = list(spec.datasets) if spec.datasets else [Dataset(path=spec.dataset)]
    return [_with_place(entry) for entry in entries]


def sources_of(spec: InputKeys) -> list[str]:
    """Return what a job's datasets name: paths, hub names, addresses; as in the job file."""
    entries = spec.datasets or [Dataset(path=spec.dataset or ".")]
    return [text for entry in entries for text in entry.sources]


def _with_place(dataset: Dataset) -> Dataset:
    places = {text: str(path) for text in dataset.sources if (path := _fetched(text)) is not None}
    if not places:
        return dataset
    own: dict[str, str | list[str] | None] = {
        "path": places.get(dataset.path, dataset.path),
        "mask_path": places.get(dataset.mask_path or "", dataset.mask_path),
    }
    if dataset.conditioning_path:
        own["conditioning_path"] = [places.get(text, text) for text in dataset.conditioning_path]
    return dataset.model_copy(update=own)


def _fetched(text: str) -> Path | None:
    name = HubName.read("dataset", text)
    return None if name is None or exists(expand(text)) else name.find()


def regularizes(spec: DataKeys) -> bool:
    """Return whether a job trains on class images or on a regularization dataset."""
    datasets = spec.datasets or []
    return spec.num_class_images > 0 or any(dataset.regularization for dataset in datasets)


def fallback_caption(spec: DataKeys, dataset: Dataset) -> str | None:
    """Return the caption for a dataset's images that have none, if one is set."""
    return dataset.caption or (spec.class_prompt if dataset.regularization else None)


def with_folder_repeats(spec: JobSpec) -> tuple[JobSpec, list[str]]:
    """Read repeats from folder names like kohya's scripts do: `10_cat person`.

    A dataset with such folders becomes one dataset for each of them, and the rest of its name is
    the caption of images that have none. What else is in it is skipped, as it is there.

    Returns:
        The job, and what was read or skipped, a line each.
    """
    entries, notes = [], []
    for dataset in datasets_of(spec):
        folders, others = _repeated(expand(dataset.path))
        if not folders or dataset.repeats != 1 or dataset.weight is not None:
            entries.append(dataset)
            continue
        for path, repeats, name in folders:
            own = {"path": str(path), "repeats": repeats, "caption": dataset.caption or name}
            entries.append(dataset.model_copy(update=own))
            notes.append(f"{path.name}: {repeats} repeats, as the folder's name says")
        if others:
            notes.append(
                f"{dataset.path}: not used: {_counted(others)}; beside folders such as "
                f"{folders[0][0].name}, only others that are named so are used"
            )
    if not notes:
        return spec, notes
    return spec.model_copy(update={"dataset": "", "datasets": entries}), notes


def _repeated(root: Path) -> tuple[list[tuple[Path, int, str]], list[str]]:
    """Return the folders of a dataset that say how often they repeat, and what is beside them.

    Returns:
        Each folder with its repeats and the rest of its name; names of other folders and samples.
    """
    try:
        inside = sorted(p for p in root.iterdir() if not p.name.startswith("."))
    except OSError:
        return [], []
    media = dataset_files.PICTURE_SUFFIXES | dataset_files.VIDEO_SUFFIXES
    folders, others = [], []
    for path in inside:
        match = _KOHYA.fullmatch(path.name) if path.is_dir() else None
        if match:
            folders.append((path, int(match["repeats"]), match["name"].strip()))
        elif path.is_dir() or path.suffix.lower() in media:
            others.append(path.name)
    return folders, others


def _counted(names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more}"


def find_layout(root: Path) -> Layout:
    """Detect the layout of a dataset's directory.

    `arrow` is the format of `save_to_disk` of the `datasets` library, `parquet` that of the hub;
    `webdataset` are tar files.
    """
    if any((root / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return "arrow"
    media = dataset_files.PICTURE_SUFFIXES | dataset_files.VIDEO_SUFFIXES
    tables = archives = False
    for path in root.rglob("*"):
        suffix = path.suffix.lower()
        if suffix in media or (path.name in dataset_files.METADATA and suffix != ".parquet"):
            return "folder"
        tables = tables or suffix == ".parquet"
        archives = archives or suffix == ".tar"
    if tables:
        return "parquet"
    return "webdataset" if archives else "folder"


def _entry(entry: Any) -> Any:
    if isinstance(entry, str) and (mapping := as_mapping(entry)) is not None:
        entry = mapping
    if isinstance(entry, str):
        match = _REPEATS.match(entry.strip())
        if match and not exists(expand(entry.strip())):  # a folder may really have this name
            return {"path": match["path"], "repeats": int(match["repeats"])}
        return {"path": entry.strip()}
    if isinstance(entry, dict):
        return {normal_key(str(key)): v for key, v in entry.items() if v is not None}
    return entry


# -- pairs ----------------------------------------------------------------------------------
# Match conditioning images with samples by their names.


class Pairs:
    """The conditioning images of a folder's samples, with `conditioning_path` or `_suffix`.

    Those of videos are videos, except for reference images. A fill mask may be either.

    Args:
        dataset: The folder.
        paths: The images and videos in it.

    Raises:
        OSError: A folder cannot be read.
    """

    def __init__(self, dataset: Dataset, paths: Sequence[Path]) -> None:
        self._root = expand(dataset.path)
        self._folders = [expand(path) for path in dataset.conditioning_path or ()]
        self._suffixes = dataset.conditioning_suffix or []
        self._roles = dataset.roles
        listed = [dataset_files.list_files(folder) for folder in self._folders]
        self._beside = {
            is_video: [
                _by_stem(folder, files.videos if is_video else files.pictures)
                for folder, files in zip(self._folders, listed, strict=True)
            ]
            for is_video in (False, True)
        }
        self._own = {
            is_video: _by_stem(self._root, [path for path in paths if _is_video(path) == is_video])
            if self._suffixes
            else {}
            for is_video in (False, True)
        }

    def expected_paths(self, sample: Path) -> list[Path]:
        """Return where a sample's conditioning images are expected, for messages."""
        inside = sample.relative_to(self._root)
        apart = [folder / inside for folder in self._folders]
        together = [
            sample.with_name(sample.stem + suffix + sample.suffix) for suffix in self._suffixes
        ]
        return [
            path.with_suffix(".png") if _is_video(path) and role == "reference" else path
            for path, role in zip(apart or together, self._roles, strict=True)
        ]

    def existing_paths(self, sample: Path) -> list[Path | None]:
        """Return a sample's conditioning images, of any file type; None for each missing one."""
        stem, moves = _stem(sample, self._root), _is_video(sample)
        kinds = {"control": (moves,), "fill_mask": (moves, False), "reference": (False,)}
        paths: list[Path | None] = []
        for number, role in enumerate(self._roles):
            if self._folders:
                named = [self._beside[kind][number].get(stem) for kind in kinds[role]]
            else:
                name = stem + dataset_files.same_name(self._suffixes[number])
                named = [self._own[kind].get(name) for kind in kinds[role]]
            paths.append(next(filter(None, named), None))
        return paths

    def is_sample(self, path: Path) -> bool:
        """Return whether a file is a sample rather than a conditioning image of another sample."""
        if any(path.is_relative_to(folder) for folder in self._folders):
            return self._root in self._folders  # images may condition themselves
        stem, moves = _stem(path, self._root), _is_video(path)
        suffixes = map(dataset_files.same_name, self._suffixes)
        return not any(
            stem.endswith(suffix) and stem.removesuffix(suffix) in self._own[kind]
            for suffix, role in zip(suffixes, self._roles, strict=False)
            for kind in ({moves} if role == "control" else {moves, True})
        )


def _is_video(path: Path) -> bool:
    return path.suffix.lower() in dataset_files.VIDEO_SUFFIXES


def _by_stem(root: Path, pictures: Sequence[Path]) -> dict[str, Path]:
    """Return the first file of each name."""
    by_stem: dict[str, Path] = {}
    for path in pictures:
        by_stem.setdefault(_stem(path, root), path)
    return by_stem


def _stem(path: Path, root: Path) -> str:
    return dataset_files.same_name(os.path.splitext(path.relative_to(root))[0])
