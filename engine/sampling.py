"""Sample pictures while training, with the stock pipeline and all ranks in lockstep.

Each rank takes another prompt; ranks that share a sample's tokens (context parallelism) take the
same one. Where weights are sharded, ranks with less to do make up for it (`engine.lockstep`).
The noise of a picture is `torch.Generator("cpu").manual_seed(seed)`, so that a stock pipeline makes
the same one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from accelerate import cpu_offload_with_hook

from engine.data.captions import prompt_text
from engine.lockstep import Forwards, rounds_of
from engine.parallel import reshard
from engine.precision import autocast, compute_dtype
from engine.release import give_back
from engine.sample_files import sample_name, write_sample
from jobs.prompts import SampleRequest, requests_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from engine.data.prepare import Prepared
    from engine.families import Family
    from engine.world import World
    from jobs.spec import JobSpec


@dataclass(frozen=True)
class Sampler:
    """Samples a job's prompts.

    Attributes:
        spec: The job.
        family: Its family.
        model_root: Where VAE and scheduler come from.
        data: The caches, with the encoded prompts.
        world: The ranks.
    """

    spec: JobSpec
    family: Family
    model_root: Path
    data: Prepared
    world: World

    @torch.no_grad()
    def sample(
        self,
        transformer: Any,
        target: Path,
        step: int,
        progress: Callable[[int], None],
        moved: Callable[[], None] = lambda: None,
    ) -> list[str]:
        """Write a picture and a sidecar for each prompt, as soon as it is made; a collective.

        Args:
            transformer: The model being trained, sharded or not.
            target: Directory of this step's samples.
            step: The optimizer steps that it was trained.
            progress: Called with the number of pictures done.
            moved: Called after each forward.

        Returns:
            The file names, one per prompt.
        """
        requests = requests_of(self.spec)
        planned = [request.steps * self.family.forwards_per_step(request) for request in requests]
        target.mkdir(parents=True, exist_ok=True)
        studio = _Studio(self.family, self.model_root, transformer, self.world.device)
        was_training = transformer.training
        transformer.eval()
        done = 0
        for numbers in rounds_of(planned, self.world.data_size):
            idle = self.world.data_rank >= len(numbers)
            # The last one of a round takes the fewest forwards: those that are idle do the same.
            number = numbers[-1] if idle else numbers[self.world.data_rank]
            if self.world.shards or not idle:
                request = requests[number]
                with Forwards(transformer, moved) as forwards, autocast(self.spec, studio.device):
                    latents = studio.denoise(request, *self._texts(request))
                    forwards.check(planned[number], studio.pipeline)
                    if self.world.shards:
                        forwards.fill_up(planned[numbers[0]])
                # The VAE gets the room of whatever weights are still gathered.
                reshard(transformer)
                if not idle and self.world.rank % self.world.context_size == 0:
                    picture = studio.develop(request, latents)
                    write_sample(picture, self._facts(request, step), target / sample_name(number))
            done += len(numbers)
            progress(done)
        transformer.train(was_training)
        studio.close()
        give_back(self.world.device)
        self.world.barrier()
        return [sample_name(number) for number in range(len(requests))]

    def _texts(self, request: SampleRequest) -> tuple[Any, Any]:
        """The encoded prompt on the device, and the negative one where it has an effect."""
        texts = [request.prompt, request.negative_prompt if request.guided else None]
        first, second = (
            None if text is None
            else {n: t.to(self.world.device) for n, t in self.data.prompt(text).items()}
            for text in texts
        )  # fmt: skip
        return first, second

    def _facts(self, request: SampleRequest, step: int) -> dict[str, Any]:
        """What a picture was made from, as JSON values."""
        negative = request.negative_prompt
        return {
            "prompt": prompt_text(request.prompt, self.spec),
            "negative_prompt": None if negative is None else prompt_text(negative, self.spec),
            "seed": request.seed,
            "size": [request.width, request.height],
            "steps": request.steps,
            "guidance": request.guidance,
            "true_cfg_scale": request.true_cfg_scale,
            "step": step,
            "family": self.spec.model_family,
            "ema": self.spec.use_ema,
            "dtype": str(compute_dtype(self.spec)),
        }


class _Studio:
    """The stock pipeline around the transformer; its VAE waits in host memory.

    Attributes:
        pipeline: The pipeline.
        device: Where it computes.
    """

    def __init__(
        self, family: Family, model_root: Path, transformer: Any, device: torch.device
    ) -> None:
        self.device = device
        self._family = family
        vae = family.load_vae(model_root, torch.float32).eval()
        if hasattr(vae, "enable_tiling"):  # larger pictures than it was made for, part by part
            vae.enable_tiling()
        # Moves it to the device when it decodes, and tells the pipeline where to compute.
        vae, self._vae_hook = cpu_offload_with_hook(vae, device)
        self.pipeline = family.sampling_pipeline(model_root, transformer, vae)
        self.pipeline.set_progress_bar_config(disable=True)
        if self.pipeline._execution_device != device:
            raise RuntimeError(
                f"{type(self.pipeline).__name__} computes on {self.pipeline._execution_device}, "
                f"and the transformer on {device}"
            )

    def denoise(self, request: SampleRequest, condition: Any, negative: Any) -> torch.Tensor:
        """The latents of a picture, as the pipeline returns them."""
        return self.pipeline(
            **self._family.sample_arguments(request, condition, negative),
            width=request.width,
            height=request.height,
            num_inference_steps=request.steps,
            generator=torch.Generator("cpu").manual_seed(request.seed),
            output_type="latent",
        ).images

    def develop(self, request: SampleRequest, latents: torch.Tensor) -> Any:
        """The picture of latents; the VAE is on the device meanwhile."""
        try:
            return self._family.decode(
                self.pipeline, latents.float(), request.height, request.width
            )
        finally:
            self._vae_hook.offload()

    def close(self) -> None:
        """Let go of the VAE: the hook and it hold each other."""
        self._vae_hook.remove()
        del self.pipeline
