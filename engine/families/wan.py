"""Wan: videos by flow matching, with cross-attention to text; two experts by noise level in 2.2.

Image-to-video has the first frame, followed by gray ones, in extra channels, and FLF2V the last
one behind them. In 2.1, an image encoder (CLIP) has them as its input too. VACE has a control video
in blocks of its own, which add to what the usual ones compute.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import torch
from diffusers import WanImageToVideoPipeline, WanPipeline, WanVACETransformer3DModel
from torch.nn import functional
from transformers import BatchFeature, CLIPVisionModel

from engine.families.shared.base import Family, TokenLayout
from engine.families.shared.lora_names import ComfyUI, Kohya, Layout
from engine.families.shared.references import BEGINNING, insert_first_frame, references_in
from jobs.spec.families.wan import T2V_GUIDANCE, WITH_FRAME

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from PIL import Image

    from engine.families.shared.references import Conditioning
    from jobs.spec.job_spec import JobSpec
    from jobs.spec.keys.prompts import SampleRequest

_HIGH: Final = "transformer"
_LOW: Final = "transformer_2"
_MASKS: Final = 4  # channels: one for each frame of a latent; the first latent is of one frame
_IMAGE: Final = "image_embeds"
_CELL: Final = 8  # pixels of a latent's side, in Wan 2.1

_MODULES: Final = {
    **{
        f"{attention}.{module}": f"{theirs}.{part}"
        for attention, theirs in (("attn1", "self_attn"), ("attn2", "cross_attn"))
        for module, part in (("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "o"))
    },
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
}
_LAYOUT: Final = Layout(
    {
        **{
            f"{blocks}.#.{module}": f"{blocks}.#.{theirs}"
            for blocks in ("blocks", "vace_blocks")
            for module, theirs in _MODULES.items()
        },
        "blocks.#.attn2.add_k_proj": "blocks.#.cross_attn.k_img",
        "blocks.#.attn2.add_v_proj": "blocks.#.cross_attn.v_img",
    }
)


class Wan(Family):
    """Wan 2.1, Wan 2.2's TI2V-5B, and each expert of Wan 2.2 by itself; text or image to video."""

    # Every linear layer of the blocks: self-attention, cross-attention (to what CLIP sees too),
    # feed-forward. Of VACE, those of the control blocks, as DiffSynth-Studio's scripts train it.
    LORA_TARGETS = (
        r"blocks\.\d+\.(attn[12]\.(to_q|to_k|to_v|to_out\.0|add_k_proj|add_v_proj)"
        r"|ffn\.net\.(0\.proj|2))"
    )
    CONTROL_TARGETS = (
        r"vace_blocks\.\d+\.(attn[12]\.(to_q|to_k|to_v|to_out\.0)|ffn\.net\.(0\.proj|2))"
    )
    TOKENS = TokenLayout({"rotary_emb": (4, 1), "temb": (4, 1)})
    LORA_FILLED_UP = r"blocks\.\d+\.attn2\.add_[kv]_proj"
    KOHYA = Kohya(_LAYOUT.rename, {"ss_network_module": "networks.lora_wan"})
    COMFYUI = ComfyUI(_LAYOUT.rename)

    def lora_targets(self, spec: JobSpec) -> str:
        return self.CONTROL_TARGETS if self._controlled else super().lora_targets(spec)

    def lora_options(self) -> dict[str, Any]:
        """Files of both experts have the same names in them."""
        return {"load_into_transformer_2": True} if self.component == _LOW else {}

    def load_text_pipeline(self, root: Path, dtype: torch.dtype, **components: Any) -> Any:
        """Return a pipeline with only what encodes prompts, and first frames.

        In fp32, as published.
        """
        if self.image_encoder_class is not None and "image_encoder" not in components:
            components["image_encoder"] = self.image_encoder_class.from_pretrained(
                root / "image_encoder", dtype=torch.float32
            )
        return super().load_text_pipeline(root, dtype, **components)

    def encode(
        self, pipeline: Any, prompt: str, max_sequence_length: int, *, negative: bool = False
    ) -> dict[str, torch.Tensor]:
        """`prompt_embeds (max_sequence_length, D)` of UMT5, zeros after the text.

        The zeros are not masked: the model was trained with them.
        """
        # Image-to-video's own takes for granted that ftfy is installed (diffusers 0.42).
        embeds = WanPipeline._get_t5_prompt_embeds(
            pipeline, prompt, max_sequence_length=max_sequence_length
        )
        return {"prompt_embeds": embeds[0].contiguous()}

    def encode_with_images(
        self, pipeline: Any, prompt: str, max_sequence_length: int, images: Sequence[Image.Image]
    ) -> dict[str, torch.Tensor]:
        """`prompt_embeds (512, D)`, and `image_embeds (257, D)` of CLIP, one after the other."""
        text = self.encode(pipeline, prompt, max_sequence_length)["prompt_embeds"]
        seen = pipeline.encode_image(list(images), text.device)
        filled = functional.pad(text, (0, 0, 0, WITH_FRAME - len(text)))
        return {"prompt_embeds": filled, _IMAGE: seen.flatten(0, 1).contiguous()}

    def predict(
        self,
        transformer: Any,
        noisy: torch.Tensor,
        level: torch.Tensor,
        condition: dict[str, torch.Tensor],
        guidance: float,
    ) -> torch.Tensor:
        if BEGINNING in condition:
            beginning = condition[BEGINNING].to(noisy.dtype)
            noisy = torch.cat([noisy, self._given(beginning), beginning], dim=1)
        # For TI2V-5B, the pipeline repeats the timestep for each token: it can hold the tokens of a
        # given frame back. Without one this says the same, and takes less memory.
        noisy, mask = insert_first_frame(noisy, condition)
        timestep = level * 1000
        if mask is not None:
            timestep = timestep[:, None] * mask[:, ::2, ::2].flatten()
        if beside := references_in(condition):
            return transformer(
                hidden_states=noisy,
                timestep=timestep,
                encoder_hidden_states=condition["prompt_embeds"],
                control_hidden_states=_control(*(part.to(noisy.dtype) for part in beside)),
                return_dict=False,
            )[0]
        seen = condition.get(_IMAGE)
        if seen is not None and self.last_frame:  # the model joins each sample's two again
            seen = seen.unflatten(1, (2, -1)).flatten(0, 1)
        return transformer(
            hidden_states=noisy,
            timestep=timestep,
            encoder_hidden_states=condition["prompt_embeds"],
            encoder_hidden_states_image=seen,
            return_dict=False,
        )[0]

    # -- sampling --------------------------------------------------------------------------

    def sample_arguments(
        self,
        request: SampleRequest,
        condition: dict[str, torch.Tensor],
        negative: dict[str, torch.Tensor] | None,
    ) -> dict[str, Any]:
        """All but CLIP's output: the pipeline does not take an image together with that.

        Wan 2.2's text-to-video has a guidance for each expert as published. Any other that a job
        sets is for both.
        """
        arguments = super().sample_arguments(request, condition, negative)
        high, low = T2V_GUIDANCE
        of_text = self.pipeline_class() is WanPipeline
        if self._boundary is not None and of_text and request.guidance == high:
            arguments["guidance_scale_2"] = low
        return {name: value for name, value in arguments.items() if not name.endswith(_IMAGE)}

    def pipeline_with_image(
        self, pipeline: Any, condition: Mapping[str, torch.Tensor] | None = None
    ) -> Any:
        """Image-to-video's, with the image encoder's output, computed already, in its place.

        VACE's is the usual one.
        """
        if self._controlled:
            return pipeline
        parts = {name: part for name, part in pipeline.components.items() if part is not None}
        encoded = (condition or {}).get(_IMAGE)
        if encoded is not None:
            each = encoded.unflatten(0, (1 + self.last_frame, -1))
            parts |= {"image_processor": _no_pixels, "image_encoder": _Precomputed(each)}
        settings = {"boundary_ratio": self._boundary, "expand_timesteps": not self._only_first}
        return WanImageToVideoPipeline(
            **dict.fromkeys(("tokenizer", "text_encoder")) | parts, **settings
        )

    def reference_arguments(self, pictures: Sequence[Conditioning]) -> dict[str, Any]:
        """Return the pipeline's arguments: VACE's are a control video, its mask, and images.

        Its pipeline puts each image before those that it was given earlier, so that the last one
        comes first; the authors' code, and training, have them as they are given.
        """
        if self._controlled:
            videos = [each for each in pictures if isinstance(each, list)]
            images = [each for each in pictures if not isinstance(each, list)]
            return {
                **dict(zip(("video", "mask"), videos, strict=False)),
                **({"reference_images": images[::-1]} if images else {}),
            }
        last = {"last_image": pictures[1]} if self.last_frame else {}
        return {"image": pictures[0], **last}

    def decode(
        self, pipeline: Any, latents: torch.Tensor, request: SampleRequest
    ) -> list[Image.Image]:
        """Return the frames, without those of VACE's reference images, which come first."""
        before = request.roles.count("reference")
        return super().decode(pipeline, latents[:, :, before:], request)

    def _given(self, beginning: torch.Tensor) -> torch.Tensor:
        """Which frames of latents `(B, C, f, h, w)` are given, `(B, 4, f, h, w)`."""
        batch, _, *size = beginning.shape
        mask = beginning.new_zeros(batch, _MASKS, *size)
        mask[:, :, 0] = 1
        if self.last_frame:
            mask[:, -1, -1] = 1
        return mask

    @property
    def _controlled(self) -> bool:
        """Whether its videos follow a control video (VACE)."""
        return self.transformer_class() is WanVACETransformer3DModel

    @property
    def _only_first(self) -> bool:
        """Whether given frames are in extra channels, and not in their place."""
        return self.pipeline_class() is WanImageToVideoPipeline

    @property
    def image_encoder_class(self) -> Any:
        return CLIPVisionModel if any(self._index.get("image_encoder") or ()) else None

    # -- experts ---------------------------------------------------------------------------

    @property
    def second_denoiser(self) -> str | None:
        """The expert for the other noise levels."""
        if self._boundary is None:
            return None
        return _HIGH if self.component == _LOW else _LOW

    def sigma_range(self) -> tuple[float, float]:
        if self._boundary is None:
            return 0.0, 1.0
        return (0.0, self._boundary) if self.component == _LOW else (self._boundary, 1.0)

    @property
    def _boundary(self) -> float | None:
        """The sigma that parts the experts; None where there is one model for all."""
        ratio = self._index.get("boundary_ratio")
        return None if ratio is None else float(ratio)


