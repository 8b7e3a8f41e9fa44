"""The form's pages: which fields they have, and their labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from jobs.spec.job_spec import field_group, field_names, key_facts

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence


BLOCKS: Final = "fsdp_transformer_layer_cls_to_wrap"
PATHS: Final = ("pretrained_model_name_or_path", "dataset")

# The first page, by heading: what nearly every job sets.
ESSENTIAL: Final[dict[str, tuple[str, ...]]] = {
    "job": ("name", "model_type", "model_family", "model_flavour", "both_experts"),
    "model and data": ("pretrained_model_name_or_path", "dataset", "datasets"),
    "training": (
        "max_train_steps",
        "learning_rate",
        "resolution",
        "num_frames",
        "train_audio",
        "train_batch_size",
        "global_batch_size",
        "gradient_accumulation_steps",
        "lora_rank",
        "mixed_precision",
    ),
    "devices": ("gpus", "num_processes", "strategy", "fsdp_reshard_after_forward", BLOCKS),
    "output": ("checkpointing_steps", "validation_prompts"),
}
SHOWN: Final = tuple(name for names in ESSENTIAL.values() for name in names)

# Abbreviations in labels.
_CASED: Final = {
    word.casefold(): word
    for word in (
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

# The other pages: page → groups of job keys.
_GROUPS: Final[dict[str, tuple[str, ...]]] = {
    "fsdp": ("fsdp",),
    "devices": ("devices", "slurm"),
    "training": ("training",),
    "data": ("data",),
    "output": ("lora", "output", "export", "hub"),
    "samples": ("validation",),
    "running": ("running", "job", "tracking"),
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
    """Return the fields of a group that are not on the first page, by heading."""
    by_heading: dict[str, list[str]] = {group: []}
    for name in field_names():
        if field_group(name) == group and name not in SHOWN:
            by_heading.setdefault(key_facts(name).group.heading, []).append(name)
    return {heading: names for heading, names in by_heading.items() if names}


PAGES: Final[tuple[Page, ...]] = (
    Page("main", ESSENTIAL),
    *(
        Page(name, {h: f for group in groups for h, f in _headings(group).items()})
        for name, groups in _GROUPS.items()
    ),
)


def page_of(name: str) -> int:
    """Return the number of the page that has a field, from 0."""
    return next(number for number, page in enumerate(PAGES) if name in page.fields)


def first_of(names: Collection[str]) -> str:
    """Return the first of these fields in page order; "" if none is on a page."""
    return next((name for page in PAGES for name in page.fields if name in names), "")


def label(name: str) -> str:
    """Return a field's label, the same on every page; its key is in its help."""
    return key_facts(name).label or " ".join(_CASED.get(word, word) for word in name.split("_"))
