"""Two jobs for the two experts of a model: how they are queued, linked, changed and exported."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from jobs import export, service
from jobs.errors import NotFoundError, SpecError, UserError
from jobs.queue.states import State
from jobs.queue.sweeps import best_job
from jobs.run.checkpoint_files import STATE_FILE
from jobs.run.judging import Measurements
from jobs.run.rundir import MANIFEST
from jobs.service import edit, sweep
from jobs.service.plan import plan_resume, plan_submit
from jobs.service.start_point import other_expert_of
from jobs.spec.families import FAMILIES, compares_losses, experts_of
from jobs.spec.file.load import load_spec
from jobs.spec.job_spec import JobSpec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from jobs.queue.job import Job
    from jobs.queue.store import Store

pytestmark = pytest.mark.usefixtures("no_gpus", "started")

HIGH, LOW = "2.2-t2v-a14b-high", "2.2-t2v-a14b-low"


@pytest.fixture
def values(job_values: dict[str, Any], make_model: Callable[..., Path]) -> dict[str, Any]:
    parts = ("transformer", "transformer_2", "vae")
    root = make_model("wan", pipeline="WanPipeline", parts=parts)
    model = {"pretrained_model_name_or_path": str(root), "model_family": "wan"}
    return job_values | model | {"name": "cats", "model_flavour": LOW, "both_experts": True}


def queue(store: Store, values: dict[str, Any], **swept: list[Any]) -> list[Job]:
    made = sweep.expand(store, values, swept)
    plans = sweep.plan_all(store, made, lambda spec: [])
    return sweep.queue_all(store, plans, made.pairs)


def spec_of(job: Job) -> JobSpec:
    return load_spec(job.run_dir.job_file)


def test_a_pair_has_one_name_and_each_job_names_the_other(
    store: Store, values: dict[str, Any]
) -> None:
    high, low = queue(store, values)
    assert [(job.id, job.name) for job in (high, low)] == [(1, "cats-high"), (2, "cats-low")]
    assert store.sweeps() == {1: "cats", 2: "cats"}
    for own, other, flavour in ((high, low, HIGH), (low, high, LOW)):
        spec = spec_of(own)
        assert (spec.model_flavour, spec.both_experts) == (flavour, False)
        assert spec.other_expert == str(other.run_dir.root)
        assert other_expert_of(store, own).root == other.run_dir.root
    rows = service.sweep_dicts(store, "cats", [])
    assert [row["differs"] for row in rows] == [{"model_flavour": HIGH}, {"model_flavour": LOW}]
    again = service.submit(store, spec_of(low))  # one job, as the file of a run says
    assert spec_of(again).other_expert == str(high.run_dir.root)


def test_with_a_sweep_each_value_has_a_pair(store: Store, values: dict[str, Any]) -> None:
    jobs = queue(store, values, lora_rank=[8, 16])
    assert [job.name for job in jobs] == [
        "cats-r8-high",
        "cats-r8-low",
        "cats-r16-high",
        "cats-r16-low",
    ]
    others = [spec_of(job).other_expert for job in jobs]
    assert others == [str(jobs[n].run_dir.root) for n in (1, 0, 3, 2)]


def test_one_job_of_a_pair_is_changed_resumed_and_removed_by_itself(
    store: Store, values: dict[str, Any]
) -> None:
    store.pause(True)
    high, low = queue(store, values)
    before = spec_of(low)
    edit.change(store, low.id, before.model_copy(update={"max_train_steps": 7}), before)
    assert spec_of(low).max_train_steps == 7
    assert spec_of(low).other_expert == before.other_expert
    assert spec_of(high).max_train_steps == values["max_train_steps"]
    both = spec_of(low).model_copy(update={"both_experts": True})
    with pytest.raises(UserError, match="this is one job, and a pair is two"):
        edit.change(store, low.id, both, spec_of(low))
    for job in (high, low):
        service.stop(store, job.id)
    with pytest.raises(UserError, match="this is one job, and a pair is two"):
        plan_resume(store, low.id, {"both_experts": True})
    service.remove(store, high.id)
    plan = plan_resume(store, low.id)
    assert any("other_expert: " in text and "is gone" in text for text in plan.warnings)
    assert service.carry_out(store, plan).state is State.QUEUED
    with pytest.raises(NotFoundError, match="directory is gone"):
        other_expert_of(store, low)


def test_a_job_can_name_one_that_trains_the_other_expert(
    store: Store, values: dict[str, Any]
) -> None:
    alone = values | {"both_experts": False}
    low = service.submit(store, load_spec(None, alone))
    with pytest.raises(UserError, match=r"does not say which job.*--other-expert ID"):
        other_expert_of(store, low)
    high = alone | {"model_flavour": HIGH, "other_expert": f"#{low.id}"}
    plan = plan_submit(store, load_spec(None, high))
    assert plan.spec.other_expert == str(low.run_dir.root)
    for changes, why in (
        ({"model_flavour": LOW}, f"trains {LOW}, which is not the other expert of {LOW}"),
        ({"other_expert": "9"}, "other_expert: no job 9"),
        ({"other_expert": str(store.home)}, "is not a run directory"),
    ):
        with pytest.raises(UserError, match=why):
            plan_submit(store, load_spec(None, high | changes))


@pytest.mark.parametrize("flavour", [None, "2.1-t2v-14b"])
def test_a_model_with_one_denoiser_is_refused(
    store: Store, values: dict[str, Any], flavour: str | None
) -> None:
    with pytest.raises(SpecError, match="both_experts: needs a model with two experts"):
        queue(store, values | {"model_flavour": flavour})
    assert store.all() == []


def test_every_flavour_for_one_component_has_a_partner() -> None:
    for family in FAMILIES.values():
        for name, flavour in family.flavours.items():
            pair = experts_of(JobSpec(model_family=family.name, model_flavour=name))
            assert (pair is not None) == name.endswith(("-high", "-low"))
            if pair is not None:
                components = [family.component_of(each) for each in pair]
                assert (name in pair, components) == (True, ["transformer", "transformer_2"])
                for place in (flavour.hub_id, f"/models/{flavour.hub_id.partition('/')[2]}"):
                    by_name = JobSpec(model_family=family.name, pretrained_model_name_or_path=place)
                    assert (experts_of(by_name) == pair) is not flavour.last_frame


def test_losses_of_two_experts_are_not_compared() -> None:
    losses = {1: Measurements([(10, 0.3)]), 2: Measurements([(10, 0.2)])}
    scores = {job: Measurements(losses[job].values, "clip_t") for job in losses}
    experts = {1: {"model_flavour": HIGH}, 2: {"model_flavour": LOW}}
    assert best_job(losses, experts) is None
    assert best_job(scores, experts) == 1, "their samples are of both"
    assert best_job(losses, {1: {"lora_rank": 8}, 2: {"lora_rank": 16}}) == 2
    assert compares_losses([HIGH, HIGH, None])


def test_the_pair_is_exported_into_one_place_if_it_is_one(
    store: Store, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def answer(tool: str, words: list[str], *_: Any) -> dict[str, Any]:
        asked.append(words)
        return {"path": words[1], "step": 4, "ema": False, "warnings": []}

    monkeypatch.setattr(export, "ask", answer)
    high, low = queue(store, values)
    (full,) = queue(store, values | {"both_experts": False, "model_type": "full"})
    for job, step in ((high, 4), (low, 6), (full, 6)):
        place = job.run_dir.checkpoint(step)
        place.mkdir(parents=True)
        (place / STATE_FILE).write_text(json.dumps({"spec": spec_of(job).to_dict()}))
        (place / MANIFEST).write_text(json.dumps({"step": step, "files": {}}))
    made = export.export_checkpoint(high, other=low.run_dir)
    assert made.path == high.run_dir.root / "export-both-4-6"
    ((place, _, *words),) = asked
    assert (place, words) == (
        str(high.run_dir.checkpoint(4)),
        [f"--other={low.run_dir.checkpoint(6)}"],
    )
    for other, why in ((high, "are not the two experts"), (full, "takes two LoRAs or two full")):
        with pytest.raises(UserError, match=f"{why}.*export each by itself"):
            export.export_checkpoint(high, other=other.run_dir)
    assert len(asked) == 1
