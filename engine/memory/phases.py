"""Predict the memory of everything except training steps: caching, samples, host memory, disk."""

from __future__ import annotations

import re
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from engine import families
from engine.families.shared.references import SOUND
from engine.memory.predict import state_bytes, trained_of
from engine.memory.tracing import fakes
from engine.memory.tracing.inputs import (
    largest_encoded,
    sampled,
    sound_shapes,
    training_frames,
)
from engine.memory.tracing.live import Live, rounded
from engine.memory.walk import Layout, cost_of, swapped_of
from engine.model.files.weights import stored_tensors
from engine.model.meta_device import parameters_on_meta
from engine.model.packing import packing_of
from engine.model.precision import compute_dtype
from engine.model.sharded_encoder import is_quantised
from engine.model.text_encoders import encoder_bytes, encoder_names, kept_bytes
from engine.sample.scores import BATCH, ScoringModel, scoring_dtype
from jobs.errors import UserError
from jobs.memory.host_memory import STATE_BYTES, host_bytes
from jobs.memory.predicted import Parts, Phase
from jobs.models.find_model import find_model
from jobs.models.scorers import CLIP, scorers_of
from jobs.run.rundir import read_json
from jobs.spec.families import makes_layers, sees_images
from jobs.spec.rules.averages import SCHEDULE_FREE, has_average
from jobs.spec.rules.lora_conflicts import trains_text
from jobs.spec.rules.steps import periodic_saves
from jobs.spec.rules.strategy import checkpoints_activations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from engine.memory.tracing.trace import Trace
    from engine.model.packing import Packing
    from jobs.spec.job_spec import JobSpec, RecipeKeys
    from jobs.spec.keys.job import JobKeys
    from jobs.spec.keys.lora import LoraKeys


# -- host -----------------------------------------------------------------------------------
# Predict a job's host memory and disk space from the sizes of its trained parameters.


# Per rank on a GPU: Python, torch, diffusers, transformers and CUDA's host allocations.
PROCESS: Final = 2_500_000_000
# The same for CPU ranks, without CUDA.
PROCESS_ON_CPU: Final = 700_000_000
_READERS: Final = 4 * 16 * 2**20  # buffers of `engine.model.files.weight_reader`
_EXPORTED: Final = {"fp32": 4, "float32": 4, "bf16": 2, "fp16": 2}


def host_of(
    spec: JobSpec, trace: Trace, layout: Layout, ranks: int, *, device: int, autoencoder: int = 0
) -> dict[str, int]:
    """Return the bytes needed in host memory, by part.

    Args:
        spec: The job.
        trace: Trace of its training step.
        layout: Distribution of weights over the ranks.
        ranks: World size; all ranks are assumed to be on this machine.
        device: Peak device memory of a rank, which on CPU ranks is host memory too.
        autoencoder: Bytes of the autoencoder, which stays in host memory during denoising.
    """
    trained = trained_of(trace, layout)
    on_cpu = spec.device == "cpu"
    copy = _saved(spec, trace, layout)
    parts = {"process": PROCESS_ON_CPU if on_cpu else PROCESS, "loading": _READERS}
    if on_cpu:
        parts["tensors"] = device
    if layout.offload:
        shards = sum(cost_of(unit, layout).host for unit in trace.units)
        parts["offloaded_weights"] = shards
        # FSDP copies gradients into memory pinned by torch, in powers of two; the shards are in
        # pinned memory of our own (`engine.model.files.weights`).
        parts["offloaded_gradients"] = sum(
            _power_of_two(4 * parameter.numel) for parameter in trained
        )
        parts["offloaded_optimizer"] = state_bytes(spec, trained)
        if spec.optimizer == SCHEDULE_FREE:  # the averaged weights, as in `predict`
            parts["offloaded_optimizer"] += sum(parameter.size for parameter in trained)
    swapped = sum(swapped_of(trace.units, layout).values())
    if swapped:
        several = trace.second_denoiser and spec.validation_prompts
        parts["swapped_blocks"] = 2 * swapped if several else swapped
    if spec.use_ema and spec.ema_device == "cpu" and not on_cpu:
        parts["ema"] = sum(parameter.size for parameter in trained)
    if spec.checkpointing_async is not False and spec.fsdp_state_dict_type != "FULL_STATE_DICT":
        parts["checkpoint_copy"] = copy
    if spec.validation_prompts:
        parts["autoencoder"] = autoencoder
    rank = sum(parts.values())
    needed = rank - (0 if spec.checkpointing_async else parts.get("checkpoint_copy", 0))
    # The copy is optional unless the job insists: without enough memory, none is made.
    shared = (ranks - 1) * swapped  # ranks share the weights that they swap
    return parts | {
        "rank": rank,
        "least": needed,
        "machine": rank * ranks - shared,
        "machine_least": needed * ranks - shared,
        "present": host_bytes(),
    }


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length() if size else 0


