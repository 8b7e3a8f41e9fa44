"""Which samples are held out of the training, to measure the loss on. Pure.

The choice depends on the seed and on what the samples show, not on their names, their order or the
number of ranks. Copies of an image are held out together: the loss on an image that was
trained on says nothing.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from jobs.errors import UserError
from jobs.spec.keys.prompts import validation_seed_of
from jobs.spec.values.datasets import datasets_of

if TYPE_CHECKING:
    from engine.data.index.data_index import DataIndex, Sample
    from jobs.spec.job_spec import DataPlanKeys


def hold_out(index: DataIndex, spec: DataPlanKeys) -> tuple[DataIndex, list[Sample]]:
    """Split the data into training and held-out samples.

    Both are in the order of the index. At least one sample is held out, and of each dataset at
    least one is trained on. Regularization samples are not what the model should learn: none of
    them is held out, but for copies of others that are.

    Raises:
        UserError: `validation_fraction` asks for some, and none can be spared.
    """
    if not spec.validation_fraction:
        return index, []
    datasets = datasets_of(spec)
    samples = [sample for sample in index.samples if not datasets[sample.dataset].regularization]
    least = max(1, round(spec.validation_fraction * len(samples)))
    contents: dict[str, list[Sample]] = {}
    for sample in samples:
        contents.setdefault(sample.digest, []).append(sample)
    left = Counter(sample.dataset for sample in samples)
    chosen: set[str] = set()
    held = 0
    for digest in sorted(contents, key=lambda digest: _draw(validation_seed_of(spec), digest)):
        if held >= least:
            break
        copies = Counter(sample.dataset for sample in contents[digest])
        if all(left[dataset] > count for dataset, count in copies.items()):
            chosen.add(digest)
            left -= copies
            held += copies.total()
    if not chosen:
        raise UserError(
            f"validation_fraction: {spec.validation_fraction:g} would hold out "
            + ("the only sample" if len(samples) == 1 else "all samples of a dataset"),
            "add samples, or set validation_fraction: 0",
        )
    trained = [sample for sample in index.samples if sample.digest not in chosen]
    return replace(index, samples=trained), [s for s in samples if s.digest in chosen]


def _draw(seed: int, digest: str) -> bytes:
    return hashlib.blake2b(f"{seed}:held out:{digest}".encode(), digest_size=8).digest()
