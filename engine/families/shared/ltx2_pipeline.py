"""Sample with LTX-2's stock pipeline, given what its connectors make of texts (diffusers 0.42).

The stock pipeline takes the hidden states of all of Gemma's layers, 385 MB in bf16 for a text of
1024 tokens, and has its connectors make 16 MB of them (12 MB in LTX-2.3). Those are cached here.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import torch
from diffusers import DiffusionPipeline, LTX2ImageToVideoPipeline, LTX2Pipeline
from transformers.audio_utils import mel_filter_bank

from engine.families.shared.text_masks import fill_masks

if TYPE_CHECKING:
    from collections.abc import Mapping

_WINDOW: Final = 1024  # samples
_QUIET: Final = 1e-5
_TEXTS: Final = {"prompt_attention_mask": "prompt_embeds"}
_MASKS: Final = ("encoder_attention_mask", "audio_encoder_attention_mask")


def text_widths(config: Any) -> list[int]:
    """Return the widths of what a transformer gets of a text, for the video and for the sound."""
    if config.use_prompt_embeddings:
        return [config.caption_channels] * 2
    return [config.cross_attention_dim, config.audio_cross_attention_dim]


def log_spectrum(samples: torch.Tensor, config: Any) -> torch.Tensor:
    """Return the logarithm of a waveform's mel spectrogram, `(2, length, mel bins)`.

    Args:
        samples: `(2, n)`.
        config: Of the sound's autoencoder.
    """
    rate, bins = config.sample_rate, config.mel_bins
    if missing := _WINDOW - samples.shape[1]:
        samples = torch.nn.functional.pad(samples, (0, max(missing, 0)))
    window = torch.hann_window(_WINDOW, device=samples.device)
    parts = torch.stft(samples, _WINDOW, config.mel_hop_length, window=window, return_complex=True)
    bank = mel_filter_bank(
        _WINDOW // 2 + 1, bins, 0.0, rate / 2, rate, norm="slaney", mel_scale="slaney"
    )
    scale = torch.from_numpy(bank).to(samples)
    return (parts.abs().transpose(1, 2) @ scale).clamp(min=_QUIET).log()


class SoundDecoder(torch.nn.Module):
    """Makes a waveform of a sound's latents, as the transformer has them.

    Attributes:
        rate: Of the waveform, in samples per second.
    """

    def __init__(self, vae: Any, vocoder: Any) -> None:
        super().__init__()
        self._vae, self._vocoder = vae, vocoder
        self.rate: int = vocoder.config.output_sampling_rate

    def shape(self, length: int, width: int) -> tuple[int, ...]:
        """Return the shape of the latents of `length` rows."""
        channels = self._vae.config.latent_channels
        return 1, channels, length, width // channels

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        """Return the waveform, `(B, 2, n)`, of latents `(B, channels, length, mel bins)`."""
        rows = latents.transpose(1, 2)  # (B, length, channels, mel bins)
        scaled = rows.flatten(2) * self._vae.latents_std + self._vae.latents_mean
        spectrum = self._vae.decode(scaled.view_as(rows).transpose(1, 2), return_dict=False)[0]
        waveform: torch.Tensor = self._vocoder(spectrum)
        return waveform


class SoundScale:
    """What the stock pipeline reads of the sound's autoencoder, which decodes nothing here.

    Latents of sound are returned as the transformer has them.

    Args:
        config: The autoencoder's.
    """

    mel_compression_ratio = temporal_compression_ratio = 4
    latents_mean, latents_std = torch.zeros(()), torch.ones(())

    def __init__(self, config: Mapping[str, Any]) -> None:
        published: dict[str, Any] = {
            "sample_rate": 16000,
            "mel_hop_length": 160,
            "mel_bins": 64,
            "latent_channels": 8,
        }
        self.config = SimpleNamespace(**{**published, **config})


class _TakesConnected(DiffusionPipeline):
    """Takes texts as `engine.families.ltx2` encodes them, without masks.

    The stock pipeline needs some, of ones here; the transformer gets none, since any would rule out
    flash attention. `Connected` and `SoundScale` are in the places of its parts for text and sound.
    """

    def __call__(self, *words: Any, **names: Any) -> Any:
        fill_masks(names, _TEXTS, guided=False)
        hook = self.transformer.register_forward_pre_hook(_without_masks, with_kwargs=True)
        try:
            return super().__call__(*words, **names)
        finally:
            hook.remove()


class ConnectedPipeline(_TakesConnected, LTX2Pipeline):
    """For videos of a text."""


class ConnectedImagePipeline(_TakesConnected, LTX2ImageToVideoPipeline):
    """For videos of a text and their first frame."""


class Connected:
    """Stand in for the connectors, whose output is the text.

    Args:
        config: The transformer's.
    """

    def __init__(self, config: Any) -> None:
        self._widths = text_widths(config)

    def __call__(
        self, text: torch.Tensor, mask: torch.Tensor, padding_side: str = "left"
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        video, sound = text.split(self._widths, dim=-1)
        return video, sound, mask


def _without_masks(_: Any, args: tuple[Any, ...], names: dict[str, Any]) -> Any:
    return args, names | dict.fromkeys(_MASKS)
