"""What the engine itself predicts moves as the ladder says, and as the table of families has it."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest

from jobs.memory.calibration import Calibration
from jobs.memory.cards import CARDS, CARDS_FILE, IN_TABLES, read_smallest
from jobs.memory.client import Server
from jobs.memory.estimate import Estimate, Place
from jobs.memory.ladder import LADDER, climb
from jobs.memory.predicted import Predicted
from jobs.memory.question import predict
from jobs.run.rundir import read_json
from jobs.spec.families import FAMILIES
from jobs.spec.job_spec import JobSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

SMALL = "pixart_sigma"  # 0.6 B parameters


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The real one, warm for all tests of this file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        one = Server(patience=600)
        yield one
        one.close()


def estimate(server: Server, **values: Any) -> Estimate:
    usual = {"model_family": SMALL, "dataset": ".", "num_processes": 4, "strategy": "fsdp2"}
    return Estimate(
        JobSpec.model_validate(usual | values),
        Place(True, (CARDS[24],), here=False),
        server,
        Calibration(),
    )


@pytest.mark.slow
def test_each_step_of_the_ladder_needs_less_than_the_one_before(server: Server) -> None:
    spec = estimate(
        server,
        model_type="full",
        strategy="ddp",
        mixed_precision="no",
        device="cuda",
        resolution=512,
    ).spec
    place = Place(True, (CARDS[24],), here=False)

    def fit(one: JobSpec) -> Any:
        found = predict(one, server, strategy=one.strategy, ranks=4)
        return place.fit(found) if isinstance(found, Predicted) else None

    # Not to its end: each lower resolution is traced anew.
    found = list(islice(climb(spec, fit, enough=lambda fit: False), 4))
    titles = [step.rung.title for step in found]
    assert {"activation checkpointing", "shard over all ranks"} <= set(titles)
    assert [step.after.high for step in found] == sorted(
        (step.after.high for step in found), reverse=True
    )
    assert set(titles) <= {rung.title for rung in LADDER}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "helps"),
    [({}, True), ({"gradient_checkpointing": True, "resolution": 256}, False)],
    ids=["many activations", "few activations"],
)
def test_accumulation_is_named_where_it_helps(
    server: Server, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], helps: bool
) -> None:
    """A smaller batch has fewer activations, and its second half begins with gradients there."""
    spec = estimate(
        server,
        **{"model_type": "full", "device": "cuda", "resolution": 512} | changes,
        train_batch_size=4,
    ).spec
    (rung,) = (one for one in LADDER if one.title == "smaller batch, more accumulation")
    after = spec.model_copy(update=rung.change(spec))
    found = [predict(one, server, strategy="fsdp2", ranks=4) for one in (spec, after)]
    high = [one.device[1] for one in found if isinstance(one, Predicted)]
    assert (high[1] < high[0]) is helps
    place = Place(True, (CARDS[24],), here=False)

    def fit(one: JobSpec) -> Any:
        found = predict(one, server, strategy=one.strategy, ranks=4)
        return place.fit(found) if isinstance(found, Predicted) else None

    monkeypatch.setattr("jobs.memory.ladder.LADDER", (rung,))
    assert bool(list(islice(climb(spec, fit, enough=lambda fit: False), 1))) is helps


@pytest.mark.slow
def test_sharding_holds_less_than_copies(server: Server) -> None:
    found = estimate(server, model_type="full", gradient_checkpointing=True, resolution=512)
    need = {name: found.candidate(name, 4).fit for name in ("ddp", "hsdp", "fsdp2")}
    assert all(fit is not None for fit in need.values())
    highs = [fit.high for fit in need.values() if fit is not None]
    assert highs == sorted(highs, reverse=True)
    assert found.advised == "ddp", "all fit, and it is the fastest"


@pytest.mark.slow
def test_the_table_says_what_is_predicted(server: Server) -> None:
    known = read_smallest()[SMALL]
    for model_type in ("lora", "full"):
        found = estimate(
            server,
            model_flavour=known["flavour"],
            model_type=model_type,
            strategy="auto",
            gradient_checkpointing=True,
        )
        counts = {str(card): found.fewest(CARDS[card]) for card in IN_TABLES}
        assert counts == known[model_type], "run `python tests/bench/cards.py`"


def test_every_family_is_in_the_table() -> None:
    assert (read_json(CARDS_FILE) or {})["schema"] == 1
    assert list(read_smallest()) == list(FAMILIES)
    for name, row in read_smallest().items():
        assert row["flavour"] == next(iter(FAMILIES[name].flavours))
        for counts in (row["lora"], row["full"]):
            assert list(counts) == [str(card) for card in IN_TABLES]
