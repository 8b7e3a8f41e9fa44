"""`fsdp-tui doctor` and `selftest`: check whether this machine can train, and suggest fixes."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import textwrap
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from jobs import selftest as jobs_selftest
from jobs.doctor import processes
from jobs.doctor.checks.terminal import check_terminal, environment_at_start, is_utf8
from jobs.doctor.examine import Verdict
from jobs.doctor.orphans import sweep_orphans
from jobs.errors import UserError
from jobs.paths import ensure_state_home, state_home
from jobs.queue.store import Store
from jobs.service.repair import repair
from tui.cli.echo import ProgressLine, echo
from tui.cli.job_arguments import JSON

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    from jobs.doctor.examine import Finding


# -- doctor ---------------------------------------------------------------------------------
# `fsdp-tui doctor`: check whether this machine can train, and suggest fixes.


_WIDEST: Final = 100  # columns; longer lines are hard to read
_NARROWEST: Final = 50
_NAME: Final = 14  # columns
_GROUPS: Final = 9  # for the progress bar only
_SIGNS: Final = {Verdict.OK: "✓", Verdict.WARN: "!", Verdict.FAIL: "✗"}
_ASCII_SIGNS: Final = {Verdict.OK: "+", Verdict.WARN: "!", Verdict.FAIL: "x"}
_COLOURS: Final = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "red"}
_ASCII: Final = str.maketrans({"–": "-", "·": ".", "×": "x", "µ": "u", "→": ">", "…": "~"})


@click.command()
@click.argument("job", required=False, metavar="[JOB.yaml]", type=click.Path(path_type=Path))
@click.option("--gpus", metavar="0,1", help="GPUs to check, by index or UUID.")
@click.option("--quick", is_flag=True, help="Skip the all-reduce check, which takes half a minute.")
@click.option(
    "--repair",
    "mend",
    is_flag=True,
    help="Rebuild a damaged jobs database, keeping the old one; of an intact one, delete run "
    "directories of no job in which nothing was trained.",
)
@JSON
def doctor(job: Path | None, gpus: str | None, quick: bool, mend: bool, as_json: bool) -> int:
    """Check that this machine is ready to train, with a fix for each problem.

    With JOB.yaml, also check what that job needs. Exit status: 0 if nothing fails, 1 if something
    does, 2 for bad usage. Tokens and passwords are never printed.
    """
    if mend:
        return _repair(as_json=as_json)
    if job is not None and not job.is_file():
        raise UserError(f"no such job file: {job}")
    names = read_names(gpus)
    look = style(environment_at_start(), tty=sys.stdout.isatty())
    findings: list[Finding] = []
    # Always closed, so that its subprocesses end.
    with closing(_look(job, names, quick=quick, bar=look.utf8)) as coming:
        for finding in coming:
            if not as_json:
                first = _is_first(finding, findings)
                echo("\n".join(lines(finding, look, first=first)), coloured=True)
            findings.append(finding)
    counts = Counter(str(finding.verdict) for finding in findings)
    if as_json:
        echo(json.dumps(facts(findings)))
    else:
        echo(f"\n{_counted(counts['fail'], counts['warn'], counts['ok'])}")
    return 1 if counts["fail"] else 0


def _counted(failed: int, warnings: int, fine: int) -> str:
    return f"{failed} failed, {warnings} warning{'s' * (warnings != 1)}, {fine} ok"


def _repair(*, as_json: bool) -> int:
    home = ensure_state_home()
    done = repair(home)
    # A rebuilt database may lack jobs that the old one had.
    swept, left = sweep_orphans(Store(home)) if done.kept is None else ([], [])
    if as_json:
        facts: dict[str, Any] = {
            "kept": done.kept and str(done.kept),
            "read": done.read,
            "restored": done.restored,
        }
        facts |= {"swept": [str(orphan.path) for orphan in swept]}
        echo(json.dumps(facts | {"left": [str(orphan.path) for orphan in left]}))
        return 0
    if done.kept is not None:
        echo(f"rebuilt the jobs database; the old one is {done.kept}")
        echo(f"jobs: {len(done.read)} read from it, {len(done.restored)} from run directories")
    else:
        also = "" if swept else "; nothing changed"
        echo(f"the jobs database is intact{also}")
    for orphan in swept:
        echo(f"deleted {orphan.path}, of no job")
    for orphan in left:
        why = f"holds {orphan.holds}" if orphan.holds else "is in use, or cannot be deleted"
        echo(f"{orphan.path} belongs to no job and {why}; delete it by hand")
    return 0


def read_names(text: str | None) -> tuple[str, ...]:
    """Parse the GPUs of `--gpus`.

    Raises:
        UserError: The list is empty, or names a GPU twice.
    """
    if text is None:
        return ()
    names = tuple(name.strip() for name in text.strip("[] ").split(","))
    if not all(names) or len(set(names)) < len(names):
        raise UserError(
            f'--gpus "{text}" is not a list of different GPUs', "for example --gpus 0,1"
        )
    return names


def facts(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return what `--json` prints."""
    counts = Counter(finding.verdict for finding in findings)
    return {
        "ok": not counts[Verdict.FAIL],
        "counts": {str(verdict): counts[verdict] for verdict in Verdict},
        "findings": [finding.to_dict() for finding in findings],
    }


