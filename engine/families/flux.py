"""FLUX.1: packed 2×2 latents, CLIP + T5 text, guidance as an input, rectified flow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from diffusers import FluxControlPipeline, FluxFillPipeline, FluxKontextPipeline, FluxPipeline

from engine.families.shared import flux_kohya
from engine.families.shared.base import TokenLayout
from engine.families.shared.lora_names import ComfyUI, Kohya
from engine.families.shared.packing import PackedFamily, pack, unpack
from engine.families.shared.references import references_in

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from engine.families.shared.lora_names import LoraStyle
    from engine.families.shared.references import Conditioning
    from jobs.spec.job_spec import JobSpec
    from jobs.spec.keys.prompts import SampleRequest


class Flux(PackedFamily):
    """FLUX.1; conditioning images are tokens after the image's own, or extra channels.

    Those of Fill are the latents of what a mask leaves of the image, and the mask's pixels.
    """

    # Every linear layer of the blocks: attention of both streams, and both feed-forwards.
    LORA_TARGETS = (
        r"(transformer_blocks|single_transformer_blocks)\.\d+\."
        r"(attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)"
        r"|ff(_context)?\.net\.(0\.proj|2)|proj_mlp|proj_out)"
    )
    TOKENS = TokenLayout({"image_rotary_emb": (2, 0)})
    KOHYA: LoraStyle | None = Kohya(flux_kohya.rename, flux_kohya.METADATA)
    COMFYUI: LoraStyle | None = ComfyUI(flux_kohya.rename)

    def __init__(
        self,
        name: str,
        flavour: str | None = None,
        root: Path | None = None,
        fps: float | None = None,
    ) -> None:
        super().__init__(name, flavour, root, fps)
        self._widened = self.facts.widened_of(flavour)
        if self._widened:  # those tools have no names for what makes a layer wider
            self.KOHYA = self.COMFYUI = None

    def pipeline_class(self) -> Any:
        """Return Control's pipeline, also for another model that gets its inputs."""
        return FluxControlPipeline if self._widened else super().pipeline_class()

    def lora_targets(self, spec: JobSpec) -> str:
        """With the layer that sees the conditioning image, whose new weights are zero."""
        usual = super().lora_targets(spec)
        return f"{usual}|{self._widened}" if self._widened else usual

    def encode(
        self, pipeline: Any, prompt: str, max_sequence_length: int, *, negative: bool = False
    ) -> dict[str, torch.Tensor]:
        """`prompt_embeds (L, D)` of T5 and `pooled_prompt_embeds (P,)` of CLIP."""
        embeds, pooled, _ = pipeline.encode_prompt(
            prompt=prompt, prompt_2=None, max_sequence_length=max_sequence_length
        )
        return {
            "prompt_embeds": embeds[0].contiguous(),
            "pooled_prompt_embeds": pooled[0].contiguous(),
        }

    def predict(
        self,
        transformer: Any,
        noisy: torch.Tensor,
        level: torch.Tensor,
        condition: dict[str, torch.Tensor],
        guidance: float,
    ) -> torch.Tensor:
        batch, _, height, width = noisy.shape
        # The pipeline's own; it uses no pipeline state. Made on the device: copying them waits.
        with noisy.device:
            image_ids = _places(noisy)
            tokens = pack(noisy)
            references = references_in(condition)
            if transformer.config.in_channels > tokens.shape[2]:
                tokens = torch.cat([tokens, *map(pack, references)], dim=2)
                references = []
            for reference in references:
                beside = _places(reference)
                beside[:, 0] = 1
                image_ids = torch.cat([image_ids, beside])
                tokens = torch.cat([tokens, pack(reference)], dim=1)
        embeds = condition["prompt_embeds"]
        strength = None
        if transformer.config.guidance_embeds:
            strength = torch.full((batch,), guidance, device=noisy.device, dtype=torch.float32)
        velocity = transformer(
            hidden_states=tokens,
            timestep=level,
            guidance=strength,
            pooled_projections=condition["pooled_prompt_embeds"],
            encoder_hidden_states=embeds,
            txt_ids=torch.zeros(embeds.shape[1], 3, device=noisy.device, dtype=noisy.dtype),
            img_ids=image_ids,
            return_dict=False,
        )[0]
        return unpack(velocity[:, : height * width // 4], height, width)

    def reference_arguments(self, pictures: Sequence[Conditioning]) -> dict[str, Any]:
        if self.pipeline_class() is FluxControlPipeline:
            return {"control_image": pictures[0]}
        if self.pipeline_class() is FluxFillPipeline:
            return {"image": pictures[0], "mask_image": pictures[1]}
        return {"image": pictures[0], "_auto_resize": False}

    def sample_arguments(
        self,
        request: SampleRequest,
        condition: dict[str, torch.Tensor],
        negative: dict[str, torch.Tensor] | None,
    ) -> dict[str, Any]:
        """`guidance_scale` is the strength that distilled models take as an input."""
        arguments = super().sample_arguments(request, condition, negative)
        if negative is not None:
            arguments["true_cfg_scale"] = request.true_cfg_scale
        if self.pipeline_class() is FluxKontextPipeline:
            # Else it scales every size to the area that it was trained with.
            arguments["max_area"] = request.width * request.height
        return arguments


def _places(latents: torch.Tensor) -> torch.Tensor:
    """Row and column of each token of latents, `(L, 3)`, as the pipeline numbers them."""
    batch, _, height, width = latents.shape
    places: torch.Tensor = FluxPipeline._prepare_latent_image_ids(
        batch, height // 2, width // 2, latents.device, latents.dtype
    )
    return places


FAMILY = Flux