class _Precomputed(torch.nn.Module):
    """In the place of an image encoder whose output is known.

    Args:
        embeds: `(n, 257, D)`.
    """

    def __init__(self, embeds: torch.Tensor) -> None:
        super().__init__()
        self._embeds = embeds
        self.device = embeds.device  # pipelines ask their modules

    def forward(self, **_: Any) -> SimpleNamespace:
        """Return the embeddings as the last layer but one, which the pipeline takes."""
        return SimpleNamespace(hidden_states=(self._embeds, None))


def _control(video: torch.Tensor, *images: torch.Tensor) -> torch.Tensor:
    """Return what VACE's control blocks are given, `(B, 96, n + f, h, w)`.

    The last channels are the mask, with one for each pixel of a cell. Without one, all of the video
    is left to the model; nothing of the images is.

    Args:
        video: Latents of what is kept and of what is left, `(B, 32, f, h, w)`; then the mask, if
            there is one.
        images: Latents of n reference images, each `(B, 16, 1, h, w)`.
    """
    batch, channels, *size = video.shape
    if channels < _CELL**2:
        video = torch.cat([video, video.new_ones(batch, _CELL**2, *size)], dim=1)
    if not images:
        return video
    beside = video.shape[1] - images[0].shape[1]
    empty = video.new_zeros(batch, beside, 1, *size[1:])
    return torch.cat([*(torch.cat([image, empty], dim=1) for image in images), video], dim=2)


def _no_pixels(images: Any, return_tensors: str) -> BatchFeature:
    """In the place of its image processor."""
    return BatchFeature({})


FAMILY = Wan
