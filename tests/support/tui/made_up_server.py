"""A made-up server with jobs that nobody ran: the same each time, down to the clock."""

from __future__ import annotations

import json
import math
import os
import struct
import sys
import threading
import time
from collections import namedtuple
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from PIL import Image, ImageDraw

from jobs.machine.gpu import GpuProcess
from jobs.memory import calibration
from jobs.queue.states import State
from jobs.queue.sweeps import short_value
from jobs.run.events import Validation
from jobs.run.failure import Cause, Failure, keep_failure
from jobs.run.rundir import event
from jobs.spec.file.load import dump_spec, load_spec
from tests.support.jobs.fakes.supervise import start_nothing
from tests.support.paths import FAKE_MEMORY
from tests.support.tui.detection import flux
from tests.support.tui.made_up_runs import (
    GIB,
    FakeGpus,
    add_job,
    append_events,
    write_checkpoint,
    write_facts,
    write_log,
    write_rank,
    write_steps,
)
from tui.look.collector import EVERY

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import pytest

    from jobs.machine.gpu import Gpu
    from jobs.queue.store import Job, Store
    from jobs.spec.job_spec import JobSpec
    from tui.look.collector import History

BEGIN: Final = 1_790_000_000.0  # 2026-09-21 13:33:20 UTC
_Disk = namedtuple("_Disk", "total used free")
_SIZES: Final = ((1024, 1024), (1216, 832), (832, 1216))
_REMEMBERED: Final = 200  # columns of the history of GPUs
_NO_MEMORY: Final = "rank 1 ran out of GPU memory at step 12 during backward: 138.1 of 139.8 GiB"
PROMPTS: Final = ("a red circle on a blue background", "two green squares", "a yellow star")


class Clock:
    """Stands in for `time.time`: moves on with every look while jobs are made up, then stands.

    Only with looks of this project, in the main thread: libraries look when they like, as often as
    they have something to log, say.
    """

    def __init__(self) -> None:
        self.now = BEGIN
        self.pace = 0.4  # seconds from one look to the next

    def __call__(self) -> float:
        who = sys._getframe(1).f_globals["__name__"].partition(".")[0]
        if who in ("jobs", "tests") and threading.current_thread() is threading.main_thread():
            self.now += self.pace
        return self.now


def make_up(store: Store, folder: Path, clock: Clock | None = None) -> FakeGpus:
    """Fill a state directory with jobs that nobody ran.

    Args:
        store: An empty one.
        folder: Where a model and a dataset may be written.
        clock: What `time.time` is; stopped when all is made up.

    Returns:
        The server's GPUs.
    """
    cards = idle_gpus()
    uuids = [gpu.uuid for gpu in cards.gpus]
    for index, pid in ((1, 4000), (2, 4001)):
        rank = GpuProcess(pid, (33 + 2 * index) * GIB, user="ada", command="python -m engine")
        cards.gpus[index] = busy(cards.gpus[index], rank)
    others = GpuProcess(812, 61 * GIB, user="eve", command="python train_unet.py --batch_size=16")
    cards.gpus[3] = busy(cards.gpus[3], others)
    spec = describe(folder)
    before = {"name": "flux-shapes-r8", "lora_rank": 8, "learning_rate": 0.001}
    old = add_job(
        store,
        "flux-shapes-r8",
        state=State.COMPLETED,
        reason="trained 200 steps",
        gpus=uuids[:2],
        job_file=dump_spec(load_spec(None, spec.to_dict() | before)),
    )
    write_steps(old, 200, seed=3)
    large = {"name": "flux-large-batch", "train_batch_size": 16, "resolution": 512}
    large |= {
        "gradient_checkpointing": False,
        "fsdp_activation_checkpointing": False,
        "strategy": "ddp",
    }
    failed = add_job(
        store,
        "flux-large-batch",
        state=State.FAILED,
        gpus=uuids[1:3],
        reason=_NO_MEMORY,
        job_file=dump_spec(load_spec(None, spec.to_dict() | large)),
    )
    keep_failure(failed.run_dir, Failure(_NO_MEMORY, Cause.GPU_MEMORY, 1))
    running = add_job(
        store,
        "cats-and-shapes",
        state=State.RUNNING,
        gpus=uuids[1:3],
        total_steps=240,
        job_file=dump_spec(spec),
    )
    fill(running, spec, uuids[1:3])
    predict(running)
    add_job(store, "flux-night-run", reason="waiting for 2 GPUs (1 available)", wanted=2)
    add_job(store, "sweep-lr3e-4", reason="waiting for job 3 on GPU 1", wanted=[uuids[1]])
    if clock is not None:
        clock.pace = 0.0
        stamp(store.home, clock.now - 60)
    for rank in range(2):
        write_rank(
            running,
            rank,
            step=131,
            device_uuid=uuids[1 + rank],
            device=f"cuda:{rank}",
            allocated=30 * GIB,
            reserved=33 * GIB,
            peak=36 * GIB,
        )
    return cards


