"""Define a key of a job once: its value, and everything the program needs to know about it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pydantic.fields import FieldInfo

    from jobs.spec.job_spec import JobSpec

    Reason = Callable[[JobSpec], str]

Effect = Literal["same", "changes", "impossible", "ruled"]
"""What another value does to a run that resumes from a checkpoint.

same: nothing but rounding, speed, memory, or which files are written.
changes: other weights, or other exports, than those of a run that never stopped.
impossible: the checkpoint's tensors do not fit, or mean something else.
ruled: it depends on other keys too; `jobs.resume` decides.
"""


class Keys(BaseModel):
    """A group of a job's keys.

    Only complete jobs are validated, so pydantic builds no validator for a group; 13 of them would
    add a tenth to the import time of every process.
    """

    model_config = ConfigDict(defer_build=True)


@dataclass(frozen=True)
class Group:
    """Where a key is documented.

    Attributes:
        name: Its group in the reference.
        part: Its heading in the form, if a group is long.
    """

    name: str
    part: str = ""

    @property
    def heading(self) -> str:
        return self.part or self.name


@dataclass(frozen=True)
class KeyFacts:
    """Facts about a key in addition to its type, default, limits and help.

    Attributes:
        group: Where it is documented.
        resume: The effect of changing the value on a resumed run.
        no_effect: Functions that return why the key has no effect in a job, or "". The first reason
            is shown.
        memory: Whether it may change a job's memory use.
        path: Whether it is the path of a file or folder.
        label: Its label in the form; "" for its name, in words.
        words: Suggested values, if its type does not list them.
        blank: Placeholder of an empty input in the form: what a job does by default, or what to
            type; "" for the default value.
        mismatch: Why a checkpoint cannot be used with another value.
        public: Whether its value may be published in model cards, headers of exported files and
            trackers. None: public if it is a number, a switch or a choice, which hold no secret; a
            string is not, nor is anything that may contain one.
    """

    group: Group
    resume: Effect
    no_effect: tuple[Reason, ...] = ()
    memory: bool = True
    path: bool = False
    label: str = ""
    words: tuple[str, ...] = ()
    blank: str = ""
    mismatch: str = ""
    public: bool | None = None


def field(
    default: Any,
    group: Group,
    help_text: str,
    *,
    resume: Effect,
    no_effect: Reason | Sequence[Reason] = (),
    memory: bool = True,
    path: bool = False,
    label: str = "",
    words: Sequence[str] = (),
    blank: str = "",
    mismatch: str = "other modules would be trained",
    public: bool | None = None,
    **limits: Any,
) -> Any:
    """Return a field of the job.

    Args:
        default: Its value if the job does not set it.
        group: See `KeyFacts`; the same goes for the arguments that refer to it below.
        help_text: Its help, its documentation, and the hint in the form.
        resume: See `KeyFacts`.
        no_effect: One function, or several.
        memory: See `KeyFacts`.
        path: See `KeyFacts`.
        label: See `KeyFacts`.
        words: See `KeyFacts`.
        blank: See `KeyFacts`.
        mismatch: See `KeyFacts`.
        public: See `KeyFacts`.
        limits: Arguments of pydantic's `Field`.
    """
    reasons = (no_effect,) if callable(no_effect) else tuple(no_effect)
    info = cast("FieldInfo", Field(default, description=help_text, **limits))
    facts = KeyFacts(
        group,
        resume,
        reasons,
        memory,
        path,
        label,
        tuple(words),
        blank=blank,
        mismatch=mismatch,
        public=public,
    )
    info.metadata.append(facts)
    return info


@cache
def facts_of(model: type[BaseModel]) -> dict[str, KeyFacts]:
    """Return the facts from the definitions of a job's keys, by key."""
    return {
        key: next(facts for facts in info.metadata if isinstance(facts, KeyFacts))
        for key, info in model.model_fields.items()
    }
