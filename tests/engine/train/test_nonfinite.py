"""Steps that are not finite: which rank and which samples they name."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from engine.data.index.data_index import build_index
from engine.data.loader import Inputs
from engine.train.nonfinite import describe
from jobs.run.rundir import RunDir
from jobs.spec.file.load import dump_spec
from tests.support.engine.ranks import nonfinite as ranks_of
from tests.support.engine.toy_jobs import start_ranks, toy_spec

if TYPE_CHECKING:
    from pathlib import Path


def batch(*names: str, bad: tuple[str, ...] = ()) -> Inputs:
    return Inputs(list(names), list(bad))


@pytest.mark.parametrize(
    ("everyone", "said"),
    [
        ([[]], ""),  # infinite only when summed up
        ([[batch("a")]], ", with a; the inputs were finite"),
        ([[], [batch("b")]], ", on rank 1, with b; the inputs were finite"),
        (
            [[batch("a", bad=("latents",))], [], [batch("c"), batch("c", bad=("latents",))]],
            ", on ranks 0 and 2, with a, c; not finite in the input: latents",
        ),
        (
            [[batch("a", "b")], [batch("c", "d"), batch("e", "f")]],
            ", on every rank, with a, b, c, d and 2 more; the inputs were finite",
        ),
        (
            [[], [batch(bad=("unknown (no disk)",))]],
            ", on rank 1; not finite in the input: unknown (no disk)",
        ),
    ],
)
def test_the_origin_in_words(everyone: list[list[Inputs]], said: str) -> None:
    assert describe(everyone) == said


def run(
    toy: Path, root: Path, spoils: str | None, *, late: bool = False, **changes: Any
) -> list[dict[str, Any]]:
    """The events of a job on two ranks, each of which ends by itself."""
    spec = toy_spec(toy, num_processes=2, strategy="ddp", **changes)
    RunDir(root).create()
    RunDir(root).job_file.write_text(dump_spec(spec))
    start_ranks(ranks_of.train, 2, root, spoils, late).join()
    return [json.loads(line) for line in RunDir(root).events.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True], ids=["at once", "as on GPUs"])
def test_all_ranks_end_and_name_the_rank_and_the_sample(
    late: bool, toy: Path, toy_cache: Path, tmp_path: Path
) -> None:
    run(toy, tmp_path / "run", None, late=late, cache_dir=str(toy_cache))
    errors = RunDir(tmp_path / "run").rank_errors()
    assert sorted(error["rank"] for error in errors) == [0, 1]
    (said,) = {error["message"] for error in errors}
    names = "|".join(sample.name for sample in build_index(toy_spec(toy)).samples)
    assert re.fullmatch(
        r"the loss or gradient is not finite at step 2 \(loss nan, gradient norm nan\), on rank 1, "
        rf"with ({names}); the inputs were finite; lower learning_rate, or .*",
        said,
    )
    assert {error["cause"] for error in errors} == {"not_finite"}


@pytest.mark.slow
def test_a_sample_whose_input_is_not_finite_is_named_each_time_it_is_skipped(
    toy: Path, toy_cache: Path, tmp_path: Path
) -> None:
    spoilt = build_index(toy_spec(toy)).samples[3].name
    values = {"cache_dir": str(toy_cache), "on_nonfinite": "skip", "max_train_steps": 12}
    events = run(toy, tmp_path / "run", spoilt, **values)
    assert events[-1]["kind"] == "end"
    warnings = [event["message"] for event in events if event["kind"] == "warning"]
    skipped = [text for text in warnings if "was skipped" in text]
    assert skipped, "24 samples in 12 steps of two"
    for text in skipped:
        assert re.fullmatch(
            r"step \d+ was skipped: loss nan, gradient norm nan, on rank [01], with "
            rf"{re.escape(spoilt)}; not finite in the input: latents",
            text,
        )
