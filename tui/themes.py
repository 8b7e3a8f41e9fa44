"""The two themes. Widgets use theme variables only, so Textual's own themes work as well."""

from __future__ import annotations

from typing import Final

from textual.theme import Theme

DARK: Final = Theme(
    name="harbour",
    dark=True,
    primary="#6cb6ff",
    secondary="#8fa3ba",
    accent="#f0b45f",
    foreground="#d5dde8",
    background="#0e131a",
    surface="#141b24",
    panel="#1e2833",
    success="#74c991",
    warning="#e9bb55",
    error="#f2777a",
    variables={
        "border": "#6cb6ff",
        "border-blurred": "#334150",
        "block-cursor-background": "#6cb6ff",
        "block-cursor-foreground": "#0e131a",
        "block-cursor-text-style": "bold",
        "input-selection-background": "#6cb6ff 35%",
    },
)

LIGHT: Final = Theme(
    name="harbour-light",
    dark=False,
    primary="#1f66b0",
    secondary="#53677c",
    accent="#a8640f",
    foreground="#1c2630",
    background="#f6f8fa",
    surface="#ffffff",
    panel="#e6ebf0",
    success="#1c7c44",
    warning="#936200",
    error="#b3262d",
    variables={
        "border": "#1f66b0",
        "border-blurred": "#b9c4cf",
        "block-cursor-background": "#1f66b0",
        "block-cursor-foreground": "#ffffff",
        "block-cursor-text-style": "bold",
    },
)
