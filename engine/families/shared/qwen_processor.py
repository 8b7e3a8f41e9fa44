"""The processor that shows Qwen2.5-VL images beside a text, without what is only for videos."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import Qwen2VLProcessor

if TYPE_CHECKING:
    from transformers import Qwen2Tokenizer


class ImagesAndTexts(Qwen2VLProcessor):
    """Qwen2-VL's processor of images and texts.

    Its own constructor wants a video processor, and that torchvision, which nothing else here
    needs (transformers 5.23). Images are resized by torchvision where it is installed, as in the
    stock pipeline there, and else by Pillow.

    Args:
        image_processor: A `Qwen2VLImageProcessor`.
        tokenizer: The pipeline's.
    """

    def __init__(self, image_processor: Any, tokenizer: Qwen2Tokenizer) -> None:
        self.image_processor = image_processor
        self.tokenizer = tokenizer
        self.video_processor = None
        self.chat_template = None
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
