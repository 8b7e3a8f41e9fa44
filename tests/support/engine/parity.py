"""The parity table: its cases, and the runs that fill it."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from PIL import Image
from safetensors.torch import load_file

from engine.model.release import STILL_HELD
from jobs.run.eventlog import EventLog
from tests.support.engine.ranks.parity import train
from tests.support.engine.toy_jobs import start_ranks, toy_values
from tests.support.engine.training_adapters import write_training_adapter

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    import torch


STEPS: Final = 4


TOLERANCE: Final = 1e-5


# Relative, of a loss after these steps; a unit in the last place is 4e-3 in bf16, 5e-4 in fp16.
ROUNDING: Final = {"bf16": 1e-2, "fp16": 5e-3}


COMMON: Final = {"max_train_steps": STEPS, "max_grad_norm": 0.05}


ALONE: Final = {"num_processes": 1, "train_batch_size": 2}


# One for each pair of batch sizes, on which depends what a step trains on.
REFERENCES: Final[dict[str, dict[str, Any]]] = {
    "one process": ALONE | {"gradient_accumulation_steps": 2},
    "one process, singly": ALONE | {"train_batch_size": 1, "gradient_accumulation_steps": 4},
    "one process, of eight": ALONE | {"train_batch_size": 1, "gradient_accumulation_steps": 8},
}


SHARDED: Final = {"num_processes": 2, "train_batch_size": 2, "strategy": "fsdp2"}


FOUR: Final = {"num_processes": 4, "train_batch_size": 1}


# Every layout, for LoRA and full training, and what only one of them has.
LAYOUTS: Final[dict[str, dict[str, Any]]] = {
    "ddp 2": {"num_processes": 2, "train_batch_size": 2, "strategy": "ddp"},
    "fsdp2 2": SHARDED,
    "fsdp2 2, accumulated": SHARDED | {"train_batch_size": 1, "gradient_accumulation_steps": 2},
    "fsdp2 2, cpu offload": SHARDED | {"fsdp_cpu_offload": True},
    "fsdp2 2, activation checkpointing": SHARDED | {"fsdp_activation_checkpointing": True},
    "fsdp2 4": FOUR | {"strategy": "fsdp2"},
    "hsdp 2x2": FOUR | {"strategy": "hsdp", "dp_replicate_size": 2},
}


LORA_ONLY: Final[dict[str, dict[str, Any]]] = {
    "one process, swapped blocks": ALONE | {"gradient_accumulation_steps": 2, "swap_blocks": 2},
    # On GPUs of 16 and 24 GB, see `toy_jobs`: one forward in a step, and three.
    "ddp 2, by size of GPU": LAYOUTS["ddp 2"]
    | {"train_batch_size": 1, "gradient_accumulation_steps": 2}
    | {"batch_shares": {"16GB": 1, "24GB": 3}, "swap_blocks": {"16GB": 3, "24GB": 1}}
    | {"gradient_checkpointing": True},
    "fsdp2 2, sharded lora": SHARDED | {"lora_placement": "sharded"},
    "hsdp 2x2, sharded lora": LAYOUTS["hsdp 2x2"] | {"lora_placement": "sharded"},
    "fsdp2 2, sharded lora, accumulated": LAYOUTS["fsdp2 2, accumulated"]
    | {"lora_placement": "sharded"},
}


# Options that must not change the numbers; full training reaches all of their code.
FULL_ONLY: Final[dict[str, dict[str, Any]]] = {
    "fsdp2 2, selective checkpointing": SHARDED
    | {"gradient_checkpointing": True, "gradient_checkpointing_policy": "selective"},
    "fsdp2 2, no reshard": SHARDED | {"fsdp_reshard_after_forward": False},
    "fsdp2 2, no wrap": SHARDED | {"fsdp_auto_wrap_policy": "NO_WRAP"},
    "fsdp2 2, prefetch, size wrap": SHARDED
    | {"fsdp_forward_prefetch": 1, "fsdp_backward_prefetch": 2}
    | {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 100_000},
    "fsdp2 2, compiled": SHARDED | {"torch_compile": True, "torch_compile_backend": "eager"},
    "fsdp2 2, compiled, selective checkpointing": SHARDED
    | {
        "torch_compile": True,
        "torch_compile_backend": "eager",
        "gradient_checkpointing": True,
        "gradient_checkpointing_policy": "selective",
    },
    "fsdp2 4, reshard to 2": FOUR | {"strategy": "fsdp2", "fsdp_reshard_after_forward": 2},
    "fsdp2 2, cpu offload, accumulated": LAYOUTS["fsdp2 2, accumulated"]
    | {"fsdp_cpu_offload": True},
    # Four ranks accumulate a batch of eight.
    "hsdp 2x2, accumulated, of eight": LAYOUTS["hsdp 2x2"] | {"gradient_accumulation_steps": 2},
    "hsdp 2x2, cpu offload, accumulated, of eight": LAYOUTS["hsdp 2x2"]
    | {"gradient_accumulation_steps": 2, "fsdp_cpu_offload": True},
}


ALL_LAYOUTS: Final = REFERENCES | LAYOUTS | LORA_ONLY | FULL_ONLY


# What must be the same on any number of ranks, and is not part of plain training. Samples are
# taken in between: a forward without backward leaves FSDP's root gathered.
SAMPLES: Final = {
    "validation_prompts": ["a red circle", "a blue square"],
    "validation_steps": 2,
    "validation_num_inference_steps": 1,
}


QUANTIZED: Final = ("fp8", "fp8_scaled", "int8", "nf4")


# Most second matrices are parted; one layer's is whole.
LOKR: Final = {
    "lora_variant": "lokr",
    "lora_rank": 2,
    "lora_rank_pattern": {"to_q": 16},
    "lora_exclude_modules": ["to_k"],
}


# Micro-batches of both kinds in a step, and of one kind alone on one of the ranks.
TO_BASE: Final = {
    "dataset": "",
    "masked_loss": "file",
    "unmasked_weight": 0.1,
    "prior_loss_weight": 0.5,
    "regularization_target": "base",
}
PRESERVED: Final = {
    "trigger_word": "ohwx",
    "preservation": "class",
    "preservation_class": "shape",
    "preservation_weight": 0.5,
}


EXTRAS: Final[dict[str, dict[str, Any]]] = {
    "": {},
    "ema": {"use_ema": True, "ema_decay": 0.9} | SAMPLES,
    "dora": {
        "lora_variant": "dora",
        "lora_rank_pattern": {"to_q": 2},
        "lora_exclude_modules": ["to_k"],
    },
    "lokr": LOKR,
    "lokr nf4": LOKR | {"base_precision": "nf4"},
    "lokr scaled": LOKR | {"base_precision": "fp8_scaled", "base_matmul": "scaled"},
    **{scheme: {"base_precision": scheme} for scheme in QUANTIZED},
    "scaled": {"base_precision": "fp8_scaled", "base_matmul": "scaled"},
    # The file is `write_training_adapter`'s.
    "training adapter": SAMPLES,
    "caption dropout": {"caption_dropout_probability": 0.5, "loss_type": "huber"},
    # Two routes: one across both kinds of blocks, and one of a single block.
    "routed": {"tread": {"0..1": 0.5, "-1..-1": 0.75}},
    # The datasets are `mixed_datasets`.
    "to base": TO_BASE,
    "to base, dora": TO_BASE | {"lora_variant": "dora"},
    "to base, nf4": TO_BASE | {"base_precision": "nf4", "lora_variant": "lokr"},
    "preserved": TO_BASE | PRESERVED,
    "mixed data": {
        "dataset": "",
        "resolution": [48, 64],
        "masked_loss": "file",
        "unmasked_weight": 0.1,
        "prior_loss_weight": 0.5,
        "random_flip": True,
        "class_prompt": "a shape",
        "num_class_images": 3,
        "validation_num_inference_steps": 1,
    },
}
HELD: Final = ("to base", "to base, dora", "to base, nf4", "preserved")
MIXED: Final = ("mixed data", *HELD)
LOKRS: Final = ("lokr", "lokr nf4", "lokr scaled")
ADAPTED: Final = "training adapter"


# A rank's gradient of its own samples may overflow fp16 where the one of all does not; then the
# first step is left out on two ranks only. With this seed none is.
CALM: Final = {"calm": {"seed": 5}}


OPTIMIZERS: Final[dict[str, dict[str, Any]]] = {
    "sgd": {"optimizer": "sgd", "learning_rate": 2.0},
    "adamw": {"optimizer": "adamw", "learning_rate": 1e-3},
    "muon": {"optimizer": "muon", "learning_rate": 1e-3},
    "adafactor": {"optimizer": "adafactor", "learning_rate": 1e-3},
    "came": {"optimizer": "came", "learning_rate": 1e-4},
    "schedule-free": {"optimizer": "adamw_schedule_free", "learning_rate": 1e-3},
}


def mixed_datasets(toy: Path) -> list[dict[str, Any]]:
    """Datasets with masks, weights and resolutions of their own, of the toy's images."""
    folder = toy / "mixed"
    if not folder.exists():
        images = sorted((toy / "data").glob("*.png"))[:14]
        lines = []
        for number, path in enumerate(images):
            own = folder / ("prior" if number > 9 else "learned")
            own.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, own / path.name)
            if number > 9:
                shutil.copy(path.with_suffix(".txt"), own / f"{path.stem}.txt")
                continue
            lines.append({"file_name": path.name, "text": path.stem, "w": 0.5 + number / 5})
            if number % 3:
                with Image.open(path) as image:
                    mask = Image.new("L", image.size)
                    mask.paste(255, (0, 0, image.width // 2, image.height // number))
                mask.save(own / f"{path.stem}-mask.png")
        (folder / "learned/metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return [
        {"path": str(folder / "learned"), "loss_weight_column": "w", "loss_weight": 1.5},
        {"path": str(folder / "prior"), "regularization": True, "resolution": 64},
    ]


_HELD_IN: Final = [
    *((layout, extra) for layout in LAYOUTS | LORA_ONLY for extra in ("to base", "preserved")),
    ("fsdp2 2, compiled", "to base"),
    ("fsdp2 2, compiled", "preserved"),
    ("fsdp2 2, sharded lora", "to base, dora"),
    ("fsdp2 2, sharded lora", "to base, nf4"),
]


@dataclass(frozen=True)
class Case:
    """One run of the table."""

    layout: str
    model_type: str
    optimizer: str
    precision: str = "no"
    extra: str = ""

    @property
    def folder(self) -> str:
        precision = "" if self.precision == "no" else f"-{self.precision}"
        extra = f"-{self.extra}" if self.extra else ""
        name = f"{self.model_type}-{self.optimizer}{precision}{extra}-{self.layout}"
        return name.replace(" ", "_")

    @property
    def reference(self) -> Case:
        own = _batch_sizes(ALL_LAYOUTS[self.layout])
        (name,) = (name for name, alone in REFERENCES.items() if _batch_sizes(alone) == own)
        return replace(self, layout=name)

    def values(self, toy: Path) -> dict[str, Any]:
        files: dict[str, Any] = {"datasets": mixed_datasets(toy)} if self.extra in MIXED else {}
        if self.extra == ADAPTED:
            files = {"training_adapter": str(write_training_adapter(toy))}
        return toy_values(
            toy,
            model_type=self.model_type,
            mixed_precision=self.precision,
            **files
            | COMMON
            | OPTIMIZERS[self.optimizer]
            | ALL_LAYOUTS[self.layout]
            | (EXTRAS | CALM)[self.extra],
        )


def _batch_sizes(values: dict[str, Any]) -> tuple[int, int]:
    """Return the batch of a forward and that of a step."""
    forwards = values["num_processes"] * values.get("gradient_accumulation_steps", 1)
    return values["train_batch_size"], values["train_batch_size"] * forwards


def all_cases(adamw_in: Container[tuple[str, str]] | None = None) -> list[Case]:
    """The table.

    Args:
        adamw_in: The layouts and kinds in which AdamW trains too; None for all.
    """
    cases = [
        Case(layout, kind, optimizer)
        for kind in ("lora", "full")
        for layout in LAYOUTS | (LORA_ONLY if kind == "lora" else {})
        for optimizer in ("sgd", "adamw")
        if optimizer == "sgd" or adamw_in is None or (layout, kind) in adamw_in
    ]
    return [
        *cases,
        *(Case(layout, "full", "sgd") for layout in FULL_ONLY),
        *(
            Case("fsdp2 2", "full", "sgd", extra=extra)
            for extra in EXTRAS
            if extra not in ("", "routed", "dora", *LOKRS, "scaled", ADAPTED, *QUANTIZED, *MIXED)
        ),
        Case("fsdp2 2, accumulated", "lora", "sgd", extra="mixed data"),
        *(Case(layout, "lora", "sgd", extra=extra) for layout, extra in _HELD_IN),
        *(
            Case(layout, "lora", "sgd", extra="dora")
            for layout in (
                *("fsdp2 2", "fsdp2 2, sharded lora"),
                *("hsdp 2x2", "hsdp 2x2, sharded lora"),
            )
        ),
        *(
            Case(layout, "lora", "sgd", extra="lokr")
            for layout in ("ddp 2", "fsdp2 2", "fsdp2 2, sharded lora", "hsdp 2x2")
        ),
        *(
            Case("fsdp2 2, sharded lora", "lora", "sgd", extra=extra)
            for extra in ("lokr nf4", "lokr scaled")
        ),
        *(
            Case(layout, kind, "sgd", extra="routed")
            for layout, kind in (
                ("fsdp2 2", "full"),
                ("fsdp2 2, activation checkpointing", "lora"),
                ("fsdp2 2, compiled", "full"),
                ("fsdp2 2, compiled, selective checkpointing", "full"),
                ("one process, swapped blocks", "lora"),
                ("ddp 2, by size of GPU", "lora"),
                ("hsdp 2x2", "full"),
            )
        ),
        Case("fsdp2 2, sharded lora", "lora", "sgd", extra="ema"),
        Case("ddp 2", "lora", "schedule-free"),
        Case("fsdp2 2", "full", "schedule-free"),
        Case("ddp 2", "full", "muon"),
        Case("fsdp2 2, cpu offload", "full", "muon"),
        Case("fsdp2 2, sharded lora", "lora", "muon"),
        Case("hsdp 2x2", "full", "muon"),
        Case("fsdp2 2, cpu offload", "full", "adafactor"),
        Case("hsdp 2x2", "full", "came"),
        *(
            Case(layout, "lora", "sgd", extra=ADAPTED)
            for layout in (
                *("ddp 2", "fsdp2 2, sharded lora", "fsdp2 2, activation checkpointing"),
                *("hsdp 2x2", "one process, swapped blocks"),
            )
        ),
        *(
            Case(layout, "lora", "sgd", extra=scheme)
            for scheme in QUANTIZED
            for layout in ("fsdp2 4", "fsdp2 2, sharded lora")
        ),
        *(Case(layout, "lora", "sgd", extra="nf4") for layout in ("ddp 2", "hsdp 2x2")),
        *(
            Case(layout, "lora", "sgd", extra="int8")
            for layout in ("fsdp2 2, cpu offload", "fsdp2 2, activation checkpointing")
        ),
        *(
            Case(layout, "lora", "sgd", extra="scaled")
            for layout in ("fsdp2 2", "hsdp 2x2", "fsdp2 2, sharded lora")
        ),
    ]


# `tests/bench/parity.py` trains all of the table. A test run trains a covering selection: every
# strategy with every kind of training and both placements of a LoRA, every option and every extra
# at least once. What is skipped has its pairs in others: each line says in which.
COVERED: Final = {
    Case("fsdp2 4", "lora", "sgd"),  # with fp8 as base
    Case("fsdp2 4", "full", "sgd"),  # resharded to 2
    Case("fsdp2 2", "lora", "sgd"),  # DoRA, and accumulated
    Case("fsdp2 2, sharded lora", "lora", "sgd"),  # with an average, or a packed base
    Case("hsdp 2x2", "lora", "sgd"),  # AdamW, and on scaled fp8
    Case("hsdp 2x2, sharded lora", "lora", "sgd"),  # DoRA
    Case("fsdp2 2, sharded lora, accumulated", "lora", "sgd"),  # AdamW
    Case("fsdp2 2, accumulated", "full", "sgd"),  # LoRA, and with CPU offload
    Case("fsdp2 2, cpu offload", "full", "sgd"),  # accumulated
    Case("fsdp2 2, cpu offload", "lora", "sgd"),  # on int8
    Case("fsdp2 2, activation checkpointing", "full", "sgd"),  # LoRA on int8, and full selective
    Case("fsdp2 2, activation checkpointing", "lora", "sgd"),  # on int8
    Case("fsdp2 2, compiled", "full", "sgd"),  # compiled, selective checkpointing
    Case("fsdp2 2, compiled", "full", "sgd", extra="routed"),  # so, and so routed
    Case("hsdp 2x2, accumulated, of eight", "full", "sgd"),  # with CPU offload
    # Options that need no run of their own: with an average, and with dropped captions.
    Case("fsdp2 2, no reshard", "full", "sgd"),
    Case("fsdp2 2, no wrap", "full", "sgd"),
    Case("fsdp2 2", "full", "sgd", extra="ema"),
    Case("fsdp2 2", "full", "sgd", extra="caption dropout"),
    Case("fsdp2 2, sharded lora", "lora", "sgd", extra="dora"),  # of hsdp 2x2
    Case("hsdp 2x2", "lora", "sgd", extra="dora"),  # sharded there, and whole on two ranks
    Case("fsdp2 4", "lora", "sgd", extra="fp8_scaled"),  # two ranks
    Case("fsdp2 4", "lora", "sgd", extra="nf4"),  # two ranks, whole and sharded
    Case("fsdp2 4", "lora", "sgd", extra="int8"),  # two ranks
    Case("hsdp 2x2", "lora", "sgd", extra="nf4"),  # DDP, and sharded on two ranks
    Case("fsdp2 2, sharded lora", "lora", "sgd", extra="fp8"),  # the scaled one
    Case("fsdp2 2, sharded lora", "lora", "sgd", extra="int8"),  # nf4, and int8 on two ranks
    Case("fsdp2 2", "lora", "sgd", extra="scaled"),  # sharded, and in hsdp 2x2
    # Held to the base: both ways are in one job that accumulates.
    *(
        Case(layout, "lora", "sgd", extra=extra)
        for layout, extra in _HELD_IN
        if (layout, extra) != ("fsdp2 2, accumulated", "preserved")
    ),
}


CASES: Final = [
    *(
        case
        for case in all_cases(
            {
                ("fsdp2 2", "full"),
                ("hsdp 2x2", "lora"),
                ("fsdp2 2, sharded lora, accumulated", "lora"),
            }
        )
        if case not in COVERED
    ),
    Case("fsdp2 2, no reshard", "full", "sgd", extra="ema"),
    Case("fsdp2 2, no wrap", "full", "sgd", extra="caption dropout"),
]


HALF: Final = [
    Case("fsdp2 2", "lora", "adamw", "bf16"),
    Case("fsdp2 2", "full", "adamw", "bf16"),
    Case("fsdp2 2", "full", "adamw", "fp16", "calm"),
]


@dataclass(frozen=True)
class Table:
    """The finished runs."""

    root: Path

    def log(self, case: Case) -> EventLog:
        return EventLog(self.root / case.folder / "events.jsonl").read_all()

    def losses(self, case: Case) -> list[float]:
        return [step.loss for step in self.log(case).steps]

    def trained(self, case: Case) -> dict[str, torch.Tensor]:
        """What the run exported: the adapter, or the transformer."""
        export = self.root / case.folder / "export"
        lora = export / "pytorch_lora_weights.safetensors"
        whole = export / "transformer" / "diffusion_pytorch_model.safetensors"
        return load_file(lora if lora.exists() else whole)


def train_all(
    toy: Path, root: Path, cases: Iterable[Case] = (*CASES, *HALF), ranks: Iterable[int] = ()
) -> Table:
    """Do runs of the table and what they are compared with, with one launch a number of ranks.

    Args:
        toy: Holds `model` and `data`.
        root: An empty directory for the runs.
        cases: The runs.
        ranks: Numbers of ranks that are launched though no run has so many.
    """
    wanted = dict.fromkeys(cases)
    wanted |= dict.fromkeys(case.reference for case in list(wanted))
    exact = (replace(case.reference, precision="no") for case in wanted if case.precision != "no")
    by_ranks: dict[int, dict[str, dict[str, Any]]] = {number: {} for number in ranks}
    for case in wanted | dict.fromkeys(exact):
        values = case.values(toy) | {"cache_dir": str(root / "cache")}
        by_ranks.setdefault(values["num_processes"], {})[str(root / case.folder)] = values
    for ranks, jobs in by_ranks.items():
        _train(ranks, jobs, root)
    return Table(root)


def _train(ranks: int, jobs: dict[str, dict[str, Any]], root: Path) -> None:
    cases = root / f"cases-{ranks}.json"
    cases.write_text(json.dumps(jobs))
    start_ranks(train, ranks, cases).join()
    for folder in jobs:
        warned = EventLog(Path(folder, "events.jsonl")).read_all().warnings
        assert not [text for text in warned if text.startswith(STILL_HELD)], warned
