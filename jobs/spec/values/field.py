"""A key of a job, defined once: its value, and all that the program has to know about the key."""

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

    Only a whole job is ever validated, so pydantic builds no validator for a group: 13 of them
    would take every process a tenth of its imports.
    """

    model_config = ConfigDict(defer_build=True)


@dataclass(frozen=True)
class Group:
    """Where a key is documented.

    Attributes:
        name: Its group in the reference.
        part: Its heading in the form, where a group is long.
    """

    name: str
    part: str = ""

    @property
    def heading(self) -> str:
        return self.part or self.name


@dataclass(frozen=True)
class KeyFacts:
    """What is to be known about a key besides its type, default, limits and help.

    Attributes:
        group: Where it is documented.
        resume: What another value does to a run that resumes.
        no_effect: Each says why the key means nothing beside the rest of a job, or "". The first
            that does is the one to show.
        memory: Whether it may change how much memory a job takes.
        path: Whether it is the path of a file or folder.
        label: What it is called in the form; "" for its own name, in words.
        words: What it may be, where its type does not say.
        blank: What an empty input of the form shows: what a job does then, or what may be typed;
            "" for the default.
        mismatch: Why a checkpoint cannot be used with another value.
        public: Whether its value is shown where anyone may read it: in model cards, headers of
            exported files and trackers. None: if it is a number, a switch or a choice, which hold
            no secret; a text is not, nor is what may contain one.
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
        default: Its value where the job does not set it.
        group: See `KeyFacts`, as for all that is not named here.
        help_text: Its help, its documentation, and the hint in the form.
        resume: See `KeyFacts`.
        no_effect: One reason, or several.
        memory: See `KeyFacts`.
        path: See `KeyFacts`.
        label: See `KeyFacts`.
        words: See `KeyFacts`.
        blank: See `KeyFacts`.
        mismatch: See `KeyFacts`.
        public: See `KeyFacts`.
        limits: As pydantic's `Field`.
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
