"""`python -m engine.demo DIR`: write the demo's model and images, print where they are."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from engine.demo.pictures import PROMPTS, write_lessons
from engine.start.command import OneLineParser, run_command
from engine.toy import check_place, install
from jobs.errors import UserError
from jobs.run.rundir import read_json

BASE = Path(__file__).parent / "base"
CURVES = "training.json"


def write_model(model_dir: Path) -> None:
    """Write the base in fp32. It is shipped in bf16, which is half as large but slow on a CPU."""
    shutil.copytree(
        BASE, model_dir, dirs_exist_ok=True, ignore=shutil.ignore_patterns(CURVES, "__pycache__")
    )
    for path in model_dir.rglob("*.safetensors"):
        tensors = {name: tensor.to(torch.float32) for name, tensor in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})
    for path in model_dir.glob("*/config.json"):
        config = read_json(path) or {}
        if "dtype" in config:
            path.write_text(json.dumps(config | {"dtype": "float32"}, indent=2) + "\n")


def main(arguments: list[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit status: 0, or 2 if the directory cannot be written.
    """
    parser = OneLineParser(prog="python -m engine.demo", description=__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR")
    root: Path = parser.parse_args(arguments).directory
    model, data = root / "base", root / "hearts"
    try:
        root.mkdir(parents=True, exist_ok=True)
        for path in (model, data):
            check_place(path)
        install(model, write_model, {"demo": 1}, force=False)
        install(data, write_lessons, {"demo": 1}, force=False)
    except OSError as error:
        print(
            f"fsdp-tui: cannot write the demo to {root} ({error.strerror or error})",
            file=sys.stderr,
        )
        return 2
    except UserError as error:
        print(f"fsdp-tui: {error}", file=sys.stderr)
        return 2
    prompts = [{"prompt": prompt, "seed": seed} for seed, prompt in enumerate(PROMPTS)]
    print(json.dumps({"model": str(model), "data": str(data), "prompts": prompts}))
    return 0


if __name__ == "__main__":
    run_command(main)
