"""Send notifications about jobs, as configured by the user.

`python -m jobs.notify` delivers the one that is described in its environment.
"""

from __future__ import annotations

import logging
import os
import stat
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from jobs.errors import UserError
from jobs.paths import config_home
from jobs.queue.states import State
from jobs.untrusted.files import read_regular

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from jobs.queue.job import Job

Event = Literal["completed", "stopped", "failed", "stalled", "test"]
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


class NotifyConfig(BaseModel):
    """The keys of `notify.yaml`.

    Attributes:
        command: A shell command; the facts are in its environment (`FSDP_TUI_…`).
        urls: Services, in the format of the apprise library.
        on: The events to notify about.
        stalled_after: Seconds without progress on any rank. A hang ends the job only after its
            `hang_timeout`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    command: str | None = None
    urls: list[str] = Field(default_factory=list)
    on: tuple[Event, ...] = ("completed", "stopped", "failed", "stalled")
    stalled_after: float = Field(600.0, ge=30)


def config_file() -> Path:
    """Return the path of the file, which may not exist."""
    return config_home() / "notify.yaml"


def read_config() -> NotifyConfig | None:
    """Read the file; None if there is none.

    Raises:
        UserError: It is invalid; the message contains none of its values.
    """
    path = config_file()
    try:
        text = read_regular(path).decode()
        others = path.stat().st_mode & _OTHERS
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError):
        raise UserError(f"cannot read {path}") from None
    if others:
        raise UserError(f"{path} may be read by others", f"chmod 600 {path}")
    try:
        # YAML 1.1 parses the key `on` as true.
        values = {"on" if k is True else k: v for k, v in (yaml.safe_load(text) or {}).items()}
        return NotifyConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{path}: {where}: {first['msg']}") from None
    except (yaml.YAMLError, AttributeError, ValueError, RecursionError):
        raise UserError(f"{path} is not a YAML mapping") from None


_PATIENCE: Final = 60.0  # seconds until the command is killed


def deliver(config: NotifyConfig, facts: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Run the command and notify the services.

    Args:
        config: The user's configuration.
        facts: The result of `jobs.notify.facts_of`.

    Yields:
        Each destination by kind and number, with the error ("" if none); never an address.
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
        yield f"url {number}", _notify_service(apprise.Apprise(), url, facts)


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


def _notify_service(service: object, url: str, facts: Mapping[str, str]) -> str:
    try:
        if not service.add(url):  # type: ignore[attr-defined]
            return "is no address that apprise knows"
        delivered = service.notify(  # type: ignore[attr-defined]
            title=facts["FSDP_TUI_TITLE"], body=facts["FSDP_TUI_MESSAGE"]
        )
    except Exception as error:  # its message may contain the address
        return f"failed ({type(error).__name__})"
    return "" if delivered else "was not delivered"


_WORTH_ASKING: Final = 30.0  # seconds without progress; the lowest configurable value


@dataclass
class Announcer:
    """Announce events of a job; failures to do so are only logged.

    Attributes:
        job: The job.
        say: Writes a line to the supervisor's log.
        stalled: Whether the current stall was announced.
    """

    job: Job
    say: Callable[[str], None]
    stalled: bool = False

    def check_stall(self, still: float) -> None:
        """Announce, once, that no rank has made progress for as long as the user allows.

        Args:
            still: Seconds since any rank last made progress.
        """
        if still < _WORTH_ASKING:
            self.stalled = False
        elif not self.stalled and (after := self._stalled_after()) and still >= after:
            self.stalled = True
            self.announce("stalled", f"no rank made progress for {still:.0f} s")

    def announce_end(self, state: State, reason: str) -> None:
        """Announce how the job ended; anything but completed or stopped is a failure."""
        ends: dict[State, Event] = {State.COMPLETED: "completed", State.STOPPED: "stopped"}
        self.announce(ends.get(state, "failed"), reason)

    def announce(self, event: Event, reason: str) -> None:
        """Start a process that delivers an event, if the user wants to be notified about it."""
        try:
            config = read_config()
            if config is None or event not in config.on:
                return
            with open(self.job.run_dir.logs / "notify.log", "ab") as log:
                subprocess.Popen(
                    [sys.executable, "-m", "jobs.notify"],
                    env=os.environ | {"PYTHONSAFEPATH": "1"} | facts_of(self.job, event, reason),
                    cwd=self.job.run_dir.root,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except (UserError, OSError) as error:
            self.say(f"cannot notify: {error}")

    def _stalled_after(self) -> float:
        try:
            config = read_config()
        except UserError:  # reported when there is something to announce
            return 0.0
        return config.stalled_after if config and "stalled" in config.on else 0.0


def facts_of(job: Job, event: Event, reason: str) -> dict[str, str]:
    """Return the environment variables that describe an event."""
    return {
        "FSDP_TUI_EVENT": event,
        "FSDP_TUI_JOB_ID": str(job.id),
        "FSDP_TUI_JOB_NAME": job.name,
        "FSDP_TUI_REASON": reason,
        "FSDP_TUI_RUN_DIR": str(job.run_dir.root),
        "FSDP_TUI_TITLE": f"Job {job.id} {event}: {job.name}",
        "FSDP_TUI_MESSAGE": reason,
    }


def main() -> int:
    """Deliver the notification and print a line for each destination."""
    facts = {key: value for key, value in os.environ.items() if key.startswith("FSDP_TUI_")}
    config = read_config()
    for what, wrong in deliver(config, facts) if config is not None else ():
        outcome = wrong or "notified"
        print(time.strftime("%Y-%m-%d %H:%M:%S"), facts["FSDP_TUI_EVENT"], f"{what}: {outcome}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
