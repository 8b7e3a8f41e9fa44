"""Z-Image: one stream of image and text, text of any length, time that runs backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from engine.families.shared.base import Family, TokenLayout
from engine.families.shared.lora_names import ComfyUI, Kohya, Layout, as_in_diffusers

if TYPE_CHECKING:
    from jobs.spec.keys.prompts import SampleRequest


_BLOCKS: Final = ("layers", "noise_refiner", "context_refiner")
_LAYOUT: Final = Layout(
    {
        f"{blocks}.#.{module}": f"{blocks}.#.{theirs}"
        for blocks in _BLOCKS
        for module, theirs in {
            "attention.to_out.0": "attention.out",
            "feed_forward.w1": "feed_forward.w1",
            "feed_forward.w2": "feed_forward.w2",
            "feed_forward.w3": "feed_forward.w3",
        }.items()
    },
    {
        f"{blocks}.#.attention.qkv": {
            f"{blocks}.#.attention.to_{part}": 1 for part in ("q", "k", "v")
        }
        for blocks in _BLOCKS
    },
)


class ZImage(Family):
    """Z-Image and Z-Image Turbo."""

    # Every linear layer of the blocks: attention and feed-forward, also in the blocks that see
    # only the image or only the text.
    LORA_TARGETS = (
        r"(layers|noise_refiner|context_refiner)\.\d+\."
        r"(attention\.(to_q|to_k|to_v|to_out\.0)|feed_forward\.(w1|w2|w3))"
    )
    TOKENS = TokenLayout(
        {"attn_mask": (2, 1), "freqs_cis": (3, 1)}, text_first=False, counted_by="noise_refiner.0"
    )
    KOHYA = Kohya(as_in_diffusers, {"ss_network_module": "networks.lora_zimage"})
    COMFYUI = ComfyUI(_LAYOUT.rename)
    COMFYUI_READS_KOHYA = False  # musubi-tuner names modules as diffusers does
    GUIDED_FORWARDS = 1

    def encode(
        self, pipeline: Any, prompt: str, max_sequence_length: int, *, negative: bool = False
    ) -> dict[str, torch.Tensor]:
        """`prompt_embeds (L, D)` and `prompt_embeds_mask (L,)`; L is as long as the prompt."""
        (embeds,), _ = pipeline.encode_prompt(
            prompt=prompt,
            do_classifier_free_guidance=False,
            max_sequence_length=max_sequence_length,
        )
        mask = torch.ones(len(embeds), dtype=torch.bool, device=embeds.device)
        return {"prompt_embeds": embeds.contiguous(), "prompt_embeds_mask": mask}

    def arrange(self, condition: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Each sample's own text `(L, D)`, by its number: lengths can only be seen on the host."""
        if "prompt_embeds_mask" not in condition:
            return condition
        masks = condition["prompt_embeds_mask"].bool()
        texts = zip(condition["prompt_embeds"], masks, strict=True)
        return {f"prompt_embeds.{number}": text[mask] for number, (text, mask) in enumerate(texts)}

    def predict(
        self,
        transformer: Any,
        noisy: torch.Tensor,
        level: torch.Tensor,
        condition: dict[str, torch.Tensor],
        guidance: float,
    ) -> torch.Tensor:
        # It takes each sample's own text, and fills up by itself: with a token that it learned.
        texts = list(self.arrange(condition).values())
        velocities = transformer(
            list(noisy.unsqueeze(2)),  # videos of one frame
            1 - level,  # its time is 1 for data
            texts,
            return_dict=False,
        )[0]
        return -torch.stack(velocities).squeeze(2)

    def sample_arguments(
        self,
        request: SampleRequest,
        condition: dict[str, torch.Tensor],
        negative: dict[str, torch.Tensor] | None,
    ) -> dict[str, Any]:
        """Texts as lists, without masks."""
        arguments: dict[str, Any] = {"guidance_scale": request.guidance}
        for name, text in (
            ("prompt_embeds", condition),
            ("negative_prompt_embeds", negative),
        ):
            if text:
                arguments[name] = [text["prompt_embeds"][text["prompt_embeds_mask"].bool()]]
        return arguments


FAMILY = ZImage
