"""The data, and what is made of it before training."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator

from jobs.spec.values.datasets import Dataset, read_datasets
from jobs.spec.values.spellings import as_none
from jobs.spec.values.value_types import (
    BasePrecision,
    Bool,
    CaptionLines,
    Crop,
    MaskedLoss,
    MissingCaptions,
    OptionalBool,
    OptionalText,
    ResolutionMode,
    choice,
    field,
)


class DataKeys(BaseModel):
    """A part of `jobs.spec.job_spec.JobSpec`."""

    # -- pictures and videos ---------------------------------------------------------------
    datasets: Annotated[list[Dataset] | None, BeforeValidator(read_datasets)] = field(
        None,
        "data",
        "Several datasets instead of one: a list of paths, or of mappings with path, repeats or "
        "weight, resolution, trigger_word, caption_column, image_column, split, "
        "regularization, loss_weight, loss_weight_column, mask_path, and one of conditioning_path, "
        "conditioning_suffix, conditioning_column or, of videos, first_frame.",
    )
    conditioning_resolution: Annotated[int | None, BeforeValidator(as_none)] = field(
        None,
        "data",
        "Side in pixels of the square whose area conditioning images are resized to (default: "
        "1024, as the model's pipeline does).",
        ge=64,
        le=4096,
    )
    resolution_mode: Annotated[ResolutionMode, choice(ResolutionMode)] = field(
        "each",
        "data",
        "With several resolutions. each: train an image at every one it is large enough for; "
        "largest: only at the largest of these.",
    )
    max_upscale: float = field(
        2.0, "data", "Skip images that would have to be upscaled more than this.", ge=1
    )
    max_aspect_ratio: float = field(
        5.0,
        "data",
        "Skip images whose longer side is more than this many times the shorter one; 0: none. "
        "Buckets go up to max_bucket_aspect_ratio; the rest of a panorama would be cropped.",
        ge=0,
        le=10_000,
    )
    max_bucket_aspect_ratio: float = field(
        2.0,
        "data",
        "Largest aspect ratio of buckets; images that are wider or taller are cropped to it.",
        ge=1,
        le=16,
    )
    crop: Annotated[Crop, choice(Crop)] = field(
        "center",
        "data",
        "Part of an image to keep when it is cropped to its bucket. square: all buckets are "
        "square, and the center is kept.",
    )
    crop_variants: int = field(
        4, "data", "Number of crops cached per image with crop: random.", ge=1, le=64
    )
    random_flip: Bool = field(
        False, "data", "Mirror half of the samples; both versions are cached."
    )
    num_frames: Annotated[int | None, BeforeValidator(as_none)] = field(
        None,
        "data",
        "Frames per video sample (default: the video's length, up to 81).",
        ge=1,
        le=4096,
    )
    fps: float = field(16.0, "data", "Frame rate at which videos are read.", gt=0, le=240)

    # -- regularization and masks ----------------------------------------------------------
    num_class_images: int = field(
        0,
        "data",
        "Class images to make from class_prompt with the base model before training, cached, and "
        "train as regularization.",
        ge=0,
        le=10_000,
    )
    class_prompt: OptionalText = field(
        None,
        "data",
        "Prompt of class images; also the caption of regularization images that have none.",
    )
    prior_loss_weight: float = field(
        1.0,
        "data",
        "Weight of the loss of regularization samples: datasets with regularization: true, and "
        "class images.",
        gt=0,
        le=1000,
    )
    masked_loss: Annotated[MaskedLoss, choice(MaskedLoss)] = field(
        "none",
        "data",
        "Train only where a mask is white. alpha: an image's transparency; file: cat-mask.png or "
        "cat_mask.png beside cat.png, or in the dataset's mask_path.",
    )
    unmasked_weight: float = field(
        0.0, "data", "Weight of the loss where a mask is black.", ge=0, le=1
    )

    # -- captions --------------------------------------------------------------------------
    caption_lines: Annotated[CaptionLines, choice(CaptionLines)] = field(
        "joined",
        "data",
        "joined: all lines of a caption file form one caption; variants: each line is a separate "
        "caption, used in turn.",
    )
    missing_captions: Annotated[MissingCaptions, choice(MissingCaptions)] = field(
        "skip", "data", "Images without a caption: skip them, or train with an empty caption."
    )
    trigger_word: OptionalText = field(
        None,
        "data",
        "Replaces [trigger] in captions and prompts; prepended to captions without it.",
    )
    shuffle_captions: Bool = field(
        False, "data", "Also train with the comma-separated parts of captions shuffled."
    )
    caption_shuffles: int = field(
        4, "data", "Number of orders to encode per caption, including the original.", ge=2, le=64
    )
    keep_tags: int = field(
        0, "data", "Number of leading caption parts that are never shuffled.", ge=0
    )

    # -- text encoders and caches ----------------------------------------------------------
    cache_text_embeddings: OptionalBool = field(
        None,
        "data",
        "Cache encoded captions on disk. On by default; always on with several ranks or unloaded "
        "encoders.",
    )
    unload_text_encoder: OptionalBool = field(
        None,
        "data",
        "Encode every caption before training, then free the text encoders. On by default; always "
        "on with several ranks.",
    )
    text_encoder_precision: Annotated[BasePrecision, choice(BasePrecision)] = field(
        "none",
        "data",
        "Precision that the weights of the text encoders' blocks are kept in, as of "
        "base_precision: none, fp8, fp8_scaled, int8 or nf4.",
    )
    shard_text_encoders: OptionalBool = field(
        None,
        "data",
        "Shard the text encoders over the ranks while captions are encoded (default: only if they "
        "do not fit on one GPU).",
    )
    cache_dir: OptionalText = field(
        None,
        "data",
        "Directory for cached latents and embeddings (default: the user's cache directory).",
    )
    max_sequence_length: int = field(512, "data", "Maximum number of text tokens.", ge=1)
    prefetch_steps: int = field(2, "data", "Steps of data to prefetch.", ge=1, le=64)
