"""Which classes of a model are its repeated blocks: asked of the engine once, then remembered.

The engine builds the model without its weights (`engine.blocks`), in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from jobs.block_parts import BlockClass, Coverage, Parts

if TYPE_CHECKING:
    from jobs.tools import Progress

__all__ = ["BlockClass", "Coverage", "Detection", "cached_detection", "detect_blocks"]


@dataclass(frozen=True)
class Detection:
    """What was found in a model.

    Attributes:
        model_family: What was asked for, if it was a family.
        model_flavour: The flavour of it.
        pretrained_model: What was looked at: a path, a hub id, or a published config's hub id.
        model_class: Class of the model.
        total_params: Its parameters; shared ones count once.
        no_split_modules: What the model class says of itself.
        cached: Whether this was remembered rather than looked at now.
        classes: The recommended ones first, then by how well they would do.
        dtype_bytes: Bytes of one parameter as the weights are stored.
        parts: What `coverage` needs.
    """

    model_family: str | None
    model_flavour: str | None
    pretrained_model: str
    model_class: str
    total_params: int
    no_split_modules: list[str]
    cached: bool
    classes: list[BlockClass]
    dtype_bytes: int
    parts: Parts

    @property
    def recommended(self) -> list[str]:
        """The classes to wrap."""
        return [one.class_name for one in self.classes if one.recommended]

    def coverage(self, chosen: Sequence[str]) -> Coverage:
        """What wrapping these classes would do; instant."""
        return self.parts.coverage(chosen)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"parts": self.parts.to_dict()}

    @classmethod
    def from_dict(cls, data: dict[str, Any], *, cached: bool) -> Detection:
        """What `to_dict` wrote.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: It is something else.
        """
        classes = [BlockClass(**one) for one in data["classes"]]
        parts = Parts.from_dict(data["parts"])
        return cls(**data | {"classes": classes, "parts": parts, "cached": cached})


def detect_blocks(
    *,
    model_family: str | None = None,
    model_flavour: str | None = None,
    pretrained_model: str | None = None,
    refresh: bool = False,
    progress: Progress = lambda done, total: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Detection:
    """Find the repeated blocks of a model; from memory if it was looked at before.

    Args:
        model_family: With `model_flavour`, a published model; with `pretrained_model`, what to
            expect there.
        model_flavour: The first of the family if None.
        pretrained_model: A directory, a config.json, or a hub id in the local cache.
        refresh: Look again, and remember that instead.
        progress: Told how far it has come.
        cancelled: Asked many times a second, in the thread of the caller.

    Raises:
        UserError: There is no such model, or it cannot be built from its config.
        ToolError: Looking failed for another reason.
        Cancelled: `cancelled` said so.
    """
    raise NotImplementedError


def cached_detection(
    *,
    model_family: str | None = None,
    model_flavour: str | None = None,
    pretrained_model: str | None = None,
) -> Detection | None:
    """What is remembered of a model, or None; starts no process and never fails."""
    raise NotImplementedError
