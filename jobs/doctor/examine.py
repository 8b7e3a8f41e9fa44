"""Run checks, none of which can hold up or bring down the others."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from jobs.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from jobs.doctor.checks.software import TorchFacts
    from jobs.doctor.nvml import Nvml
    from jobs.spec.job_spec import JobSpec


# -- finding --------------------------------------------------------------------------------
# What a check found: well, doubtful or wrong, in one sentence, and what to do about it.


# What may stand in a path or a variable and is nobody's business.
_SECRETS: Final = re.compile(
    r"(?<=://)[^/@\s]+(?=@)"  # user and password in an address
    r"|\b(?:hf_|ghp_|gho_|github_pat_|glpat-|sk-|xox[a-z]-|AKIA)[A-Za-z0-9_-]{6,}"
)
_LONGEST: Final = 400


class Verdict(StrEnum):
    """How bad it is. Only `fail` makes the exit status 1."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        name: What it was, in a word or two.
        verdict: ok, warn or fail.
        found: One sentence.
        advice: One sentence of what to do; None when all is well.
        lines: A table that goes with it, a line each.
        facts: The same as JSON values, for scripts.
        group: Under which heading it is shown.
    """

    name: str
    verdict: Verdict
    found: str
    advice: str | None = None
    lines: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    group: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self) | {"verdict": str(self.verdict), "lines": list(self.lines)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Finding:
        """Read what `to_dict` made.

        Raises:
            KeyError, TypeError, ValueError: It is something else.
        """
        return cls(
            **values | {"verdict": Verdict(values["verdict"]), "lines": tuple(values["lines"])}
        )

    def plain(self, group: str) -> Finding:
        """The same under a heading, with nothing in it that steers a terminal or is secret."""
        return replace(
            self,
            group=group,
            found=plain(self.found),
            advice=None if self.advice is None else plain(self.advice),
            lines=tuple(_printable(line) for line in self.lines),
            facts={name: _masked(value) for name, value in self.facts.items()},
        )


def ok(name: str, sentence: str, **facts: Any) -> Finding:
    return Finding(name, Verdict.OK, sentence, facts=facts)


def warn(name: str, sentence: str, advice: str, **facts: Any) -> Finding:
    return Finding(name, Verdict.WARN, sentence, advice, facts=facts)


def fail(name: str, sentence: str, advice: str, **facts: Any) -> Finding:
    return Finding(name, Verdict.FAIL, sentence, advice, facts=facts)


def plain(text: str) -> str:
    """Foreign text (an error, a path, a variable) as it may be printed: one line, no secrets."""
    line = " ".join(_printable(_masked(text)).split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"


def _masked(value: Any) -> Any:
    """Return a JSON value without secrets."""
    if isinstance(value, str):
        return _SECRETS.sub("***", value)
    if isinstance(value, dict):
        return {name: _masked(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_masked(item) for item in value]
    return value


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)


# -- patient --------------------------------------------------------------------------------
# What is asked of the doctor, and what one check learned that others need.


@dataclass
class Patient:
    """The machine, and the job it is meant to run.

    What is None was not asked for, or could not be found out; then a check that needs it has
    nothing to say, because whoever should have found it out has said why not.

    Attributes:
        job: The job file, if there is one.
        gpus: Devices to look at and to measure, by index or UUID; all when empty.
        quick: Leave the all-reduce out.
        run_id: In the environment of every process that is started, so that none is left.
        spec: The job.
        nvml: What the driver says.
        torch: What torch says.
    """

    job: Path | None = None
    gpus: tuple[str, ...] = ()
    quick: bool = False
    run_id: str = ""
    spec: JobSpec | None = None
    nvml: Nvml | None = None
    torch: TorchFacts | None = None


# -- examine --------------------------------------------------------------------------------


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
