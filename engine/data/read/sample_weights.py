"""The loss weight of a sample, from a column of a metadata file or a table. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from jobs.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jobs.spec.values.datasets import Dataset

_MOST: Final = 1000.0  # as the `loss_weight` of a dataset


def weight_in(record: Mapping[str, Any], dataset: Dataset, *, where: str) -> tuple[float, str]:
    """Return a row's weight, and the problem with it, if any.

    The weight is 1 where the cell is empty.

    Raises:
        UserError: The column that the dataset names is not there.
    """
    column = dataset.loss_weight_column
    if column is None:
        return 1.0, ""
    if column not in record:
        raise UserError(f"{where} has no column {column}", f"it has {', '.join(record)}")
    value = record[column]
    if value is None or value == "":
        return 1.0, ""
    try:
        weight = float(value)
    except (TypeError, ValueError):
        weight = math.nan
    if not 0 <= weight <= _MOST:
        return 1.0, f"{column} is not a weight from 0 to {_MOST:g}"
    return weight, "" if weight else f"{column} is 0"
