"""Training resolutions: one, or several. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from jobs.spec.values.spellings import as_list, as_none, unquoted

if TYPE_CHECKING:
    from jobs.spec.job_spec import DataPlanKeys
    from jobs.spec.keys.training import TrainingKeys
    from jobs.spec.values.datasets import Dataset

_SIDE: Final[TypeAdapter[int]] = TypeAdapter(Annotated[int, Field(ge=16, le=8192)])


def read_resolutions(value: Any) -> Any:
    """Read a side (`768`), or several in ascending order (`512,768`); a list of one becomes a side.

    Raises:
        PydanticCustomError: A side is not a whole number within the limits.
    """
    if isinstance(value, str):
        value = as_list(unquoted(value))
    if not isinstance(value, (list, tuple)):
        return _side(value)
    sides = sorted({_side(side) for side in value})
    if not sides:
        raise PydanticCustomError("resolution", "expected at least one resolution")
    return sides[0] if len(sides) == 1 else sides


def _read_optional(value: Any) -> Any:
    return None if (value := as_none(value)) is None else read_resolutions(value)


Resolutions = Annotated[int | list[int], BeforeValidator(read_resolutions)]
OptionalResolutions = Annotated[int | list[int] | None, BeforeValidator(_read_optional)]


def sides_of(value: int | list[int]) -> tuple[int, ...]:
    """Return the sides in a value, in ascending order."""
    return tuple(value) if isinstance(value, list) else (value,)


def resolutions_of(spec: TrainingKeys, dataset: Dataset | None = None) -> tuple[int, ...]:
    """Return the resolutions of a dataset, in ascending order: its own, or else the job's."""
    own = dataset.resolution if dataset is not None else None
    return sides_of(own or spec.resolution)


def all_resolutions(spec: DataPlanKeys) -> tuple[int, ...]:
    """Return every resolution that the job trains at, in ascending order."""
    entries = spec.datasets or []
    sides = {side for entry in entries for side in resolutions_of(spec, entry)}
    return tuple(sorted(sides)) or resolutions_of(spec)


def has_several(spec: DataPlanKeys) -> bool:
    """Return whether a dataset is trained at several resolutions."""
    entries = spec.datasets or []
    counts = [len(resolutions_of(spec, entry)) for entry in entries] or [len(resolutions_of(spec))]
    return max(counts) > 1


def largest_resolution(spec: TrainingKeys) -> int:
    """Return the largest resolution of the job's own key, which is the default for samples."""
    return max(sides_of(spec.resolution))


def _side(value: Any) -> int:
    try:
        return _SIDE.validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        whole = first["type"].startswith("int")
        message = "expected a whole number" if whole else first["msg"]
        raise PydanticCustomError("resolution", "{message}", {"message": message}) from None
