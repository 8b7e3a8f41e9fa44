"""What is fuzzed: each target makes an input of random numbers, and gives what answers it."""

from __future__ import annotations

import io
import json
import struct
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from PIL import Image

from jobs.backends.local.ranks import adopt
from jobs.models.find_model import count_parameters, find_damage
from jobs.models.model_config import find_target
from jobs.preflight.check_job import check
from jobs.queue.job_list import progress
from jobs.run.checkpoint_files import list_all, verify
from jobs.run.eventlog import EventLog, ReportLog, RunReport, read_end
from jobs.run.hang import by_clock, find_hang
from jobs.run.rundir import RunDir, event
from jobs.run.samples import list_samples
from jobs.run.timeline import Timeline
from jobs.run.why_failed import find_wait, is_user_error, launcher_signal, rank_exits, why_failed
from jobs.spec.file.flags import parse_flags
from jobs.spec.file.load import dump_spec, load_spec
from jobs.spec.job_spec import JobSpec
from jobs.spec.values.datasets import datasets_of
from tests.campaign.mutate import damaged, json_bytes, odd_value
from tests.support.jobs.checkpoints import save_checkpoint
from tests.support.jobs.fakes.launcher import summary
from tests.support.tui.hostile import steering
from tui.cli.echo import in_colours
from tui.log.log_model import LogModel
from tui.settings import as_file, read_settings
from tui.text.tables import memory_line, validation_line

if TYPE_CHECKING:
    import random
    from pathlib import Path

Call: TypeAlias = Callable[[], Any]

_FORMATS: Final = ("PNG", "JPEG", "GIF", "TIFF", "WEBP", "BMP", "PPM", "TGA", "ICO")
_MODES: Final = ("RGB", "L", "RGBA", "P", "1", "CMYK", "I;16", "F", "LA")
_KINDS: Final = (
    "start",
    "step",
    "phase",
    "checkpoint",
    "sample",
    "validation",
    "warning",
    "error",
    "memory",
    "sharding",
    "end",
    "export",
)


def job_file(rng: random.Random, place: Path) -> Call:
    """A YAML file of known keys with odd values, damaged."""
    lines = []
    for key in rng.sample(list(JobSpec.model_fields), rng.randint(0, 12)):
        text = json.dumps(odd_value(rng)) if rng.random() < 0.5 else _plain(rng)
        lines.append(f"{key}: {text}")
    data = ("name: a\n" + "\n".join(lines) + "\n").encode("utf-8", "surrogatepass")
    path = place / "job.yaml"
    path.write_bytes(damaged(rng, data))

    def call() -> None:
        spec = load_spec(path)
        again = place / "again.yaml"
        again.write_text(dump_spec(spec))
        assert load_spec(again) == spec, "what is written is not what was read"

    return call


def flags(rng: random.Random, place: Path) -> Call:
    """Words of a command line."""
    words = []
    for key in rng.sample(list(JobSpec.model_fields), rng.randint(0, 8)):
        name = rng.choice((f"--{key}", f"--{key.replace('_', '-')}", f"--no-{key}", key, "--", "-"))
        value = rng.choice((str(odd_value(rng)), _plain(rng)))
        words += rng.choice(([f"{name}={value}"], [name, value], [name]))

    def call() -> None:
        values, _ = parse_flags(words)
        load_spec(None, values)

    return call


def settings(rng: random.Random, place: Path) -> Call:
    """The person's settings."""
    path = place / "settings.yaml"
    path.write_bytes(damaged(rng, as_file().replace("# ", "").encode()))
    return partial(read_settings, path)


