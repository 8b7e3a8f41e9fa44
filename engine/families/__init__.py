"""Model families: one small module each, with the functions that `Family` names."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

from jobs.families import get_family

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch
    from PIL import Image

    from jobs.prompts import SampleRequest


class KohyaStyle(Protocol):
    """How kohya's scripts and ComfyUI name a family's LoRAs; a module beside the family's own."""

    METADATA: dict[str, str]

    def convert(self, layers: Mapping[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
        """The same adapter under those names.

        Args:
            layers: `<module>.lora_A.weight` (rank, in) and `.lora_B.weight` (out, rank).
            scale: What their product is multiplied with: alpha / rank.
        """
        ...


class Family(Protocol):
    """What is particular to a family. Implemented by the modules of this package."""

    LORA_TARGETS: str
    KOHYA: KohyaStyle | None

    def pipeline_class(self) -> Any:
        """The stock diffusers pipeline."""
        ...

    def transformer_class(self) -> Any:
        """The denoiser's class."""
        ...

    def load_text_pipeline(self, root: Path, dtype: torch.dtype, **components: Any) -> Any:
        """A pipeline with only what encodes prompts.

        Args:
            root: The model.
            dtype: The precision of what is loaded.
            components: Parts that exist already, by their names in the pipeline.
        """
        ...

    def encode(
        self, pipeline: Any, prompt: str, max_sequence_length: int
    ) -> dict[str, torch.Tensor]:
        """The tensors of a prompt that the cache keeps, without a batch dimension."""
        ...

    def load_vae(self, root: Path, dtype: torch.dtype) -> Any:
        """The autoencoder."""
        ...

    def encode_pictures(self, vae: Any, pixels: torch.Tensor) -> torch.Tensor:
        """`(B, 3, H, W)` in [-1, 1] → normalised latents `(B, C, h, w)`.

        Of families that train on videos, `(B, 3, F, H, W)` → `(B, C, f, h, w)`.
        """
        ...

    def predict(
        self,
        transformer: Any,
        noisy: torch.Tensor,
        sigma: torch.Tensor,
        condition: dict[str, torch.Tensor],
        guidance: float,
    ) -> torch.Tensor:
        """The transformer's velocity `(B, C, h, w)` for noisy latents at `sigma: (B,)`."""
        ...

    def shift_of(self, height: int, width: int) -> float:
        """The schedule's shift for latents of this size."""
        ...

    def sampling_pipeline(self, root: Path, transformer: Any, vae: Any) -> Any:
        """The stock pipeline around a trained transformer, without text encoders."""
        ...

    def sample_arguments(
        self,
        request: SampleRequest,
        condition: dict[str, torch.Tensor],
        negative: dict[str, torch.Tensor] | None,
    ) -> dict[str, Any]:
        """What the pipeline takes to make a picture, but for its size, steps and noise.

        Args:
            request: The picture.
            condition: Its encoded prompt, without a batch dimension.
            negative: Its encoded negative prompt; None where that has no effect.
        """
        ...

    def forwards_per_step(self, request: SampleRequest) -> int:
        """How many forwards of the transformer one denoising step of the pipeline makes."""
        ...

    def decode(self, pipeline: Any, latents: torch.Tensor, height: int, width: int) -> Image.Image:
        """The picture of what the pipeline returns as latents (batch of one)."""
        ...


def load(name: str, flavour: str | None = None) -> Family:
    """The family's module.

    Raises:
        SpecError: Unknown family or flavour.
    """
    return cast("Family", import_module(f"engine.families.{get_family(name, flavour).name}"))
