"""The seconds of a step: rates, arithmetic, and the ranking of setups."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.machine.gpu import Gpu
from jobs.memory.calibration import Calibration, read_calibration, record_rate
from jobs.memory.cards import CARDS, card_named
from jobs.memory.estimate import Estimate, place_of
from jobs.memory.fit import CARD_ROOMS, Fit, Room, Wires, room_of_type
from jobs.memory.predicted import Predicted
from jobs.memory.question import Server
from jobs.memory.ranking import Ranking, Setup
from jobs.memory.seconds import cards_of, link_of, seconds_of, why_unknown
from jobs.spec.file.load import load_spec
from jobs.spec.job_spec import JobSpec
from tests.support.jobs.fake_memory import GIB, predict
from tui.form.beside import _faster
from tui.text.estimate_text import better, ranking_text, seconds_text, span

if TYPE_CHECKING:
    from pathlib import Path

# One step of FLUX.1-dev's LoRA of rank 16 at 1024 px, as the engine counts it.
FLUX: dict[str, dict[str, int]] = {
    "forward": {
        "half": 59_502_476_918_784,
        "attention": 14_872_398_004_224,
        "bytes": 192_503_786_192,
        "kernels": 3685,
    },
    "backward": {
        "half": 118_718_264_770_560,
        "attention": 52_053_393_014_784,
        "bytes": 402_608_478_248,
        "kernels": 8348,
    },
    "whole": {
        "half": 59_229_000_000_000,
        "attention": 37_181_000_000_000,
        "bytes": 217_000_000_000,
        "kernels": 4890,
    },
}


def predicted(backward: str = "backward", linked: int = 0, **changes: Any) -> Predicted:
    spec = JobSpec(pretrained_model_name_or_path="m", dataset="d", num_processes=2)
    values = predict(spec.to_dict(), 2, "fsdp2")
    none = {"linked": linked, "copied": 0}
    work = {
        "schema": 1,
        "micro_batches": 1,
        "forward": FLUX["forward"] | none,
        "backward": FLUX[backward] | none,
        "step": {"linked": 0, "bytes": 2_600_000_000, "host_bytes": 0},
    }
    return Predicted.of(values | {"work": work | changes})


def seconds(of: Predicted, card: str = "h200", **link: Any) -> Any:
    return seconds_of(of, CARDS[card], link_of(CARDS[card], (), **link))


def test_forwards_of_the_base_take_their_time() -> None:
    """As long as other forwards with the same work; a prediction without them has none."""
    base = FLUX["forward"] | {"linked": 0, "copied": 0}
    plain = seconds(predicted())
    none = seconds(predicted(base=base, base_forwards=0))
    held = seconds(predicted(base=base, base_forwards=3))
    forward = seconds(predicted(backward="forward"))
    assert (none.low, none.high, none.parts) == (plain.low, plain.high, plain.parts)
    for part, (low, high) in held.parts.items():
        half = forward.parts[part]
        if part != "optimizer":
            assert low - plain.parts[part][0] == pytest.approx(1.5 * half[0])
            assert high - plain.parts[part][1] == pytest.approx(1.5 * half[1])
    assert plain.low < held.low < held.high


# -- rates ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", None),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("NVIDIA L4", "l4"),
        ("nvidia_a100-sxm4-80gb", "a100-80gb"),
        ("rtx_4090", "4090"),
        ("1g.10gb", None),
        ("a100_3g.20gb", None),
        ("h100_1g.10gb", None),
        ("a100_3g", None),
        ("GRID A100-20C", None),
        ("GRID T4-8Q", None),
        ("nvidia_a10g", "a10g"),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("Quadro RTX 6000", None),
    ],
)
def test_a_card_is_known_by_its_name(name: str, card: str | None) -> None:
    named = card_named(name)
    assert (named.key if named else None) == card


@pytest.mark.parametrize(
    ("name", "gb"), [("a100_3g.20gb", 20), ("a100_3g", None), ("GRID A100-20C", None)]
)
def test_a_part_of_a_card_has_not_all_of_its_memory(name: str, gb: int | None) -> None:
    room = room_of_type(name)
    assert (room and room.total) == (gb and gb * 10**9)


def test_unpacking_takes_longer_before_ampere() -> None:
    """Where torch's kernels do it, which move more."""
    unpacked = {"unpacked": 10**11, "unpacked_by_torch": 4 * 10**11}

    def added(card: str, count: int) -> bool:
        plain = FLUX["forward"] | {"linked": 0, "copied": 0}
        more = plain | {"bytes": plain["bytes"] + count}
        one, other = (seconds(predicted(forward=own), card) for own in (plain | unpacked, more))
        assert one.parts["memory"] == pytest.approx(other.parts["memory"])
        return bool(CARDS[card].bf16)

    assert [added("a100", 10**11), added("4090", 10**11), added("h200", 10**11)] == [True] * 3
    assert [added("v100", 4 * 10**11), added("t4", 4 * 10**11)] == [False] * 2


