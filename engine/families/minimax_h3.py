"""MiniMax-H3: video and sound in one sequence with text of Qwen3-VL, without a stock pipeline.

Videos are trained without sound, as by diffusion-pipe (`valid_audio` of its models/minimax_h3.py)
and SimpleTuner (`minimax_h3_target_mode: video`): the sequence has no rows of it. Pipelines make
both at once, so samples are videos made beside a sound that is dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from diffusers import MiniMaxH3ModularPipeline, MiniMaxH3Scheduler
from diffusers.modular_pipelines.minimax_h3.before_denoise import patchify_video_latents

from engine.families.shared.base import Family
from engine.families.shared.lora_names import ComfyUI, Layout
from engine.families.shared.minimax_h3_forward import (
    SOUND,
    TEXT,
    VIDEO,
    MiniMaxH3Transformer,
    lay_out,
)
from engine.families.shared.modular import BlocksPipeline
from engine.families.shared.text_masks import without_padding

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from PIL import Image

    from engine.families.shared.lora_names import Adapter
    from jobs.spec.keys.prompts import SampleRequest

_TEXT: Final = "prompt_embeds"
_MASK: Final = "prompt_embeds_mask"
AUDIO: Final = "audio_latents"
"""Noisy rows of sound in a condition, `(B, 2·T, C)`, channel by channel."""
_LAYER: Final = 50  # of Qwen3-VL
_AUDIO_SHIFT: Final = 3.0  # audio_scheduler/scheduler_config.json
_FEWEST: Final = 2  # points of a schedule, of which the last is the end

# The authors' names, which ComfyUI has (`_convert_non_diffusers_minimax_h3_lora_to_diffusers`).
_LAYOUT: Final = Layout(
    {
        f"{ours}.#.{module}": f"{theirs}.#.{part}"
        for ours, theirs in (
            ("transformer_blocks", "blocks"),
            ("token_refiner.refiner_blocks", "token_refiner.blocks"),
        )
        for module, part in (
            ("attn.to_out.0", "attn.out_proj"),
            ("ff.net.0.proj", "mlp.fc1"),
            ("ff.net.2", "mlp.fc2"),
        )
    }
    | {"transformer_blocks.#.adaln_proj.linear": "blocks.#.adaln_proj.linear"},
    {
        f"{theirs}.#.attn.qkv_proj": {f"{ours}.#.attn.to_{part}": 4 / 3 for part in "qkv"}
        for ours, theirs in (
            ("transformer_blocks", "blocks"),
            ("token_refiner.refiner_blocks", "token_refiner.blocks"),
        )
    },
)


def _rename(adapters: Mapping[str, Adapter]) -> dict[str, Adapter]:
    """Convert adapters to the authors' names; their gate comes before the value."""
    return {
        name: (down, torch.cat(up.chunk(2)[::-1])) if name.endswith(".mlp.fc1") else (down, up)
        for name, (down, up) in _LAYOUT.rename(adapters).items()
    }


class MiniMaxH3Pipeline(BlocksPipeline, MiniMaxH3ModularPipeline):
    """MiniMax-H3's blocks, called as a stock pipeline; videos may be shorter than five seconds."""

    WORKFLOW = "t2va"
    ENCODERS = ("text_encoder",)
    DECODERS = ("decode.video", "decode.audio")
    OUTPUT = "videos"
    FEWEST_STEPS = _FEWEST
    CLASSES = {"transformer": MiniMaxH3Transformer}  # noqa: RUF012

    @property
    def min_duration(self) -> float:
        """Seconds of the shortest video; the stock pipeline refuses what the model can make."""
        return 0.0


