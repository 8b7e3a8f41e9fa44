"""SimpleTuner's data: keys that hold for all of it, and the datasets of `multidatabackend.json`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from jobs.imports.common import data, models, training_keys
from jobs.imports.common.draft import (
    all_of,
    as_number,
    flatten,
    is_off,
    named,
    needless,
    unless_off,
    without,
)
from jobs.imports.common.import_report import Kind
from jobs.imports.common.places import read_beside
from jobs.spec.values.dataset_files import METADATA
from jobs.spec.values.spellings import normal_key

if TYPE_CHECKING:
    from jobs.imports.common.draft import Draft, Rule

_CACHES: Final = ("text_embeds", "image_embeds", "conditioning_image_embeds")
_STORES: Final = "only local folders are supported: copy it (`aws s3 sync`) and set the path"
_METADATA: Final = (
    'write a metadata.jsonl into the folder, a line {"file_name": …, "text": …} for each image'
)
_RESOLUTION: Final = 1024  # of a dataset, where neither it nor the configuration has one
_DELETING: Final = without("files are never deleted; the report lists unusable ones")
# Keys of the configuration that datasets have where they say nothing else.
_INHERITED: Final = (
    "resolution",
    "resolution_type",
    "caption_strategy",
    "instance_prompt",
    "crop",
    "crop_style",
    "prepend_instance_prompt",
    "only_instance_prompt",
    "minimum_image_size",
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
    part = data.Part(draft, f"{place}.", general | theirs)
    if str(part.get("caption_strategy") or "textfile").strip().lower() == "textfile":
        part.defaults = {"disable_multiline_split": False}
    if "resolution" not in part.theirs:
        part.defaults["resolution"] = _RESOLUTION
    part.apply(_DATASET, _DATASET_PREFIXES, ("instance_data_dir",))
    return part


def _why_skipped(theirs: dict[str, Any]) -> tuple[Kind, str] | None:
    """Why a dataset is not imported at all."""
    kind = str(theirs.get("dataset_type") or "image").strip().lower()
    if not is_off(theirs.get("disabled", theirs.get("disable"))):
        return Kind.UNNEEDED, "disabled"
    if kind in _CACHES:
        return Kind.UNNEEDED, training_keys.OWN_CACHES
    if kind == "eval":
        return Kind.UNSUPPORTED, "set validation_fraction, the fraction of samples to hold out"
    if kind not in ("image", "video"):
        return Kind.UNSUPPORTED, f"datasets of {kind} are not supported"
    if str(theirs.get("type") or "local").strip().lower() not in ("local", "huggingface"):
        return Kind.UNSUPPORTED, _STORES
    return None


def _for_datasets(draft: Draft, key: str, value: Any) -> None:
    """Record a key that applies to datasets without their own value."""
    draft.record(Kind.TAKEN, key, why="for datasets that do not set their own")


def _resolution(part: Draft, key: str, value: Any) -> None:
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


def _general_resolution(draft: Draft, key: str, value: Any) -> None:
    if "resolution" in draft.values:
        draft.unneeded(key, "the datasets set their own")
    else:
        _resolution(draft, key, value)


def _conditioning(part: Draft, key: str, value: Any) -> None:
    """Take the dataset of conditioning images; its files are named like the samples."""
    kind = str(value.get("conditioning_type")) if isinstance(value, dict) else ""
    folder = value.get("instance_data_dir") if isinstance(value, dict) else None
    if not kind.startswith("reference") or not folder:
        part.unsupported(key, "only one folder of reference images for each dataset is supported")
    else:
        data.conditioning_folder(part, key, folder)


def _repeats(part: Draft, key: str, value: Any) -> None:
    number = as_number(value)
    if number is None or number != int(number):
        part.unreadable(key, "not a number of repeats")
    else:
        part.take(key, "repeats", int(number) + 1, "here the first pass counts too")


def _captions(part: Draft, key: str, value: Any) -> None:
    """Where captions come from."""
    word = str(value).strip().lower().replace("_", "").replace("-", "")
    if word == "textfile":
        part.unneeded(key, ".txt caption files are the default")
    elif word == "huggingface":
        part.unneeded(key, "captions are in a column")
    elif word == "instanceprompt":
        part.unneeded(key, "instance_prompt is the caption")
    elif word == "parquet" and _is_metadata(part):
        part.unneeded(key, "captions are in a metadata file")
    elif word == "parquet":
        part.unsupported(key, _METADATA)
    else:
        part.unsupported(
            key,
            "captions cannot be made from file names; write .txt files",
        )


def _is_metadata(part: Draft) -> bool:
    """Whether its table is a metadata file that is read here too."""
    name = str(part.get("parquet.path") or "").rpartition("/")[2]
    return name in METADATA and part.get("parquet.filename_column") in (None, "file_name")


def _instance_prompt(part: Draft, key: str, value: Any) -> None:
    """Take the caption of all images, or a prefix of every caption, or nothing."""
    strategy = str(part.get("caption_strategy") or "").lower().replace("_", "")
    if strategy == "instanceprompt" or part.on("only_instance_prompt"):
        data.only_caption(part, key, value)
    elif part.on("prepend_instance_prompt"):
        part.take(key, "trigger_word", value, "before each caption, with a comma")
    else:
        part.unneeded(key, "prepend_instance_prompt and only_instance_prompt are off")


def _crop_style(part: Draft, key: str, value: Any) -> None:
    word = str(value).strip().lower()
    if is_off(part.get("crop")):
        part.unneeded(key, "crop is off")
    elif word in ("random", "center", "centre"):
        part.take(key, "crop", "random" if word == "random" else "center", "")
    else:
        part.unsupported(key, "crop: center is used; random is the alternative")


def _crop_aspect(part: Draft, key: str, value: Any) -> None:
    word = str(value).strip().lower()
    if is_off(part.get("crop")) or word in ("preserve", "closest"):
        part.unneeded(key, training_keys.BUCKETS)
    elif word == "square" and str(part.get("crop_style")).strip().lower() == "random":
        part.take(key, "max_bucket_aspect_ratio", 1.0, "square buckets, cropped at random")
    elif word == "square":
        part.take(key, "crop", "square")
    else:
        part.unsupported(key, training_keys.BUCKETS)


def _smallest(part: Draft, key: str, value: Any) -> None:
    """Skip images below a size: they would be upscaled by more than a given factor."""
    least, target = as_number(value), as_number(part.get("resolution")) or 1024
    if is_off(value) or least is None or least <= 0:
        part.unneeded(key, "images that need more than max_upscale are skipped")
        return
    ratio = target / least if least >= 16 or target >= 16 else (target / least) ** 0.5  # areas
    largest = max(1.0, round(ratio, 3))
    part.take(key, "max_upscale", largest, f"images below {least:g} would be upscaled more")


def _shuffles(part: Draft, key: str, value: Any) -> None:
    count = as_number(value)
    if not part.on("caption_shuffle.enable") or count is None:
        part.unneeded(key, "caption_shuffle.enable is off")
    else:
        part.take(key, "caption_shuffles", max(2, int(count) + 1), "with the order as written")


def _lines(part: Draft, key: str, value: Any) -> None:
    if is_off(value):
        part.take(key, "caption_lines", "variants", "each line of a file is a caption")
    else:
        part.take(key, "caption_lines", "joined", "all lines form one caption")


_DATASET: Final[dict[str, Rule]] = {
    "id": needless("datasets are identified by path"),
    "type": needless("read from a directory"),
    "dataset_type": needless("images and videos are recognized by file name"),
    "instance_data_dir": data.folder,
    "dataset_name": data.hub_id,
    "resolution": _resolution,
    "resolution_type": needless("resolution is in pixels"),
    "repeats": _repeats,
    "caption_strategy": _captions,
    "instance_prompt": _instance_prompt,
    **all_of("prepend_instance_prompt only_instance_prompt", needless("set by instance_prompt")),
    "disable_multiline_split": _lines,
    "caption_shuffle.enable": unless_off("shuffle_captions", True),
    "caption_shuffle.count": _shuffles,
    "caption_shuffle.position_start": data.kept_tags("caption_shuffle.enable"),
    "caption_shuffle.split_on": without("captions are split at commas", "comma"),
    "caption_shuffle.include_original": without("the original order is included", "true"),
    "caption_shuffle.seed": needless("orders depend only on the caption"),
    "caption_filter_list": without("captions are used unchanged"),
    "crop_style": _crop_style,
    "crop_aspect": _crop_aspect,
    "minimum_image_size": _smallest,
    **all_of(
        "crop maximum_image_size target_downsample_size crop_aspect_buckets max_upscale_threshold",
        needless(training_keys.BUCKETS),
    ),
    "minimum_aspect_ratio": without("max_aspect_ratio limits both shapes alike"),
    "maximum_aspect_ratio": named("max_aspect_ratio"),
    "probability": without("set a weight for all datasets instead of repeats", "1"),
    "max_num_samples": without("put the samples into a separate folder"),
    **all_of("start_epoch start_step", without("datasets are used from the start", "1")),
    **all_of("end_epoch end_step", without("datasets are used to the end")),
    **all_of(
        "slider_strength conditioning conditioning_type timestep_sampling_offset audio",
        without("all datasets are trained the same way"),
    ),
    "conditioning_data": _conditioning,
    **all_of("delete_unwanted_images delete_problematic_images delete_nsfw_images", _DELETING),
    **all_of(
        "is_regularisation_data is_regularization_data",
        unless_off(
            "regularization",
            True,
            "trained on its images; there the target is the base's own prediction",
        ),
    ),
    "video.num_frames": data.frames,
    "video.min_frames": needless("videos shorter than a sample are skipped and listed"),
    "video.max_frames": without("samples are cut from videos of any length"),
    "video.is_i2v": data.first_frame,
    "video.bucket_strategy": needless("videos go into buckets by shape and length"),
    "video.frame_interval": needless("the family sets the lengths"),
    "parquet.path": needless("only for caption_strategy: parquet"),
    **all_of(
        "parquet.caption_column huggingface.caption_column config.caption_column",
        named("caption_column"),
    ),
    **all_of(
        "huggingface.image_column huggingface.video_column config.image_column",
        named("image_column"),
    ),
    **all_of("huggingface.split dataset_split split", named("split")),
    **all_of("disabled disable", needless("off")),
}

_DATASET_PREFIXES: Final[dict[str, Rule]] = {
    **all_of(
        "cache_ text_embeds image_embeds conditioning_image_embed vae_cache text_cache "
        "write_batch_size read_batch_size",
        needless(training_keys.OWN_CACHES),
    ),
    **all_of(
        "skip_file_discovery preserve_data_backend_cache metadata_ hash_filenames ignore_epochs "
        "default text_encoder_batch_size",
        needless("every job lists its folders"),
    ),
    "parquet.": needless("sizes are read from the files"),
    **all_of("huggingface. config.", without("all rows of the split are used")),
    **all_of("aws_ csv_", needless("only for other stores")),
}

RULES: Final[dict[str, Rule]] = {
    "data_backend_config": read_backends,
    **dict.fromkeys(_INHERITED, _for_datasets),
    "resolution": _general_resolution,
    "aspect_bucket_alignment": training_keys.bucket_step,
    **all_of(
        "maximum_image_size target_downsample_size max_upscale_threshold aspect_bucket_rounding "
        "aspect_bucket_worker_count aspect_bucket_disable_rebuild disable_bucket_pruning "
        "allow_dataset_oversubscription data_backend_sampling",
        needless(training_keys.BUCKETS),
    ),
    **all_of(
        "cache_dir cache_dir_vae cache_dir_text compress_disk_cache vae_cache_scan_behaviour "
        "vae_cache_ondemand vae_cache_disable text_cache_ondemand text_cache_disable "
        "preserve_data_backend_cache write_batch_size read_batch_size skip_file_discovery "
        "override_dataset_config image_processing_batch_size metadata_update_interval "
        "enable_multiprocessing max_workers aws_max_pool_connections dataloader_prefetch "
        "dataloader_prefetch_qlen",
        needless(training_keys.OWN_CACHES),
    ),
    **all_of(
        "debug_aspect_buckets debug_dataset_loader print_filenames print_sampler_statistics "
        "ignore_missing_files",
        needless("`fsdp-tui data JOB.yaml` reports on the data"),
    ),
    **all_of("delete_unwanted_images delete_problematic_images", _DELETING),
    "conditioning_multidataset_sampling": needless("there are no conditioning datasets"),
    **all_of(
        "parquet_caption_column parquet_filename_column",
        needless("datasets set their own columns"),
    ),
}
