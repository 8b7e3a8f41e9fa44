"""Chroma: packed latents as FLUX.1, T5 text with its padding masked, rectified flow.

Two things of diffusers (0.42) are bent here. Its pipeline gives the mask as numbers, which
attention adds to its scores: padding would weigh less by a factor of e instead of nothing, and most
of a short caption's attention would go there. And its blocks leave padding with nothing to attend
to, for which some attention kernels have NaN.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

import torch
from diffusers import ChromaPipeline
from diffusers.models.transformers.transformer_chroma import ChromaSingleTransformerBlock
from diffusers.models.transformers.transformer_flux import FluxAttention, FluxAttnProcessor

from engine.families.shared import flux_kohya
from engine.families.shared.base import TokenLayout
from engine.families.shared.lora_names import ComfyUI, Kohya
from engine.families.shared.packing import PackedFamily, pack, unpack
from engine.families.shared.text_masks import fill_masks, without_masked, without_padding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobs.spec.keys.prompts import SampleRequest

_MASK: Final = "prompt_attention_mask"


class MaskedChromaPipeline(ChromaPipeline):
    """The stock pipeline with a mask of text tokens that masks; also for negative prompts.

    It also takes encoded prompts without masks, as having no padding.
    """

    def _get_t5_prompt_embeds(self, *words: Any, **names: Any) -> tuple[torch.Tensor, torch.Tensor]:
        embeds, mask = super()._get_t5_prompt_embeds(*words, **names)
        return embeds, mask.bool()

    # Docstring and signature are those of the stock pipeline.
    @wraps(ChromaPipeline.__call__)
    def __call__(self, *words: Any, **names: Any) -> Any:
        scale, texts = names.get("guidance_scale"), {_MASK: "prompt_embeds"}
        if words or not fill_masks(names, texts, guided=scale is None or scale > 1):
            return super().__call__(*words, **names)

        def unmask(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return args, kwargs | {"attention_mask": None}

        hook = self.transformer.register_forward_pre_hook(unmask, with_kwargs=True)
        try:
            return super().__call__(*words, **names)
        finally:
            hook.remove()


class Chroma(PackedFamily):
    """Chroma1."""

    # Every linear layer of the blocks: attention of both streams, and both feed-forwards.
    LORA_TARGETS = (
        r"(transformer_blocks|single_transformer_blocks)\.\d+\."
        r"(attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)"
        r"|ff(_context)?\.net\.(0\.proj|2)|proj_mlp|proj_out)"
    )
    TOKENS = TokenLayout(
        {"image_rotary_emb": (2, 0), "attention_mask": (2, 1)}, counted_by="x_embedder"
    )
    # Its blocks are those of FLUX.1, by name and by what is fused.
    KOHYA = Kohya(
        flux_kohya.rename,
        {"ss_network_module": "networks.lora_flux", "ss_base_model_version": "chroma"},
    )
    COMFYUI = ComfyUI(flux_kohya.rename)

    def pipeline_class(self) -> Any:
        return MaskedChromaPipeline

    def encode(
        self, pipeline: Any, prompt: str, max_sequence_length: int, *, negative: bool = False
    ) -> dict[str, torch.Tensor]:
        """`prompt_embeds (L, D)` of T5 and `prompt_attention_mask (L,)`, all of one length.

        Padding is masked but for its first token, as the model was trained.
        """
        embeds, _, mask, *_ = pipeline.encode_prompt(
            prompt=prompt,
            do_classifier_free_guidance=False,
            max_sequence_length=max_sequence_length,
        )
        return {
            "prompt_embeds": embeds[0].contiguous(),
            _MASK: mask[0].contiguous(),
        }

    def arrange(self, condition: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Without the padding that no sample sees; without a mask where none is left to mask.

        Tokens of text have no positions, so this changes nothing but speed: fewer tokens, and
        kernels that take no mask.
        """
        return without_padding(condition)

    def predict(
        self,
        transformer: Any,
        noisy: torch.Tensor,
        level: torch.Tensor,
        condition: dict[str, torch.Tensor],
        guidance: float,
    ) -> torch.Tensor:
        batch, _, height, width = noisy.shape
        embeds, tokens = condition["prompt_embeds"], pack(noisy)
        mask = condition.get(_MASK)
        if mask is not None:
            seen = torch.ones(tokens.shape[:2], dtype=torch.bool, device=noisy.device)
            mask = torch.cat([mask, seen], dim=1)  # as the pipeline
            _attend_to_seen(transformer)
        # The pipeline's own; it uses no pipeline state. Made on the device: copying them waits.
        with noisy.device:
            image_ids = ChromaPipeline._prepare_latent_image_ids(
                batch, height // 2, width // 2, noisy.device, noisy.dtype
            )
        with _masked_when_checkpointed(transformer, mask), _guided_on_device(transformer, noisy):
            velocity = transformer(
                hidden_states=tokens,
                timestep=level,
                encoder_hidden_states=embeds,
                txt_ids=torch.zeros(embeds.shape[1], 3, device=noisy.device, dtype=noisy.dtype),
                img_ids=image_ids,
                attention_mask=mask,
                return_dict=False,
            )[0]
        return unpack(velocity, height, width)

    def sample_arguments(
        self,
        request: SampleRequest,
        condition: dict[str, torch.Tensor],
        negative: dict[str, torch.Tensor] | None,
    ) -> dict[str, Any]:
        """Each text without its padding, and without a mask, which would mask nothing."""
        seen = without_masked(condition, _MASK)
        return super().sample_arguments(request, seen, negative and without_masked(negative, _MASK))


