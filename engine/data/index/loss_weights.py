"""How much each sample's loss counts. Pure.

A weight depends on the sample alone, and the loss of a step is the mean of the weighted losses over
the global batch. So the result is the same for any number of ranks and of micro-batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs.spec.values.datasets import datasets_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.data.index.data_index import Sample
    from jobs.spec.job_spec import InputKeys
    from jobs.spec.keys.data import DataKeys
    from jobs.spec.values.datasets import Dataset


def weight_of(sample: Sample, dataset: Dataset, spec: DataKeys) -> float:
    """Return the weight of a sample's loss.

    It is the product of the sample's own weight, its dataset's and its role's.
    """
    prior = spec.prior_loss_weight if dataset.regularization else 1.0
    return sample.loss_weight * dataset.loss_weight * prior


def weights_of(samples: Sequence[Sample], spec: InputKeys) -> list[float]:
    """Return the weight of each sample."""
    datasets = datasets_of(spec)
    return [weight_of(sample, datasets[sample.dataset], spec) for sample in samples]
