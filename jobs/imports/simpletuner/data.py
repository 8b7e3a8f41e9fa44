"""SimpleTuner's datasets: the file that `data_backend_config` names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from jobs.imports.common import data, models, training_keys
from jobs.imports.common.draft import as_number, flatten, is_off
from jobs.imports.common.import_report import Kind
from jobs.imports.common.places import read_beside
from jobs.imports.common.table import read_table, sentence
from jobs.spec.values.dataset_files import METADATA
from jobs.spec.values.spellings import normal_key

if TYPE_CHECKING:
    from jobs.imports.common.draft import Draft

_CACHES: Final = ("text_embeds", "image_embeds", "conditioning_image_embeds")
_STORES: Final = "only folders, S3 and the hub are supported"
_READ: Final = ("local", "aws", "huggingface")
# Keys of the configuration that datasets have where they say nothing else.
_INHERITED: Final = (
    *("resolution", "resolution_type", "caption_strategy", "instance_prompt", "crop", "crop_style"),
    *("prepend_instance_prompt", "only_instance_prompt", "minimum_image_size"),
)


def read_backends(draft: Draft, key: str, value: Any) -> None:
    """Read the datasets of the file that a key names."""
    file = read_beside(draft, key, value, list, "set dataset or datasets")
    if file is None:
        return
    path, backends = file
    draft.record(Kind.TAKEN, key, why="its datasets follow")
    beside = {str(e.get("id")): e for e in backends if isinstance(e, dict) and _conditions(e)}
    parts = [_backend(draft, f"{path.name}[{i}]", e, beside) for i, e in enumerate(backends)]
    data.settle(draft, [part for part in parts if part is not None])


def _conditions(entry: dict[Any, Any]) -> bool:
    """Whether a dataset holds the conditioning images of another."""
    return str(entry.get("dataset_type")).strip().lower() == "conditioning"


def _backend(
    draft: Draft, place: str, entry: Any, beside: dict[str, dict[Any, Any]]
) -> data.Part | None:
    """One dataset; None where it is not used.

    Args:
        draft: The job.
        place: What it is called in the report.
        entry: The dataset.
        beside: Datasets of conditioning images, by their ids.
    """
    if not isinstance(entry, dict):
        draft.unreadable(place, "not a dataset")
        return None
    theirs = flatten({normal_key(str(key)): value for key, value in entry.items()})
    if _conditions(entry) and models.references_of(draft) is not None:
        draft.record(Kind.TAKEN, place, why="the conditioning images of another dataset")
        return None
    named = theirs.get("conditioning_data")
    if isinstance(named, str) and named in beside:
        theirs["conditioning_data"] = beside[named]
    if skipped := _why_skipped(theirs):
        draft.record(skipped[0], place, why=skipped[1])
        return None
    general = {key: draft.theirs[key] for key in _INHERITED if key in draft.theirs}
    return data.read_part(draft, place, general | theirs, DATASET)


def _why_skipped(theirs: dict[str, Any]) -> tuple[Kind, str] | None:
    """Why a dataset is not imported at all."""
    kind = str(theirs.get("dataset_type") or "image").strip().lower()
    if not is_off(theirs.get("disabled", theirs.get("disable"))):
        return Kind.UNNEEDED, "disabled"
    if kind in _CACHES:
        return Kind.UNNEEDED, sentence("own_caches")
    if kind == "eval":
        return Kind.UNSUPPORTED, "set validation_fraction, the fraction of samples to hold out"
    if kind not in ("image", "video"):
        return Kind.UNSUPPORTED, f"datasets of {kind} are not supported"
    if str(theirs.get("type") or "local").strip().lower() not in _READ:
        return Kind.UNSUPPORTED, _STORES
    return None


def bucket(part: Draft, key: str, value: Any) -> None:
    """Take the address of a dataset in S3, of its bucket and its prefix."""
    prefix = str(part.get("aws_data_prefix") or "").strip("/")
    part.take(key, "path", f"s3://{value}/{prefix}".rstrip("/"), "with aws_data_prefix")


def resolution(part: Draft, key: str, value: Any) -> None:
    """Pixels of a side, or megapixels; theirs may mean the shorter side."""
    number = as_number(value)
    kind = str(part.get("resolution_type") or "pixel_area").strip().lower()
    if number is None or number <= 0:
        part.unreadable(key, "not a number of pixels")
    elif kind == "area" or number < 16:
        part.take(
            key, "resolution", training_keys.side_of(number), "megapixels → the side in pixels"
        )
    elif kind == "pixel":
        part.take(
            key,
            "resolution",
            value,
            "the shorter side there; the square root of the pixel count here",
        )
    else:
        part.take(key, "resolution", value)


def conditioning(part: Draft, key: str, value: Any) -> None:
    """Take the dataset of conditioning images; its files are named like the samples."""
    kind = str(value.get("conditioning_type")) if isinstance(value, dict) else ""
    folder = value.get("instance_data_dir") if isinstance(value, dict) else None
    if not kind.startswith("reference") or not folder:
        part.unsupported(key, "only one folder of reference images for each dataset is supported")
    else:
        data.conditioning_folder(part, key, folder)


def repeats(part: Draft, key: str, value: Any) -> None:
    number = as_number(value)
    if number is None or number != int(number):
        part.unreadable(key, "not a number of repeats")
    else:
        part.take(key, "repeats", int(number) + 1, "here the first pass counts too")


def has_metadata(part: Draft, key: str) -> bool:
    """Whether its table is a metadata file that is read here, too."""
    name = str(part.get("parquet.path") or "").rpartition("/")[2]
    return name in METADATA and part.get("parquet.filename_column") in (None, "file_name")


def smallest(part: Draft, key: str, value: Any) -> None:
    """Skip images below a size: they would be upscaled by more than a given factor."""
    least, target = as_number(value), as_number(part.get("resolution")) or 1024
    if is_off(value) or least is None or least <= 0:
        part.unneeded(key, "images that need more than max_upscale are skipped")
        return
    ratio = target / least if least >= 16 or target >= 16 else (target / least) ** 0.5  # areas
    largest = max(1.0, round(ratio, 3))
    part.take(key, "max_upscale", largest, f"images below {least:g} would be upscaled more")


def shuffles(part: Draft, key: str, value: Any) -> None:
    count = as_number(value)
    if not part.on("caption_shuffle.enable") or count is None:
        part.unneeded(key, "caption_shuffle.enable is off")
    else:
        part.take(key, "caption_shuffles", max(2, int(count) + 1), "with the order as written")


DATASET: Final = read_table(__file__, "dataset", globals())
