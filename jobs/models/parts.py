"""A compact description of a model's modules for choosing what to wrap, without torch.

Identical modules are stored once with their count, so that FLUX.2's 32 B parameters are a few dozen
lines and any choice of classes can be evaluated in microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class BlockClass:
    """One class of modules in a model.

    Attributes:
        class_name: Its name, as in `fsdp_transformer_layer_cls_to_wrap`.
        count: Modules of this class; one used in several places counts once.
        params_each: Parameters of one including its submodules; of the largest if they differ.
        params_total: Parameters of all of them; shared ones count once.
        share: `params_total` divided by the model's parameters, 0 to 1.
        recommended: Whether it is in the set to wrap.
        in_no_split_modules: Whether the model class lists it in `_no_split_modules`.
        in_repeated_blocks: Whether the model class lists it in `_repeated_blocks`.
        sample_paths: Paths of the first ones, at most 3.
    """

    class_name: str
    count: int
    params_each: int
    params_total: int
    share: float
    recommended: bool
    in_no_split_modules: bool
    in_repeated_blocks: bool
    sample_paths: list[str]


@dataclass(frozen=True)
class Part:
    """A module, or several identical ones.

    Attributes:
        class_name: Its class.
        own: Parameters of the module itself; a shared one counts only where it is first seen.
        children: `(index into the parts, count)` of its direct submodules.
    """

    class_name: str
    own: int
    children: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Coverage:
    """The effect of wrapping some classes. All sizes are numbers of parameters.

    Attributes:
        share: Share of all parameters in units below the root, 0 to 1.
        units: FSDP units below the root.
        largest: Size of the largest unit, which is gathered as a whole.
        root: Size of the root unit, gathered on every rank for the entire step.
        nested: `(outer, inner)` chosen classes where one contains the other.
        unknown: Chosen names that no module of the model has.
    """

    share: float
    units: int
    largest: int
    root: int
    nested: tuple[tuple[str, str], ...] = ()
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True)
class Parts:
    """All parts of a model, children before parents; the root is the last.

    Attributes:
        parts: Each kind of module once.
        ancestors: Class → its base classes in the model. Wrapping a base class also wraps this
            class, as in accelerate's policy.
        containers: Classes without a forward, such as lists: they cannot be wrapped.
    """

    parts: tuple[Part, ...]
    ancestors: dict[str, tuple[str, ...]] = field(default_factory=dict)
    containers: tuple[str, ...] = ()

    def coverage(self, chosen: Sequence[str]) -> Coverage:
        """Compute what `engine.parallel.sharding.shard` would do with these classes."""
        present = {part.class_name for part in self.parts}
        wrapped = {
            name: {c for c in (name, *self.ancestors.get(name, ())) if c in chosen}
            for name in present
        }
        left: list[int] = []  # parameters of a part outside of its inner units
        units: list[int] = []
        below: list[set[str]] = []  # chosen classes inside of it
        largest = 0
        nested: set[tuple[str, str]] = set()
        *inner, root = self.parts
        for part in inner:
            rest, count, names = self._gather(part, left, units, below)
            if by := wrapped[part.class_name]:
                largest = max(largest, rest)
                nested.update((o, i) for o in sorted(by) for i in names if o != i)
                rest, count, names = 0, count + 1, names | by
            left.append(rest)
            units.append(count)
            below.append(names)
        residue, count, _ = self._gather(root, left, units, below)
        total = self.total()
        return Coverage(
            share=1 - residue / total if total else 0.0,
            units=count,
            largest=largest,
            root=residue,
            nested=tuple(sorted(nested)),
            unknown=tuple(name for name in dict.fromkeys(chosen) if name not in present),
        )

    def total(self) -> int:
        """Return the parameters of the model; shared ones count once."""
        sizes: list[int] = []
        for part in self.parts:
            sizes.append(part.own + sum(sizes[child] * times for child, times in part.children))
        return sizes[-1] if sizes else 0

    @staticmethod
    def _gather(
        part: Part, left: list[int], units: list[int], below: list[set[str]]
    ) -> tuple[int, int, set[str]]:
        """Return a part's parameters outside of inner units, the inner units, and their classes."""
        rest = part.own + sum(left[child] * times for child, times in part.children)
        count = sum(units[child] * times for child, times in part.children)
        names = set().union(*(below[child] for child, _ in part.children))
        return rest, count, names

    def to_dict(self) -> dict[str, Any]:
        return {
            "parts": [[p.class_name, p.own, [list(c) for c in p.children]] for p in self.parts],
            "ancestors": {name: list(above) for name, above in self.ancestors.items()},
            "containers": list(self.containers),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Parts:
        """Rebuild the parts from `to_dict`.

        Raises:
            ValueError, TypeError, KeyError: The data is malformed.
        """
        parts: list[Part] = []
        for name, own, children in data["parts"]:
            counted = tuple((int(child), int(times)) for child, times in children)
            if any(not 0 <= child < len(parts) for child, _ in counted):
                raise ValueError("a part comes before its children")
            parts.append(Part(str(name), int(own), counted))
        if not parts:
            raise ValueError("no parts")
        ancestors = {str(k): tuple(map(str, v)) for k, v in data["ancestors"].items()}
        return cls(tuple(parts), ancestors, tuple(map(str, data["containers"])))