def make_up_sweep(store: Store) -> None:
    """Learning rates of one job: two that were good, one that was stopped, two to come."""
    running = next(job for job in store.all() if job.state is State.RUNNING)
    spec = load_spec(running.run_dir.job_file)
    trained = State.COMPLETED, "trained 240 steps"
    worse = "best validation loss 0.5121 is above the median 0.3943 of 2 others at step 120"
    runs = (
        (1e-5, 0.4136, 240, *trained),
        (3e-5, 0.3519, 240, *trained),
        (1e-3, 0.5121, 120, State.STOPPED, f"stopped: {worse}"),
        (1e-4, None, 0, State.QUEUED, "waiting for job 3 on GPU 1"),
        (3e-4, None, 0, State.QUEUED, "waiting for job 3 on GPU 1"),
    )
    for rate, low, steps, state, reason in runs:
        name = f"cats-lr{short_value(rate)}"
        own = {"name": name, "sweep": "cats", "learning_rate": rate}
        text = dump_spec(load_spec(None, spec.to_dict() | own))
        job = add_job(
            store,
            name,
            state=state,
            reason=reason,
            wanted=running.wanted,
            total_steps=240,
            job_file=text,
            sweep="cats",
        )
        if low is not None:
            write_steps(job, steps, seed=steps)
            append_events(job, Validation(steps // 2, low + 0.03).line())
            append_events(job, Validation(steps, low).line())


def idle_gpus() -> FakeGpus:
    """Four GPUs that nobody uses."""
    cards = FakeGpus(4)
    still: dict[str, Any] = {"memory_used": 600 << 20, "utilisation": 0, "temperature": 33}
    still["power"] = 78.0
    cards.gpus = [replace(gpu, **still) for gpu in cards.gpus]
    return cards


def look_back(history: History, gpus: Sequence[Gpu], now: float) -> None:
    """Fill what is remembered of the GPUs: those that are busy began some minutes ago."""
    for column in range(_REMEMBERED):
        seen = []
        for gpu in gpus:
            begun = column > 60 + 20 * gpu.index and gpu.utilisation
            wave = round(14 * abs(math.sin(column / (5 + gpu.index))))
            used = (gpu.memory_used or 0) if begun else 600 << 20
            seen.append(replace(gpu, utilisation=96 - wave if begun else 0, memory_used=used))
        history.add(now - EVERY * (_REMEMBERED - column), seen)


def busy(gpu: Gpu, process: GpuProcess) -> Gpu:
    """The GPU, with a process that computes on it."""
    held = (process.memory or 0) + (1 << 30)
    return replace(
        gpu,
        memory_used=held,
        utilisation=95 + gpu.index,
        temperature=56 + 3 * gpu.index,
        power=540.0 + 30 * gpu.index,
        processes=(process,),
    )


def describe(folder: Path) -> JobSpec:
    """The job that runs, with a dataset of pictures."""
    data = folder / "pictures"
    data.mkdir(parents=True, exist_ok=True)
    for number in range(9):
        picture(number, 1024).resize(_SIZES[number % 3]).save(data / f"{number}.png")
        (data / f"{number}.txt").write_text(PROMPTS[number % 3])
    picture(9, 64).save(data / "thumbnail.png")  # left out, being too small
    model = folder / "FLUX.1-dev"
    for part in ("transformer", "vae"):
        (model / part).mkdir(parents=True, exist_ok=True)
        (model / part / "config.json").write_text("{}")
        weights = model / part / "diffusion_pytorch_model.safetensors"
        weights.write_bytes(struct.pack("<Q", 2) + b"{}")  # without a tensor
    (model / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    return load_spec(
        None,
        {
            "name": "cats-and-shapes",
            "pretrained_model_name_or_path": str(model),
            "dataset": str(data),
            "num_processes": 2,
            "max_train_steps": 240,
            "learning_rate": 0.0003,
            "strategy": "fsdp2",
            "checkpointing_steps": 100,
            "validation_prompts": list(PROMPTS),
            "validation_steps": 60,
        },
    )


def predict(job: Job) -> None:
    """What was predicted of it: a little less than it measures."""
    sizes = {"load": 22, "forward": 60, "backward": 71, "optimizer": 40}
    phases = [{"name": name, "parts": {"parameters": size * GIB}} for name, size in sizes.items()]
    said = {
        "schema": 1,
        "model": "FluxTransformer2DModel",
        "parameters": 12 * 10**9,
        "trained": 10**7,
        "strategy": "fsdp2",
        "ranks": 2,
        "settings": {},
        "phases": phases,
        "peak": 71 * GIB,
        "largest": "backward",
        "reserved": [71 * GIB, 78 * GIB],
        "device": [72 * GIB, 79 * GIB],
        "overheads": {"cuda_context": GIB},
        "host": {"rank": GIB, "machine": 2 * GIB},
        "disk": {},
        "notes": [],
    }
    file = {"schema": calibration.PREDICTION_SCHEMA, "t": time.time(), "prediction": said}
    calibration.path_of(job.run_dir).write_text(json.dumps(file))


def fill(job: Job, spec: JobSpec, uuids: list[str]) -> None:
    """The traces of a run: steps, logs, samples, checkpoints."""
    write_facts(job)
    write_steps(job, 131, seconds=0.37)
    lines = ["fsdp2: 57 of 57 parameters are DTensors, local size 1/2; 610.2 MiB on each rank\n"]
    lines += [
        f"step {step:>3}/240  loss {0.38 + 0.5 / (step / 20 + 1):.4f}  lr 1.0e-03  0.37 s/step\n"
        for step in range(1, 132)
    ]
    lines.insert(60, "WARNING: caption of picture 17 is longer than 77 tokens; its end is cut\n")
    lines.insert(100, "WARNING: picture 4 is smaller than the resolution and was enlarged\n")
    write_log(job, "".join(lines))
    write_log(job, "".join(lines[:40]), 1)
    job.run_dir.launcher_log.write_text("two ranks on cuda:0, cuda:1\n")
    for step in (60, 120):
        folder = job.run_dir.samples / f"step-{step}"
        folder.mkdir(parents=True)
        for number, prompt in enumerate(PROMPTS):
            picture(number, 128, step).save(folder / f"{number:02}.png")
            facts = {"prompt": prompt, "seed": number, "step": step, "width": 128, "height": 128}
            (folder / f"{number:02}.json").write_text(json.dumps(facts))
        append_events(job, event("sample", step=step, directory=str(folder), files=len(PROMPTS)))
    path = write_checkpoint(job, 100, spec=spec.to_dict())
    append_events(job, event("checkpoint", step=100, path=str(path), bytes=1024, seconds=2.4))


def picture(number: int, side: int, step: int = 120) -> Image.Image:
    """A shape, clearer with every step."""
    paper, ink = (("navy", "crimson"), ("white", "seagreen"), ("black", "gold"))[number % 3]
    image = Image.new("RGB", (side, side), paper)
    edge = side * (240 - step) // 600
    draw = ImageDraw.Draw(image)
    shape = draw.ellipse if number % 3 == 0 else draw.rectangle
    shape((edge, edge, side - edge, side - edge), fill=ink)
    return image


def stamp(root: Path, t: float) -> None:
    """Give every file below this time of change."""
    for path in [root, *root.rglob("*")]:
        if path.name != "jobs.db" and not path.name.startswith("jobs.db-"):
            os.utime(path, (t, t), follow_symlinks=False)


def nobody_starts(patch: pytest.MonkeyPatch, cards: FakeGpus) -> None:
    """Take every process and the machine's own GPUs out of the picture."""
    patch.setattr("jobs.machine.devices.gpus", cards)
    start_nothing(patch)
    patch.setattr("jobs.backends.local.dispatch._unsupervised", lambda job: False)
    for module in ("jobs.backends.local.dispatch", "jobs.service"):  # each has the name
        patch.setattr(f"{module}.dispatch", lambda store: None)
    patch.setattr("jobs.service.ensure_keepers", lambda store: None)
    fake = (sys.executable, "-S", str(FAKE_MEMORY))
    patch.setattr("jobs.memory.question.COMMAND", fake)
    patch.setattr("jobs.memory.question._shared", [])  # another test has closed its own for good
    patch.setattr("tui.form.blocks.detect_blocks", lambda **asked: flux())
    disk = _Disk(2 << 40, 1 << 40, 1 << 40)
    patch.setattr("shutil.disk_usage", lambda path: disk)
    patch.setenv("TZ", "UTC")
    time.tzset()