def test_the_rates_of_cards_hang_together() -> None:
    for key, card in CARDS.items():
        assert card_named(key) == card
        assert CARD_ROOMS[key].total == card.mebibytes << 20
        assert card.eight in (0, pytest.approx(2 * card.half, rel=0.02))
        assert card.single < card.half
        assert card.bandwidth < 10_000 < card.mebibytes


def test_links_are_assumed_until_the_driver_or_a_measurement_names_them() -> None:
    def link(card: str, *wires: Wires, measured: float | None = None) -> tuple[str, bool]:
        rooms = [Room("GPU", 1, link=wire) for wire in wires]
        of_card = link_of(CARDS[card], rooms, measured)
        return of_card.name, of_card.assumed

    assert link("h100") == ("NVLink", True)
    assert link("3090") == ("PCIe 4 x16", True)
    assert link("3090", Wires(4, 16), Wires(4, 16)) == ("NVLink", False)
    assert link("3090", Wires(4, 16), Wires(0, 16)) == ("PCIe 4 x16", False)
    assert link("h100", Wires(0, 8), Wires(0, 16)) == ("PCIe 5 x8", False)
    assert link("4090", measured=9e9) == ("PCIe 4 x16, measured", False)
    narrow, wide = (link_of(CARDS["4090"], [Room("", 1, link=Wires(0, n))]) for n in (8, 16))
    assert wide.rates == pytest.approx([2 * rate for rate in narrow.rates])
    measured = link_of(CARDS["4090"], (), 9e9)
    assert measured.rates[1] < 9e9 < measured.rates[0]


@pytest.mark.parametrize(
    ("changes", "card", "why"),
    [
        ({}, "4090", ""),
        ({}, "v100", "no tensor cores for bf16"),
        ({"mixed_precision": "fp16"}, "v100", ""),
        ({"context_parallel_size": 2, "num_processes": 2}, "4090", "context parallelism"),
    ],
)
def test_it_says_why_there_are_no_seconds(changes: dict[str, Any], card: str, why: str) -> None:
    spec = JobSpec.model_validate({"mixed_precision": "bf16"} | changes)
    said = why_unknown(spec, predicted(), CARDS[card])
    assert why in said
    assert bool(said) == bool(why)


