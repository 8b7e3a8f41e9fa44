"""Report facts about a model, as JSON values that `jobs.models.blocks` reads."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch

from jobs.models.parts import BlockClass, Part, Parts

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping


# -- walk -----------------------------------------------------------------------------------
# Collect a model's module classes, their sizes, and how they are nested.


_PATHS: Final = 3
_LISTS: Final = (torch.nn.ModuleList, torch.nn.ModuleDict)


@dataclass
class Kind:
    """All modules of one class below the root.

    Attributes:
        name: The class's name.
        count: Number of modules; a shared one counts once.
        paths: Paths of the first ones.
        each: Parameters of the largest module, including its children.
        total: Parameters of all modules, shared ones counted once.
        repeated: Number of modules that are items of a list of such modules.
        composite: Whether they contain other modules with parameters.
        outer: Other classes that contain one of them.
        callable: Whether they have a forward, and can therefore be FSDP units.
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
    """Walk through a model on any device.

    Returns:
        Its classes by name, and its structure.
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
    """Return each class's name. If two share one, the first keeps it, as in accelerate's policy.

    The others cannot be named in a job; a longer name keeps their modules apart.
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
        self._index: dict[Part, int] = {}  # part → its index in `parts`
        self._visited: set[torch.nn.Module] = set()
        self._owned: set[torch.nn.Parameter] = set()
        self._counted: dict[str, set[torch.nn.Parameter]] = {}  # class → parameters in its total

    def visit(self, module: torch.nn.Module, path: str, above: tuple[str, ...]) -> int:
        """Record a module and all modules below it.

        Args:
            module: A module that was not visited before.
            path: Its path.
            above: Classes of the modules that contain it, without the root.

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
    """Return whether a module has a forward. Lists have none, and `fully_shard` rejects them."""
    return type(module).forward is not torch.nn.Module.forward


def _has_parameters(module: torch.nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _size(parameters: Iterable[torch.nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


# -- recommend ------------------------------------------------------------------------------
# Recommend classes to wrap: the outermost repeated blocks, as long as a single one is small.


# Below these sizes, classes stay in the root: extra collectives would cost more than they save.
_LEAST_SHARE: Final = 0.01  # of the model, for all modules of a class together
_LEAST_UNIT: Final = 0.05  # of the largest unit, for a single module
# Nested blocks are used only if they improve the result this much, since they add collectives.
_WORTHWHILE: Final = 0.05


def recommend(
    kinds: Mapping[str, Kind], parts: Parts, no_split: Collection[str], repeated: Collection[str]
) -> list[str]:
    """Return the classes to wrap, the best first; no class contains another.

    The quality of a set is the fraction of the model that it wraps, times the fraction that its
    largest unit leaves. Start with the outermost candidates, repeatedly replace the one with the
    largest unit by the candidates inside of it, and return the best set found. For example, for a
    UNet whose stages hold a third of it each, this returns the blocks inside the stages.

    Args:
        kinds: The model's classes.
        parts: The model's structure.
        no_split: Classes that the model's class says must not be split.
        repeated: Classes that it says are its repeated blocks; classes that contain one are
            excluded.
    """
    total = parts.total()
    pool = _candidates(kinds, {*no_split, *repeated})
    inner = [kinds[name] for name in pool if name in repeated]
    pool -= {outer for kind in inner for outer in kind.outer if outer not in repeated}
    best: list[str] = []
    quality = 0.0
    while pool:
        # No class is outermost if classes contain each other.
        outermost = {name for name in pool if not kinds[name].outer & pool} or pool
        largest = max(sorted(outermost), key=lambda name: kinds[name].each)
        chosen = [
            name
            for name in outermost
            if kinds[name].total >= _LEAST_SHARE * total
            and kinds[name].each >= _LEAST_UNIT * kinds[largest].each
        ]
        coverage = parts.coverage(chosen)
        merit = coverage.share * (1 - coverage.largest / total)
        if merit > quality + (_WORTHWHILE if best else 0.0) and not coverage.nested:
            best, quality = chosen, merit
        pool.discard(largest)
    return sorted(best, key=lambda name: (-score(kinds[name], total), name))


def score(kind: Kind, total: int) -> float:
    """Rate a class on its own: the fraction it wraps, the size of a unit, and their number."""
    return kind.total / total * (1 - kind.each / total) * kind.count if total else 0.0


def _candidates(kinds: Mapping[str, Kind], listed: Collection[str]) -> set[str]:
    """Return classes of composite modules, preferably those that are items of lists."""
    able = [
        kind
        for kind in kinds.values()
        # `Sequential` is a generic name that other modules of a model share.
        if kind.callable and kind.composite and kind.total and kind.name != "Sequential"
    ]
    held = {
        kind.name
        for kind in able
        if kind.repeated > 1 or (kind.repeated == 1 and kind.name in listed)
    }
    named = {kind.name for kind in able if kind.name in listed}
    return held or named or {kind.name for kind in able if kind.count > 1}


# -- detection ------------------------------------------------------------------------------


def report(model: torch.nn.Module) -> dict[str, Any]:
    """Describe a model's classes: recommended ones first, then the most likely."""
    kinds, parts = walk(model)
    no_split = _names(model, "_no_split_modules")
    repeated = _names(model, "_repeated_blocks")
    chosen = recommend(kinds, parts, no_split, repeated)
    total = parts.total()

    def rank(kind: Kind) -> tuple[bool, bool, float, str]:
        blocks = kind.repeated > 1 and kind.composite
        return kind.name not in chosen, not blocks, -score(kind, total), kind.name

    classes = [
        BlockClass(
            class_name=kind.name,
            count=kind.count,
            params_each=kind.each,
            params_total=kind.total,
            share=kind.total / total if total else 0.0,
            recommended=kind.name in chosen,
            in_no_split_modules=kind.name in no_split,
            in_repeated_blocks=kind.name in repeated,
            sample_paths=kind.paths,
        )
        for kind in sorted(kinds.values(), key=rank)
        if kind.callable and kind.total and kind.count + (kind.name in {*chosen, *no_split}) > 1
    ]
    return {
        "model_class": type(model).__name__,
        "total_params": total,
        "no_split_modules": no_split,
        "classes": [vars(block_class) for block_class in classes],
        "parts": parts.to_dict(),
    }


def _names(model: torch.nn.Module, attribute: str) -> list[str]:
    """Return class names that a model class lists as a set (transformers), a list, or None."""
    listed = getattr(model, attribute, None) or ()
    if isinstance(listed, str):
        listed = [listed]
    names = map(str, listed)
    return list(dict.fromkeys(sorted(names) if isinstance(listed, set) else names))
