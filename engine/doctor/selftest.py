"""`python -m engine.doctor.selftest`: the self-test's checks with torch and diffusers; prints JSON.

same CHECKPOINT OTHER         compare the tensors of two checkpoints
sample MODEL EXPORT IMAGE     compare a sample with the stock pipeline and an exported LoRA
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine.start.command import OneLineParser

if TYPE_CHECKING:
    from collections.abc import Iterator


def main(words: list[str] | None = None) -> int:
    """Answer one question."""
    parser = OneLineParser(prog="python -m engine.doctor.selftest")
    commands = parser.add_subparsers(dest="command", required=True)
    same = commands.add_parser("same")
    sample = commands.add_parser("sample")
    for command, names in ((same, ("first", "second")), (sample, ("model", "export", "image"))):
        for name in names:
            command.add_argument(name, type=Path)
    options = parser.parse_args(words)
    try:
        if options.command == "same":
            answer = compare_checkpoints(options.first, options.second)
        else:
            answer = compare_sample(options.model, options.export, options.image)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"fsdp-tui: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    print(json.dumps(answer))
    return 0


def compare_checkpoints(first: Path, second: Path) -> dict[str, Any]:
    """Compare the tensors of two sharded checkpoints bit for bit.

    Returns:
        `tensors`: the number of tensors; `different`: names of those that differ or are in only
        one.
    """
    ours, theirs = read_tensors(first), read_tensors(second)
    different = sorted(ours.keys() ^ theirs.keys())
    different += [
        name for name in ours.keys() & theirs.keys() if not ours[name].equal(theirs[name])
    ]
    return {"tensors": len(ours), "different": different}


def read_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a sharded checkpoint, unsharded on the CPU, by path in the state."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch) / "whole.pt"
        dcp_to_torch_save(checkpoint, whole)
        state = torch.load(whole, weights_only=True)
    return dict(_tensors(state, ""))


def _tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _tensors(item, f"{name}.{number}")


def compare_sample(model: Path, export: Path, image: Path) -> dict[str, Any]:
    """Reproduce a run's sample with diffusers alone.

    Args:
        model: A pipeline as `save_pretrained` writes it.
        export: The directory of an exported LoRA.
        image: A PNG of the run, with its JSON file next to it.

    Returns:
        `largest_difference`: the largest difference of a pixel's channel, of 255; `contrast`: the
        difference between the lightest and darkest pixel of the run's sample, in the channel where
        it is largest.
    """
    import numpy as np
    from diffusers import DiffusionPipeline
    from PIL import Image

    facts = json.loads(image.with_suffix(".json").read_text(encoding="utf-8"))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    pipeline = DiffusionPipeline.from_pretrained(model).to(device)
    pipeline.load_lora_weights(export)
    pipeline.set_progress_bar_config(disable=True)
    width, height = facts["size"]
    made = pipeline(
        facts["prompt"],
        width=width,
        height=height,
        num_inference_steps=facts["steps"],
        guidance_scale=facts["guidance"],
        max_sequence_length=facts.get("max_sequence_length", 32),
        generator=torch.Generator("cpu").manual_seed(facts["seed"]),
    ).images[0]
    with Image.open(image) as sampled:
        expected = np.asarray(sampled.convert("RGB"), int)
    difference = np.abs(np.asarray(made, int) - expected)
    return {
        "largest_difference": int(difference.max()),
        "contrast": int(np.ptp(expected, (0, 1)).max()),
    }


if __name__ == "__main__":
    sys.exit(main())
