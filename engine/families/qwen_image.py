"""Qwen-Image: packed 2×2 latents of a video VAE, text of any length, rectified flow.

Qwen-Image-Edit's conditioning images are tokens after the image's own, and its text encoder sees
them with the prompt. Qwen-Image-Layered makes an image and its layers, from the image.
"""

from __future__ import annotations

import math
from contextlib import ExitStack, contextmanager, nullcontext
from inspect import signature
from typing import TYPE_CHECKING, Any, Final

import torch
from diffusers import QwenImageEditPlusPipeline, QwenImageLayeredPipeline, QwenImagePipeline
from torch.overrides import TorchFunctionMode

from engine.families.shared.base import TokenLayout
from engine.families.shared.lora_names import ComfyUI, Kohya, as_in_diffusers
from engine.families.shared.packing import OneFrameFamily, PackedFamily, pack, unpack
from engine.families.shared.qwen_layers import LayeredPipeline
from engine.families.shared.references import references_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from PIL import Image

    from engine.families.shared.references import Conditioning
    from jobs.spec.keys.data import DataKeys
    from jobs.spec.keys.prompts import SampleRequest

_LONGEST_TEXT: Final = 1024  # tokens; the pipeline takes no more, and cuts at 512 if not told
_TOKEN_TYPES: Final = "mm_token_type_ids"


