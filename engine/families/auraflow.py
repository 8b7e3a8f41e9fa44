"""AuraFlow: texts of one length from UMT5, rectified flow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from engine.families.shared.base import Family, TokenLayout
from engine.families.shared.lora_names import ComfyUI, Layout
from jobs.errors import UserError

if TYPE_CHECKING:
    import torch

_CELL: Final = 8  # pixels of a latent's side


_IN_BOTH: Final = {"linear_1": "c_fc1", "linear_2": "c_fc2", "out_projection": "c_proj"}
# Of single blocks, what is one stream to diffusers is the first of two to the authors.
_LAYOUT: Final = Layout(
    {
        f"{blocks}.#.{module}": theirs
        for blocks, modules in {
            "joint_transformer_blocks": {
                **{f"attn.to_{part}": f"double_layers.#.attn.w2{part}" for part in "qkv"},
                **{f"attn.add_{part}_proj": f"double_layers.#.attn.w1{part}" for part in "qkv"},
                "attn.to_out.0": "double_layers.#.attn.w2o",
                "attn.to_add_out": "double_layers.#.attn.w1o",
                **{f"ff.{name}": f"double_layers.#.mlpX.{part}" for name, part in _IN_BOTH.items()},
                **{
                    f"ff_context.{name}": f"double_layers.#.mlpC.{part}"
                    for name, part in _IN_BOTH.items()
                },
            },
            "single_transformer_blocks": {
                **{f"attn.to_{part}": f"single_layers.#.attn.w1{part}" for part in "qkv"},
                "attn.to_out.0": "single_layers.#.attn.w1o",
                **{f"ff.{name}": f"single_layers.#.mlp.{part}" for name, part in _IN_BOTH.items()},
            },
        }.items()
        for module, theirs in modules.items()
    }
)


class AuraFlow(Family):
    """AuraFlow."""

    # Every linear layer of the blocks: attention of both streams, and both feed-forwards.
    LORA_TARGETS = (
        r"(joint_transformer_blocks|single_transformer_blocks)\.\d+\."
        r"(attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)"
        r"|ff(_context)?\.(linear_1|linear_2|out_projection))"
    )
    TOKENS = TokenLayout(counted_by="pos_embed")
    COMFYUI = ComfyUI(_LAYOUT.rename)
    GUIDED_FORWARDS = 1

    def encode(
        self, pipeline: Any, prompt: str, max_sequence_length: int, *, negative: bool = False
    ) -> dict[str, torch.Tensor]:
        """`prompt_embeds (L, D)`, zeros after the text's end, and `prompt_attention_mask (L,)`.

        The transformer attends to those zeros: texts are all of one length.
        """
        embeds, mask, _, _ = pipeline.encode_prompt(
            prompt, do_classifier_free_guidance=False, max_sequence_length=max_sequence_length
        )
        # The stock function widens the mask to every number of the embeddings.
        mask = mask.view(embeds.shape[1], -1)[:, 0]
        return {
            "prompt_embeds": embeds[0].contiguous(),
            "prompt_attention_mask": mask.contiguous(),
        }

    def predict(
        self,
        transformer: Any,
        noisy: torch.Tensor,
        level: torch.Tensor,
        condition: dict[str, torch.Tensor],
        guidance: float,
    ) -> torch.Tensor:
        assert self.facts.longest_side is not None
        _check_size(self.facts.longest_side(transformer.config), noisy)
        velocity: torch.Tensor = transformer(
            noisy,
            encoder_hidden_states=condition["prompt_embeds"],
            timestep=level,
            return_dict=False,
        )[0]
        return velocity


def _check_size(longest: int | None, noisy: torch.Tensor) -> None:
    """Refuse images larger than the table of positions: beyond it the model reads other rows.

    Jobs are checked before they start; this protects other callers.

    Raises:
        UserError: The images are too large.
    """
    height, width = (side * _CELL for side in noisy.shape[-2:])
    if longest is not None and max(height, width) > longest:
        raise UserError(
            f"images of {width}x{height} exceed this model's position table, which ends "
            f"at {longest} pixels a side",
            "lower resolution",
        )


FAMILY = AuraFlow
