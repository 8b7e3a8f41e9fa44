"""Run checks in isolation, so that none can block or crash the others."""

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
# The result of a check: a verdict, one sentence, and advice.


# Credentials that may appear in a path or a variable and must not be printed.
_SECRETS: Final = re.compile(
    r"(?<=://)[^/@\s]+(?=@)"  # user and password in an address
    r"|\b(?:hf_|ghp_|gho_|github_pat_|glpat-|sk-|xox[a-z]-|AKIA)[A-Za-z0-9_-]{6,}"
)
_LONGEST: Final = 400


class Verdict(StrEnum):
    """The severity of a finding. Only `fail` makes the exit status 1."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        name: Subject of the check, in a word or two.
        verdict: ok, warn or fail.
        found: One sentence.
        advice: One sentence saying what to do; None if nothing is wrong.
        lines: Lines of a table to print below it.
        facts: The same information as JSON values, for scripts.
        group: The heading it is printed under.
    """

    name: str
    verdict: Verdict
    found: str
    advice: str | None = None
    lines: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    group: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as JSON values."""
        return asdict(self) | {"verdict": str(self.verdict), "lines": list(self.lines)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Finding:
        """Rebuild a finding from `to_dict`.

        Raises:
            KeyError, TypeError, ValueError: The values are not a finding.
        """
        return cls(
            **values | {"verdict": Verdict(values["verdict"]), "lines": tuple(values["lines"])}
        )

    def plain(self, group: str) -> Finding:
        """Return the finding under a heading, without terminal control characters and secrets."""
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
    """Return untrusted text (an error, path or variable) as one printable line without secrets."""
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
# The options of an examination, and facts that one check gathers for others.


@dataclass
class Patient:
    """The machine, and the job it is meant to run.

    A field is None if it was not requested or could not be determined. A check that needs it then
    yields nothing, because the check that failed to determine it has reported why.

    Attributes:
        job: The job file, if there is one.
        gpus: GPUs to check and measure, by index or UUID; all if empty.
        quick: Skip the all-reduce.
        run_id: Set in the environment of every process that is started, so that all can be ended.
        spec: The parsed job.
        nvml: The driver's answers.
        torch: torch's answers.
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
    """One check.

    Attributes:
        group: The heading it is printed under.
        name: Its subject, used if the check itself fails.
        run: Yields findings; those yielded before it fails or times out count.
        seconds: Its time limit.
        stage: Checks of a stage run in parallel, after all checks of the previous stage.
        when_late: Advice if it times out.
    """

    group: str
    name: str
    run: Callable[[Patient], Iterable[Finding]]
    seconds: float = 20.0
    stage: int = 0
    when_late: str = "something hangs (a network file system, a busy disk); try again"


def examine(checks: Sequence[Check], patient: Patient) -> Iterator[Finding]:
    """Run the checks; yield their findings in order, as soon as they are available.

    A check that times out is abandoned in its thread. One that raises becomes a finding.
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
    """A check in a daemon thread, which is never joined."""

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
            # Replace the list, because the thread may still append to the old one.
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
