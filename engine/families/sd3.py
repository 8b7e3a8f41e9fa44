"""Stable Diffusion 3 and 3.5: two CLIPs and T5 side by side, rectified flow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from engine.families.shared.base import Family, TokenLayout
from engine.families.shared.lora_names import ComfyUI, Kohya, Layout
from jobs.errors import UserError
from jobs.run.rundir import read_json

if TYPE_CHECKING:
    from pathlib import Path

    import torch


_LAYOUT: Final = Layout(
    {
        "transformer_blocks.#.attn.to_out.0": "joint_blocks.#.x_block.attn.proj",
        "transformer_blocks.#.attn.to_add_out": "joint_blocks.#.context_block.attn.proj",
        "transformer_blocks.#.attn2.to_out.0": "joint_blocks.#.x_block.attn2.proj",
        "transformer_blocks.#.ff.net.0.proj": "joint_blocks.#.x_block.mlp.fc1",
        "transformer_blocks.#.ff.net.2": "joint_blocks.#.x_block.mlp.fc2",
        "transformer_blocks.#.ff_context.net.0.proj": "joint_blocks.#.context_block.mlp.fc1",
        "transformer_blocks.#.ff_context.net.2": "joint_blocks.#.context_block.mlp.fc2",
        # Not norm1_context: in the last block, its halves are the other way round.
        "transformer_blocks.#.norm1.linear": "joint_blocks.#.x_block.adaLN_modulation.1",
    },
    {
        "joint_blocks.#.x_block.attn.qkv": {
            f"transformer_blocks.#.attn.to_{part}": 1 for part in ("q", "k", "v")
        },
        "joint_blocks.#.context_block.attn.qkv": {
            f"transformer_blocks.#.attn.add_{part}_proj": 1 for part in ("q", "k", "v")
        },
        "joint_blocks.#.x_block.attn2.qkv": {
            f"transformer_blocks.#.attn2.to_{part}": 1 for part in ("q", "k", "v")
        },
    },
)


class SD3(Family):
    """Stable Diffusion 3 and 3.5."""

    # Every linear layer of the blocks: attention of both streams, 3.5 medium's second attention
    # over images alone, and both feed-forwards.
    LORA_TARGETS = (
        r"transformer_blocks\.\d+\."
        r"(attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)"
        r"|attn2\.(to_q|to_k|to_v|to_out\.0)|ff(_context)?\.net\.(0\.proj|2))"
    )
    TOKENS = TokenLayout()
    KOHYA = Kohya(_LAYOUT.rename, {"ss_network_module": "networks.lora_sd3"})
    COMFYUI = ComfyUI(_LAYOUT.rename)
    GUIDED_FORWARDS = 1

    def load_text_pipeline(self, root: Path, dtype: torch.dtype, **components: Any) -> Any:
        """Return a pipeline with only what encodes prompts.

        Raises:
            UserError: The model was saved without T5; the stock pipeline then asks its
                transformer, which is not loaded yet, how wide the zeros in its place are.
        """
        listed = (read_json(root / "model_index.json") or {}).get("text_encoder_3") or [None]
        if listed[0] is None and components.get("text_encoder_3") is None:
            raise UserError(
                f"{root} has no T5 (text_encoder_3); captions need all three encoders",
                "download the complete model",
            )
        return super().load_text_pipeline(root, dtype, **components)

    def encode(
        self, pipeline: Any, prompt: str, max_sequence_length: int, *, negative: bool = False
    ) -> dict[str, torch.Tensor]:
        """`prompt_embeds (77 + L, D)` of CLIPs and T5, `pooled_prompt_embeds (P,)` of the CLIPs."""
        embeds, _, pooled, _ = pipeline.encode_prompt(
            prompt=prompt,
            prompt_2=None,
            prompt_3=None,
            do_classifier_free_guidance=False,
            max_sequence_length=max_sequence_length,
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
        velocity: torch.Tensor = transformer(
            hidden_states=noisy,
            timestep=level * 1000,
            encoder_hidden_states=condition["prompt_embeds"],
            pooled_projections=condition["pooled_prompt_embeds"],
            return_dict=False,
        )[0]
        return velocity


FAMILY = SD3
