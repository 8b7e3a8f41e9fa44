"""Lumina-Image 2.0: one stream of Gemma's text and the image, and time that runs backward."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.utils.rnn import pad_sequence

from engine.families.shared.base import Family
from engine.families.shared.equal_length import equal_length
from engine.families.shared.lora_names import ComfyUI, Kohya, Layout
from jobs.errors import UserError
from jobs.run.rundir import read_json

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from jobs.spec.keys.prompts import SampleRequest


_BLOCKS: Final = ("layers", "noise_refiner", "context_refiner")
_LAYOUT: Final = Layout(
    {
        f"{blocks}.#.{module}": f"{blocks}.#.{theirs}"
        for blocks in _BLOCKS
        for module, theirs in {
            "attn.to_out.0": "attention.out",
            "feed_forward.linear_1": "feed_forward.w1",
            "feed_forward.linear_2": "feed_forward.w2",
            "feed_forward.linear_3": "feed_forward.w3",
            "norm1.linear": "adaLN_modulation.1",
        }.items()
    }
    | {
        "norm_out.linear_1": "final_layer.adaLN_modulation.1",
        "norm_out.linear_2": "final_layer.linear",
    },
    {
        # Three heads of queries share one of keys and values.
        f"{blocks}.#.attention.qkv": {
            f"{blocks}.#.attn.to_q": 1,
            f"{blocks}.#.attn.to_k": 1 / 3,
            f"{blocks}.#.attn.to_v": 1 / 3,
        }
        for blocks in _BLOCKS
    },
)


class Lumina2(Family):
    """Lumina-Image 2.0."""

    # Every linear layer of the blocks, also of those that refine noise and text by themselves.
    LORA_TARGETS = (
        r"(layers|noise_refiner|context_refiner)\.\d+\."
        r"(attn\.(to_q|to_k|to_v|to_out\.0)|feed_forward\.linear_[123])"
    )
    KOHYA = Kohya(_LAYOUT.rename, {"ss_network_module": "networks.lora_lumina"})
    COMFYUI = ComfyUI(_LAYOUT.rename)
    NEGATIVES_APART = True  # they get no system prompt

    def __init__(
        self,
        name: str,
        flavour: str | None = None,
        root: Path | None = None,
        fps: float | None = None,
    ) -> None:
        super().__init__(name, flavour, root, fps)
        config = read_json(root / self.component / "config.json") if root is not None else None
        # An image's position on the first axis is the number of its text tokens.
        self._positions: int = (config or {}).get("axes_lens", [300])[0]

    def encode(
        self, pipeline: Any, prompt: str, max_sequence_length: int, *, negative: bool = False
    ) -> dict[str, torch.Tensor]:
        """`prompt_embeds (L, D)` of Gemma's last layer but one and `prompt_attention_mask (L,)`.

        L is the prompt's own length: what the pipeline adds behind it is masked everywhere.

        Raises:
            UserError: The model has fewer text positions.
        """
        if max_sequence_length >= self._positions:
            raise UserError(
                f"max_sequence_length {max_sequence_length} is more than the model's "
                f"{self._positions - 1} text positions",
                "set max_sequence_length: 256",
            )
        if negative:
            embeds, mask = pipeline._get_gemma_prompt_embeds(
                prompt, max_sequence_length=max_sequence_length
            )
        else:
            embeds, mask, _, _ = pipeline.encode_prompt(
                prompt, do_classifier_free_guidance=False, max_sequence_length=max_sequence_length
            )
        length = int(mask.sum())
        return {
            "prompt_embeds": embeds[0, :length].clone(),
            "prompt_attention_mask": mask[0, :length].clone(),
        }

    def arrange(self, condition: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Each sample's own text `(L, D)`, by its number: lengths can only be seen on the host."""
        masks = condition.get("prompt_attention_mask")
        if masks is None:
            return condition
        texts = zip(condition["prompt_embeds"], masks.bool(), strict=True)
        return {f"prompt_embeds.{number}": text[mask] for number, (text, mask) in enumerate(texts)}

    def predict(
        self,
        transformer: Any,
        noisy: torch.Tensor,
        level: torch.Tensor,
        condition: dict[str, torch.Tensor],
        guidance: float,
    ) -> torch.Tensor:
        texts = list(self.arrange(condition).values())
        lengths = [len(text) for text in texts]
        places = torch.arange(max(lengths), device=noisy.device)
        mask = torch.stack([places < length for length in lengths])
        with _told_lengths(transformer, lengths):
            # Its time is 0 for noise and 1 for images, and its velocity points from one to the
            # other.
            return -transformer(
                hidden_states=noisy,
                timestep=1 - level,
                encoder_hidden_states=pad_sequence(texts, batch_first=True),
                encoder_attention_mask=mask,
                return_dict=False,
            )[0]

    def sample_arguments(
        self,
        request: SampleRequest,
        condition: dict[str, torch.Tensor],
        negative: dict[str, torch.Tensor] | None,
    ) -> dict[str, Any]:
        """Pad prompts: the pipeline rejects two lengths, though it predicts one at a time."""
        if negative is not None:
            condition, negative = equal_length(condition, negative)
        return super().sample_arguments(request, condition, negative)


@contextmanager
def _told_lengths(transformer: Any, lengths: list[int]) -> Iterator[None]:
    """Within this context, the forward does not wait for the GPU to count tokens of texts.

    Diffusers (0.42) counts them by the mask as it computes positions, for which it copies its
    tables to the GPU each time. And it masks texts where none is shorter than another.
    """
    longest = max(lengths)

    def count(embedder: Any, args: tuple[torch.Tensor, torch.Tensor]) -> Any:
        latents, mask = args
        embedder.freqs_cis = [table.to(latents.device) for table in embedder.freqs_cis]
        on_host = [[place < length for place in range(longest)] for length in lengths]
        return latents, torch.tensor(on_host, dtype=mask.dtype)

    def unmask(_: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        texts, _, *others = args
        return texts, None, *others

    with ExitStack() as stack:
        hooks = [transformer.rope_embedder.register_forward_pre_hook(count)]
        if min(lengths) == longest:
            refiners = transformer.context_refiner
            hooks += [refiner.register_forward_pre_hook(unmask) for refiner in refiners]
        for hook in hooks:
            stack.callback(hook.remove)
        yield


FAMILY = Lumina2
