"""What README and the documents promise in figures, and how each is measured.

A claim has the command, what it is a figure of, the figure, where it is said (with {} for the
figure), and how it is read from what the command prints. Files of tests hold what a test runs with.
"""

from __future__ import annotations

from typing import Final

from tests.bench.figures import (
    Bench,
    Claim,
    at_most,
    count,
    lines,
    minutes,
    number,
    says,
    table,
    tests_pass,
)

README: Final = "README.md"
TRAINING: Final = "docs/training.md"
MEMORY: Final = "docs/memory-and-estimate.md"
EXPORTS: Final = "docs/checkpoints-and-exports.md"
FAMILIES: Final = "docs/families.md"
COMMANDS: Final = "docs/command-line.md"
FLEET: Final = "docs/fleet.md"
OTHERS: Final = "docs/coming-from.md"
IMPORTS: Final = "python tests/bench/imports.py"

BENCHES: Final = {
    "demo": Bench("fsdp-tui demo --headless"),
    "base": Bench("python tests/bench/small.py base"),
    "toy": Bench("python tests/bench/small.py toy"),
    "selftest": Bench("fsdp-tui selftest"),
    "parity-test": Bench('pytest -m "slow or not slow" tests/engine/parallel/test_parity.py'),
    "parity": Bench("python tests/bench/parity.py"),
    "load": Bench("python tests/bench/load.py", "--ways ours dcp accelerate"),
    "memory": Bench(
        "python tests/bench/memory.py sd3 flux flux2 qwen_image hunyuanvideo sdxl",
        "--types lora --ranks 2 --checkpointing on",
    ),
    "memory-ranks": Bench("pytest -m slow tests/engine/memory/test_memory_ranks.py"),
    "cards": Bench("python tests/bench/cards.py flux2"),
    "families": Bench("python tests/bench/cards.py --check"),
    "estimate": Bench(
        "fsdp-tui estimate --model_family=flux2 --gradient_checkpointing --ranks 1,2,4 --card 48"
    ),
    "nodes": Bench("fsdp-tui estimate --model_family=flux --gpus 8 --nodes 2,64"),
    "encoders": Bench("python tests/bench/small.py encoders"),
    "quantized": Bench("python tests/bench/quantized.py --steps 200"),
    "step": Bench("python tests/bench/step.py"),
    "kills": Bench("pytest -m slow tests/engine/checkpoint/test_checkpoint_kills.py"),
    "detect": Bench("python tests/bench/detect.py"),
    "data": Bench("pytest -m slow tests/e2e/test_data.py"),
    "export": Bench("python tests/bench/export.py"),
    "buckets": Bench("python tests/bench/buckets.py"),
    "fleet": Bench("python tests/bench/small.py fleet"),
    "ai-toolkit": Bench(f"{IMPORTS} ai-toolkit CHECKOUTS/ai-toolkit"),
    "simpletuner": Bench(f"{IMPORTS} simpletuner CHECKOUTS/SimpleTuner"),
    "diffusers": Bench(f"{IMPORTS} diffusers-script CHECKOUTS/diffusers"),
    "onetrainer": Bench(f"{IMPORTS} onetrainer CHECKOUTS/OneTrainer"),
    "diffusion-pipe": Bench(f"{IMPORTS} diffusion-pipe CHECKOUTS/diffusion-pipe"),
    "sd-scripts": Bench(f"{IMPORTS} kohya CHECKOUTS/sd-scripts"),
    "musubi-tuner": Bench(f"{IMPORTS} musubi-tuner CHECKOUTS/musubi-tuner"),
    "ltx-trainer": Bench(f"{IMPORTS} ltx-trainer CHECKOUTS/LTX-2"),
}