def test_rates_of_another_gpu_or_version_are_unknown() -> None:
    assert "24 GB" in str(cards_of([CARD_ROOMS["24"]]))
    assert "GTX 1080" in str(cards_of([Room("GPU 0", 1, kind="GTX 1080")]))
    both = cards_of([CARD_ROOMS["4090"], CARD_ROOMS["3090"]])
    assert both == [CARDS["4090"], CARDS["3090"]]
    old = Predicted.of(dict(predicted().values) | {"work": {"schema": 0}})
    assert not old.work
    assert why_unknown(JobSpec(), old, CARDS["4090"])


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("NVIDIA GeForce GTX 1080", "NVIDIA GeForce GTX 1080; name one, such as --card 4090"),
        ("a100_3g.20gb", "a100_3g.20gb, which is a part of a GPU"),
        ("GRID A100-20C", "GRID A100-20C, which is a part of a GPU"),
        ("", "a GPU of GPU 0; name one, such as --card 4090"),
    ],
)
def test_it_says_whose_rates_are_unknown(kind: str, why: str) -> None:
    assert cards_of([Room("GPU 0", 1, kind=kind)]) == f"no rates are known for {why}"
    assert seconds_text("the network is not counted").endswith("the network is not counted")


def test_seconds_are_those_of_the_gpus_that_the_job_takes() -> None:
    """On a machine of several models, the roomiest, whatever their order."""
    names = {"NVIDIA GeForce RTX 3090": 24, "NVIDIA H100 80GB HBM3": 80}
    gpus = [Gpu(n, f"GPU-{n}", name, gib * GIB) for n, (name, gib) in enumerate(names.items())]
    spec = JobSpec(pretrained_model_name_or_path="m", dataset="d", num_processes=1)
    one = Predicted.of(dict(predicted().values) | {"ranks": 1})
    for present in (gpus, gpus[::-1]):
        asked = Estimate(spec, place_of(spec, present), Server(), Calibration())
        assert asked.fit(one).room.kind == "NVIDIA H100 80GB HBM3"
        assert asked.seconds(one) == seconds(one, "h100")
        assert asked.seconds(predicted()) == seconds(predicted(), "3090"), "the slower one of two"


def test_what_this_machine_measured_replaces_the_table(home: Path) -> None:
    for rate in (1e9, 9e9):
        record_rate("link", "NVIDIA GeForce RTX 4090", rate)
    record_rate("speed", "NVIDIA GeForce RTX 4090", 1.2)
    record_rate("speed", "NVIDIA GeForce RTX 4090", 50.0)  # of a GPU that did something else
    record_rate("link", "an unknown GPU", 1e9)
    calibration = read_calibration()
    assert (calibration.links, calibration.speeds) == ({"4090": 9e9}, {"4090": 1.2})
    spec = JobSpec(pretrained_model_name_or_path="m", dataset="d", num_processes=2)
    gpus = [Gpu(n, f"GPU-{n}", "NVIDIA GeForce RTX 4090", 24 * GIB) for n in range(2)]
    here = Estimate(spec, place_of(spec, gpus), Server(), calibration)
    there = Estimate(spec, place_of(spec, (), card="4090"), Server(), calibration)
    measured, computed = here.seconds(predicted()), there.seconds(predicted())
    assert not isinstance(measured, str)
    assert not isinstance(computed, str)
    assert measured.link.name.endswith("measured")
    assert measured.high == pytest.approx(1.2 * computed.high)


# -- arithmetic ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backward", "measured"),
    [("backward", 0.826), ("whole", 0.530)],
    ids=["gradient_checkpointing", "without"],
)
def test_the_band_contains_what_an_h200_took(backward: str, measured: float) -> None:
    """FLUX.1-dev at 1024 px, batch 1 (docs/gpu.md)."""
    band = seconds(predicted(backward))
    assert band.low < measured < band.high
    assert band.high < 1.5 * band.low, "and says something"


@given(st.sampled_from(sorted(CARDS)), st.integers(0, 10**11), st.integers(0, 10**11))
def test_more_to_move_never_takes_less(card: str, linked: int, more: int) -> None:
    before, after = (seconds(predicted(linked=n), card) for n in (linked, linked + more))
    assert before.low <= before.high
    assert (before.low, before.high) <= (after.low, after.high)
    assert before.low <= before.middle <= before.high
    alone = sum(high for _, high in after.parts.values())
    assert max(after.parts[name][0] for name in ("products", "links")) <= after.low
    assert after.high <= alone


