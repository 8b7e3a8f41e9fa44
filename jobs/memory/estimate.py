"""Estimate whether a job fits on this machine, for the command line and the form."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import psutil

from jobs.errors import SpecError
from jobs.machine import devices
from jobs.machine.gpu import find
from jobs.memory.calibration import Calibration, read_calibration
from jobs.memory.fit import (
    CARD_ROOMS,
    CARDS,
    USUAL,
    Candidate,
    Fit,
    Room,
    Verdict,
    candidates,
    fastest,
    fewest,
    fit_of,
    group_of,
    room_of,
    size_sold_as,
    worst,
)
from jobs.memory.host_memory import host_bytes
from jobs.memory.ladder import (
    alternatives,
    climb,
    least_swapping,
    loosen,
    whole_on_each,
    with_changes,
)
from jobs.memory.question import Refused, arranged, predict
from jobs.memory.ranking import Ranker
from jobs.memory.seconds import cards_of, link_of, seconds_of, why_unknown
from jobs.paths import cache_home, state_home
from jobs.spec.families import experts_of
from jobs.spec.rules.steps import (
    accumulation_steps,
    forwards_of_ranks,
    periodic_saves,
    share_on_card,
    total_steps,
)
from jobs.spec.rules.strategy import chosen_strategy, depends_on_memory, world_size

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from jobs.machine.gpu import Gpu
    from jobs.memory.cards import Card
    from jobs.memory.ladder import Step
    from jobs.memory.predicted import Predicted
    from jobs.memory.question import Server
    from jobs.memory.ranking import Ranking
    from jobs.memory.seconds import Link, Seconds
    from jobs.spec.job_spec import JobSpec

    Found = Predicted | Refused

_FINEST_SHARE: Final = 4  # of one forward of the slowest GPU


@dataclass(frozen=True)
class Place:
    """The devices a job would run on.

    Attributes:
        on_gpus: Whether they are GPUs, of this machine or assumed ones.
        rooms: The selected GPUs, or else all candidates; without GPUs, the machine's memory.
        here: Whether the rooms are in this machine; False for a common GPU model.
        chosen: Whether the user selected these GPUs, so that the job takes all of them.
        note: How the GPUs of a Slurm job are known, or that they are unknown; "" for other jobs.
    """

    on_gpus: bool
    rooms: tuple[Room, ...]
    here: bool = True
    chosen: bool = False
    note: str = ""

    def fit(self, predicted: Predicted, factor: float = 1.0) -> Fit:
        """Return the tightest fit. If any GPUs may be used, count the roomiest ones."""
        rooms = self.taken(predicted.ranks)
        return worst(fit_of(predicted, r, on_gpus=self.on_gpus, factor=factor) for r in rooms)

    def taken(self, ranks: int) -> Sequence[Room]:
        """Return the rooms of N ranks: the roomiest, where any GPU may be used."""
        # The scheduler prefers GPUs that are free now over larger ones that others use.
        rooms = sorted(self.rooms, key=lambda room: room.free - room.passing, reverse=True)
        return rooms[:ranks] if self.on_gpus and self.here and not self.chosen else rooms


class Cards(NamedTuple):
    """GPUs that are not in this machine: their memory, and how it is known."""

    rooms: tuple[Room, ...]
    note: str


UNKNOWN_CARDS: Final = Cards((), "its GPUs are unknown")


def place_of(
    spec: JobSpec,
    present: Sequence[Gpu],
    *,
    ours: Collection[int] = (),
    claims: Mapping[str, int] | None = None,
    card: str | int | None = None,
    imagine: bool = True,
    cards: Cards = UNKNOWN_CARDS,
) -> Place:
    """Determine which devices a job would run on.

    Args:
        spec: The job.
        present: The GPUs of this machine.
        ours: Pids of our jobs' processes.
        claims: GPU UUID → id of our job that holds it.
        card: One of `CARD_ROOMS` to compare with, whatever this machine has, or one for each rank,
            separated by commas.
        imagine: On a machine without GPUs, assume the ones that most people train on instead of
            the CPU.
        cards: The cluster's GPUs, for a job that does not run on this machine.
    """
    if card is not None:
        rooms = [CARD_ROOMS[name] for name in str(card).split(",")]
        return Place(True, tuple(rooms), here=False, chosen=len(rooms) > 1)
    if spec.launcher != "local" and spec.device != "cpu":
        if cards.rooms:
            return Place(True, cards.rooms, here=False, note=cards.note)
        local = spec.model_copy(update={"launcher": "local"})
        place = place_of(local, present, ours=ours, claims=claims)  # a login node may have none
        name = "this machine's" if place.here else f"{place.rooms[0].name} each"
        return replace(place, note=f"{cards.note}; held against GPUs of {name}")
    usable = [gpu for gpu in present if gpu.unusable is None and gpu.memory_total]
    if spec.device == "cpu" or not (usable or imagine):
        room = psutil.virtual_memory()
        held = max(0, min(room.total, host_bytes()) - room.available)
        return Place(False, (Room("host memory", min(room.total, host_bytes()), held),))
    if not usable:
        return Place(True, (CARDS[USUAL],), here=False)
    named = [find(str(name), present) for name in spec.gpus] if isinstance(spec.gpus, list) else []
    chosen = [match[0] for match in named if match is not None and match[0] in usable]
    gpu_rooms = [
        room_of(gpu, ours, claims or {}, shares=spec.share_gpus) for gpu in (chosen or usable)
    ]
    return Place(True, tuple(gpu_rooms), chosen=bool(chosen))


@dataclass
class Estimate:
    """The estimates for one job on given devices, computed on first use.

    Attributes:
        spec: The job.
        place: The devices it would run on.
        server: Predicts what is not cached.
        calibration: How accurate predictions were on this machine.
        cancelled: Returns True once the answers are no longer needed.
    """

    spec: JobSpec
    place: Place
    server: Server
    calibration: Calibration = field(default_factory=read_calibration)
    cancelled: Callable[[], bool] = lambda: False

    def predict(self, strategy: str, ranks: int, spec: JobSpec | None = None) -> Found:
        """Predict what one rank needs.

        Raises:
            SpecError: This model cannot be predicted.
            ToolError: The prediction failed.
            Cancelled: `cancelled` returned True.
        """
        result = predict(
            spec or self.spec,
            self.server,
            strategy=strategy,
            ranks=ranks,
            on_gpus=self.place.on_gpus,
            cancelled=self.cancelled,
        )
        return result if isinstance(result, Refused) else self.calibration.corrected(result)

    def candidate(self, strategy: str, ranks: int) -> Candidate:
        """Predict a strategy and compare it with the devices."""
        result = self.predict(strategy, ranks)
        if isinstance(result, Refused):
            return Candidate(strategy, None, result.error)
        return Candidate(strategy, self.fit(result))

    def fit(self, predicted: Predicted, room: Room | None = None) -> Fit:
        """Compare a prediction with all devices, or with one."""
        factor = self.calibration.factor
        if room is None:
            return self.place.fit(predicted, factor)
        return fit_of(predicted, room, on_gpus=self.place.on_gpus, factor=factor)

    def each(self, predicted: Predicted) -> list[Fit]:
        """Return how the ranks fit if their GPUs are of several sizes, the smallest first."""
        rooms = self.place.taken(predicted.ranks)
        if len({size_sold_as(room.total) for room in rooms}) < 2:
            return []
        return [self.fit(predicted, room) for room in sorted(rooms, key=lambda room: room.total)]

    @cached_property
    def advised(self) -> str | None:
        """Return the fastest strategy that fits on the job's own ranks; None if none fits."""
        ranks = world_size(self.spec)
        options = [self.candidate(strategy, ranks) for strategy in candidates(self.spec, ranks)]
        best = fastest(options)
        return best.strategy if best is not None else None

    @cached_property
    def strategy(self) -> str:
        """Return the strategy the job runs with, resolving `auto` the way the launch does."""
        if not (self.place.on_gpus and depends_on_memory(self.spec)):
            return chosen_strategy(self.spec)[0]
        whole = self.candidate("ddp", world_size(self.spec)).fit
        return "ddp" if whole is not None and whole.verdict is Verdict.FITS else "fsdp2"

    @cached_property
    def own(self) -> Found:
        """Predict the job as it would run."""
        return self.predict(self.strategy, world_size(self.spec))

    def steps(self, room: Room | None = None) -> list[Step]:
        """Return the changes that make the job fit; empty if it already fits."""
        return list(self.climb(room))

    def remedy(self, room: Room | None = None) -> Step | None:
        """Return the cheapest change that makes the job fit; None if it already fits.

        If no single change is enough, return all that are as one; if all are not, the first of
        them.
        """
        fit = partial(self._fit, room)
        own = fit(self._settled)
        if own is None or _fits(own):
            return None
        if (each := self._whole_on_each(room)) is not None:
            return each
        enough = alternatives(self._settled, fit, enough=lambda before, after: _fits(after))
        return next(enough, None) or next(self.climb(room), None)

    def climb(self, room: Room | None = None) -> Iterator[Step]:
        """Yield the changes one by one as they are found."""
        each = self._whole_on_each(room)
        return climb(self._settled, partial(self._fit, room), enough=_fits, first=each)

    def _whole_on_each(self, room: Room | None) -> Step | None:
        """Return the change to a copy on each GPU, of which the small ones swap more blocks.

        None if the GPUs are of one size or it is not enough.
        """
        own = self.own
        if self.spec.model_type != "lora" or isinstance(own, Refused) or not self.each(own):
            return None
        try:
            whole = arranged(self.spec, "ddp", world_size(self.spec), on_gpus=True)
        except SpecError:
            return None
        before, swapping = self.fit(own, room), self.swapping(whole)
        after = None if swapping is None else self._fit(before.room, swapping)
        if swapping is None or after is None:
            return None
        return whole_on_each(self._settled, swapping, before, after)

    def swapping(self, spec: JobSpec) -> JobSpec | None:
        """Keep as few blocks in host memory as are enough on GPUs of each size; None if none are.

        Args:
            spec: With its strategy and ranks resolved.
        """
        rooms = self.place.taken(world_size(spec))
        return least_swapping(spec, rooms, lambda swapped, room: self._fit(room, swapped))

    def alternatives(self) -> Iterator[Step]:
        """Yield changes with any of which the job fits, though it ran out of memory."""
        return alternatives(self._settled, partial(self._fit, None), enough=_fits_now)

    def faster(self) -> Step | None:
        """Return a change to less recomputation that still fits, if there is one."""
        return loosen(self._settled, partial(self._fit, None), enough=_fits)

    def seconds(self, predicted: Predicted, spec: JobSpec | None = None) -> Seconds | str:
        """Return the seconds of a step, for which all wait for the slowest rank; or why not."""
        if not self.place.on_gpus:
            return "the ranks run on the CPU"
        rooms = self.place.taken(predicted.ranks)
        cards = cards_of(rooms)
        if isinstance(cards, str):
            return cards
        whys = (why_unknown(spec or self.spec, predicted, card) for card in cards)
        if why := next(filter(None, whys), ""):
            return why
        return max(self._each_seconds(predicted, spec or self.spec), key=_middle)

    def _each_seconds(self, predicted: Predicted, spec: JobSpec) -> list[Seconds]:
        """Return the seconds of a step on each GPU, alone."""
        rooms = self.place.taken(predicted.ranks)
        cards = cards_of(rooms)
        assert not isinstance(cards, str), "see `seconds`"
        parts = self._parts(predicted, spec, rooms)
        links = [self._link(card, rooms, alike=len(set(cards)) == 1) for card in cards]
        slowest = min(links, key=lambda link: link.rates)
        return [
            seconds_of(
                predicted.on(room.total),
                card,
                replace(slowest, host=link.host),
                self._factor(card),
                part,
            )
            for card, link, room, part in zip(cards, links, rooms, parts, strict=True)
        ]

    def _parts(self, predicted: Predicted, spec: JobSpec, rooms: Sequence[Room]) -> Sequence[float]:
        """Return the forwards in a step on each GPU, by those where all compute as many."""
        alike = isinstance(spec.batch_shares, int) or predicted.strategy != "ddp"
        if alike or len(rooms) != predicted.ranks:  # one GPU that stands for those of all ranks
            return [1.0] * len(rooms)
        shares = [share_on_card(spec, room.total) for room in rooms]
        each = accumulation_steps(spec, predicted.ranks)
        return [count / each for count in forwards_of_ranks(shares, each * predicted.ranks)]

    def sharing(self, spec: JobSpec) -> JobSpec | None:
        """Share out a step's forwards by how fast the GPUs are; None if that is not possible.

        Args:
            spec: With its strategy and ranks resolved.
        """
        rooms = self.place.taken(world_size(spec))
        if spec.strategy != "ddp" or len({size_sold_as(room.total) for room in rooms}) < 2:
            return None
        alike = spec.model_copy(update={"batch_shares": 1})
        predicted = self.predict("ddp", world_size(spec), alike)
        if isinstance(predicted, Refused) or isinstance(self.seconds(predicted, alike), str):
            return None
        slowest: dict[str, float] = {}  # of each size, as all of it have one share
        for room, seconds in zip(rooms, self._each_seconds(predicted, alike), strict=True):
            size = f"{size_sold_as(room.total)}GB"
            slowest[size] = max(slowest.get(size, 0.0), seconds.middle)
        faster = [Fraction(max(slowest.values()) / seconds) for seconds in slowest.values()]
        speeds = [speed.limit_denominator(_FINEST_SHARE) for speed in faster]
        whole = math.lcm(*(speed.denominator for speed in speeds))
        shares = {size: int(s * whole) for size, s in zip(slowest, speeds, strict=True)}
        return with_changes(spec, {"batch_shares": shares})

    def _link(self, card: Card, rooms: Sequence[Room], *, alike: bool) -> Link:
        measured = self.calibration.links.get(card.key) if self.place.here else None
        return link_of(card if alike else replace(card, nvlink=0), rooms, measured)

    def ranking(self) -> Ranking | str:
        """Rank the ways to run the job on these GPUs, or return why they cannot be."""
        own = self.own
        if isinstance(own, Refused):
            return own.error
        if isinstance(why := self.seconds(own), str):
            return why
        predict = lambda strategy, ranks, spec: self.predict(strategy, ranks, spec)  # noqa: E731
        ranker = Ranker(
            self.spec,
            self._settled,
            predict,
            self.fit,
            lambda of, job: max(self._each_seconds(of, job), key=_middle),
            self.swapping,
            self.sharing,
        )
        return ranker.rank() or "the job cannot be predicted"

    def _factor(self, card: Card) -> float:
        return self.calibration.speeds.get(card.key, 1.0) if self.place.here else 1.0

    @property
    def _settled(self) -> JobSpec:
        return arranged(self.spec, self.strategy, world_size(self.spec), on_gpus=self.place.on_gpus)

    def _fit(self, room: Room | None, spec: JobSpec) -> Fit | None:
        result = self.predict(spec.strategy, world_size(spec), spec)
        return None if isinstance(result, Refused) else self.fit(result, room)

    def fewest(self, room: Room, spec: JobSpec | None = None) -> int | None:
        """Return the smallest number of GPUs like `room` on which the job surely fits; None if
        none.
        """

        def fits(ranks: int) -> bool:
            result = self.predict("fsdp2" if ranks > 1 else "single", ranks, spec)
            if isinstance(result, Refused):
                return False
            return self.fit(result, Room(room.name, room.total)).verdict is Verdict.FITS

        return fewest(fits, group_of(spec or self.spec))


