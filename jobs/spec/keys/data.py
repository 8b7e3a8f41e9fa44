"""Keys for the data and its preparation."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

from jobs.spec.keys.groups import CACHES, CAPTIONS, DATA, REGULARIZATION
from jobs.spec.rules.no_effect import (
    captions_in_order,
    center_crop,
    images_only,
    no_class,
    no_masks,
    no_masks_drawn,
    no_preservation,
    no_references,
    no_regularization,
    no_sound,
    not_lora,
    one_rank,
    one_resolution,
    square_crop,
    text_trained,
    with_text_lora,
)
from jobs.spec.values.datasets import Dataset, read_datasets
from jobs.spec.values.field import Keys, field
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
    Preservation,
    RegularizationTarget,
    ResolutionMode,
    choice,
)


class DataKeys(Keys):
    """A part of `jobs.spec.job_spec.JobSpec`."""

    # -- images and videos -----------------------------------------------------------------
    datasets: Annotated[list[Dataset] | None, BeforeValidator(read_datasets)] = field(
        None,
        DATA,
        "Several datasets instead of one: a list of paths, or of mappings with path, repeats or "
        "weight, resolution, trigger_word, caption, caption_column, image_column, split, "
        "regularization, loss_weight, loss_weight_column, mask_path, and one of conditioning_path, "
        "conditioning_suffix, conditioning_column (layer_path, layer_suffix, layer_column mean the "
        "same, for layers), with conditioning_roles where they are control videos (control), masks "
        "of what is filled in (fill_mask) and reference images (reference), or, of videos, "
        "first_frame and last_frame.",
        resume="ruled",
        blank="or several: folder x2, other folder",
    )
    conditioning_resolution: Annotated[int | None, BeforeValidator(as_none)] = field(
        None,
        DATA,
        "Side in pixels of the square whose area conditioning images are resized to (default: "
        "1024, as the model's pipeline does).",
        resume="changes",
        no_effect=no_references,
        ge=64,
        le=4096,
    )
    resolution_mode: Annotated[ResolutionMode, choice(ResolutionMode)] = field(
        "each",
        DATA,
        "With several resolutions. each: train an image at every one it is large enough for; "
        "largest: only at the largest of these.",
        resume="changes",
        no_effect=one_resolution,
    )
    max_upscale: float = field(
        2.0,
        DATA,
        "Skip images that would have to be upscaled more than this.",
        resume="changes",
        ge=1,
    )
    max_aspect_ratio: float = field(
        5.0,
        DATA,
        "Skip images whose longer side is more than this many times the shorter one; 0: none. "
        "Buckets go up to max_bucket_aspect_ratio; the rest of a panorama would be cropped.",
        resume="changes",
        ge=0,
        le=10_000,
    )
    max_bucket_aspect_ratio: float = field(
        2.0,
        DATA,
        "Largest aspect ratio of buckets; images that are wider or taller are cropped to it.",
        resume="changes",
        no_effect=square_crop,
        ge=1,
        le=16,
    )
    bucket_step: Annotated[int | None, BeforeValidator(as_none)] = field(
        None,
        DATA,
        "Pixels between the sides of buckets, 16 to 128, a multiple of what the model takes: a "
        "larger step means fewer buckets and more cropping (default: 1/16 of the resolution, 64 at "
        "1024); 0: the smallest that the model takes.",
        resume="ruled",
        no_effect=square_crop,
        blank="1/16 of the resolution",
        ge=0,
        le=128,
    )
    crop: Annotated[Crop, choice(Crop)] = field(
        "center",
        DATA,
        "Part of an image to keep when it is cropped to its bucket. square: all buckets are "
        "square, and the center is kept.",
        resume="changes",
    )
    crop_variants: int = field(
        4,
        DATA,
        "Number of crops cached per image with crop: random.",
        resume="changes",
        no_effect=center_crop,
        ge=1,
        le=64,
    )
    mask_variants: int = field(
        4,
        DATA,
        "Number of random masks cached per image, for models that fill in what is masked: a "
        "rectangle or an ellipse each, in datasets without conditioning images.",
        resume="changes",
        no_effect=no_masks_drawn,
        ge=1,
        le=64,
    )
    random_flip: Bool = field(
        False, DATA, "Mirror half of the samples; both versions are cached.", resume="changes"
    )
    num_frames: Annotated[int | None, BeforeValidator(as_none)] = field(
        None,
        DATA,
        "Frames per video sample (default: the video's length, up to 81).",
        resume="changes",
        label="frames",
        blank="the video's, up to 81",
        no_effect=images_only,
        ge=1,
        le=4096,
    )
    fps: float = field(
        16.0,
        DATA,
        "Frame rate at which videos are read.",
        resume="changes",
        no_effect=images_only,
        gt=0,
        le=240,
    )

    train_audio: Bool = field(
        False,
        DATA,
        "Train the sound of videos with them; videos without sound train the video alone.",
        resume="changes",
        label="sound",
        no_effect=no_sound,
    )

    # -- regularization and masks ----------------------------------------------------------
    num_class_images: int = field(
        0,
        REGULARIZATION,
        "Class images to make from class_prompt with the base model before training, cached, and "
        "train as regularization.",
        label="class images",
        resume="changes",
        ge=0,
        le=10_000,
    )
    class_prompt: OptionalText = field(
        None,
        REGULARIZATION,
        "Prompt of class images; also the caption of regularization images that have none.",
        resume="changes",
        no_effect=no_regularization,
    )
    prior_loss_weight: float = field(
        1.0,
        REGULARIZATION,
        "Weight of the loss of regularization samples: datasets with regularization: true, and "
        "class images.",
        resume="changes",
        no_effect=no_regularization,
        memory=False,
        gt=0,
        le=1000,
    )
    regularization_target: Annotated[RegularizationTarget, choice(RegularizationTarget)] = field(
        "images",
        REGULARIZATION,
        "What a LoRA should predict on regularization samples: the images themselves, or what the "
        "base predicts there without the adapter, at the cost of one more forward.",
        resume="changes",
        no_effect=(no_regularization, not_lora, with_text_lora),
    )
    preservation: Annotated[Preservation, choice(Preservation)] = field(
        "none",
        REGULARIZATION,
        "Also hold a LoRA to the base's prediction on each training image, with another caption. "
        "class: the image's own, with preservation_class for the trigger word; blank: the empty "
        "one.",
        resume="changes",
        no_effect=(not_lora, with_text_lora),
    )
    preservation_class: OptionalText = field(
        None,
        REGULARIZATION,
        "What the trigger word is one of, such as dog; stands for it in captions of preservation: "
        "class.",
        resume="changes",
        no_effect=no_class,
        memory=False,
    )
    preservation_weight: float = field(
        1.0,
        REGULARIZATION,
        "Weight of the squared error of preservation.",
        resume="changes",
        no_effect=no_preservation,
        memory=False,
        gt=0,
        le=1000,
    )
    masked_loss: Annotated[MaskedLoss, choice(MaskedLoss)] = field(
        "none",
        REGULARIZATION,
        "Train only where a mask is white. alpha: an image's transparency; file: cat-mask.png or "
        "cat_mask.png beside cat.png, or in the dataset's mask_path.",
        resume="changes",
    )
    unmasked_weight: float = field(
        0.0,
        REGULARIZATION,
        "Weight of the loss where a mask is black.",
        resume="changes",
        no_effect=no_masks,
        memory=False,
        ge=0,
        le=1,
    )

    # -- captions --------------------------------------------------------------------------
    caption_lines: Annotated[CaptionLines, choice(CaptionLines)] = field(
        "joined",
        CAPTIONS,
        "joined: all lines of a caption file form one caption; variants: each line is a separate "
        "caption, used in turn.",
        resume="changes",
    )
    missing_captions: Annotated[MissingCaptions, choice(MissingCaptions)] = field(
        "skip",
        CAPTIONS,
        "Images without a caption: skip them, or train with an empty caption.",
        resume="changes",
    )
    trigger_word: OptionalText = field(
        None,
        CAPTIONS,
        "Replaces [trigger] in captions and prompts; prepended to captions without it.",
        resume="changes",
        blank="none",
        memory=False,
        public=True,
    )
    shuffle_captions: Bool = field(
        False,
        CAPTIONS,
        "Also train with the comma-separated parts of captions shuffled.",
        resume="changes",
    )
    caption_shuffles: int = field(
        4,
        CAPTIONS,
        "Number of orders to encode per caption, including the original.",
        resume="changes",
        no_effect=captions_in_order,
        ge=2,
        le=64,
    )
    keep_tags: int = field(
        0,
        CAPTIONS,
        "Number of leading caption parts that are never shuffled.",
        resume="changes",
        no_effect=captions_in_order,
        memory=False,
        ge=0,
    )

    # -- text encoders and caches ----------------------------------------------------------
    cache_text_embeddings: OptionalBool = field(
        None,
        CACHES,
        "Cache encoded captions on disk. On by default; always on with several ranks or unloaded "
        "encoders.",
        resume="same",
        no_effect=text_trained,
    )
    unload_text_encoder: OptionalBool = field(
        None,
        CACHES,
        "Encode every caption before training, then free the text encoders. On by default; always "
        "on with several ranks.",
        resume="same",
        no_effect=text_trained,
    )
    text_encoder_precision: Annotated[BasePrecision, choice(BasePrecision)] = field(
        "none",
        DATA,
        "Precision that the weights of the text encoders' blocks are kept in, as of "
        "base_precision: none, fp8, fp8_scaled, int8 or nf4.",
        resume="changes",
        no_effect=text_trained,
    )
    shard_text_encoders: OptionalBool = field(
        None,
        CACHES,
        "Shard the text encoders over the ranks while captions are encoded (default: only if they "
        "do not fit on one GPU).",
        resume="same",
        no_effect=(one_rank, text_trained),
    )
    cache_dir: OptionalText = field(
        None,
        CACHES,
        "Directory for cached latents and embeddings (default: the user's cache directory).",
        resume="same",
        blank="the user's cache folder",
        path=True,
    )
    max_sequence_length: int = field(
        512, CACHES, "Maximum number of text tokens.", resume="changes", ge=1
    )
    prefetch_steps: int = field(2, CACHES, "Steps of data to prefetch.", resume="same", ge=1, le=64)
