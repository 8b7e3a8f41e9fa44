"""Phases before and beside training: caching texts and latents, decoding samples.

They need the model's other parts, so they are predicted where the model is on disk, and skipped
where only its published config is known.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from engine import families
from engine.memory.predicting.prediction import Parts, Phase
from engine.memory.tracing import cuda
from engine.memory.tracing.inputs import largest_encoded, sampled, training_frames
from engine.memory.tracing.live import Live, rounded
from engine.model.encoders.encoder_files import encoder_bytes, encoder_names, kept_bytes
from engine.model.encoders.sharded_encoder import is_quantised
from engine.model.files.weights import stored_tensors
from engine.model.meta_device import parameters_on_meta
from engine.model.precision import compute_dtype
from engine.model.quantized.packing import packing_of
from jobs.errors import UserError
from jobs.memory.host_memory import STATE_BYTES
from jobs.run.rundir import read_json
from jobs.spec.families import sees_images
from jobs.spec.rules.lora_conflicts import trains_text
from jobs.spec.rules.strategy import checkpoints_activations

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from engine.model.quantized.packing import Packing
    from jobs.spec.job_spec import JobSpec
    from jobs.spec.keys.job import JobKeys

_TEXT_NOTE: Final = "weights of the text encoders; their activations are small in comparison"
_CROWDED_NOTE: Final = "sharded text encoders; not sharded if a GPU has room for them"
# A block's tensors have its number in their names, the first one there.
_BLOCK: Final = re.compile(r"(.*?\.\d+)\.")


def text_cache(spec: JobSpec, root: Path, ranks: int) -> Phase | None:
    """Text encoders on the device; None where their size is not known."""
    dtype = compute_dtype(spec)
    try:
        packing = packing_of(spec.text_encoder_precision)
        size, image_encoder = encoder_bytes(root, dtype, packing), _image_encoder_bytes(spec, root)
        parts = Parts(parameters=size + image_encoder)
        if ranks == 1 or not _in_shards(spec, root):
            return Phase("text_cache", parts, _TEXT_NOTE)
        held, gathered = _sharded_encoders(root, dtype, ranks, packing)
    except UserError:
        return None
    # What a job leaves open is decided by the GPUs' room
    # (`engine.model.encoders.text_encoders`): this much it needs in any case.
    note = _CROWDED_NOTE if spec.shard_text_encoders is None else _TEXT_NOTE
    return Phase("text_cache", Parts(parameters=held + image_encoder, gathered=gathered), note)


def text_lora_bytes(spec: JobSpec, root: Path) -> int:
    """Return the bytes for training a LoRA on CLIP text encoders, besides their frozen weights.

    Of each adapted layer A and B: masters with gradient, optimizer state and average, and a copy in
    the precision that computes. And what a forward keeps for backward, from the widths of a CLIP
    block: 16 of its width for each token, or its input alone where activations are recomputed.
    """
    narrow = compute_dtype(spec).itemsize
    average = 4 if spec.use_ema and spec.ema_device != "cpu" else 0
    each = 8 + STATE_BYTES[spec.optimizer] + average + (narrow if narrow < 4 else 0)
    tokens = spec.train_batch_size * spec.max_sequence_length
    kept = 1 if checkpoints_activations(spec) else 16
    total = 0
    for name in encoder_names(root):
        config = read_json(root / name / "config.json") or {}
        width, layers = int(config.get("hidden_size", 0)), int(config.get("num_hidden_layers", 0))
        weights = 4 * 2 * width * spec.text_encoder_lora_rank
        total += layers * (weights * each + tokens * width * kept * narrow)
    return total


def _image_encoder_bytes(spec: JobKeys, root: Path) -> int:
    """Return the bytes of the image encoder beside the text encoders, unsharded, in fp32."""
    place = root / "image_encoder"
    if not sees_images(spec) or not place.is_dir():
        return 0
    return sum(rounded(4 * tensor.elements) for tensor in stored_tensors(place).values())


def _in_shards(spec: JobSpec, root: Path) -> bool:
    if trains_text(spec):
        return False
    if spec.shard_text_encoders is not None:
        return spec.shard_text_encoders
    able = not any(is_quantised(root / name) for name in encoder_names(root))
    return able and spec.device != "cpu"


def _sharded_encoders(
    root: Path, dtype: torch.dtype, ranks: int, packing: Packing | None
) -> tuple[int, int]:
    """Bytes of a rank's shards, and the most that is gathered while an encoder runs.

    From the headers of the files: a block is a unit, and what is in none is the root, which is
    whole meanwhile. A unit is received into a buffer before it is in place, and the buffer of the
    unit before is there until then.
    """
    held, gathered = 0, 0
    for name in encoder_names(root):
        units: dict[str, int] = {}
        for place in stored_tensors(root / name).values():
            rows = place.shape[0] if place.shape else 1
            local = -(-rows // ranks) * (kept_bytes(place, dtype, packing) // max(1, rows))
            held += rounded(local)
            match = _BLOCK.match(place.name)
            unit = match[1] if match else ""
            units[unit] = units.get(unit, 0) + local * ranks
        rest = units.pop("", 0)
        block = max(units.values(), default=0)
        gathered = max(gathered, rest + max(rest, block) + 2 * block)
    return held, gathered


def latent_cache(spec: JobSpec, root: Path) -> Phase | None:
    """Return the autoencoder with the largest image; None where it cannot be traced."""
    size, frames = largest_encoded(spec), training_frames(spec)
    taken = _autoencoder(spec, root, size, frames, decodes=False)
    return taken and Phase("latent_cache", Parts(parameters=taken[0], activations=taken[1]))


def decoding(spec: JobSpec, root: Path) -> Parts | None:
    """Predict what decoding the largest sample takes on top of training."""
    asked = sampled(spec)
    taken = asked and _autoencoder(spec, root, *asked, decodes=True)
    return Parts(workspace=sum(taken)) if taken else None


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
    return sum(rounded(weight.untyped_storage().nbytes()) for weight in weights), most


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
        for name, parameter in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
            setattr(module, name, torch.nn.Parameter(make(parameter), requires_grad=False))
        for name, buffer in [*module.named_buffers(recurse=False, remove_duplicate=False)]:
            setattr(module, name, make(buffer))
