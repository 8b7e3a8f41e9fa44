"""Sample images while training, with the stock pipeline and all ranks in lockstep.

Each rank takes another prompt; ranks that share a sample's tokens (context parallelism) take the
same one. Where weights are sharded, ranks with less to do make up for it
(`engine.sample.sampler`). The noise of an image is `torch.Generator("cpu").manual_seed(seed)`, so
that a stock pipeline makes the same one.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from accelerate import cpu_offload_with_hook

from engine.data.encode.tensor_cache import nonfinite
from engine.data.index.captions import prompt_text
from engine.data.index.views import prompt_conditions
from engine.families.shared.collate import collate
from engine.model.compiled import uncompiled
from engine.model.precision import autocast, compute_dtype
from engine.model.release import give_back
from engine.parallel.sharding import reshard
from engine.sample.frozen_denoiser import find_other_expert, second_denoisers
from engine.sample.sample_files import sample_name, video_encoder, write_sample
from jobs.errors import NotFiniteError
from jobs.spec.keys.prompts import SampleRequest, requests_of
from jobs.spec.rules.averages import has_average

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence
    from pathlib import Path

    from PIL.Image import Image

    from engine.families.shared.base import Sound
    from engine.families.shared.references import Conditioning
    from engine.run_context import RunContext
    from engine.sample.frozen_denoiser import OtherExpert


# -- lockstep -------------------------------------------------------------------------------
# Ranks that share a model make as many forwards each, whatever images they make.
#
# A sharded transformer gathers its weights in every forward, together with the other ranks. A
# rank that needs fewer forwards makes up for them, so that none waits for one that is done.
# How many there will be is known in advance: nothing has to be agreed on while sampling.


def rounds_of(
    forwards: Sequence[int], ranks: int, kinds: Sequence[Hashable] | None = None
) -> list[list[int]]:
    """Group the images that are made at the same time, one on each rank. Pure.

    Those that take equally many forwards go together, the longest first, which takes the fewest
    forwards overall; ranks without an image are left for the shortest.

    Args:
        forwards: Of each image.
        ranks: How many images are made at a time.
        kinds: Of each image; those of different kinds are not made at the same time.
    """
    order = sorted(range(len(forwards)), key=lambda number: -forwards[number])
    by_kind: dict[Hashable, list[int]] = {}
    for number in order:
        by_kind.setdefault(kinds[number] if kinds else None, []).append(number)
    return [own[n : n + ranks] for own in by_kind.values() for n in range(0, len(own), ranks)]


class Forwards:
    """Counts the forwards of models, within a context, and makes more of them after the last.

    These are made while the pipeline is still in its last forward: what it changes of a model, such
    as masks, which flash attention does not take, is only changed meanwhile.

    Args:
        models: The models.
        moved: Called after each forward.
        expected: How many the pipeline makes.
        total: How many all ranks make, with the inputs of the last one, if that is more; a
            collective.

    Attributes:
        made: How many the pipeline has made so far.
    """

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        moved: Callable[[], None],
        *,
        expected: int = 0,
        total: int = 0,
    ) -> None:
        self._models = list(models)
        self._moved = moved
        self._expected = expected
        self._more = max(total - expected, 0)
        self._filling = False
        self._last: tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]] | None = None
        self.made = 0

    def __enter__(self) -> Forwards:
        self._hooks = [
            hook
            for model in self._models
            for hook in (
                model.register_forward_pre_hook(self._remember, with_kwargs=True),
                model.register_forward_hook(self._count),
            )
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._last = None

    def check(self, pipeline: Any) -> None:
        """Compare what a pipeline made with what was planned for.

        Raises:
            RuntimeError: The other ranks would wait for forwards that never come, or miss some.
        """
        if self.made != self._expected:
            raise RuntimeError(
                f"{type(pipeline).__name__} made {self.made} forwards of the denoiser instead of "
                f"{self._expected}; forwards_of the family, or its scheduler, is "
                "not what this version of diffusers does"
            )

    def _fill_up(self) -> None:
        """Make the forwards that the pipeline does not make."""
        assert self._last is not None, "this is the hook of a forward"
        model, positional, named = self._last
        self._filling = True
        for _ in range(self._more):
            model(*positional, **named)
        self._filling = False

    def _remember(
        self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._last = (model, args, kwargs)

    def _count(self, *_: Any) -> None:
        self._moved()
        if self._filling:
            return
        self.made += 1
        if self.made == self._expected:
            self._fill_up()


# -- sampler --------------------------------------------------------------------------------


class Prompts(Protocol):
    """Encoded prompts."""

    @property
    def pictures(self) -> Mapping[str, Conditioning]:
        """The conditioning images of prompts, by their paths."""
        ...

    def prompt(
        self, text: str, request: SampleRequest, *, negative: bool = False
    ) -> dict[str, torch.Tensor]:
        """Encode a request's prompt or negative prompt, with its images if the model does."""
        ...