def test_transfers_hide_behind_computing_and_computing_behind_transfers() -> None:
    alone = seconds(predicted(), "4090")
    some, most = (seconds(predicted(linked=n * 10**9), "4090") for n in (1, 100))
    assert some.low == pytest.approx(alone.low)
    assert most.low == pytest.approx(most.parts["links"][0], rel=0.01)
    assert (alone.dominant, most.dominant) == ("products", "links")
    twice = predicted(micro_batches=2, step={"linked": 0, "bytes": 0, "host_bytes": 0})
    once = predicted(step={"linked": 0, "bytes": 0, "host_bytes": 0})
    assert seconds(twice).high == pytest.approx(2 * seconds(once).high)


@pytest.mark.parametrize(
    ("band", "text"),
    [
        ((1.91, 2.6), "1.9-2.6"),
        ((0.41, 0.59), "0.41-0.59"),
        ((9.7, 14.2), "9.7-14"),
        ((1, 1), "1.0"),
    ],
)
def test_a_band_has_two_digits(band: tuple[float, float], text: str) -> None:
    assert span(*band) == text


# -- ranking -------------------------------------------------------------------------------


class Formula(Estimate):
    """An estimate that the fake's formula answers at once; counts the questions."""

    asked = 0

    def predict(self, strategy: str, ranks: int, spec: JobSpec | None = None) -> Any:
        self.asked += 1
        changed = (spec or self.spec).model_copy(update={"strategy": strategy})
        return Predicted.of(predict(changed.to_dict(), ranks, strategy))


def ranked(card: str, **values: Any) -> tuple[Formula, Ranking]:
    usual = {"pretrained_model_name_or_path": "m", "dataset": ".", "mixed_precision": "bf16"}
    spec = load_spec(None, usual | {"gradient_checkpointing": True} | values)
    asked = Formula(spec, place_of(spec, (), card=card), Server(), Calibration())
    ranking = asked.ranking()
    assert not isinstance(ranking, str), ranking
    return asked, ranking


@settings(max_examples=20, deadline=None)
@given(
    card=st.sampled_from([key for key, card in CARDS.items() if card.bf16]),
    ranks=st.sampled_from([1, 2, 8]),
    checkpoints=st.booleans(),
    base=st.sampled_from(["none", "int8", "nf4"]),
    swapped=st.sampled_from([0, 8]),
)
def test_no_setup_that_fits_is_faster_than_the_first(
    card: str, ranks: int, checkpoints: bool, base: str, swapped: int
) -> None:
    """Against every setup, each predicted: what the bounds leave out is never much faster."""
    keys = {"gradient_checkpointing": checkpoints, "base_precision": base, "swap_blocks": swapped}
    asked, ranking = ranked(card, gpus=ranks, **keys)
    questions = asked.asked
    middles = [setup.seconds.middle for setup in ranking.setups]
    assert middles == sorted(middles)
    assert ranking.own in ranking.setups
    assert questions <= 40
    best, exact = ranking.fastest, ranking.exact
    for setup in ranking.setups:
        changed = {**asked.spec.to_dict(), **setup.changes}
        assert load_spec(None, changed), "a job file takes the keys"
        assert bool(setup.loses) == (setup.changes.get("base_precision", "none") != "none")
        if setup.changes and ranks > 1:
            assert "strategy" in setup.changes, "`auto` may choose another one"
    assert best is None or not best.loses or exact is None or _gain(best, exact) > 0.1
    for every in _every(asked, ranks):
        lossless = every.spec.base_precision in ("none", base)
        if every.fits and best is not None:
            worth = 0.94 if lossless or best.loses else 0.89
            assert best.seconds.middle <= every.seconds.middle / worth, every.title
        if every.fits and lossless:
            assert exact is not None
            assert exact.seconds.middle <= every.seconds.middle / 0.94, every.title


