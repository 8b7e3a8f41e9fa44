"""Run checks, none of which can hold up or bring down the others."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jobs.doctor.finding import Finding, fail
from jobs.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from jobs.doctor.patient import Patient


@dataclass(frozen=True)
class Check:
    """Something to look at.

    Attributes:
        group: The heading under which it is shown.
        name: What is checked, for when the check itself fails.
        run: Looks; what it has found before it fails or is late counts.
        seconds: How long it may take.
        stage: Checks of a stage run side by side, after all of the stage before.
        when_late: What to do if it does not answer.
    """

    group: str
    name: str
    run: Callable[[Patient], Iterable[Finding]]
    seconds: float = 20.0
    stage: int = 0
    when_late: str = "something hangs (a network file system, a busy disk); try again"


def examine(checks: Sequence[Check], patient: Patient) -> Iterator[Finding]:
    """Run the checks; yield their findings in order, as soon as they are there.

    A check that is late is left behind in its thread; one that breaks is a finding itself.
    """
    running = [_Running(check, patient) for check in checks]
    yielded = 0
    for stage in sorted({check.stage for check in checks}):
        here = [run for run in running if run.check.stage == stage]
        for run in here:
            run.start()
        for run in here:
            run.wait()
        while yielded < len(running) and running[yielded].check.stage <= stage:
            yield from running[yielded].findings()
            yielded += 1


@dataclass
class _Running:
    """A check in a thread of its own, which nobody waits for in the end."""

    check: Check
    patient: Patient
    _findings: list[Finding] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _deadline: float = 0.0

    def start(self) -> None:
        self._deadline = time.monotonic() + self.check.seconds
        threading.Thread(target=self._run, name=f"check {self.check.name}", daemon=True).start()

    def wait(self) -> None:
        if not self._over.wait(max(0.0, self._deadline - time.monotonic())):
            # The thread keeps the old list.
            self._findings = [*self._findings, _late(self.check)]

    def findings(self) -> Iterator[Finding]:
        yield from (finding.plain(self.check.group) for finding in self._findings)

    def _run(self) -> None:
        findings = self._findings
        try:
            for finding in self.check.run(self.patient):
                findings.append(finding)
        except UserError as error:
            advice = error.hint or "see `fsdp-tui doctor --help`"
            findings.append(fail(self.check.name, error.message, advice))
        except Exception as error:
            findings.append(_broken(self.check, error))
        finally:
            self._over.set()


def _late(check: Check) -> Finding:
    return fail(check.name, f"no answer within {check.seconds:g} s", check.when_late)


def _broken(check: Check, error: Exception) -> Finding:
    return fail(
        check.name,
        f"this check failed ({type(error).__name__}: {error})",
        "please report it; the other checks continued",
    )