class MiniMaxH3(Family):
    """MiniMax-H3 as text-to-video."""

    # Every linear layer of the blocks but the modulation: diffusion-pipe, musubi-tuner's fork and
    # DiffSynth-Studio leave it, and checkpoints for ComfyUI have another there ("pruned").
    LORA_TARGETS = (
        r"(transformer_blocks|token_refiner\.refiner_blocks)\.\d+\."
        r"(attn\.(to_q|to_k|to_v|to_out\.0)|ff\.net\.(0\.proj|2))"
    )
    MODULATION = r"(^|\.)adaln_proj(\.|$)"
    COMFYUI = ComfyUI(_rename, lokr=None)

    def pipeline_class(self) -> Any:
        return MiniMaxH3Pipeline

    def transformer_class(self) -> Any:
        return MiniMaxH3Transformer

    def load_text_pipeline(self, root: Path, dtype: torch.dtype, **components: Any) -> Any:
        """Return a pipeline with only what encodes prompts: without images, no processor."""
        return super().load_text_pipeline(root, dtype, processor=NoImages(), **components)

    def encode(
        self, pipeline: Any, prompt: str, max_sequence_length: int, *, negative: bool = False
    ) -> dict[str, torch.Tensor]:
        """`prompt_embeds (L, D)`: layer 50 of Qwen3-VL, of the text alone, and a mask.

        An empty text has no token at all. It is a space here, as in DiffSynth-Studio's pipeline
        (`negative_prompt`).
        """
        encoder = pipeline.text_encoder
        ids = pipeline.tokenizer(
            prompt or " ",
            add_special_tokens=False,
            truncation=True,
            max_length=max_sequence_length,
            return_tensors="pt",
        ).input_ids.to(encoder.device)
        states = encoder(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=torch.zeros_like(ids),
            use_cache=False,
            output_hidden_states=True,
            logits_to_keep=1,
        ).hidden_states
        text = states[_LAYER][0].contiguous()
        return {_TEXT: text, _MASK: torch.ones(len(text), dtype=torch.bool, device=text.device)}

    # -- latents ---------------------------------------------------------------------------

    def encode_pictures(self, vae: Any, pixels: torch.Tensor) -> torch.Tensor:
        """Its autoencoder has pixels normalized as ImageNet's."""
        mean, deviation = _statistics(pixels)
        return super().encode_pictures(vae, (pixels / 2 + 0.5 - mean) / deviation)

    def decode(
        self, pipeline: Any, latents: torch.Tensor, request: SampleRequest
    ) -> list[Image.Image]:
        """Return the frames; for an image, the first one of the shortest video."""
        pixels = pipeline.vae.decode(self.denormalise(pipeline.vae, latents), return_dict=False)[0]
        mean, deviation = _statistics(pixels)
        video = (pixels.float() * deviation + mean).clamp(0, 1)
        frames = pipeline.video_processor.postprocess_video(video, output_type="pil")[0]
        return list(frames[: request.frames])

    # -- training --------------------------------------------------------------------------

    def arrange(self, condition: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Cut each text to its length, and keep them apart where those differ.

        Rows of the sequence have no padding; lengths are those of the tensors.
        """
        arranged = without_padding(condition)
        mask = arranged.pop(_MASK, None)
        if mask is not None:
            batch = arranged.pop(_TEXT)
            for number, (text, seen) in enumerate(zip(batch, mask.bool(), strict=True)):
                arranged[f"{_TEXT}_{number}"] = text[seen].unsqueeze(0)
        return arranged

    def predict(
        self,
        transformer: Any,
        noisy: torch.Tensor,
        level: torch.Tensor,
        condition: dict[str, torch.Tensor],
        guidance: float,
    ) -> torch.Tensor:
        """Turn time and velocity around: a time is 1 without noise, a velocity leads to data."""
        condition = self.arrange(condition)
        texts = _texts(condition, len(noisy))
        patch = tuple(transformer.config.patch_size)
        size = noisy.shape[2] // patch[0], noisy.shape[3] // patch[1], noisy.shape[4] // patch[2]
        sound = condition.get(AUDIO)
        if sound is None:
            sound = noisy.new_zeros(len(noisy), 0, transformer.config.audio_in_channels)
        lengths = [len(text) for text in texts]
        layout = lay_out(lengths, size, sound.shape[1] // 2, noisy.device)
        levels = [level, self._level_of_sound(level)] if sound.shape[1] else [level]
        several = len(texts) > 1
        rows = transformer(
            hidden_states=patchify_video_latents(noisy, patch)[None],
            audio_hidden_states=sound.flatten(0, 1)[None],
            encoder_hidden_states=torch.cat(texts)[None],
            timestep=1 - torch.cat(levels),
            timestep_indices=layout.owners + len(noisy) * (layout.tags == SOUND),
            token_tags=layout.tags,
            position_ids=layout.positions,
            video_indices=layout.indices[VIDEO],
            audio_indices=layout.indices[SOUND],
            text_indices=layout.indices[TEXT],
            return_dict=False,
            texts=tuple(lengths) if several else (),
            samples=layout.samples if several else (),
        )[0]
        return -_video(rows[0], noisy.shape, patch)

    def _level_of_sound(self, level: torch.Tensor) -> torch.Tensor:
        """Return sigma of sound at a step of the schedules at which video has `level`."""
        ratio = _AUDIO_SHIFT / self.sampler_shift_of(1, 1)
        return ratio * level / (1 + (ratio - 1) * level)

    # -- sampling --------------------------------------------------------------------------

    def sampling_pipeline(
        self, root: Path, transformer: Any, vae: Any, /, **components: Any
    ) -> Any:
        """Without the autoencoder of sound, which is not decoded."""
        return super().sampling_pipeline(root, transformer, vae, audio_vae=None, **components)

    def sample_arguments(
        self,
        request: SampleRequest,
        condition: dict[str, torch.Tensor],
        negative: dict[str, torch.Tensor] | None,
    ) -> dict[str, Any]:
        arguments: dict[str, Any] = {"num_frames": max(request.frames, self.facts.shortest)}
        if _TEXT in condition:
            text = condition[_TEXT]
            arguments |= {
                _TEXT: text.unsqueeze(0),
                "text_token_tags": torch.full((len(text),), TEXT),
            }
        return arguments

    def _timesteps(self, steps: int) -> int:
        """One less than points of the schedule; where shifted ones are equal, fewer."""
        scheduler = MiniMaxH3Scheduler.from_config(self._schedule)
        scheduler.set_timesteps(max(_FEWEST, steps))
        return len(scheduler.timesteps)

    def unpack(self, pipeline: Any, latents: torch.Tensor, request: SampleRequest) -> torch.Tensor:
        """Rows of a step, too."""
        if latents.dim() == 5:
            return latents
        side, patch = pipeline.vae_spatial_compression_ratio, pipeline.patch_size
        height, width = request.height // side, request.width // side
        frames = latents.shape[0] * patch[1] * patch[2] // (height * width)
        channels = latents.shape[1] // (patch[1] * patch[2])
        return _video(latents, (1, channels, frames, height, width), patch)


class NoImages:
    """In the place of Qwen3-VL's processor, which needs torchvision: all tokens are text."""

    def create_mm_token_type_ids(self, ids: list[list[int]]) -> list[list[int]]:
        """Return the kind of each token."""
        return [[0] * len(row) for row in ids]


def _texts(condition: Mapping[str, torch.Tensor], batch: int) -> list[torch.Tensor]:
    """Return the text of each sample, `(L, D)`."""
    if _TEXT in condition:
        return list(condition[_TEXT])
    return [condition[f"{_TEXT}_{number}"][0] for number in range(batch)]


def _video(rows: torch.Tensor, shape: tuple[int, ...], patch: tuple[int, ...]) -> torch.Tensor:
    """Convert rows of a sequence `(rows, C · patch)` to latents of a shape `(B, C, f, h, w)`."""
    batch, channels, *size = shape
    counts = [side // part for side, part in zip(size, patch, strict=True)]
    cells = rows.view(batch, *counts, channels, *patch)
    return cells.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(shape)


def _statistics(pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and deviation of ImageNet's colors, `(1, 3, 1, 1, 1)`."""
    mean = pixels.new_tensor((0.485, 0.456, 0.406)).view(1, -1, 1, 1, 1)
    return mean, pixels.new_tensor((0.229, 0.224, 0.225)).view(1, -1, 1, 1, 1)


FAMILY = MiniMaxH3
