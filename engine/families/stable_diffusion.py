"""Stable Diffusion 1 and 2: a UNet with one CLIP, denoising on a discrete schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from engine.families.sdxl import SDXL
from engine.families.shared.clip_family import ClipFamily
from engine.families.shared.lora_names import ComfyUI, Kohya, as_in_diffusers
from engine.families.shared.sdxl_kohya import rename_of_four_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch

# Parts that check finished images, and one for images as prompts: no sample needs them.
_UNUSED: Final = ("safety_checker", "feature_extractor", "image_encoder")


class StableDiffusion(ClipFamily):
    """Stable Diffusion 1 and 2."""

    LORA_TARGETS = SDXL.LORA_TARGETS
    # Kohya's scripts train the UNet of diffusers here, and not Stability's as for SDXL.
    KOHYA = Kohya(as_in_diffusers, {"ss_network_module": "networks.lora"})
    COMFYUI = ComfyUI(rename_of_four_blocks)
    GUIDED_FORWARDS = 1

    def encode_together(
        self, pipeline: Any, prompts: Sequence[str], negative: Sequence[bool]
    ) -> dict[str, torch.Tensor]:
        """`prompt_embeds (B, 77, D)`; a negative prompt that is not set is the empty text."""
        embeds, _ = pipeline.encode_prompt(
            list(prompts),
            device=pipeline._execution_device,
            num_images_per_prompt=1,
            do_classifier_free_guidance=False,
        )
        return {"prompt_embeds": embeds}

    def load_text_pipeline(self, root: Path, dtype: torch.dtype, **components: Any) -> Any:
        return super().load_text_pipeline(root, dtype, **_without_checks() | components)

    def predict(
        self,
        transformer: Any,
        noisy: torch.Tensor,
        level: torch.Tensor,
        condition: dict[str, torch.Tensor],
        guidance: float,
    ) -> torch.Tensor:
        prediction: torch.Tensor = transformer(
            noisy, level, encoder_hidden_states=condition["prompt_embeds"], return_dict=False
        )[0]
        return prediction

    def sampling_pipeline(
        self, root: Path, transformer: Any, vae: Any, /, **components: Any
    ) -> Any:
        return super().sampling_pipeline(root, transformer, vae, **_without_checks() | components)


def _without_checks() -> dict[str, Any]:
    return {**dict.fromkeys(_UNUSED), "requires_safety_checker": False}


FAMILY = StableDiffusion
