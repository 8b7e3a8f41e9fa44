"""Ideogram 4: one stream of text and image, and a second transformer for what guides.

The unconditional transformer sees no text; it samples with the trained one and stays as it is, as
in diffusers' script (`train_dreambooth_lora_ideogram4.py`) and musubi-tuner. Inputs, target and
noise are theirs too. The authors publish no trainer.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

import torch
from diffusers import Ideogram4Pipeline
from diffusers.models.transformers.transformer_ideogram4 import (
    IMAGE_POSITION_OFFSET,
    LLM_TOKEN_INDICATOR,
    OUTPUT_IMAGE_INDICATOR,
    SEQUENCE_PADDING_INDICATOR,
)
from diffusers.pipelines.ideogram4.pipeline_ideogram4 import QWEN3_VL_ACTIVATION_LAYERS
from torch.nn import functional

from engine.families.shared.base import Family
from engine.families.shared.function_window import NoMask, window
from engine.families.shared.lora_names import ComfyUI, Kohya, Layout
from engine.families.shared.text_masks import without_padding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobs.spec.keys.prompts import SampleRequest

_MASK: Final = "prompt_embeds_mask"
_OTHER: Final = "unconditional_transformer"
_BASE_SIDE: Final = 32  # tokens a side of 512 pixels, where the pipeline does not shift

# Names of the authors' model, which diffusers reads too
# (`_convert_non_diffusers_ideogram4_lora_to_diffusers`).
_LAYOUT: Final = Layout(
    {
        "layers.#.attention.to_out.0": "layers.#.attention.o",
        **{f"layers.#.feed_forward.w{n}": f"layers.#.feed_forward.w{n}" for n in (1, 2, 3)},
        "layers.#.adaln_modulation": "layers.#.adaln_modulation",
    },
    {"layers.#.attention.qkv": {f"layers.#.attention.to_{part}": 1 for part in ("q", "k", "v")}},
)


class EncodedPipeline(Ideogram4Pipeline):
    """The stock pipeline, which also takes an encoded prompt, of its own length."""

    # `from_pretrained` reads the names and classes of a pipeline's components from its signature.
    @wraps(Ideogram4Pipeline.__init__)  # type: ignore[misc]
    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self._encoded: torch.Tensor | None = None

    @wraps(Ideogram4Pipeline.__call__)
    def __call__(self, *words: Any, prompt_embeds: torch.Tensor | None = None, **names: Any) -> Any:
        if prompt_embeds is None:
            return super().__call__(*words, **names)
        self._encoded = prompt_embeds
        names |= {"prompt": "", "max_sequence_length": prompt_embeds.shape[1]}
        try:
            with ExitStack() as stack:
                for model in (self.transformer, self.unconditional_transformer):
                    stack.enter_context(_called(model, masked=False))
                return super().__call__(**names)
        finally:
            self._encoded = None

    @wraps(Ideogram4Pipeline.encode_prompt)
    def encode_prompt(self, *words: Any, **names: Any) -> Any:
        text = self._encoded
        if text is None:
            return super().encode_prompt(*words, **names)
        height, width, length = names["grid_h"], names["grid_w"], text.shape[1]
        with text.device:
            places, samples, kinds = _layout(1, length, height, width)
        return functional.pad(text, (0, 0, 0, height * width)), places, samples, kinds


@contextmanager
def _called(transformer: Any, *, masked: bool) -> Iterator[None]:
    """While active, attention gets a mask only if samples have padding, and times may be exact.

    Diffusers (0.42) always makes a mask of tokens times tokens, which rules out flash attention.
    And it embeds times in their own precision, which here may be another than the model's.
    """

    def narrow(layer: Any, args: tuple[torch.Tensor]) -> torch.Tensor:
        return args[0].to(layer.weight.dtype)

    with ExitStack() as stack:
        hook = transformer.t_embedding.mlp_in.register_forward_pre_hook(narrow)
        stack.callback(hook.remove)
        if not masked:
            begins = transformer.rotary_emb.register_forward_hook
            stack.enter_context(window(begins, transformer.layers[0], NoMask))
        yield


class Ideogram4(Family):
    """Ideogram 4."""

    # Every linear layer of the blocks but the modulation, as diffusers' script and musubi-tuner.
    LORA_TARGETS = r"layers\.\d+\.(attention\.to_(q|k|v|out\.0)|feed_forward\.w[123])"
    MODULATION = r"(^|\.)adaln_modulation(\.|$)"
    KOHYA = Kohya(_LAYOUT.rename, {"ss_network_module": "networks.lora_ideogram4"})
    COMFYUI = ComfyUI(_LAYOUT.rename, lokr=None)

    def pipeline_class(self) -> Any:
        return EncodedPipeline

    @property
    def second_denoiser(self) -> str | None:
        """The transformer that sees no text."""
        return _OTHER

    def encode(
        self, pipeline: Any, prompt: str, max_sequence_length: int, *, negative: bool = False
    ) -> dict[str, torch.Tensor]:
        """`prompt_embeds (L, 13·D)` of 13 layers and `prompt_embeds_mask (L,)`.

        L is the text's own length with its template. Longer prompts are cut, which the pipeline
        refuses.
        """
        tokenizer = pipeline.tokenizer
        over = len(_tokens(tokenizer, prompt)) - max_sequence_length
        if over > 0:
            ends = tokenizer(prompt, add_special_tokens=False, return_offsets_mapping=True)
            prompt = prompt[: ends["offset_mapping"][-over - 1][1]]
        ids = torch.tensor([_tokens(tokenizer, prompt)], device=pipeline.text_encoder.device)
        states = _layers_of(pipeline.text_encoder, ids)
        mask = torch.ones(ids.shape[1], dtype=torch.bool, device=ids.device)
        return {"prompt_embeds": torch.stack(states, dim=-1)[0].flatten(1), _MASK: mask}

    # -- latents ---------------------------------------------------------------------------

    def normalise(self, vae: Any, latents: torch.Tensor) -> torch.Tensor:
        """`(B, 32, 2h, 2w)` of the VAE → `(B, 128, h, w)`, the place in a cell first."""
        batch, _, height, width = latents.shape
        cells = latents.unflatten(3, (width // 2, 2)).unflatten(2, (height // 2, 2))
        cells = cells.permute(0, 3, 5, 1, 2, 4).reshape(batch, -1, height // 2, width // 2)
        mean, deviation = _statistics(vae, cells)
        return (cells - mean) / deviation

    def denormalise(self, vae: Any, latents: torch.Tensor) -> torch.Tensor:
        """`(B, 128, h, w)` → `(B, 32, 2h, 2w)` for the VAE."""
        mean, deviation = _statistics(vae, latents)
        cells = (latents * deviation + mean).unflatten(1, (2, 2, -1))
        return cells.permute(0, 3, 4, 1, 5, 2).flatten(4, 5).flatten(2, 3)

    def tokens_of(self, height: int, width: int, frames: int = 1) -> int:
        """Its latents are cells of 2×2 already."""
        return height * width * frames

    def shift_of(self, height: int, width: int, frames: int = 1) -> float:
        """As the pipeline's `_resolution_aware_mu`: 1 at 512x512, 2 at 1024x1024."""
        return (height * width) ** 0.5 / _BASE_SIDE

    def sampler_shift_of(self, height: int, width: int, frames: int = 1) -> float:
        return self.shift_of(height, width, frames)

    # -- training --------------------------------------------------------------------------

    def arrange(self, condition: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Without a mask where no text of the batch is padded."""
        return without_padding(condition)

    def predict(
        self,
        transformer: Any,
        noisy: torch.Tensor,
        level: torch.Tensor,
        condition: dict[str, torch.Tensor],
        guidance: float,
    ) -> torch.Tensor:
        height, width = noisy.shape[2:]
        text, mask = condition["prompt_embeds"], condition.get(_MASK)
        batch, words = text.shape[:2]
        tokens = height * width
        with noisy.device:  # made there, since a copy would wait
            places, samples, kinds = _layout(batch, words, height, width)
        if mask is not None:
            unseen = functional.pad(~mask.bool(), (0, tokens))
            kinds = kinds.masked_fill(unseen, 0)
            samples = samples.masked_fill(unseen, SEQUENCE_PADDING_INDICATOR)
        with _called(transformer, masked=mask is not None):
            velocity = transformer(
                hidden_states=functional.pad(noisy.flatten(2).transpose(1, 2), (0, 0, words, 0)),
                timestep=1 - level,  # its time is 1 for data, and its velocity points there
                encoder_hidden_states=functional.pad(text, (0, 0, 0, tokens)),
                position_ids=places,
                segment_ids=samples,
                indicator=kinds,
                return_dict=False,
            )[0]
        return -_grid(velocity[:, words:], height, width)

    # -- sampling --------------------------------------------------------------------------

    def forwards_per_step(self, request: SampleRequest) -> int:
        """One of each transformer, at any scale."""
        return 2

    def sample_arguments(
        self,
        request: SampleRequest,
        condition: dict[str, torch.Tensor],
        negative: dict[str, torch.Tensor] | None,
    ) -> dict[str, Any]:
        """One scale for all steps, in place of the pipeline's schedule; there are no negatives."""
        arguments: dict[str, Any] = {"guidance_scale": request.guidance, "guidance_schedule": None}
        if condition:
            seen = condition[_MASK].bool()
            arguments["prompt_embeds"] = condition["prompt_embeds"][seen].unsqueeze(0)
        return arguments

    def unpack(self, pipeline: Any, latents: torch.Tensor, request: SampleRequest) -> torch.Tensor:
        step = 2 * pipeline.vae_scale_factor
        return _grid(latents, request.height // step, request.width // step)


def _tokens(tokenizer: Any, prompt: str) -> list[int]:
    """Return a prompt's tokens, with the template that the pipeline puts it into."""
    message = {"role": "user", "content": [{"type": "text", "text": prompt}]}
    text = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokens


def _layers_of(encoder: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """Return what the layers give that the pipeline reads, each `(1, L, D)`.

    The pipeline calls the parts of the encoder, which are shards where ranks share it: only a call
    of the encoder itself gathers them. Its own list of states has the last one normed.
    """
    states_of: dict[int, torch.Tensor] = {}
    with ExitStack() as stack:
        for number in QWEN3_VL_ACTIVATION_LAYERS:

            def keep(_: Any, __: Any, states: torch.Tensor, number: int = number) -> None:
                states_of[number] = states

            layer = encoder.language_model.layers[number]
            stack.callback(layer.register_forward_hook(keep).remove)
        encoder(input_ids=ids, use_cache=False)
    return [states_of[number] for number in QWEN3_VL_ACTIVATION_LAYERS]


def _layout(
    batch: int, words: int, height: int, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return where each token is, `(B, L, 3)`, of which sample, and what it is, both `(B, L)`.

    As the pipeline's, for texts without padding: it counts text on all three axes, and has the
    image after it.
    """
    text = torch.arange(words)[:, None].expand(-1, 3)
    rows, columns = torch.arange(height)[:, None], torch.arange(width)[None]
    grid = torch.stack(
        [
            torch.zeros(height, width, dtype=torch.long),
            rows.expand(height, width),
            columns.expand(height, width),
        ],
        dim=-1,
    )
    places = torch.cat([text, grid.flatten(0, 1) + IMAGE_POSITION_OFFSET]).expand(batch, -1, -1)
    kinds = torch.full((batch, places.shape[1]), OUTPUT_IMAGE_INDICATOR)
    kinds[:, :words] = LLM_TOKEN_INDICATOR
    return places, torch.ones_like(kinds), kinds


def _grid(tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """`(B, h·w, C)` → `(B, C, h, w)`."""
    return tokens.transpose(1, 2).unflatten(2, (height, width))


def _statistics(vae: Any, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and deviation of each channel, `(1, 128, 1, 1)`, which the VAE's batch norm keeps."""
    norm = vae.bn
    deviation = torch.sqrt(norm.running_var + vae.config.batch_norm_eps)
    return norm.running_mean.view(1, -1, 1, 1).to(latents), deviation.view(1, -1, 1, 1).to(latents)


FAMILY = Ideogram4
