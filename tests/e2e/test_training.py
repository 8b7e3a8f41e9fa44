"""Real jobs with real ranks over gloo, through the command line, as a person runs them.

The first, which is what others are compared with, has nothing of the tests in it; the ranks of the
one whose processes are looked at are forked, and all processes of the others (see
`tests.support.jobs.real_jobs`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
import yaml
from PIL import Image

from jobs import service
from jobs.machine.processes import with_run_id
from jobs.queue.states import State
from jobs.run.eventlog import EventLog, read_report
from jobs.run.rundir import RunDir
from tests.support.hub.objects import serve_objects
from tests.support.jobs.held_ranks import HeldRanks, has_done_more_than
from tests.support.jobs.real_jobs import PATIENCE, Bench, Run

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, toy: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("e2e"), toy)
    yield bench
    end_all(bench)


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory, toy: Path) -> Iterator[Bench]:
    """Launches of which nothing is forked."""
    bench = Bench(tmp_path_factory.mktemp("untouched"), toy, forked=False)
    yield bench
    end_all(bench)


@pytest.fixture
def tree(tmp_path: Path, toy: Path) -> Iterator[Bench]:
    """Launches whose processes are each other's children as they should be."""
    bench = Bench(tmp_path, toy, above=False)
    yield bench
    end_all(bench)


def end_all(bench: Bench) -> None:
    for job in bench.store.all():
        for process in with_run_id(job.run_id):
            process.signal(signal.SIGKILL)


