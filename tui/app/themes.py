"""Our own themes. Widgets use only theme variables, so Textual's own themes work as well."""

from __future__ import annotations

from typing import Final

from textual.theme import BUILTIN_THEMES, Theme

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

CONTRAST: Final = Theme(
    name="harbour-contrast",
    dark=True,
    primary="#66ccff",
    secondary="#ffffff",
    accent="#ffd800",
    foreground="#ffffff",
    background="#000000",
    surface="#000000",
    panel="#1c1c1c",
    success="#5dff5d",
    warning="#ffd800",
    error="#ff8080",
    text_alpha=1.0,
    variables={
        "border": "#ffffff",
        "border-blurred": "#8c8c8c",
        "block-cursor-background": "#ffd800",
        "block-cursor-foreground": "#000000",
        "block-cursor-text-style": "bold",
    },
)

CONTRAST_LIGHT: Final = Theme(
    name="harbour-contrast-light",
    dark=False,
    primary="#003f8a",
    secondary="#000000",
    accent="#7a2e00",
    foreground="#000000",
    background="#ffffff",
    surface="#ffffff",
    panel="#e4e4e4",
    success="#005a1e",
    warning="#6b4000",
    error="#9b0010",
    text_alpha=1.0,
    variables={
        "border": "#000000",
        "border-blurred": "#6e6e6e",
        "block-cursor-background": "#003f8a",
        "block-cursor-foreground": "#ffffff",
        "block-cursor-text-style": "bold",
    },
)

# The terminal's own sixteen colors: for terminals that have no more, and for users who chose
# them with care.
ANSI: Final = Theme(
    name="harbour-16",
    dark=True,
    ansi=True,
    primary="ansi_bright_blue",
    secondary="ansi_cyan",
    accent="ansi_bright_yellow",
    foreground="ansi_default",
    background="ansi_default",
    surface="ansi_default",
    panel="ansi_default",
    boost="ansi_default",
    success="ansi_bright_green",
    warning="ansi_yellow",
    error="ansi_bright_red",
    variables=BUILTIN_THEMES["ansi-dark"].variables
    | {
        "border": "ansi_bright_blue",
        "border-blurred": "ansi_bright_black",
        "block-cursor-background": "ansi_white",
        "block-cursor-foreground": "ansi_black",
        "block-cursor-text-style": "bold",
        "input-cursor-background": "ansi_white",
        "input-cursor-foreground": "ansi_black",
        "input-selection-background": "ansi_bright_blue",
        "input-selection-foreground": "ansi_black",
        "scrollbar-background": "ansi_default",
    },
)

ANSI_LIGHT: Final = Theme(
    name="harbour-16-light",
    dark=False,
    ansi=True,
    primary="ansi_blue",
    secondary="ansi_cyan",
    accent="ansi_magenta",
    foreground="ansi_default",
    background="ansi_default",
    surface="ansi_default",
    panel="ansi_default",
    boost="ansi_default",
    success="ansi_green",
    warning="ansi_yellow",
    error="ansi_red",
    variables=BUILTIN_THEMES["ansi-light"].variables
    | {
        "border": "ansi_blue",
        "border-blurred": "ansi_bright_black",
        "block-cursor-background": "ansi_blue",
        "block-cursor-foreground": "ansi_bright_white",
        "block-cursor-text-style": "bold",
        "input-cursor-background": "ansi_black",
        "input-cursor-foreground": "ansi_bright_white",
        "input-selection-background": "ansi_cyan",
        "input-selection-foreground": "ansi_black",
        "scrollbar-background": "ansi_default",
    },
)

THEMES: Final = (DARK, LIGHT, CONTRAST, CONTRAST_LIGHT, ANSI, ANSI_LIGHT)
_PAIRS: Final = ((DARK, LIGHT), (CONTRAST, CONTRAST_LIGHT), (ANSI, ANSI_LIGHT))


def other_theme(name: str, *, dark: bool) -> str:
    """Return the light counterpart of a dark theme, or the dark one of a light theme.

    Args:
        name: The theme that is shown.
        dark: Whether that theme is dark; used for themes that are not ours.
    """
    for dark_theme, other in _PAIRS:
        if name in (dark_theme.name, other.name):
            return other.name if name == dark_theme.name else dark_theme.name
    return LIGHT.name if dark else DARK.name