@dataclass(frozen=True)
class Style:
    """Output format: columns, whether non-ASCII characters are allowed, whether colors are."""

    width: int = 80
    utf8: bool = True
    colour: bool = False


def style(environ: Mapping[str, str], *, tty: bool) -> Style:
    """Choose symbols and colors that fit the output."""
    columns = shutil.get_terminal_size().columns if tty else 80
    plain = bool(environ.get("NO_COLOR")) or environ.get("TERM", "dumb") == "dumb"
    width = max(_NARROWEST, min(columns, _WIDEST))
    return Style(width, is_utf8(environ), colour=tty and not plain)


def lines(finding: Finding, look: Style, *, first: bool = False) -> Iterator[str]:
    """Yield the lines of a finding, below a heading if it is the first of its group. Pure."""
    if first:
        yield ""
        yield click.style(finding.group, bold=True) if look.colour else finding.group
    sign = (_SIGNS if look.utf8 else _ASCII_SIGNS)[finding.verdict]
    indent = " " * (_NAME + 5)
    head = f"    {finding.name:<{_NAME}} "
    text = _wrapped(finding.found, head, indent, look)
    mark = click.style(sign, fg=_COLOURS[finding.verdict], bold=True) if look.colour else sign
    yield f"  {mark} {text[0][4:]}"
    yield from text[1:]
    if finding.advice is not None:
        yield from _wrapped(finding.advice, f"{indent}→ ", f"{indent}  ", look)
    for line in finding.lines:
        yield _readable(f"{indent}{line}", look)[: look.width]


def _wrapped(text: str, head: str, indent: str, look: Style) -> list[str]:
    return textwrap.wrap(
        _readable(text, look),
        look.width,
        initial_indent=_readable(head, look),
        subsequent_indent=indent,
        break_on_hyphens=False,
    ) or [head]


def _readable(text: str, look: Style) -> str:
    if look.utf8:
        return text
    return text.translate(_ASCII).encode("ascii", "replace").decode()


def _is_first(finding: Finding, before: Sequence[Finding]) -> bool:
    return not before or before[-1].group != finding.group


def _look(
    job: Path | None, names: tuple[str, ...], *, quick: bool, bar: bool
) -> Generator[Finding, None, None]:
    """Return all findings; show progress on a line while there is none."""
    yield from (finding.plain("terminal") for finding in check_terminal())
    coming, groups = processes.find(job, names, quick=quick), set[str]()
    try:
        while True:
            with ProgressLine("checking the machine") as progress:
                if bar:
                    progress(min(len(groups), _GROUPS), _GROUPS, "")
                finding = next(coming, None)
            if finding is None:
                return
            groups.add(finding.group)
            yield finding
    finally:
        coming.close()


# -- selftest -------------------------------------------------------------------------------
# `fsdp-tui selftest`: run real jobs for a few minutes to prove that this machine trains.


_CPU_RANKS: Final = 2
_INTERRUPTED: Final = 130  # exit status


@click.command()
@click.option(
    "--gpus", metavar="0,1", help="GPUs to test, by index or UUID (default: all idle ones)."
)
@click.option("--cpu", is_flag=True, help="Test CPU ranks even if there are GPUs.")
@click.option(
    "--ranks",
    type=click.IntRange(1, 16),
    default=_CPU_RANKS,
    show_default=True,
    help="Number of CPU ranks.",
)
@JSON
def selftest(gpus: str | None, cpu: bool, ranks: int, as_json: bool) -> int:
    """Test that this machine can train; run it once on every new machine.

    Trains a small model on one device, then on all devices with each strategy, and compares the
    results. Also tests stop and resume, the export in diffusers, and a killed rank; on GPUs also
    out-of-memory, bandwidth, step time and memory. Takes about 3 minutes. Exit status: 0 if nothing
    fails, else 1.
    """
    store = Store()
    chosen = [] if cpu else jobs_selftest.choose_gpus(store, read_names(gpus))
    if gpus and cpu:
        raise UserError("--gpus and --cpu cannot be combined", "use one of them")
    for number in (signal.SIGTERM, signal.SIGHUP):  # like Ctrl-C: stop and remove the jobs
        signal.signal(number, lambda *_: sys.exit(_INTERRUPTED))
    look = style(environment_at_start(), tty=sys.stdout.isatty())
    findings: list[Finding] = []
    started = time.monotonic()
    with ProgressLine("self-test") as progress:
        for finding in jobs_selftest.run(
            store,
            chosen,
            len(chosen) or ranks,
            say=lambda words: progress(len(findings), jobs_selftest.COUNT, words),
        ):
            if not as_json:
                progress.clear()
                first = not findings or findings[-1].group != finding.group
                echo("\n".join(lines(finding, look, first=first)), coloured=True)
            findings.append(finding)
    counts = Counter(finding.verdict for finding in findings)
    if as_json:
        echo(json.dumps(facts(findings)))
    else:
        seconds = time.monotonic() - started
        echo(
            f"\n{_counted(counts[Verdict.FAIL], counts[Verdict.WARN], counts[Verdict.OK])}, "
            f"in {seconds:.0f} s; report: "
            f" {state_home() / jobs_selftest.REPORT}"
        )
    return 1 if counts[Verdict.FAIL] else 0
