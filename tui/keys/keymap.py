"""A person's own keys: which actions there are, and what of a keymap can be done."""

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

    from tui.settings.settings import Settings

_COMMANDS: Final = ("tui.cli", "tui.__main__")  # all others may have keys
# Keys of vim that move, and those that always do.
_VIM: Final = frozenset("hjklgG") | {"shift+g", "upper_g", "ctrl+d", "ctrl+u"}
_MOVING: Final = frozenset(
    {"left", "down", "up", "right", "home", "end", "ctrl+home", "ctrl+end", "pagedown", "pageup"}
)


@dataclass
class Known:
    """An action that can have other keys.

    Attributes:
        id: What a keymap calls it.
        keys: Those it has by itself.
        does: In a few words.
        places: Classes of screens and widgets in which it is.
    """

    id: str
    keys: tuple[str, ...]
    does: str
    places: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Keymap:
    """Keys by action, as Textual takes them, and what could not be done, a sentence each."""

    keys: dict[str, str]
    problems: tuple[str, ...] = ()


def known_bindings() -> dict[str, Known]:
    """Every binding of every screen that has an id. Imports all screens: 0.1 s."""
    found: dict[str, Known] = {}
    for place in places():
        keys: dict[str, list[Binding]] = {}
        for binding in Binding.make_bindings(vars(place)["BINDINGS"]):
            if binding.id:
                keys.setdefault(binding.id, []).append(binding)
        for name, bindings in keys.items():
            first = bindings[0]
            one = found.setdefault(
                name,
                Known(name, tuple(b.key for b in bindings), first.tooltip or first.description),
            )
            one.places.add(place.__qualname__)
    return found


def places() -> Iterator[type[Any]]:
    """Screens, widgets and the application, as far as they have bindings of their own."""
    for module in pkgutil.walk_packages(tui.__path__, "tui."):
        if module.name.startswith(_COMMANDS):
            continue
        for one in vars(importlib.import_module(module.name)).values():
            if (
                isinstance(one, type)
                and issubclass(one, DOMNode)
                and one.__module__ == module.name
                and vars(one).get("BINDINGS")
            ):
                yield one


def settle_keymap(settings: Settings, known: Mapping[str, Known]) -> Keymap:
    """What of the settings' keymap can be done. Pure.

    Unknown actions, keys that are no keys, and keys that another action of the same place has, are
    told; the action then keeps its own.
    """
    problems = []
    wanted: dict[str, tuple[str, ...]] = {}
    for name, text in settings.keymap.items():
        if name not in known:
            problems.append(f'keymap: no action "{name}"{did_you_mean(name, known)}')
        elif not (chosen := _normal(text)):
            problems.append(f"keymap: {name} has no key; it keeps {_own(known[name])}")
        else:
            wanted[name] = chosen
    others = {} if settings.vim_keys else dict(_without_vim(known))
    while clash := _find_clash(wanted, others, known):  # what is refused may clash again
        name, key, other = clash
        del wanted[name]
        problems.append(
            f"keymap: {key} is already the key of {other}; {name} keeps {_own(known[name])}"
        )
    return Keymap(
        {name: ",".join(keys) for name, keys in (others | wanted).items()}, tuple(problems)
    )


def _normal(text: str) -> tuple[str, ...]:
    """Keys in Textual's long names: `?` is `question_mark`."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    made = BindingsMap([Binding(part, "none", "") for part in parts])
    return tuple(made.key_to_bindings)


def _without_vim(known: Mapping[str, Known]) -> Iterator[tuple[str, tuple[str, ...]]]:
    for name, one in known.items():
        left = tuple(key for key in one.keys if key not in _VIM)
        if len(left) < len(one.keys) and _MOVING & set(left):
            yield name, left


def _find_clash(
    wanted: dict[str, tuple[str, ...]],
    others: dict[str, tuple[str, ...]],
    known: Mapping[str, Known],
) -> tuple[str, str, str] | None:
    """The last wanted action that cannot have its keys, the key, and whose it is."""
    keys = {name: one.keys for name, one in known.items()} | others | wanted
    for name in reversed(wanted):
        for other, one in known.items():
            if other != name and one.places & known[name].places:
                for key in keys[name]:
                    if key in keys[other]:
                        return name, key, other
    return None


def _own(one: Known) -> str:
    return ", ".join(one.keys)