def events(rng: random.Random, place: Path) -> Call:
    """The event stream of a run."""
    run_dir = _run_dir(place)
    lines = []
    for step in range(rng.randint(0, 60)):
        kind = rng.choice(_KINDS) if rng.random() < 0.6 else "step"
        values: dict[str, Any] = {
            "step": step,
            "loss": rng.random(),
            "seconds": 0.5,
            "name": "train",
            "state": "begin",
            "total": 9,
            "done": 1,
            "ranks": [1, 2],
            "message": "hot",
            "rank": 0,
            "type": "E",
            "phase": "train",
            "reason": "completed",
            "files": ["a.png"],
            "bytes": 7,
            "path": "x",
            "peaks": {"load": [1, 2], "step": [3]},
            "measure": "rss",
            "strategy": "single",
        }
        line = event(kind, **{k: v for k, v in values.items() if rng.random() < 0.8}).encode()
        if rng.random() < 0.5:
            line = json_bytes(rng, json.loads(line)) + b"\n"
        lines.append(line)
    run_dir.events.write_bytes(damaged(rng, b"".join(lines)))
    job: Any = SimpleNamespace(
        run_dir=run_dir, total_steps=9, state=SimpleNamespace(active=rng.random() < 0.5)
    )

    def call() -> None:
        whole = Timeline(run_dir.events).read_all()
        end, all_of_it = read_end(run_dir.events), EventLog(run_dir.events).read_all()
        assert repr(end.steps[-20:]) == repr(all_of_it.steps[-20:]), "the end differs"  # or is NaN
        log = ReportLog.begin(run_dir).read_all()
        report, other = RunReport.of(log), RunReport.of(whole)
        assert repr(report) == repr(other), "the reports differ"
        kept = ReportLog.begin(run_dir, log.to_json())
        assert repr(RunReport.of(kept)) == repr(report), "what was kept differs"
        progress(job)
        if report.peaks:
            memory_line(report.peaks, report.measure)
        if report.validations:
            validation_line(report.validations)

    return call


def ranks(rng: random.Random, place: Path) -> Call:
    """What ranks write of themselves, and of their failures."""
    run_dir = _run_dir(place)
    status = {
        "rank": 0,
        "pid": 5,
        "started": 2.5,
        "host": "n",
        "device": "cpu",
        "phase": "train",
        "step": 3,
        "heartbeat": time.time(),
        "progressed": time.time(),
        "rss": 5,
        "peaks": {"a": 1},
    }
    error = {
        "t": time.time(),
        "rank": 1,
        "type": "ValueError",
        "message": "bad",
        "phase": "train",
        "step": 3,
        "traceback": "Traceback\n",
        "bytes_free": 3,
    }
    for rank in range(rng.randint(1, 3)):
        run_dir.rank_file(rank).write_bytes(json_bytes(rng, status | {"rank": rank}))
        if rng.random() < 0.6:
            run_dir.rank_error(rank).write_bytes(json_bytes(rng, error | {"rank": rank}))
        run_dir.rank_log(rank).write_bytes(damaged(rng, b"step 1\nValueError: bad\n"))
    _launcher_log(rng, run_dir)

    def call() -> None:
        found, _ = run_dir.read_ranks()
        find_hang(by_clock(found, time.time()), 10.0)
        run_dir.rank_errors()
        _diagnose(run_dir)

    return call


def launches(rng: random.Random, place: Path) -> Call:
    """`launch.json`, the launcher's log, and flight records."""
    run_dir = _run_dir(place)
    (run_dir.job_file).write_text("name: a\nmodel_family: flux\n")
    record = {
        "command": ["a"],
        "run_id": "r",
        "attempt": 0,
        "restarts": 0,
        "events_offset": 3,
        "oom_kills": 0,
        "launcher": [5, 2.5],
        "started": 1.0,
        "gpus": [],
    }
    run_dir.launch_file.write_bytes(json_bytes(rng, record))
    _launcher_log(rng, run_dir)
    flight = {
        "pg_status": {"0": {"last_enqueued_collective": 3, "last_completed_collective": 2}},
        "pg_config": {"0": {"name": "0", "desc": "default", "ranks": "[0, 1]"}},
        "entries": [
            {
                "process_group": ["0", "d"],
                "collective_seq_id": 3,
                "profiling_name": "nccl:all",
                "state": "started",
                "time_created_ns": 5,
                "frames": [{"name": "f", "line": 3}],
            },
        ],
    }
    for rank in range(2):
        run_dir.flight(rank).write_bytes(json_bytes(rng, flight))
    job: Any = SimpleNamespace(run_dir=run_dir, run_id="r", attempt=0)

    def call() -> None:
        find_wait(run_dir)
        try:
            adopt(job)
        except ValueError:  # what the supervisor expects of a damaged record
            return

    return call


