"""Trace one forward and one backward of a job's model, as a timeline of bytes."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from engine.data.loader import MicroBatch
from engine.diffusion.objective import NoiseDraw
from engine.memory.tracing import fakes
from engine.memory.tracing.fakes import Assume
from engine.memory.tracing.inputs import (
    caption_shapes,
    frames_before,
    latents_shape,
    reference_shapes,
    references,
    sound_shapes,
)
from engine.memory.tracing.live import Live
from engine.memory.tracing.model import Built, Unit, build, on_fake
from engine.memory.tracing.record import Echo
from engine.memory.tracing.timeline import Entry, Recorder, Span, watch
from engine.memory.tracing.work import Counter
from engine.model.activation_checkpointing import Recompute, checkpoint_activations
from engine.model.precision import autocast
from engine.ranks.world import World
from engine.train.optimizer_step import Stepper
from engine.train.token_routing import ends_of_routes
from engine.train.train_state import TrainState
from jobs.spec.keys.prompts import requests_of
from jobs.spec.rules.steps import preserves, trains_to_base
from jobs.spec.rules.strategy import checkpoints_activations

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from engine.memory.tracing.model import Shape
    from engine.memory.tracing.record import Asked

_RERUNS: Final = 8  # a block that gets other gradients may give others to the block before it


@dataclass(frozen=True)
class Trace:
    """The memory use of a step, independent of the number of ranks.

    Attributes:
        shape: The traced job settings.
        model: Class of the denoiser.
        units: Parameters that FSDP gathers together, the root last.
        buffers: Bytes of its buffers.
        timeline: Activations and unsharded gradients, with a mark wherever a unit begins or ends.
        second_denoiser: Whether samples also need another denoiser of the same size.
        compiles: Whether the model names the blocks that `torch_compile` would compile.
        asked: See `engine.memory.tracing.record.Echo`; the same wherever the same is trained of it.
    """

    shape: Shape
    model: str
    units: tuple[Unit, ...]
    buffers: int
    timeline: tuple[Entry, ...]
    second_denoiser: bool = False
    compiles: bool = False
    asked: Mapping[str, Asked] = field(default_factory=dict, compare=False)

    @property
    def parameters(self) -> int:
        """Return the number of the model's parameters, without its adapter."""
        every = (w for unit in self.units for w in unit.weights)
        return sum(w.numel * w.per_element for w in every if not w.lora)

    @property
    def most_activations(self) -> int:
        """Return the peak of activations, in bytes."""
        return max(e.most_activations for e in self.timeline if isinstance(e, Span))

    @property
    def trained(self) -> int:
        """Return the number of trained parameters."""
        return sum(w.numel for unit in self.units for w in unit.weights if w.trained)


def trace_model(
    shape: Shape,
    *,
    echo: bool = True,
    asked: Mapping[str, Asked] | None = None,
    reruns: int = _RERUNS,
) -> Trace:
    """Run a training step, or a sample's forward, on fake tensors. Takes seconds.

    Args:
        shape: The job settings to trace.
        echo: Whether to trace one block of each kind and replay it, rather than run all blocks.
        asked: See `engine.memory.tracing.record.Echo`; what differs from it is detected, by
            another run.
        reruns: Most of such runs.

    Raises:
        UserError: The model cannot be built, or the job's settings do not fit it.
    """
    built = build(shape)
    on_cuda = shape.spec.device != "cpu"
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        on_fake(built, shape)
        alone = shape.spec.train_batch_size == 1 or not shape.training
        stack.enter_context(Assume(all_true=alone))
        live = stack.enter_context(Live(fakes.temporary if on_cuda else lambda *_: 0, Counter()))
        if on_cuda:
            stack.enter_context(fakes.AsOnCuda())
        recorder = Recorder(live)
        for tensor in (*built.model.parameters(), *built.model.buffers()):
            live.ignore(tensor)
        player = Echo(recorder, asked)
        blocks = _prepare(built, shape, player, echo=echo)
        if shape.training:
            _train(built, shape, recorder)
        else:
            _sample(built, shape, recorder)
        unused = player.unused | _without_gradient(built.model, blocks, shape)
    if player.differs and reruns:
        return trace_model(shape, asked=dict(asked or {}) | player.differs, reruns=reruns - 1)
    units = tuple(_marked(unit, unused) for unit in built.units)
    return Trace(
        shape,
        type(built.model).__name__,
        units,
        built.buffers,
        tuple(recorder.entries),
        second_denoiser=built.family.second_denoiser is not None,
        compiles=bool(getattr(built.model, "_repeated_blocks", None)),
        asked=dict(asked or {}),
    )


def _without_gradient(model: torch.nn.Module, blocks: Collection[str], shape: Shape) -> set[str]:
    """Return the trained parameters outside of replayed blocks that got no gradient."""
    if not shape.training:
        return set()
    within = tuple(f"{name}." for name in blocks)
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.grad is None and not name.startswith(within)
    }


def _marked(unit: Unit, unused: Collection[str]) -> Unit:
    """Mark the weights of a unit that get no gradient."""
    if not any(weight.name in unused for weight in unit.weights):
        return unit
    weights = (replace(weight, unused=weight.name in unused) for weight in unit.weights)
    return Unit(unit.name, tuple(weights))


