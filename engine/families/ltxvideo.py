"""LTX-Video: videos as packed tokens, each at its time in seconds and its place in pixels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from diffusers import LTXConditionPipeline, LTXImageToVideoPipeline, LTXPipeline

from engine.families.shared.base import Family, TokenLayout
from engine.families.shared.lora_names import ComfyUI, as_in_diffusers
from engine.families.shared.references import insert_first_frame
from engine.families.shared.text_masks import without_padding
from jobs.run.rundir import read_json

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from PIL import Image

    from jobs.spec.keys.prompts import SampleRequest

# A latent cell of all its autoencoders: side in pixels, and frames.
_SPACE: Final = 32
_TIME: Final = 8

# As published for autoencoders that remove the last noise themselves: how much they are given.
_DECODE: Final = {"decode_timestep": 0.05, "decode_noise_scale": 0.025}


class LTXVideo(Family):
    """LTX-Video: text or first frame to video."""

    # Every linear layer of the blocks: self-attention, cross-attention, feed-forward.
    LORA_TARGETS = (
        r"transformer_blocks\.\d+\.(attn[12]\.(to_q|to_k|to_v|to_out\.0)|ff\.net\.(0\.proj|2))"
    )
    TOKENS = TokenLayout({"image_rotary_emb": (3, 1), "temb": (3, 1)})
    COMFYUI = ComfyUI(as_in_diffusers)
    GUIDED_FORWARDS = 1

    def __init__(
        self,
        name: str,
        flavour: str | None = None,
        root: Path | None = None,
        fps: float | None = None,
    ) -> None:
        super().__init__(name, flavour, root, fps)
        vae = (root and read_json(root / "vae" / "config.json")) or {}
        self._decode: dict[str, float] = _DECODE if vae.get("timestep_conditioning") else {}

    # -- text ------------------------------------------------------------------------------

    def encode(
        self, pipeline: Any, prompt: str, max_sequence_length: int, *, negative: bool = False
    ) -> dict[str, torch.Tensor]:
        """`prompt_embeds (max_sequence_length, D)` of T5 with its mask.

        Filled up, since the pipeline wants prompt and negative prompt to be of one length.
        """
        embeds, mask, *_ = pipeline.encode_prompt(
            prompt, do_classifier_free_guidance=False, max_sequence_length=max_sequence_length
        )
        return {"prompt_embeds": embeds[0].contiguous(), "prompt_attention_mask": mask[0]}

    # -- latents ---------------------------------------------------------------------------

    def normalise(self, vae: Any, latents: torch.Tensor) -> torch.Tensor:
        return LTXPipeline._normalize_latents(
            latents, vae.latents_mean, vae.latents_std, vae.config.scaling_factor
        )

    def denormalise(self, vae: Any, latents: torch.Tensor) -> torch.Tensor:
        return LTXPipeline._denormalize_latents(
            latents, vae.latents_mean, vae.latents_std, vae.config.scaling_factor
        )

    # -- training --------------------------------------------------------------------------

    def arrange(self, condition: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Without the padding that no sample sees; without a mask where none is left to mask."""
        return without_padding(condition)

    def predict(
        self,
        transformer: Any,
        noisy: torch.Tensor,
        level: torch.Tensor,
        condition: dict[str, torch.Tensor],
        guidance: float,
    ) -> torch.Tensor:
        noisy, mask = insert_first_frame(noisy, condition)
        timestep = level * 1000
        if mask is not None:
            timestep = timestep.unsqueeze(-1) * mask.flatten()
        size = noisy.shape[2:]  # frames, height, width
        patches = transformer.config.patch_size, transformer.config.patch_size_t
        velocity = transformer(
            hidden_states=LTXPipeline._pack_latents(noisy, *patches),
            encoder_hidden_states=condition["prompt_embeds"],
            timestep=timestep,
            encoder_attention_mask=condition.get("prompt_attention_mask"),
            **self._places(size, noisy.device, len(noisy)),
            return_dict=False,
        )[0]
        return LTXPipeline._unpack_latents(velocity, *size, *patches)

    def tokens_of(self, height: int, width: int, frames: int = 1) -> int:
        return height * width * frames

    def _places(self, size: torch.Size, device: torch.device, batch: int) -> dict[str, Any]:
        """Return the positions of tokens, as the pipeline passes them."""
        if self.pipeline_class() is LTXPipeline:
            frames, height, width = size
            scale = (_TIME / self.fps, _SPACE, _SPACE)
            return {
                "num_frames": frames,
                "height": height,
                "width": width,
                "rope_interpolation_scale": scale,
            }
        # The first latent frame is a single frame; each has the time of the first frame in it.
        cells = LTXConditionPipeline._prepare_video_ids(batch, *size, device=device)
        coordinates = cells.float()
        # Not by the pipeline's `_scale_video_ids`, which waits for the device.
        coordinates[:, 1:] *= _SPACE
        coordinates[:, 0] = (coordinates[:, 0] * _TIME + 1 - _TIME).clamp(min=0) * (1 / self.fps)
        return {"video_coords": coordinates}

    def pipeline_with_image(
        self, pipeline: Any, condition: Mapping[str, torch.Tensor] | None = None
    ) -> Any:
        """Return the pipeline of the first models; that of the others takes an image itself."""
        if isinstance(pipeline, LTXConditionPipeline):
            return pipeline
        return LTXImageToVideoPipeline(**pipeline.components)

    # -- sampling --------------------------------------------------------------------------

    def sample_arguments(
        self,
        request: SampleRequest,
        condition: dict[str, torch.Tensor],
        negative: dict[str, torch.Tensor] | None,
    ) -> dict[str, Any]:
        """Add the frame rate, which the model uses, and for pixels the settings of the VAE."""
        arguments = super().sample_arguments(request, condition, negative)
        return arguments | {"frame_rate": self.fps} | self._decode

    def unpack(self, pipeline: Any, latents: torch.Tensor, request: SampleRequest) -> torch.Tensor:
        if latents.dim() == 5:  # `LTXConditionPipeline` does it
            return latents
        return LTXPipeline._unpack_latents(
            latents,
            (request.frames - 1) // _TIME + 1,
            request.height // _SPACE,
            request.width // _SPACE,
            pipeline.transformer_spatial_patch_size,
            pipeline.transformer_temporal_patch_size,
        )

    def decode(
        self, pipeline: Any, latents: torch.Tensor, request: SampleRequest
    ) -> list[Image.Image]:
        """With the noise that the pipeline adds, of the same generator as the latents'.

        That has drawn a first frame's latents too by then, and noise for them in each step.
        """
        latents = self.denormalise(pipeline.vae, self.unpack(pipeline, latents, request))
        timestep = None
        if self._decode:
            generator = torch.Generator("cpu").manual_seed(request.seed)
            drawn = [latents.shape]
            if request.conditioning:
                drawn += [latents[:, :, :1].shape, *[latents.shape] * request.steps]
            for shape in drawn:
                torch.randn(shape, generator=generator)
            noise = torch.randn(latents.shape, generator=generator).to(latents.device)
            latents = torch.lerp(latents, noise, self._decode["decode_noise_scale"])
            timestep = latents.new_tensor([self._decode["decode_timestep"]])
        pixels = pipeline.vae.decode(latents, timestep, return_dict=False)[0]
        return pipeline.video_processor.postprocess_video(pixels, output_type="pil")[0]


FAMILY = LTXVideo
