"""Pictures and validation losses on several ranks are those of one, in the forwards planned."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
from PIL import Image

from tests.support.engine.ranks import sampling as sampling_ranks
from tests.support.engine.toy_jobs import start_ranks, toy_values

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

ALIKE: Final = ["a red circle", "a blue square", "a green star", "a red star", "a blue circle"]
GUIDED: Final = {"negative_prompt": "blue", "true_cfg_scale": 3.0}
MIXED: Final[list[Any]] = [
    {"prompt": "a red circle", "steps": 1},
    {"prompt": "a blue square", "steps": 3, "seed": 5, "resolution": "96x64"} | GUIDED,
    "a green star",
    {"prompt": "a red star", "steps": 2, "guidance": 1.0, "resolution": 32} | GUIDED,
    {"prompt": "a blue circle", "seed": 6},
]
MIXED_FORWARDS: Final = [1, 6, 2, 4, 2]


class Cases:
    """What each case came to, by its name."""

    def __init__(self, root: Path, toy: Path) -> None:
        self.root = root
        self.toy = toy

    def run(self, ranks: int, **cases: dict[str, Any]) -> None:
        def values(changes: dict[str, Any]) -> dict[str, Any]:
            settings: dict[str, Any] = {
                "cache_dir": str(self.root / "cache"),
                "num_processes": ranks,
                "strategy": "fsdp2",
                "validation_num_inference_steps": 2,
                "validation_fraction": 0.2,
                "train_batch_size": 2,
                "validation_timesteps": 3,
                "validation_prompts": MIXED,
                "lora_dropout": 0.3,
            }
            return toy_values(self.toy, **settings | changes)

        jobs = {str(self.root / name): values(changes) for name, changes in cases.items()}
        start_ranks(sampling_ranks.look, ranks, jobs).join()

    def facts(self, name: str) -> list[dict[str, Any]]:
        """Of each rank."""
        files = sorted((self.root / name).glob("rank-*.json"))
        return [json.loads(file.read_text()) for file in files]

    def pictures(self, name: str) -> list[np.ndarray[Any, Any]]:
        files = sorted((self.root / name / "samples").glob("*.png"))
        return [np.asarray(Image.open(file), dtype=float) for file in files]

    def latents(self, name: str) -> list[list[float]]:
        """Of all pictures, whoever made them; in an order that does not depend on that."""
        return sorted(latents for rank in self.facts(name) for latents in rank["latents"])


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory, toy: Path) -> Cases:
    cases = Cases(tmp_path_factory.mktemp("sampling"), toy)
    cases.run(1, one={"strategy": "single"}, one_alike={"strategy": "single"} | ALIKE_ONLY)
    cases.run(
        2,
        two={},
        two_gathered={"fsdp_reshard_after_forward": False},
        two_alike=ALIKE_ONLY,
        two_ddp={"strategy": "ddp"},
        two_stopped={"validation_steps": 2},  # read by the ranks as the look that sees the wish
    )
    cases.run(
        4,
        four={},
        four_hsdp={"strategy": "hsdp", "dp_replicate_size": 2} | ALIKE_ONLY,
        four_few={"validation_prompts": MIXED[1:2], "validation_fraction": 0},
    )
    return cases


ALIKE_ONLY: Final[dict[str, Any]] = {"validation_prompts": ALIKE, "validation_fraction": 0}


@pytest.mark.parametrize(
    ("name", "alone", "count"),
    [
        ("two_alike", "one_alike", 5),
        ("four_hsdp", "one_alike", 5),
        ("two", "one", 5),
        ("two_gathered", "one", 5),
        ("two_ddp", "one", 5),
        ("four", "one", 5),
    ],
)
def test_the_pictures_of_several_ranks_are_those_of_one(
    name: str, alone: str, count: int, cases: Cases
) -> None:
    mine, expected = cases.pictures(name), cases.pictures(alone)
    assert len(mine) == len(expected) == count
    for picture, other in zip(mine, expected, strict=True):
        assert picture.shape == other.shape
        assert np.abs(picture - other).max() <= 1, "of 255, where rounding tips over"
    for latents, others in zip(cases.latents(name), cases.latents(alone), strict=True):
        assert latents[:2] == others[:2]
        assert np.allclose(latents, others, atol=1e-4)


def test_pictures_differ_by_what_was_asked_for(cases: Cases) -> None:
    assert [p.shape[:2] for p in cases.pictures("two")] == [
        (64, 64),
        (64, 96),
        (64, 64),
        (32, 32),
        (64, 64),
    ]
    pictures = {picture.tobytes() for picture in cases.pictures("one_alike")}
    assert len(pictures) == 5


@pytest.mark.parametrize(
    ("name", "forwards"),
    [
        ("one_alike", [10]),
        ("two_alike", [6, 6]),  # three rounds of two, instead of five
        ("four_hsdp", [4, 4, 4, 4]),
        ("one", [sum(MIXED_FORWARDS)]),
        ("two", [6 + 2 + 1, 6 + 2 + 1]),
        ("two_gathered", [9, 9]),
        ("two_ddp", [6 + 2 + 1, 4 + 2]),  # nobody waits for anybody
        ("four", [6 + 1] * 4),
        ("four_few", [6] * 4),
    ],
)
def test_ranks_make_equally_many_forwards_and_no_more(
    name: str, forwards: list[int], cases: Cases
) -> None:
    facts = cases.facts(name)
    assert [rank["sampled"] for rank in facts] == forwards
    assert all(rank["training"] for rank in facts), "it goes on training afterwards"


def test_one_prompt_on_four_ranks_is_made_once(cases: Cases) -> None:
    assert [len(rank["latents"]) for rank in cases.facts("four_few")] == [1, 0, 0, 0]
    (picture,) = cases.pictures("four_few")
    assert np.abs(picture - cases.pictures("one")[1]).max() <= 1
    assert sorted(p.name for p in (cases.root / "four_few" / "samples").iterdir()) == [
        "00.json",
        "00.png",
    ]


def test_a_wish_to_stop_that_one_rank_sees_ends_it_on_all_after_the_same_picture(
    cases: Cases,
) -> None:
    facts = cases.facts("two_stopped")
    assert [rank["files"] for rank in facts] == [["01.png", "03.png"]] * 2, "the first round"
    assert [rank["sampled"] for rank in facts] == [6, 6]
    assert [rank["first"] for rank in facts] == [None, None]
    assert [rank["measured"] for rank in facts] == [0, 0]
    assert [rank["files"] for rank in cases.facts("two")] == [
        ["00.png", "01.png", "02.png", "03.png", "04.png"]
    ] * 2


def test_the_validation_loss_is_the_same_on_any_number_of_ranks(cases: Cases) -> None:
    (alone,) = cases.facts("one")
    for name in ("two", "two_gathered", "two_ddp", "four"):
        for rank in cases.facts(name):
            assert rank["first"] == rank["again"], "bit for bit"
            assert rank["first"][0] == pytest.approx(alone["first"][0], rel=1e-6)
            assert np.allclose(rank["first"][1], alone["first"][1], rtol=1e-6)
    assert alone["first"] == alone["again"]


def test_the_forwards_of_the_validation_loss_are_shared_out(cases: Cases) -> None:
    (alone,) = cases.facts("one")
    whole = alone["measured"]
    for name, ranks in (("two", 2), ("two_ddp", 2), ("four", 4)):
        assert [rank["measured"] for rank in cases.facts(name)] == [-(-whole // ranks)] * ranks
