"""Optimizer and learning-rate schedule.

Every optimizer is a library's. What decides whether one may train sharded parameters (`DTensor`s)
is whether its numbers there equal those on whole tensors, measured in
`tests/engine/train/test_optimizer`: adamw, adamw_schedule_free and adamw_8bit work element by
element (or block by block) and are right; the others have steps of our own: sgd and lion of each
rank's parts, prodigy adds its two sums up over the ranks (`engine.train.optimizer`), adafactor and
came their means (`engine.train.factored`), and muon exchanges matrices (`engine.train.muon`). Those
and adamw leave a step out on the device (`engine.train.skipping`).
"""

from __future__ import annotations

import importlib
import math
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from engine.model.files.weights import local_part
from engine.train.factored import sharded_factored
from engine.train.gradients import buckets, owners_of, parts_of, sent_to
from engine.train.muon import Muon
from engine.train.skipping import (
    SkippedSteps,
    add_unless,
    descend_unless,
    follow_unless,
    scale_unless,
    spoilt_of,
)
from jobs.errors import UserError
from jobs.spec.rules.averages import SCHEDULE_FREE
from jobs.spec.rules.lora_conflicts import ONE_RATE
from jobs.spec.rules.steps import steps_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from torch.distributed.checkpoint.api import CheckpointException

    from jobs.spec.job_spec import RecipeKeys
    from jobs.spec.keys.training import TrainingKeys


# -- prodigy --------------------------------------------------------------------------------
# Prodigy whose estimate is of all parameters of all ranks, and stays on the device.
#
# Its authors' (prodigyopt 1.1) asks the host for two sums of every tensor, and on shards adds
# up what its own rank has: another estimate on every rank. Their `fsdp_in_use` adds those up,
# on GPUs and without replicas only.


def sharded_prodigy(base: Any) -> Any:
    """Prodigyopt's `Prodigy` with a step of our own: the same numbers, with one group.

    Bias correction and the safeguard of warm-ups, which keeps these from inflating the estimate,
    are as its authors advise for diffusion models; growth is unlimited, and nothing is sliced.
    """

    class Prodigy(base):
        decides_on_device = True

        def __init__(self, parameters: Any, device: torch.device, **settings: Any) -> None:
            super().__init__(
                parameters, use_bias_correction=True, safeguard_warmup=True, **settings
            )
            self._device = device
            self._estimate: torch.Tensor | None = None  # d and its numerator, fp64
            self._skipped = SkippedSteps()  # of parameters' steps, and of `k`
            self.register_state_dict_pre_hook(_settle)
            self.register_load_state_dict_post_hook(_forget)

        @torch.no_grad()
        def step(self, closure: Callable[[], float] | None = None) -> float | None:
            loss = None if closure is None else closure()
            (group,) = self.param_groups
            parameters = [p for p in group["params"] if p.grad is not None]
            for parameter in parameters:
                _begin(self.state[parameter], parameter)
            if group["lr"] <= 0:
                return loss
            if self._estimate is None:
                numbers = [group["d"], group["d_numerator"]]
                self._estimate = sent_to(torch.tensor(numbers, dtype=torch.float64), self._device)
            spoilt, rate = spoilt_of(self), _rate(group, self._skipped.of("k"))
            self._estimate = _step(self.state, parameters, group, rate, self._estimate, spoilt)
            group["k"] += 1
            self._skipped.add([*parameters, "k"], spoilt)
            return loss

    return Prodigy


def _settle(optimizer: Any) -> None:
    """Write the estimate where the authors' keeps it, as numbers; the host waits for the device.

    And count no steps that it has skipped.
    """
    (group,) = optimizer.param_groups
    if optimizer._estimate is not None:
        d, numerator = optimizer._estimate.tolist()
        group.update(d=d, d_max=d, d_numerator=numerator)
    for counted, number in optimizer._skipped.take().items():
        counts, name = (group, "k") if counted == "k" else (optimizer.state[counted], "step")
        counts[name] -= number


def _forget(optimizer: Any) -> None:
    optimizer._estimate, optimizer._skipped = None, SkippedSteps()


def _rate(group: dict[str, Any], skipped: torch.Tensor | None) -> Any:
    """Return the rate with Adam's corrections of the bias, a number or a scalar on the device."""
    beta1, beta2 = group["betas"]
    if skipped is None:
        count = group["k"] + 1
        return group["lr"] * math.sqrt(1 - beta2**count) / (1 - beta1**count)
    counts = group["k"] + 1 - skipped.double()
    return group["lr"] * (1 - beta2**counts).sqrt() / (1 - beta1**counts)


