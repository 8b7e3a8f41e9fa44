"""Stable Diffusion XL: a UNet with size conditioning, denoising on a discrete schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from engine.families.shared import sdxl_kohya
from engine.families.shared.clip_family import ClipFamily
from engine.families.shared.lora_names import ComfyUI, Kohya

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.data.index.views import Shown
    from jobs.spec.job_spec import JobSpec

_CELL: Final = 8  # pixels of a latent's side


class SDXL(ClipFamily):
    """Stable Diffusion XL."""

    # Every linear layer of the transformer blocks: both attentions, and the feed-forward.
    LORA_TARGETS = (
        r".*transformer_blocks\.\d+\.(attn[12]\.(to_q|to_k|to_v|to_out\.0)|ff\.net\.(0\.proj|2))"
    )
    KOHYA = Kohya(sdxl_kohya.rename, sdxl_kohya.METADATA)
    COMFYUI = ComfyUI(sdxl_kohya.rename)
    GUIDED_FORWARDS = 1
    NEGATIVES_APART = True

    def encode_together(
        self, pipeline: Any, prompts: Sequence[str], negative: Sequence[bool]
    ) -> dict[str, torch.Tensor]:
        """`prompt_embeds (B, 77, D)` of both CLIPs, `pooled_prompt_embeds (B, P)` of the second.

        Without a negative prompt, the published model is led away from zeros and not from an empty
        text. The encoders run all the same: where they are sharded, ranks call them equally often.
        """
        texts = list(prompts)
        embeds, _, pooled, _ = pipeline.encode_prompt(texts, do_classifier_free_guidance=False)
        if pipeline.config.force_zeros_for_empty_prompt:
            empty = [led and not text for text, led in zip(prompts, negative, strict=True)]
            if any(empty):
                zero = torch.tensor(empty).to(embeds.device, non_blocking=True)
                embeds = embeds.masked_fill(zero[:, None, None], 0)
                pooled = pooled.masked_fill(zero[:, None], 0)
        return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}

    def sizes(self, spec: JobSpec, pictures: Sequence[Shown]) -> dict[str, torch.Tensor]:
        """`time_ids (B, 6)`: the original height and width, the crop's top and left, the target.

        Whole numbers, which no precision narrows.
        """
        if spec.size_conditioning == "target":
            return {}
        rows = [
            (cut.original[1], cut.original[0], cut.top, cut.left, cut.size[1], cut.size[0])
            for cut in pictures
        ]
        return {"time_ids": torch.tensor(rows, dtype=torch.int32)}

    def predict(
        self,
        transformer: Any,
        noisy: torch.Tensor,
        level: torch.Tensor,
        condition: dict[str, torch.Tensor],
        guidance: float,
    ) -> torch.Tensor:
        batch, _, height, width = noisy.shape
        sizes = condition.get("time_ids")
        if sizes is None:
            # As the pipeline's defaults have it: never resized, and cropped nowhere. Filled in on
            # the device: copying it waits.
            sizes = noisy.new_zeros(batch, 6)  # height, width, top, left, height, width
            sizes[:, 0::4], sizes[:, 1::4] = height * _CELL, width * _CELL
        prediction: torch.Tensor = transformer(
            noisy,
            level,
            encoder_hidden_states=condition["prompt_embeds"],
            added_cond_kwargs={
                "text_embeds": condition["pooled_prompt_embeds"],
                "time_ids": sizes,
            },
            return_dict=False,
        )[0]
        return prediction


FAMILY = SDXL
