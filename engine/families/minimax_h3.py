"""MiniMax-H3: video and sound in one sequence with text of Qwen3-VL, without a stock pipeline.

Videos are trained with their sound, or without it, as by diffusion-pipe (`valid_audio` of its
models/minimax_h3.py) and SimpleTuner (`minimax_h3_target_mode: video`): the sequence has no rows of
it then. Sound has less noise than the video, as at the same step of the stock pipeline's two
schedules, and losses of equal weight, as in DiffSynth-Studio. Pipelines make both at once.

A first frame and a last one are rows of their own, as in the stock pipeline: nearly without noise,
at the place of the frame in time, and seen by Qwen3-VL. The loss is of the whole video, as in
DiffSynth-Studio and musubi-tuner's fork.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import torch
from diffusers import (
    AutoencoderKLMiniMaxH3Audio,
    MiniMaxH3ModularPipeline,
    MiniMaxH3Scheduler,
)
from diffusers.modular_pipelines.minimax_h3.before_denoise import patchify_video_latents
from diffusers.modular_pipelines.minimax_h3.encoders import encode_vae_condition

from engine.families.shared.base import Family
from engine.families.shared.lora_names import ComfyUI, Layout
from engine.families.shared.minimax_h3_forward import (
    CHANNELS,
    GIVEN,
    SOUND,
    TEXT,
    VIDEO,
    MiniMaxH3Transformer,
    keyframes,
    lay_out,
)
from engine.families.shared.modular import BlocksPipeline
from engine.families.shared.references import SOUND as SOUND_LATENTS
from engine.families.shared.references import SOUND_NOISE, joint, keyframes_in
from engine.families.shared.text_masks import without_padding
from jobs.run.rundir import read_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from PIL import Image

    from engine.families.shared.lora_names import Adapter
    from engine.families.shared.minimax_h3_forward import Layout as Rows
    from engine.families.shared.references import Conditioning
    from jobs.spec.keys.data import DataKeys
    from jobs.spec.keys.prompts import SampleRequest

_TEXT: Final = "prompt_embeds"
_MASK: Final = "prompt_embeds_mask"
_TAGS: Final = "text_token_tags"
"""Modality of each row of a text, `(L, 1)`: images among it are video."""
_LABEL: Final = "<Picture"
_PAD: Final = "<|image_pad|>"
_LAYER: Final = 50  # of Qwen3-VL
_AUDIO_SHIFT: Final = 3.0  # audio_scheduler/scheduler_config.json
_SOUND_RATE: Final = 32_000  # `sampling_rate` of audio_vae/config.json
_COLOURS: Final = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's mean and deviation
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
    WORKFLOWS = {"image": "fl2va"}  # noqa: RUF012
    ENCODERS = ("text_encoder",)
    DECODERS = ("decode.video", "decode.audio")
    LATENTS = ("latents", "audio_latents")
    OUTPUT = "videos"
    FEWEST_STEPS = _FEWEST
    CLASSES = {"transformer": MiniMaxH3Transformer}  # noqa: RUF012

    @property
    def min_duration(self) -> float:
        """Seconds of the shortest video; the stock pipeline refuses what the model can make."""
        return 0.0


class MiniMaxH3(Family):
    """MiniMax-H3: videos from text, or from their first frame and their last one."""

    # Every linear layer of the blocks but the modulation: diffusion-pipe, musubi-tuner's fork and
    # DiffSynth-Studio leave it, and checkpoints for ComfyUI have another there ("pruned").
    LORA_TARGETS = (
        r"(transformer_blocks|token_refiner\.refiner_blocks)\.\d+\."
        r"(attn\.(to_q|to_k|to_v|to_out\.0)|ff\.net\.(0\.proj|2))"
    )
    MODULATION = r"(^|\.)adaln_proj(\.|$)"
    COMFYUI = ComfyUI(_rename, lokr=None)
    MAKES_SOUND = True
    CONDITION_LEVEL = 0.001  # `keyframe_noise_aug` of the stock pipeline

    def pipeline_class(self) -> Any:
        return MiniMaxH3Pipeline

    def transformer_class(self) -> Any:
        return MiniMaxH3Transformer

    def load_text_pipeline(self, root: Path, dtype: torch.dtype, **components: Any) -> Any:
        """Return a pipeline with only what encodes prompts."""
        return super().load_text_pipeline(root, dtype, processor=Processor(root), **components)

    def encode(
        self, pipeline: Any, prompt: str, max_sequence_length: int, *, negative: bool = False
    ) -> dict[str, torch.Tensor]:
        """`prompt_embeds (L, D)`: layer 50 of Qwen3-VL, of the text alone, and a mask.

        An empty text has no token at all. It is a space here, as in DiffSynth-Studio's pipeline
        (`negative_prompt`).
        """
        return self._read(pipeline, _tokens(pipeline, prompt or " ", max_sequence_length))

    def encode_with_images(
        self, pipeline: Any, prompt: str, max_sequence_length: int, images: Sequence[Image.Image]
    ) -> dict[str, torch.Tensor]:
        """Encode images before the text, each behind its number; add `text_token_tags (L, 1)`.

        `MiniMaxH3FL2VATextEncoderStep` does the same.
        """
        shown = pipeline.processor.image_processor(images=list(images), return_tensors="pt")
        cells = pipeline.processor.image_processor.merge_size**2
        start, pad, end = map(
            pipeline.tokenizer.convert_tokens_to_ids,
            ("<|vision_start|>", _PAD, "<|vision_end|>"),
        )
        tokens, tags = [], []
        for number, grid in enumerate(shown["image_grid_thw"], start=1):
            label = _tokens(pipeline, f"{_LABEL} {number}>: ")
            image = [start, *[pad] * (int(grid.prod()) // cells), end]
            tokens += label + image
            tags += [TEXT] * len(label) + [VIDEO] * len(image)
        text = _tokens(pipeline, prompt, max_sequence_length)
        encoded = self._read(pipeline, tokens + text, **shown)
        tags += [TEXT] * len(text)
        return encoded | {_TAGS: torch.tensor(tags, device=encoded[_TEXT].device).unsqueeze(1)}

    def _read(
        self, pipeline: Any, tokens: list[int], **shown: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return what Qwen3-VL makes of tokens and of the images among them, and a mask."""
        encoder = pipeline.text_encoder
        kinds = pipeline.processor.create_mm_token_type_ids([tokens])
        ids = torch.tensor([tokens], device=encoder.device)
        seen = {
            name: values.to(encoder.device, encoder.dtype if values.is_floating_point() else None)
            for name, values in shown.items()
        }
        states = encoder(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=torch.tensor(kinds, device=encoder.device),
            use_cache=False,
            output_hidden_states=True,
            logits_to_keep=1,
            **seen,
        ).hidden_states
        text = states[_LAYER][0].contiguous()
        return {_TEXT: text, _MASK: torch.ones(len(text), dtype=torch.bool, device=text.device)}

    # -- latents ---------------------------------------------------------------------------

    def encode_pictures(self, vae: Any, pixels: torch.Tensor) -> torch.Tensor:
        """Its autoencoder has pixels normalized as ImageNet's."""
        mean, deviation = _statistics(pixels)
        return super().encode_pictures(vae, (pixels / 2 + 0.5 - mean) / deviation)

    def encode_condition(self, vae: Any, pixels: torch.Tensor) -> torch.Tensor:
        """Encode as the stock pipeline: drawn, always with the same noise, rounded to fp16."""
        latents: torch.Tensor = encode_vae_condition(
            vae, ((pixels + 1) * 127.5).round().byte(), *_COLOURS
        )
        return latents

    def load_sound_vae(self, root: Path) -> Any:
        vae = AutoencoderKLMiniMaxH3Audio.from_pretrained(root, subfolder="audio_vae")
        return vae.to(torch.float32)

    def sound_rate(self) -> int:
        return _SOUND_RATE

    def encode_sound(self, vae: Any, samples: torch.Tensor) -> torch.Tensor:
        """Return the rows of one channel after those of the other, `(2·T, C)`.

        The stock pipeline rounds the length of a video's sound to whole latents.
        """
        length = round(samples.shape[1] / vae.hop_length)
        latents = vae.encode(samples.unsqueeze(1)).latent_dist.mode()[..., :length]
        mean, deviation = _sound_statistics(vae)
        return ((latents - mean) / deviation).transpose(1, 2).flatten(0, 1)

    def sound_decoder(self, root: Path, *, load: bool = True) -> SoundDecoder:
        if load:
            return SoundDecoder(self.load_sound_vae(root))
        kind = AutoencoderKLMiniMaxH3Audio
        return SoundDecoder(kind.from_config(kind.load_config(root / "audio_vae")).float())

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
            for name in {_TEXT, _TAGS} & arranged.keys():
                for number, (rows, seen) in enumerate(
                    zip(arranged.pop(name), mask.bool(), strict=True)
                ):
                    arranged[f"{name}_{number}"] = rows[seen].unsqueeze(0)
        return arranged

    def without_gradient(self, model: Any, spec: DataKeys) -> str:
        """Without sound, name its input and output; all other layers are the video's, too."""
        return "" if spec.train_audio else r"^audio_proj_(in|out)\."

    def predict(
        self,
        transformer: Any,
        noisy: torch.Tensor,
        level: torch.Tensor,
        condition: dict[str, torch.Tensor],
        guidance: float,
    ) -> torch.Tensor:
        """Turn time and velocity around: a time is 1 without noise, a velocity leads to data."""
        condition, batch = self.arrange(condition), len(noisy)
        texts, tags = (_rows_of(name, condition, batch) for name in (_TEXT, _TAGS))
        given = keyframes_in(condition)
        patch = tuple(transformer.config.patch_size)
        size = noisy.shape[2] // patch[0], noisy.shape[3] // patch[1], noisy.shape[4] // patch[2]
        sound, levels = condition.get(SOUND_LATENTS), {VIDEO: level}
        rows = noisy.new_zeros(batch, 0, transformer.config.audio_in_channels)
        if sound is not None:
            levels[SOUND] = self._level_of_sound(level)
            rows = torch.lerp(sound, condition[SOUND_NOISE], levels[SOUND].view(-1, 1, 1))
        video = patchify_video_latents(noisy, patch)
        shown = video
        if given:
            levels[GIVEN] = level.clamp(max=self.CONDITION_LEVEL)
            frames = [patchify_video_latents(frame.to(noisy.dtype), patch) for frame in given]
            shown = torch.cat([*frames, video])
        lengths, places = [len(text) for text in texts], keyframes(len(given), size)
        layout = lay_out(lengths, size, rows.shape[1] // CHANNELS, noisy.device, places)
        owners = layout.owners
        for number, kind in enumerate(levels):
            owners = owners + batch * number * (layout.kinds == kind) if number else owners
        several = len(texts) > 1
        velocities, heard = transformer(
            hidden_states=shown[None],
            audio_hidden_states=rows.to(noisy.dtype).flatten(0, 1)[None],
            encoder_hidden_states=torch.cat(texts)[None],
            timestep=1 - torch.cat(list(levels.values())),
            timestep_indices=owners,
            token_tags=_modalities(layout, tags) if given else layout.kinds,
            position_ids=layout.positions,
            video_indices=layout.indices[VIDEO],
            audio_indices=layout.indices[SOUND],
            text_indices=layout.indices[TEXT],
            return_dict=False,
            texts=tuple(lengths) if several else (),
            samples=layout.samples if several else (),
        )
        own = velocities[0, -len(video) :] if given else velocities[0]
        velocity = -_video(own, noisy.shape, patch)
        return velocity if sound is None else joint(velocity, -heard.view(rows.shape))

    def _level_of_sound(self, level: torch.Tensor) -> torch.Tensor:
        """Return sigma of sound at a step of the schedules at which video has `level`."""
        ratio = _AUDIO_SHIFT / self.sampler_shift_of(1, 1)
        return ratio * level / (1 + (ratio - 1) * level)

    # -- sampling --------------------------------------------------------------------------

    def sampling_pipeline(
        self, root: Path, transformer: Any, vae: Any, /, **components: Any
    ) -> Any:
        """Without the autoencoder of sound, which `decode_sound` loads."""
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
            tags = condition.get(_TAGS)
            arguments |= {
                _TEXT: text.unsqueeze(0),
                # The pipeline lays rows out in host memory.
                _TAGS: torch.full((len(text),), TEXT) if tags is None else tags[:, 0].cpu(),
            }
        return arguments

    def reference_arguments(self, pictures: Sequence[Conditioning]) -> dict[str, Any]:
        return dict(zip(("image", "last_image"), pictures, strict=False))

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


class SoundDecoder(torch.nn.Module):
    """Makes a waveform of a sound's latents, as the transformer has them.

    Attributes:
        rate: Of the waveform, in samples per second.
    """

    def __init__(self, vae: Any) -> None:
        super().__init__()
        self._vae = vae
        self.rate: int = vae.config.sampling_rate

    def shape(self, length: int, width: int) -> tuple[int, ...]:
        """Return the shape of the latents of `length` rows."""
        return CHANNELS, width, length // CHANNELS

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        """Return the waveform, `(1, 2, n)`, of latents `(2, C, T)`."""
        mean, deviation = _sound_statistics(self._vae)
        waveform: torch.Tensor = self._vae.decode(latents * deviation + mean, return_dict=False)[0]
        return waveform.transpose(0, 1)


class Processor:
    """In the place of Qwen3-VL's processor, whose part for videos needs torchvision.

    Args:
        root: The model.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    @cached_property
    def image_processor(self) -> Any:
        """Return what prepares images for the encoder; only read with images."""
        # Imported here: transformers warns without torchvision.
        from engine.families.shared.qwen_processor import load_image_processor

        return load_image_processor(self._root)

    @cached_property
    def _image(self) -> int:
        config = read_json(self._root / "text_encoder" / "config.json") or {}
        return int(config.get("image_token_id", -1))

    def create_mm_token_type_ids(self, ids: list[list[int]]) -> list[list[int]]:
        """Return the kind of each token: 1 of an image, 0 of text."""
        return [[int(token == self._image) for token in row] for row in ids]


def _tokens(pipeline: Any, text: str, most: int | None = None) -> list[int]:
    """Return the tokens of a text, of which there are no special ones, cut to a number."""
    tokens: list[int] = pipeline.tokenizer(text, add_special_tokens=False).input_ids
    return tokens[:most]


def _rows_of(name: str, condition: Mapping[str, torch.Tensor], batch: int) -> list[torch.Tensor]:
    """Return a tensor of each sample's text, `(L, …)`; [] if there is none."""
    if name in condition:
        return list(condition[name])
    return [condition[own][0] for n in range(batch) if (own := f"{name}_{n}") in condition]


def _modalities(layout: Rows, tags: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the modality of each row, `(S,)`, given those of texts with images among them."""
    kinds = layout.kinds.masked_fill(layout.kinds == GIVEN, VIDEO)
    return kinds.index_copy(0, layout.indices[TEXT], torch.cat(tuple(tags)).flatten())


def _video(rows: torch.Tensor, shape: tuple[int, ...], patch: tuple[int, ...]) -> torch.Tensor:
    """Convert rows of a sequence `(rows, C · patch)` to latents of a shape `(B, C, f, h, w)`."""
    batch, channels, *size = shape
    counts = [side // part for side, part in zip(size, patch, strict=True)]
    cells = rows.view(batch, *counts, channels, *patch)
    return cells.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(shape)


def _statistics(pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and deviation of ImageNet's colors, `(1, 3, 1, 1, 1)`."""
    mean, deviation = (pixels.new_tensor(own).view(1, -1, 1, 1, 1) for own in _COLOURS)
    return mean, deviation


def _sound_statistics(vae: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and deviation of sound's latents, `(1, C, 1)`."""
    config = vae.config
    mean, deviation = (
        torch.tensor(values, device=vae.device).view(1, -1, 1)
        for values in (config.latents_mean, config.latents_std)
    )
    return mean, deviation


FAMILY = MiniMaxH3