def _gain(setup: Setup, other: Setup) -> float:
    return 1 - setup.seconds.middle / other.seconds.middle


def _every(asked: Formula, ranks: int) -> list[Setup]:
    bits = {"none": 16, "int8": 8, "nf4": 4}
    setups = []
    for strategy in ["single"] if ranks == 1 else ["ddp", "fsdp2"]:
        for base in (b for b in bits if b == "none" or bits[b] <= bits[asked.spec.base_precision]):
            for interval in (0, 1, 2, 4):
                spec = asked.spec.model_copy(
                    update={
                        "strategy": strategy,
                        "base_precision": base,
                        "gradient_checkpointing": bool(interval),
                        "swap_blocks": 0,
                        "gradient_checkpointing_interval": interval or 1,
                    }
                )
                result = asked.predict(strategy, ranks, spec)
                duration = asked.seconds(result)
                assert not isinstance(duration, str)
                setups.append(Setup(spec, {}, result, asked.fit(result), duration))
    return setups


def test_what_is_lost_is_said_beside_what_loses_nothing() -> None:
    _, ranking = ranked("4090", gpus=2, resolution=512)
    text = ranking_text(ranking)
    best = ranking.fastest
    assert best is not None
    assert best.title in text.splitlines()[0]
    for line in text.splitlines():
        assert ("base" in line.split(";")[0]) <= ("rounded" in line or line.startswith("fast"))
    assert "s a step (computed)" in seconds_text(ranking)
    assert "(assumed)" in seconds_text(ranking)


def test_where_everything_fits_nothing_is_lost() -> None:
    asked, ranking = ranked("h200", gpus=2, resolution=512)
    assert ranking.fastest == ranking.exact
    assert ranking.fastest is not None
    assert ranking.fastest.title == "ddp, nothing recomputed"
    assert asked.asked <= 10, "the others cannot be faster"
    choice = better(ranking)
    assert choice is not None
    setup, why = choice
    assert setup.changes == {"strategy": "ddp", "gradient_checkpointing": False}
    assert why == "it recomputes fewer blocks"


SELECTIVE: dict[str, Any] = {"gradient_checkpointing_policy": "selective"}


def test_a_policy_that_does_not_fit_hides_none_that_does() -> None:
    """What a selective policy keeps is here as much as all of it."""
    spec = load_spec(None, {"pretrained_model_name_or_path": "m", "dataset": ".", "gpus": 1})
    spec = spec.model_copy(update=SELECTIVE | {"gradient_checkpointing": True})

    class Selective(Formula):
        def predict(self, strategy: str, ranks: int, spec: JobSpec | None = None) -> Any:
            asked = spec or self.spec
            kept = asked.gradient_checkpointing_policy != "full"
            changes = {"gradient_checkpointing": False} if kept else {}
            return super().predict(strategy, ranks, asked.model_copy(update=changes))

    found = Selective(spec, place_of(spec, (), card="a100"), Server(), Calibration())
    ranking = found.ranking()
    assert not isinstance(ranking, str)
    assert not ranking.own.fits
    assert "(selective)" in ranking.own.title
    assert ranking.exact is not None
    assert ranking.exact.changes["gradient_checkpointing_policy"] == "full"


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"swap_blocks": 8}, "swap_blocks"),
        ({"base_precision": "int8"}, "base_precision"),
        ({"base_precision": "fp8_scaled", "base_matmul": "scaled"}, "base_matmul"),
        (SELECTIVE, "gradient_checkpointing_policy"),
    ],
)
@pytest.mark.parametrize("gpus", [1, 2])
def test_what_only_saves_memory_is_dropped_where_there_is_enough(
    changes: dict[str, Any], key: str, gpus: int
) -> None:
    asked, ranking = ranked("h200", gpus=gpus, resolution=512, **changes)
    neutral = JobSpec.model_fields[key].default
    dropped = [setup for setup in ranking.setups if setup.changes.get(key) == neutral]
    assert dropped
    assert dropped[0].title.endswith("nothing recomputed")
    for setup in ranking.setups:
        assert load_spec(None, {**asked.spec.to_dict(), **setup.changes})


