"""Find the models that score a job's samples, without torch.

They are models of transformers with their processor in one directory, not pipelines.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from jobs.errors import SpecError
from jobs.models.find_model import find_damage, find_model
from jobs.run.rundir import read_json
from jobs.spec.values.hub_names import HubName

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

    from jobs.spec.keys.validation import ValidationKeys

CLIP: Final = "validation_clip_model"
DINO: Final = "validation_dino_model"
KINDS: Final = {CLIP: ("clip",), DINO: ("dinov2", "dinov2_with_registers", "vit")}
"""Key of a job → the `model_type` of the models that it may name."""

_NEEDED: Final = {CLIP: ("preprocessor_config.json", "tokenizer_config.json")}
_PROCESSOR: Final = ("preprocessor_config.json",)
_READS: Final = {"clip_t": CLIP, "clip_i": CLIP, "dino_i": DINO}


def scorers_of(spec: ValidationKeys) -> dict[str, str]:
    """Return the models that a job's scores need: key → path or hub name."""
    keys = [_READS[score] for score in spec.validation_scores] if spec.validation_prompts else []
    return {key: getattr(spec, key) for key in dict.fromkeys(keys)}


def configs_of(spec: ValidationKeys) -> list[dict[str, Any] | None]:
    """Return the configs of the models that a job's scores need; None for those not here."""
    configs = []
    for name in scorers_of(spec).values():
        with suppress(SpecError):
            configs.append(read_json(find_model(name) / "config.json"))
            continue
        configs.append(None)
    return configs


def is_scorer(config: dict[str, Any] | None) -> bool:
    """Return whether a `config.json` is that of a model that can score samples."""
    return any((config or {}).get("model_type") in kinds for kinds in KINDS.values())


def missing_of(root: Path) -> str:
    """Return why the weights of a model's directory cannot be read, in a few words; else ""."""
    files = sorted(root.glob("*.safetensors"))
    if not files:
        return "has no .safetensors file"
    damaged = ((file, find_damage(file)) for file in files)
    return next((f"has a damaged {file.name}: {why}" for file, why in damaged if why), "")


def check_scorers(spec: ValidationKeys, absent: Collection[HubName] = ()) -> None:
    """Check that the models which score samples can be loaded.

    Args:
        spec: The job.
        absent: Names that will be fetched before it starts, and are checked then.

    Raises:
        SpecError: One is missing, incomplete, or of another kind.
    """
    for key, name in scorers_of(spec).items():
        if HubName.read("model", name) in absent:
            continue
        try:
            root = find_model(name)
        except SpecError as error:
            raise SpecError(f"{key}: {error.message}", error.hint) from None
        for problem in _problems(key, root):
            raise SpecError(f"{key}: {root} {problem}", f"fetch it again, or set {key}")


def _problems(key: str, root: Path) -> Iterator[str]:
    kind = (read_json(root / "config.json") or {}).get("model_type")
    if kind not in KINDS[key]:
        other = f", but {kind}" if kind else ""
        yield f"is not a model of type {' or '.join(KINDS[key])}{other}"
    for file in _NEEDED.get(key, _PROCESSOR):
        if not (root / file).is_file():
            yield f"has no {file}"
    if why := missing_of(root):
        yield why