GIB: Final = 2**30 / 1e9  # GB
MIB: Final = 2**20 / 1e9  # GB
MANY: Final = 1e-6  # millions
BEYOND: Final = r"^ +{} +{} +\S+ +\S+ +\S+ +(\S+)"  # ranks, way: memory beyond the shard
TRACED: Final = r"^{} .*[ -]([\d.]+)% +\S+ +\S+$"  # family: predicted against traced
SCALED: Final = r"^flux(?: +[\d.]+%){{{}}} +([\d.]+)%"  # figures before it
DETECTED: Final = (
    "FLUX.2-dev, 32 B parameters: 570 MB of memory, 530 of it torch built for CUDA; 2 s"
)
BLOCKS: Final = "take 570 MB (530 of it torch built for CUDA) and about 2 s of CPU"
CARDS: Final = "needs 8 × 24 GB in bf16, 4 in 8 bits, 2 in 4 bits"
ENCODER: Final = "with `int8`, FLUX.2's takes about 25 GB instead of 48"
BASE: Final = "2.4 million parameters, 6 MB"
ROUNDED: Final = "3.1 / 4.3 % instead of 2.3 / 3.4 %"
EXPORTED: Final = "two ranks takes 180 MiB of memory beyond its imports"
SENT: Final = (
    "200 bytes a minute and machine when nothing changes, 850 with a running job, and 0.04"
)
BETWEEN: Final = "24 GB between two machines, close to 48 GB between many"
LOADED: Final = "loading 2.3 GB takes 3 MiB beyond the rank's shard; accelerate's rank-0 broadcast"
STEP: Final = "1.02 times (full) and 0.98 times (LoRA)"
SELFTEST: Final = {
    "docs/quickstart.md": "it trains for about {} minutes",
    "docs/troubleshooting.md": "It takes about {} minutes",
    COMMANDS: "Takes about {} minutes",
}

