"""`fsdp-tui selftest`: prove that this machine trains, with real jobs, in a few minutes."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Final

import click

from jobs import selftest as jobs_selftest
from jobs.doctor.checks.terminal import environment_at_start
from jobs.doctor.finding import Verdict
from jobs.errors import UserError
from jobs.paths import state_home
from jobs.queue.store import Store
from tui.cli.common.echo import echo
from tui.cli.common.job_arguments import JSON
from tui.cli.common.progress_line import ProgressLine
from tui.cli.machine.doctor import facts, lines, read_names, style

if TYPE_CHECKING:
    from jobs.doctor.finding import Finding

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
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: jobs are stopped and removed
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
            f"\n{counts[Verdict.FAIL]} failed, {counts[Verdict.WARN]} warnings, "
            f"{counts[Verdict.OK]} ok, in {seconds:.0f} s; report: "
            f" {state_home() / jobs_selftest.REPORT}"
        )
    return 1 if counts[Verdict.FAIL] else 0
