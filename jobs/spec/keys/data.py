"""The data, and what is made of it before training."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator

from jobs.spec.values.datasets import Dataset, read_datasets
from jobs.spec.values.spellings import as_none
from jobs.spec.values.value_types import (
    Bool,
    CaptionLines,
    Crop,
    MissingCaptions,
    OptionalBool,
    OptionalText,
    choice,
    field,
)


class DataKeys(BaseModel):
    """A part of `jobs.spec.job_spec.JobSpec`."""

    # -- pictures and videos ---------------------------------------------------------------
    datasets: Annotated[list[Dataset] | None, BeforeValidator(read_datasets)] = field(
        None, "data",
        "Several datasets instead of one: a list of paths, or of mappings with path, repeats or "
        "weight, trigger_word, caption_column, image_column, split.",
    )  # fmt: skip
    max_upscale: float = field(
        2.0, "data", "Leave out pictures that would have to be enlarged more than this.", ge=1
    )
    crop: Annotated[Crop, choice(Crop)] = field(
        "center", "data", "Where a picture is cut to the shape of its bucket."
    )
    crop_variants: int = field(
        4, "data", "Cuts of each picture that are cached with crop: random.", ge=1, le=64
    )
    random_flip: Bool = field(False, "data", "Mirror half of the samples; both sides are cached.")
    num_frames: Annotated[int | None, BeforeValidator(as_none)] = field(
        None, "data", "Frames of a video sample; a video's own length, up to 81, when left out.",
        ge=1, le=4096,
    )  # fmt: skip
    fps: float = field(16.0, "data", "Frames per second that videos are read at.", gt=0, le=240)

    # -- captions --------------------------------------------------------------------------
    caption_lines: Annotated[CaptionLines, choice(CaptionLines)] = field(
        "joined", "data",
        "joined: all lines of a caption file are one caption; variants: each line is a caption of "
        "its own, and every use of the picture takes the next.",
    )  # fmt: skip
    missing_captions: Annotated[MissingCaptions, choice(MissingCaptions)] = field(
        "skip", "data", "Pictures without a caption: leave them out, or train with an empty one."
    )
    trigger_word: OptionalText = field(
        None, "data",
        "Put in place of [trigger] in captions and prompts, and in front of captions without it.",
    )  # fmt: skip
    shuffle_captions: Bool = field(
        False, "data", "Also train with the parts between commas in other orders."
    )
    caption_shuffles: int = field(
        4, "data", "Orders of each caption that are encoded, the written one included.", ge=2, le=64
    )
    keep_tags: int = field(
        0, "data", "So many parts at the beginning of a caption stay where they are.", ge=0
    )

    # -- text encoders and caches ----------------------------------------------------------
    cache_text_embeddings: OptionalBool = field(
        None, "data",
        "Keep encoded captions on disk. On unless turned off; several ranks, and freed encoders, "
        "always do.",
    )  # fmt: skip
    unload_text_encoder: OptionalBool = field(
        None, "data",
        "Encode every caption before training, then free the text encoders. On unless turned "
        "off; several ranks always do.",
    )  # fmt: skip
    shard_text_encoders: OptionalBool = field(
        None, "data",
        "Share the text encoders out over the ranks while captions are encoded; by itself only "
        "where they would not fit whole.",
    )  # fmt: skip
    cache_dir: OptionalText = field(
        None, "data", "Where latents and embeddings are kept; the user cache when left out."
    )
    max_sequence_length: int = field(512, "data", "Text tokens given to the model.", ge=1)
    prefetch_steps: int = field(
        2, "data", "Steps whose data is read ahead of the training.", ge=1, le=64
    )
