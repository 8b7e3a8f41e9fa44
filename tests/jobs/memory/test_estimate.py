"""Whether a job fits: the server, the cache, the verdicts, the ladder, the command line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.backends.slurm.commands import Partition, cards_of
from jobs.errors import SpecError
from jobs.machine.child import start_child
from jobs.machine.engine_tools import Cancelled, ToolError
from jobs.machine.gpu import Gpu, GpuProcess
from jobs.machine.procfs import started_at
from jobs.memory import question
from jobs.memory.calibration import Calibration, keep, read_calibration, record_beside
from jobs.memory.calibration import read as read_prediction
from jobs.memory.cards import CARDS as KNOWN
from jobs.memory.estimate import Estimate, Place, place_of
from jobs.memory.fit import (
    CARDS,
    Candidate,
    Fit,
    Room,
    Verdict,
    candidates,
    fastest,
    fewest,
    room_of,
    room_of_type,
)
from jobs.memory.ladder import LADDER, alternatives, climb, loosen
from jobs.memory.network import across
from jobs.memory.predicted import Predicted
from jobs.memory.question import Refused, Server, arranged
from jobs.memory.question import predict as ask
from jobs.memory.seconds import seconds_of
from jobs.models.model_config import find_target
from jobs.models.model_files import check_config
from jobs.run.rundir import RankStatus, RunDir
from jobs.spec.families import FAMILIES
from jobs.spec.file.load import load_spec
from jobs.spec.job_spec import JobSpec
from jobs.spec.rules.conflicts import find_conflicts
from jobs.spec.rules.steps import accumulation_steps
from jobs.spec.rules.strategy import chosen_strategy
from tests.support.jobs.fake_memory import GIB, answer, predict
from tests.support.paths import FAKE_MEMORY
from tests.support.waiting import PATIENCE, eventually
from tui.cli.prepare import estimate as estimate_command
from tui.cli.prepare.estimate import DOES_NOT_FIT, estimate_job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

COMMAND = (sys.executable, "-S", str(FAKE_MEMORY))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """What the server was asked, a line each."""
    return tmp_path / "asked.jsonl"


@pytest.fixture
def server(home: Path, log: Path) -> Iterator[Server]:
    one = Server([*COMMAND, str(log)], patience=PATIENCE)
    yield one
    one.close()


def asked(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def job(**values: Any) -> JobSpec:
    usual = {"pretrained_model_name_or_path": "black-forest-labs/FLUX.1-dev", "dataset": "."}
    return JobSpec.model_validate(usual | values)


def fake(spec: JobSpec) -> Predicted:
    """What the fake server would say, without asking it."""
    return Predicted.of(predict(spec.to_dict(), spec.num_processes or 1, spec.strategy))


# -- the server ----------------------------------------------------------------------------


@pytest.mark.parametrize(("flavour", "images"), [("edit", 1), ("layered", 4)])
def test_without_a_dataset_samples_have_the_images_that_a_model_needs(
    server: Server, log: Path, flavour: str, images: int
) -> None:
    spec = job(model_family="qwen_image", model_flavour=flavour, dataset=None)
    spec = spec.model_copy(update={"pretrained_model_name_or_path": None})
    assert isinstance(ask(spec, server, strategy="single", ranks=1), Predicted)
    (entry,) = asked(log)[-1]["job"]["datasets"]
    assert len(entry["conditioning_suffix"]) == images


def test_one_process_answers_all_questions_and_ends_when_it_is_closed(
    server: Server, log: Path
) -> None:
    for ranks in (2, 4, 8):
        found = ask(job(), server, strategy="fsdp2", ranks=ranks)
        assert isinstance(found, Predicted)
        assert (found.strategy, found.ranks) == ("fsdp2", ranks)
    assert len({one["pid"] for one in asked(log)}) == 1
    assert (pid := server.pid) is not None
    assert os.getpriority(os.PRIO_PROCESS, pid) >= 10
    server.close()
    assert started_at(pid) is None
    with pytest.raises(ToolError, match="closing"):
        ask(job(), server, strategy="fsdp2", ranks=16)


def test_it_ends_with_whoever_started_it_however_that_ends() -> None:
    code = (
        "import os, signal, sys; from jobs.memory.question import Server\n"
        f"server = Server({list(COMMAND)!r}); server._running(); print(server.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    said, _ = killed.communicate(timeout=PATIENCE)
    pid = int(said)
    # It reads the end of its input as soon as it is scheduled; nothing else ends it.
    ended = threading.Event()
    for _ in range(1200):
        if started_at(pid) is None:
            break
        ended.wait(0.05)
    assert started_at(pid) is None


def test_a_process_that_is_just_being_started_is_ended_too(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a supervisor that ends in that moment leaves it behind for minutes."""
    server, started, go_on = Server(COMMAND), threading.Event(), threading.Event()
    children: list[subprocess.Popen[bytes]] = []

    def slowly(*words: Any, **more: Any) -> subprocess.Popen[bytes]:
        children.append(child := start_child(*words, **more))
        started.set()
        go_on.wait(PATIENCE)
        return child

    monkeypatch.setattr("jobs.memory.question.start_child", slowly)
    threads = [threading.Thread(target=one) for one in (server._running, server.close)]
    threads[0].start()
    started.wait(PATIENCE)
    threads[1].start()
    eventually(lambda: server._closed)
    go_on.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert children[0].poll() is not None
    assert server.pid is None


def test_a_dead_server_is_replaced_and_one_that_dies_twice_is_told(
    server: Server, log: Path
) -> None:
    ask(job(), server, strategy="single")
    first = server.pid
    assert first is not None
    os.kill(first, 9)
    assert isinstance(ask(job(), server, strategy="fsdp2", ranks=2), Predicted)
    assert server.pid not in (None, first)
    with pytest.raises(ToolError, match="out of luck"):
        server.ask({"job": {"name": "crash"}, "ranks": [1], "strategies": ["single"]})
    assert [one["job"]["name"] for one in asked(log)][-2:] == ["crash", "crash"]
    assert isinstance(ask(job(), server, strategy="fsdp2", ranks=4), Predicted)


