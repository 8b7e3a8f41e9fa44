"""`python tests/bench/peer.py SCRIPT`: a LoRA trained by a script of diffusers, and by the engine.

SCRIPT is diffusers' `examples/dreambooth/train_dreambooth_lora_flux.py`. Both train FLUX.1's toy on
one CPU thread, on the same images, with the settings of the same command line, which `fsdp-tui
import` translates for the engine. Printed for each seed: the loss on held-out images, at the same
noise and noise levels for both; and for each step seconds, processor seconds, and the highest
memory of the process. A step is what a run of `--steps` takes beyond one of two steps.

The script needs torchvision: `pip install torchvision`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import diffusers  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
import yaml  # noqa: E402
from PIL import Image  # noqa: E402

from jobs.imports.imported import import_script  # noqa: E402
from jobs.run.rundir import RunDir  # noqa: E402

SCRIPT: Final = "train_dreambooth_lora_flux.py"
PROMPT: Final = "a drawing of shapes"
SIDE: Final = 64
HELD_OUT: Final = 8  # images
LEVELS: Final = 16  # of noise, for each held-out image
WEIGHTS: Final = "pytorch_lora_weights.safetensors"


@dataclass(frozen=True)
class Cost:
    """What a process took: seconds by the clock and of a processor, and its highest memory."""

    wall: float
    cpu: float
    memory: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("script", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--kaiming", action="store_true", help="the engine's own initial values")
    asked = parser.parse_args()
    if asked.script.name != SCRIPT:
        parser.error(f"{asked.script} must be named {SCRIPT}: `import` reads defaults by the name")
    with tempfile.TemporaryDirectory(prefix="bench-peer-") as scratch:
        compare(Path(scratch), asked)


def compare(scratch: Path, asked: argparse.Namespace) -> None:
    model, held_out = write_toy(scratch)
    print(f"untrained: held-out loss {held_out_loss(model, held_out):.5f}")
    print(f"{'seed':>4}  {'who':10}{'loss':>10}{'s/step':>9}{'CPU s/step':>12}{'MiB':>7}")
    ratios = []
    for seed in range(asked.seeds):
        losses = []
        for who, train in (("script", train_by_script), ("engine", train_by_engine)):
            place = scratch / f"{who}-{seed}"
            start, _ = train(place / "short", model, asked, seed, 2)
            cost, weights = train(place / "whole", model, asked, seed, asked.steps)
            steps = asked.steps - 2
            losses.append(held_out_loss(model, held_out, weights))
            print(
                f"{seed:4}  {who:10}{losses[-1]:10.5f}{(cost.wall - start.wall) / steps:9.3f}"
                f"{(cost.cpu - start.cpu) / steps:12.3f}{cost.memory >> 20:7}",
                flush=True,
            )
        ratios.append(losses[1] / losses[0])
    mean, least, most = (f"{f(ratios) - 1:+.2%}" for f in (statistics.fmean, min, max))
    print(f"the engine's held-out loss is {mean} from the script's ({least} to {most})")


def write_toy(scratch: Path) -> tuple[Path, list[Path]]:
    """The model, and held-out images; those to train on are in `images`, without captions."""
    command = [sys.executable, "-m", "engine.toy", str(scratch), "--pictures=96", f"--size={SIDE}"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    square = []
    for path in sorted((scratch / "data").glob("*.png")):
        with Image.open(path) as image:
            if image.size == (SIDE, SIDE):
                square.append(path)
    (scratch / "images").mkdir()
    for path in square[HELD_OUT:]:
        path.rename(scratch / "images" / path.name)
    return scratch / "model", square[:HELD_OUT]


def command_line(model: Path, place: Path, asked: argparse.Namespace, seed: int, steps: int) -> Any:
    """The script's own arguments."""
    values = {
        "pretrained_model_name_or_path": model,
        "instance_data_dir": model.parent / "images",
        "instance_prompt": PROMPT,
        "output_dir": place,
        "resolution": SIDE,
        "max_sequence_length": 77,
        "train_batch_size": 4,
        "max_train_steps": steps,
        "rank": asked.rank,
        "lora_alpha": asked.rank,
        "learning_rate": asked.learning_rate,
        "lr_scheduler": "constant",
        "lr_warmup_steps": 0,
        "adam_weight_decay": 0,
        "guidance_scale": 1,
        "mixed_precision": "no",
        "checkpointing_steps": 100_000,
        "seed": seed,
    }
    return [asked.script, *(f"--{name}={value}" for name, value in values.items())]