@pytest.fixture(scope="module")
def straight(untouched: Bench) -> Run:
    """Twelve steps of a LoRA on two FSDP2 ranks, never stopped; what others are compared with.

    It is started where folders are named like our packages, which must not shadow them.
    """
    place = untouched.home / "shadows"
    for name in ("engine", "jobs", "tui"):
        (place / name).mkdir(parents=True)
        (place / name / "__init__.py").write_text("raise RuntimeError('shadowed')")
    job_file = untouched.job_file(
        name="straight",
        max_train_steps=12,
        train_batch_size=2,
        validation_prompts=["a red circle", "a blue square", "a green star"],
        validation_num_inference_steps=2,
    )
    script = Path(sys.executable).parent / "fsdp-tui"
    done = subprocess.run(
        [str(script), "run", str(job_file)],
        env=untouched.environment,
        cwd=place,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (job,) = untouched.store.all()
    return Run(job.id, job.run_dir)


def test_every_base_parameter_is_half_on_each_rank(straight: Run) -> None:
    for rank in range(2):
        summary = next(
            line
            for line in straight.files.rank_log(rank).read_text().splitlines()
            if "base tensors" in line
        )
        assert "DTensors over 2 ranks" in summary
        assert "(0.5000," in summary
        assert "1 FluxTransformerBlock, 2 FluxSingleTransformerBlock" in summary


def test_a_run_leaves_what_the_contract_names(straight: Run) -> None:
    files = straight.files
    launch = json.loads(files.launch_file.read_text())
    assert "--use_fsdp" in launch["command"]
    assert launch["versions"]["torch"]
    assert yaml.safe_load(files.job_file.read_text())["max_train_steps"] == 12
    assert [s.phase for s in files.rank_statuses()] == ["end", "end"]
    assert [step for step, _ in files.complete_checkpoints()] == [12]
    pictures = sorted(p.name for p in (files.samples / "step-12").glob("*.png"))
    assert pictures == ["00.png", "01.png", "02.png"]
    assert json.loads((files.samples / "step-12" / "02.json").read_text())["prompt"] == (
        "a green star"
    )
    first, second = map(json.loads, files.events.read_text().splitlines()[:2])
    assert [(e["kind"], e["name"], e["state"]) for e in (first, second)] == [
        ("phase", "import", "begin"),
        ("phase", "import", "end"),
    ]
    assert "importing libraries" in files.rank_log(1).read_text()
    bars = [rank for rank in range(2) if b"\r" in files.rank_log(rank).read_bytes()]
    assert not bars, "the libraries draw progress bars into a log, while they load and sample"
    log = EventLog(files.events).read_all()
    assert log.end_reason == "completed"
    assert [step.step for step in log.steps] == list(range(1, 13))
    assert not (files.root / ".meeting").exists()


def stock_picture(pipeline: Any, facts: dict[str, Any]) -> np.ndarray[Any, Any]:
    """What a stock pipeline makes of a sample's sidecar; pixels as in its PNG."""
    import torch

    pipeline.set_progress_bar_config(disable=True)
    width, height = facts["size"]
    picture = pipeline(
        facts["prompt"],
        width=width,
        height=height,
        num_inference_steps=facts["steps"],
        guidance_scale=facts["guidance"],
        max_sequence_length=16,
        generator=torch.Generator("cpu").manual_seed(facts["seed"]),
    ).images[0]
    return np.asarray(picture, dtype=int)


def last_sample(run: Run, number: int) -> tuple[np.ndarray[Any, Any], dict[str, Any]]:
    """A sample of a run's last step, and its sidecar."""
    newest = max(run.files.samples.iterdir(), key=lambda path: int(path.name.split("-")[1]))
    facts = json.loads((newest / f"{number:02}.json").read_text())
    with Image.open(newest / f"{number:02}.png") as picture:
        return np.asarray(picture, dtype=int), facts


def test_a_stock_pipeline_with_the_exported_lora_makes_the_runs_last_samples(
    straight: Run, toy: Path
) -> None:
    from diffusers import FluxPipeline

    pipeline = FluxPipeline.from_pretrained(toy / "model")
    sampled, facts = last_sample(straight, 2)
    assert np.abs(stock_picture(pipeline, facts) - sampled).max() > 10, "it was trained"
    pipeline.load_lora_weights(straight.files.export)
    for number in range(3):
        sampled, facts = last_sample(straight, number)
        assert np.abs(stock_picture(pipeline, facts) - sampled).max() <= 1


@pytest.fixture(scope="module")
def full(bench: Bench) -> Run:
    """Full training as an old configuration asks for it, with much that FSDP2 can do."""
    return bench.run(
        name="full",
        model_type="full",
        max_train_steps=4,
        strategy="auto",
        fsdp_enable=True,
        fsdp_version=1,
        fsdp_activation_checkpointing=True,
        fsdp_cpu_offload=True,
        fsdp_forward_prefetch=True,
        use_ema=True,
        validation_prompts=["a red circle"],
        validation_num_inference_steps=1,
    )


@pytest.mark.slow
def test_a_full_export_is_a_pipeline_that_makes_the_runs_last_sample(full: Run, toy: Path) -> None:
    from diffusers import FluxPipeline

    sampled, facts = last_sample(full, 0)
    pipeline = FluxPipeline.from_pretrained(full.files.export)
    assert np.abs(stock_picture(pipeline, facts) - sampled).max() <= 1
    before = FluxPipeline.from_pretrained(toy / "model")
    assert np.abs(stock_picture(before, facts) - sampled).max() > 10, "it was trained"


@pytest.mark.slow
def test_the_memory_of_each_phase_is_recorded_for_every_rank(full: Run, straight: Run) -> None:
    phases = {
        "encode",
        "latents",
        "load",
        "forward",
        "backward",
        "step",
        "sample",
        "save",
        "export",
    }
    for run in (full, straight):
        report = read_report(run.files)
        assert set(report.peaks) == phases
        assert report.measure == "rss"
        for numbers in report.peaks.values():
            assert len(numbers) == 2
            assert all(50 << 20 < number < 8 << 30 for number in numbers)


@pytest.mark.slow
def test_what_ran_and_why_is_told(bench: Bench, full: Run) -> None:
    facts = bench.show(full.job)
    assert (facts["strategy"], facts["strategy_reason"]) == ("fsdp2", "fsdp_enable is on")
    assert facts["sharding"]["units"]["FluxTransformerBlock"] == 1
    assert any("FSDP v1 is deprecated" in text for text in facts["warnings"])
    shown = bench.cli("show", str(full.job)).stdout
    assert "strategy     fsdp2: fsdp_enable is on" in shown
    assert "memory       encode" in shown
    assert "warning      fsdp_version: FSDP v1 is deprecated" in shown
    log = full.files.rank_log(1).read_text()
    assert "rank 1 of 2 on cpu; fsdp2: fsdp_enable is on" in log


@pytest.mark.slow
def test_a_job_on_a_store_trains_as_on_a_folder_and_keeps_its_data(
    bench: Bench, straight: Run, toy: Path
) -> None:
    """The store's data changes, and is fetched again, before the job is resumed."""
    with serve_objects() as store:
        files = {f"shapes/{path.name}": path.read_bytes() for path in (toy / "data").iterdir()}
        store.objects, url = dict(files), f"{store.url}/shapes"
        more = {"name": "remote", "dataset": url, "train_batch_size": 2}
        job_file = bench.job_file(max_train_steps=3, **more)
        done = bench.cli("submit", str(job_file), "--fetch")
        assert done.returncode == 0, done.stderr
        job = int(done.stdout)
        facts = bench.wait(job, "completed", "failed")
        assert facts["state"] == "completed", facts["reason"]
        caption = next(key for key in files if key.endswith(".txt"))
        store.objects[caption] = b"something else"
        done = bench.cli("fetch", url)
        assert f"1 changed ({Path(caption).name})" in done.stderr, done
    assert bench.cli("resume", str(job), "--max_train_steps=6").returncode == 0
    facts = bench.wait(job, "completed", "failed")
    assert facts["state"] == "completed", facts["reason"]
    run = Run(job, RunDir(Path(facts["run_dir"])))
    assert run.losses == straight.losses[:6], "bit for bit"
    assert yaml.safe_load(run.files.job_file.read_text())["dataset"] == url
    assert "has changed" not in run.files.events.read_text()


def test_stop_saves_within_a_step_and_resume_equals_never_stopping(
    bench: Bench, straight: Run
) -> None:
    """All of its processes are hung up on meanwhile, which none of them notices.

    Elastic would end the ranks: its launcher has a handler of its own for SIGHUP.
    """
    job = bench.submit(name="halves", max_train_steps=12, train_batch_size=2)
    files = bench.store.get(job).run_dir
    trains = has_done_more_than(0)
    held = HeldRanks(bench.store, lambda run_dir: run_dir == files and trains(run_dir), PATIENCE)
    bench.until(held.are_suspended)
    supervisor = bench.store.get(job).supervisor
    assert supervisor is not None
    for process in (supervisor, *with_run_id(bench.store.get(job).run_id)):
        process.signal(signal.SIGHUP)
    service.stop(bench.store, job)  # as `fsdp-tui stop` does, which takes seconds to begin
    bench.until((files.control / "stop").exists)
    held.let_go()
    facts = bench.wait(job, "stopped", "completed")
    assert facts["state"] == "stopped"
    stopped_at = facts["checkpoints"][-1]
    assert facts["step"] == stopped_at
    asked = next(c.t for c in bench.store.history(job) if c.after is State.STOPPING)
    steps = EventLog(bench.store.get(job).run_dir.events).read_all().steps
    after = [step.step for step in steps if step.t > asked]
    assert len(after) <= 2, "one step that was under way, one that began meanwhile"
    assert not bench.processes(job)

    assert bench.cli("resume", str(job)).returncode == 0
    facts = bench.wait(job, "completed", "failed")
    assert facts["state"] == "completed"
    resumed = Run(job, RunDir(Path(facts["run_dir"])))
    steps = [s.step for s in EventLog(resumed.files.events).read_all().steps]
    assert steps == list(range(1, 13)), "the next step follows, none is missing or twice"
    assert resumed.losses == straight.losses, "bit for bit"


@pytest.mark.slow
def test_a_killed_rank_costs_steps_and_changes_nothing(bench: Bench, straight: Run) -> None:
    job = bench.submit(
        name="shot", max_restarts=1, max_train_steps=12, train_batch_size=2, checkpointing_steps=4
    )
    files = bench.store.get(job).run_dir
    held = HeldRanks(
        bench.store,
        lambda run_dir: run_dir == files and run_dir.latest_checkpoint() is not None,
        PATIENCE,
    )
    bench.until(held.are_suspended)
    rank = next(status for status in files.rank_statuses() if status.rank == 1)
    assert rank.step < 12, "too late"
    os.kill(rank.pid, signal.SIGKILL)
    held.let_go()

    facts = bench.wait(job, "completed", "stopped", "failed", "lost")
    assert facts["state"] == "completed", facts["reason"]
    reasons = [change.reason for change in bench.store.history(job)]
    assert any(r.startswith("restart 1 of 1 after: rank 1 was killed by SIGKILL") for r in reasons)
    starts = [
        record["step"]
        for line in files.events.read_text().splitlines()
        if (record := json.loads(line))["kind"] == "start"
    ]
    assert starts[0] == 0
    assert starts[1:] in ([4], [8]), "it went on after a checkpoint"
    shot = Run(job, RunDir(files.root))
    assert shot.losses == straight.losses, "bit for bit"
    assert shot.norms == straight.norms, "bit for bit"
    assert not bench.processes(job)


@pytest.mark.slow
def test_the_processes_of_a_run_and_what_becomes_of_it_without_some(tree: Bench) -> None:
    bench = tree
    job = bench.submit(name="family", max_train_steps=5000)
    bench.wait_for_step(job, 1)
    supervisor = bench.store.get(job).supervisor
    assert supervisor is not None
    launcher = psutil.Process(supervisor.pid).children()
    assert len(launcher) == 1
    assert "launch" in launcher[0].cmdline()
    ranks = launcher[0].children()
    assert [r.cmdline()[-3:] for r in ranks] == [
        ["-m", "engine", str(bench.store.get(job).run_dir.root)]
    ] * 2
    assert os.getsid(supervisor.pid) == supervisor.pid, "no terminal's hang-up reaches it"

    assert supervisor.signal(signal.SIGKILL)
    bench.cli("list")
    seen = EventLog(bench.store.get(job).run_dir.events).read_all().steps[-1].step
    bench.wait_for_step(job, seen + 2)
    bench.until(lambda: bench.store.get(job).supervisor not in (None, supervisor))
    assert [rank.is_running() for rank in ranks] == [True, True], "replaced, and adopted"

    ranks[1].kill()
    facts = bench.wait(job, "failed", "completed", "stopped")
    assert facts["state"] == "failed"
    assert facts["reason"].startswith("rank 1 was killed by SIGKILL")
    assert not bench.processes(job)