def _begin(state: dict[str, Any], parameter: torch.Tensor) -> None:
    """Create a parameter's state before its first step, sharded like the parameter."""
    if "step" not in state:
        state["step"] = 0
        state["p0"] = parameter.detach().clone()
        for name in ("s", "exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(parameter)


def _step(
    states: Any,
    parameters: Sequence[torch.nn.Parameter],
    group: dict[str, Any],
    rate: Any,
    estimate: torch.Tensor,
    spoilt: torch.Tensor | None,
) -> torch.Tensor:
    """Do a step, of some tensors at a time; returns the new estimate."""
    (beta1, beta2), d0, eps = group["betas"], group["d0"], group["eps"]
    beta3 = group["beta3"] or math.sqrt(beta2)
    d, numerator = estimate.unbind()
    sums = []
    for some in buckets(parameters):
        s, p0, first, second = _of(states, some, "s", "p0", "exp_avg", "exp_avg_sq")
        gradients = [local_part(p.grad) for p in some if p.grad is not None]
        away = torch._foreach_sub(p0, [local_part(p) for p in some])
        dots = [torch.dot(g.flatten(), a.flatten()) for g, a in zip(gradients, away, strict=True)]
        del away
        scaled = torch._foreach_mul(gradients, _like(d, gradients))
        follow_unless(first, scaled, 1 - beta1, spoilt)
        scale_unless(s, beta3, spoilt)
        add_unless(s, scaled, _like(d / d0, gradients), spoilt)
        torch._foreach_mul_(scaled, scaled)
        scale_unless(second, beta2, spoilt)
        add_unless(second, scaled, 1 - beta2, spoilt)
        del scaled
        lengths = torch._foreach_norm(s, 1)
        sums.append(torch.stack([torch.stack(dots), torch.stack(lengths)]))
    product, denominator = _of_all(parameters, sums, estimate.device).unbind()
    moved = beta3 * numerator + d * d / d0 * rate * product
    # Nothing is known while all gradients are zero.
    d_hat = torch.where(denominator > 0, group["d_coef"] * moved / denominator, d)
    new = torch.maximum(d, d_hat)
    for some in buckets(parameters):
        first, second = _of(states, some, "exp_avg", "exp_avg_sq")
        values = [local_part(p) for p in some]
        update = torch._foreach_sqrt(second)
        # Torch reads a scalar that is added to many tensors, and does not read a factor. Without
        # epsilon, nothing is added.
        small = new * eps if eps else torch.ones_like(new)
        torch._foreach_mul_(update, _like(1 / small, values))
        torch._foreach_add_(update, float(eps > 0))
        torch._foreach_reciprocal_(update)
        torch._foreach_mul_(update, first)
        torch._foreach_mul_(update, _like(d * rate / small, values))
        if group["weight_decay"]:
            scale_unless(values, _like(1 - group["weight_decay"] * rate * d, values), spoilt)
        add_unless(values, update, -1.0, spoilt)
        for parameter in some:
            states[parameter]["step"] += 1
    now = torch.stack([new, moved])
    return now if spoilt is None else torch.where(spoilt == 1, estimate, now)


def _of(
    states: Any, parameters: Sequence[torch.nn.Parameter], *names: str
) -> list[list[torch.Tensor]]:
    """Return this rank's parts of the state, by name."""
    return [[local_part(states[p][name]) for p in parameters] for name in names]


def _like(scalar: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return scalar.to(tensors[0].device, tensors[0].dtype)


def _of_all(
    parameters: Sequence[torch.nn.Parameter], sums: Sequence[torch.Tensor], device: torch.device
) -> torch.Tensor:
    """Both sums over all parameters of all ranks, `(2,)` in fp64; a collective.

    Args:
        parameters: In their order.
        sums: `(2, …)` of each of them, as far as this rank has it.
        device: Where ranks meet, also when parameters are in host memory.
    """
    each = sent_to(torch.cat(list(sums), dim=1), device).double()
    total = torch.zeros(2, dtype=torch.float64, device=device)

    def sum_of(places: list[int]) -> torch.Tensor:
        if len(places) == len(parameters):
            return each.sum(1)
        return each.index_select(1, sent_to(torch.tensor(places), device)).sum(1)

    for (mesh, *dims), places in owners_of(parameters).items():
        part = sum_of(places)
        for dim in dims:
            dist.all_reduce(part, group=mesh.get_group(dim))
        total += part
    plain = [n for n, p in enumerate(parameters) if not isinstance(p, DTensor)]
    if plain:
        total += sum_of(plain)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(total, src=0)  # as of the norm: copies must not drift apart
    return total


# -- sgd and lion ---------------------------------------------------------------------------
# Both work number by number, so that each rank may step its own part: on plain tensors, of which
# one kernel takes many. Torch's fused SGD has no sharding strategy (2.13), and Lion's authors
# launch six kernels for each tensor.


class Sgd(torch.optim.SGD):
    """Plain SGD, fused."""

    decides_on_device = True

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else closure()
        for group in self.param_groups:
            values, gradients = _parts([p for p in group["params"] if p.grad is not None])
            if values:
                rate, decay = group["lr"], group["weight_decay"]
                descend_unless(values, gradients, rate, decay, spoilt_of(self))
        return loss


def local_lion(base: Any) -> Any:
    """Return lion-pytorch's `Lion` with a step of our own, to the same numbers bit for bit."""

    class Lion(base):
        decides_on_device = True

        @torch.no_grad()
        def step(self, closure: Callable[[], float] | None = None) -> float | None:
            loss = None if closure is None else closure()
            spoilt = spoilt_of(self)
            for group in self.param_groups:
                rate, (beta1, beta2) = group["lr"], group["betas"]
                for some in buckets([p for p in group["params"] if p.grad is not None]):
                    for parameter in some:
                        if not self.state[parameter]:
                            self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
                    values, gradients = _parts(some)
                    (moments,) = _of(self.state, some, "exp_avg")
                    updates = torch._foreach_mul(moments, beta1)
                    torch._foreach_add_(updates, gradients, alpha=1 - beta1)
                    torch._foreach_sign_(updates)
                    if group["weight_decay"]:
                        scale_unless(values, 1 - rate * group["weight_decay"], spoilt)
                    add_unless(values, updates, -rate, spoilt)
                    scale_unless(moments, beta2, spoilt)
                    add_unless(moments, gradients, 1 - beta2, spoilt)
            return loss

    return Lion


def _parts(
    parameters: Sequence[torch.nn.Parameter],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return this rank's parts of parameters and of their gradients."""
    gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
    return [local_part(p) for p in parameters], gradients


# -- optimizer ------------------------------------------------------------------------------


_INSTALL_HINT: Final = "pip install 'fsdp-tui[optimizers]'"

# Optimizers with a step of our own, which has its own parts where it needs any.
_IN_PARTS: Final = ("prodigy", "muon", "adafactor", "came", "sgd", "lion")

# Lion's own: with Adam's 0.999 its sign would follow gradients of a thousand steps ago.
_LION_BETAS: Final = (0.9, 0.99)


def build_optimizer(
    spec: RecipeKeys,
    parameters: Sequence[torch.nn.Parameter],
    device: torch.device,
    texts: Sequence[torch.nn.Parameter] = (),
    matrices: Collection[torch.nn.Parameter] = (),
) -> torch.optim.Optimizer:
    """Build the job's optimizer over the trained parameters (plain, `DTensor`, or both).

    All denoiser parameters are in one group, so that a checkpoint does not depend on which of them
    are sharded. Text encoders have a second group for their own learning rate, unless the optimizer
    supports only one rate.

    Args:
        spec: The job. `adam_*` hold for all but sgd, lion, adafactor and came.
        parameters: Trained parameters; on `device`, or on the CPU under FSDP's offload.
        device: Where this rank computes.
        texts: Trained parameters of text encoders; plain.
        matrices: Those that muon orthogonalizes, see `engine.train.muon.hidden_matrices`.

    Raises:
        UserError: The optimizer's package is missing.
    """
    everything = [*parameters, *texts]
    if not texts or spec.optimizer in ONE_RATE:
        optimizer = _build(spec, everything, device, matrices)
    else:
        rate = spec.text_encoder_learning_rate or spec.learning_rate
        groups = [{"params": list(parameters)}, {"params": list(texts), "lr": rate}]
        optimizer = _build(spec, groups, device, matrices)
    parts = _small_parts_of if spec.optimizer == SCHEDULE_FREE else parts_of
    if len(parts(everything)) > 1 and spec.optimizer not in _IN_PARTS:
        _step_in_parts(optimizer, parts)
    return optimizer


def _build(
    spec: RecipeKeys,
    parameters: Sequence[Any],
    device: torch.device,
    matrices: Collection[torch.nn.Parameter],
) -> torch.optim.Optimizer:
    common: dict[str, Any] = {"lr": spec.learning_rate, "weight_decay": spec.weight_decay}
    adam: dict[str, Any] = {"betas": (spec.adam_beta1, spec.adam_beta2), "eps": spec.adam_epsilon}
    if spec.optimizer == "sgd":
        return Sgd(parameters, **common)
    if spec.optimizer == "adamw":
        # foreach needs one more fp32 copy of the shard at its peak; fused does not
        fused = device.type in ("cuda", "cpu")
        return torch.optim.AdamW(parameters, fused=fused, **common, **adam)
    if spec.optimizer == "muon":
        dtype = torch.float32 if spec.mixed_precision == "no" else torch.bfloat16
        return Muon(parameters, matrices, device, dtype, **common, **adam)
    if spec.optimizer == "adafactor":
        # Transformers' rather than torch's, whose rate is relative to the parameters' size:
        # there, a learning_rate that suits the other optimizers would train next to nothing.
        library = _library("adafactor", "transformers.optimization", "transformers")
        kind = sharded_factored(library.Adafactor)
        fixed = {"scale_parameter": False, "relative_step": False}
        return _made(kind(parameters, device, **fixed, **common))
    if spec.optimizer == "lion":
        kind = local_lion(_library("lion", "lion_pytorch", "lion-pytorch").Lion)
        return _made(kind(parameters, betas=_LION_BETAS, **common))
    if spec.optimizer == "came":
        kind = _library("came", "came_pytorch", "came-pytorch").CAME
        return _made(sharded_factored(kind)(parameters, device, **common))
    if spec.optimizer == SCHEDULE_FREE:
        library = _library(SCHEDULE_FREE, "schedulefree", "schedulefree")
        # Not its own warm-up: the schedule's, whose rates it takes, is the same.
        optimizer = library.AdamWScheduleFree(parameters, **common, **adam)
        optimizer.param_groups[0]["train_mode"] = True  # its `train` also makes empty states
        return _made(optimizer)
    if spec.optimizer == "prodigy":
        kind = _library("prodigy", "prodigyopt", "prodigyopt").Prodigy
        return _made(sharded_prodigy(kind)(parameters, device, **common, **adam))
    kind = _adamw_8bit(_library("adamw_8bit", "torchao.optim", "torchao").AdamW8bit)
    return _made(kind(parameters, **common, **adam))


def _small_parts_of(parameters: Sequence[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Parts for schedule-free AdamW, which allocates as much as it is given at once.

    Fewer tensors in each, since it calls nine functions with a list rather than one.
    """
    return [bucket for part in parts_of(parameters, 16) for bucket in buckets(part)]


def _step_in_parts(
    optimizer: torch.optim.Optimizer,
    parts_of: Callable[[Sequence[torch.nn.Parameter]], list[list[torch.nn.Parameter]]],
) -> None:
    """Make each part of the parameters a separate group within a step.

    A GPU hardly notices: fused kernels take some dozens of tensors at a time in any case.
    """

    whole: list[list[tuple[dict[str, Any], list[dict[str, Any]]]]] = []

    def part(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        pieces = [
            (group, [group | {"params": part} for part in parts_of(group["params"])])
            for group in optimizer.param_groups
        ]
        whole.append(pieces)
        optimizer.param_groups = [part for _, parts in pieces for part in parts]

    def join(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        pieces = whole.pop()
        for group, parts in pieces:
            # Schedule-free AdamW counts steps here, the same for all groups.
            group.update(parts[0] | {"params": group["params"]})
        optimizer.param_groups = [group for group, _ in pieces]

    optimizer.register_step_pre_hook(part)
    optimizer.register_step_post_hook(join)


def build_scheduler(spec: TrainingKeys, optimizer: torch.optim.Optimizer) -> LambdaLR:
    """Advances once per optimizer step, whatever the number of ranks or forwards."""
    return LambdaLR(optimizer, lambda step: _factor(spec, step))


def fill_state(optimizer: torch.optim.Optimizer) -> None:
    """Give parameters that have made no step their optimizer tensors, and change nothing else.

    To be called before `get_state_dict` and `set_state_dict`. Those fill an empty optimizer too,
    by a step with zero gradients at rate zero, but leave that step counted: as a tensor by Adam's,
    in the group by schedule-free AdamW, each of which bends the next real step. And a layer that
    the model never uses (the text's last one, in Qwen-Image's last block) has no gradient, so that
    a checkpoint would lack what loading it asks for. Rank-local, and all ranks agree whether it
    does anything, since all have made the same steps.
    """
    if isinstance(optimizer, torch.optim.SGD):  # plain SGD never has any
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    empty = [p for p in parameters if not optimizer.state.get(p)]
    begin = getattr(optimizer, "begin", None)  # of those with a step of our own
    if begin is not None:
        for parameter in empty:
            begin(parameter)
    if begin is not None or not empty:
        return
    gradients = [p.grad for p in parameters]
    before = [dict(group) for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = None
    for parameter in empty:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, settings in zip(optimizer.param_groups, before, strict=True):
        group.update(settings)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    for parameter in empty:
        state = optimizer.state[parameter]
        if "step" in state:
            step = state["step"]
            state["step"] = torch.zeros_like(step) if isinstance(step, torch.Tensor) else 0


def explain_load_failure(error: CheckpointException) -> UserError | None:
    """Explain that a checkpoint's optimizer state does not fit the number of ranks.

    Torchao keeps 8-bit state in blocks of 256 values with a scale each, and (0.18) cannot cut
    through one; a shard of another size may ask for that.

    Returns:
        None when the failure is another.
    """
    if not any(
        "align with block boundary" in str(failure) for failure, _ in error.failures.values()
    ):
        return None
    return UserError(
        "the 8-bit optimizer state of this checkpoint cannot be split over this number of ranks",
        "resume on the number of ranks that saved it, or on one that divides the layers evenly",
    )


def _made(optimizer: Any) -> torch.optim.Optimizer:
    assert isinstance(optimizer, torch.optim.Optimizer)
    return optimizer


def _library(optimizer: str, module: str, package: str) -> Any:
    """Import an optional package; late, since transformers' and torchao's take seconds."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(
            f"optimizer: {optimizer} needs the package {package}", _INSTALL_HINT
        ) from None


def _adamw_8bit(base: Any) -> Any:
    """Torchao's `AdamW8bit` (0.18), bent in two places.

    It insists on a rate that is a tensor, which neither the schedule's JSON nor the log can hold:
    ours stays a number between steps. And it compiles its step, which on a CPU takes a minute and
    a C++ compiler for nothing: there it runs eagerly, to the same result.
    """

    class AdamW8bit(base):
        def add_param_group(self, param_group: dict[str, Any]) -> None:
            super().add_param_group(param_group)
            group = self.param_groups[-1]
            group["lr"] = float(group["lr"])

        @torch.no_grad()
        def step(self, closure: Callable[[], float] | None = None) -> float | None:
            rates = [group["lr"] for group in self.param_groups]
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = torch.tensor(rate, dtype=torch.float32)
            # Not `device`: with FSDP's offload, parameters are on the CPU although there is a GPU.
            on_cpu = self.param_groups[0]["params"][0].device.type == "cpu"
            try:
                # Created only if needed: construction alone has an effect.
                with torch.compiler.set_stance("force_eager") if on_cpu else nullcontext():
                    loss: float | None = super().step(closure)
            finally:
                for group, rate in zip(self.param_groups, rates, strict=True):
                    group["lr"] = rate
            return loss

    return AdamW8bit


def _factor(spec: TrainingKeys, step: int) -> float:
    """Return the multiple of the peak rate with which step `step`, counted from 0, is done."""
    warmup = spec.lr_warmup_steps
    if step < warmup:
        return (step + 1) / warmup
    if spec.lr_scheduler in ("constant", "constant_with_warmup"):
        return 1.0
    done = min(1.0, (step - warmup) / max(1, steps_of(spec) - warmup))
    end = spec.lr_end / spec.learning_rate
    return end + (1 - end) * _curve(spec, done)


def _curve(spec: TrainingKeys, done: float) -> float:
    """How high a schedule still is, from 1 to 0, when a share of its steps after warm-up is done.

    As `diffusers.optimization` has them.
    """
    match spec.lr_scheduler:
        case "linear":
            return 1.0 - done
        case "polynomial":
            return float((1.0 - done) ** spec.lr_power)
        case "cosine_with_restarts" if done < 1:
            done = spec.lr_num_cycles * done % 1
    return 0.5 * (1 + math.cos(math.pi * done))