def train_by_script(
    place: Path, model: Path, asked: argparse.Namespace, seed: int, steps: int
) -> tuple[Cost, Path]:
    arguments = command_line(model, place, asked, seed, steps)
    return measured([sys.executable, *arguments], place), place / WEIGHTS


def train_by_engine(
    place: Path, model: Path, asked: argparse.Namespace, seed: int, steps: int
) -> tuple[Cost, Path]:
    place.mkdir(parents=True)
    words = command_line(model, place, asked, seed, steps)
    script = place / "train.sh"
    script.write_text(shlex.join(["accelerate", "launch", *map(str, words)]) + "\n")
    values = import_script([str(script)]).spec.to_dict(only_set=True) | {
        "name": "peer",
        "device": "cpu",
        "num_processes": 1,
        "cache_dir": str(place / "cache"),
        **({"lora_init": "kaiming"} if asked.kaiming else {}),
    }
    run_dir = RunDir(place / "run")
    run_dir.create()
    run_dir.job_file.write_text(yaml.safe_dump(values))
    return measured([sys.executable, "-m", "engine", run_dir.root], place), run_dir.export / WEIGHTS


def measured(command: list[Any], place: Path) -> Cost:
    """Run it on one thread of the CPU."""
    place.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {
        "ACCELERATE_USE_CPU": "true",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    log = place / "output.txt"
    begun = time.perf_counter()
    with log.open("w") as output:
        process = subprocess.Popen(
            [*map(str, command)], env=environment, cwd=place, stdout=output, stderr=output
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command[1]} failed:\n{log.read_text()[-3000:]}")
    wall, cpu = time.perf_counter() - begun, used.ru_utime + used.ru_stime
    return Cost(wall, cpu, used.ru_maxrss * 1024)


@torch.no_grad()
def held_out_loss(model: Path, images: list[Path], lora: Path | None = None) -> float:
    """Mean squared error of the predicted velocity, by stock diffusers."""
    from diffusers import FluxPipeline
    from diffusers.image_processor import VaeImageProcessor

    for library in (diffusers, transformers):
        library.utils.logging.disable_progress_bar()
    pipeline = FluxPipeline.from_pretrained(model)
    if lora is not None:
        pipeline.load_lora_weights(lora.parent, weight_name=lora.name)
    vae, denoiser = pipeline.vae, pipeline.transformer
    texts, pooled, text_ids = pipeline.encode_prompt(PROMPT, None, max_sequence_length=77)
    losses = []
    for number, path in enumerate(images):
        with Image.open(path) as image:
            pixels = VaeImageProcessor().preprocess(image.convert("RGB"))
        clean = vae.encode(pixels).latent_dist.mode()
        clean = (clean - vae.config.shift_factor) * vae.config.scaling_factor
        generator = torch.Generator().manual_seed(number)
        for level in range(LEVELS):
            noise = torch.randn(clean.shape, generator=generator)
            sigma = (level + 0.5) / LEVELS
            noisy = pipeline._pack_latents((1 - sigma) * clean + sigma * noise, *clean.shape)
            found = denoiser(
                hidden_states=noisy,
                timestep=torch.tensor([sigma]),
                guidance=torch.ones(1) if denoiser.config.guidance_embeds else None,
                pooled_projections=pooled,
                encoder_hidden_states=texts,
                txt_ids=text_ids,
                img_ids=pipeline._prepare_latent_image_ids(
                    1, clean.shape[2] // 2, clean.shape[3] // 2, clean.device, clean.dtype
                ),
            ).sample
            expected = pipeline._pack_latents(noise - clean, *clean.shape)
            losses.append(float((found - expected).square().mean()))
    return statistics.fmean(losses)


if __name__ == "__main__":
    main()
