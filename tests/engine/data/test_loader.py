"""What the loader has where: steps in memory, the next micro-batch pinned, one on the device."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from engine import families
from engine.data.index.batch_plan import Draw
from engine.data.index.views import Shown
from engine.data.loader import Inputs, Loader
from engine.diffusion.objective import NoiseDraw
from engine.diffusion.random_numbers import gives_first_frame, sample_generators
from engine.families.shared.references import FIRST_FRAME
from engine.ranks.world import World
from jobs.spec.job_spec import JobSpec

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE = 30.0  # seconds


class Data:
    """Stands for `Prepared`: a sample's latents are its number, and so is its caption."""

    def __init__(self, *, resident: bool = False, frames: tuple[int, ...] = ()) -> None:
        self.frames = frames
        self.plan: Any = self
        self.texts: Any = self
        self.ahead = not resident
        self.read: list[int] = []
        self.encodings: list[str] = []
        self.to_base: set[int] = set()
        self.preserves = False
        self.from_first = 0.0

    def draws(self, step: int) -> tuple[Draw, ...]:
        return tuple(Draw(sample=6 * step + place, turn=0) for place in range(6))

    def latents_of(self, draw: Draw) -> torch.Tensor:
        self.read.append(draw.sample)
        return torch.full((1, *self.frames, 2, 2), float(draw.sample))

    def draw(self, latents: torch.Tensor, generators: list[torch.Generator]) -> NoiseDraw:
        """The objective's: what it gives depends on the generators alone."""
        draws = torch.stack([torch.rand(3, generator=one) for one in generators])
        return NoiseDraw(draws[:, 0], draws[:, 1:])

    def weight_of(self, draw: Draw, latents: torch.Tensor) -> None:
        return None

    def name_of(self, draw: Draw) -> str:
        return f"{draw.sample}.png"

    def shown_of(self, draw: Draw) -> Shown:
        return Shown((draw.sample + 1, 8), 0, 0, (8, 8))

    def references_of(self, draw: Draw, frames: int) -> dict[str, torch.Tensor]:
        return {}

    def sound_of(self, sample: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        return {}

    def frame_shares(self, draw: Draw) -> tuple[float, float]:
        return self.from_first, 0.0

    def is_to_base(self, draw: Draw) -> bool:
        return draw.sample in self.to_base

    def preserved_of(self, draw: Draw, frames: int) -> str | None:
        return str(-draw.sample) if self.preserves else None

    def caption_of(self, draw: Draw, frames: int) -> str:
        return str(draw.sample)

    def encoded(self, text: str) -> dict[str, torch.Tensor]:
        self.encodings.append(text)
        return {"embeds": torch.tensor([float(text)])}


def loader(data: Any) -> Loader:
    spec = JobSpec(
        train_batch_size=2,
        gradient_accumulation_steps=3,
        max_train_steps=4,
        prefetch_steps=1,
        caption_dropout_probability=0.0,
    )
    world = World(0, 1, torch.device("cpu"), "single", "t")
    return Loader(spec, data, world, families.load("flux"), data)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_every_micro_batch_of_every_step_in_order() -> None:
    at = loader(Data())
    for step in range(4):
        batches = list(at.step(step))
        assert [batch.positions for batch in batches] == [range(2), range(2, 4), range(4, 6)]
        numbers = torch.arange(6.0).view(3, 2) + 6 * step
        assert torch.equal(torch.stack([b.latents[:, 0, 0, 0] for b in batches]), numbers)
        assert torch.equal(torch.stack([b.condition["embeds"][:, 0] for b in batches]), numbers)
    at.close()


def test_a_share_of_the_micro_batches_is_given_its_first_frames() -> None:
    """As often as the dataset says; the same ones on any number of ranks."""
    given: dict[float, list[bool]] = {}
    for share in (0.0, 0.3, 1.0):
        data = Data(frames=(3,))
        data.from_first = share
        at = loader(data)
        batches = [batch for step in range(4) for batch in at.step(step)]
        given[share] = [FIRST_FRAME in batch.condition for batch in batches]
        for batch in batches:
            if FIRST_FRAME in batch.condition:
                assert torch.equal(batch.condition[FIRST_FRAME], batch.latents[:, :, :1])
        at.close()
    assert not any(given[0.0])
    assert all(given[1.0])
    places = [(step, place) for step in range(4) for place in (0, 2, 4)]
    assert given[0.3] == [gives_first_frame(42, *place, 0.3) for place in places]
    assert 0 < sum(given[0.3]) < len(places)


@pytest.mark.parametrize("resident", [False, True])
def test_ranks_that_share_weights_ask_the_base_together(resident: bool) -> None:
    """The samples of the second micro-batch of rank 1 are to be what the base predicts."""
    data = Data(resident=resident)
    data.to_base, data.preserves = {3}, True
    for strategy, together in (("fsdp2", True), ("ddp", False)):
        for rank in (0, 1):
            spec = JobSpec(
                train_batch_size=1,
                gradient_accumulation_steps=3,
                max_train_steps=1,
                preservation="blank",
            )
            world = World(rank, 2, torch.device("cpu"), strategy, "t")
            at = Loader(spec, data, world, families.load("flux"), data)
            batches = list(at.step(0))
            asked = [(batch.to_base, batch.asks_base) for batch in batches]
            own = rank == 1
            assert asked == [(False, False), (own, own or together), (False, False)]
            for batch in batches:
                assert batch.preserved is not None
                assert torch.equal(batch.preserved["embeds"], -batch.latents[:, 0, :1, 0])
            at.close()


def test_draws_are_those_of_the_step_and_the_place_of_the_sample() -> None:
    data = Data()
    at = loader(data)
    for step in range(2):
        for batch in at.step(step):
            expected = data.draw(batch.latents, sample_generators(42, step, batch.positions))
            assert torch.equal(batch.drawn.level, expected.level)
            assert torch.equal(batch.drawn.noise, expected.noise)
    at.close()


def test_what_depends_on_the_values_of_texts_is_done_before_they_leave_the_host() -> None:
    at = loader(Data())
    family: Any = at._family
    family.arrange = lambda condition: {"arranged": -condition["embeds"]}
    assert [set(batch.condition) for batch in at.step(0)] == [{"arranged"}] * 3
    at.close()


@pytest.mark.parametrize("resident", [False, True])
def test_the_denoiser_is_told_the_sizes_of_its_own_samples(resident: bool) -> None:
    at = loader(Data(resident=resident))
    family: Any = at._family
    family.sizes = lambda spec, pictures: {
        "sizes": torch.tensor([one.original[0] for one in pictures])
    }
    told = [batch.condition["sizes"].tolist() for batch in at.step(0)]
    assert told == [[1, 2], [3, 4], [5, 6]]
    at.close()


@pytest.mark.parametrize("resident", [False, True])
def test_inputs_that_are_not_finite_are_found_when_they_are_read_again(resident: bool) -> None:
    """In a step that has gone by; the ones that are read ahead stay."""
    data = Data(resident=resident)
    at = loader(data)
    for _ in at.step(0), at.step(1):
        pass
    weight_of = data.weight_of
    data.references_of = lambda draw, frames: {  # type: ignore[method-assign]
        "reference_0": torch.full((1,), torch.inf if draw.sample == 3 else 1.0)
    }
    assert at.inputs(0, [1, 2]) == [
        Inputs(["2.png", "3.png"], ["reference_0"]),
        Inputs(["4.png", "5.png"], []),
    ]
    data.weight_of = lambda draw, latents: torch.tensor(torch.nan)  # type: ignore[method-assign]
    assert at.inputs(0, [0]) == [Inputs(["0.png", "1.png"], ["loss weight"])]
    assert at.inputs(0, []) == []
    data.weight_of = weight_of  # type: ignore[method-assign]
    assert [batch.latents[0, 0, 0, 0].item() for batch in at.step(2)] == [12.0, 14.0, 16.0]
    at.close()


@pytest.mark.parametrize("resident", [False, True])
def test_conditioning_images_go_with_their_samples(resident: bool) -> None:
    """Not through what a family makes of texts."""
    data: Any = Data(resident=resident)
    data.references_of = lambda draw, frames: {
        "reference_0": torch.full((1, 2, 2), float(draw.sample))
    }
    at = loader(data)
    family: Any = at._family
    family.arrange = lambda condition: {"arranged": -condition["embeds"]}
    for batch in at.step(0):
        assert set(batch.condition) == {"arranged", "reference_0"}
        assert torch.equal(batch.condition["reference_0"], batch.latents)
    at.close()


def test_a_micro_batch_takes_room_only_when_it_is_asked_for() -> None:
    data = Data(resident=True)  # its encoders say when: they encode what goes to the device
    at = loader(data)
    batches = at.step(0)
    next(batches)
    assert data.encodings == ["0", "1"]
    next(batches)
    assert data.encodings == ["0", "1", "2", "3"]
    at.close()


def test_the_next_step_is_read_while_this_one_is_computed() -> None:
    data = Data()
    at = loader(data)
    next(at.step(0))
    until(lambda: sorted(data.read) == list(range(12)))
    at.close()


def test_what_cannot_be_read_is_said_by_the_step_that_needs_it() -> None:
    class Broken(Data):
        def latents_of(self, draw: Draw) -> torch.Tensor:
            if draw.sample == 8:
                raise RuntimeError("sample 8 is damaged")
            return super().latents_of(draw)

    at = loader(Broken())
    assert len(list(at.step(0))) == 3
    with pytest.raises(RuntimeError, match="sample 8"):
        next(at.step(1))
    at.close()


def test_it_closes_in_the_middle_of_a_step() -> None:
    at = loader(Data())
    next(at.step(0))
    at.close()


def test_only_the_next_micro_batch_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []
    shapes: set[int] = set()

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        shapes.add(tensor.dim())
        if tensor.dim() == 4:
            pinned.append(int(tensor.flatten()[0]))
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    at = loader(Data())
    at._pins = True  # as on a GPU
    seen = []
    for step in range(4):
        for batch in at.step(step):
            seen.append(int(batch.latents.flatten()[0]))
            assert len(pinned) <= len(seen) + 1
    at.close()
    assert pinned == seen == list(range(0, 24, 2))
    assert shapes == {1, 2, 4}, "levels, noise and texts too: copies from elsewhere wait"
