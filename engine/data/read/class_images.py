"""Find a job's class images, which are generated once from its base model and cached.

The folder's name is a hash of every setting that affects the images except their number, so a job
that needs more of the same images generates only the rest. Each is `NN.png`, with its prompt in
`NN.json` as its caption.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

from engine.data.encode.tensor_cache import fingerprint
from engine.data.read.folders import Source
from jobs.paths import cache_home
from jobs.spec.rules.lora_conflicts import modulation_of
from jobs.spec.rules.no_effect import counts
from jobs.spec.values.datasets import Dataset, datasets_of
from jobs.spec.values.resolutions import all_resolutions

if TYPE_CHECKING:
    from jobs.spec.job_spec import InputKeys, JobSpec
    from jobs.spec.keys.data import DataKeys

_FOLDER: Final = "class_images"
_MADE: Final = 1  # raise it when the same settings give different images


def cache_root(spec: DataKeys) -> Path:
    """Return the directory for the job's prepared data."""
    return Path(spec.cache_dir) if spec.cache_dir else cache_home()


def folder_of(spec: JobSpec, model_root: Path) -> Path:
    """Return the folder of a job's class images."""
    facts = {
        "made": _MADE,
        "model": fingerprint(model_root),
        "family": spec.model_family,
        "prompt": spec.class_prompt,
        "trigger": spec.trigger_word,
        "side": all_resolutions(spec)[-1],
        "steps": spec.validation_num_inference_steps,
        "guidance": [spec.validation_guidance, spec.validation_true_cfg_scale],
        "negative": spec.validation_negative_prompt,
        "precision": [
            *(spec.mixed_precision, spec.base_precision, spec.text_encoder_precision),
            *_modulation(spec),
        ],
        "tokens": spec.max_sequence_length,
    }
    name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]
    return cache_root(spec) / _FOLDER / name


def _modulation(spec: JobSpec) -> list[str]:
    """Return how modulation is packed, or [] if it is not, as in folders of earlier versions."""
    own = modulation_of(spec)
    return [own] if own != "none" and counts("modulation_precision", spec) else []


def numbers_in(folder: Path) -> set[int]:
    """Return the numbers of the complete images in a folder."""
    paths = (path for path in folder.glob("[0-9]*.png") if path.with_suffix(".json").is_file())
    return {int(path.stem) for path in paths if path.stem.isdecimal()}


def with_class_images(spec: JobSpec, folder: Path) -> JobSpec:
    """Add a job's class images as another dataset."""
    sides = list(all_resolutions(spec))
    made = Dataset(path=str(folder), regularization=True, resolution=sides)
    return spec.model_copy(update={"dataset": "", "datasets": [*datasets_of(spec), made]})


def has_class_images(spec: InputKeys) -> bool:
    """Return whether class images are among the job's datasets."""
    return any(_holds(dataset, spec) for dataset in datasets_of(spec))


def only_of_job(source: Source, dataset: Dataset, spec: DataKeys) -> Source:
    """Keep only the class images that the job requests; return any other source unchanged."""
    if not _holds(dataset, spec):
        return source
    kept = [
        entry
        for entry in source.entries
        if entry.path.stem.isdecimal() and int(entry.path.stem) < spec.num_class_images
    ]
    return Source(kept, source.others)


def _holds(dataset: Dataset, spec: DataKeys) -> bool:
    return Path(dataset.path).parent == cache_root(spec) / _FOLDER
