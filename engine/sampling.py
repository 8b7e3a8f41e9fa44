"""Sample pictures while training, with the stock pipeline and all ranks in lockstep.

A sharded transformer gathers its weights in every forward, so all ranks must run the same number
of forwards. Each takes another prompt; when prompts run out, a rank repeats one and discards it.
Ranks that share a sample's tokens (context parallelism) take the same prompt.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from engine.draws import keyed_generator
from engine.parallel import reshard
from engine.precision import autocast, compute_dtype
from jobs.families import get_family
from jobs.rundir import write_atomic

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from engine.data.prepare import Prepared
    from engine.families import Family
    from engine.world import World
    from jobs.spec import JobSpec


@torch.no_grad()
def sample(
    transformer: Any,
    spec: JobSpec,
    family: Family,
    model_root: Path,
    data: Prepared,
    world: World,
    target: Path,
    progress: Callable[[int], None],
) -> list[str]:
    """Write a picture and a sidecar for each validation prompt; a collective.

    Args:
        transformer: The model being trained, sharded or not.
        spec: The job; its `validation_*` keys say what to sample.
        family: The model family.
        model_root: Where VAE and scheduler come from.
        data: The caches, with the encoded prompts.
        world: The ranks.
        target: Directory of this step's samples.
        progress: Called with the number of pictures done.

    Returns:
        The file names, one per prompt.
    """
    side = spec.validation_resolution or spec.resolution
    step = get_family(spec.model_family).latent_step
    side = max(step, side // step * step)
    if world.main:
        target.mkdir(parents=True, exist_ok=True)
    world.barrier()
    vae = family.load_vae(model_root, torch.float32).to(world.device).eval()
    pipeline = family.sampling_pipeline(model_root, transformer, vae)
    pipeline.set_progress_bar_config(disable=True)
    was_training = transformer.training
    transformer.eval()
    prompts = spec.validation_prompts
    for first in range(0, len(prompts), world.data_size):
        number = first + world.data_rank
        padding = number >= len(prompts)
        prompt = min(number, len(prompts) - 1)
        condition = {name: tensor.to(world.device) for name, tensor in data.prompt(prompt).items()}
        with autocast(spec, world.device):
            latents = pipeline(
                **family.sample_arguments(condition),
                width=side,
                height=side,
                num_inference_steps=spec.validation_num_inference_steps,
                guidance_scale=spec.validation_guidance,
                generator=keyed_generator(spec.seed, prompt),
                output_type="latent",
            ).images
        if not padding and world.rank % world.context_size == 0:
            _write(pipeline, family, latents, spec, prompt, side, target)
        progress(min(first + world.data_size, len(prompts)))
    transformer.train(was_training)
    reshard(transformer)
    del pipeline, vae
    world.barrier()
    return [_name(number) for number in range(len(prompts))]


def _write(
    pipeline: Any,
    family: Family,
    latents: torch.Tensor,
    spec: JobSpec,
    number: int,
    side: int,
    target: Path,
) -> None:
    """Decode one picture and write it with what it was made from."""
    picture = family.decode(pipeline, latents.float(), side, side)
    aside = target / f".{_name(number)}.tmp"
    picture.save(aside, format="PNG")
    aside.replace(target / _name(number))
    facts = {
        "prompt": spec.validation_prompts[number],
        "seed": spec.seed,
        "size": [side, side],
        "steps": spec.validation_num_inference_steps,
        "guidance": spec.validation_guidance,
        "dtype": str(compute_dtype(spec)),
    }
    write_atomic((target / _name(number)).with_suffix(".json"), json.dumps(facts) + "\n")


def _name(number: int) -> str:
    return f"{number:02d}.png"