def _middle(seconds: Seconds) -> float:
    return seconds.middle


def _fits(fit: Fit) -> bool:
    return fit.verdict is Verdict.FITS


_MARGIN: Final = 0.9  # of what it needed before; less is within the error of a prediction


def _fits_now(before: Fit, after: Fit) -> bool:
    """Whether a job that ran out of memory fits: the prediction may have said that it would."""
    return _fits(after) and after.high <= _MARGIN * before.high


@dataclass(frozen=True)
class Need:
    """What a job needs and what is free, in bytes."""

    what: str
    needed: int
    free: int

    @property
    def enough(self) -> bool:
        return self.needed <= self.free


def needs_of(spec: JobSpec, predicted: Predicted) -> list[Need]:
    """Return the host memory and disk space that a job needs and that this machine has."""
    memory = psutil.virtual_memory()
    needs = []
    if machine := predicted.host.get("machine"):
        needs.append(Need("host memory", machine, min(memory.available, host_bytes())))
    if run := _run_bytes(predicted):
        saves = "one checkpoint (their number depends on the data)"
        saves = "checkpoints" if _counts_saves(spec) else saves
        needs.append(Need(f"disk for {saves} and the export", run, _free(state_home())))
    if cached := predicted.disk.get("cache"):
        folder = Path(spec.cache_dir) if spec.cache_dir else cache_home()
        needs.append(Need("disk for caches", cached, _free(folder)))
    return needs


