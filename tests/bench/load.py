"""`python tests/bench/load.py`: memory, bytes and seconds of loading a large model.

Writes a toy of 2.3 GB (or takes `--model`), loads its transformer on 2 and on 4 CPU ranks in
several ways, each from a cold page cache, and prints one table: the best time of a few, and the
worst memory. Memory is unique memory (USS: what would be free if the process ended), sampled from
outside the ranks, against what each had before.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT: Final = Path(__file__).resolve().parents[2]
MIB: Final = 2**20
SAMPLE_SECONDS: Final = 0.02
SCHEMES: Final = ("fp8", "fp8_scaled", "int8", "nf4")
WAYS: Final = {
    "ours": "plain reads into the shard",
    "ours-bf16": "the same, frozen base cast to bf16",
    **{f"ours-{scheme}": f"the same, packed in {scheme}" for scheme in SCHEMES},
    "mapped": "safetensors get_slice",
    "dcp": "torch's HuggingFaceStorageReader",
    "accelerate": "rank 0 loads and broadcasts",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a model directory; default: write a toy")
    parser.add_argument("--dir", type=Path, help="where the toy and the results go; default: /tmp")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--hidden_scale", type=int, default=16, help="of the toy; 16: 2.3 GB")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank_of:
        rank(asked.rank_of, asked.model, asked.dir)
        return
    with tempfile.TemporaryDirectory(prefix="bench-load-", dir=asked.dir) as scratch:
        model = asked.model or write_toy(Path(scratch), asked.hidden_scale)
        files = sorted((model / "transformer").glob("*.safetensors"))
        size = sum(file.stat().st_size for file in files)
        print(f"{size / MIB:,.0f} MiB of weights in {len(files)} file(s); memory in MiB a rank")
        print(
            f"{'ranks':>5}  {'way':11}{'seconds':>8}{'growth':>9}{'shard':>8}{'excess':>8}"
            f"{'asked for':>11}{'from disk':>11}  how"
        )
        digests: dict[int, set[str]] = {}
        for ranks in asked.ranks:
            for way in asked.ways:
                runs = [
                    measure(way, ranks, model, files, Path(scratch)) for _ in range(asked.repeats)
                ]
                worst = max((o for run in runs for o in run), key=lambda o: o["peak"] - o["shard"])
                asked_for = max(sum(one["rchar"] for one in run) for run in runs) / size
                from_disk = max(sum(one["read_bytes"] for one in run) for run in runs) / size
                seconds = min(max(one["seconds"] for one in run) for run in runs)
                print(
                    f"{ranks:5}  {way:11}{seconds:8.1f}"
                    f"{worst['peak'] / MIB:9,.0f}{worst['shard'] / MIB:8,.0f}"
                    f"{(worst['peak'] - worst['shard']) / MIB:8,.0f}"
                    f"{asked_for:10.3f}×{from_disk:10.3f}×  {WAYS[way]}",
                    flush=True,
                )
                if way in ("ours", "mapped", "dcp", "accelerate"):
                    digests.setdefault(ranks, set()).update(
                        json.dumps([one["digest"] for one in run]) for run in runs
                    )
    print(
        "growth, shard, excess: of the rank with most beyond its shard, at its highest moment.\n"
        "asked for: by reads, of all ranks, as parts of the files (mapped pages do not show, what "
        "comes through\nsockets does); from disk: what storage gave, read-ahead included."
    )
    wrong = [ranks for ranks, kinds in digests.items() if len(kinds) > 1]
    print(f"the ways disagree on {wrong} ranks" if wrong else "all ways loaded the same numbers")
    sys.exit(bool(wrong))


def write_toy(directory: Path, hidden_scale: int) -> Path:
    """The model directory of a fresh toy."""
    command = [sys.executable, "-m", "engine.toy", str(directory / "toy"), "--pictures=1"]
    command += ["--size=32", f"--hidden_scale={hidden_scale}"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return directory / "toy" / "model"


def measure(
    way: str, ranks: int, model: Path, files: list[Path], scratch: Path
) -> list[dict[str, Any]]:
    """Load once; what each rank reports, with its peak growth in bytes."""
    results = Path(tempfile.mkdtemp(prefix=f"{way}-{ranks}-", dir=scratch))
    for file in files:
        forget(file)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", __file__, f"--rank-of={way}"]
    command += [f"--model={model}", f"--dir={results}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    samples: dict[int, list[tuple[float, int]]] = {}
    log = results / "log"
    with log.open("w") as output:
        launched = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        while launched.poll() is None:
            for begun in results.glob("*.pid"):
                pid = int(begun.stem)
                if (memory := unique_memory(pid)) is not None:
                    samples.setdefault(pid, []).append((time.monotonic(), memory))
            time.sleep(SAMPLE_SECONDS)
    if launched.returncode:
        sys.exit(f"{way} on {ranks} ranks failed:\n{log.read_text()[-4000:]}")
    found = [json.loads(path.read_text()) for path in sorted(results.glob("rank*.json"))]
    for one in found:
        inside = [m for t, m in samples[one["pid"]] if one["begin"] <= t <= one["end"]]
        one["peak"] = max([*inside, one["after"]]) - one["before"]
    return found


def forget(file: Path) -> None:
    """Drop a file from the page cache (where the file system can)."""
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def unique_memory(pid: int) -> int | None:
    """Bytes that only this process has; None when it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def counters() -> dict[str, int]:
    """Bytes this process has read so far: by system calls, and from storage."""
    lines = Path("/proc/self/io").read_text().splitlines()
    values = dict(line.split(": ") for line in lines)
    return {name: int(values[name]) for name in ("rchar", "read_bytes")}


