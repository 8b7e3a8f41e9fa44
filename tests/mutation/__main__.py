"""`python -m tests.mutation [MODULE …] [--base REF]`: which small changes do the tests not notice?

    python -m tests.mutation engine.diffusion.random_numbers jobs.queue.store --sample 10 --seed 1
    python -m tests.mutation --base main        # only lines that differ from there

Prints each survivor with its diff, and a table by module. Exit status 1 if there are survivors.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import click
import yaml

from tests.mutation.mutants import Mutant, mutants_of
from tests.mutation.which import files_for
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

_EQUIVALENT: Final = Path(__file__).with_name("equivalent.yaml")
_LEAST_SECONDS: Final = 60.0  # of CPU; an endless loop has them soon
_TIMES: Final = 5.0  # a mutant may take as often the time of the code as it is


@dataclass(frozen=True)
class Chosen:
    """The mutants of a module that are tried."""

    module: str
    file: str
    source: str
    mutants: list[Mutant]
    tests: list[str]


@click.command()
@click.argument("modules", nargs=-1)
@click.option("--base", help="Try lines that differ from this commit; modules default to those.")
@click.option("--seed", default=0, show_default=True, help="Of the sample.")
@click.option("--sample", type=int, help="How many mutants of each module; all when left out.")
@click.option("--list", "only_list", is_flag=True, help="Print the mutants, run nothing.")
@click.option("--said", is_flag=True, help="Print what pytest said of survivors.")
def main(
    modules: tuple[str, ...],
    base: str | None,
    seed: int,
    sample: int | None,
    only_list: bool,
    said: bool,
) -> None:
    """Apply small changes to the code, one at a time, and run the fast tests on each."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # the copy is removed then
    lines = changed_lines(base) if base else None
    names = modules or tuple(sorted(name_of(file) for file in lines or ()))
    if not names:
        raise click.UsageError("name modules, or a commit with --base")
    chosen = [choose(name, lines, seed, sample) for name in names]
    if only_list:
        for one in chosen:
            click.echo(f"{one.module}: {len(one.mutants)} mutants; {' '.join(one.tests)}")
            for mutant in one.mutants:
                click.echo(shown(one, mutant))
        return
    with copied() as copy:
        ends = {one.module: try_all(one, copy, said=said) for one in chosen}
    click.echo(table(ends, seed))
    sys.exit(any(one["survives"] for one in ends.values()))


def changed_lines(base: str) -> dict[str, set[int]]:
    """File → lines that differ from a commit, of the files that have mutants."""
    words = ["git", "diff", "-U0", base, "--", "tui", "jobs", "engine"]
    diff = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found: dict[str, set[int]] = {}
    for line in diff.splitlines():
        if line.startswith("+++ "):
            file = line.removeprefix("+++ b/")
        elif (hunk := re.match(r"@@ \S+ \+(\d+)(?:,(\d+))? @@", line)) and file.endswith(".py"):
            first, count = int(hunk[1]), int(hunk[2] or 1)
            found.setdefault(file, set()).update(range(first, first + count))
    return found


def name_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def choose(module: str, lines: dict[str, set[int]] | None, seed: int, sample: int | None) -> Chosen:
    """The mutants of a module that are tried: of changed lines, and a sample of them."""
    path = ROOT / (module.replace(".", "/") + ".py")
    path = path if path.exists() else path.with_suffix("") / "__init__.py"
    if not path.exists():
        raise click.UsageError(f"there is no module {module}")
    file, source = str(path.relative_to(ROOT)), path.read_text()
    found = mutants_of(source)
    if lines is not None:
        found = [one for one in found if one.line in lines.get(file, ())]
    if sample is not None and sample < len(found):
        found = random.Random(f"{seed} {module}").sample(found, sample)
    ordered = sorted(found, key=lambda one: (one.start, one.text))
    return Chosen(module, file, source, ordered, files_for(module))


@contextmanager
def copied() -> Iterator[Path]:
    """A copy of the working tree, for the mutants."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    with tempfile.TemporaryDirectory(prefix="mutation-") as name:
        for file in filter(None, listed.split("\0")):
            if (ROOT / file).is_file():
                (Path(name) / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / file, Path(name) / file)
        yield Path(name)


def try_all(one: Chosen, copy: Path, *, said: bool) -> Counter[str]:
    """Try a module's mutants; how many come to which end."""
    ends: Counter[str] = Counter()
    if not one.mutants:
        return ends
    equivalent = known_equivalents(one.module)
    click.echo(f"{one.module}: {len(one.mutants)} mutants against {' '.join(one.tests)}")
    with subprocess.Popen(
        [sys.executable, "-P", "tests/mutation/trials.py", one.module.split(".")[0]],
        cwd=copy,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": str(copy)},
    ) as trials:
        sound = ask(trials, one, one.source, 600.0)
        if sound["outcome"] != "survives":
            raise click.ClickException(f"the tests fail without a mutant:\n{sound['said']}")
        seconds = max(_LEAST_SECONDS, _TIMES * sound["cpu"])
        click.echo(f"  {sound['cpu']:.1f} CPU-seconds without a mutant")
        for mutant in one.mutants:
            if (mutant.where, *mutant.lines(one.source)) in equivalent:
                ends["equivalent"] += 1
                continue
            found = ask(trials, one, mutant.applied(one.source), seconds)
            ends[found["outcome"]] += 1
            how = f"{found['outcome']:8} {found['cpu']:5.1f} s"
            click.echo(f"  {how} {shown(one, mutant)} {found['by']}".rstrip())
            if said and found["outcome"] == "survives":
                click.echo(found["said"])
    return ends


def known_equivalents(module: str) -> set[tuple[str, str, str]]:
    """(function, lines before, lines after) of what is listed as changing nothing."""
    listed = (yaml.safe_load(_EQUIVALENT.read_text()) or {}).get(module) or []
    return {(one["in"], one["was"], one["now"]) for one in listed}


def shown(one: Chosen, mutant: Mutant) -> str:
    was, now = mutant.lines(one.source)
    text = f"{one.file}:{mutant.line} {mutant.kind}"
    return f"{text}\n      - {was}\n      + {now}\n     "


def table(ends: dict[str, Counter[str]], seed: int) -> str:
    """By module: tried, dead, alive, equivalent, and the share of dead ones."""
    rows = [f"{'module':32} tried   die  live  equivalent    %   (seed {seed})"]
    total: Counter[str] = Counter()
    for module, one in [*ends.items(), ("all", total)]:
        dead = one["dies"] + one["hangs"]
        tried = dead + one["survives"]
        share = f"{100 * dead / tried:5.1f}" if tried else "    –"
        rows.append(
            f"{module:32} {tried:5} {dead:5} {one['survives']:5} {one['equivalent']:11} {share}"
        )
        if module != "all":
            total.update(one)
    return "\n".join(rows)


def ask(trials: subprocess.Popen[str], one: Chosen, source: str, seconds: float) -> dict[str, Any]:
    """What becomes of a source."""
    request = {"file": one.file, "source": source, "tests": one.tests, "seconds": seconds}
    _pipe(trials.stdin).write(json.dumps(request) + "\n")
    _pipe(trials.stdin).flush()
    answer: dict[str, Any] = json.loads(_pipe(trials.stdout).readline())
    return answer


def _pipe(end: IO[str] | None) -> IO[str]:
    assert end is not None
    return end


if __name__ == "__main__":
    main()
