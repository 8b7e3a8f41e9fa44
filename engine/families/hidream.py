"""HiDream-I1: text of CLIP, T5 and every layer of Llama, experts chosen for each token."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from engine.families.shared.base import Family
from engine.families.shared.hidream_experts import call_every_expert, sizes_on_host
from engine.families.shared.hidream_pipeline import AnySizePipeline
from engine.families.shared.lora_names import ComfyUI, as_in_diffusers
from jobs.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from jobs.spec.job_spec import JobSpec
    from jobs.spec.keys.prompts import SampleRequest


class HiDream(Family):
    """HiDream-I1 Full, Dev and Fast."""

    # Every linear layer that all tokens go through: attention of both streams, the text's
    # feed-forward, the shared experts. Routed experts would be two thirds of the adapter, each
    # trained by the tokens that are sent to it.
    LORA_TARGETS = (
        r"(double_stream_blocks|single_stream_blocks)\.\d+\.block\."
        r"(attn1\.to_(q|k|v|out)(_t)?|ff_t\.w[123]|ff_i\.shared_experts\.w[123])"
    )
    COMFYUI = ComfyUI(as_in_diffusers)
    GUIDED_FORWARDS = 1

    def lora_targets(self, spec: JobSpec) -> str:
        """With the routed experts where the job asks for them; not the gate, which is no layer."""
        if not spec.lora_experts:
            return self.LORA_TARGETS
        return self.LORA_TARGETS.replace("shared_experts", r"(shared_experts|experts\.\d+)")

    def pipeline_class(self) -> Any:
        return AnySizePipeline

    # -- text ------------------------------------------------------------------------------

    def load_text_pipeline(self, root: Path, dtype: torch.dtype, **components: Any) -> Any:
        """With Llama, which the published models' index does not name, from its own directories."""
        for name, part_class, options in (
            ("text_encoder_4", LlamaForCausalLM, {"dtype": dtype}),
            ("tokenizer_4", PreTrainedTokenizerFast, {}),
        ):
            listed = self._index.get(name) or [None]
            if listed[0] is None and name not in components:
                components[name] = part_class.from_pretrained(root / name, **options)
        return super().load_text_pipeline(root, dtype, **components)

    def encode(
        self, pipeline: Any, prompt: str, max_sequence_length: int, *, negative: bool = False
    ) -> dict[str, torch.Tensor]:
        """Return what T5, the two CLIPs and each layer of Llama make of a prompt.

        `prompt_embeds_t5 (L, D)`, `pooled_prompt_embeds (P,)` and `prompt_embeds_llama3
        (layers, L, D)`, which takes 32 MiB with 128 tokens. The model has no masks: it sees what
        texts are filled up with.
        """
        t5, _, llama, _, pooled, _ = pipeline.encode_prompt(
            prompt, do_classifier_free_guidance=False, max_sequence_length=max_sequence_length
        )
        return {
            "prompt_embeds_t5": t5[0].contiguous(),
            "prompt_embeds_llama3": llama[:, 0].contiguous(),
            "pooled_prompt_embeds": pooled[0].contiguous(),
        }

    # -- training --------------------------------------------------------------------------

    def predict(
        self,
        transformer: Any,
        noisy: torch.Tensor,
        level: torch.Tensor,
        condition: dict[str, torch.Tensor],
        guidance: float,
    ) -> torch.Tensor:
        """Return the pipeline's forward, which pads images that are not square with tokens.

        The model attends to these, so they cannot be dropped.

        Raises:
            UserError: An image that is not square has more tokens than the model pads to.
        """
        height, width = noisy.shape[-2:]
        tokens = self.tokens_of(height, width)
        if height != width and tokens > transformer.max_seq:
            raise UserError(
                f"an image of {width * 8}x{height * 8} has {tokens} tokens; the model takes at "
                f"most {transformer.max_seq} for a non-square one",
                f"set resolution: {16 * math.isqrt(transformer.max_seq)}",
            )
        call_every_expert(transformer)
        with sizes_on_host(transformer):
            velocity = transformer(
                hidden_states=noisy,
                timesteps=level * 1000,
                encoder_hidden_states_t5=condition["prompt_embeds_t5"],
                # The transformer wants the layers first.
                encoder_hidden_states_llama3=condition["prompt_embeds_llama3"].transpose(0, 1),
                pooled_embeds=condition["pooled_prompt_embeds"],
                return_dict=False,
            )[0]
        if transformer.training and not transformer.config.force_inference_output:
            velocity = _unpack(velocity, height, width)
        return -velocity

    # -- sampling --------------------------------------------------------------------------

    def sample_arguments(
        self,
        request: SampleRequest,
        condition: dict[str, torch.Tensor],
        negative: dict[str, torch.Tensor] | None,
    ) -> dict[str, Any]:
        arguments = super().sample_arguments(request, condition, negative)
        return {
            name: value.transpose(0, 1) if name.endswith("_llama3") else value
            for name, value in arguments.items()
        }


def _unpack(tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """`(B, C, tokens, 4)`, as the model returns it in training → `(B, C, h, w)`."""
    batch, channels, _, _ = tokens.shape
    rows, columns = height // 2, width // 2
    grid = tokens[:, :, : rows * columns].reshape(batch, channels, rows, columns, 2, 2)
    return grid.permute(0, 1, 2, 4, 3, 5).reshape(batch, channels, height, width)


FAMILY = HiDream