def disk_of(spec: JobSpec, trace: Trace, file_bytes: int, root: Path | None) -> dict[str, int]:
    """Return the bytes needed on disk, independent of the number of ranks.

    Args:
        spec: The job.
        trace: Trace of its training step.
        file_bytes: Bytes per parameter in the model's files, which a full export uses too.
        root: The model's directory, with the text encoders; None if only its config is known.
    """
    texts = 0
    if root is not None and trains_text(spec):
        texts = sum(layers * numbers for _, layers, numbers in _text_loras(spec, root))
    copies = 2 if has_average(spec) else 1
    checkpoint = _saved(spec, trace, Layout(0))
    checkpoint += texts * (4 * copies + STATE_BYTES[spec.optimizer])
    saves, limit = periodic_saves(spec), spec.checkpoints_total_limit
    kept = min(saves or limit or 1, limit or saves or 1)  # at least one if the length is unknown
    numbers = trace.trained + texts
    auto = 4 if spec.model_type == "lora" else file_bytes
    width = _EXPORTED.get(str(spec.export_dtype), auto)
    formats = 1 if spec.model_type == "full" else max(1, len(spec.export_formats or [1, 1]))
    return {
        "checkpoint": checkpoint,
        "checkpoints": kept * checkpoint,
        # A new checkpoint is complete before the oldest is deleted.
        "at_most": (kept + 1) * checkpoint,
        "export": numbers * width * formats,
    }


def _saved(spec: RecipeKeys, trace: Trace, layout: Layout) -> int:
    """Return the bytes of a checkpoint: trained weights, optimizer state and average."""
    trained = trained_of(trace, layout)
    numbers = sum(4 * parameter.numel for parameter in trained)
    return numbers * (2 if has_average(spec) else 1) + state_bytes(spec, trained)


# -- phases ---------------------------------------------------------------------------------
# Phases outside of training steps: caching texts and latents, decoding samples.
#
# They need the model's other components, so they are predicted if the model is on disk, and skipped
# if only its published config is known.


_TEXT_NOTE: Final = "weights of the text encoders; their activations are small in comparison"
_CROWDED_NOTE: Final = "sharded text encoders; not sharded if a GPU has room for them"
# Names of a block's tensors contain its number; only the first number in a name counts.
_BLOCK: Final = re.compile(r"(.*?\.\d+)\.")


def text_cache(spec: JobSpec, root: Path, ranks: int) -> Phase | None:
    """Predict the phase with text encoders on the device; None if their size is unknown."""
    dtype = compute_dtype(spec)
    try:
        packing = packing_of(spec.text_encoder_precision)
        size = encoder_bytes(root, dtype, packing)
        beside = _image_encoder_bytes(spec, root) + _conditioner_bytes(root, dtype)
        parts = Parts(parameters=size + beside)
        if ranks == 1 or not _in_shards(spec, root):
            return Phase("text_cache", parts, _TEXT_NOTE)
        held, gathered = _sharded_encoders(root, dtype, ranks, packing)
    except UserError:
        return None
    # If the job leaves sharding open, the GPUs' free memory decides (`engine.model.text_encoders`).
    # This is the lower bound.
    note = _CROWDED_NOTE if spec.shard_text_encoders is None else _TEXT_NOTE
    return Phase("text_cache", Parts(parameters=held + beside, gathered=gathered), note)


