"""Pushing exports to a server that speaks the hub's protocol, and their cards."""

from __future__ import annotations

import json
import random
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from jobs import service
from jobs.errors import UserError
from jobs.hub import push
from jobs.hub.push import CardFacts, follow, push_step, write_card
from jobs.hub.pushes import Push
from jobs.hub.trouble import HubError
from jobs.machine.engine_tools import ToolError
from jobs.preflight import check_job
from jobs.queue.job import Terms
from jobs.queue.states import State
from jobs.spec.file.load import dump_spec, load_spec
from jobs.spec.values.hub_names import HubName
from jobs.trackers import start_push
from tests.support.hub.repos import flux_like, safetensors

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.queue.job import Job
    from jobs.queue.store import Store
    from jobs.run.rundir import RunDir
    from jobs.spec.job_spec import JobSpec
    from tests.support.hub.server import Hub

pytest_plugins = ["tests.support.hub.fixture"]

TOKEN = "hf_" + "t" * 34
FILES = {"pytorch_lora_weights.safetensors": safetensors(5000, 1), "x-kohya.safetensors": b"small"}


def write_export(run_dir: RunDir, step: int, place: Path | None = None) -> Path:
    place = place or run_dir.export
    place.mkdir(parents=True)
    for name, content in FILES.items():
        (place / name).write_bytes(content + b"%d" % step)
    facts = {"job": "t", "step": step, "ema": False}
    (place / "export.json").write_text(json.dumps(facts))
    return place


@pytest.fixture
def spec(job_values: dict[str, Any]) -> JobSpec:
    values = {"push_to_hub": True, "trigger_word": "zxq", "learning_rate": 3e-5}
    return load_spec(None, job_values | values)


