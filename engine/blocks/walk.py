"""What kinds of modules a model has, how large they are, and which hold which."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch

from jobs.models.blocks.parts import Part, Parts

if TYPE_CHECKING:
    from collections.abc import Iterable

_PATHS: Final = 3
_LISTS: Final = (torch.nn.ModuleList, torch.nn.ModuleDict)


@dataclass
class Kind:
    """All modules of one class below the root.

    Attributes:
        name: The class's name.
        count: How many there are; one that stands in several places counts once.
        paths: Where the first ones are.
        each: Parameters of the largest, with all that is below it.
        total: Parameters of all of them, shared ones once.
        repeated: How many are items of a list of such modules.
        composite: Whether other modules with parameters are in it.
        outer: Other classes that hold one.
        callable: Whether it has a forward, and so can be an FSDP unit.
    """

    name: str
    count: int = 0
    paths: list[str] = field(default_factory=list)
    each: int = 0
    total: int = 0
    repeated: int = 0
    composite: bool = False
    outer: set[str] = field(default_factory=set)
    callable: bool = True


def walk(model: torch.nn.Module) -> tuple[dict[str, Kind], Parts]:
    """Go through a model, on whatever device it is.

    Returns:
        Its classes by name, and what it is made of.
    """
    names = _name_classes(model)
    walker = _Walker(names)
    walker.visit(model, "", ())
    ancestors = {
        name: tuple(names[base] for base in kind.__mro__[1:] if base in names)
        for kind, name in names.items()
    }
    inherited = {name: above for name, above in ancestors.items() if above}
    containers = tuple(kind.name for kind in walker.kinds.values() if not kind.callable)
    return walker.kinds, Parts(tuple(walker.parts), inherited, containers)


def _name_classes(model: torch.nn.Module) -> dict[type, str]:
    """Each class's name. Of two that share one, the first met has it, as for accelerate's policy.

    The others cannot be named in a job; only their modules differ.
    """
    names: dict[type, str] = {}
    taken: set[str] = set()
    for module in model.modules():
        kind = type(module)
        if kind not in names:
            plain = kind.__name__
            names[kind] = plain if plain not in taken else f"{kind.__module__}.{plain}"
            taken.add(plain)
    return names


class _Walker:
    def __init__(self, names: dict[type, str]) -> None:
        self.kinds: dict[str, Kind] = {}
        self.parts: list[Part] = []
        self._names = names
        self._index: dict[Part, int] = {}  # alike → where in `parts`
        self._visited: set[torch.nn.Module] = set()
        self._owned: set[torch.nn.Parameter] = set()
        self._counted: dict[str, set[torch.nn.Parameter]] = {}  # class → parameters in its total

    def visit(self, module: torch.nn.Module, path: str, above: tuple[str, ...]) -> int:
        """Note a module and all below it.

        Args:
            module: Not visited before.
            path: Where it is.
            above: Classes of the modules that hold it, without the root.

        Returns:
            The index of its part.
        """
        self._visited.add(module)
        own = [p for p in module.parameters(recurse=False) if p not in self._owned]
        self._owned.update(own)
        name = self._names[type(module)]
        inside = above
        if path:
            self._note(module, name, path, above)
            inside = (*above, name)
        children: Counter[int] = Counter()
        repeated = _repeated(module)
        for child_name, child in module.named_children():
            if child in self._visited:
                continue
            place = f"{path}.{child_name}" if path else child_name
            children[self.visit(child, place, inside)] += 1
            self.kinds[self._names[type(child)]].repeated += child in repeated
        part = Part(name, sum(p.numel() for p in own), tuple(sorted(children.items())))
        if part not in self._index:
            self._index[part] = len(self.parts)
            self.parts.append(part)
        return self._index[part]

    def _note(self, module: torch.nn.Module, name: str, path: str, above: tuple[str, ...]) -> None:
        kind = self.kinds.setdefault(name, Kind(name, callable=_has_forward(module)))
        kind.count += 1
        if len(kind.paths) < _PATHS:
            kind.paths.append(path)
        kind.outer.update(outer for outer in above if outer != name)
        kind.composite = kind.composite or any(map(_has_parameters, module.children()))
        counted = self._counted.setdefault(name, set())
        held = set(module.parameters())
        kind.each = max(kind.each, _size(held))
        kind.total += _size(held - counted)
        counted |= held


def _repeated(module: torch.nn.Module) -> set[torch.nn.Module]:
    """Return the items of a module list whose class repeats, or is the list's only class."""
    if not isinstance(module, (*_LISTS, torch.nn.Sequential)):
        return set()
    items = [child for child in module.children() if _has_parameters(child)]
    kinds = Counter(map(type, items))
    alone = isinstance(module, _LISTS) and len(kinds) == 1
    return {item for item in items if alone or kinds[type(item)] > 1}


def _has_forward(module: torch.nn.Module) -> bool:
    """Whether it can be called; `fully_shard` refuses lists, and never gathers what is not."""
    return type(module).forward is not torch.nn.Module.forward


def _has_parameters(module: torch.nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _size(parameters: Iterable[torch.nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)