def checkpoints(rng: random.Random, place: Path) -> Call:
    """Manifests and states of checkpoints, and their names."""
    run_dir = _run_dir(place)
    for step in (5, 10):
        path = save_checkpoint(run_dir, step, {"name": "a"})
        for file in path.iterdir():
            if file.suffix == ".json":
                file.write_bytes(json_bytes(rng, json.loads(file.read_text())))
    (run_dir.checkpoints / f"step-{_name(rng)}").mkdir(exist_ok=True)
    sample = run_dir.samples / "step-5"
    sample.mkdir(parents=True)
    (sample / "0.png").write_bytes(b"x")
    side = {"prompt": "a", "seed": 1, "size": [8, 8], "steps": 4, "guidance": 1.0}
    (sample / "0.json").write_bytes(json_bytes(rng, side))

    def call() -> None:
        for listed in list_all(run_dir):
            verify(listed)
        run_dir.latest_checkpoint()
        list_samples(run_dir)

    return call


def weights(rng: random.Random, place: Path) -> Call:
    """Safetensors files and their indices."""
    header: dict[str, Any] = {
        f"layer.{n}": {"dtype": "F32", "shape": [2, 2], "data_offsets": [16 * n, 16 * n + 16]}
        for n in range(3)
    }
    text = json_bytes(rng, header)
    data = struct.pack("<Q", len(text)) + text + bytes(48)
    path = place / "diffusion_pytorch_model.safetensors"
    path.write_bytes(damaged(rng, data))
    index = {"metadata": {"total_size": 9}, "weight_map": {"layer.0": path.name}}
    if rng.random() < 0.5:
        (place / f"{path.name}.index.json").write_bytes(json_bytes(rng, index))

    def call() -> None:
        find_damage(path)
        count_parameters(place)

    return call


