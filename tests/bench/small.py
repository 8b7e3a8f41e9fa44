"""`python tests/bench/small.py NAME`: figures of the documents that no other script measures.

base      parameters and bytes of the demo's model
toy       minutes of the toy job in README, from its own commands
fleet     what a fleet screen's connection takes on a machine in a minute: bytes, processor seconds
encoders  gigabytes of FLUX.2-dev's text encoder, in bf16 and packed
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from jobs.spec.values.value_types import BasePrecision

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
TICK: Final = os.sysconf("SC_CLK_TCK")
LOOKS: Final = 12  # in a minute, with the interval below
INTERVAL: Final = 5  # seconds, the default of machines.yaml
# Mistral Small 3.1, 24 B parameters.
MISTRAL: Final[dict[str, Any]] = {
    "text_config": {
        "model_type": "mistral",
        "hidden_size": 5120,
        "intermediate_size": 32768,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 131072,
    },
    "vision_config": {
        "model_type": "pixtral",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "head_dim": 64,
        "patch_size": 14,
        "image_size": 1540,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=["base", "toy", "fleet", "encoders"])
    name = parser.parse_args().name
    if name in ("base", "encoders"):
        {"base": base, "encoders": encoders}[name]()
        return
    with tempfile.TemporaryDirectory(prefix="bench-small-") as scratch:
        place = Path(scratch)
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "FSDP_TUI_HOME": str(place / "state"),
            "XDG_CACHE_HOME": str(place / "cache"),
            "FSDP_TUI_RUNNER_IDLE": "1",
        }
        {"toy": toy, "fleet": fleet}[name](place, environment)


def tui(place: Path, environment: dict[str, str], *words: str) -> str:
    """What a command prints that is run in a directory."""
    command = [sys.executable, "-m", "tui", *words]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)}:\n{done.stderr[-4000:]}")
    return done.stdout


def base() -> None:
    """Count the denoiser's parameters, and all files."""
    from safetensors import safe_open

    folder = ROOT / "engine" / "demo" / "base"
    (file,) = (folder / "transformer").glob("*.safetensors")
    with safe_open(file, framework="np") as tensors:
        shapes = [tensors.get_slice(name).get_shape() for name in tensors.keys()]  # noqa: SIM118
    print(f"{sum(map(math.prod, shapes)):,} parameters")
    print(f"{sum(path.stat().st_size for path in folder.rglob('*') if path.is_file()):,} bytes")


def toy(place: Path, environment: dict[str, str]) -> None:
    """Run the commands as they stand in README, but on the images that the toy brings."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (job,) = re.findall(r"^```yaml\n(.*?)^```", readme, re.S | re.M)
    (block,) = re.findall(r"^```\n(fsdp-tui toy .*?)^```", readme, re.S | re.M)
    (place / "job.yaml").write_text(job, encoding="utf-8")
    begun = time.monotonic()
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(line)[1:]
        tui(place, environment, *words, *(["--dataset=t/data"] if words[0] == "run" else []))
    print(f"{(time.monotonic() - begun) / 60:.2f} minutes")


def fleet(place: Path, environment: dict[str, str]) -> None:
    """Watch a machine that does nothing, then one that trains."""
    print("nothing changes:", watch(place, environment))
    tui(place, environment, "toy", "t")
    flags = ["--pretrained_model_name_or_path=t/model", "--dataset=t/data", "--resolution=64"]
    flags += ["--device=cpu", "--mixed_precision=no", "--max_train_steps=100000"]
    flags += ["--max_sequence_length=16"]
    job = json.loads(tui(place, environment, "submit", *flags, "--json"))
    events = Path(job["run_dir"]) / "events.jsonl"
    while not (events.exists() and '"kind":"step"' in events.read_text().replace(" ", "")):
        time.sleep(0.5)
    print("a running job:", watch(place, environment))
    tui(place, environment, "stop", str(job["id"]), "--now")


def watch(place: Path, environment: dict[str, str]) -> str:
    """Look for a minute at what the other end of a connection prints and computes."""
    words = ["list", "--watch", "--json", "--machine", f"--interval={INTERVAL}"]
    with subprocess.Popen(
        [sys.executable, "-m", "tui", *words],
        cwd=place,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        look(process.stdout)  # the first one has everything
        before, size = computed(process.pid), 0
        for _ in range(LOOKS):
            size += look(process.stdout)
        seconds = computed(process.pid) - before
        process.terminate()
    return f"{size} bytes, {seconds:.2f} processor seconds a minute"


def look(lines: Any) -> int:
    """The bytes of the lines up to the one that ends a look."""
    size = 0
    for line in lines:
        size += len(line)
        if line.startswith('{"t":'):
            return size
    sys.exit("the watching process ended")


def computed(pid: int) -> float:
    """Processor seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def encoders() -> None:
    """Count the encoder's bytes, as `estimate` does from the headers of its files."""
    import torch
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    from engine.model.files.weight_files import StoredTensor
    from engine.model.packing import packing_of
    from engine.model.text_encoders import kept_bytes

    with torch.device("meta"):
        model = Mistral3ForConditionalGeneration(Mistral3Config(**MISTRAL))
    places = [
        StoredTensor(name, Path(), tuple(tensor.shape), torch.bfloat16, start=0)
        for name, tensor in model.state_dict().items()
    ]
    schemes: tuple[BasePrecision, ...] = ("none", "int8", "nf4")
    for scheme in schemes:
        size = sum(kept_bytes(place, torch.bfloat16, packing_of(scheme)) for place in places)
        print(f"{scheme:5}{size / 1e9:6.1f} GB")


if __name__ == "__main__":
    main()
