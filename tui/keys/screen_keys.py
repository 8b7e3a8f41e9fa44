"""The keys of the current screen, from its bindings; help and palette use this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from textual.binding import Binding

from tui.keys.actions import ACTIONS, GROUP_TITLES
from tui.keys.keymap import MOVING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from textual.app import App
    from textual.dom import DOMNode
    from textual.screen import Screen

    from tui.keys.actions import Action

_BY_ID: Final = {action.id: action for action in ACTIONS}
HERE: Final = "On this screen"
EVERYWHERE: Final = "Everywhere"


@dataclass(frozen=True)
class ScreenKey:
    """A key that works now.

    Attributes:
        section: Heading in the help.
        shown: The displayed keys.
        label: A word or two.
        help: A sentence, or the label.
        action: Textual's parsed action.
        node: The node that has the action.
        id: The binding's id, or "".
        moves: Whether it only moves a cursor or scrolls, like arrow keys.
    """

    section: str
    shown: str
    label: str
    help: str
    action: str
    node: DOMNode
    id: str = ""
    moves: bool = False

    @property
    def entry(self) -> Action | None:
        """Look up its entry in the table of actions."""
        return _BY_ID.get(self.id)

    @property
    def title(self) -> str:
        """Return the first part of the help, which says what the key does."""
        title = self.help.partition(": ")[0]
        return title[:1].upper() + title[1:]


def screen_keys(screen: Screen[Any]) -> list[ScreenKey]:
    """List the keys of a screen: its own first, then its widgets', then the app's."""
    keys: dict[tuple[str, str], ScreenKey] = {}
    for node in _nodes(screen):
        for action, bindings in _by_action(node, screen.app).items():
            key = _describe(node, action, bindings, screen)
            if key is not None:
                keys.setdefault((key.shown, key.help), key)
    order = {HERE: -1, EVERYWHERE: len(GROUP_TITLES) + 1}
    order |= {title: place for place, title in enumerate(GROUP_TITLES.values())}
    return sorted(keys.values(), key=lambda key: order.get(key.section, len(GROUP_TITLES)))


def _nodes(screen: Screen[Any]) -> Iterator[DOMNode]:
    """Yield the screen, its nodes and the application, each class once; only our classes."""
    seen: set[type] = set()
    for node in (screen, *screen.walk_children(), screen.app):
        if type(node) not in seen and type(node).__module__.startswith("tui."):
            seen.add(type(node))
            if getattr(node, "display", True):
                yield node


def _by_action(node: DOMNode, app: App[Any]) -> Mapping[str, list[Binding]]:
    """Return bindings that a class of ours adds, with the user's own keys."""
    ours: set[tuple[str, str]] = set()
    for kind in type(node).__mro__:
        if kind.__module__.startswith("tui."):
            made = Binding.make_bindings(vars(kind).get("BINDINGS", []))
            ours |= {(binding.action, binding.description) for binding in made}
    bindings = node._bindings.copy()  # Textual has no public API for a node's bindings
    bindings.apply_keymap(app._keymap)
    by_action: dict[str, list[Binding]] = {}
    for binding in (
        binding for several in bindings.key_to_bindings.values() for binding in several
    ):
        if (binding.action, binding.description) in ours and binding.description:
            by_action.setdefault(binding.action, []).append(binding)
    return by_action


def _describe(
    node: DOMNode, action: str, bindings: list[Binding], screen: Screen[Any]
) -> ScreenKey | None:
    first = bindings[0]
    action_of_id = _BY_ID.get(first.id or "")
    section = EVERYWHERE if node is screen.app else HERE if node is screen else _title(node)
    if action_of_id is not None and node is not screen.app:
        section = GROUP_TITLES[action_of_id.group]
    return ScreenKey(
        section,
        shown_keys(bindings, screen.app),
        first.description,
        first.tooltip or first.description,
        action,
        node,
        first.id or "",
        any(binding.key in MOVING or binding.key in ("ctrl+d", "ctrl+u") for binding in bindings),
    )


def shown_keys(bindings: list[Binding], app: App[Any]) -> str:
    """Return the keys of an action as displayed, each once."""
    if bindings[0].key_display:
        return bindings[0].key_display
    keys = [binding.key for binding in bindings if not binding.key.startswith("shift+")] or [
        bindings[0].key
    ]
    return " ".join(dict.fromkeys(app.get_key_display(Binding(key, "", "")) for key in keys))


def _title(node: DOMNode) -> str:
    name = node.id or type(node).__name__
    return f"In “{name.replace('-', ' ')}”"
