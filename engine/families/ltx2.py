"""LTX-2: one transformer for videos and their sound, trained with both, or on the video alone.

Lightricks' trainer passes no tokens of sound where a job has none (`audio: null` of its `flexible`
strategy, `with_audio: false` of `text_to_video`): the video's tokens attend to none, and no weight
of the sound's half is trained. diffusion-pipe does the same. Here the sound is one token then that
the video's do not attend to (`isolate_modalities`), which is equal for them. With sound, both have
the same noise level and losses of equal weight, as there. Samples are made together with their
sound, as by the stock pipeline, and a vocoder makes it heard.

Between the text encoder and the transformer are two connectors, one for each half. They replace
padding by learned registers, so texts have no masks; they stay as published, as in Lightricks'
trainer, and their output is what the cache keeps.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import torch
from diffusers import AutoencoderKLLTX2Audio, LTX2ImageToVideoPipeline, LTX2Pipeline
from diffusers.pipelines.ltx2 import LTX2Vocoder, LTX2VocoderWithBWE
from diffusers.pipelines.ltx2.utils import resolve_default_image_crf

from engine.families.shared.base import Family
from engine.families.shared.lora_names import ComfyUI, as_in_diffusers
from engine.families.shared.ltx2_pipeline import (
    Connected,
    ConnectedImagePipeline,
    ConnectedPipeline,
    SoundDecoder,
    SoundScale,
    log_spectrum,
    text_widths,
)
from engine.families.shared.references import SOUND, SOUND_NOISE, insert_first_frame, joint
from jobs.errors import UserError
from jobs.run.rundir import read_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from PIL import Image

    from engine.families.shared.references import Conditioning
    from jobs.spec.job_spec import JobSpec
    from jobs.spec.keys.data import DataKeys
    from jobs.spec.keys.prompts import SampleRequest

_SOUND_RATE: Final = 16_000

# Names of parameters: LTX-2.5's for keyframes, and those of the sound's half with what joins both.
_KEYFRAMES: Final = r"^keyframes_abs_pos_embedding$"
_OF_SOUND: Final = r"audio|a2v|av_cross_attn"

# What the pipeline does besides guidance by the negative prompt, turned off.
_UNGUIDED = {
    "audio_guidance_scale": 1.0,
    **dict.fromkeys(("modality_scale", "audio_modality_scale"), 1.0),
    **dict.fromkeys(("stg_scale", "audio_stg_scale"), 0.0),
    **dict.fromkeys(("guidance_rescale", "audio_guidance_rescale"), 0.0),
}


class LTX2(Family):
    """LTX-2, LTX-2.3 and LTX-2.5: text or first frame to video."""

    # Those of Lightricks' configs for videos without sound (`v2v_ic_lora.yaml`).
    LORA_TARGETS = (
        r"transformer_blocks\.\d+\.(attn[12]\.(to_q|to_k|to_v|to_out\.0)|ff\.net\.(0\.proj|2))"
    )
    # Of his configs with sound, whose names are those of both halves and of what joins them.
    SOUND_TARGETS = (
        r"transformer_blocks\.\d+\.((audio_)?attn[12]\.(to_q|to_k|to_v|to_out\.0)"
        r"|(audio_to_video|video_to_audio)_attn\.(to_q|to_k|to_v|to_out\.0)"
        r"|(audio_)?ff\.net\.(0\.proj|2))"
    )
    COMFYUI = ComfyUI(as_in_diffusers)
    MAKES_SOUND = True

    def __init__(
        self,
        name: str,
        flavour: str | None = None,
        root: Path | None = None,
        fps: float | None = None,
    ) -> None:
        super().__init__(name, flavour, root, fps)
        config = (root and read_json(self.denoiser_of(root) / "config.json")) or {}
        self._perturbed: bool = config.get("perturbed_attn", False)
        encoder = (root and read_json(root / "text_encoder" / "config.json")) or {}
        self._encoder = SimpleNamespace(
            config=SimpleNamespace(model_type=encoder.get("model_type"))
        )
        sound = (root and read_json(root / "audio_vae" / "config.json")) or {}
        self._sound: Mapping[str, Any] = sound

    # -- text ------------------------------------------------------------------------------

    def load_text_pipeline(self, root: Path, dtype: torch.dtype, **components: Any) -> Any:
        """With the connectors, and without what is for rewriting prompts."""
        unused = dict.fromkeys(("processor", "prompt_enhancer", "duration_head"))
        return super().load_text_pipeline(root, dtype, **unused | components)

    def encode(
        self, pipeline: Any, prompt: str, max_sequence_length: int, *, negative: bool = False
    ) -> dict[str, torch.Tensor]:
        """`prompt_embeds (max_sequence_length, V + A)`: the text for the video, and for the sound.

        Raises:
            UserError: The length is not a multiple of the registers that replace padding.
        """
        connectors = pipeline.connectors
        registers = connectors.config.video_connector_num_learnable_registers
        if max_sequence_length % registers:
            raise UserError(
                f"max_sequence_length {max_sequence_length} is not a multiple of the model's "
                f"{registers} text registers",
                "set max_sequence_length: 1024",
            )
        tokenizer = pipeline.tokenizer
        if tokenizer("").input_ids[:1] != [tokenizer.bos_token_id]:
            # Gemma 4's adds none, and Lightricks' code does (`LTXGemmaTokenizer`).
            prompt = tokenizer.bos_token + prompt.strip()
        states, mask, *_ = pipeline.encode_prompt(
            prompt, do_classifier_free_guidance=False, max_sequence_length=max_sequence_length
        )
        video, sound, _ = connectors(
            states.to(connectors.dtype), mask, padding_side=tokenizer.padding_side
        )
        return {"prompt_embeds": torch.cat([video[0], sound[0]], dim=-1)}

    # -- latents ---------------------------------------------------------------------------

    def normalise(self, vae: Any, latents: torch.Tensor) -> torch.Tensor:
        return LTX2Pipeline._normalize_latents(
            latents, vae.latents_mean, vae.latents_std, vae.config.scaling_factor
        )

    def denormalise(self, vae: Any, latents: torch.Tensor) -> torch.Tensor:
        return LTX2Pipeline._denormalize_latents(
            latents, vae.latents_mean, vae.latents_std, vae.config.scaling_factor
        )

    def load_sound_vae(self, root: Path) -> Any:
        vae = AutoencoderKLLTX2Audio.from_pretrained(root, subfolder="audio_vae")
        return vae.to(torch.float32)

    def sound_rate(self) -> int:
        return int(self._sound.get("sample_rate", _SOUND_RATE))

    def encode_sound(self, vae: Any, samples: torch.Tensor) -> torch.Tensor:
        """By way of the spectrogram that Lightricks' trainer computes with torchaudio."""
        spectrum = log_spectrum(samples.cpu(), vae.config)[None].to(samples.device)
        latents = vae.encode(spectrum).latent_dist.mode()[0]  # (channels, length, mel bins)
        return (latents.transpose(0, 1).flatten(1) - vae.latents_mean) / vae.latents_std

    # -- training --------------------------------------------------------------------------

    def lora_targets(self, spec: JobSpec) -> str:
        return self.SOUND_TARGETS if spec.train_audio else self.LORA_TARGETS

    def without_gradient(self, model: Any, spec: DataKeys) -> str:
        """Name the marks of given frames between others; without sound, all that is for it."""
        return _KEYFRAMES if spec.train_audio else f"{_KEYFRAMES}|{_OF_SOUND}"

    def predict(
        self,
        transformer: Any,
        noisy: torch.Tensor,
        level: torch.Tensor,
        condition: dict[str, torch.Tensor],
        guidance: float,
    ) -> torch.Tensor:
        config, size = transformer.config, noisy.shape[2:]  # frames, height, width
        noisy, mask = insert_first_frame(noisy, condition)
        timestep = level * 1000
        patches = config.patch_size, config.patch_size_t
        text, of_sound = condition["prompt_embeds"].split(text_widths(config), dim=-1)
        sound = condition.get(SOUND)
        if sound is None:
            rows, of_sound = (
                noisy.new_zeros(len(noisy), 1, config.audio_in_channels),
                of_sound[:, :1],
            )
        else:
            rows = torch.lerp(sound, condition[SOUND_NOISE], level.view(-1, 1, 1)).to(noisy.dtype)
        velocity, heard = transformer(
            hidden_states=LTX2Pipeline._pack_latents(noisy, *patches),
            audio_hidden_states=rows,
            encoder_hidden_states=text,
            audio_encoder_hidden_states=of_sound,
            timestep=timestep if mask is None else timestep.unsqueeze(-1) * mask.flatten(),
            audio_timestep=timestep,
            sigma=timestep,
            video_coords=self._places(config, size, noisy.device).expand(len(noisy), -1, -1, -1),
            audio_num_frames=rows.shape[1],
            isolate_modalities=sound is None,
            use_cross_timestep=sound is not None,
            return_dict=False,
        )
        video = LTX2Pipeline._unpack_latents(velocity, *size, *patches)
        return video if sound is None else joint(video, heard)

    def _places(self, config: Any, size: torch.Size, device: torch.device) -> torch.Tensor:
        """Return where each token begins and ends, in seconds and pixels, `(1, 3, N, 2)`.

        `LTX2AudioVideoRotaryPosEmbed.prepare_video_coords` says the same, but copies its factors
        from the host, for which it waits for the GPU.
        """
        patches = config.patch_size_t, config.patch_size, config.patch_size
        edges = [
            torch.arange(0, cells + 1, patch, device=device, dtype=torch.float32) * pixels
            for cells, patch, pixels in zip(size, patches, config.vae_scale_factors, strict=True)
        ]
        # The first latent frame is a single frame.
        first = config.causal_offset - config.vae_scale_factors[0]
        edges[0] = (edges[0] + first).clamp(min=0) / self.fps
        begins = torch.meshgrid(*(edge[:-1] for edge in edges), indexing="ij")
        ends = torch.meshgrid(*(edge[1:] for edge in edges), indexing="ij")
        bounds = [torch.stack(grid).flatten(1) for grid in (begins, ends)]
        return torch.stack(bounds, dim=-1).unsqueeze(0)

    def tokens_of(self, height: int, width: int, frames: int = 1) -> int:
        return height * width * frames

    # -- sampling --------------------------------------------------------------------------

    def sampling_pipeline(
        self, root: Path, transformer: Any, vae: Any, /, **components: Any
    ) -> Any:
        """One that takes the connectors' output, and makes no waveform of the sound's latents."""
        unused = dict.fromkeys(
            ("connectors", "audio_vae", "vocoder", "prompt_enhancer", "duration_head")
        )
        stock = super().sampling_pipeline(root, transformer, vae, **unused | components)
        parts = {"connectors": Connected(transformer.config), "audio_vae": SoundScale(self._sound)}
        return ConnectedPipeline(**stock.components | parts)

    def pipeline_with_image(
        self, pipeline: Any, condition: Mapping[str, torch.Tensor] | None = None
    ) -> Any:
        connected = isinstance(pipeline, ConnectedPipeline)
        kind = ConnectedImagePipeline if connected else LTX2ImageToVideoPipeline
        return kind(**pipeline.components)

    def reference_arguments(self, pictures: Sequence[Conditioning]) -> dict[str, Any]:
        """Add how strongly the frame is compressed, which depends on Gemma's version."""
        crf = resolve_default_image_crf(self._encoder)
        return super().reference_arguments(pictures) | {"image_crf": crf}

    def sample_arguments(
        self,
        request: SampleRequest,
        condition: dict[str, torch.Tensor],
        negative: dict[str, torch.Tensor] | None,
    ) -> dict[str, Any]:
        """Add the frame rate, and what the pipeline is to do besides guidance.

        Its own defaults are Lightricks': a forward in which video and sound ignore each other, and
        one without a block's self-attention, which only LTX-2.3's config has diffusers skip.
        """
        arguments = super().sample_arguments(request, condition, negative)
        arguments["frame_rate"] = self.fps
        if negative is None:
            return arguments | _UNGUIDED
        if not self._perturbed:
            arguments |= {"stg_scale": 0.0, "audio_stg_scale": 0.0}
        return arguments

    def forwards_per_step(self, request: SampleRequest) -> int:
        """Both prompts are one batch; the other forwards are those of `sample_arguments`."""
        return 2 + self._perturbed if request.guided else 1

    def unpack(self, pipeline: Any, latents: torch.Tensor, request: SampleRequest) -> torch.Tensor:
        """From the scheduler packed; from the pipeline as its autoencoder takes them."""
        if latents.dim() == 5:
            return self.normalise(pipeline.vae, latents)
        step = self.facts.latent_step
        return LTX2Pipeline._unpack_latents(
            latents,
            (request.frames - 1) // self.facts.frame_step + 1,
            request.height // step,
            request.width // step,
            pipeline.transformer_spatial_patch_size,
            pipeline.transformer_temporal_patch_size,
        )

    def sound_decoder(self, root: Path, *, load: bool = True) -> SoundDecoder:
        """Return the sound's autoencoder with the vocoder, which no other phase needs."""
        later = self._index["vocoder"][1] == LTX2VocoderWithBWE.__name__
        kinds: dict[str, Any] = {
            "audio_vae": AutoencoderKLLTX2Audio,
            "vocoder": LTX2VocoderWithBWE if later else LTX2Vocoder,
        }
        if load:
            parts = [k.from_pretrained(root, subfolder=name) for name, k in kinds.items()]
        else:
            parts = [k.from_config(k.load_config(root / name)) for name, k in kinds.items()]
        return SoundDecoder(*(part.float().eval() for part in parts))

    def decode(
        self, pipeline: Any, latents: torch.Tensor, request: SampleRequest
    ) -> list[Image.Image]:
        """Of latents that the pipeline has denormalized."""
        pixels = pipeline.vae.decode(latents, return_dict=False)[0]
        return pipeline.video_processor.postprocess_video(pixels, output_type="pil")[0]


FAMILY = LTX2