def rank(way: str, model: Path, results: Path) -> None:
    """One rank's part: load in one way, and write down what it took."""
    import torch
    import torch.distributed as dist
    from diffusers import FluxTransformer2DModel
    from torch.distributed.fsdp import fully_shard

    from engine.model.files import weights

    dist.init_process_group("gloo")
    load = LOADERS[way]
    import_all()
    fully_shard(torch.nn.Linear(4, 4))
    (results / f"{os.getpid()}.pid").touch()
    dist.barrier()
    before, io_before, begin = unique_memory(os.getpid()), counters(), time.monotonic()
    module = load(FluxTransformer2DModel, model)
    end, after, io_after = time.monotonic(), unique_memory(os.getpid()), counters()
    dist.barrier()
    local = {n: weights.local_part(p.detach()) for n, p in module.named_parameters()}
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    report = {
        "pid": os.getpid(),
        "begin": begin,
        "end": end,
        "seconds": end - begin,
        "before": before,
        "after": after,
        "shard": sum(t.numel() * t.element_size() for t in local.values()),
        "digest": [int(t.view(bits[t.element_size()]).sum()) for t in local.values()],
        **{name: io_after[name] - io_before[name] for name in io_after},
    }
    (results / f"rank{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


def import_all() -> None:
    """Import what the ways to load use, which is no part of loading: it takes up to 10 MiB."""
    from importlib import import_module

    from engine import families

    families.load("flux")
    for name in ("engine.model.quantized_linear", "jobs.spec.file.load"):
        import_module(name)
    for name in ("torch.distributed.checkpoint", "accelerate.utils.fsdp_utils", "safetensors"):
        import_module(name)


def build(model_class: Any, model: Path, **changes: Any) -> tuple[Any, dict[str, Any]]:
    """The model, built on meta, sharded block by block and given memory; and where its tensors are.

    Sharded as the engine does, but without its choices: this measures loading alone.
    """
    import torch
    from torch.distributed.fsdp import fully_shard

    from engine import families
    from engine.model.files import weights
    from engine.model.quantized_linear import quantize_layers
    from jobs.spec.file.load import load_spec

    values = {"model_type": "full", "mixed_precision": "no", "device": "cpu"} | changes
    values |= {"name": "bench", "dataset": ".", "pretrained_model_name_or_path": str(model)}
    spec = load_spec(None, values)
    module, stored = weights.build_on_meta(model_class, model / "transformer", spec)
    quantize_layers(module, spec, families.load("flux"))
    for block in [*module.transformer_blocks, *module.single_transformer_blocks, module]:
        fully_shard(block)
    weights.materialise(module, torch.device("cpu"))
    return module, stored


def ours(model_class: Any, model: Path, **changes: Any) -> Any:
    from engine.model.files import weights

    module, stored = build(model_class, model, **changes)
    weights.stream(module, stored)
    return module


def ours_bf16(model_class: Any, model: Path) -> Any:
    return ours(model_class, model, model_type="lora", mixed_precision="bf16")


def ours_packed(scheme: str, model_class: Any, model: Path) -> Any:
    return ours(
        model_class, model, model_type="lora", mixed_precision="bf16", base_precision=scheme
    )


def mapped(model_class: Any, model: Path) -> Any:
    import torch
    from safetensors import safe_open

    from engine.model.files import weights

    module, stored = build(model_class, model)
    targets = dict(module.named_parameters())
    with torch.no_grad():
        for file in {place.file for place in stored.values()}:
            with safe_open(file, framework="pt") as tensors:
                for name in (name for name, place in stored.items() if place.file == file):
                    rows = weights.rows_of(targets[name])
                    weights.local_part(targets[name]).copy_(tensors.get_slice(name)[rows])
    return module


def dcp(model_class: Any, model: Path) -> Any:
    import torch.distributed.checkpoint as checkpoint

    module, _ = build(model_class, model)
    reader = checkpoint.HuggingFaceStorageReader(str(model / "transformer"))
    checkpoint.load(dict(module.named_parameters()), storage_reader=reader)
    return module


def accelerate(model_class: Any, model: Path) -> Any:
    """`fsdp_cpu_ram_efficient_loading` of accelerate, by its own functions.

    On CPU its `Accelerator` drops the plugin without a word, so its function is called with a
    stand-in that says what an `Accelerator` would say on GPUs.
    """
    import torch.distributed as dist
    from accelerate import init_empty_weights
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    directory = model / "transformer"
    if dist.get_rank() == 0:
        module = model_class.from_pretrained(directory)
    else:
        with init_empty_weights():
            module = model_class.from_config(model_class.load_config(directory))
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=list(model_class._no_split_modules),
        cpu_ram_efficient_loading=True,
    )
    stand_in = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        device="cpu",
        mixed_precision="no",
        is_main_process=dist.get_rank() == 0,
    )
    return fsdp2_prepare_model(stand_in, module)


LOADERS: Final[dict[str, Callable[[Any, Path], Any]]] = {
    "ours": ours,
    "ours-bf16": ours_bf16,
    **{f"ours-{scheme}": partial(ours_packed, scheme) for scheme in SCHEMES},
    "mapped": mapped,
    "dcp": dcp,
    "accelerate": accelerate,
}

if __name__ == "__main__":
    main()
