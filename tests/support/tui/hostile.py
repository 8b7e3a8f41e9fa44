"""Texts that steer a terminal, where files of a run have texts."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

from jobs.queue.states import State
from jobs.run.rundir import MANIFEST, event
from tests.support.jobs.checkpoints import save_checkpoint
from tests.support.tui.made_up_runs import add_job, append_events, write_rank, write_steps

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.queue.store import Job, Store

# Clipboard, title, clear screen, both again as C1, right-to-left override, half of a pair.
EVIL: Final = (
    "A\x1b]52;c;cm0gLXJm\x07\x1b]0;T\x1b\\\x1b[2J\x9d52;c;eA==\x9c\x9b2J\u202e\u2066\u2028Z"
)
_STEERS: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def steering(text: str) -> list[str]:
    """What of a text would steer a terminal."""
    return _STEERS.findall(text)


def write_model(root: Path) -> Path:
    """A model with evil names in every file that has names."""
    (root / "transformer").mkdir(parents=True)
    index = {"_class_name": EVIL, "transformer": ["diffusers", EVIL], EVIL: [EVIL, EVIL]}
    (root / "model_index.json").write_text(json.dumps(index))
    (root / "transformer" / "config.json").write_text(json.dumps({"_class_name": EVIL, EVIL: 1}))
    weights = {"metadata": {}, "weight_map": {EVIL: f"../{EVIL}.safetensors"}}
    (root / "transformer" / "diffusion_pytorch_model.safetensors.index.json").write_text(
        json.dumps(weights)
    )
    return root


def add_evil_job(store: Store, state: State = State.FAILED) -> Job:
    """A job whose files, reason and history are evil."""
    text = f"name: evil\n# {EVIL}\n{json.dumps(EVIL)}: {json.dumps(EVIL)}\n"
    job = add_job(store, "evil", state=state, reason=f"rank 1: {EVIL}", job_file=text)
    write_steps(job, 3)
    one: dict[str, Any] = {"type": EVIL, "message": EVIL, "traceback": f"{EVIL}\n{EVIL}"}
    append_events(
        job,
        event("sharding", ranks=2, units={EVIL: 19}, local_bytes=1, root_bytes=1),
        event("start", step=0, strategy=EVIL, strategy_reason=EVIL),
        event("memory", measure=EVIL, step=3, peaks={EVIL: [1, 2]}),
        event("warning", message=EVIL),
        event("checkpoint", step=2, path=EVIL),
        event("sample", step=2, path=EVIL, prompt=EVIL, files=[EVIL]),
        event("phase", name=EVIL, state="begin", total=3, done=1),
        event("error", rank=1, **one),
    )
    for rank in (0, 1):
        write_rank(job, rank, host=EVIL, device=EVIL, phase=EVIL)
    (job.run_dir.ranks / "1.error.json").write_text(json.dumps(one | {"rank": 1, "t": 1.0}))
    (job.run_dir.ranks / "7.json").write_text(json.dumps({"rank": EVIL}))
    job.run_dir.logs.mkdir(exist_ok=True)
    for path in (job.run_dir.rank_log(0), job.run_dir.launcher_log, job.run_dir.supervisor_log):
        path.write_text(f"\x1b[31mred\x1b[0m {EVIL}\n{EVIL}", errors="replace")
    launch = {"command": [EVIL], "environment": {EVIL: EVIL}, "gpus": [], "versions": {EVIL: EVIL}}
    job.run_dir.launch_file.write_text(json.dumps(launch))
    path = save_checkpoint(job.run_dir, 2, {"name": EVIL, EVIL: EVIL})
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps(manifest | {EVIL: EVIL}))
    shown = job.run_dir.samples / "step-2"
    shown.mkdir(parents=True)
    (shown / "0.json").write_text(json.dumps({"prompt": EVIL, "seed": EVIL, "size": EVIL}))
    (shown / "0.png").write_bytes(b"\x89PNG")
    return job
