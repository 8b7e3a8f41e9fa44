"""Defaults that most families share. A family's own module contains only what differs.

As much as possible comes from the stock pipeline and the model's own files: classes from
`model_index.json`, the noise schedule from `scheduler/scheduler_config.json`, statistics of latents
from the VAE's config.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import diffusers

from engine.families.shared import shifts
from engine.families.shared.latent_statistics import denormalise, normalise
from jobs.errors import UserError
from jobs.models.find_model import denoiser_of, find_index, index_of
from jobs.run.rundir import read_json
from jobs.spec.families import get_family

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import torch
    from PIL import Image

    from engine.data.index.views import Shown
    from engine.families.shared.lora_names import LoraStyle
    from engine.families.shared.references import Conditioning
    from jobs.spec.job_spec import JobSpec
    from jobs.spec.keys.data import DataKeys
    from jobs.spec.keys.prompts import SampleRequest

TEXT_PARTS: Final = (
    "text_encoder",
    "text_conditioner",
    "connectors",
    "tokenizer",
    "t5_tokenizer",
)
"""Name prefixes of pipeline components that encode prompts."""

# And of those that encode images with them.
_ENCODING_PARTS: Final = (*TEXT_PARTS, "processor", "image_encoder", "image_processor")


@dataclass(frozen=True)
class TokenLayout:
    """How a family's blocks are given tokens, which `tread` needs to know.

    The first argument of a block is its stream, `(B, tokens, channels)`.

    Attributes:
        along: Other arguments with rows for tokens, or pairs of such, by name: their number of
            dimensions, and which one counts the tokens. They have rows for the image, or for the
            text as well.
        image_first: Those among them that are pairs of which only the first belongs to the image.
        output: Place of the image in a block's output, where that has several parts.
        text_first: Whether text comes before the image where both are in one sequence.
        counted_by: A module whose output is the image alone, `(B, tokens, channels)`; empty where
            the first argument of every block is.
    """

    along: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    image_first: tuple[str, ...] = ()
    output: int = 1
    text_first: bool = True
    counted_by: str = ""


class Sound(NamedTuple):
    """The sound of a video.

    Attributes:
        samples: `(2, n)`, left and right, in [-1, 1], fp32, on the CPU.
        rate: Samples per second.
    """

    samples: torch.Tensor
    rate: int


class Family(ABC):
    """A family, instantiated for one of its models.

    Args:
        name: The family's name.
        flavour: Which of its published models; None if the job does not set it.
        root: The model's directory; None if only facts are needed.
        fps: Frames per second of its videos; None for the family's default.

    Attributes:
        facts: The part of the family that needs no torch (`jobs.spec.families`).
        component: The trained denoiser's name in the pipeline, which is that of its directory in
            most models.
        fps: Frames per second, an input of some families' denoisers.
        blocks: Its denoiser's repeated block classes.
        last_frame: Whether its videos are made between a first and a last frame.
    """

    LORA_TARGETS: str
    """Regular expression of the module names that get an adapter."""

    LORA_FILLED_UP: str | None = None
    """Regular expression of the modules to which the stock pipeline adds missing zero adapters."""

    MODULATION: str = r"(^|\.)(norm\w*|img_mod|txt_mod|adaLN_modulation|time_emb_proj)(\.|$)"
    """Regular expression of block layers that compute shifts and scales for the layers after them.
    In a quantized base, `modulation_precision` applies to them."""

    TOKENS: TokenLayout | None = None
    """How its blocks are given tokens; None for families that `tread` does not support."""

    KOHYA: LoraStyle | None = None
    """How kohya's scripts name its LoRAs, if one of them can train it."""

    COMFYUI: LoraStyle | None = None
    """How ComfyUI names its LoRAs, if it supports the model."""

    COMFYUI_READS_KOHYA: bool = True
    """Whether ComfyUI also reads files with kohya's names, so that one file is enough for both."""

    GUIDED_FORWARDS: int = 2
    """Denoiser forwards per step of the stock pipeline with classifier-free guidance; 1 if it puts
    both prompts into one batch."""

    NEGATIVES_APART: bool = False
    """Whether the pipeline encodes negative prompts differently from prompts."""

    MAKES_SOUND: bool = False
    """Whether the pipeline's second output is what `decode_sound` makes a video's sound of."""

    CONDITION_LEVEL: float = 0.0
    """Noise level of the conditioning images and frames that the model is given."""

    ENCODING: int = 0
    """Part of the keys of cached texts: raise it when the output of `encode` changes."""

    ENCODING_WITH_IMAGES: int = 0
    """The same for `encode_with_images`."""

    def __init__(
        self,
        name: str,
        flavour: str | None = None,
        root: Path | None = None,
        fps: float | None = None,
    ) -> None:
        self.facts = get_family(name, flavour)
        self.component = self.facts.component_of(flavour)
        self.blocks = self.facts.blocks_of(flavour)
        self._transformer = self.facts.transformer_of(flavour)
        self.last_frame = self.facts.needs_last_frame(flavour)
        self._flavour = flavour
        self.fps: float = fps or self.facts.defaults_of(flavour).get("fps", 25.0)
        self._index: Mapping[str, Any] = {}
        self._schedule: Mapping[str, Any] = {}
        if root is not None:
            self._index = find_index(root) or {}
            self._schedule = self.read_schedule(root)

    # -- classes ---------------------------------------------------------------------------

    def pipeline_class(self) -> Any:
        """Return the stock diffusers pipeline; the model's own class if the family has several."""
        own = self._index.get("_class_name")
        return getattr(diffusers, own if own in self.facts.pipelines else self.facts.pipelines[0])

    def transformer_class(self) -> Any:
        """Return the denoiser's class."""
        return getattr(diffusers, self._transformer)

    @property
    def changes_schedule(self) -> bool:
        """Whether the published scheduler is of another denoiser than the trained one."""
        return bool(self.facts.schedule_of(self._flavour))

    def denoiser_of(self, root: Path) -> Path:
        """Return a model's directory of the trained denoiser."""
        return denoiser_of(root, self.facts, self._flavour)

    def read_schedule(self, root: Path) -> dict[str, Any]:
        """Return the settings of the trained denoiser's scheduler; {} if they cannot be read."""
        settings = read_json(root / "scheduler" / "scheduler_config.json")
        return {**settings, **self.facts.schedule_of(self._flavour)} if settings else {}

    @property
    def image_encoder_class(self) -> Any:
        """Return the class that encodes first frames, in fp32; None for most models."""
        return None

    def settings(self) -> dict[str, Any]:
        """Return the pipeline's own settings from model_index.json, without its components."""
        return {
            name: value
            for name, value in self._index.items()
            if not name.startswith("_") and not isinstance(value, list)
        }

    # -- LoRA ------------------------------------------------------------------------------

    def lora_targets(self, spec: JobSpec) -> str:
        """Return a regex of the module names that get a job's adapter, if the job sets none."""
        return self.LORA_TARGETS

    @property
    def lora_prefix(self) -> str:
        """Return the prefix of names in a diffusers LoRA file; all transformers share one."""
        return self.component if self.component == "unet" else "transformer"

    def lora_options(self) -> dict[str, Any]:
        """Return additional arguments for the pipeline's `load_lora_weights`."""
        return {}

    @property
    def lora_formats(self) -> tuple[str, ...]:
        """Return the default export formats of a LoRA, which together cover every tool."""
        kohya = ("kohya",) if self.KOHYA is not None else ()
        apart = self.COMFYUI is not None and not (kohya and self.COMFYUI_READS_KOHYA)
        return ("diffusers", *kohya, *(("comfyui",) if apart else ()))

    def load_lora(self, pipeline: Any, directory: Path) -> None:
        """Load an exported LoRA into a stock pipeline, as a user would."""
        pipeline.load_lora_weights(
            directory, weight_name="pytorch_lora_weights.safetensors", **self.lora_options()
        )

    # -- what is trained -------------------------------------------------------------------

    def without_gradient(self, model: Any, spec: DataKeys) -> str:
        """Return a regex of the parameter names that a job's loss does not depend on.

        Full training freezes them, and a LoRA does not adapt their layers. It need only be found
        in a name of the published model; "" if the loss depends on all parameters.

        Args:
            model: The denoiser; what it says depends on none of its parameters.
            spec: The job.
        """
        return ""

    def freeze(self, model: torch.nn.Module, spec: DataKeys) -> None:
        """Freeze what a job's loss does not depend on.

        Otherwise FSDP2 may train it with gradients of zero, and so with weight decay: it fills in
        those of a unit's inputs (torch 2.13, `RegisterPostBackwardFunction`), and autograd passes
        them on through the units before. A single process leaves such parameters alone.

        Args:
            model: The denoiser, without adapters.
            spec: The job.
        """
        if names := self.without_gradient(model, spec):
            for name, parameter in model.named_parameters():
                if re.search(names, name):
                    parameter.requires_grad_(False)

    # -- text ------------------------------------------------------------------------------

    def load_text_pipeline(self, root: Path, dtype: torch.dtype, **components: Any) -> Any:
        """Return a pipeline with only the components that encode prompts.

        Args:
            root: The model.
            dtype: The precision of loaded components.
            components: Existing components, by their names in the pipeline.
        """
        absent = {
            name: None
            for name in _parts(root)
            if not name.startswith(_ENCODING_PARTS) and name != "scheduler"
        }
        return self.pipeline_class().from_pretrained(root, dtype=dtype, **absent | components)

    @abstractmethod
    def encode(
        self, pipeline: Any, prompt: str, max_sequence_length: int, *, negative: bool = False
    ) -> dict[str, torch.Tensor]:
        """Return the tensors of a prompt that the cache stores, without a batch dimension.

        They have the names of the pipeline's own arguments. If their length depends on the prompt,
        one of them is a mask, with `mask` in its name: in a batch, shorter texts are padded with
        zeros at the end (`engine.families.shared.collate`).

        Args:
            pipeline: From `load_text_pipeline`, on the device.
            prompt: The text.
            max_sequence_length: Limit in tokens.
            negative: Whether it is a negative prompt, or the empty text of a sample whose caption
                is dropped; only used with `NEGATIVES_APART`.
        """

    def encode_with_images(
        self, pipeline: Any, prompt: str, max_sequence_length: int, images: Sequence[Image.Image]
    ) -> dict[str, torch.Tensor]:
        """Encode a prompt like `encode`, for pipelines that encode conditioning images with it.

        Args:
            pipeline: From `load_text_pipeline`, on the device.
            prompt: The text, or a negative prompt.
            max_sequence_length: Limit in tokens.
            images: At least one, at the size that the pipeline passes to its encoder.
        """
        raise NotImplementedError

    # -- latents ---------------------------------------------------------------------------

    def load_vae(self, root: Path, dtype: torch.dtype) -> Any:
        """Return the autoencoder."""
        _, name = _parts(root)["vae"]  # never import the library that is named there
        vae_class = getattr(import_module("diffusers"), name, None)
        if vae_class is None:
            raise UserError(f"{index_of(root)}: diffusers has no {name}", "download it again")
        return vae_class.from_pretrained(root, subfolder="vae", dtype=dtype)

    def encode_pictures(self, vae: Any, pixels: torch.Tensor) -> torch.Tensor:
        """Encode pixels `(B, 3, H, W)` in [-1, 1] to normalized latents `(B, C, h, w)`.

        For families that train on videos: `(B, 3, F, H, W)` to `(B, C, f, h, w)`.
        """
        return self.normalise(vae, vae.encode(pixels).latent_dist.mode())

    def encode_condition(self, vae: Any, pixels: torch.Tensor) -> torch.Tensor:
        """Encode a conditioning image or frame like `encode_pictures`."""
        return self.encode_pictures(vae, pixels)

    def normalise(self, vae: Any, latents: torch.Tensor) -> torch.Tensor:
        """Convert latents from the VAE's encoder to the denoiser's scale."""
        return normalise(vae, latents)

    def denormalise(self, vae: Any, latents: torch.Tensor) -> torch.Tensor:
        """Convert latents from the denoiser's scale to the VAE's decoder."""
        return denormalise(vae, latents)

    # -- training --------------------------------------------------------------------------

    def arrange(self, condition: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Convert collated prompts to inputs of `predict`, as far as that depends on their values.

        This is called while they are in host memory, since reading a value on a GPU would wait for
        all its pending work. Calling it twice is the same as calling it once.
        """
        return condition

    def sizes(self, spec: JobSpec, pictures: Sequence[Shown]) -> dict[str, torch.Tensor]:
        """Return the size conditioning of a batch for the denoiser; {} for most families.

        Args:
            spec: The job.
            pictures: The part of its image that each sample shows.
        """
        return {}

    @abstractmethod
    def predict(
        self,
        transformer: Any,
        noisy: torch.Tensor,
        level: torch.Tensor,
        condition: dict[str, torch.Tensor],
        guidance: float,
    ) -> torch.Tensor:
        """Return the denoiser's prediction for noisy latents.

        It has their shape; the objective defines its meaning.

        Args:
            transformer: The denoiser.
            noisy: `(B, C, h, w)`, for videos `(B, C, f, h, w)`.
            level: `(B,)`. For flow matching, sigma in (0, 1), where 1 is pure noise and the
                prediction is the velocity noise - data; for denoising, the timestep.
            condition: Encoded prompts, each `(B, …)`, after `arrange`; and latents of conditioning
                images for models that take them (`engine.families.shared.references`).
            guidance: For models that take it as an input.
        """

    def shift_of(self, height: int, width: int, frames: int = 1) -> float:
        """Return the shift of sigma in training, for latents of this size."""
        tokens = self.tokens_of(height, width, frames)
        own = self.facts.trained_shift_of(self._flavour)
        return shifts.trained_shift(own, self._schedule, tokens)

    def sampler_shift_of(self, height: int, width: int, frames: int = 1) -> float:
        """Return the shift of the stock pipeline's sampler, for latents of this size."""
        return shifts.sampler_shift(self._schedule, self.tokens_of(height, width, frames))

    def terminal(self) -> float:
        """Return the lowest sigma of draws with the scheduler's shift; usually 0."""
        return shifts.terminal(self.facts.trained_shift_of(self._flavour), self._schedule)

    def tokens_of(self, height: int, width: int, frames: int = 1) -> int:
        """Return the number of the denoiser's tokens for latents of this size.

        A token is 2×2 cells, unless overridden.
        """
        return (height // 2) * (width // 2) * frames

    def sigma_range(self) -> tuple[float, float]:
        """Return this denoiser's range of sigma: (0, 1) unless another one covers the rest."""
        return 0.0, 1.0

    @property
    def second_denoiser(self) -> str | None:
        """Return the component that denoises the other sigmas; None if there is none."""
        return None

    # -- sampling --------------------------------------------------------------------------

    def sampling_pipeline(
        self, root: Path, transformer: Any, vae: Any, /, **components: Any
    ) -> Any:
        """Return the stock pipeline with a trained denoiser, without text encoders.

        Args:
            root: The model.
            transformer: The denoiser.
            vae: The autoencoder.
            components: Existing components, by their names in the pipeline.
        """
        absent = {name: None for name in _parts(root) if name.startswith(_ENCODING_PARTS)}
        given = {self.component: transformer, "vae": vae} | components
        pipeline = self.pipeline_class().from_pretrained(root, **absent | given)
        if self.changes_schedule:
            scheduler = type(pipeline.scheduler).from_config(self.read_schedule(root))
            pipeline.register_modules(scheduler=scheduler)
        return pipeline

    def sample_arguments(
        self,
        request: SampleRequest,
        condition: dict[str, torch.Tensor],
        negative: dict[str, torch.Tensor] | None,
    ) -> dict[str, Any]:
        """Return the pipeline's arguments for an image, except its size, steps and noise.

        Args:
            request: The image.
            condition: Its encoded prompt, without a batch dimension.
            negative: Its encoded negative prompt; None if it has no effect.
        """
        arguments: dict[str, Any] = {name: text.unsqueeze(0) for name, text in condition.items()}
        arguments["guidance_scale"] = request.guidance
        if negative is not None:
            arguments |= {f"negative_{name}": text.unsqueeze(0) for name, text in negative.items()}
        if self.facts.frame_step:
            arguments["num_frames"] = request.frames
        return arguments

    def pipeline_with_image(
        self, pipeline: Any, condition: Mapping[str, torch.Tensor] | None = None
    ) -> Any:
        """Return the stock pipeline for conditioning images, with the usual one's components.

        Args:
            pipeline: The usual pipeline.
            condition: The image as encoded by `encode_with_images`, without a batch dimension; None
                if the pipeline has the encoder.
        """
        return pipeline

    def reference_arguments(self, pictures: Sequence[Conditioning]) -> dict[str, Any]:
        """Return the pipeline's arguments for conditioning images at their final size.

        Args:
            pictures: At least one; a video is its frames.
        """
        return {"image": pictures[0] if len(pictures) == 1 else list(pictures)}

    def load_sound_vae(self, root: Path) -> Any:
        """Return the sound's autoencoder, in fp32, of a family that is trained with sound."""
        raise NotImplementedError

    def encode_sound(self, vae: Any, samples: torch.Tensor) -> torch.Tensor:
        """Encode a waveform `(2, n)` to normalized latents, `(L, C)`."""
        raise NotImplementedError

    def sound_rate(self) -> int:
        """Return the samples per second that `encode_sound` takes."""
        raise NotImplementedError

    def sound_decoder(self, root: Path, *, load: bool = True) -> Any:
        """Return the module that decodes a sound's latents, of a family that makes some.

        Args:
            root: The model.
            load: Whether to load its weights, in fp32.
        """
        raise NotImplementedError

    def decode_sound(self, root: Path, latents: torch.Tensor, device: torch.device) -> Sound:
        """Decode the latents of a video's sound."""
        decoder = self.sound_decoder(root).to(device)
        return Sound(decoder(latents)[0].clamp(-1, 1).cpu(), decoder.rate)

    def forwards_per_step(self, request: SampleRequest) -> int:
        """Return the number of denoiser forwards per denoising step of the pipeline."""
        return self.GUIDED_FORWARDS if request.guided else 1

    def forwards_of(self, request: SampleRequest) -> int:
        """Return the number of denoiser forwards that the pipeline needs for an image."""
        return self._timesteps(request.steps) * self.forwards_per_step(request)

    def _timesteps(self, steps: int) -> int:
        """Return the denoising steps that the model's scheduler makes of a number of steps.

        Some make more on a discrete schedule: PNDM one more, Heun nearly twice as many.
        """
        # Diffusers instantiates the class in the index, even if another class wrote the settings.
        _, name = self._index.get("scheduler") or (None, self._schedule.get("_class_name"))
        scheduler_class = getattr(diffusers, str(name), None)
        if self.facts.objective != "denoising" or scheduler_class is None:
            return steps
        scheduler = scheduler_class.from_config(self._schedule)
        scheduler.set_timesteps(steps)
        return len(scheduler.timesteps)

    def unpack(self, pipeline: Any, latents: torch.Tensor, request: SampleRequest) -> torch.Tensor:
        """Convert the pipeline's latents to `(B, C, h, w)` or `(B, C, f, h, w)`."""
        return latents

    def decode(
        self, pipeline: Any, latents: torch.Tensor, request: SampleRequest
    ) -> list[Image.Image]:
        """Return the frames of the pipeline's latents (batch of one); an image is one frame."""
        unpacked = self.unpack(pipeline, latents, request)
        pixels = pipeline.vae.decode(self.denormalise(pipeline.vae, unpacked), return_dict=False)[0]
        if pixels.dim() == 5:
            return pipeline.video_processor.postprocess_video(pixels, output_type="pil")[0]
        return pipeline.image_processor.postprocess(pixels, output_type="pil")


def _parts(root: Path) -> dict[str, tuple[str, str]]:
    """Return library and class of each component that a model has."""
    index = find_index(root) or {}
    return {
        name: (str(entry[0]), str(entry[1]))
        for name, entry in index.items()
        if isinstance(entry, list) and len(entry) == 2 and entry[0] and entry[1]
    }
