"""What exporting a checkpoint takes: `python tests/bench/export.py [--gigabytes 2] [--dir DIR]`.

Two ranks write a sharded checkpoint of a whole FLUX.1-like model in fp32, with random numbers; then
`python -m engine.exports` makes a pipeline of it. Shown is the tool's highest resident memory, and
what it has after its imports. The base model's weights are a file with a header and
a hole: only what is trained is exported.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

ROOT = Path(__file__).resolve().parents[2]
RANKS: Final = 2
MIB: Final = 2**20
TOOL: Final = """
import sys, engine.exports.writing, engine.families.flux
from engine.exports.__main__ import main
def high():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(lines["VmHWM"].split()[0]) * 1024
imported = high()
status = main(sys.argv[1:])
print("high water", imported, high(), file=sys.stderr)
sys.exit(status)
"""

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from jobs.spec.job_spec import JobSpec


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of weights, in fp32")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--dir", type=Path, help="where to write (default: a temporary directory)")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-export-", dir=asked.dir) as scratch:
        place = Path(scratch)
        subprocess.run(
            [sys.executable, "-m", "engine.toy", str(place / "toy"), "--pictures=1", "--size=32"],
            cwd=ROOT,
            check=True,
            capture_output=True,
        )
        checkpoint = make(place / "toy" / "model", place, asked.gigabytes)
        size = sum(file.stat().st_size for file in checkpoint.iterdir())
        begun = time.monotonic()
        bare, peak, found = measure(checkpoint, place / "export", f"--dtype={asked.dtype}")
        seconds = time.monotonic() - begun
    print(
        f"checkpoint {size / MIB:,.0f} MiB by {RANKS} ranks, step {found['step']}: "
        f"{seconds:.1f} s; highest memory {(peak - bare) / MIB:,.0f} MiB beyond the "
        f"{bare / MIB:,.0f} MiB of its imports"
    )


def spawn(target: Callable[..., None], words: Sequence[tuple[Any, ...]]) -> None:
    """Run `target(rank, *words[rank])`, for every rank, in a process of its own."""
    starting = multiprocessing.get_context("spawn")
    ranks = [starting.Process(target=target, args=(n, *own)) for n, own in enumerate(words)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
        if rank.exitcode:
            sys.exit("the checkpoint could not be written")


def make(base: Path, place: Path, gigabytes: float, start: Callable[..., None] = spawn) -> Path:
    """A base model of that size below `place`, and a checkpoint of a job that trained all of it.

    Args:
        base: A model whose other components and settings it has.
        place: An existing directory.
        gigabytes: Of the transformer's weights.
        start: How ranks are started and waited for; see `spawn`.
    """
    sys.path.insert(0, str(ROOT))
    from jobs.spec.file.load import load_spec

    root = _write_base(base, place / "base", gigabytes)
    values = {"name": "bench", "model_type": "full", "mixed_precision": "no", "device": "cpu"}
    places = {"dataset": str(place), "pretrained_model_name_or_path": str(root)}
    spec = load_spec(None, values | places | {"num_processes": RANKS})
    checkpoint = place / "checkpoints" / "step-3"
    checkpoint.mkdir(parents=True)
    start(_save, [(root, spec, checkpoint)] * RANKS)
    _complete(checkpoint, spec)
    return checkpoint


def measure(*arguments: object) -> tuple[int, int, dict[str, Any]]:
    """Highest resident bytes of the tool after its imports, and at its end; and its answer."""
    done = subprocess.run(
        [sys.executable, "-c", TOOL, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    if done.returncode:
        sys.exit(f"the export failed:\n{done.stderr[-4000:]}")
    imported, peak = done.stderr.rsplit("high water", 1)[1].split()[:2]
    return int(imported), int(peak), json.loads(done.stdout)


def _write_base(base: Path, root: Path, gigabytes: float) -> Path:
    """The base with a wide transformer, whose weights take no room on the disk."""
    import shutil

    from engine.model.files.safetensors_writer import SafetensorsWriter

    shutil.copytree(base, root, ignore=shutil.ignore_patterns("diffusion_pytorch_model.*"))
    shutil.copytree(base / "vae", root / "vae", dirs_exist_ok=True)
    file = root / "transformer" / "config.json"
    config = json.loads(file.read_text())
    # Two gigabytes at 64 heads; the size grows with the square of the width.
    config["num_attention_heads"] = max(1, round(64 * (gigabytes / 2) ** 0.5))
    file.write_text(json.dumps(config))
    weights = root / "transformer" / "diffusion_pytorch_model.safetensors"
    facts = {name: (t.dtype, t.shape) for name, t in _bare_model(root).state_dict().items()}
    writer = SafetensorsWriter(root / "header", facts)
    os.link(root / "header", weights)
    writer.abandon()
    total = sum(dtype.itemsize * shape.numel() for dtype, shape in facts.values())
    os.truncate(weights, weights.stat().st_size + total)
    return root


def _bare_model(root: Path) -> torch.nn.Module:
    import torch
    from diffusers import FluxTransformer2DModel

    with torch.device("meta"):
        model: torch.nn.Module = FluxTransformer2DModel.from_config(
            FluxTransformer2DModel.load_config(root / "transformer")
        )
    return model


def _save(rank: int, root: Path, spec: JobSpec, checkpoint: Path) -> None:
    """One rank's rows of every tensor."""
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", f"file://{checkpoint.parent}/meet", rank=rank, world_size=RANKS)
    model = _bare_model(root)
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    model.to_empty(device="cpu")
    torch.manual_seed(rank)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().uniform_(-1, 1)
    state_dict_saver.save({"model": model.state_dict()}, checkpoint_id=checkpoint)
    dist.destroy_process_group()


def _complete(checkpoint: Path, spec: JobSpec) -> None:
    """What else is in a checkpoint that an export reads."""
    from jobs.run.checkpoint_files import STATE_FILE, sha256
    from jobs.run.rundir import MANIFEST

    (checkpoint / STATE_FILE).write_text(json.dumps({"spec": spec.to_dict(), "ema": False}))
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in checkpoint.iterdir()
    }
    (checkpoint / MANIFEST).write_text(json.dumps({"step": 3, "files": files}))


if __name__ == "__main__":
    main()
