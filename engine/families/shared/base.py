"""What most families share. A family's own module has only what is particular to it.

Everything comes from the stock pipeline and from the model's own files where they have it: classes
from `model_index.json`, the noise schedule from `scheduler/scheduler_config.json`, statistics of
latents from the VAE's config.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import diffusers

from engine.families.shared import shifts
from engine.families.shared.latent_statistics import denormalise, normalise
from jobs.errors import UserError
from jobs.run.rundir import read_json
from jobs.spec.families import get_family

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import torch
    from PIL import Image

    from engine.data.index.views import Shown
    from engine.families.shared.lora_names import LoraStyle
    from jobs.spec.job_spec import JobSpec
    from jobs.spec.keys.prompts import SampleRequest

# Parts of a pipeline that encode prompts and the images beside them, by how their names begin.
_TEXT_PARTS: Final = ("text_encoder", "tokenizer", "processor", "image_encoder", "image_processor")


class Family(ABC):
    """A family, around one of its models.

    Args:
        name: The family's.
        flavour: Which of its published models; None if the job does not set it.
        root: The model's directory; None where only facts are needed.
        fps: Frames per second of its videos; None for the family's default.

    Attributes:
        facts: What is known without torch (`jobs.spec.families`).
        component: The denoiser that is trained: its directory, and its name in the pipeline.
        fps: Frames per second, an input of some families' denoisers.
    """

    LORA_TARGETS: str
    """Regular expression of the module names that get an adapter."""

    LORA_FILLED_UP: str | None = None
    """Regular expression of the modules to which the stock pipeline adds an adapter of zeros where
    a LoRA has none."""

    MODULATION: str = r"(^|\.)(norm\w*|img_mod|txt_mod|adaLN_modulation|time_emb_proj)(\.|$)"
    """Regular expression of the names of layers in blocks that compute shifts and scales of all
    that comes after them; `modulation_precision` is theirs in a packed base."""

    KOHYA: LoraStyle | None = None
    """How kohya's scripts name its LoRAs, where one of them trains it."""

    COMFYUI: LoraStyle | None = None
    """How ComfyUI names its LoRAs, where it has the model."""

    COMFYUI_READS_KOHYA: bool = True
    """Whether ComfyUI also takes files with kohya's names, so that one file is for both."""

    GUIDED_FORWARDS: int = 2
    """Forwards of the denoiser in a step of the stock pipeline with classifier-free guidance; 1
    where it puts both prompts into one batch."""

    NEGATIVES_APART: bool = False
    """Whether the pipeline encodes negative prompts in another way than prompts."""

    ENCODING: int = 0
    """Goes into keys of cached texts: raise it when `encode` makes other tensors."""

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
        self.fps: float = fps or self.facts.defaults_of(flavour).get("fps", 25.0)
        self._index: Mapping[str, Any] = {}
        self._schedule: Mapping[str, Any] = {}
        if root is not None:
            self._index = read_json(root / "model_index.json") or {}
            self._schedule = read_json(root / "scheduler" / "scheduler_config.json") or {}

    # -- classes ---------------------------------------------------------------------------

    def pipeline_class(self) -> Any:
        """The stock diffusers pipeline, of the model's own class if the family has several."""
        own = self._index.get("_class_name")
        return getattr(diffusers, own if own in self.facts.pipelines else self.facts.pipelines[0])

    def transformer_class(self) -> Any:
        """Return the denoiser's class."""
        return getattr(diffusers, self.facts.transformer)

    @property
    def image_encoder_class(self) -> Any:
        """The class of what encodes first frames, in fp32, beside the text; None of most models."""
        return None

    def settings(self) -> dict[str, Any]:
        """The pipeline's own settings, as model_index.json has them beside its components."""
        return {
            name: value
            for name, value in self._index.items()
            if not name.startswith("_") and not isinstance(value, list)
        }

    # -- LoRA ------------------------------------------------------------------------------

    def lora_targets(self, spec: JobSpec) -> str:
        """Regular expression of the module names that get a job's adapter, if it names none."""
        return self.LORA_TARGETS

    @property
    def lora_prefix(self) -> str:
        """What the names in a LoRA file of diffusers begin with; all transformers share one."""
        return self.component if self.component == "unet" else "transformer"

    def lora_options(self) -> dict[str, Any]:
        """Return what the pipeline's `load_lora_weights` takes besides the file."""
        return {}

    @property
    def lora_formats(self) -> tuple[str, ...]:
        """The default export formats of a LoRA: files for every tool."""
        kohya = ("kohya",) if self.KOHYA is not None else ()
        apart = self.COMFYUI is not None and not (kohya and self.COMFYUI_READS_KOHYA)
        return ("diffusers", *kohya, *(("comfyui",) if apart else ()))

    def load_lora(self, pipeline: Any, directory: Path) -> None:
        """Load an exported LoRA into a stock pipeline, as a user would."""
        pipeline.load_lora_weights(
            directory, weight_name="pytorch_lora_weights.safetensors", **self.lora_options()
        )

    # -- text ------------------------------------------------------------------------------

    def load_text_pipeline(self, root: Path, dtype: torch.dtype, **components: Any) -> Any:
        """Return a pipeline with only what encodes prompts.

        Args:
            root: The model.
            dtype: The precision of what is loaded.
            components: Parts that exist already, by their names in the pipeline.
        """
        absent = {
            name: None
            for name in _parts(root)
            if not name.startswith(_TEXT_PARTS) and name != "scheduler"
        }
        return self.pipeline_class().from_pretrained(root, dtype=dtype, **absent | components)

    @abstractmethod
    def encode(
        self, pipeline: Any, prompt: str, max_sequence_length: int, *, negative: bool = False
    ) -> dict[str, torch.Tensor]:
        """Return the tensors of a prompt that the cache keeps, without a batch dimension.

        They have the names of the pipeline's own arguments for them. Where their length
        depends on the prompt, one of them is a mask, whose name has `mask` in it: in a batch,
        shorter ones are filled up with zeros at the end (`engine.families.shared.collate`).

        Args:
            pipeline: From `load_text_pipeline`, on the device.
            prompt: The text.
            max_sequence_length: Tokens.
            negative: Whether it is a negative prompt, or the empty text of a sample whose caption
                is dropped; matters only with `NEGATIVES_APART`.
        """

    def encode_with_images(
        self, pipeline: Any, prompt: str, max_sequence_length: int, images: Sequence[Image.Image]
    ) -> dict[str, torch.Tensor]:
        """`encode` of models whose pipeline encodes conditioning images with the prompt.

        Args:
            pipeline: From `load_text_pipeline`, on the device.
            prompt: The text, or a negative prompt.
            max_sequence_length: Tokens.
            images: At least one, as the pipeline shows them to its encoder.
        """
        raise NotImplementedError

    # -- latents ---------------------------------------------------------------------------

    def load_vae(self, root: Path, dtype: torch.dtype) -> Any:
        """Return the autoencoder."""
        _, name = _parts(root)["vae"]  # the library is not imported for being named there
        vae_class = getattr(import_module("diffusers"), name, None)
        if vae_class is None:
            raise UserError(
                f"{root}/model_index.json: diffusers has no {name}", "download it again"
            )
        return vae_class.from_pretrained(root, subfolder="vae", dtype=dtype)

    def encode_pictures(self, vae: Any, pixels: torch.Tensor) -> torch.Tensor:
        """`(B, 3, H, W)` in [-1, 1] → normalized latents `(B, C, h, w)`.

        Of families that train on videos, `(B, 3, F, H, W)` → `(B, C, f, h, w)`.
        """
        return self.normalise(vae, vae.encode(pixels).latent_dist.mode())

    def normalise(self, vae: Any, latents: torch.Tensor) -> torch.Tensor:
        """Return what the VAE encodes → what the denoiser sees."""
        return normalise(vae, latents)

    def denormalise(self, vae: Any, latents: torch.Tensor) -> torch.Tensor:
        """Return what the denoiser makes → what the VAE decodes."""
        return denormalise(vae, latents)

    # -- training --------------------------------------------------------------------------

    def arrange(self, condition: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Collated prompts as `predict` needs them, where that depends on their values.

        Called while they are in host memory: reading a value on a GPU means waiting for all its
        pending work. Calling it twice changes nothing.
        """
        return condition

    def sizes(self, spec: JobSpec, pictures: Sequence[Shown]) -> dict[str, torch.Tensor]:
        """Size conditioning for the denoiser, part of the condition of a batch; {} for most.

        Args:
            spec: The job.
            pictures: What each sample shows of its image.
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

        In their shape, as the objective defines it.

        Args:
            transformer: The denoiser.
            noisy: `(B, C, h, w)`, of videos `(B, C, f, h, w)`.
            level: `(B,)`: sigma in (0, 1) of flow matching, where 1 is pure noise and the
                prediction is the velocity noise - data; of denoising, the timestep.
            condition: Encoded prompts, each `(B, …)`, after `arrange`; and latents of conditioning
                images, of models that take them (`engine.families.shared.references`).
            guidance: For models that take it as an input.
        """

    def shift_of(self, height: int, width: int, frames: int = 1) -> float:
        """Return the shift of sigma that training draws with for latents of this size."""
        tokens = self.tokens_of(height, width, frames)
        return shifts.trained_shift(self.facts, self._schedule, tokens)

    def sampler_shift_of(self, height: int, width: int, frames: int = 1) -> float:
        """Return the shift that the stock pipeline samples with for latents of this size."""
        return shifts.sampler_shift(self._schedule, self.tokens_of(height, width, frames))

    def terminal(self) -> float:
        """Return the sigma that draws by the scheduler's shift end at; mostly 0."""
        return shifts.terminal(self.facts, self._schedule)

    def tokens_of(self, height: int, width: int, frames: int = 1) -> int:
        """Return the denoiser's tokens for latents of this size.

        2×2 cells each, unless overridden.
        """
        return (height // 2) * (width // 2) * frames

    def sigma_range(self) -> tuple[float, float]:
        """Return the sigmas that this denoiser is for: (0, 1) unless another has the rest."""
        return 0.0, 1.0

    @property
    def second_denoiser(self) -> str | None:
        """The component that denoises the other sigmas; None where there is none."""
        return None

    # -- sampling --------------------------------------------------------------------------

    def sampling_pipeline(
        self, root: Path, transformer: Any, vae: Any, /, **components: Any
    ) -> Any:
        """Return the stock pipeline around a trained denoiser, without text encoders.

        Args:
            root: The model.
            transformer: The denoiser.
            vae: The autoencoder.
            components: Parts that exist already, by their names in the pipeline.
        """
        absent = {name: None for name in _parts(root) if name.startswith(_TEXT_PARTS)}
        given = {self.component: transformer, "vae": vae} | components
        return self.pipeline_class().from_pretrained(root, **absent | given)

    def sample_arguments(
        self,
        request: SampleRequest,
        condition: dict[str, torch.Tensor],
        negative: dict[str, torch.Tensor] | None,
    ) -> dict[str, Any]:
        """Return the pipeline's arguments to make an image, except its size, steps and noise.

        Args:
            request: The image.
            condition: Its encoded prompt, without a batch dimension.
            negative: Its encoded negative prompt; None where that has no effect.
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
        """The stock pipeline that takes conditioning images, with the parts of the usual one.

        Args:
            pipeline: The usual one.
            condition: The image as `encode_with_images` encoded it, without a batch dimension; None
                where the pipeline has the encoder.
        """
        return pipeline

    def reference_arguments(self, pictures: Sequence[Image.Image]) -> dict[str, Any]:
        """Return what the pipeline takes for conditioning images, which have their size already.

        Args:
            pictures: At least one.
        """
        return {"image": pictures[0] if len(pictures) == 1 else list(pictures)}

    def forwards_per_step(self, request: SampleRequest) -> int:
        """How many forwards of the denoiser one denoising step of the pipeline makes."""
        return self.GUIDED_FORWARDS if request.guided else 1

    def forwards_of(self, request: SampleRequest) -> int:
        """How many forwards of the denoiser the pipeline makes for an image."""
        return self._timesteps(request.steps) * self.forwards_per_step(request)

    def _timesteps(self, steps: int) -> int:
        """Return the denoising steps that the model's scheduler makes of a number of steps.

        Some make more on a discrete schedule: PNDM one, Heun nearly twice as many.
        """
        # Diffusers builds the class in the index, whichever one wrote the settings.
        _, name = self._index.get("scheduler") or (None, self._schedule.get("_class_name"))
        scheduler_class = getattr(diffusers, str(name), None)
        if self.facts.objective != "denoising" or scheduler_class is None:
            return steps
        scheduler = scheduler_class.from_config(self._schedule)
        scheduler.set_timesteps(steps)
        return len(scheduler.timesteps)

    def unpack(self, pipeline: Any, latents: torch.Tensor, request: SampleRequest) -> torch.Tensor:
        """Latents as the pipeline keeps them → `(B, C, h, w)` or `(B, C, f, h, w)`."""
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
    """Return the components that a model has: name → library and class."""
    index = read_json(root / "model_index.json") or {}
    return {
        name: (str(entry[0]), str(entry[1]))
        for name, entry in index.items()
        if isinstance(entry, list) and len(entry) == 2 and entry[0] and entry[1]
    }