def models(rng: random.Random, place: Path) -> Call:
    """Configs of a model, seen by detection and by the check before submitting."""
    root, data = place / "model", place / "data"
    data.mkdir()
    Image.new("RGB", (512, 512)).save(data / "a.png")
    empty = struct.pack("<Q", 2) + b"{}"
    config = {
        "_class_name": "FluxTransformer2DModel",
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "in_channels": 64,
        "patch_size": 1,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 32,
        "axes_dims_rope": [4, 4, 8],
    }
    for part, value in {"transformer": config, "vae": {"block_out_channels": [8, 8]}}.items():
        (root / part).mkdir(parents=True)
        (root / part / "config.json").write_bytes(json_bytes(rng, value))
        (root / part / "diffusion_pytorch_model.safetensors").write_bytes(empty)
    index = {
        "_class_name": "FluxPipeline",
        "transformer": ["diffusers", "FluxTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    (root / "model_index.json").write_bytes(json_bytes(rng, index))
    values = {
        "name": "a",
        "model_family": "flux",
        "pretrained_model_name_or_path": str(root),
        "dataset": str(data),
        "device": "cpu",
        "num_processes": 1,
    }

    def call() -> None:
        errors = []
        for one in (lambda: find_target("flux", None, str(root)), lambda: check(_spec(values))):
            try:
                one()
            except Exception as error:
                errors.append(error)
        for error in errors:
            raise error

    return call


def logs(rng: random.Random, place: Path) -> Call:
    """Logs, as commands and the dashboard print them."""
    path = place / "rank0.log"
    text = b"step 1 \x1b[31mred\x1b[0m\rstep 2\n\x1b]0;title\x07\x9b2J\xc2\x9b1m wide\n" * 20
    path.write_bytes(damaged(rng, damaged(rng, text)))

    def call() -> None:
        model = LogModel(path)
        model.poll()
        lines = [model.line(index) for index in range(len(model))]
        model.close()
        lines.append(in_colours(path.read_bytes().decode(errors="replace")).replace("\r", ""))
        parts = [enumerate(line.split("\x1b[")) for line in lines]
        plain = "".join(
            part.partition("m")[2] if at else part for line in parts for at, part in line
        )
        assert "\x1b" not in plain, "an escape sequence comes through"
        assert not [sign for sign in steering(plain) if sign < "\u061c"], "a control code"

    return call


def pictures(rng: random.Random, place: Path) -> Call:
    """Pictures of many formats, damaged."""
    from engine.data.read.images import PictureError, decode, inspect_image

    size = rng.randint(1, 90), rng.randint(1, 90)
    stored = io.BytesIO()
    try:
        Image.new(rng.choice(_MODES), size).save(stored, rng.choice(_FORMATS))
    except (OSError, KeyError, ValueError):  # a mode that the format does not have
        Image.new("RGB", size).save(stored, "PNG")
    content = damaged(rng, stored.getvalue())

    def call() -> None:
        for answer in (inspect_image, decode):
            try:
                answer(content)
            except PictureError:
                continue

    return call


def captions(rng: random.Random, place: Path) -> Call:
    """Folders of pictures with captions in files and tables."""
    from engine.data.read.folders import read_folder

    for number in range(3):
        Image.new("RGB", (8, 8)).save(place / f"{number}.png")
        text = f"a cat, {odd_value(rng, 0)}".encode("utf-8", "surrogatepass")
        (place / f"{number}.txt").write_bytes(damaged(rng, text))
    rows = [{"file_name": f"{n}.png", "text": "a cat"} for n in range(3)]
    if rng.random() < 0.5:
        lines = b"\n".join(json_bytes(rng, row).replace(b"\n", b"") for row in rows)
        (place / "metadata.jsonl").write_bytes(damaged(rng, lines))
    elif rng.random() < 0.5:
        (place / "metadata.csv").write_bytes(damaged(rng, b"file_name,text\n0.png,a\n1.png,b\n"))
    values = {"name": "a", "model_family": "flux", "dataset": str(place)}
    spec = _spec(values | {"pretrained_model_name_or_path": str(place)})
    return partial(read_folder, datasets_of(spec)[0], videos=False)


def indices(rng: random.Random, place: Path) -> Call:
    """The index of a sharded checkpoint, which is a pickle."""
    from engine.checkpoint.dcp_reader import INDEX, read_index

    (place / INDEX).write_bytes(damaged(rng, _index()))
    return partial(read_index, place)


TARGETS: Final[dict[str, Callable[[random.Random, Path], Call]]] = {
    one.__name__: one
    for one in (
        job_file,
        flags,
        settings,
        events,
        ranks,
        launches,
        checkpoints,
        weights,
        models,
        logs,
        pictures,
        captions,
        indices,
    )
}
_INDEX: list[bytes] = []


def prepare() -> None:
    """Import what reads pictures and checkpoints, and make an index to damage."""
    import engine.checkpoint.dcp_reader
    import engine.data.read.folders
    import engine.data.read.images  # noqa: F401

    _index()


def _index() -> bytes:
    if not _INDEX:
        import tempfile
        from pathlib import Path

        import torch
        import torch.distributed.checkpoint as dcp

        with tempfile.TemporaryDirectory() as folder:
            dcp.save({"a": torch.zeros(2, 3), "b": {"c": 5}}, checkpoint_id=folder, no_dist=True)
            _INDEX.append(Path(folder, ".metadata").read_bytes())
    return _INDEX[0]


def _run_dir(place: Path) -> RunDir:
    run_dir = RunDir(place / "1-a")
    run_dir.create()
    return run_dir


def _spec(values: dict[str, Any]) -> JobSpec:
    return load_spec(None, values)


def _plain(rng: random.Random) -> str:
    return rng.choice(
        (
            "1",
            "0",
            "-3",
            "0.5",
            "true",
            "no",
            "auto",
            "cat",
            "bf16",
            "[1, 2]",
            "{a: 1}",
            "~",
            "1e-4",
            "'x'",
            "[[1024, 768]]",
            "100%",
            "flux",
            "full",
            "lora",
            "adamw",
            "fsdp2",
            "~/x",
            "1e999",
        )
    )


def _name(rng: random.Random) -> str:
    return rng.choice(("7.rewound", "x", "٣", "9" * 200, "5.damaged", "-1", "1e3", " 5", "0x5"))


def _launcher_log(rng: random.Random, run_dir: RunDir) -> None:
    run_dir.launcher_log.write_bytes(damaged(rng, summary((1, -9, 77), [(0, -15, 78)]).encode()))


def _diagnose(run_dir: RunDir) -> None:
    rank_exits(run_dir)
    launcher_signal(run_dir)
    is_user_error(run_dir)
    said = why_failed(run_dir, 1, ended_by_us=(), oom_kills_before=0)
    assert said, "no reason"