def test_the_answer_to_a_question_that_was_given_up_is_dropped(home: Path, tmp_path: Path) -> None:
    gate, begun = tmp_path / "gate", tmp_path / "begun"
    os.mkfifo(gate)
    code = (
        "import json, sys\n"
        "for line in sys.stdin:\n"
        "    asked = json.loads(line)\n"
        f"    if asked['n'] == 1: open({str(begun)!r}, 'w').close(); open({str(gate)!r}).read()\n"
        "    answer = {'id': asked['id'], 'n': asked['n']}\n"
        "    print('no JSON'); print(json.dumps(answer), flush=True)\n"
    )
    server = Server([sys.executable, "-c", code], patience=PATIENCE)
    with pytest.raises(Cancelled):
        server.ask({"n": 1}, begun.exists)
    gate.write_text("go on")
    assert server.ask({"n": 2}) == {"n": 2}
    server.close()


def test_a_question_that_nobody_waits_for_any_more_is_never_sent(server: Server, log: Path) -> None:
    with server._request_lock, pytest.raises(Cancelled):
        server.ask({"job": {"name": "x"}, "ranks": [1], "strategies": ["single"]}, lambda: True)
    assert asked(log) == []


def test_a_server_that_hangs_is_ended_after_a_while(home: Path) -> None:
    server = Server(COMMAND, patience=0.3)
    with pytest.raises(ToolError, match="timed out"):
        server.ask({"job": {"name": "hang"}, "ranks": [1], "strategies": ["single"]})
    assert server.pid is None
    server.close()


def test_what_it_refuses_is_one_sentence_with_a_hint(server: Server) -> None:
    with pytest.raises(SpecError, match="no such model; name another"):
        ask(job(name="refuse"), server, strategy="single")


# -- the cache -----------------------------------------------------------------------------


def test_what_was_predicted_is_not_asked_again_and_other_values_are(
    server: Server, log: Path
) -> None:
    def count(**values: Any) -> int:
        ask(job(**values), server, strategy="fsdp2", ranks=2)
        return len(asked(log))

    assert [count(), count(), count(name="other", learning_rate=3e-4, seed=7)] == [1, 1, 1]
    assert count(resolution=512) == 2
    assert count(gradient_checkpointing=True) == 3
    for path in question.cache_folder().glob("*.json"):
        path.write_text("{")  # cut off
    assert count() == 4


def test_another_engine_or_another_config_makes_another_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = {question.key_of(job(), {"num_layers": count}) for count in (1, 2)}
    monkeypatch.setattr(question, "engine_version", lambda: "another")
    assert len(keys | {question.key_of(job(), {"num_layers": 1})}) == 3


def test_a_prediction_is_asked_for_again_where_other_checkpoints_are_written() -> None:
    def key(**changes: Any) -> str:
        return question.key_of(job(**changes), {"num_layers": 1})

    assert key(max_train_steps=400) == key(max_train_steps=500)
    assert key(max_train_steps=400) != key(max_train_steps=501)
    epochs: dict[str, Any] = {"max_train_steps": None, "checkpointing_steps": "1 epoch"}
    assert key(num_train_epochs=2, **epochs) != key(num_train_epochs=3, **epochs)


def test_a_model_that_scores_samples_makes_another_key_once_it_is_here(tmp_path: Path) -> None:
    clip = tmp_path / "clip"
    scored = {"validation_prompts": ["a"], "validation_clip_model": str(clip)}

    def key(**changes: Any) -> str:
        return question.key_of(job(**scored | changes), {"num_layers": 1})

    scores = {"validation_scores": ["clip_t"]}
    keys = {key(), key(**scores)}
    clip.mkdir()
    for width in (1, 2):
        (clip / "config.json").write_text(f'{{"model_type": "clip", "width": {width}}}')
        keys |= {key(), key(**scores)}
    assert len(keys) == 4, "without scores it is all the same"


def test_a_cache_keeps_only_the_newest(home: Path) -> None:
    for number in range(5):
        question.remember(f"{number}", fake(job(strategy="single", num_processes=1)))
        os.utime(question.cache_folder() / f"{number}.json", (number, number))
    question.forget_old(most=2)
    assert sorted(path.stem for path in question.cache_folder().iterdir()) == ["3", "4"]


# -- fits ----------------------------------------------------------------------------------


@given(
    low=st.integers(0, 200),
    more=st.integers(0, 100),
    total=st.integers(1, 200),
    held=st.integers(0, 200),
)
def test_verdicts(low: int, more: int, total: int, held: int) -> None:
    fit = Fit(low, low + more, Room("GPU 0", total, held))
    free = max(0, total - held)
    assert (fit.verdict is Verdict.FITS) == (low + more <= free) == (fit.spare >= 0)
    assert (fit.verdict is Verdict.TOO_LARGE) == (low > free)


