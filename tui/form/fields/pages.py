"""Which fields of a job stand on which page of the form, and what they are called there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from jobs.spec.job_spec import field_group, field_names

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

BLOCKS: Final = "fsdp_transformer_layer_cls_to_wrap"
PATHS: Final = ("pretrained_model_name_or_path", "dataset")

# The first page, by heading: what nearly every job says.
ESSENTIAL: Final[dict[str, tuple[str, ...]]] = {
    "job": ("name", "model_type", "model_family", "model_flavour"),
    "model and data": ("pretrained_model_name_or_path", "dataset"),
    "training": (
        "max_train_steps",
        "learning_rate",
        "resolution",
        "train_batch_size",
        "gradient_accumulation_steps",
        "lora_rank",
        "mixed_precision",
    ),
    "devices": ("gpus", "num_processes", "strategy", "fsdp_reshard_after_forward", BLOCKS),
    "output": ("checkpointing_steps", "validation_prompts"),
}
SHOWN: Final = tuple(name for names in ESSENTIAL.values() for name in names)

_LABELS: Final = {
    "pretrained_model_name_or_path": "model",
    "train_batch_size": "batch per rank",
    "gradient_accumulation_steps": "accumulation",
    "max_train_steps": "steps",
    "model_type": "type",
    "model_family": "family",
    "model_flavour": "flavour",
    "mixed_precision": "precision",
    "num_processes": "ranks",
    "fsdp_reshard_after_forward": "reshard",
    BLOCKS: "blocks",
    "checkpointing_steps": "save every",
    "validation_prompts": "prompts",
}

# Short forms that are read as such.
_CASED: Final = {
    one.casefold(): one
    for one in (
        "FSDP",
        "LoRA",
        "EMA",
        "SNR",
        "LR",
        "CPU",
        "RAM",
        "GPUs",
        "IP",
        "FPS",
        "TF32",
        "CFG",
    )
}

# The others: page → groups of the job's keys.
_GROUPS: Final[dict[str, tuple[str, ...]]] = {
    "fsdp": ("fsdp",),
    "devices": ("devices",),
    "training": ("training",),
    "data": ("job", "data"),
    "output": ("lora", "output", "export"),
    "samples": ("validation",),
    "running": ("running", "tracking"),
}

# Long groups in parts: heading → how its keys begin. What fits none stays under the group's name.
_PARTS: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "training": {
        "optimizer and schedule": ("optimizer", "adam_", "weight_", "lr_", "max_grad"),
        "memory and speed": ("gradient_", "torch_compile", "attention_", "allow_", "deterministic"),
        "noise and loss": (
            "timestep_",
            "logit_",
            "mode_",
            "flow_",
            "sigma_",
            "loss_",
            "huber_",
            "snr_",
            "train_g",
            "size_",
        ),
        "moving average": ("use_ema", "ema_"),
    },
    "data": {
        "regularization and masks": ("prior_", "class_", "num_class", "masked_", "unmasked_"),
        "captions": ("caption_l", "missing_", "trigger_", "shuffle_", "caption_s", "keep_"),
        "text encoders and caches": (
            "cache_",
            "unload_",
            "shard_",
            "max_sequence",
            "prefetch_",
        ),
    },
    "devices": {"accelerate launch": ("accelerate_", "machine_", "main_process", "num_machines")},
    "validation": {
        "validation loss": (
            "validation_fraction",
            "validation_loss",
            "validation_timesteps",
        )
    },
}


@dataclass(frozen=True)
class Page:
    """One page of the form: headings, each with its fields."""

    name: str
    groups: Mapping[str, Sequence[str]]

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(name for names in self.groups.values() for name in names)


def _headings(group: str) -> dict[str, list[str]]:
    """The fields of a group that are not on the first page, by heading."""
    found: dict[str, list[str]] = {group: []}
    parts = _PARTS.get(group, {})
    for name in field_names():
        if field_group(name) == group and name not in SHOWN:
            heading = next((h for h, stems in parts.items() if name.startswith(stems)), group)
            found.setdefault(heading, []).append(name)
    return {heading: names for heading, names in found.items() if names}


PAGES: Final[tuple[Page, ...]] = (
    Page("main", ESSENTIAL),
    *(
        Page(name, {h: f for group in groups for h, f in _headings(group).items()})
        for name, groups in _GROUPS.items()
    ),
)


def page_of(name: str) -> int:
    """The number of the page, from 0, on which a field stands."""
    return next(number for number, page in enumerate(PAGES) if name in page.fields)


def first_of(names: Collection[str]) -> str:
    """Which of these fields a person comes to first; "" if none is on a page."""
    return next((name for page in PAGES for name in page.fields if name in names), "")


def label(name: str) -> str:
    """What a field is called: in words, on every page; its key stands in its help."""
    if name in _LABELS:
        return _LABELS[name]
    return " ".join(_CASED.get(word, word) for word in name.split("_"))