class QwenImage(PackedFamily, OneFrameFamily):
    """Qwen-Image; Edit, with one or several conditioning images; and Layered."""

    # Every linear layer of the blocks: attention of both streams, and both feed-forwards.
    LORA_TARGETS = (
        r"transformer_blocks\.\d+\."
        r"(attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)"
        r"|(img|txt)_mlp\.net\.(0\.proj|2))"
    )
    TOKENS = TokenLayout(
        {"image_rotary_emb": (2, 0), "modulate_index": (2, 1)}, image_first=("image_rotary_emb",)
    )
    KOHYA = Kohya(as_in_diffusers, {"ss_network_module": "networks.lora_qwen_image"})
    COMFYUI = ComfyUI(as_in_diffusers)
    ENCODING_WITH_IMAGES = 1  # 0: without `image_tokens`, and of any length

    def pipeline_class(self) -> Any:
        own = super().pipeline_class()
        return LayeredPipeline if own is QwenImageLayeredPipeline else own

    @property
    def _layered(self) -> bool:
        return self.pipeline_class() is LayeredPipeline

    def load_text_pipeline(self, root: Path, dtype: torch.dtype, **components: Any) -> Any:
        """Return a pipeline with only what encodes prompts, and the images beside them."""
        if self.pipeline_class() is not QwenImagePipeline and "processor" not in components:
            components["processor"] = _load_processor(root)
        return super().load_text_pipeline(root, dtype, **components)

    def encode(
        self, pipeline: Any, prompt: str, max_sequence_length: int, *, negative: bool = False
    ) -> dict[str, torch.Tensor]:
        """`prompt_embeds (L, D)` and `prompt_embeds_mask (L,)`; L is as long as the prompt."""
        return _whole(
            pipeline.encode_prompt(prompt=prompt, max_sequence_length=max_sequence_length)[0]
        )

    def encode_with_images(
        self, pipeline: Any, prompt: str, max_sequence_length: int, images: Sequence[Image.Image]
    ) -> dict[str, torch.Tensor]:
        """Return the same; L counts the prompt, up to `max_sequence_length`, and the images."""
        prompt = _first_tokens(pipeline.tokenizer, prompt, max_sequence_length)
        shown = list(images) if self.pipeline_class() is QwenImageEditPlusPipeline else images[0]
        with image_tokens(pipeline):
            return _whole(pipeline.encode_prompt(prompt=prompt, image=shown)[0])

    def without_gradient(self, model: Any, spec: DataKeys) -> str:
        """Name what makes the last block's text, which nothing reads."""
        last = len(model.transformer_blocks) - 1
        return rf"^transformer_blocks\.{last}\.(attn\.to_add_out|txt_mlp)\."

    def arrange(self, condition: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Without a mask that masks nothing, as in the pipeline: faster kernels take none."""
        mask = condition.get("prompt_embeds_mask")
        if mask is None or not mask.all():
            return condition
        return {name: text for name, text in condition.items() if text is not mask}

    def predict(
        self,
        transformer: Any,
        noisy: torch.Tensor,
        level: torch.Tensor,
        condition: dict[str, torch.Tensor],
        guidance: float,
    ) -> torch.Tensor:
        """Of an image and its layers, `noisy` is `(B, C, 1 + layers, h, w)`."""
        batch, height, width = len(noisy), *noisy.shape[-2:]
        mask = condition.get("prompt_embeds_mask")
        layered = noisy.dim() == 5
        made = noisy.unbind(2) if layered else (noisy,)
        grids = [*made, *references_in(condition)]
        # Which model it is: 0 for layers, the only ones that are published.
        kind = {"additional_t_cond": noisy.new_zeros(batch, dtype=torch.long)} if layered else {}
        shapes = [(1, grid.shape[2] // 2, grid.shape[3] // 2) for grid in grids]
        tokens = [pack(grid) for grid in grids]
        moves = mask is not None or transformer.config.get("zero_cond_t")
        with filled_numbers(transformer) if moves else nullcontext():
            velocity = transformer(
                hidden_states=torch.cat(tokens, dim=1) if len(tokens) > 1 else tokens[0],
                timestep=level,
                encoder_hidden_states=condition["prompt_embeds"],
                encoder_hidden_states_mask=mask,
                img_shapes=[shapes] * batch,
                return_dict=False,
                **kind,
            )[0]
        each = velocity.split(tokens[0].shape[1], dim=1)
        if not layered:
            return unpack(each[0], height, width)
        parts = [unpack(part, height, width) for part in each[: len(made)]]
        return torch.stack(parts, dim=2)

    def shift_of(self, height: int, width: int, frames: int = 1) -> float:
        """Of layers too, by the tokens of one image."""
        return super().shift_of(height, width)

    def sampler_shift_of(self, height: int, width: int, frames: int = 1) -> float:
        """Of layers, as their pipeline: mu is the root of an image's tokens per 256."""
        if not self._layered:
            return super().sampler_shift_of(height, width)
        mu = (self.tokens_of(height, width) / 256) ** 0.5
        linear = self._schedule.get("time_shift_type", "exponential") == "linear"
        return mu if linear else math.exp(mu)

    def unpack(self, pipeline: Any, latents: torch.Tensor, request: SampleRequest) -> torch.Tensor:
        """Return those of an image and its layers as `(B, C, 1 + layers, h, w)`."""
        if not self._layered:
            return super().unpack(pipeline, latents, request)
        parts = latents.chunk(1 + request.layers, dim=1)
        return torch.stack([super(QwenImage, self).unpack(pipeline, p, request) for p in parts], 2)

    def decode(
        self, pipeline: Any, latents: torch.Tensor, request: SampleRequest
    ) -> list[Image.Image]:
        """Return the layers, RGBA, from the back; the image before them is not decoded."""
        if not self._layered:
            return super().decode(pipeline, latents, request)
        vae = pipeline.vae
        layers = self.denormalise(vae, self.unpack(pipeline, latents, request))[:, :, 1:]
        # One by one: the memory of decoding is that of an image.
        pixels = [vae.decode(layer, return_dict=False)[0][:, :, 0] for layer in layers.split(1, 2)]
        pictures: list[Image.Image] = pipeline.image_processor.postprocess(
            torch.cat(pixels), output_type="pil"
        )
        return pictures

    def reference_arguments(self, pictures: Sequence[Conditioning]) -> dict[str, Any]:
        """As they are: the pipelines resize them."""
        several = self.pipeline_class() is QwenImageEditPlusPipeline
        return {"image": list(pictures) if several else pictures[0]}

    def sample_arguments(
        self,
        request: SampleRequest,
        condition: dict[str, torch.Tensor],
        negative: dict[str, torch.Tensor] | None,
    ) -> dict[str, Any]:
        """`guidance_scale` is for distilled models only, and there are none."""
        arguments = super().sample_arguments(request, condition, negative)
        arguments["true_cfg_scale"] = arguments.pop("guidance_scale")
        if self._layered:
            arguments["layers"] = request.layers
        if condition:
            arguments["max_sequence_length"] = _LONGEST_TEXT
        return arguments


def _first_tokens(tokenizer: Any, text: str, most: int) -> str:
    """Return the beginning of a text, of this many tokens at most."""
    ends = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return text[: ends[most - 1][1]] if len(ends) > most else text


def _whole(embeds: torch.Tensor) -> dict[str, torch.Tensor]:
    """Add a mask of ones: a single text has no padding, so the pipeline makes no mask."""
    mask = torch.ones(embeds.shape[1], dtype=torch.bool, device=embeds.device)
    return {"prompt_embeds": embeds[0].contiguous(), "prompt_embeds_mask": mask}


@contextmanager
def image_tokens(pipeline: Any) -> Iterator[None]:
    """Tell the text encoder which tokens are an image's.

    Diffusers (0.42) does not pass on the processor's `mm_token_type_ids`. Without them,
    transformers (5.23) gives an image's patches the positions of a line of text: they lose their
    grid, and the text behind them gets other positions (diffusers issue 14194).
    """

    def tell(encoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _TOKEN_TYPES not in signature(encoder.forward).parameters:  # older transformers
            return None
        types = (kwargs["input_ids"] == pipeline.processor.image_token_id).int()
        return args, {_TOKEN_TYPES: types} | kwargs

    hook = pipeline.text_encoder.register_forward_pre_hook(tell, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def _load_processor(root: Path) -> Any:
    """Return what prepares images and texts for the encoder.

    Raises:
        UserError: The model lacks its files.
    """
    # Imported here: transformers warns without torchvision.
    from transformers import Qwen2Tokenizer

    from engine.families.shared.qwen_processor import ImagesAndTexts, load_image_processor

    return ImagesAndTexts(
        load_image_processor(root), Qwen2Tokenizer.from_pretrained(root / "tokenizer")
    )


class _Filled(TorchFunctionMode):
    """Fill numbers that become tensors by kernels; to copy them waits for the GPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.as_tensor and isinstance(args[0], int) and kwargs.keys() == {"device"}:
            return torch.full((), args[0], **kwargs)
        if func is torch.tensor and kwargs.keys() == {"device", "dtype"} and _is_ranges(args[0]):
            rows = args[0]
            filled = torch.ones(len(rows), len(rows[0]), **kwargs)
            for number, row in enumerate(rows):
                filled[number, : row.count(0)].zero_()
            return filled
        return func(*args, **kwargs)


def _is_ranges(value: Any) -> bool:
    """Whether it is rows of zeros and of ones behind them, all of one length."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(row, list) and len(row) == len(value[0]) for row in value)
        and all(row.count(0) + row.count(1) == len(row) for row in value)
        and not any(any(row[: row.count(0)]) for row in value)
    )


@contextmanager
def filled_numbers(transformer: Any) -> Iterator[None]:
    """Keep a forward with masked texts, or of Qwen-Image-Edit-2511, from waiting for the GPU.

    Diffusers (0.42) moves the length of the texts there, to count tokens that it then does not
    use; and for 2511 a list of which tokens are a conditioning image's. It does so before it embeds
    positions: only until then is every function intercepted.
    """
    with ExitStack() as stack:
        stack.enter_context(_Filled())
        hook = transformer.pos_embed.register_forward_pre_hook(lambda *_: stack.close())
        stack.callback(hook.remove)
        yield


FAMILY = QwenImage