CLAIMS: Final = (
    Claim(
        "demo",
        "the demo",
        "2 minutes",
        {COMMANDS: "in about {} minutes", README: "in about two minutes"},
        minutes,
        clock=True,
    ),
    Claim(
        "demo",
        "hearts that the demo draws",
        "none at step 0, six at step 300",
        {README: "none at step 0 and all six at step 300"},
        says("step 0: 0 of 6 hearts .* step 300: 6 of 6 hearts"),
    ),
    Claim(
        "base",
        "parameters of the demo's model",
        "2.4 million",
        {README: BASE},
        number(r"^(\S+) parameters", 0.02, MANY),
    ),
    Claim(
        "base",
        "size of the demo's model",
        "6 MB",
        {README: BASE},
        number(r"^(\S+) bytes", scale=MANY),
    ),
    Claim(
        "buckets",
        "buckets at 1024 px, 64 apart",
        "13",
        {"docs/data.md": "| **64** | {} | 2.6%"},
        number(r"^ +64 +(\d+) "),
    ),
    Claim(
        "toy",
        "README's toy job",
        "a minute",
        {README: "trains on two CPU ranks in about {} minute"},
        at_most(r"^(\S+) minutes", 0.25),
        clock=True,
    ),
    Claim("selftest", "the self-test", "3 minutes", SELFTEST, minutes, clock=True),
    Claim(
        "selftest",
        "a resumed run",
        "equal bit for bit",
        {
            README: "losses equal bit for bit those of a run that never stopped",
            EXPORTS: "on CPU in fp32, losses equal those of a run that",
        },
        says("all losses are bit-identical to an uninterrupted job"),
    ),
    Claim(
        "parity-test",
        "ranks against one process",
        "1e-5, four steps",
        {
            README: "on 2 and 4 ranks match one process within {} over four steps",
            "tests/support/engine/parity.py": "STEPS: Final = 4 TOLERANCE: Final = 1e-5",
        },
        tests_pass,
    ),
    Claim(
        "parity",
        "ranks against one process, table",
        "the table",
        {TRAINING: "| layout | LoRA, SGD: tensors |"},
        table(r"^\| (?:ddp|fsdp2|hsdp)[^|]*(\|.*)$", 1e-6),
    ),
    Claim(
        "parity",
        "bf16 against fp32",
        "0.4 %",
        {TRAINING: "bf16 stays within {} % of fp32's losses"},
        at_most(r"^bf16 against fp32, losses: (\S+)%"),
    ),
    Claim(
        "parity",
        "context parallelism against one process",
        "4e-6",
        {TRAINING: "agrees with one process to {} in every gradient"},
        at_most(r"^context parallelism, gradients: (\S+)"),
    ),
    Claim(
        "load",
        "size of the model that is loaded",
        "2.3 GB",
        {README: LOADED, TRAINING: "Loading {} GB of fp32"},
        number(r"^(\S+) MiB of weights", 0.01, MIB),
    ),
    Claim(
        "load",
        "loading, beyond the shard",
        "3 MiB",
        {README: LOADED, TRAINING: "| 2, 4 | fsdp-tui | {} MiB | 1.00 × the file |"},
        number(BEYOND.format(r"\d", "ours"), 0.2),
    ),
    Claim(
        "load",
        "loading, bytes read",
        "1.00 × the file",
        {TRAINING: "| fsdp-tui | 3 MiB | {} × the file |"},
        number(r"^ +\d +ours .* (\S+)×  ", 0.02),
    ),
    Claim(
        "load",
        "accelerate's loading, 2 ranks",
        "2,201 MiB",
        {TRAINING: "| {} and 2,200 MiB |", README: "rank-0 broadcast takes {} MiB"},
        number(BEYOND.format(2, "accelerate")),
    ),
    Claim(
        "load",
        "accelerate's loading, 4 ranks",
        "2,200 MiB",
        {TRAINING: "| 2,201 and {} MiB |"},
        number(BEYOND.format(4, "accelerate")),
    ),
    Claim(
        "load",
        "torch's loading, 2 ranks",
        "1,124 MiB",
        {TRAINING: "| {} and 526 MiB |"},
        number(BEYOND.format(2, "dcp")),
    ),
    Claim(
        "load",
        "torch's loading, 4 ranks",
        "526 MiB",
        {TRAINING: "| 1,124 and {} MiB |"},
        number(BEYOND.format(4, "dcp")),
    ),
    Claim(
        "memory",
        "predicted memory, Stable Diffusion XL",
        "0.95 %",
        {
            MEMORY: "| Stable Diffusion XL | {} % |",
            README: "within 0.00–{} % of a full trace of torch's FSDP2, 72 cases, six models",
        },
        at_most(TRACED.format("sdxl")),
    ),
    Claim(
        "memory",
        "predicted memory, Qwen-Image",
        "0.08 %",
        {MEMORY: "| Qwen-Image | {} % |"},
        at_most(TRACED.format("qwen_image")),
    ),
    Claim(
        "memory",
        "predicted memory, FLUX.1-dev",
        "0.01 %",
        {MEMORY: "| FLUX.1-dev | {} % |"},
        at_most(TRACED.format("flux")),
    ),
    Claim(
        "memory",
        "predicted memory, FLUX.2-dev, Stable Diffusion 3.5, HunyuanVideo",
        "0.00 %",
        {MEMORY: "| FLUX.2-dev (32 B), Stable Diffusion 3.5 Large, HunyuanVideo | {} % |"},
        at_most(TRACED.format("(?:flux2|sd3|hunyuanvideo)")),
    ),
    Claim(
        "memory-ranks",
        "predicted memory of CPU ranks",
        "3 %",
        {
            MEMORY: "on toy models are within {} % of the prediction",
            "tests/engine/memory/test_memory_ranks.py": "TOLERANCE: Final = 0.03",
        },
        tests_pass,
    ),
    Claim(
        "cards",
        "GPUs for a FLUX.2-dev LoRA",
        "8 × 24 GB",
        {README: CARDS},
        number(r"'lora': \{'24': (\d+),", 0),
    ),
    Claim(
        "cards",
        "GPUs for the same LoRA in 8 bits",
        "4 × 24 GB",
        {README: CARDS},
        number(r"'lora_8bit': \{'24': (\d+),", 0),
    ),
    Claim(
        "cards",
        "GPUs for the same LoRA in 4 bits",
        "2 × 24 GB",
        {README: CARDS},
        number(r"'lora_4bit': \{'24': (\d+),", 0),
    ),
    Claim(
        "families",
        "smallest GPUs of each family",
        "23 families",
        {FAMILIES: "The GPU columns give the smallest number of GPUs"},
        count("^same$"),
    ),
    Claim(
        "estimate",
        "what `estimate` prints",
        "the example",
        {MEMORY: "The last command prints (shortened):"},
        lines,
    ),
    Claim(
        "nodes",
        "FSDP2 between two machines",
        "24 GB",
        {"docs/slurm.md": BETWEEN},
        number(r"^2 +fsdp2 +(\S+) GiB", 0.02, GIB),
    ),
    Claim(
        "nodes",
        "FSDP2 between many machines",
        "48 GB",
        {"docs/slurm.md": BETWEEN},
        number(r"^64 +fsdp2 +(\S+) GiB", 0.02, GIB),
    ),
    Claim(
        "encoders",
        "FLUX.2-dev's text encoder",
        "48 GB",
        {TRAINING: ENCODER},
        number(r"^none +(\S+) GB", 0.02),
    ),
    Claim(
        "encoders",
        "FLUX.2-dev's text encoder in 8 bits",
        "25 GB",
        {TRAINING: ENCODER},
        number(r"^int8 +(\S+) GB", 0.02),
    ),
    Claim(
        "quantized",
        "error of a packed base, %",
        "the table",
        {TRAINING: "| family | bf16 | `int8` | `fp8_scaled` | `fp8` | `nf4` |"},
        table(r"^[a-z]\w+ +((?:[\d.]+% +){10})", 0.1),
    ),
    Claim(
        "quantized",
        "loss on a packed base",
        "the table",
        {TRAINING: "| loss of steps | bf16 |"},
        table(r"^(?:1 to 20|81 to 100|181 to 200) +((?:[\d.]+ +){5})", 1e-3),
    ),
    Claim(
        "quantized",
        "loss on a packed base, against bf16",
        "0.9%",
        {TRAINING: "no scheme's loss, as a mean of 20 steps, is more than {}% from bf16's"},
        at_most(r"^largest difference from bf16: (\S+)%"),
    ),
    Claim(
        "quantized",
        "error of products in fp8, forward",
        "3.1 %",
        {TRAINING: ROUNDED},
        number(SCALED.format(10)),
    ),
    Claim(
        "quantized",
        "error of products in fp8, gradients",
        "4.3 %",
        {TRAINING: ROUNDED},
        number(SCALED.format(11)),
    ),
    Claim(
        "step",
        "the engine's step, full",
        "1.02 times",
        {README: STEP, TRAINING: STEP},
        at_most(r"^full +\S+ +\S+ +(\S+)", 0.02),
        clock=True,
    ),
    Claim(
        "step",
        "the engine's step, LoRA",
        "0.98 times",
        {README: STEP, TRAINING: STEP},
        at_most(r"^lora +\S+ +\S+ +(\S+)", 0.02),
        clock=True,
    ),
    Claim(
        "kills",
        "ranks killed while they save",
        "12 moments",
        {
            README: "ranks killed at {} random moments around their saves",
            "tests/engine/checkpoint/test_checkpoint_kills.py": "KILLS: Final = 12",
        },
        tests_pass,
    ),
    Claim(
        "detect",
        "block detection",
        "570 MB",
        {README: DETECTED, FAMILIES: BLOCKS},
        number(r"^FLUX.2-dev, looked at .* (\d+)$"),
    ),
    Claim(
        "detect",
        "torch alone",
        "530 MB",
        {README: DETECTED, FAMILIES: BLOCKS},
        number(r"^torch, imported .* (\d+)$"),
    ),
    Claim(
        "detect",
        "block detection, processor",
        "2 s",
        {README: DETECTED, FAMILIES: BLOCKS},
        number(r"^FLUX.2-dev, looked at .* (\S+) to \S+ +\d+$", 0.5),
    ),
    Claim(
        "data",
        "images in every format and with every defect",
        "400 images",
        {
            README: "{} images in every format and with every defect",
            "tests/e2e/test_data.py": "PICTURES = 400",
        },
        tests_pass,
    ),
    Claim(
        "export",
        "size of the exported checkpoint",
        "2.3 GB",
        {EXPORTS: "Exporting a {} GB checkpoint of"},
        number(r"^checkpoint (\S+) MiB", 0.02, MIB),
    ),
    Claim(
        "export",
        "exporting, beyond imports",
        "180 MiB",
        {EXPORTS: EXPORTED},
        number(r"highest memory (\S+) MiB beyond"),
    ),
    Claim(
        "fleet",
        "a connection, nothing changes",
        "200 bytes a minute",
        {FLEET: SENT},
        number(r"^nothing changes: (\d+) bytes"),
    ),
    Claim(
        "fleet",
        "a connection, a running job",
        "850 bytes a minute",
        {FLEET: SENT},
        number(r"^a running job: (\d+) bytes"),
    ),
    Claim(
        "fleet",
        "a connection, processor",
        "0.04 s a minute",
        {FLEET: SENT},
        number(r"bytes, (\S+) processor seconds", 0.5),
    ),
    Claim(
        "ai-toolkit",
        "imports from ai-toolkit",
        "52 of 77 compared; 0 silent",
        {OTHERS: "| ai-toolkit, 21 August 2026 | 77 | 52 | 0 |"},
        says("52 of 77 compared; 0 silent"),
    ),
    Claim(
        "simpletuner",
        "imports from SimpleTuner",
        "84 of 149 compared; 0 silent",
        {OTHERS: "| SimpleTuner, 22 August 2026 | 149 | 84 | 0 |"},
        says("84 of 149 compared; 0 silent"),
    ),
    Claim(
        "diffusers",
        "imports from diffusers' scripts",
        "86 of 205 compared; 0 silent",
        {OTHERS: "| diffusers' scripts, 23 August 2026 | 205 | 86 | 0 |"},
        says("86 of 205 compared; 0 silent"),
    ),
    Claim(
        "onetrainer",
        "imports from OneTrainer",
        "45 of 60 compared; 0 silent",
        {OTHERS: "| OneTrainer, 19 August 2026 | 60 | 45 | 0 |"},
        says("45 of 60 compared; 0 silent"),
    ),
    Claim(
        "diffusion-pipe",
        "imports from diffusion-pipe",
        "31 of 36 compared; 0 silent",
        {OTHERS: "| diffusion-pipe, 20 August 2026 | 36 | 31 | 0 |"},
        says("31 of 36 compared; 0 silent"),
    ),
    Claim(
        "sd-scripts",
        "imports from sd-scripts",
        "25 of 33 compared; 0 silent",
        {OTHERS: "| sd-scripts, 16 February 2026 | 33 | 25 | 0 |"},
        says("25 of 33 compared; 0 silent"),
    ),
    Claim(
        "musubi-tuner",
        "imports from musubi-tuner",
        "23 of 39 compared; 0 silent",
        {OTHERS: "| musubi-tuner, 24 June 2026 | 39 | 23 | 0 |"},
        says("23 of 39 compared; 0 silent"),
    ),
    Claim(
        "ltx-trainer",
        "imports from ltx-trainer",
        "3 of 16 compared; 0 silent",
        {OTHERS: "| ltx-trainer, 16 August 2026 | 16 | 3 | 0 |"},
        says("3 of 16 compared; 0 silent"),
    ),
)