@pytest.mark.parametrize(
    ("uses", "claims", "shares", "held", "passing"),
    [
        ({}, {}, False, 3, 0),  # a desktop, which is not waited for
        ({"user": "ann", "kind": "compute", "memory": 3 * GIB}, {}, False, 0, 3),
        ({"user": "ann", "kind": "compute", "memory": 3 * GIB}, {}, True, 3, 0),
        ({"kind": "compute", "memory": 3 * GIB}, {"GPU-a": 1}, True, 0, 0),  # our other job's
        (
            {"kind": "compute", "memory": 3 * GIB, "command": "python x.py"},
            {"GPU-a": 1},
            True,
            3,
            0,
        ),
    ],
)
def test_what_is_waited_for_is_not_held(
    uses: dict[str, Any], claims: dict[str, int], shares: bool, held: int, passing: int
) -> None:
    kind = {"kind": "graphics", "memory": GIB // 2} | uses
    gpu = Gpu(0, "GPU-a", "H100", 80 * GIB, 3 * GIB, processes=(GpuProcess(7, **kind),))
    room = room_of(gpu, (), claims, shares=shares)
    assert (room.held, room.passing, room.free) == (held * GIB, passing * GIB, (80 - held) * GIB)
    if not shares:
        assert room == room_of(gpu, (), claims)
    unknown = room_of(replace(gpu, memory_used=None), (), {})
    assert unknown.free == 80 * GIB, "a driver that does not say how much is used"


def test_any_gpus_means_the_roomiest_and_chosen_ones_mean_all_of_them() -> None:
    gpus = [Gpu(n, f"GPU-{n}", "x", 80 * GIB, n * 20 * GIB) for n in range(4)]
    spec = job(num_processes=2, strategy="fsdp2", share_gpus=True, resolution=512)
    free = place_of(spec, gpus)
    assert free.fit(fake(spec)).room.name == "GPU 1"
    chosen = place_of(spec.model_copy(update={"gpus": [0, 3]}), gpus)
    assert chosen.fit(fake(spec)).room.name == "GPU 3"
    assert place_of(spec, [], imagine=False).on_gpus is False
    assert place_of(spec, []).rooms == (CARDS[80],)


def test_any_gpu_means_one_that_is_free_before_one_that_others_use() -> None:
    # The first one is in use by processes that nobody can see.
    gpus = [Gpu(n, f"GPU-{n}", "x", 80 * GIB, used) for n, used in enumerate((60 * GIB, 0, 0))]
    spec = job(num_processes=2, strategy="fsdp2", resolution=512)
    assert place_of(spec, gpus).fit(fake(spec)).room.passing == 0
    waits = place_of(spec, gpus[:2]).fit(fake(spec)).room
    assert (waits.name, waits.passing) == ("GPU 0", 60 * GIB)


# -- strategies ----------------------------------------------------------------------------


def fit(low: int, high: int) -> Fit:
    return Fit(low, high, Room("GPU 0", 80))


@pytest.mark.parametrize(
    ("needs", "best"),
    [
        ({"ddp": (60, 70), "hsdp": (30, 40), "fsdp2": (20, 30)}, "ddp"),
        ({"ddp": (70, 90), "hsdp": (60, 75), "fsdp2": (20, 30)}, "hsdp"),
        ({"ddp": (90, 99), "hsdp": (75, 85), "fsdp2": (20, 30)}, "fsdp2"),
        ({"ddp": (90, 99), "hsdp": (75, 85), "fsdp2": (78, 82)}, "hsdp"),  # none for sure
        ({"ddp": (90, 99), "fsdp2": (81, 82)}, None),
        ({"ddp": None, "fsdp2": (10, 20)}, "fsdp2"),
    ],
)
def test_the_fastest_strategy_that_fits(
    needs: dict[str, tuple[int, int] | None], best: str | None
) -> None:
    found = [Candidate(name, fit(*band) if band else None) for name, band in needs.items()]
    chosen = fastest(found[::-1])
    assert (chosen.strategy if chosen else None) == best


@pytest.mark.parametrize(
    ("values", "ranks", "able"),
    [
        ({}, 1, ("single",)),
        ({}, 2, ("ddp", "fsdp2")),
        ({}, 8, ("ddp", "hsdp", "fsdp2")),
        ({"lora_placement": "sharded"}, 8, ("hsdp", "fsdp2")),
        ({"fsdp_cpu_offload": True}, 2, ("fsdp2",)),
        ({}, 3, ("ddp", "fsdp2")),
        ({"dp_replicate_size": 3}, 6, ("ddp", "hsdp", "fsdp2")),
        ({"dp_replicate_size": 4}, 6, ("ddp", "fsdp2")),
        ({"context_parallel_size": 2}, 8, ("hsdp", "fsdp2")),
        ({"context_parallel_size": 4}, 4, ("fsdp2",)),
        ({"swap_blocks": 4}, 8, ("ddp",)),
    ],
)
def test_what_a_job_could_run_with(
    values: dict[str, Any], ranks: int, able: tuple[str, ...]
) -> None:
    assert candidates(job(**values), ranks) == able


@given(least=st.integers(1, 1500), group=st.integers(1, 16))
def test_the_fewest_ranks_are_found_with_few_questions(least: int, group: int) -> None:
    tried: list[int] = []

    def fits(ranks: int) -> bool:
        tried.append(ranks)
        return ranks >= least

    found = fewest(fits, group)
    expected = -(-least // group) * group
    assert found == expected or (found is None and expected > 512)
    assert all(ranks % group == 0 and ranks <= 1024 for ranks in tried)
    assert len(tried) <= 21


# -- the ladder ----------------------------------------------------------------------------


def too_large(**values: Any) -> JobSpec:
    usual = {"num_processes": 4, "strategy": "fsdp2", "device": "cuda"}
    return job(**(usual | values))


def steps(spec: JobSpec, gib: float = 0.001) -> list[Any]:
    return list(climb(spec, fits_in(gib), enough=fits_surely))


def fits_in(gib: float) -> Callable[[JobSpec], Fit]:
    room = Room("GPU 0", int(gib * GIB))
    return lambda spec: Fit(*fake(spec).device, room)


def fits_surely(fit: Fit) -> bool:
    return fit.verdict is Verdict.FITS


@pytest.mark.parametrize(("share", "alone"), [(0.9, True), (0.35, False)])
def test_alternatives_fit_each_alone_or_all_together(share: float, alone: bool) -> None:
    spec = too_large(train_batch_size=8, model_type="full", mixed_precision="no", strategy="ddp")
    needed = fits_in(1)(spec).high
    found = list(
        alternatives(spec, fits_in(1), enough=lambda _, after: after.high <= share * needed)
    )
    assert len(found) > 1 if alone else len(found) == 1
    for step in found:
        again = JobSpec.model_validate(spec.to_dict() | step.changes)
        assert step.before.high == needed
        assert step.after.high == fits_in(1)(again).high <= share * needed
    assert not list(alternatives(spec, fits_in(1), enough=lambda *_: False))


def test_every_step_helps_each_begins_where_the_last_ended_and_the_order_is_by_cost() -> None:
    spec = too_large(train_batch_size=8, model_type="full", mixed_precision="no", strategy="ddp")
    found = steps(spec)
    for before, after in pairwise(found):
        assert after.before == before.after
    assert all(step.after.high < step.before.high for step in found)
    titles = [step.rung.title for step in found]
    order = [rung.title for rung in LADDER]
    assert titles == sorted(titles, key=order.index)
    assert titles[0] == "activation checkpointing"
    assert titles[-1] == "lower resolution"
    assert {"8-bit AdamW", "shard over all ranks", "compute in bf16"} <= set(titles)
    last = found[-1].spec
    assert last.train_batch_size * last.gradient_accumulation_steps == 8


def test_it_ends_as_soon_as_it_fits_and_says_nothing_where_it_does_anyway() -> None:
    spec = too_large(gradient_checkpointing=True, train_batch_size=6)
    (step,) = steps(spec, gib=24)
    assert step.changes == {"train_batch_size": 3, "gradient_accumulation_steps": 2}
    assert "same global batch" in step.cost
    assert steps(spec, gib=80) == []


@pytest.mark.parametrize(
    ("gib", "interval", "cost"), [(60, 4, "7 %"), (45, 2, "15 %"), (20, 1, "30 %")]
)
def test_no_more_blocks_are_recomputed_than_is_needed(gib: int, interval: int, cost: str) -> None:
    (step,) = steps(too_large(train_batch_size=2), gib=gib)
    assert step.spec.gradient_checkpointing
    assert step.spec.gradient_checkpointing_interval == interval
    assert step.cost == f"an estimated {cost} slower"


@pytest.mark.parametrize(
    ("gib", "changes"),
    [
        (10, None),
        (20, None),
        (45, {"gradient_checkpointing_interval": 2}),
        (60, {"gradient_checkpointing_interval": 4}),
        (80, {"gradient_checkpointing": False}),
    ],
)
def test_a_job_that_recomputes_more_than_it_must_is_told(
    gib: int, changes: dict[str, Any] | None
) -> None:
    spec = too_large(train_batch_size=2, gradient_checkpointing=True)
    found = loosen(spec, fits_in(gib), enough=fits_surely)
    assert (found and found.changes) == changes
    assert found is None or found.cost == "faster"


def test_what_saves_next_to_nothing_is_left_out() -> None:
    """Of an adapter the optimizer's state is 60 MB beside 13 GiB."""
    first, *_ = steps(too_large(strategy="ddp", gradient_checkpointing=True))
    assert first.rung.title == "shard over all ranks"


def test_what_does_not_apply_is_left_out() -> None:
    titles = {step.rung.title for step in steps(too_large(strategy="single", num_processes=1))}
    assert not titles & {"sharded LoRA", "shard over all ranks", "offload to host memory"}
    titles = {step.rung.title for step in steps(too_large(optimizer="adafactor"))}
    assert "8-bit AdamW" not in titles


@settings(max_examples=20)
@given(
    batch=st.sampled_from([1, 2, 3, 6, 7]),
    accumulation=st.sampled_from([1, 3]),
    model_type=st.sampled_from(["lora", "full"]),
    precision=st.sampled_from(["no", "bf16"]),
    strategy=st.sampled_from(["ddp", "fsdp2"]),
    reshard=st.sampled_from([True, False, 2]),
    checkpointing=st.booleans(),
)
def test_any_job_climbs_to_an_end_with_the_same_global_batch(
    batch: int,
    accumulation: int,
    model_type: str,
    precision: str,
    strategy: str,
    reshard: bool | int,
    checkpointing: bool,
) -> None:
    spec = too_large(
        train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        model_type=model_type,
        mixed_precision=precision,
        strategy=strategy,
        fsdp_reshard_after_forward=reshard,
        gradient_checkpointing=checkpointing,
    )
    found = steps(spec)
    assert found
    last = found[-1].spec
    assert last.train_batch_size * last.gradient_accumulation_steps == batch * accumulation
    assert len(found) < 20


@pytest.mark.parametrize("ranks", range(1, 17))
@pytest.mark.parametrize("split", [1, 2])
def test_a_global_batch_is_no_reason_to_predict_nothing(ranks: int, split: int) -> None:
    """On ranks that do not divide it, which a job would be refused on, they accumulate alike."""
    spec = job(global_batch_size=8, num_processes=2 * split, context_parallel_size=split)
    there = arranged(spec, "fsdp2" if ranks > 1 else "single", ranks, on_gpus=True)
    assert not [
        c
        for c in find_conflicts(there)
        if c.key in ("global_batch_size", "gradient_accumulation_steps")
    ]
    groups = max(1, ranks // there.context_parallel_size)
    assert accumulation_steps(there) == -(-8 // groups)
    assert (there.global_batch_size == 8) is (8 % groups == 0)


def test_a_job_is_arranged_for_a_strategy_without_what_only_another_has() -> None:
    spec = job(
        num_processes=8,
        strategy="hsdp",
        dp_replicate_size=2,
        lora_placement="sharded",
        fsdp_reshard_after_forward=4,
    )
    ddp = arranged(spec, "ddp", 6, on_gpus=True)
    assert (ddp.strategy, ddp.num_processes, ddp.gpus) == ("ddp", 6, None)
    assert (ddp.dp_replicate_size, ddp.lora_placement) == (None, "replicated")
    assert ddp.fsdp_reshard_after_forward is True
    assert arranged(job(), "hsdp", 8, on_gpus=True).dp_replicate_size == 2
    assert arranged(job(), "single", 1, on_gpus=False).device == "cpu"


# -- an estimate ---------------------------------------------------------------------------


def test_auto_comes_to_the_fastest_that_fits(server: Server) -> None:
    spec = job(num_processes=4, strategy="auto", gradient_checkpointing=True)
    place = Place(True, (CARDS[48],), here=False)
    assert Estimate(spec, place, server, Calibration()).strategy == "ddp"
    full = spec.model_copy(update={"model_type": "full"})
    assert Estimate(full, place, server, Calibration()).strategy == "fsdp2"
    assert Estimate(full, place, server, Calibration()).advised == "hsdp"
    named = spec.model_copy(update={"strategy": "fsdp2"})
    assert Estimate(named, place, server, Calibration()).strategy == "fsdp2"
    assert Estimate(named, place, server, Calibration()).advised == "ddp"


def test_auto_is_told_as_the_launch_will_decide(server: Server) -> None:
    """What may fit is not risked, and ranks on the CPU shard, whatever fits."""
    spec = job(num_processes=4, strategy="auto", gradient_checkpointing=True)
    ddp = Estimate(spec, Place(True, (CARDS[80],)), server, Calibration()).predict("ddp", 4)
    assert isinstance(ddp, Predicted)
    low, high = ddp.device
    assert low < high
    tight = Place(True, (Room("GPU 0", (low + high) // 2),), here=False)
    assert Estimate(spec, tight, server, Calibration()).candidate("ddp", 4).fit is not None
    assert Estimate(spec, tight, server, Calibration()).strategy == "fsdp2"
    cpu = spec.model_copy(update={"device": "cpu"})
    host = Place(False, (Room("host memory", 4000 * GIB),))
    told = Estimate(cpu, host, server, Calibration()).strategy
    assert told == chosen_strategy(cpu)[0] == "fsdp2"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_on_gpus_of_several_sizes_each_swaps_what_does_not_fit(
    strategy: str, server: Server
) -> None:
    """As few blocks as are enough there, and each rank is held against its own GPU."""
    sizes = {"10GB": 10, "12GB": 12, "24GB": 24}
    rooms = [Room(size, gib * GIB, gpu=n) for n, (size, gib) in enumerate(sizes.items())]
    place = Place(True, (*rooms, replace(rooms[1], held=GIB)), chosen=True)
    spec = job(
        num_processes=4,
        strategy=strategy,
        mixed_precision="bf16",
        gradient_checkpointing=True,
        train_batch_size=2,
        resolution=768,
    )

    def asked(**changes: Any) -> Estimate:
        return Estimate(job(**spec.to_dict() | changes), place, server, Calibration())

    step = asked().remedy()
    assert step is not None
    swapped = step.changes["swap_blocks"]
    assert [*swapped] == ["10GB", "12GB"]
    assert step.before.room == step.after.room
    changed = asked(**step.changes)
    own = changed.own
    assert isinstance(own, Predicted)
    each = changed.each(own)
    assert [fit.room.name for fit in each] == ["10GB", "12GB", "12GB", "24GB"]
    assert all(fit.verdict is Verdict.FITS for fit in each)
    assert changed.remedy() is None
    for size, count in swapped.items():
        other = asked(strategy="ddp", swap_blocks=swapped | {size: count - 4}).own
        assert isinstance(other, Predicted)
        short = {f.room.name for f in changed.each(other) if f.verdict is not Verdict.FITS}
        assert short == {size}
    alone = {n: asked(strategy="ddp", swap_blocks=n).own for n in (0, *swapped.values())}
    machine = {n: one.host["machine"] for n, one in alone.items() if isinstance(one, Predicted)}
    more = sum(machine[count] - machine[0] for count in swapped.values())
    assert own.host["machine"] == machine[0] + more > machine[0]
    recalled = question.recall(changed.spec, "ddp", 4, on_gpus=True)
    assert recalled == own, "as the launch and the run directory have it"
    assert Predicted.of(json.loads(json.dumps(own.values))) == own


def test_setups_for_unlike_gpus_swap_by_their_size(server: Server) -> None:
    spec = job(num_processes=2, mixed_precision="bf16", gradient_checkpointing=True, lora_rank=16)
    spec = spec.model_copy(update={"resolution": 1024, "train_batch_size": 2})
    place = place_of(spec, (), card="4080,4090")
    asked = Estimate(spec, place, server, Calibration())
    ranking = asked.ranking()
    assert not isinstance(ranking, str), ranking
    exact = ranking.exact
    assert exact is not None
    assert exact.changes["strategy"] == "ddp"
    assert [*exact.changes["swap_blocks"]] == ["16GB"]
    assert "(16GB) blocks in host memory" in exact.title
    alone = {
        card: Estimate(spec, place_of(spec, (), card=card), server, Calibration())
        for card in ("4080", "4090")
    }
    counts = {"4080": exact.changes["swap_blocks"]["16GB"], "4090": 0}
    seconds = []
    for card, one in alone.items():
        own = one.predict("ddp", 2, exact.spec.model_copy(update={"swap_blocks": counts[card]}))
        assert isinstance(own, Predicted)
        found = one.seconds(own)
        assert not isinstance(found, str)
        seconds.append(found.middle)
    assert exact.seconds.middle == pytest.approx(max(seconds)), "all wait for the slower one"
    values = spec.to_dict() | {"global_batch_size": 24, "gradient_accumulation_steps": None}
    shared = Estimate(job(**values), place, server, Calibration())
    faster = shared.ranking()
    assert not isinstance(faster, str), faster
    assert faster.exact is not None
    shares = faster.exact.changes["batch_shares"]
    assert 1 < shares["24GB"] / shares["16GB"] < 2.5
    alike = next(setup for setup in faster.setups if setup.changes == exact.changes)
    assert faster.exact.seconds.middle < 0.9 * alike.seconds.middle
    assert faster.exact.fit == alike.fit


def test_a_larger_share_has_as_many_more_passes_and_forwards_of_the_base(server: Server) -> None:
    """With `preservation`, each micro-batch has two passes: ranks share out micro-batches."""
    spec = job(num_processes=2, strategy="ddp", global_batch_size=6)
    shared = spec.model_copy(update={"batch_shares": {"16GB": 1, "24GB": 3}})  # 1 and 5 of 6
    both, one = (
        Estimate(shared, place_of(spec, (), card=card), server, Calibration())
        for card in ("4080,4090", "4090")
    )
    own = both.predict("ddp", 2)
    assert isinstance(own, Predicted)
    base = {"base": own.work["forward"], "base_forwards": 3}
    own = replace(own, work=own.work | base | {"micro_batches": 6})
    found = both.seconds(own)
    assert not isinstance(found, str)
    slowest = replace(own, work=own.work | {"micro_batches": 10, "base_forwards": 5})
    expected = seconds_of(slowest, KNOWN["4090"], found.link)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    # A GPU that stands for those of all ranks computes as much as each.
    assert one.seconds(own) == one.seconds(own, spec)


def test_a_run_is_compared_with_the_rank_that_needs_the_most(
    server: Server, tmp_path: Path
) -> None:
    spec = job(num_processes=2, strategy="ddp", swap_blocks={16: 24, 24: 8}, device="cuda")
    predicted = ask(spec, server, strategy="ddp", ranks=2)
    assert isinstance(predicted, Predicted)
    run_dir = RunDir(tmp_path / "run")
    run_dir.create()
    keep(run_dir, spec, "ddp", 2, on_gpus=True)
    for cards, most in (((16, 24), 24), ((16, 16), 16), ((16, 48), 48)):
        for rank, gib in enumerate(cards):
            facts = (rank, 1, 0.0, "host", "cuda:0", "train", 1, 0.0, 0.0)
            run_dir.rank_file(rank).write_text(RankStatus(*facts, gpu_memory=gib * GIB).to_json())
        found = read_prediction(run_dir)
        assert found is not None
        assert found.peak == predicted.on(most * GIB).peak
    assert predicted.on(16 * GIB).peak < predicted.on(24 * GIB).peak < predicted.peak


def test_a_strategy_that_cannot_run_is_told_and_the_others_are_not_hurt(server: Server) -> None:
    spec = job(num_processes=2, name="whole", gradient_checkpointing=True)
    found = Estimate(spec, Place(True, (CARDS[80],), here=False), server, Calibration())
    assert isinstance(refused := found.predict("fsdp2", 2), Refused)
    assert refused.error == "this model cannot be sharded"
    assert found.advised == "ddp"


class Formula(Server):
    """Answers as `engine.memory` does, by the formula of the fake one."""

    def ask(
        self, request: dict[str, Any], cancelled: Callable[[], bool] = lambda: False
    ) -> dict[str, Any]:
        load_spec(None, request["job"])  # which refuses what cannot run
        return answer({"id": 0} | request)


@pytest.fixture(scope="module")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.mark.usefixtures("_own_cache")
@settings(max_examples=40)
@given(
    ranks=st.integers(2, 16),
    size=st.integers(1, 16),
    strategy=st.sampled_from(["auto", "fsdp2", "hsdp"]),
    replicas=st.sampled_from([None, 2, 4]),
    reshard=st.sampled_from([True, 2, 4, 8]),
    comm=st.sampled_from(["allgather", "alltoall"]),
    recompute=st.booleans(),
    family=st.sampled_from(list(FAMILIES)),
)
def test_any_split_is_predicted_or_refused_as_submit_refuses_it(
    ranks: int,
    size: int,
    strategy: str,
    replicas: int | None,
    reshard: bool | int,
    comm: str,
    recompute: bool,
    family: str,
) -> None:
    values = {
        "name": "a",
        "dataset": ".",
        "model_family": family,
        "pretrained_model_name_or_path": next(iter(FAMILIES[family].flavours.values())).hub_id,
        "num_processes": ranks,
        "strategy": strategy,
        "dp_replicate_size": replicas if strategy == "hsdp" else None,
        "context_parallel_size": size,
        "context_parallel_comm_strategy": comm,
        "fsdp_reshard_after_forward": reshard,
        "fsdp_activation_checkpointing": recompute,
        "device": "cuda",
    }
    try:
        spec = load_spec(None, values)
    except SpecError:
        return  # which both commands say before anything else
    found = Estimate(spec, Place(True, (CARDS[24],), here=False), Formula(), Calibration())
    if isinstance(own := found.own, Refused):
        config = find_target(family, None, spec.pretrained_model_name_or_path).config
        with pytest.raises(SpecError) as refused:
            check_config(spec, config)
        assert (own.error, own.hint) == (refused.value.message, refused.value.hint)
        return
    few = found.fewest(CARDS[141])
    assert few is not None
    assert few % size == 0
    for step in found.steps():
        assert step.spec.num_processes == ranks
        assert (few := found.fewest(CARDS[141], step.spec)) is not None
        assert few % step.spec.context_parallel_size == 0
    for name in candidates(spec, ranks):
        assert isinstance(found.predict(name, ranks), Predicted)


def test_earlier_runs_widen_the_band_upwards(server: Server) -> None:
    spec = job(num_processes=1, gradient_checkpointing=True)
    place = Place(True, (CARDS[24],), here=False)
    plain = Estimate(spec, place, server, Calibration())
    wider = Estimate(spec, place, server, Calibration(3, (1.1, 1.2, 1.3)))
    found = plain.own
    assert isinstance(found, Predicted)
    assert wider.fit(found).high == round(plain.fit(found).high * 1.3)
    assert wider.fit(found).low == plain.fit(found).low


def test_what_a_self_test_found_beside_tensors_takes_the_place_of_what_is_assumed(
    home: Path, server: Server
) -> None:
    spec, place = job(num_processes=2), Place(True, (CARDS[80],), here=False)
    plain = {n: Estimate(spec, place, server, Calibration()).predict("fsdp2", n) for n in (2, 4)}
    assert isinstance(plain[2], Predicted)
    record_beside(2, 3 * 2**30, plain[2])
    more = 3 * 2**30 - sum(plain[2].overheads.values())
    here = read_calibration()
    assert (here.runs, here.factor) == (0, 1.0), "no run of a job"
    for ranks, assumed in plain.items():
        assert isinstance(assumed, Predicted)
        found = Estimate(spec, place, server, here).predict("fsdp2", ranks)
        assert isinstance(found, Predicted)
        assert found.device == tuple(one + more for one in assumed.device)
        assert sum(found.overheads.values()) == sum(assumed.overheads.values()) + more
        assert found.peak == assumed.peak
    alone = Estimate(spec, place, server, Calibration()).predict("single", 1)
    assert isinstance(alone, Predicted)
    assert here.corrected(alone) == alone, "of a single rank nothing was found"


# -- the command line ----------------------------------------------------------------------


@pytest.fixture
def _faked(home: Path, no_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Predict nothing, on a machine whose free memory and disk do not change meanwhile."""
    monkeypatch.setattr(question, "COMMAND", COMMAND)
    memory = SimpleNamespace(total=64 << 30, available=60 << 30)
    monkeypatch.setattr(
        "jobs.memory.estimate.psutil", SimpleNamespace(virtual_memory=lambda: memory)
    )
    monkeypatch.setattr("jobs.memory.estimate._free", lambda path: 200 << 30)


def run(*words: str) -> Any:
    return CliRunner().invoke(estimate_job, words, standalone_mode=False)


FULL = ("--model_family=flux", "--model_type=full", "--num_processes=8")


@pytest.mark.usefixtures("_faked")
def test_a_slurm_job_takes_the_cards_of_its_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    there = (Partition("gpu", default=True, gpus=("nvidia_h100_80gb_hbm3",)),)
    monkeypatch.setattr(estimate_command, "ask_partitions", lambda: there)
    words = (*FULL, "--launcher=slurm", "--gradient_checkpointing=true")
    said = run(*words)
    assert "on nvidia_h100_80gb_hbm3: " in said.output, said.exception
    assert "GPUs of partition gpu: nvidia_h100_80gb_hbm3" in said.output
    assert "partition" not in run(*words, "--card", "24").output


@pytest.mark.parametrize(
    ("name", "mib"),
    [
        ("a100", 40_960),
        ("nvidia_a100-sxm4-80gb", 81_559),
        ("rtx_4090", 24_564),
        ("NVIDIA_GeForce_RTX4090", 24_564),
        ("rtxa6000", 46_068),
        ("1g.10gb", 9_536),
        ("a10", 23_028),
        ("tesla", None),
        ("gpu", None),
    ],
)
def test_the_type_of_a_gpu_says_its_memory(name: str, mib: int | None) -> None:
    room = room_of_type(name)
    assert (room.total >> 20 if room else None) == mib


@pytest.mark.parametrize(
    ("gpus", "noted"),
    [
        (("h100", "a100"), "GPUs of partition gpu: a100, the smallest there"),
        (("",), "the memory of the GPUs in partition gpu is unknown, since they have no type"),
        (("h100", "big"), "the memory of the GPUs in partition gpu is unknown: type big"),
        ((), "Slurm lists no GPUs in partition gpu"),
    ],
)
def test_what_a_partition_does_not_say_is_said(gpus: tuple[str, ...], noted: str) -> None:
    spec = JobSpec(launcher="slurm", slurm_partition="gpu")
    place = place_of(
        spec, [], cards=cards_of(spec, (Partition("gpu", gpus=gpus), Partition("other")))
    )
    known = gpus[-1:] == ("a100",)
    held = "" if known else "; held against GPUs of 80 GB each"
    assert (place.note, place.here) == (f"{noted}{held}", False)


@pytest.mark.usefixtures("_faked")
def test_it_needs_no_files_and_says_how_much_each_rank_needs() -> None:
    said = run(*FULL, "--gradient_checkpointing=true", "--ranks", "2,8")
    assert said.exception is None
    assert said.return_value == 0
    rows = [line.split()[:2] for line in said.output.splitlines()[1:6]]
    assert rows == [["ddp", "2"], ["fsdp2", "2"], ["ddp", "8"], ["hsdp", "8"], ["fsdp2", "8"]]
    assert "this job, ddp on 8 ranks, on 80 GB: fits, 8.1 GiB spare\n" in said.output
    fewest_of_each = "4 × 24 GB, 2 × 48 GB, 1 × 80 GB, 1 × 141 GB"
    words = " ".join(said.output.split())
    assert f"fewest GPUs that are enough: {fewest_of_each} host" in words
    assert not [each for each in said.output.splitlines() if len(each) > 80 and "  " not in each]
    assert "host memory: 16.0 GiB" in said.output


@pytest.mark.usefixtures("_faked")
def test_what_does_not_fit_is_told_with_the_ladder_and_its_own_status() -> None:
    said = run(*FULL, "--train_batch_size=4", "--card", "24", "--json")
    assert said.return_value == DOES_NOT_FIT
    facts = json.loads(said.output)
    assert (facts["status"], facts["strategy"], facts["ranks"]) == (4, "fsdp2", 8)
    assert facts["fit"]["verdict"] == "does not fit"
    assert facts["fastest_that_fits"] is None
    first, *_, last = facts["ladder"]
    assert first["changes"] == {"gradient_checkpointing": True}
    assert last["verdict"] == "fits"
    assert {one["strategy"] for one in facts["predictions"]} == {"ddp", "hsdp", "fsdp2"}
    assert facts["fewest_with_changes"]["24 GB"] <= 8
    said = run(*FULL, "--train_batch_size=4", "--card", "24")
    assert "1. activation checkpointing:" in said.output
    assert "gradient_checkpointing: true" in said.output


@pytest.mark.usefixtures("_faked")
def test_more_recomputation_than_is_needed_is_told() -> None:
    words = (*FULL, "--gradient_checkpointing=true", "--card", "141")
    assert "faster, and still fits\n  1. no activation checkpointing:" in run(*words).output
    facts = json.loads(run(*words, "--json").output)
    assert facts["faster"]["changes"] == {"gradient_checkpointing": False}
    assert facts["ladder"] == []
    assert json.loads(run(*FULL, "--card", "141", "--json").output)["faster"] is None


def test_what_crosses_the_network_between_machines() -> None:
    """FLUX.1 and a LoRA of 65 M parameters on two machines: 24 GB against 0.26 GB."""
    flux = partial(across, weights=24 * 10**9, trained=65 * 10**6, gathers=2, gigabits=100)
    fsdp2, hsdp = flux("fsdp2", 2, full=False), flux("hsdp", 2, full=False)
    assert hsdp.sent == flux("ddp", 2, full=False).sent == 260e6
    assert fsdp2.sent == 24e9 + 260e6
    assert hsdp.seconds == pytest.approx(0.0208)
    least, most = hsdp.speed(1.0)
    assert 1.9 < least < most == 2.0
    assert fsdp2.speed(1.0)[1] == pytest.approx(2 / fsdp2.seconds), "the network decides"
    assert fsdp2.speed(fsdp2.slower_below)[0] == pytest.approx(1.0)
    assert flux("fsdp2", 8, full=False).sent == pytest.approx(fsdp2.sent * 2 * 7 / 8)
    assert flux("fsdp2", 2, full=True).sent == 24e9 + 130e6, "gradients are sharded too"


@pytest.mark.usefixtures("_faked")
def test_when_two_machines_are_slower_than_one() -> None:
    words = (*FULL, "--gradient_checkpointing=true", "--nodes", "1,2", "--network", "10")
    said = run(*words).output
    assert "between machines, at 10 Gbit/s each (simulated)" in said
    assert "slower than one if its step takes less than" in said
    assert (
        "times as many images per second; slower than one machine"
        in run(*words, "--step", "0.1").output
    )
    found = json.loads(run(*words, "--json", "--step", "1000").output)["nodes"]
    assert [(one["nodes"], one["strategy"]) for one in found] == [
        (2, strategy) for strategy in ("ddp", "hsdp", "fsdp2")
    ]
    assert all(1.9 < one["speed"][0] <= one["speed"][1] == 2 for one in found)


@pytest.mark.usefixtures("_faked")
def test_preservation_gathers_weights_two_and_a_half_times_as_often_over_machines() -> None:
    """A step's forward and backward, those of the other pass, and the base's forward."""
    sent = []
    for kept in ("none", "blank"):
        words = (FULL[0], "--num_processes=8", f"--preservation={kept}", "--json", "--nodes", "2")
        ddp, *_, fsdp2 = json.loads(run(*words, "--network", "10").output)["nodes"]
        sent.append(fsdp2["sent"] - ddp["sent"])
    assert sent[1] == pytest.approx(2.5 * sent[0])


@pytest.mark.usefixtures("_faked")
def test_a_job_that_names_no_ranks_is_told_of_on_the_fewest_that_do() -> None:
    words = (*FULL[:2], "--gradient_checkpointing=true", "--card", "24", "--json", "--ranks")
    facts = [json.loads(run(*words, ranks).output) for ranks in ("8,2,4,64", "1,2")]
    assert [one["ranks"] for one in facts] == [4, 2]
    assert [one["status"] for one in facts] == [0, 4]


@pytest.mark.usefixtures("_faked")
@pytest.mark.parametrize(
    ("words", "match"),
    [
        ((*FULL, "--ranks", "2,x"), "expected rank counts"),
        ((*FULL, "--ranks", "0"), "expected rank counts"),
        ((*FULL, "--nodes", "0"), "expected counts of machines"),
        (("--model_family=nothing",), "nothing"),
        ((), "no job given"),
    ],
)
def test_bad_input_is_one_line(words: tuple[str, ...], match: str) -> None:
    said = run(*words)
    assert said.exception is not None
    assert match in str(said.exception.message)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("_faked")
def test_this_machines_gpus_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [Gpu(n, f"GPU-{n}", "RTX 4090", 24 * GIB, 0) for n in range(8)]
    monkeypatch.setattr("jobs.machine.devices.gpus", lambda: gpus)
    said = run(*FULL, "--gradient_checkpointing=true", "--train_batch_size=2")
    assert "on GPU" in said.output.splitlines()[0]
    assert "GPU like GPU 0" in said.output
    assert "fits" in said.output


@pytest.mark.usefixtures("_faked")
def test_a_gpu_can_be_named_for_each_rank() -> None:
    lora = ("--model_family=flux", "--gradient_checkpointing=true", "--mixed_precision=bf16")
    words = (*lora, "--train_batch_size=2", "--card", "16GB,24 gb,24")
    said = run(*words)
    assert said.exit_code == 0, said.output
    assert "this job, fsdp2 on 3 ranks" in said.output
    assert run(*words, "--gpus", "3").output == said.output
    swapping = (*words, "--strategy=ddp", "--swap_blocks={16GB: 32}")
    found = json.loads(run(*swapping, "--json").output)
    assert [(fit["on"], fit["verdict"]) for fit in found["each"]] == [
        ("16 GB", "fits"),
        ("24 GB", "fits"),
        ("24 GB", "fits"),
    ]
    assert found["each"][0]["high"] < found["each"][1]["high"]
    small = json.loads(run(*swapping[:-1], "--swap_blocks=32", "--json").output)["predictions"]
    assert [row["reserved"] for row in found["predictions"]] == [row["reserved"] for row in small]
    text = run(*swapping).output
    assert re.search(r"16 GB \(15.9 GiB\) +32 ", text)
    assert re.search(r"24 GB \(24.0 GiB\) +0 ", text)
    for more, match in (
        (("--card", "16,23"), '"23" is not one of 24, 48'),
        (("--card", "16,24", "--ranks", "2"), "exclude each other"),
    ):
        assert match in str(run(*lora, *more).exception)


def test_every_family_has_a_first_flavour_to_ask_about() -> None:
    assert all(family.flavours for family in FAMILIES.values())
    assert replace(CARDS[24], held=CARDS[24].total).free == 0
