"""FLUX.2: 2×2 latents as one of 128 channels, normed by the VAE's batch norm, a language model's
inner layers as text, rectified flow.

`dev` (Mistral, `Flux2Pipeline`) takes guidance as an input. `klein` (Qwen3, `Flux2KleinPipeline`)
takes none, and its base models are guided by a second prediction.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import torch
from diffusers import Flux2Pipeline
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu
from transformers import Mistral3ForConditionalGeneration, PreTrainedTokenizerFast

from engine.families.shared.base import TokenLayout
from engine.families.shared.flux2_latents import Flux2LatentsFamily, grid
from engine.families.shared.lora_names import ComfyUI, Kohya, Layout
from engine.families.shared.references import references_in

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.spec.keys.prompts import SampleRequest

# The pipelines' shift depends on the number of steps too. This is the number that the models which
# are not distilled are published with.
_STEPS: Final = 50


_LAYOUT: Final = Layout(
    {
        "transformer_blocks.#.attn.to_out.0": "double_blocks.#.img_attn.proj",
        "transformer_blocks.#.attn.to_add_out": "double_blocks.#.txt_attn.proj",
        "transformer_blocks.#.ff.linear_in": "double_blocks.#.img_mlp.0",
        "transformer_blocks.#.ff.linear_out": "double_blocks.#.img_mlp.2",
        "transformer_blocks.#.ff_context.linear_in": "double_blocks.#.txt_mlp.0",
        "transformer_blocks.#.ff_context.linear_out": "double_blocks.#.txt_mlp.2",
        "single_transformer_blocks.#.attn.to_qkv_mlp_proj": "single_blocks.#.linear1",
        "single_transformer_blocks.#.attn.to_out": "single_blocks.#.linear2",
    },
    {
        "double_blocks.#.img_attn.qkv": {
            f"transformer_blocks.#.attn.to_{part}": 1 for part in ("q", "k", "v")
        },
        "double_blocks.#.txt_attn.qkv": {
            f"transformer_blocks.#.attn.add_{part}_proj": 1 for part in ("q", "k", "v")
        },
    },
)


class Flux2(Flux2LatentsFamily):
    """FLUX.2. Conditioning images are tokens after the image's own, at later time positions."""

    # Every linear layer of the blocks: attention of both streams and their feed-forwards; single
    # blocks have one before attention and one after.
    LORA_TARGETS = (
        r"transformer_blocks\.\d+\."
        r"(attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)"
        r"|ff(_context)?\.linear_(in|out))"
        r"|single_transformer_blocks\.\d+\.attn\.(to_qkv_mlp_proj|to_out)"
    )
    TOKENS = TokenLayout({"image_rotary_emb": (2, 0)}, counted_by="x_embedder")
    KOHYA = Kohya(_LAYOUT.rename, {"ss_network_module": "networks.lora_flux_2"})
    COMFYUI = ComfyUI(_LAYOUT.rename)

    @property
    def _klein(self) -> bool:
        return self.pipeline_class() is not Flux2Pipeline

    @property
    def _guided(self) -> bool:
        """Whether the pipeline guides by a second prediction."""
        return self._klein and not self._index.get("is_distilled")

    # -- text ------------------------------------------------------------------------------

    def load_text_pipeline(self, root: Path, dtype: torch.dtype, **components: Any) -> Any:
        """Return a pipeline with only what encodes prompts.

        For `dev`, only the tokenizer: its `PixtralProcessor` also handles images, for which it
        needs torchvision, but it encodes texts with this tokenizer alone.
        """
        if self._klein:
            return super().load_text_pipeline(root, dtype, **components)
        encoder = components.get("text_encoder")
        if encoder is None:
            encoder = Mistral3ForConditionalGeneration.from_pretrained(
                root / "text_encoder", dtype=dtype
            )
        # By its class: transformers 5 takes the one that tokenizer_config.json names for another.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(root / "tokenizer")
        return Flux2Pipeline(
            scheduler=None, vae=None, transformer=None, text_encoder=encoder, tokenizer=tokenizer
        )

    def encode(
        self, pipeline: Any, prompt: str, max_sequence_length: int, *, negative: bool = False
    ) -> dict[str, torch.Tensor]:
        """`prompt_embeds (L, 3·D)`: three layers of the language model, padding included."""
        embeds, _ = pipeline.encode_prompt(prompt=prompt, max_sequence_length=max_sequence_length)
        return {"prompt_embeds": embeds[0].contiguous()}

    # -- training --------------------------------------------------------------------------

    def sampler_shift_of(self, height: int, width: int, frames: int = 1) -> float:
        """By the pipeline's own formula, not by the points in the scheduler's settings."""
        if not self._schedule.get("use_dynamic_shifting"):
            return super().sampler_shift_of(height, width, frames)
        return math.exp(compute_empirical_mu(self.tokens_of(height, width, frames), _STEPS))

    def predict(
        self,
        transformer: Any,
        noisy: torch.Tensor,
        level: torch.Tensor,
        condition: dict[str, torch.Tensor],
        guidance: float,
    ) -> torch.Tensor:
        embeds = condition["prompt_embeds"]
        strength = None
        if transformer.config.guidance_embeds:
            strength = torch.full((len(noisy),), guidance, device=noisy.device)
        with noisy.device:  # created there, since a copy would wait
            text_ids = Flux2Pipeline._prepare_text_ids(embeds)
            image_ids = Flux2Pipeline._prepare_latent_ids(noisy)
            tokens = Flux2Pipeline._pack_latents(noisy)
            if references := references_in(condition):
                places = Flux2Pipeline._prepare_image_ids([latents[:1] for latents in references])
                image_ids = torch.cat([image_ids, places.expand(len(noisy), -1, -1)], dim=1)
                beside = [Flux2Pipeline._pack_latents(latents) for latents in references]
                tokens = torch.cat([tokens, *beside], dim=1)
        velocity = transformer(
            hidden_states=tokens,
            timestep=level,
            guidance=strength,
            encoder_hidden_states=embeds,
            txt_ids=text_ids,
            img_ids=image_ids,
            return_dict=False,
        )[0]
        height, width = noisy.shape[2:]
        return grid(velocity[:, : height * width], height, width)

    # -- sampling --------------------------------------------------------------------------

    def sample_arguments(
        self,
        request: SampleRequest,
        condition: dict[str, torch.Tensor],
        negative: dict[str, torch.Tensor] | None,
    ) -> dict[str, Any]:
        """As the model's own pipeline takes it, whatever flavour the job says that it is.

        A pipeline that guides and got no negative prompt would want to encode one.
        """
        guided = self._guided and negative is not None
        arguments = super().sample_arguments(request, condition, negative if guided else None)
        if self._klein and not guided:
            arguments["guidance_scale"] = 1.0
        return arguments

    def forwards_per_step(self, request: SampleRequest) -> int:
        return 2 if self._guided and request.guided else 1

    def unpack(self, pipeline: Any, latents: torch.Tensor, request: SampleRequest) -> torch.Tensor:
        if latents.dim() == 4:  # klein's pipeline returns what the VAE decodes
            return self.normalise(pipeline.vae, latents)
        return super().unpack(pipeline, latents, request)


FAMILY = Flux2