def _setup(changes: dict[str, Any], middle: float, high: int = 1, loses: str = "") -> Setup:
    spec = JobSpec.model_validate({"model_type": "lora", "strategy": "ddp"} | changes)
    fit = Fit(1, high, Room("GPU 0", 9))
    found = replace(seconds(predicted()), low=middle, high=middle)
    return Setup(spec, changes, predicted(), fit, found, loses)


@pytest.mark.parametrize(("share", "taken"), [(0.85, True), (0.95, False)])
def test_what_loses_something_is_named_only_if_it_is_clearly_faster(
    share: float, taken: bool
) -> None:
    exact, lossy = _setup({}, 1.0), _setup({"base_precision": "int8"}, share, loses="rounded")
    ranking = Ranking(exact, [lossy, exact])
    assert ranking.exact is exact
    assert ranking.fastest is (lossy if taken else exact)
    assert (better(ranking) is not None) == taken
    assert ("without that: ddp" in ranking_text(ranking)) == taken
    assert ("less than 10 %" in ranking_text(ranking)) != taken
    form: Any = SimpleNamespace(ranking=lambda: ranking)
    assert ("rounded; without that: ddp" in _faster(form)) == taken
    assert Ranking(exact, [lossy]).fastest is lossy, "nothing else fits"


def test_a_packed_base_is_tried_where_what_is_gathered_takes_longest() -> None:
    """It halves that: what the whole base takes is no bound for it."""
    _, ranking = ranked("4090", gpus=2, resolution=512, lora_placement="sharded")
    assert ranking.own.seconds.dominant == "links"
    assert ranking.fastest is not None
    assert ranking.fastest.loses


CHECKPOINTED: dict[str, Any] = {"gradient_checkpointing": True}


@pytest.mark.parametrize(
    ("own", "high", "best", "why"),
    [
        ({}, 10, CHECKPOINTED, "the job as it is may not fit"),
        (CHECKPOINTED, 1, {}, "it recomputes fewer blocks"),
        (CHECKPOINTED, 1, CHECKPOINTED | {"gradient_checkpointing_interval": 3}, "it recomputes"),
        ({"swap_blocks": 8}, 1, {"swap_blocks": 4}, "it keeps fewer blocks in host memory"),
        ({"base_precision": "int8"}, 1, {}, "computed to take less time"),
        (CHECKPOINTED | SELECTIVE, 1, CHECKPOINTED, "computed to take less time"),
    ],
)
def test_the_reason_is_one_that_holds(
    own: dict[str, Any], high: int, best: dict[str, Any], why: str
) -> None:
    before, after = _setup(own, 2.0, high), _setup(best, 1.0)
    choice = better(Ranking(before, [after, before]))
    assert choice is not None
    assert why in choice[1]
    assert "3th" not in after.title


def test_what_compiling_gains_is_said_to_be_left_out() -> None:
    for compiled in (True, False):
        own = _setup({"torch_compile": compiled}, 1.0)
        assert ("torch_compile is not counted" in seconds_text(Ranking(own))) == compiled


def test_a_strategy_that_fsdp_enable_would_override_is_set_with_it() -> None:
    _, ranking = ranked("h200", gpus=2, resolution=512, fsdp_enable=True)
    assert ranking.fastest is not None
    assert ranking.fastest.changes["fsdp_enable"] is None


def test_the_values_are_json() -> None:
    values = json.loads(json.dumps(seconds(predicted(linked=10**9), "4090").values))
    assert values["moved"] == 2 * 10**9
    assert set(values) >= {"low", "high", "dominant", "parts", "link", "link_assumed"}