def text_lora_bytes(spec: JobSpec, root: Path) -> int:
    """Return the bytes for training a LoRA on CLIP text encoders, excluding their frozen weights.

    This includes, for A and B of each adapted layer, fp32 masters with gradient, optimizer state
    and average, and a copy in the compute precision. It also includes the activations kept for
    backward, estimated from the width of a CLIP block: 16 times the width per token, or only the
    block's input if activations are recomputed.
    """
    narrow = compute_dtype(spec).itemsize
    average = 4 if spec.use_ema and spec.ema_device != "cpu" else 0
    each = 8 + STATE_BYTES[spec.optimizer] + average + (narrow if narrow < 4 else 0)
    tokens = spec.train_batch_size * spec.max_sequence_length
    kept = 1 if checkpoints_activations(spec) else 16
    return sum(
        layers * (numbers * each + tokens * width * kept * narrow)
        for width, layers, numbers in _text_loras(spec, root)
    )


def _text_loras(spec: LoraKeys, root: Path) -> Iterator[tuple[int, int, int]]:
    """Yield the width of each text encoder, its layers, and the trained numbers of a layer."""
    for name in encoder_names(root):
        config = read_json(root / name / "config.json") or {}
        width, layers = int(config.get("hidden_size", 0)), int(config.get("num_hidden_layers", 0))
        yield width, layers, 4 * 2 * width * spec.text_encoder_lora_rank


def _image_encoder_bytes(spec: JobKeys, root: Path) -> int:
    """Return the bytes of the image encoder next to the text encoders, unsharded, in fp32."""
    place = root / "image_encoder"
    if not sees_images(spec) or not place.is_dir():
        return 0
    return sum(rounded(4 * tensor.elements) for tensor in stored_tensors(place).values())


def _conditioner_bytes(root: Path, dtype: torch.dtype) -> int:
    """Return the bytes of what changes the encoders' output, which each rank loads unsharded."""
    return sum(
        rounded(tensor.elements * dtype.itemsize)
        for name in ("text_conditioner", "connectors")
        if (root / name).is_dir()
        for tensor in stored_tensors(root / name).values()
    )


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
    """Return the bytes of a rank's shards, and the most that is gathered while an encoder runs.

    Sizes come from file headers. Each block is a unit; tensors outside of blocks form the root,
    which stays unsharded while the encoder runs. A unit is gathered into a buffer before it is
    copied into place, and the buffer of the previous unit still exists at that moment.
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
    """Predict encoding the largest image; None if the autoencoder cannot be traced."""
    size, frames = largest_encoded(spec), training_frames(spec)
    taken = _autoencoder(spec, root, size, frames, decodes=False)
    return taken and Phase("latent_cache", Parts(parameters=taken[0], activations=taken[1]))


def decoding(spec: JobSpec, root: Path) -> int:
    """Return the bytes for decoding the largest sample, on top of training; 0 if unknown."""
    asked = sampled(spec)
    if not asked:
        return 0
    taken = _autoencoder(spec, root, *asked, decodes=True)
    # The autoencoder is back in host memory before sound is decoded.
    return max(sum(taken or ()), _sound_decoder(spec, root, asked[1]))


def scoring(spec: JobSpec) -> int:
    """Return the bytes of the largest model that scores samples, and of a batch in it; 0: unknown.

    The models are in memory one after the other.
    """
    from transformers import AutoConfig, AutoModel

    device = torch.device("cpu" if spec.device == "cpu" else "cuda")
    dtype, most = scoring_dtype(device), 0
    images = len(spec.validation_prompts) if spec.validation_scores == ["clip_t"] else BATCH
    for key, name in scorers_of(spec).items():
        try:
            root = find_model(name)
            config = AutoConfig.from_pretrained(root, local_files_only=True)
            cut = (read_json(root / "preprocessor_config.json") or {})["crop_size"]
            side = cut if isinstance(cut, int) else cut["height"]  # older files have a number
            shape = (min(images, BATCH), 3, side, side)
            with parameters_on_meta():
                model = AutoModel.from_config(config, dtype=dtype).eval()
            with ExitStack() as stack, torch.no_grad():
                live, weights = _live(stack, model, on_cuda=device.type == "cuda")
                pixels = torch.empty(shape, dtype=dtype)
                live.reset()
                ScoringModel(model, None, key == CLIP or None).embed(pixels)
        except Exception:  # not on this machine, or an unsupported model: skip it
            continue
        most = max(most, _bytes_of(weights) + live.most)
    return most


def autoencoder_bytes(root: Path) -> int:
    """Return the size of the autoencoder's files, its host memory within a factor of two."""
    return sum(path.stat().st_size for path in (root / "vae").glob("*.safetensors"))


