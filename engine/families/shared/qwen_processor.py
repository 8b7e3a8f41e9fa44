"""Processors of Qwen-VL's images and texts, without the parts that are only for videos."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import Qwen2VLImageProcessor, Qwen2VLProcessor

from jobs.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import Qwen2Tokenizer


class ImagesAndTexts(Qwen2VLProcessor):
    """Qwen2-VL's processor of images and texts.

    The original constructor requires a video processor, which requires torchvision, and nothing
    else here needs that (transformers 5.23). Images are resized by torchvision if it is installed,
    as in the stock pipeline, and else by Pillow.

    Args:
        image_processor: A `Qwen2VLImageProcessor`.
        tokenizer: The pipeline's tokenizer.
    """

    def __init__(self, image_processor: Any, tokenizer: Qwen2Tokenizer) -> None:
        self.image_processor = image_processor
        self.tokenizer = tokenizer
        self.video_processor = None
        self.chat_template = None
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)


def load_image_processor(root: Path) -> Any:
    """Return what prepares images for a model's text encoder.

    Raises:
        UserError: The model lacks its files.
    """
    if not (root / "processor" / "preprocessor_config.json").is_file():
        raise UserError(
            f"{root} is incomplete: processor/preprocessor_config.json is missing",
            "download it again",
        )
    return Qwen2VLImageProcessor.from_pretrained(root / "processor")
