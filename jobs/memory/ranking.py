"""Rank the ways to run a job on given GPUs by the seconds that a step is computed to take.

A setup is a strategy, a precision of a LoRA's frozen base, a share of blocks that are recomputed,
and blocks in host memory. Each is a few keys of the job file. To predict one takes seconds, so only
those are predicted that could be faster than the fastest so far, by a lower bound that follows from
what is predicted already.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from jobs.errors import SpecError
from jobs.memory.fit import Verdict, candidates
from jobs.memory.ladder import BITS, fewer_bits, with_changes
from jobs.memory.predicted import Predicted
from jobs.memory.question import arranged
from jobs.spec.rules.strategy import SHARDING, checkpoints_activations, world_size
from jobs.units import ordinal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from jobs.memory.fit import Fit
    from jobs.memory.question import Refused
    from jobs.memory.seconds import Seconds
    from jobs.spec.job_spec import JobSpec

_WORTH: Final = 0.95  # of the fastest setup's seconds; less is not worth another prediction
_CLEARLY: Final = 0.9  # of an exact setup's seconds; what loses something has to take less
_SHOWN: Final = (
    "strategy",
    "dp_replicate_size",
    "base_precision",
    "base_matmul",
    "swap_blocks",
    "batch_shares",
    "gradient_checkpointing",
    "gradient_checkpointing_policy",
    "fsdp_activation_checkpointing",
)
_LOST: Final = {
    "int8": "frozen weights rounded to 8 bits",
    "nf4": "frozen weights rounded to 4 bits",
}
_INTERVALS: Final = (4, 2)  # every n-th block is recomputed; the fastest first


@dataclass(frozen=True)
class Setup:
    """A way to run a job.

    Attributes:
        spec: The job that runs like this.
        changes: The keys of the job that differ.
        predicted: Its memory and work.
        fit: How it fits.
        seconds: Of a step.
        loses: What it computes less exactly than the job as it is; "" for nothing.
    """

    spec: JobSpec
    changes: Mapping[str, Any]
    predicted: Predicted
    fit: Fit
    seconds: Seconds
    loses: str = ""

    @property
    def fits(self) -> bool:
        return self.fit.verdict is Verdict.FITS

    @property
    def recomputed(self) -> float:
        """Return the share of blocks that backward recomputes."""
        spec = self.spec
        return 1 / spec.gradient_checkpointing_interval if checkpoints_activations(spec) else 0.0

    @property
    def title(self) -> str:
        """Name it in a few words, such as `ddp, int8 base, every 2nd block recomputed`."""
        spec = self.spec
        words: list[str] = [spec.strategy]
        if spec.model_type == "lora" and spec.base_precision != "none":
            words.append(f"{spec.base_precision} base")
        if checkpoints_activations(spec):
            interval = spec.gradient_checkpointing_interval
            every = f"every {ordinal(interval)}" if interval > 1 else "every"
            how = "" if spec.gradient_checkpointing_policy == "full" else " (selective)"
            words.append(f"{every} block recomputed{how}")
        else:
            words.append("nothing recomputed")
        if spec.swap_blocks:
            words.append(f"{swap_words(spec.swap_blocks)} in host memory")
        if isinstance(spec.batch_shares, dict):
            each = (f"{share} on {size}" for size, share in spec.batch_shares.items())
            words.append(f"forwards shared out {' and '.join(each)}")
        return ", ".join(words)


@dataclass
class Ranking:
    """The setups that were predicted.

    Attributes:
        own: The job as it is.
        setups: All that fit, and the job as it is; the fastest first.
    """

    own: Setup
    setups: list[Setup] = field(default_factory=list)

    @property
    def fastest(self) -> Setup | None:
        """Return the fastest setup that fits; None if none does.

        One that loses something has to be clearly faster than all that do not.
        """
        first, exact = next((setup for setup in self.setups if setup.fits), None), self.exact
        if first is None or exact is None:
            return first
        clearly = first.seconds.middle < _CLEARLY * exact.seconds.middle
        return first if clearly or not first.loses else exact

    @property
    def exact(self) -> Setup | None:
        """Return the fastest setup that fits and loses nothing; None if none does."""
        return next((setup for setup in self.setups if setup.fits and not setup.loses), None)


@dataclass
class Ranker:
    """Finds the fastest setups of a job.

    Attributes:
        job: The job as it is written.
        spec: The same with its strategy and ranks resolved.
        predict: Predicts a job.
        fit: Compares a prediction with the GPUs.
        seconds: Computes the seconds of a step from the prediction of a job.
        swap: Keeps as few blocks in host memory as are enough; None if that is not possible.
        share: Shares out a step's forwards by how fast the GPUs are; None likewise.
    """

    job: JobSpec
    spec: JobSpec
    predict: Callable[[str, int, JobSpec], Predicted | Refused]
    fit: Callable[[Predicted], Fit]
    seconds: Callable[[Predicted, JobSpec], Seconds]
    swap: Callable[[JobSpec], JobSpec | None]
    share: Callable[[JobSpec], JobSpec | None]

    def rank(self) -> Ranking | None:
        """Rank the setups; None if the job as it is cannot be predicted."""
        own = self._setup(self.spec)
        if own is None:
            return None
        self._tried = [own]
        for base in self._bases():
            changed = self.spec.model_copy(update=base)
            for strategy in candidates(changed, world_size(changed)):
                self._try(strategy, base)
        for setup in [setup for setup in self._tried if setup.fits]:
            self._try_sharing(setup)
        by_title = {setup.title: setup for setup in reversed(self._tried)}  # the job itself wins
        kept = [setup for setup in by_title.values() if setup.fits or setup is own]
        return Ranking(own, sorted(kept, key=lambda setup: setup.seconds.middle))

    def _bases(self) -> Iterator[dict[str, Any]]:
        """Yield precisions of the base, the exactest first, as changes to the job.

        Each is first without the blocks that the job keeps in host memory.
        """
        lora = self.spec.model_type == "lora"
        bases: list[dict[str, Any]] = [{}]
        if lora and self.spec.base_precision != "none":
            bases.insert(0, {"base_precision": "none", "base_matmul": "auto"})
        bases += filter(None, (fewer_bits(self.spec, precision) for precision in _LOST))
        for base in bases:
            if lora and self.spec.swap_blocks:
                yield base | {"swap_blocks": 0}
            yield base

    def _try(self, strategy: str, base: dict[str, Any]) -> None:
        """Predict a strategy with as much recomputation as it needs."""
        if not self._worth(strategy, base, 0):
            return
        tightest = self._changed(strategy, base | _recomputing(1))
        if tightest is None:
            return
        self._tried.append(tightest)
        if not tightest.fits:
            self._try_swapping(tightest)
            return
        if not self._worth(strategy, base, 0):
            return
        loosest = self._changed(strategy, base | _recomputing(0))
        if loosest is None:
            return
        self._tried.append(loosest)
        if loosest.fits:
            return
        for interval in _INTERVALS:
            # What is kept for backward grows with the share of blocks that keep it.
            share = 1 - 1 / interval
            kept = tightest.fit.high + share * (loosest.fit.high - tightest.fit.high)
            if kept > tightest.fit.room.free or not self._worth(strategy, base, interval):
                continue
            setup = self._changed(strategy, base | _recomputing(interval))
            if setup is not None:
                self._tried.append(setup)
                if setup.fits:
                    return

    def _try_swapping(self, tightest: Setup) -> None:
        """Keep as few blocks in host memory as are enough."""
        changed = self.swap(tightest.spec)
        setup = None if changed is None else self._setup(changed)
        if setup is not None and setup.fits:
            self._tried.append(setup)

    def _try_sharing(self, alike: Setup) -> None:
        """Have the faster GPUs compute more forwards."""
        changed = self.share(alike.spec)
        setup = None if changed is None else self._setup(changed)
        if setup is not None and setup.seconds.middle < _WORTH * alike.seconds.middle:
            self._tried.append(setup)

    # -- predicting ------------------------------------------------------------------------

    def _changed(self, strategy: str, changes: dict[str, Any]) -> Setup | None:
        try:
            spec = arranged(self.spec, strategy, world_size(self.spec), on_gpus=True)
        except SpecError:
            return None
        return self._changed_from(spec, changes)

    def _changed_from(self, spec: JobSpec, changes: dict[str, Any]) -> Setup | None:
        new = {key: value for key, value in changes.items() if getattr(spec, key) != value}
        changed = with_changes(spec, new) if new else spec
        return None if changed is None else self._setup(changed)

    def _setup(self, spec: JobSpec) -> Setup | None:
        """Predict a job; None if it cannot run, or its work is unknown."""
        try:
            predicted = self.predict(spec.strategy, world_size(spec), spec)
        except SpecError:  # such as of published weights that are packed, with base_precision: none
            return None
        if not isinstance(predicted, Predicted) or not predicted.work:
            return None
        seconds = self.seconds(predicted, spec)
        loses = self._loses(spec.base_precision)
        return Setup(spec, self._differences(spec), predicted, self.fit(predicted), seconds, loses)

    def _loses(self, precision: str) -> str:
        return _LOST.get(precision, "") if precision != self.spec.base_precision else ""

    def _differences(self, spec: JobSpec) -> dict[str, Any]:
        keys = [*_SHOWN]
        if checkpoints_activations(spec):
            keys.append("gradient_checkpointing_interval")
        changed = {k: getattr(spec, k) for k in keys if getattr(spec, k) != getattr(self.spec, k)}
        if changed and self.job.strategy == "auto" and world_size(spec) > 1:
            changed = {"strategy": spec.strategy} | changed  # `auto` may choose another one then
        if "strategy" in changed and self.job.fsdp_enable is not None:
            changed["fsdp_enable"] = None  # it would decide
        return changed

    # -- bounds ----------------------------------------------------------------------------

    def _worth(self, strategy: str, base: dict[str, Any], interval: int) -> bool:
        """Return whether a setup could beat the fastest one that fits and is at least as exact."""
        precision = base.get("base_precision", self.spec.base_precision)
        loses = bool(self._loses(precision))
        limits = [
            (_CLEARLY if loses and not setup.loses else _WORTH) * setup.seconds.middle
            for setup in self._tried
            if setup.fits and (loses or not setup.loses)
        ]
        if not limits:
            return True
        bounds = [
            self._bound(setup, strategy, precision, interval)
            for setup in self._tried
            # A base in fewer bits takes longer to unpack, and the same otherwise.
            if BITS[setup.spec.base_precision] >= BITS[precision] and not setup.spec.swap_blocks
        ]
        return max(bounds, default=0.0) < min(limits)

    def _bound(self, setup: Setup, strategy: str, precision: str, interval: int) -> float:
        """Return what `setup` would take with less recomputation, and without what is gathered
        unless strategy and precision are the same.
        """
        work = setup.predicted.work
        spec = setup.spec
        less = setup.recomputed - (1 / interval if interval else 0.0)
        backward = {
            name: value - (less * work["forward"].get(name, 0) if name not in _MOVED else 0)
            for name, value in work["backward"].items()
        }
        sharded = strategy in SHARDING
        same = (spec.strategy, spec.base_precision) == (strategy, precision)
        changed = dict(work) | {
            "base": dict(work.get("base", {})) | ({} if same else {"linked": 0}),
            "forward": dict(work["forward"]) | ({} if same else {"linked": 0}),
            "backward": backward | ({} if same and sharded else {"linked": 0}),
        }
        predicted = replace(setup.predicted, work=changed)
        return self.seconds(predicted, setup.spec).middle


def swap_words(swapped: int | Mapping[str, int]) -> str:
    """Return `24 blocks`, or `24 (16GB) and 8 (24GB) blocks` for GPUs of several sizes."""
    if isinstance(swapped, int):
        return f"{swapped} blocks"
    return f"{' and '.join(f'{count} ({size})' for size, count in swapped.items())} blocks"


_MOVED: Final = ("linked", "copied")


def _recomputing(interval: int) -> dict[str, Any]:
    """Return the keys that recompute every n-th block; 0 for none."""
    if not interval:
        return {
            "gradient_checkpointing": False,
            "gradient_checkpointing_policy": "full",
            "fsdp_activation_checkpointing": False,
            "gradient_checkpointing_interval": 1,
        }
    return {
        "gradient_checkpointing": True,
        "gradient_checkpointing_policy": "full",
        "gradient_checkpointing_interval": interval,
    }
