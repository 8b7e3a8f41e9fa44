"""`python -m engine.accelerate launch …`: accelerate's own command line, sooner there and gone.

It runs for as long as its ranks do. `accelerate launch` imports what its other commands need too:
`estimate` imports transformers. Without that, and with nothing of what is imported walked by the
collector, it takes 1.5 s of processor time instead of 3.2 (accelerate 1.15, torch 2.13).
"""

from __future__ import annotations

from engine.imports import hide, uncollected


def main() -> None:
    """Do what `accelerate` does with this process's arguments."""
    with uncollected():
        hide("transformers", "timm")
        from accelerate.commands import accelerate_cli

    accelerate_cli.main()


if __name__ == "__main__":
    main()