def _prepare(built: Built, shape: Shape, player: Echo, *, echo: bool) -> list[str]:
    """Set up replay of the model's blocks and marks at its units; return the blocks' names."""
    model, spec = built.model, shape.spec
    # A replayed block runs none of the hooks that route tokens, which matter at the ends of routes.
    ends = ends_of_routes(model, spec, built.family) if shape.training else ()
    names = [name for name in built.blocks if name not in ends]
    blocks = {model.get_submodule(name): name for name in names} if echo else {}
    if checkpoints_activations(spec) and shape.training:
        checkpoint_activations(model, spec)
        if blocks:
            _echo_checkpoints(model, player, blocks)
    for module, name in blocks.items():
        original = module.forward
        module.forward = partial(_play, player, module, name, original, "plain")
    watch(model, [unit.name for unit in built.units], player.recorder, player.release)
    model.train(shape.training)
    return list(blocks.values())


def _echo_checkpoints(model: Any, player: Echo, blocks: dict[torch.nn.Module, str]) -> None:
    """Replay a block together with its recomputation."""
    for module in model.modules():
        run = getattr(module, "_gradient_checkpointing_func", None)
        if run is not None:
            module._gradient_checkpointing_func = partial(_run, player, blocks, run)


def _run(
    player: Echo, blocks: dict[torch.nn.Module, str], run: Recompute, block: Any, *inputs: Any
) -> Any:
    name = blocks.get(block) if isinstance(block, torch.nn.Module) else None
    if name is None or block in run.kept:
        return run(block, *inputs)
    return player.play(block, name, partial(run, block), "checkpointed", inputs, {})


def _play(
    player: Echo, module: torch.nn.Module, name: str, call: Any, how: str, *args: Any, **kwargs: Any
) -> Any:
    return player.play(module, name, call, how, args, kwargs)


# -- running -------------------------------------------------------------------------------------


def _train(built: Built, shape: Shape, recorder: Recorder) -> None:
    """Run the micro-batch part of `engine.train.optimizer_step`."""
    device = torch.device("cpu")
    strategy = "fsdp2" if shape.sharded else "single"
    world = World(rank=0, size=1, device=device, strategy=strategy, token="")
    optimizer: Any = None
    training = TrainState(built.model, optimizer, optimizer)
    loader: Any = _Loader(built, shape)
    phases: Any = _Phases(recorder)
    objective: Any = objective_of(built, shape)
    recorder.begin()
    spec = shape.spec.model_copy(update={"preservation": "none"})
    Stepper(spec, built.family, objective, training, loader, world, phases).accumulate(0)
    recorder.flush()


def _sample(built: Built, shape: Shape, recorder: Recorder) -> None:
    """Run one denoising step: create latents, and predict from them."""
    # With guidance, some pipelines put both prompts into one batch.
    guided = any(request.guided for request in requests_of(shape.spec))
    count = 2 if guided and built.family.GUIDED_FORWARDS == 1 else 1
    batch = batch_of(built, shape, count)
    level = torch.full((count,), 0.5)
    recorder.begin()
    with torch.no_grad(), autocast(shape.spec, torch.device("cpu")):
        recorder.mark("begin", "sample")
        built.family.predict(
            built.model, batch.latents, level, batch.condition, shape.spec.validation_guidance
        )
        recorder.mark("end", "sample")


class _Phases:
    """Stands in for `engine.ranks.telemetry.Peaks`, counting bytes of fake tensors."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    @contextmanager
    def phase(self, name: str, *, measured: bool) -> Iterator[None]:
        self._recorder.mark("begin", name)
        yield
        self._recorder.mark("end", name)


class _Loader:
    """Stands in for `engine.data.loader.Loader`, with a batch of fake tensors."""

    forwards = 1

    def __init__(self, built: Built, shape: Shape) -> None:
        self._built, self._shape = built, shape

    def step(self, step: int) -> Iterator[MicroBatch]:
        spec = self._shape.spec
        batch = batch_of(self._built, self._shape, spec.train_batch_size)
        # The pass of `preservation` has the forwards of a batch whose target is the base's
        # prediction, and nothing of the other pass is in memory then.
        to_base = trains_to_base(spec) or preserves(spec)
        yield replace(batch, to_base=to_base, asks_base=to_base)


def batch_of(
    built: Built, shape: Shape, count: int, make: Callable[..., torch.Tensor] = torch.empty
) -> MicroBatch:
    """Return a batch of a job's shapes.

    Args:
        built: The model.
        shape: The job settings.
        count: Its samples.
        make: Makes a tensor of a size, and of a `dtype` if given.
    """
    spec, config = shape.spec, shape.config
    channels, *cells = latents_shape(spec, config, shape.size, shape.frames)
    if before := frames_before(spec, training=shape.training):
        cells[0] += before
    latents = make((count, channels, *cells))
    beside = references(spec, training=shape.training)
    place: dict[str, Any] = {"training": shape.training}
    heard = shape.training or built.family.MAKES_SOUND
    condition = {
        name: make((count, *size), dtype=dtype)
        for name, (size, dtype) in (
            caption_shapes(spec, config, shape.size, beside, **place)
            | reference_shapes(spec, config, shape.size, beside, shape.frames, **place)
            | (sound_shapes(spec, config, shape.frames, **place) if heard else {})
        ).items()
    }
    of_level = torch.float32 if built.family.facts.objective == "flow" else torch.int64
    drawn = NoiseDraw(make((count,), dtype=of_level), make(latents.shape))
    return MicroBatch(range(count), latents, drawn, built.family.arrange(condition))


def objective_of(built: Built, shape: Shape) -> Any:
    """Return a job's objective, without what only changes values."""
    spec, family = shape.spec, built.family
    if family.facts.objective == "flow":
        from engine.diffusion.rectified_flow import Flow

        # The shift only changes values, so none is looked up: the model may not be on disk.
        return Flow(spec, lambda height, width, frames: 1.0)
    from diffusers import DDPMScheduler

    from engine.diffusion.denoising import Denoising
    from engine.diffusion.huber import scheduled

    return Denoising(DDPMScheduler(), spec.snr_gamma, scheduled(spec))