@dataclass(frozen=True)
class Pair:
    """What two jobs take that train the two experts of a model.

    Attributes:
        steps: Of each job; None if they depend on data that is not counted yet.
        hours: Of each job, without samples and saves; None if steps or rates are unknown.
        disk: Bytes of both jobs' checkpoints and exports.
        counted: Whether `disk` has all checkpoints that a job keeps; else one of each, since their
            number depends on the data.
    """

    steps: int | None
    hours: tuple[float, float] | None
    disk: int
    counted: bool = True


def pair_of(spec: JobSpec, predicted: Predicted, ranking: Ranking | str) -> Pair | None:
    """Return what the pair takes; None if the job is for one expert only."""
    if not (spec.both_experts and experts_of(spec)):
        return None
    steps, hours = total_steps(spec), None
    if steps is not None and not isinstance(ranking, str):
        seconds = ranking.own.seconds
        hours = steps * seconds.low / 3600, steps * seconds.high / 3600
    return Pair(steps, hours, 2 * _run_bytes(predicted), _counts_saves(spec))


def _counts_saves(spec: JobSpec) -> bool:
    """Return whether the number of checkpoints that a run keeps is known without its data."""
    return periodic_saves(spec) is not None or spec.checkpoints_total_limit is not None


def _run_bytes(predicted: Predicted) -> int:
    """Return the bytes of a run's checkpoints and its export."""
    disk = predicted.disk
    return disk.get("checkpoints", disk.get("checkpoint", 0)) + disk.get("export", 0)


def _free(path: Path) -> int:
    """Return the free bytes of the file system on which a directory is or will be created."""
    for folder in (path, *path.parents):
        try:
            return shutil.disk_usage(folder).free
        except OSError:
            continue
    return 0


def estimate(
    spec: JobSpec,
    server: Server,
    *,
    present: Sequence[Gpu] | None = None,
    ours: Collection[int] = (),
    claims: Mapping[str, int] | None = None,
    card: str | int | None = None,
    imagine: bool = True,
    cards: Cards = UNKNOWN_CARDS,
    cancelled: Callable[[], bool] = lambda: False,
) -> Estimate:
    """Build the estimate of a job on this machine.

    Args:
        spec: The job.
        server: Predicts what is not cached.
        present: The GPUs of this machine; detected if None.
        ours: Pids of our jobs' processes.
        claims: GPU UUID → id of our job that holds it.
        card: See `place_of`.
        imagine: See `place_of`.
        cards: See `place_of`.
        cancelled: Polled many times a second, in the caller's thread.
    """
    gpus = devices.gpus() if present is None else present
    place = place_of(spec, gpus, ours=ours, claims=claims, card=card, imagine=imagine, cards=cards)
    return Estimate(spec, place, server, cancelled=cancelled)
