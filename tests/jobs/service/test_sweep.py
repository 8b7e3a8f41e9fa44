"""Sweeps: what is queued for which values, under which names, and that it is all or nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from jobs import service
from jobs.errors import NotFoundError, SpecError, UserError
from jobs.queue import undo
from jobs.queue.states import State
from jobs.queue.store import Store
from jobs.queue.sweeps import Groups, short_text
from jobs.run.events import Scores, Start, Validation
from jobs.service import sweep
from jobs.spec.file.load import load_spec
from tests.support.jobs.kills import kill, killed
from tui.text.tables import sweep_table

if TYPE_CHECKING:
    from jobs.queue.job import Job
    from jobs.run.rundir import RunDir

pytestmark = pytest.mark.usefixtures("no_gpus", "started")

RATES = ["1e-5", "3e-5", "1e-4"]


def queue(store: Store, values: dict[str, Any], swept: dict[str, list[Any]]) -> list[Job]:
    made = sweep.expand(store, values, swept)
    return sweep.queue_all(store, sweep.plan_all(store, made, lambda spec: []))


def test_every_combination_is_a_job_that_is_named_by_what_differs(
    store: Store, job_values: dict[str, Any]
) -> None:
    swept = {"learning_rate": RATES[:2], "lora_rank": [8, 16]}
    jobs = queue(store, job_values | {"name": "cats"}, swept)
    assert [job.name for job in jobs] == [
        "cats-lr1e-5-r8",
        "cats-lr1e-5-r16",
        "cats-lr3e-5-r8",
        "cats-lr3e-5-r16",
    ]
    assert store.sweeps() == {job.id: "cats" for job in jobs}
    specs = [load_spec(job.run_dir.job_file) for job in jobs]
    assert [(spec.learning_rate, spec.lora_rank) for spec in specs] == [
        (1e-5, 8),
        (1e-5, 16),
        (3e-5, 8),
        (3e-5, 16),
    ]
    differing = Groups().differing(store.all(), store.sweeps())
    assert differing[jobs[3].id] == {"learning_rate": 3e-5, "lora_rank": 16}
    again = queue(store, job_values | {"name": "cats"}, {"seed": [1, 2]})
    assert {store.sweeps()[job.id] for job in again} == {"cats-2"}, "another sweep, another group"


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("learning-rate=1e-5, 3e-5", {"learning_rate": ["1e-5", "3e-5"]}),
        ("resolution=512,768", {"resolution": ["512", "768"]}),
        ("resolution=512,768;1024", {"resolution": ["512,768", "1024"]}),
        ("seed=3,3,4", {"seed": ["3", "4"]}),
        ("validation_steps=100,1 epoch", {"validation_steps": ["100", "1 epoch"]}),
        ("swap_blocks=0; {16GB: 8, 24GB: 2}", {"swap_blocks": ["0", "{16GB: 8, 24GB: 2}"]}),
        ("swap_blocks=16GB:24,24GB:8", {"swap_blocks": ["16GB:24,24GB:8"]}),
        ("swap_blocks=16GB:24; 24GB:8", {"swap_blocks": ["16GB:24", "24GB:8"]}),
        ("swap_blocks=[0, {16GB: 8}, {16GB: 8}]", {"swap_blocks": [0, {"16GB": 8}]}),
    ],
)
def test_values_stand_between_commas(text: str, values: dict[str, list[Any]]) -> None:
    assert sweep.read_sweeps(["flowers", text]) == (values, "flowers")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("learning_rte=1,2", 'unknown key "learning_rte".*did you mean "learning_rate"'),
        ("name=a,b", "name cannot be swept; it is made from"),
        ("both_experts=yes,no", "both_experts cannot be swept; set it for all"),
        ("seed=", "seed: no values; use seed=A,B,C"),
    ],
)
def test_what_cannot_be_swept_is_refused(text: str, why: str) -> None:
    with pytest.raises(SpecError, match=why):
        sweep.read_sweeps([text])
    with pytest.raises(SpecError, match="seed is given twice"):
        sweep.read_sweeps(["seed=1", "seed=2"])
    with pytest.raises(UserError, match="120 jobs, more than 100"):
        sweep.check_count({"seed": [*range(12)], "lora_rank": [*range(10)]}, "")


@pytest.mark.parametrize(
    ("swept", "why"),
    [
        ({"learning_rate": ["1e-5", "fast"]}, "sweep, learning_rate=fast: .*learning_rate"),
        ({"learning_rate": ["1e-5", "0.00001"]}, "would be the same job"),
        ({"dataset": ["/nowhere/at/all", "/nor/here"]}, "dataset"),
    ],
)
def test_one_wrong_job_keeps_all_out(
    store: Store, job_values: dict[str, Any], swept: dict[str, list[Any]], why: str
) -> None:
    with pytest.raises(UserError, match=why):
        queue(store, job_values, swept)
    assert store.all() == []


def test_jobs_that_a_kill_kept_out_leave_nothing(store: Store, job_values: dict[str, Any]) -> None:
    """The third job's files cannot be written any more: the first two have theirs by then."""
    made = sweep.expand(store, job_values, {"learning_rate": RATES})
    new = [service.new_job(plan) for plan in sweep.plan_all(store, made, lambda spec: [])]

    def prepare(run_dir: RunDir) -> None:
        assert len(list((store.home / "runs").iterdir())) == 2
        kill()

    new[2] = replace(new[2], prepare=prepare)
    killed(lambda: store.add_all(new))
    again = Store(store.home)
    assert again.all() == []
    assert again.sweeps() == {}
    assert not [path for path in (store.home / "runs").iterdir() if path.name[0] != "."]
    assert not undo.is_left(store.home)