def _autoencoder(
    spec: JobSpec, root: Path, size: tuple[int, int], frames: int, *, decodes: bool
) -> tuple[int, int] | None:
    """Return the bytes of the autoencoder's weights in fp32, and its peak on top of them."""
    import diffusers

    config = read_json(root / "vae" / "config.json") or {}
    vae_class: Any = getattr(diffusers, str(config.get("_class_name")), None)
    if vae_class is None:
        return None
    family = families.load(spec.model_family, spec.model_flavour, root, spec.fps)
    width, height = size
    channels = 4 if makes_layers(spec) else 3
    shape = (1, channels, *([frames] if family.facts.frame_step else []), height, width)
    try:
        with parameters_on_meta():
            vae = vae_class.from_config(config).eval()
        with ExitStack() as stack:
            live, weights = _live(stack, vae, on_cuda=spec.device != "cpu")
            stack.enter_context(torch.no_grad())
            most = _run(live, family, vae, torch.empty(shape), decodes=decodes)
    except Exception:  # an unsupported autoencoder: skip this phase
        return None
    return _bytes_of(weights), most


def _sound_decoder(spec: JobSpec, root: Path, frames: int) -> int:
    """Return the bytes for decoding a video's sound; 0 if there is none, or if unknown."""
    family = families.load(spec.model_family, spec.model_flavour, root, spec.fps)
    config = read_json(family.denoiser_of(root) / "config.json") or {}
    if not family.MAKES_SOUND or frames == 1:
        return 0
    try:
        length, width = sound_shapes(spec, config, frames, training=False)[SOUND][0]
        with parameters_on_meta():
            decoder = family.sound_decoder(root, load=False)
        with ExitStack() as stack, torch.no_grad():
            live, weights = _live(stack, decoder, on_cuda=spec.device != "cpu")
            latents = torch.empty(decoder.shape(length, width))
            live.reset()
            decoder(latents)
            return _bytes_of(weights) + live.most
    except Exception:  # an unsupported decoder: skip this phase
        return 0


def _live(
    stack: ExitStack, model: torch.nn.Module, *, on_cuda: bool
) -> tuple[Live, list[torch.Tensor]]:
    """Count what a model on meta takes on fake tensors from now on; return its weights, too."""
    stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
    weights = _on_fake(model)
    live = stack.enter_context(Live())
    for tensor in weights:
        live.ignore(tensor)
    if on_cuda:
        stack.enter_context(fakes.AsOnCuda())
    return live, weights


def _bytes_of(weights: list[torch.Tensor]) -> int:
    return sum(rounded(weight.untyped_storage().nbytes()) for weight in weights)


def _run(live: Live, family: Any, vae: Any, pixels: torch.Tensor, *, decodes: bool) -> int:
    if not decodes:
        live.reset()
        family.encode_pictures(vae, pixels)
        return live.most
    flat = pixels.dim() == 4 and "temperal_downsample" in vae.config  # a video VAE with one frame
    encoded = vae.encode(pixels.unsqueeze(2) if flat else pixels)
    code = encoded.latent_dist.mode() if hasattr(encoded, "latent_dist") else encoded.latent
    shape, dtype = code.shape, code.dtype
    del encoded, code, pixels
    latents = torch.empty(shape, dtype=dtype)
    live.reset()
    pixels = vae.decode(latents, return_dict=False)[0]
    (pixels * 0.5 + 0.5).clamp(0, 1)  # as `VaeImageProcessor` does
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