class _SeenKeys(FluxAttnProcessor):
    """Attention in which every token, padding too, attends to the tokens that are not masked."""

    def __call__(
        self,
        attn: FluxAttention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: torch.Tensor | None = None,
    ) -> Any:
        if attention_mask is not None:  # (B, 1, L, L): a pair is seen if both tokens are
            attention_mask = attention_mask.any(dim=-2, keepdim=True)  # (B, 1, 1, L)
        return super().__call__(
            attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
        )


def _attend_to_seen(transformer: torch.nn.Module) -> None:
    """Have a model's attention leave no token without anything to attend to."""
    for module in transformer.modules():
        if isinstance(module, FluxAttention) and type(module.processor) is FluxAttnProcessor:
            processor = _SeenKeys()
            processor.__dict__.update(vars(module.processor))  # the kernel that was chosen
            module.set_processor(processor)


@contextmanager
def _guided_on_device(transformer: Any, noisy: torch.Tensor) -> Iterator[None]:
    """Within this context the guidance that is embedded, always 0, is made where it is needed.

    Diffusers (0.42) embeds it on the host and copies that, which waits for the GPU.
    """

    def zeros(_: Any, args: tuple[torch.Tensor]) -> torch.Tensor:
        return torch.zeros(args[0].shape, dtype=args[0].dtype, device=noisy.device)

    hook = transformer.time_text_embed.guidance_proj.register_forward_pre_hook(zeros)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _masked_when_checkpointed(transformer: Any, mask: torch.Tensor | None) -> Iterator[None]:
    """Within this context single-stream blocks get the mask also under gradient checkpointing.

    There, diffusers (0.42) calls them without, and the model would be trained on other attention
    than it samples with. What is recomputed in backward gets what was given here.
    """
    if mask is None or not transformer.gradient_checkpointing:
        yield
        return
    run = transformer._gradient_checkpointing_func

    def run_masked(block: torch.nn.Module, *inputs: Any) -> Any:
        if isinstance(block, ChromaSingleTransformerBlock) and len(inputs) == 3:
            inputs = (*inputs, mask)
        return run(block, *inputs)

    transformer._gradient_checkpointing_func = run_masked
    try:
        yield
    finally:
        transformer._gradient_checkpointing_func = run


FAMILY = Chroma
