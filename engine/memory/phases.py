"""Phases before and beside training: caching texts and latents, decoding samples.

They need the model's other parts, so they are predicted where the model is on disk, and left out
where only its published config is known.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from engine import families
from engine.memory import cuda
from engine.memory.inputs import sampled, training_frames, training_size
from engine.memory.live import Live, rounded
from engine.memory.report import Parts, Phase
from engine.precision import compute_dtype
from engine.text_encoders import encoder_bytes
from engine.weights import parameters_on_meta
from jobs.errors import UserError
from jobs.rundir import read_json

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from jobs.spec import JobSpec

_TEXT_NOTE: Final = "weights of the text encoders; their activations are small beside them"


def text_cache(spec: JobSpec, root: Path, ranks: int) -> Phase | None:
    """Text encoders on the device; None where their size is not known."""
    try:
        size = encoder_bytes(root, compute_dtype(spec))
    except UserError:
        return None
    shared = spec.shard_text_encoders and ranks > 1
    return Phase("text_cache", Parts(parameters=size // ranks if shared else size), _TEXT_NOTE)


def latent_cache(spec: JobSpec, root: Path) -> Phase | None:
    """The autoencoder with the largest picture; None where it cannot be traced."""
    size, frames = training_size(spec), training_frames(spec)
    found = _autoencoder(spec, root, size, frames, decodes=False)
    return found and Phase("latent_cache", Parts(parameters=found[0], activations=found[1]))


def decoding(spec: JobSpec, root: Path) -> Parts | None:
    """What the autoencoder takes on top of training when the largest sample is decoded."""
    asked = sampled(spec)
    found = asked and _autoencoder(spec, root, *asked, decodes=True)
    return Parts(workspace=sum(found)) if found else None


def autoencoder_bytes(root: Path) -> int:
    """Of its files, which is what it takes in host memory, within a factor of two."""
    return sum(path.stat().st_size for path in (root / "vae").glob("*.safetensors"))


def _autoencoder(
    spec: JobSpec, root: Path, size: tuple[int, int], frames: int, *, decodes: bool
) -> tuple[int, int] | None:
    """Bytes of its weights in fp32, and the most that it takes besides."""
    import diffusers

    config = read_json(root / "vae" / "config.json") or {}
    vae_class: Any = getattr(diffusers, str(config.get("_class_name")), None)
    if vae_class is None:
        return None
    family = families.load(spec.model_family, spec.model_flavour, root, spec.fps)
    width, height = size
    shape = (1, 3, frames, height, width) if family.facts.frame_step else (1, 3, height, width)
    try:
        with parameters_on_meta():
            vae = vae_class.from_config(config).eval()
        with ExitStack() as stack:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            weights = _on_fake(vae)
            live = stack.enter_context(Live())
            for tensor in weights:
                live.ignore(tensor)
            if spec.device != "cpu":
                stack.enter_context(cuda.AsOnCuda())
            stack.enter_context(torch.no_grad())
            most = _run(live, family, vae, torch.empty(shape), decodes=decodes)
    except Exception:  # an autoencoder of another kind: a phase less is predicted
        return None
    return sum(rounded(one.untyped_storage().nbytes()) for one in weights), most


def _run(live: Live, family: Any, vae: Any, pixels: torch.Tensor, *, decodes: bool) -> int:
    if not decodes:
        live.reset()
        family.encode_pictures(vae, pixels)
        return live.most
    flat = pixels.dim() == 4 and "temperal_downsample" in vae.config  # a video's, of one frame
    encoded = vae.encode(pixels.unsqueeze(2) if flat else pixels)
    code = encoded.latent_dist.mode() if hasattr(encoded, "latent_dist") else encoded.latent
    shape, dtype = code.shape, code.dtype
    del encoded, code, pixels
    latents = torch.empty(shape, dtype=dtype)
    live.reset()
    vae.decode(latents, return_dict=False)
    return live.most


def _on_fake(model: torch.nn.Module) -> list[torch.Tensor]:
    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")

    _replace(model, fake)
    return [*model.parameters(), *model.buffers()]


def _replace(model: torch.nn.Module, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(make(parameter), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = make(buffer)