@dataclass(frozen=True)
class Sampler:
    """Samples a job's prompts.

    Attributes:
        run: The job and its ranks; VAE and scheduler come from its model.
        data: The caches, with the encoded prompts.
        numbers: What the images are numbered by in their names; default: in order.
    """

    run: RunContext
    data: Prompts
    numbers: Sequence[int] = ()

    def __post_init__(self) -> None:
        """Say in the log, once, if videos are not encoded as usual."""
        moving = any(request.frames > 1 for request in requests_of(self.run.spec))
        with suppress(OSError):  # which each video that cannot be written says
            if moving and (note := video_encoder()[1]):
                self.run.telemetry.pass_on(note)

    @torch.no_grad()
    def sample(self, transformer: Any, target: Path, step: int) -> list[str]:
        """Write an image and a sidecar for each prompt, as soon as it is made; a collective.

        A wish to stop is honoured between images. An image that cannot be written, or is black, is
        no reason to end the training: that is warned of.

        Args:
            transformer: The model being trained, sharded or not.
            target: Directory of this step's samples.
            step: The optimizer steps that it was trained.

        Returns:
            The names of the images, in the order of their prompts.

        Raises:
            NotFiniteError: A class image is black, since its latents are not finite.
        """
        run, world = self.run, self.run.world
        requests = requests_of(run.spec)
        planned = [run.family.forwards_of(request) for request in requests]
        written, failed = [False] * len(requests), False
        was_training, done = transformer.training, 0
        transformer.eval()
        with run.telemetry.phase("sample", len(requests)) as progress, ExitStack() as stack:
            beside: dict[str, Any] = {}
            other: OtherExpert | None = None
            stopping = False
            if run.family.second_denoiser is not None:  # which takes a while to read
                stopping = any(world.any([run.stop_requested()]))
            if not stopping:
                other = find_other_expert(run)
                beside, other = stack.enter_context(second_denoisers(run, other))
            studio = _Studio(run, transformer, beside)
            # Two denoisers take turns at a place that depends on the steps.
            kinds = [(request.steps, request.guided) for request in requests] if beside else None
            for numbers in rounds_of(planned, world.data_size, kinds):
                if stopping or any(world.any([run.stop_requested()])):
                    break
                number = self._number(numbers)
                latents, sound = self._denoise(studio, requests, planned, numbers)
                # The VAE gets the room of whatever weights are still gathered.
                studio.reshard()
                if number is not None and world.rank % world.context_size == 0:
                    self._check(latents, number)
                    frames = studio.develop(requests[number], latents)
                    heard = studio.develop_sound(requests[number], sound)
                    facts = self._facts(requests[number], step) | _facts_of(other)
                    written[number] = self._write(frames, heard, facts, target, number)
                    failed = failed or not written[number]
                done += len(numbers)
                progress(done)
            transformer.train(was_training)
            studio.close()
            beside.clear()
            stack.close()
            give_back(world.device)
            *written, others = world.any([*written, failed])
        if others and not failed:
            run.telemetry.warn("another rank could not write its samples; see that rank's log")
        return [self._name(number) for number, there in enumerate(written) if there]

    def _name(self, number: int) -> str:
        return sample_name(self.numbers[number] if self.numbers else number)

    def _number(self, numbers: list[int]) -> int | None:
        """Return this rank's image of a round, or None."""
        place = self.run.world.data_rank
        return numbers[place] if place < len(numbers) else None

    def _denoise(
        self,
        studio: _Studio,
        requests: list[SampleRequest],
        planned: list[int],
        numbers: list[int],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return this rank's latents of a round, with as many forwards as on other ranks.

        Those of a video's sound are second, if the model makes some.

        Args:
            studio: The pipeline.
            requests: All images.
            planned: The forwards that each takes.
            numbers: The images of the round, the one with the most forwards first.
        """
        number = self._number(numbers)
        if number is None and not self.run.world.shards:
            return torch.empty(0), None
        # Those that have none do the same as the one with the fewest forwards.
        number = numbers[-1] if number is None else number
        request, own = requests[number], planned[number]
        forwards = Forwards(
            studio.denoisers,
            self.run.telemetry.moved,
            expected=own,
            total=planned[numbers[0]] if self.run.world.shards else own,
        )
        with forwards, autocast(self.run.spec, studio.device), uncompiled(self.run.spec):
            pictures = prompt_conditions(request, self.data.pictures)
            latents, sound = studio.denoise(request, *self._texts(request), pictures)
            forwards.check(studio.pipeline)
        return latents, sound

    def _check(self, latents: torch.Tensor, number: int) -> None:
        """Refuse a class image, and warn of a sample, whose latents are not finite.

        Raises:
            NotFiniteError: A class image: others would train on it as if it were an image.
        """
        if not nonfinite({"latents": latents}):
            return
        if not self.numbers:
            self.run.telemetry.warn(
                f"sample {self._name(number)} is black: its latents are not finite"
            )
            return
        hint = "download the model again, its files may be damaged"
        if self.run.spec.mixed_precision == "fp16":
            hint = "set mixed_precision: bf16 (or no), fp16 is too narrow for some models"
        raise NotFiniteError(
            f"class image {self._name(number)} is black: its latents are not finite", hint
        )

    def _write(
        self,
        frames: list[Image],
        sound: Sound | None,
        facts: Mapping[str, Any],
        target: Path,
        number: int,
    ) -> bool:
        """Whether an image or video could be written."""
        path = target / self._name(number)
        try:
            target.mkdir(parents=True, exist_ok=True)
            write_sample(frames, facts, path, sound)
        except OSError as error:
            self.run.telemetry.warn(f"cannot write {path} ({error.strerror or error})")
            return False
        return True

    def _texts(
        self, request: SampleRequest
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor] | None]:
        """Return the encoded prompt on the device, and the negative one if it has an effect."""
        words = request.negative_prompt
        prompt = self._on_device(self.data.prompt(request.prompt, request))
        if not request.guided or words is None:
            return prompt, None
        return prompt, self._on_device(self.data.prompt(words, request, negative=True))

    def _on_device(self, text: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        # Ranks that share a sample's tokens need as many each.
        filled = collate([text], multiple=self.run.world.context_size)
        return {name: tensor[0].to(self.run.world.device) for name, tensor in filled.items()}

    def _facts(self, request: SampleRequest, step: int) -> dict[str, Any]:
        """Return how an image was made, as JSON values."""
        negative, flavour = request.negative_prompt, self.run.spec.model_flavour
        return {
            "prompt": prompt_text(request.prompt, self.run.spec),
            "negative_prompt": None if negative is None else prompt_text(negative, self.run.spec),
            "seed": request.seed,
            "size": [request.width, request.height],
            "steps": request.steps,
            "guidance": request.guidance,
            "true_cfg_scale": request.true_cfg_scale,
            "guidance_embedded": self.run.family.facts.guidance_of(flavour) == "embedded",
            **({"frames": request.frames, "fps": self.run.spec.fps} if request.frames > 1 else {}),
            **({"conditioning": list(request.conditioning)} if request.conditioning else {}),
            **({"conditioning_roles": list(request.roles)} if request.roles else {}),
            **({"layers": request.layers} if request.layers else {}),
            "step": step,
            "family": self.run.spec.model_family,
            "ema": has_average(self.run.spec),
            "dtype": str(compute_dtype(self.run.spec)),
        }


def _facts_of(other: OtherExpert | None) -> dict[str, Any]:
    """Return which trained weights denoised the other noise levels, as JSON values."""
    if other is None:
        return {}
    return {"other_expert": {"run": other.run, "step": other.checkpoint.step, "ema": other.ema}}


def _encode_in_fp32(vae: Any) -> None:
    """Keep the pipeline's encoding of conditioning images out of the autocast around it.

    Training encodes them in fp32; an autoencoder in fp16 may overflow.
    """
    encode = vae.encode

    def in_fp32(pixels: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(pixels.device.type, enabled=False):
            return encode(pixels.float(), *args, **kwargs)

    vae.encode = in_fp32


class _Studio:
    """The stock pipeline around the transformer; its VAE waits in host memory.

    Args:
        run: The job and its ranks.
        transformer: What is trained.
        others: Denoisers that the pipeline has besides, by their names in it.

    Attributes:
        denoisers: All of them.
        pipeline: The pipeline.
    """

    def __init__(self, run: RunContext, transformer: Any, others: dict[str, Any]) -> None:
        self.denoisers = [transformer, *others.values()]
        self.device = device = run.world.device
        self._family = family = run.family
        self._root = run.model_root
        self._warn = run.telemetry.warn
        vae = family.load_vae(run.model_root, torch.float32).eval()
        _encode_in_fp32(vae)
        # Moves it to the device when it decodes, and tells the pipeline where to compute.
        vae, self._vae_hook = cpu_offload_with_hook(vae, device)
        self.pipeline = family.sampling_pipeline(run.model_root, transformer, vae, **others)
        self.pipeline.set_progress_bar_config(disable=True)
        if self.pipeline._execution_device != device:
            raise RuntimeError(
                f"{type(self.pipeline).__name__} computes on {self.pipeline._execution_device}, "
                f"but the transformer on {device}"
            )

    def denoise(
        self,
        request: SampleRequest,
        condition: Any,
        negative: Any,
        pictures: Sequence[Conditioning],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the latents of an image, and of a video's sound, as the pipeline does.

        Args:
            request: The image.
            condition: Its encoded prompt.
            negative: Its encoded negative prompt, if that has an effect.
            pictures: Its conditioning images; the VAE is on the device from then on.
        """
        pipeline, beside = self.pipeline, {}
        if pictures:
            beside = self._family.reference_arguments(pictures)
            pipeline = self._family.pipeline_with_image(pipeline, condition)
            pipeline.set_progress_bar_config(disable=True)
        output = pipeline(
            **self._family.sample_arguments(request, condition, negative),
            **beside,
            width=request.width,
            height=request.height,
            num_inference_steps=request.steps,
            generator=torch.Generator("cpu").manual_seed(request.seed),
            output_type="latent",
        )
        return output[0], output[1] if self._family.MAKES_SOUND else None

    def reshard(self) -> None:
        """Free whatever weights of the denoisers are still gathered."""
        for denoiser in self.denoisers:
            reshard(denoiser)

    def develop(self, request: SampleRequest, latents: torch.Tensor) -> list[Image]:
        """Decode latents to an image or a video's frames; the VAE is on the device meanwhile.

        Whole, as the stock pipeline does it; part by part only where there is no memory for that.
        """
        try:
            with suppress(torch.OutOfMemoryError):
                return self._family.decode(self.pipeline, latents.float(), request)
            give_back(self.device)
            self.pipeline.vae.enable_tiling()
            self._warn(
                f"not enough memory to decode {request.width}x{request.height} at once; decoding "
                "in tiles from now on, which may leave seams"
            )
            return self._family.decode(self.pipeline, latents.float(), request)
        finally:
            self._vae_hook.offload()

    def develop_sound(self, request: SampleRequest, latents: torch.Tensor | None) -> Sound | None:
        """Decode the latents of a video's sound; what does it is on the device meanwhile.

        A sample without its sound is no reason to end the training.
        """
        if latents is None or request.frames == 1:
            return None
        try:
            return self._family.decode_sound(self._root, latents.float(), self.device)
        except (OSError, torch.OutOfMemoryError) as error:
            self._warn(f"samples are silent: their sound cannot be decoded ({error})")
            return None
        finally:
            give_back(self.device)

    def close(self) -> None:
        """Let go of the VAE: the hook and it hold each other."""
        self._vae_hook.remove()
        del self.pipeline.vae.encode  # the same
        del self.pipeline, self.denoisers