def test_the_best_of_a_sweep_has_the_lowest_validation_loss(
    store: Store, job_values: dict[str, Any]
) -> None:
    jobs = queue(store, job_values | {"name": "cats"}, {"learning_rate": RATES})
    with pytest.raises(NotFoundError, match="there are cats"):
        service.sweep_dicts(store, "dogs", [])
    assert not any(row["best_of_sweep"] for row in service.sweep_dicts(store, "cats", []))
    for job, losses in zip(jobs, ([3.0, 2.0], [1.0, float("nan")], [1.5]), strict=True):
        lines = [Validation(10 * (n + 1), loss).line() for n, loss in enumerate(losses)]
        job.run_dir.events.write_text("".join(lines))
        if store.get(job.id).state is State.QUEUED:
            assert store.claim(job.id, [], "")
    rows = service.sweep_dicts(store, "cats", [])
    assert [row["id"] for row in rows if row["best_of_sweep"]] == [jobs[1].id]
    assert [row["lowest"]["loss"] for row in rows] == [2.0, 1.0, 1.5]
    assert [row["differs"] for row in rows] == [{"learning_rate": float(r)} for r in RATES]


def test_the_best_of_a_sweep_may_have_the_highest_score(
    store: Store, job_values: dict[str, Any]
) -> None:
    jobs = queue(store, job_values | {"name": "cats"}, {"learning_rate": RATES})
    for job, scores in zip(jobs, ([0.2, 0.3], [0.1], [0.25]), strict=True):
        lines = [Start(best_by="dino_i").line()]
        lines += [Validation(1, 1 - max(scores)).line()] + [
            Scores(10 * (n + 1), clip_t=0.9, dino_i=score).line() for n, score in enumerate(scores)
        ]
        job.run_dir.events.write_text("".join(lines))
        if store.get(job.id).state is State.QUEUED:
            assert store.claim(job.id, [], "")
    rows = service.sweep_dicts(store, "cats", [])
    assert [row["id"] for row in rows if row["best_of_sweep"]] == [jobs[0].id]
    assert [row["highest"]["score"] for row in rows] == [0.3, 0.1, 0.25]
    assert [row["lowest"] for row in rows] == [None] * 3
    assert {row["by"] for row in rows} == {"dino_i"}
    table = sweep_table(rows).splitlines()
    assert table[0].split()[-3:] == ["DINO-I", "AT", "REASON"]
    assert table[1].startswith("★")
    assert table[-1] == "★ marks the highest DINO-I, measured at step AT"


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("learning_rate", 0.0001, "lr 1e-4"),
        ("learning_rate", 0.000035, "lr 3.5e-5"),
        ("learning_rate", 0.5, "lr 0.5"),
        ("optimizer", "adamw", "adamw"),
        ("use_ema", True, "use ema yes"),
        ("resolution", [512, 768], "res 512+768"),
        ("dataset", "/data/cats/", "dataset cats"),
        ("lora_alpha", None, "a none"),
    ],
)
def test_what_differs_is_said_in_few_characters(key: str, value: Any, text: str) -> None:
    assert short_text(key, value) == text
