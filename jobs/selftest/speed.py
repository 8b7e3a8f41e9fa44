"""How fast GPUs train, and how right the prediction of their memory is."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, Final

from jobs import devices
from jobs.doctor.finding import Finding, ok, warn
from jobs.errors import UserError
from jobs.eventlog import EventLog
from jobs.memory import kept
from jobs.memory.client import Server
from jobs.memory.predicted import Predicted
from jobs.memory.question import predict
from jobs.report import read_report
from jobs.specfile import load_spec
from jobs.states import State
from jobs.tools import ToolError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from jobs.selftest.stage import Stage
    from jobs.store import Job

# FLUX.1's width with 2 of its 19 and 4 of its 38 blocks.
_SCALE: Final = 24
_WIDTH: Final = 3072
_BLOCKS: Final = 6
_RESOLUTION: Final = 1024
_TOKENS: Final = (_RESOLUTION // 16) ** 2 + 32
_STEPS: Final = 30
_WARM: Final = 10  # steps that do not count

# Dense bf16 FLOP/s of tensor cores, as the makers' data sheets have them.
_PEAK: Final = {
    "B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12,
    "L40S": 362e12, "L4": 121e12, "RTX 6000 Ada": 364e12, "RTX 5090": 209e12,
    "RTX 4090": 165e12, "RTX 3090": 71e12, "A6000": 155e12, "A40": 150e12,
}  # fmt: skip
_OFF: Final = 0.10  # of the predicted memory


def speed(stage: Stage) -> Iterator[Finding]:
    """A LoRA at 1024 px on one GPU and on all of them: seconds, MFU, idle share, memory."""
    stage.say("writing a model of FLUX.1's width")
    stage.engine(
        "engine.toy", str(stage.root / "wide"), "--family=flux", "--pictures=16", "--size=1024",
        f"--hidden_scale={_SCALE}", "--dtype=bfloat16", "--json",
    )  # fmt: skip
    layouts = [(1, "single")] + ([(stage.ranks, "fsdp2")] if stage.ranks > 1 else [])
    for ranks, strategy in layouts:
        values = _values(stage, ranks, strategy)
        stage.say(f"training at 1024 px on {ranks} GPU{'s' if ranks > 1 else ''}")
        _predict(values, strategy, ranks)
        job, busy = _watched(stage, values)
        name = "1 GPU" if ranks == 1 else f"{ranks} GPUs, fsdp2"
        yield _pace(name, job, ranks, stage.gpus[0].name, busy)
        if (memory := _memory(name, job)) is not None:
            yield memory


def _values(stage: Stage, ranks: int, strategy: str) -> dict[str, Any]:
    wide = stage.root / "wide"
    return stage.values(
        f"speed-{ranks}", ranks, strategy=strategy, resolution=_RESOLUTION, mixed_precision="bf16",
        pretrained_model_name_or_path=str(wide / "model"), dataset=str(wide / "data"),
        max_train_steps=_STEPS, checkpointing_steps=0, allow_tf32=True, lora_rank=16,
        train_batch_size=1,
    )  # fmt: skip


def _predict(values: dict[str, Any], strategy: str, ranks: int) -> None:
    """Have the prediction at hand when the job starts; what fails here is missing below."""
    server = Server()
    try:
        predict(load_spec(None, values), server, strategy=strategy, ranks=ranks, on_gpus=True)
    except (UserError, ToolError, OSError):
        return
    finally:
        server.close()


def _watched(stage: Stage, values: dict[str, Any]) -> tuple[Job, float | None]:
    """Run a job; the share of looks at its GPUs, while it trained, in which they computed."""
    wanted, seen = set(values["gpus"]), list[int]()
    job = stage.submit(values)
    log = EventLog(job.run_dir.events)

    def look(job: Job) -> bool:
        log.poll()
        if log.last is not None and _WARM <= log.last.step < _STEPS:
            shown = [gpu for gpu in devices.gpus() if gpu.uuid in wanted]
            seen.extend(gpu.utilisation for gpu in shown if gpu.utilisation is not None)
        return job.state.ended

    job = stage.until(job, look)
    stage.expect(job, State.COMPLETED)
    return job, statistics.fmean(seen) / 100 if seen else None


def _pace(name: str, job: Job, ranks: int, gpu: str, busy: float | None) -> Finding:
    steps = EventLog(job.run_dir.events).read_all().steps[_WARM:]
    seconds = statistics.median(step.seconds for step in steps if step.seconds)
    share = utilisation(seconds, gpu)
    words = f"{seconds * 1e3:.0f} ms a step, {ranks / seconds:.2f} images/s"
    if share is not None:
        words += f", MFU {share:.0%}"
    if busy is not None:
        words += f", GPUs idle {1 - busy:.0%} of the time"
    return ok(
        name, words, seconds=seconds, images_per_second=ranks / seconds, mfu=share,
        idle=None if busy is None else 1 - busy,
    )  # fmt: skip


def utilisation(seconds: float, gpu: str) -> float | None:
    """Model FLOPs of a step over what the GPU could do meanwhile; None for an unknown GPU. Pure.

    A LoRA's backward computes gradients of activations alone, so it costs as much as the forward;
    attention's backward costs twice its forward.
    """
    peak = next((flops for name, flops in _PEAK.items() if name in gpu), None)
    if peak is None:
        return None
    linear = 4 * _BLOCKS * 12 * _WIDTH**2 * _TOKENS
    attention = 3 * _BLOCKS * 4 * _TOKENS**2 * _WIDTH
    return (linear + attention) / (seconds * peak)


def _memory(name: str, job: Job) -> Finding | None:
    """Predicted beside measured; None where one of them is missing."""
    predicted, report = kept.read(job.run_dir), read_report(job.run_dir)
    if not isinstance(predicted, Predicted):
        return None
    phases = [one for one in kept.compare(predicted, report.measure, report.peaks) if one.measured]
    if not phases:
        return None
    measured = max(max(one.measured) for one in phases)
    expected = max(one.predicted for one in phases)
    off = measured / expected - 1
    words = f"{_gib(measured)} measured, {_gib(expected)} predicted ({off:+.1%})"
    facts = {"measured": measured, "predicted": expected}
    if abs(off) > _OFF:
        return warn(
            f"{name}, memory", words, "estimates on this machine are corrected by what jobs took",
            **facts,
        )  # fmt: skip
    return ok(f"{name}, memory", words, **facts)


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


def names(gpus: Sequence[devices.Gpu]) -> str:
    """GPUs as people name them: `2 × NVIDIA H100`."""
    kinds = sorted({gpu.name for gpu in gpus})
    return " and ".join(f"{sum(gpu.name == kind for gpu in gpus)} × {kind}" for kind in kinds)