@pytest.fixture
def job(store: Store, spec: JobSpec, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A job that trained to its end, and was exported."""

    def prepare(run_dir: RunDir) -> None:
        run_dir.create()
        run_dir.job_file.write_text(dump_spec(spec))
        write_export(run_dir, 5)
        samples = run_dir.samples / "step-5"
        samples.mkdir(parents=True)
        (samples / "00.png").write_bytes(b"\x89PNG a picture")
        (samples / "00.json").write_text(json.dumps({"prompt": "[trigger] at /home/sea"}))

    monkeypatch.setenv("HF_TOKEN", TOKEN)
    made = store.add(name="t", terms=Terms.of(spec, None), run_id="r", prepare=prepare)
    for state in (State.STARTING, State.COMPLETED):
        store.change(made.id, state, "")
    return store.get(made.id)


def test_an_export_is_pushed_once_with_a_card(hub: Hub, store: Store, job: Job) -> None:
    hub.token = TOKEN
    assert follow(store, job.id, pause=pytest.fail) == 0
    repo = hub.repos["models/somebody/t"]
    assert set(repo.files) == {*FILES, "README.md", "images/0.png"}
    assert all(repo.files[name] == content + b"5" for name, content in FILES.items())
    assert [message for _, message, _ in repo.commits] == ["initial commit", "Step 5"]
    assert not repo.private
    kept = Push.read(job.run_dir)
    assert (kept.repo, kept.pushed, kept.problem) == ("somebody/t", [5], "")
    # Again: by the follower of a resumed job, and by hand.
    asked = len(hub.requests)
    assert follow(store, job.id, pause=pytest.fail) == 0
    assert len(hub.requests) == asked
    assert push_step(job).url == kept.url
    assert len(repo.commits) == 2
    for path in job.run_dir.root.rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes()


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_private_push_goes_into_no_public_repository(
    by_hand: bool, hub: Hub, job: Job, spec: JobSpec
) -> None:
    hub.add("me/taken", {"x": b"y"})
    if not by_hand:
        changes = {"hub_private_repo": True, "hub_model_id": "me/taken"}
        job.run_dir.job_file.write_text(dump_spec(spec.model_copy(update=changes)))
    with pytest.raises(HubError, match="me/taken is public, and this is to be pushed to a private"):
        push_step(job, **({"repo": "me/taken", "private": True} if by_hand else {}))
    assert list(hub.repos["models/me/taken"].files) == ["x"]


@pytest.mark.parametrize("place", ["jobs.db", "folder/jobs.db"])
def test_no_link_is_followed(place: str, hub: Hub, job: Job, tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "jobs.db").write_text("private")
    link = job.run_dir.export / place.partition("/")[0]
    target = tmp_path / "secret"
    link.symlink_to(target if "/" in place else target / "jobs.db")
    with pytest.raises(HubError, match=f"{link.name} is a link, and links are not pushed"):
        push_step(job)
    assert not any(b"private" in blob for blob in hub.blobs.values())


def test_by_hand_to_another_private_repository(hub: Hub, job: Job) -> None:
    push_step(job, repo="me/other", private=True)
    assert hub.repos["models/me/other"].private
    assert Push.read(job.run_dir) == Push(), "the job's own is not pushed yet"


def test_checkpoints_are_pushed_in_their_order_each_as_a_commit(
    hub: Hub, store: Store, job: Job, spec: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.run_dir.job_file.write_text(
        dump_spec(spec.model_copy(update={"push_checkpoints_to_hub": True, "hub_model_id": "a/b"}))
    )

    class Saved:
        def __init__(self, step: int) -> None:
            self.step = step

    class Made:
        def __init__(self, path: Path) -> None:
            self.path = path

    def export(job: Job, step: int, *, output: Path, progress: object) -> Made:
        return Made(write_export(job.run_dir, step, output))

    monkeypatch.setattr(push, "list_checkpoints", lambda run_dir: [Saved(2), Saved(4), Saved(5)])
    monkeypatch.setattr(push, "export_checkpoint", export)
    assert follow(store, job.id, pause=pytest.fail) == 0
    commits = hub.repos["models/a/b"].commits
    assert [message for _, message, _ in commits[1:]] == ["Step 2", "Step 4", "Step 5"]
    assert commits[1][2]["x-kohya.safetensors"] == b"small2"
    assert "images/0.png" not in commits[2][2], "a picture of a later step"
    assert [path.name for path in (job.run_dir.root / "hub").iterdir()] == ["push.json"]


def test_what_is_trained_again_is_pushed_again(
    hub: Hub, store: Store, job: Job, no_gpus: None, started: list[int]
) -> None:
    Push("somebody/t", [2, 5]).keep(job.run_dir)
    service.resume(store, job.id, back_to=0)
    assert started == [job.id]
    assert Push.read(job.run_dir) == Push("somebody/t")
    store.change(job.id, State.COMPLETED, "")
    assert follow(store, job.id, pause=pytest.fail) == 0
    assert Push.read(job.run_dir).pushed == [5]


def test_no_checkpoint_on_the_way_ends_it(
    hub: Hub, store: Store, job: Job, spec: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is rotated away while it is read, another one is damaged; the final one is pushed."""
    there = [2, 4]
    job.run_dir.job_file.write_text(
        dump_spec(spec.model_copy(update={"push_checkpoints_to_hub": True}))
    )

    class Saved:
        def __init__(self, step: int) -> None:
            self.step = step

    def export(job: Job, step: int, **_: object) -> None:
        if step == 2:
            there.remove(2)
            raise ToolError("no such file")
        raise UserError(f"step-{step} is damaged")

    monkeypatch.setattr(push, "list_checkpoints", lambda run_dir: [Saved(step) for step in there])
    monkeypatch.setattr(push, "export_checkpoint", export)
    assert follow(store, job.id, pause=pytest.fail) == 1, "step 4 is not there"
    kept = Push.read(job.run_dir)
    assert (kept.pushed, kept.problem) == ([5], "")


def test_a_refusal_ends_it_and_a_failure_is_tried_again(
    hub: Hub, store: Store, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    hub.down = [500]
    assert follow(store, job.id, pauses.append) == 0
    assert pauses == [5.0]
    assert Push.read(job.run_dir).problem == ""
    hub.token = "hf_" + "o" * 34  # another's
    write_export(job.run_dir, 9, job.run_dir.root / "new")
    job.run_dir.export.rename(job.run_dir.root / "old")
    (job.run_dir.root / "new").rename(job.run_dir.export)
    assert follow(store, job.id, pause=pytest.fail) == 1
    problem = Push.read(job.run_dir).problem
    assert "refuses access" in problem
    assert "hf auth login" in problem
    assert TOKEN not in problem
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(HubError, match=r"no token of the hub .* `hf auth login`"):
        push_step(job)


def test_a_job_that_could_not_push_is_refused_before_it_trains(
    spec: JobSpec, hub: Hub, no_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="push_to_hub: no token of the hub"):
        check_job.check(spec)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    check_job.check(spec)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="push_to_hub: HF_HUB_OFFLINE"):
        check_job.check(spec)
    assert hub.requests == []


@pytest.mark.slow
def test_a_process_beside_the_job_pushes_it(hub: Hub, job: Job, spec: JobSpec) -> None:
    (child,) = start_push(spec, job)
    assert isinstance(child, subprocess.Popen)
    assert child.wait() == 0, (job.run_dir.logs / "push.log").read_text()
    assert Push.read(job.run_dir).pushed == [5]
    assert start_push(spec.model_copy(update={"push_to_hub": False}), job) == []


def test_a_card_says_how_it_was_made_and_nothing_of_where(job_values: dict[str, Any]) -> None:
    values = {
        "dataset": "/home/anna/secret-cats",
        "cache_dir": "/scratch/anna",
        "init_lora": "/home/anna/first.safetensors",
        "training_adapter": "/home/anna/turbo.safetensors",
        "resume_from_checkpoint": "/home/anna/runs/3",
        "validation_prompts": ["[trigger] on a sofa"],
        "trigger_word": "zxq",
        "learning_rate": 3e-5,
        "lora_rank": 24,
        "global_batch_size": 16,
    }
    facts = CardFacts(
        repo="anna/cats",
        step=1500,
        base="black-forest-labs/FLUX.1-dev",
        base_card={"license": "other", "license_name": "flux-dev", "tags": ["theirs"]},
        samples=240,
        epochs=12.5,
        ranks=8,
        pictures={"images/0.png": "zxq on a sofa"},
        weights="pytorch_lora_weights.safetensors",
    )
    card = write_card(load_spec(None, job_values | values), facts)
    head = yaml.safe_load(card.split("---\n")[1])
    assert head == {
        "license": "other",
        "license_name": "flux-dev",
        "library_name": "diffusers",
        "pipeline_tag": "text-to-image",
        "base_model": "black-forest-labs/FLUX.1-dev",
        "base_model_relation": "adapter",
        "tags": ["text-to-image", "diffusers", "lora", "flux", "fsdp-tui"],
        "instance_prompt": "zxq",
        "widget": [{"text": "zxq on a sofa", "output": {"url": "images/0.png"}}],
    }
    for text in (
        'pipeline.load_lora_weights("anna/cats", weight_name="pytorch_lora_weights.safetensors")',
        "240 images with captions, each seen about 12.5 times.",
        "| steps | 1500 |",
        "| ranks | 8 |",
        "| learning_rate | 3e-05 |",
        "| lora_rank | 24 |",
        "| gradient_accumulation_steps | 2 |",  # as it came out on these ranks
    ):
        assert text in card
    by_peft = replace(facts, weights="adapter_model.safetensors")
    card_of_peft = write_card(load_spec(None, job_values | values), by_peft)
    assert "\nlibrary_name: peft\n" in card_of_peft
    assert (
        'pipeline.transformer = PeftModel.from_pretrained(pipeline.transformer, "anna/cats")'
        in card_of_peft
    )
    assert "load_lora_weights" not in card_of_peft
    of_blocks = write_card(load_spec(None, job_values | values | {"model_family": "anima"}), facts)
    assert 'ModularPipeline.from_pretrained("black-forest-labs/FLUX.1-dev")\n' in of_blocks
    assert "pipeline.load_components(torch_dtype=torch.bfloat16)\n" in of_blocks
    for secret in ("/home", "/scratch", "secret", "first.safetensors", str(job_values["dataset"])):
        assert secret not in card


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_cut_connections_lose_and_double_nothing(
    hub: Hub, store: Store, job: Job, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third answer is lost, that of a commit too: the push is there, once."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.cuts = random.Random(seed)
    assert follow(store, job.id, pause=lambda seconds: None) == 0
    hub.cuts = None
    repo = hub.repos["models/somebody/t"]
    assert [message for _, message, _ in repo.commits] == ["initial commit", "Step 5"]
    assert all(repo.files[name] == content + b"5" for name, content in FILES.items())


def test_the_base_is_known_by_its_name_and_license(
    hub: Hub, store: Store, job: Job, spec: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("someone/FLUX.1-dev", flux_like())
    from jobs.hub import fetch as fetching

    fetching.fetch(HubName("model", "someone/FLUX.1-dev"), lambda now: None)
    named = spec.model_copy(update={"pretrained_model_name_or_path": "someone/FLUX.1-dev"})
    job.run_dir.job_file.write_text(dump_spec(named))
    push_step(job)
    card = hub.repos["models/somebody/t"].files["README.md"].decode()
    head = yaml.safe_load(card.split("---\n")[1])
    assert (head["base_model"], head["license"]) == ("someone/FLUX.1-dev", "apache-2.0")
