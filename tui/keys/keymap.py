"""The user's keymap: which actions exist, and which of the user's keys are valid."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from textual.binding import Binding, BindingsMap
from textual.dom import DOMNode

import tui
from jobs.spec.values.spellings import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tui.settings import Settings

_COMMANDS: Final = ("tui.cli", "tui.__main__")  # every other module may define keys
# Vim's movement keys, and the standard ones.
_VIM: Final = frozenset("hjklgG") | {"shift+g", "upper_g", "ctrl+d", "ctrl+u"}
MOVING: Final = frozenset(
    {"left", "down", "up", "right", "home", "end", "ctrl+home", "ctrl+end", "pagedown", "pageup"}
)


@dataclass
class NamedBinding:
    """An action that can be rebound.

    Attributes:
        id: Its id in keymaps.
        keys: The default keys.
        does: A short description.
        places: Classes of screens and widgets that have it.
    """

    id: str
    keys: tuple[str, ...]
    does: str
    places: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Keymap:
    """Keys by action in Textual's format, and a sentence for each problem."""

    keys: dict[str, str]
    problems: tuple[str, ...] = ()


def known_bindings() -> dict[str, NamedBinding]:
    """Return every binding with an id. Imports all screens, which takes 0.1 s."""
    bindings_by_id: dict[str, NamedBinding] = {}
    for place, whose in ((owner, kind) for owner in places() for kind in _ours(owner)):
        keys: dict[str, list[Binding]] = {}
        for binding in Binding.make_bindings(vars(whose)["BINDINGS"]):
            if binding.id:
                keys.setdefault(binding.id, []).append(binding)
        for name, bindings in keys.items():
            first = bindings[0]
            entry = bindings_by_id.setdefault(
                name,
                NamedBinding(
                    name, tuple(b.key for b in bindings), first.tooltip or first.description
                ),
            )
            entry.places.add(place.__qualname__)
    return bindings_by_id


def _ours(place: type[Any]) -> Iterator[type[Any]]:
    """Return the classes that define a place's bindings: itself and its bases in our code."""
    for kind in place.__mro__:
        if kind.__module__.startswith("tui.") and vars(kind).get("BINDINGS"):
            yield kind
            if issubclass(kind, DOMNode) and not kind._inherit_bindings:
                return


def places() -> Iterator[type[Any]]:
    """Return all screens, widgets and applications with bindings of their own."""
    for module in pkgutil.walk_packages(tui.__path__, "tui."):
        if module.name.startswith(_COMMANDS):
            continue
        for member in vars(importlib.import_module(module.name)).values():
            if (
                isinstance(member, type)
                and issubclass(member, DOMNode)
                and member.__module__ == module.name
                and vars(member).get("BINDINGS")
            ):
                yield member


def settle_keymap(settings: Settings, bindings: Mapping[str, NamedBinding]) -> Keymap:
    """Check the settings' keymap and say which keys apply. Pure.

    An unknown action, an invalid key, or a key of another action in the same place becomes a
    problem, and the action keeps its default keys.
    """
    problems = []
    chosen_keys: dict[str, tuple[str, ...]] = {}
    for name, text in settings.keymap.items():
        if name not in bindings:
            problems.append(f'keymap: no action "{name}"{did_you_mean(name, bindings)}')
        elif not (chosen := _normal(text)):
            problems.append(f"keymap: {name} has no key; it keeps {_own(bindings[name])}")
        else:
            chosen_keys[name] = chosen
    others = {} if settings.vim_keys else dict(_without_vim(bindings))
    while clash := _find_clash(chosen_keys, others, bindings):  # a rejected key may clash again
        name, key, other = clash
        del chosen_keys[name]
        problems.append(
            f"keymap: {key} is already the key of {other}; {name} keeps {_own(bindings[name])}"
        )
    return Keymap(
        {name: ",".join(keys) for name, keys in (others | chosen_keys).items()}, tuple(problems)
    )


def _normal(text: str) -> tuple[str, ...]:
    """Convert keys to Textual's long names: `?` is `question_mark`."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    made = BindingsMap([Binding(part, "none", "") for part in parts])
    return tuple(made.key_to_bindings)


def _without_vim(bindings: Mapping[str, NamedBinding]) -> Iterator[tuple[str, tuple[str, ...]]]:
    for name, binding in bindings.items():
        left = tuple(key for key in binding.keys if key not in _VIM)
        if len(left) < len(binding.keys) and MOVING & set(left):
            yield name, left


def _find_clash(
    chosen: dict[str, tuple[str, ...]],
    others: dict[str, tuple[str, ...]],
    bindings: Mapping[str, NamedBinding],
) -> tuple[str, str, str] | None:
    """Return the last requested action that cannot have its keys, the key, and its owner."""
    keys = {name: binding.keys for name, binding in bindings.items()} | others | chosen
    for name in reversed(chosen):
        for other, binding in bindings.items():
            if other != name and binding.places & bindings[name].places:
                for key in keys[name]:
                    if key in keys[other]:
                        return name, key, other
    return None


def _own(binding: NamedBinding) -> str:
    return ", ".join(binding.keys)
