"""Context parallelism on gloo ranks: each case compared with one process on the whole batch.

Diffusers wants GPUs for this; `bend` lets it do without.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from diffusers import (
    ContextParallelConfig,
    Flux2Transformer2DModel,
    FluxPipeline,
    FluxTransformer2DModel,
    LTX2VideoTransformer3DModel,
    LTXVideoTransformer3DModel,
    QwenImageTransformer2DModel,
    WanTransformer3DModel,
    WanVACETransformer3DModel,
)
from diffusers.models import attention_dispatch
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from engine.data.loader import MicroBatch
from engine.diffusion.objective import NoiseDraw, NoisySample
from engine.families.flux import Flux
from engine.families.ltx2 import LTX2
from engine.families.shared.ltx2_pipeline import (
    Connected,
    ConnectedPipeline,
    SoundScale,
    text_widths,
)
from engine.families.shared.minimax_h3_forward import (
    SOUND,
    VIDEO,
    MiniMaxH3Transformer,
    lay_out,
)
from engine.families.shared.minimax_h3_forward import TEXT as TEXT_ROWS
from engine.model.activation_checkpointing import checkpoint_activations
from engine.model.adapters.lora import add_lora, lora_parameters
from engine.model.files.weights import local_part, materialise, rows_of
from engine.parallel.context_parallel import enable_context_parallel
from engine.ranks.mesh import RING, ULYSSES, build_mesh, sharding_mesh
from engine.ranks.telemetry import Peaks
from engine.ranks.world import World
from engine.toy.families.flux import build_scheduler
from engine.train.optimizer_step import Stepper
from engine.train.train_state import TrainState
from jobs.spec.job_spec import JobSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

Inputs = dict[str, Any]
SAMPLED = ("flux", "ltx23")
SIDE, TEXT, BATCH = 4, 8, 2  # tokens along a side, tokens of text, samples of a micro-batch


@dataclass(frozen=True)
class Case:
    """One way to train."""

    name: str
    ranks: int
    family: str = "flux"
    context: int = 2  # ranks that share a sample
    replicas: int = 1  # of the sharded model (HSDP)
    strategy: str = "alltoall"
    trains: str = "full"  # or LoRA: replicated, sharded
    checkpointing: str = "none"  # full, selective
    accumulation: int = 1
    autocast: bool = False
    factor: int | None = None  # what a step takes a group to be; its size if None


CASES = (
    Case("plain", 2),
    Case("without the factor", 2, factor=1),
    Case("checkpointing", 2, checkpointing="full", accumulation=2),
    Case("selective checkpointing", 2, checkpointing="selective"),
    Case("LoRA replicated", 2, trains="replicated", checkpointing="full", accumulation=2),
    Case("LoRA sharded", 2, trains="sharded", checkpointing="full", accumulation=2),
    Case("FLUX.2", 2, family="flux2", checkpointing="full"),
    Case("Qwen-Image, masked text", 2, family="qwen", checkpointing="full"),
    Case("Wan", 2, family="wan", checkpointing="full"),
    Case("Wan, frame in channels", 2, family="wan_i2v", checkpointing="full"),
    Case("Wan, frame in its place", 2, family="wan_ti2v"),
    Case("VACE", 2, family="vace", checkpointing="full"),
    Case("LTX-Video, masked text and frame", 2, family="ltx", checkpointing="full"),
    Case("LTX-2", 2, family="ltx2"),
    Case("LTX-2, frame", 2, family="ltx2_frame", checkpointing="full"),
    Case("LTX-2, sound", 2, family="ltx2_sound", checkpointing="full"),
    Case("LTX-2.3, sound and frame", 2, family="ltx23", accumulation=2),
    Case("LTX-2.5, sound and frame", 2, family="ltx25", trains="replicated"),
    Case("LTX-2, interleaved, ring", 2, family="ltx2_interleaved", strategy="allgather"),
    Case("MiniMax-H3", 2, family="h3", checkpointing="full"),
    Case("LTX-2, bf16", 2, family="ltx2_sound", checkpointing="full", autocast=True),
    Case("ring", 2, strategy="allgather", checkpointing="full", accumulation=2),
    Case("bf16", 2, family="qwen", checkpointing="full", autocast=True),
    Case("2 x 2", 4, checkpointing="full", accumulation=2),
    Case("2 x 2, replicas", 4, replicas=2),
    Case("2 x 2, LoRA replicated", 4, trains="replicated", checkpointing="full", accumulation=2),
    Case("2 x 2, LoRA sharded", 4, trains="sharded", checkpointing="full", accumulation=2),
    Case("4, ring", 4, context=4, strategy="allgather"),
    Case("4, MiniMax-H3", 4, family="h3", context=4),
    Case("2 x 2, LTX-2.5, sound and frame", 4, family="ltx25", checkpointing="full"),
)


def _flux_inputs() -> Inputs:
    ids = torch.cartesian_prod(*map(torch.arange, (1, SIDE, SIDE))).float()
    return {
        "hidden_states": torch.randn(BATCH, SIDE * SIDE, 16),
        "encoder_hidden_states": torch.randn(BATCH, TEXT, 32),
        "pooled_projections": torch.randn(BATCH, 32),
        "timestep": torch.rand(BATCH),
        "guidance": torch.ones(BATCH),
        "txt_ids": torch.zeros(TEXT, 3),
        "img_ids": ids,
    }


def _flux2_inputs() -> Inputs:
    inputs = _flux_inputs()
    del inputs["pooled_projections"]
    grid = torch.nn.functional.pad(inputs["img_ids"], (0, 1))
    texts = torch.nn.functional.pad(torch.arange(TEXT).unsqueeze(1), (3, 0)).float()
    ids = {"txt_ids": texts, "img_ids": grid}
    return inputs | {name: places.expand(BATCH, -1, -1) for name, places in ids.items()}


def _qwen_inputs() -> Inputs:
    mask = torch.ones(BATCH, TEXT, dtype=torch.bool)
    mask[0, 5:] = False
    return {
        "hidden_states": torch.randn(BATCH, SIDE * SIDE, 16),
        "encoder_hidden_states": torch.randn(BATCH, TEXT, 32),
        "encoder_hidden_states_mask": mask,
        "timestep": torch.rand(BATCH),
        "img_shapes": [[(1, SIDE, SIDE)]] * BATCH,
    }


def _wan_inputs() -> Inputs:
    return {
        "hidden_states": torch.randn(BATCH, 4, 2, 2 * SIDE, 2 * SIDE),
        "encoder_hidden_states": torch.randn(BATCH, TEXT, 32),
        "timestep": torch.randint(1000, (BATCH,)),
    }


def _wan_i2v_inputs() -> Inputs:
    inputs = _wan_inputs()
    inputs["hidden_states"] = inputs["hidden_states"].repeat(1, 2, 1, 1, 1)
    return inputs | {"encoder_hidden_states_image": torch.randn(BATCH, 5, 24)}


def _wan_ti2v_inputs() -> Inputs:
    return _wan_inputs() | {"timestep": torch.randint(1000, (BATCH, 2 * SIDE * SIDE))}


def _vace_inputs() -> Inputs:
    inputs = _wan_inputs()
    return inputs | {"control_hidden_states": torch.randn_like(inputs["hidden_states"])}


def _ltx_inputs() -> Inputs:
    mask = torch.ones(BATCH, TEXT)
    mask[0, 5:] = 0
    return {
        "hidden_states": torch.randn(BATCH, 2 * SIDE * SIDE, 16),
        "encoder_hidden_states": torch.randn(BATCH, TEXT, 32),
        "encoder_attention_mask": mask,
        "timestep": 1000 * torch.rand(BATCH, 2 * SIDE * SIDE),
        "video_coords": torch.rand(BATCH, 3, 2 * SIDE * SIDE),
    }


PLACES = torch.tensor((20, 2048, 2048)).view(3, 1, 1)  # in seconds and pixels


def _ltx2_inputs(*, sound: bool = False, frame: bool = False) -> Inputs:
    """Of as many tokens of sound as no number of ranks divides; of one that nothing attends to."""
    level, tokens = 1000 * torch.rand(BATCH), 2 * SIDE * SIDE
    return {
        "hidden_states": torch.randn(BATCH, tokens, 16),
        "audio_hidden_states": 3 * torch.randn(BATCH, 7 if sound else 1, 8),
        "encoder_hidden_states": torch.randn(BATCH, TEXT, 32),
        "audio_encoder_hidden_states": torch.randn(BATCH, TEXT, 32),
        "timestep": level[:, None] * (torch.rand(BATCH, tokens) > 0.5) if frame else level,
        "audio_timestep": level,
        "sigma": level,
        "video_coords": torch.rand(BATCH, 3, tokens, 2) * PLACES,
        "audio_coords": 20 * torch.rand(BATCH, 1, 7 if sound else 1, 2),
        "isolate_modalities": not sound,
        "use_cross_timestep": sound,
    }


def _h3_inputs() -> Inputs:
    """Of two samples in one sequence of 33 rows."""
    size, sounds = (2, 2, 2), 2
    layout = lay_out((3, 6), size, sounds, torch.device("cpu"))
    rows = {kind: len(places) for kind, places in layout.indices.items()}
    return {
        "hidden_states": torch.randn(1, rows[VIDEO], 16),
        "audio_hidden_states": torch.randn(1, rows[SOUND], 8),
        "encoder_hidden_states": torch.randn(1, rows[TEXT_ROWS], 32),
        "timestep": torch.rand(BATCH),
        "timestep_indices": layout.owners,
        "token_tags": layout.kinds,
        "position_ids": layout.positions,
        "video_indices": layout.indices[VIDEO],
        "audio_indices": layout.indices[SOUND],
        "text_indices": layout.indices[TEXT_ROWS],
        "texts": (3, 6),
        "samples": layout.samples,
    }


_SIZES = {"num_attention_heads": 4, "attention_head_dim": 32, "num_layers": 1}
_JOINT = {"in_channels": 16, "joint_attention_dim": 32, "axes_dims_rope": (4, 14, 14)}
FAMILIES: dict[str, tuple[type[Any], dict[str, Any], Callable[[], Inputs]]] = {
    "flux": (
        FluxTransformer2DModel,
        _JOINT | {"num_single_layers": 1, "pooled_projection_dim": 32, "guidance_embeds": True},
        _flux_inputs,
    ),
    "flux2": (
        Flux2Transformer2DModel,
        _JOINT | {"num_single_layers": 1, "axes_dims_rope": (8, 8, 8, 8)},
        _flux2_inputs,
    ),
    "qwen": (QwenImageTransformer2DModel, _JOINT | {"out_channels": 4}, _qwen_inputs),
    "wan": (
        WanTransformer3DModel,
        {"in_channels": 4, "out_channels": 4, "text_dim": 32, "freq_dim": 32, "ffn_dim": 64},
        _wan_inputs,
    ),
}
FAMILIES |= {
    "wan_i2v": (
        WanTransformer3DModel,
        FAMILIES["wan"][1] | {"in_channels": 8, "image_dim": 24, "added_kv_proj_dim": 128},
        _wan_i2v_inputs,
    ),
    "wan_ti2v": (*FAMILIES["wan"][:2], _wan_ti2v_inputs),
    "vace": (
        WanVACETransformer3DModel,
        FAMILIES["wan"][1] | {"vace_in_channels": 4, "vace_layers": [0, 1], "num_layers": 2},
        _vace_inputs,
    ),
    "ltx": (
        LTXVideoTransformer3DModel,
        {"in_channels": 16, "out_channels": 16, "cross_attention_dim": 128, "caption_channels": 32},
        _ltx_inputs,
    ),
}
_LTX2 = {
    "in_channels": 16,
    "out_channels": 16,
    "cross_attention_dim": 128,
    "audio_in_channels": 8,
    "audio_out_channels": 8,
    "audio_num_attention_heads": 4,
    "audio_attention_head_dim": 16,
    "audio_cross_attention_dim": 64,
    "caption_channels": 32,
    "rope_type": "split",
}
_LTX23 = {
    **_LTX2,
    # The first block's gradients come from both halves of the second.
    "num_layers": 2,
    **dict.fromkeys(("gated_attn", "cross_attn_mod", "perturbed_attn"), True),
    **dict.fromkeys(("audio_gated_attn", "audio_cross_attn_mod"), True),
}
FAMILIES["h3"] = (
    MiniMaxH3Transformer,
    {
        **{"in_channels": 4, "audio_in_channels": 8, "text_dim": 32, "hidden_size": 64},
        **{"freq_dim": 32, "time_embed_hidden_dim": 32, "time_embed_dim": 32, "rope_freq_dim": 4},
        **{"ffn_dim": 64, "num_refiner_layers": 1, "num_layers": 2},
    },
    _h3_inputs,
)
_LTX25 = {"ff_bias": False, "use_keyframes_abs_pos_embedding": True}
FAMILIES |= {
    name: (LTX2VideoTransformer3DModel, sizes, partial(_ltx2_inputs, **given))
    for name, sizes, given in (
        ("ltx2", _LTX2, {}),
        ("ltx2_frame", _LTX2, {"frame": True}),
        ("ltx2_sound", _LTX2, {"sound": True}),
        ("ltx2_interleaved", _LTX2 | {"rope_type": "interleaved"}, {"sound": True, "frame": True}),
        ("ltx23", _LTX23, {"sound": True, "frame": True}),
        ("ltx25", _LTX23 | _LTX25, {"sound": True, "frame": True}),
    )
}


def build(case: Case) -> torch.nn.Module:
    """The model on the meta device, adapted and checkpointed as the case says."""
    model_class, sizes, _ = FAMILIES[case.family]
    with init_empty_weights(include_buffers=False):
        model = model_class(**_SIZES | sizes)
    if case.checkpointing != "none":
        spec = JobSpec(gradient_checkpointing_policy=case.checkpointing)
        checkpoint_activations(model, spec)
    if case.trains != "full":
        joint = model_class is LTX2VideoTransformer3DModel
        add_lora(model, JobSpec(lora_rank=4), LTX2.SOUND_TARGETS if joint else Flux.LORA_TARGETS)
    return model


def reference_model(case: Case) -> torch.nn.Module:
    """A whole model on this process, its weights the same on every rank."""
    model = build(case)
    materialise(model, torch.device("cpu"))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        matrix = parameter.dim() > 1
        # Where tokens are mostly what modulation adds to all of them, gradients of queries and keys
        # are small differences of large numbers.
        quiet = not matrix or name.endswith(".linear.weight")
        torch.nn.init.normal_(parameter, 0.0 if matrix else 1.0, 0.1 if quiet else 0.2)
    return model


def parallel_model(case: Case, world: World, source: torch.nn.Module) -> torch.nn.Module:
    """The same model split over the ranks, in the engine's order: all on meta, filled last."""
    assert world.mesh is not None
    model = build(case)
    enable_context_parallel(model, world.mesh)
    mesh = sharding_mesh(world.mesh)
    plain = set(lora_parameters(model).values()) if case.trains == "replicated" else set()
    blocks = getattr(model, "_no_split_modules", None) or model._repeated_blocks
    for module in model.modules():
        if type(module).__name__ in blocks:
            fully_shard(module, mesh=mesh, ignored_params=plain)
    fully_shard(model, mesh=mesh, ignored_params=plain, reshard_after_forward=False)
    materialise(model, torch.device("cpu"))
    values = dict(source.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = values[name]
            mine = value[rows_of(parameter)] if isinstance(parameter, DTensor) else value
            local_part(parameter).copy_(mine)
    return model


def micro_batches(case: Case) -> Iterator[tuple[Inputs, int]]:
    """Every micro-batch of the step in order, with the seed of its target."""
    torch.manual_seed(2)
    for number in range(case.ranks // case.context * case.accumulation):
        yield FAMILIES[case.family][2](), number


def loss_of(output: torch.Tensor, seed: int) -> torch.Tensor:
    return torch.nn.functional.mse_loss(output.float(), target_of(output.shape, seed))


def target_of(shape: torch.Size, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def latents_of(inputs: Inputs) -> torch.Tensor:
    """Return what is denoised, in the shape of `forward`'s output."""
    video = inputs["hidden_states"]
    if video.dim() == 5:
        video = video[:, :4]  # a first frame is in further channels
    return flat([video, inputs["audio_hidden_states"]] if has_sound(inputs) else [video])


def has_sound(inputs: Inputs) -> bool:
    return "audio_hidden_states" in inputs and not inputs.get("isolate_modalities")


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten(1) for tensor in tensors], dim=1)


def forward(model: torch.nn.Module, case: Case, inputs: Inputs) -> torch.Tensor:
    """Return what the model makes, with its sound if there is any, `(B, values)`."""
    with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
        outputs: tuple[torch.Tensor, ...] = model(**inputs, return_dict=False)
    return flat(outputs[: 1 + has_sound(inputs)])


def train_whole(
    case: Case, model: torch.nn.Module, batches: list[tuple[Inputs, int]]
) -> tuple[dict[int, torch.Tensor], dict[str, torch.Tensor]]:
    """What one process gets: the output of each micro-batch, the gradient of each parameter."""
    outputs = {}
    for inputs, seed in batches:
        output = forward(model, case, inputs)
        (loss_of(output, seed) / len(batches)).backward()
        outputs[seed] = output.detach()
    return outputs, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


class Kept(torch.optim.SGD):
    """Keeps the gradients that it is to step by, and does not step."""

    gradients: dict[str, torch.Tensor]

    def __init__(self, trained: dict[str, torch.nn.Parameter]) -> None:
        super().__init__(trained.values(), lr=1.0)
        self._trained = trained

    def step(self, closure: Any = None) -> None:
        """A collective."""
        self.gradients = {
            name: whole(p.grad).clone() for name, p in self._trained.items() if p.grad is not None
        }


class Rig:
    """Stands in for what a step asks: the loader, the objective and the family."""

    def __init__(self, case: Case, batches: list[tuple[Inputs, int]]) -> None:
        self._case = case
        self._batches = batches
        self.forwards = len(batches)
        self.outputs: dict[int, torch.Tensor] = {}

    def step(self, step: int) -> Iterator[MicroBatch]:
        for inputs, seed in self._batches:
            drawn = NoiseDraw(torch.tensor([seed]), torch.zeros(1))
            yield MicroBatch(range(BATCH), latents_of(inputs), drawn, inputs)

    def add_noise(self, latents: torch.Tensor, drawn: NoiseDraw) -> NoisySample:
        return NoisySample(latents, drawn.level, target_of(latents.shape, int(drawn.level)))

    def predict(self, model: Any, _: Any, level: torch.Tensor, inputs: Inputs, *__: Any) -> Any:
        output = forward(model, self._case, inputs)
        self.outputs[int(level)] = output.detach()
        return output


def take_step(
    case: Case, model: torch.nn.Module, batches: list[tuple[Inputs, int]], world: World
) -> tuple[dict[int, torch.Tensor], dict[str, torch.Tensor]]:
    """What the engine's own step gets on these ranks: outputs and gradients as of `train_whole`."""
    spec = JobSpec(
        gradient_accumulation_steps=len(batches),
        max_grad_norm=0,
        mixed_precision="bf16" if case.autocast else "no",
    )
    optimizer = Kept({name: p for name, p in model.named_parameters() if p.requires_grad})
    training = TrainState(model, optimizer, LambdaLR(optimizer, lambda step: 1.0))
    if case.factor is not None:
        world = replace(world, context_size=case.factor)
    rig: Any = Rig(case, batches)
    Stepper(spec, rig, rig, training, rig, world, Peaks(world.device)).run(lambda result: None)
    return rig.outputs, optimizer.gradients


def measure(case: Case, world: World) -> dict[str, Any]:
    """Train one step both ways.

    Returns:
        On rank 0 the largest differences of outputs and gradients, relative to the largest value
        of the same tensor, the tensor with the worst, and how many gradients were compared.
    """
    reference = reference_model(case)
    model = parallel_model(case, world, reference)
    assert isinstance(model, FSDPModule)
    batches = list(micro_batches(case))
    outputs, gradients = take_step(case, model, batches[world.data_rank :: world.data_size], world)
    if not world.main:
        return {}
    wanted_outputs, wanted = train_whole(case, reference, batches)
    differences = {name: relative(gradients[name], wanted[name]) for name in wanted}
    worst = max(differences, key=differences.__getitem__)
    return {
        "output": max(relative(outputs[seed], wanted_outputs[seed]) for seed in outputs),
        "gradient": differences[worst],
        "mildest": min(differences.values()),
        "worst": worst,
        "compared": len(differences),
    }


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def relative(value: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((value - wanted).abs().max() / wanted.abs().max())


@torch.no_grad()
def measure_sampling(case: Case, world: World) -> dict[str, Any]:
    """The stock pipeline on a split model against the same on a whole one."""
    reference = reference_model(case)
    model = parallel_model(case, world, reference)
    draw = _draw_image if case.family == "flux" else _draw_video
    latents = [draw(transformer) for transformer in (reference, model)]
    return {"output": relative(latents[1], latents[0])}


def _draw_image(transformer: Any) -> torch.Tensor:
    unused = dict.fromkeys(("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    pipeline = FluxPipeline(scheduler=build_scheduler(), transformer=transformer, **unused)
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(3)
    latents: torch.Tensor = pipeline(
        prompt_embeds=torch.randn(1, TEXT, 32, generator=generator),
        pooled_prompt_embeds=torch.randn(1, 32, generator=generator),
        width=64,
        height=64,
        num_inference_steps=3,
        generator=generator,
        output_type="latent",
    ).images
    return latents


class LatentsAsTheyAre:
    """In the place of LTX-2's autoencoder."""

    spatial_compression_ratio, temporal_compression_ratio = 32, 8
    latents_mean, latents_std = torch.zeros(()), torch.ones(())
    config = SimpleNamespace(scaling_factor=1.0)


def _draw_video(transformer: Any) -> torch.Tensor:
    """A guided video with its sound, also without what joins them, and their self-attention."""
    unused = dict.fromkeys(("text_encoder", "tokenizer", "vocoder"))
    pipeline = ConnectedPipeline(
        scheduler=build_scheduler(),
        transformer=transformer,
        vae=LatentsAsTheyAre(),
        audio_vae=SoundScale({"latent_channels": 1, "mel_bins": 32}),
        connectors=Connected(transformer.config),
        **unused,
    )
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(3)
    width = sum(text_widths(transformer.config))
    texts = {
        name: torch.randn(1, TEXT, width, generator=generator)
        for name in ("prompt_embeds", "negative_prompt_embeds")
    }
    return flat(
        pipeline(
            **texts,
            width=128,
            height=128,
            num_frames=9,
            num_inference_steps=2,
            guidance_scale=3.0,
            stg_scale=1.0,
            spatio_temporal_guidance_blocks=[0],
            modality_scale=2.0,
            generator=generator,
            output_type="latent",
            return_dict=False,
        )
    )


def try_own_plan(world: World) -> dict[str, Any]:
    """Train with the plan that diffusers has for LTX-Video; say what fails."""
    assert world.mesh is not None
    model: Any = reference_model(Case("own plan", world.size, family="ltx"))
    model.enable_parallelism(
        config=ContextParallelConfig(ulysses_degree=world.size, mesh=world.mesh[RING, ULYSSES])
    )
    # Forward takes no masks either.
    unmasked = {"timestep": torch.rand(BATCH), "encoder_attention_mask": None}
    output = model(**_ltx_inputs() | unmasked, return_dict=False)[0]
    try:
        output.sum().backward()
    except RuntimeError as error:
        return {"error": str(error)}
    return {"error": ""}


def bend() -> None:
    """Let diffusers do on CPU what it does on CUDA; changes this process only."""
    # It asks how many accelerators there are, to name a device that it never uses.
    torch.accelerator.device_count = lambda: 1
    # Torch's flash attention has another name on CPU, and there takes fp32 too.
    attention_dispatch._native_flash_attention_forward_op = _flash_forward
    attention_dispatch._native_flash_attention_backward_op = _flash_backward


def _flash_forward(
    ctx: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: Any,
    _save_ctx: bool,
    **__: Any,
) -> tuple[torch.Tensor, ...]:
    if _save_ctx:
        ctx.save_for_backward(query, key, value)
    run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return _turned(run(*_turned((query, key, value))))


def _flash_backward(_: Any, grad: torch.Tensor, **kept: torch.Tensor) -> tuple[torch.Tensor, ...]:
    tensors = (grad, *(kept[name] for name in ("query", "key", "value", "out", "lse")))
    run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return _turned(run(*_turned(tensors), 0.0, False))


def _turned(tensors: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """`(B, L, H, …)` as `(B, H, L, …)`, or back."""
    return tuple(tensor.transpose(1, 2).contiguous() for tensor in tensors)


def work(rank: int, ranks: int, cases: list[Case], meeting: str, results: Path) -> None:
    """A rank's life: cases of this number of ranks, one after another."""
    torch.set_num_threads(1)
    bend()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )
    found = {}
    for case in cases:
        found[case.name] = measure(case, _world(rank, case))
    if ranks == 2:
        found["own plan"] = try_own_plan(_world(rank, Case("own plan", ranks)))
        for family in SAMPLED:
            case = Case("sampling", ranks, family=family)
            found[f"{family} sampling"] = measure_sampling(case, _world(rank, case))
    if rank == 0:
        earlier = json.loads(results.read_text()) if results.exists() else {}
        results.write_text(json.dumps(earlier | found))
    dist.barrier()
    dist.destroy_process_group()


def _world(rank: int, case: Case) -> World:
    strategy = "hsdp" if case.replicas > 1 else "fsdp2"
    spec = JobSpec(
        dp_replicate_size=case.replicas,
        context_parallel_size=case.context,
        context_parallel_comm_strategy=case.strategy,
    )
    return World(
        rank=rank,
        size=case.ranks,
        device=torch.device("cpu"),
        strategy=strategy,
        token="",
        mesh=build_mesh(spec, strategy, case.ranks, "cpu"),
        context_size=case.context,
    )
