"""The model card of what is pushed: what it was trained on, how, and how to use it. Pure.

It shows public keys of the job alone (see `KeyFacts.public`), and each validation prompt with its
image.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import yaml

from jobs.spec.families import component_of, get_family
from jobs.spec.rules.steps import accumulation_steps
from jobs.spec.values.datasets import TRIGGER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jobs.spec.job_spec import JobSpec

LORA_WEIGHTS: Final = "pytorch_lora_weights.safetensors"
PEFT_WEIGHTS: Final = "adapter_model.safetensors"  # of pipelines without a LoRA loader
_LICENSE: Final = ("license", "license_name", "license_link")
# Said in other parts of the card.
_ELSEWHERE: Final = ("name", "model_family", "model_flavour", "trigger_word")
_ALWAYS: Final = (
    *("resolution", "learning_rate", "optimizer", "lr_scheduler", "train_batch_size"),
    *("gradient_accumulation_steps", "mixed_precision", "seed"),
)


@dataclass(frozen=True)
class CardFacts:
    """What a card says besides the job's settings.

    Attributes:
        repo: Where it is pushed, `ORG/NAME`.
        step: Optimizer steps done.
        base: Hub id of the base model; "" where it has none.
        base_card: The head of the base model's own card.
        samples: Images and videos that it was trained on; 0 if unknown.
        epochs: How often it saw each of them; 0 if unknown.
        ranks: How many trained it.
        pictures: Path in the repository → its prompt.
        weights: Name of the LoRA file, `LORA_WEIGHTS` or `PEFT_WEIGHTS`; "" for a full model.
        ema: Whether it is an average of the weights.
    """

    repo: str
    step: int
    base: str = ""
    base_card: Mapping[str, Any] = field(default_factory=dict)
    samples: int = 0
    epochs: float = 0.0
    ranks: int = 1
    pictures: Mapping[str, str] = field(default_factory=dict)
    weights: str = ""
    ema: bool = False


def write_card(spec: JobSpec, facts: CardFacts) -> str:
    """The text of README.md; the same for the same facts."""
    family, lora = get_family(spec.model_family, spec.model_flavour), spec.model_type == "lora"
    video, trigger = family.frame_step > 0, trigger_of(spec)
    pipeline = "text-to-video" if video else "text-to-image"
    head: dict[str, Any] = {key: facts.base_card[key] for key in _LICENSE if key in facts.base_card}
    library = "peft" if facts.weights == PEFT_WEIGHTS else "diffusers"
    head |= {"library_name": library, "pipeline_tag": pipeline}
    if facts.base:
        head |= {"base_model": facts.base}
        head |= {"base_model_relation": "adapter" if lora else "finetune"}
    head["tags"] = [pipeline, "diffusers", *(["lora"] if lora else []), family.name, "fsdp-tui"]
    if trigger:
        head["instance_prompt"] = trigger
    if facts.pictures:
        head["widget"] = [
            {"text": prompt or " ", "output": {"url": path}}
            for path, prompt in facts.pictures.items()
        ]
    adapter = "LoKr" if spec.lora_variant == "lokr" else "LoRA"
    what = adapter if lora else "fine-tuned model"
    base = f"[{facts.base}](https://huggingface.co/{facts.base})" if facts.base else family.title
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---",
        f"# {facts.repo.rpartition('/')[2]}",
        f"A {what} of {base}, trained for {facts.step:,} steps with fsdp-tui.",
        *(["<Gallery />"] if facts.pictures else []),
        *([f"## Trigger word\n\nUse `{trigger}` in the prompt."] if trigger else []),
        f"## Use\n\n```python\n{_usage(spec, facts)}\n```",
        f"## Training data\n\n{_data(spec, facts)}",
        f"## Settings\n\n{_table(_settings(spec, facts))}",
    ]
    return "\n\n".join(parts) + "\n"


def trigger_of(spec: JobSpec) -> str:
    """The job's trigger word, or those of its datasets."""
    words = [dataset.trigger_word for dataset in spec.datasets or []]
    return spec.trigger_word or ", ".join(dict.fromkeys(filter(None, words)))


def with_trigger(spec: JobSpec, prompt: str) -> str:
    """A prompt as it is read by people."""
    return prompt.replace(TRIGGER, trigger_of(spec)).strip()


def _usage(spec: JobSpec, facts: CardFacts) -> str:
    lines = ["import torch", "from diffusers import DiffusionPipeline"]
    by_peft = facts.weights == PEFT_WEIGHTS
    lines += ["from peft import PeftModel", ""] if by_peft else [""]
    loaded = (facts.base or "path/to/the/base/model") if facts.weights else facts.repo
    lines.append(
        f'pipeline = DiffusionPipeline.from_pretrained("{loaded}", torch_dtype=torch.bfloat16)'
    )
    if by_peft:
        component = f"pipeline.{component_of(spec)}"
        lines.append(f'{component} = PeftModel.from_pretrained({component}, "{facts.repo}")')
    elif facts.weights and spec.lora_variant == "lokr":  # which few pipelines load, and all models
        component = component_of(spec)
        prefix = component if component == "unet" else "transformer"
        lines.append(
            f'pipeline.{component}.load_lora_adapter("{facts.repo}", prefix="{prefix}", '
            f'weight_name="{facts.weights}")'
        )
    elif facts.weights:
        lines.append(f'pipeline.load_lora_weights("{facts.repo}", weight_name="{facts.weights}")')
    return "\n".join(lines)


def _data(spec: JobSpec, facts: CardFacts) -> str:
    what = "images or videos" if get_family(spec.model_family).frame_step else "images"
    if not facts.samples:
        return "Not published."
    often = f", each seen about {facts.epochs:.3g} times" if facts.epochs >= 1 else ""
    return f"{facts.samples:,} {what} with captions{often}. Neither is published here."


def _settings(spec: JobSpec, facts: CardFacts) -> dict[str, Any]:
    """What differs from the defaults and anyone may read, and what everyone asks about."""
    values = {key: getattr(spec, key) for key in _ALWAYS} | spec.public_values()
    values["gradient_accumulation_steps"] = accumulation_steps(spec, facts.ranks)
    shown = {"steps": facts.step, "ranks": facts.ranks} | ({"ema": True} if facts.ema else {})
    for key, value in values.items():
        if key not in _ELSEWHERE and value not in (None, [], ""):
            shown.setdefault(key, value)
    return shown


def _table(rows: Mapping[str, Any]) -> str:
    lines: Sequence[str] = [f"| {key} | {_cell(value)} |" for key, value in rows.items()]
    return "\n".join(["| setting | value |", "|---|---|", *lines])


def _cell(value: Any) -> str:
    if isinstance(value, list):
        value = ", ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value).replace("|", "\\|")
