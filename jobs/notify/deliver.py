"""Deliver one notification, in a process that nothing waits for."""

from __future__ import annotations

import logging
import os
import subprocess
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from jobs.notify.config import NotifyConfig

_PATIENCE: Final = 60.0  # seconds for the command


def deliver(config: NotifyConfig, facts: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Run the command and tell the services.

    Args:
        config: Of the person.
        facts: As `jobs.notify.announce.facts_of` makes them.

    Yields:
        Each destination by kind and number, with what went wrong ("" if nothing); never an address.
    """
    if config.command:
        yield "command", _run(config.command, facts)
    if not config.urls:
        return
    try:
        import apprise
    except ImportError:
        yield "urls", "apprise is not installed; pip install 'fsdp-tui[notify]'"
        return
    logging.getLogger("apprise").setLevel(logging.CRITICAL)  # it would print addresses
    for number, url in enumerate(config.urls, start=1):
        yield f"url {number}", _tell(apprise.Apprise(), url, facts)


def _run(command: str, facts: Mapping[str, str]) -> str:
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", command],
            env=os.environ | dict(facts),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"did not end within {_PATIENCE:.0f} s"
    except OSError as error:
        return f"could not be started ({error.strerror})"
    return f"exit status {done.returncode}" if done.returncode else ""


def _tell(service: object, url: str, facts: Mapping[str, str]) -> str:
    try:
        if not service.add(url):  # type: ignore[attr-defined]
            return "is no address that apprise knows"
        delivered = service.notify(  # type: ignore[attr-defined]
            title=facts["FSDP_TUI_TITLE"], body=facts["FSDP_TUI_MESSAGE"]
        )
    except Exception as error:  # its message may name the address
        return f"failed ({type(error).__name__})"
    return "" if delivered else "was not delivered"
