"""`python tests/bench/claims.py`: measure every figure that README and the documents promise.

Runs the command beside each figure, and writes docs/measurements.md. `--only NAME …` runs some, and
leaves the other rows as they are; `--list` names them. What takes hours is sampled (`--whole` runs
all of it); the page has the command that ran. Exits with 1 if a promise does not hold.

`promises.py` lists the claims; `tests/test_claims.py` checks that each stands where it is said.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench.figures import Claim, Output  # noqa: E402
from tests.bench.promises import BENCHES, CLAIMS  # noqa: E402

PAGE: Final = ROOT / "docs" / "measurements.md"
LIBRARIES: Final = ("diffusers", "transformers", "accelerate", "peft", "textual")
CLOCK: Final = "†"
HEAD: Final = """# Measurements

Every figure of README and of these pages that is a promise about fsdp-tui, next to what was
measured. `python tests/bench/claims.py` runs the commands and writes this page;
[its folder](../tests/bench/README.md) has more measurements. Limits and intervals that are set in
the code, and facts about models and other tools, are not here.

Rows with {clock} are time by the clock: another machine takes another time, and a busy one longer.
Of what takes hours, a part is measured; the command says which.

| claim | said | where | measured | command | on |
|---|---|---|---|---|---|
"""
Row = tuple[str, str, str, str, str, str]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=list(BENCHES), default=[])
    parser.add_argument("--whole", action="store_true", help="run all of what is sampled")
    parser.add_argument("--list", action="store_true", help="name the commands, and run none")
    parser.add_argument("--page", action="store_true", help="write the page again, and run none")
    parser.add_argument(
        "--checkouts",
        type=Path,
        help="holds ai-toolkit, SimpleTuner, diffusers, OneTrainer, diffusion-pipe",
    )
    asked = parser.parse_args()
    if asked.list:
        for name, bench in BENCHES.items():
            print(f"{name:14}{bench.command}")
        return 0
    rows, places = read_page()
    broken = 0
    for name in [] if asked.page else asked.only or BENCHES:
        words = BENCHES[name].words(whole=asked.whole)
        if "CHECKOUTS" in words and asked.checkouts is None:
            print(f"{name}: not run: it needs --checkouts", file=sys.stderr)
            continue
        output = run(words.replace("CHECKOUTS", str(asked.checkouts)))
        for claim in (claim for claim in CLAIMS if claim.bench == name):
            measured, holds = claim.read(claim, output)
            broken += not holds
            word = "holds" if holds else "DOES NOT HOLD"
            print(f"{word}: {claim.name}: {claim.said}, measured {measured}", flush=True)
            if holds or not output.status:  # else the command has failed, which measures nothing
                place = places.setdefault(here(), len(places) + 1)
                rows[claim.name] = row_of(claim, measured, words, str(place))
        write_page(rows, places)
    write_page(rows, places)
    return int(broken > 0)


def run(command: str) -> Output:
    """Run a command as the documents have it, in empty state and cache directories."""
    first, *rest = shlex.split(command)
    modules = {"pytest": ["-m", "pytest"], "fsdp-tui": ["-m", "tui"]}
    words = [sys.executable, *modules.get(first, []), *rest]
    print(f"$ {command}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="bench-claims-") as scratch:
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "FSDP_TUI_HOME": f"{scratch}/state",
            "XDG_CACHE_HOME": f"{scratch}/cache",
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "120",
        }
        begun = time.monotonic()
        done = subprocess.run(
            words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        seconds = time.monotonic() - begun
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-2000:], sep="\n", file=sys.stderr)
    return Output(done.stdout, done.returncode, seconds)


def here() -> str:
    """Versions, machine and day of a measurement, in words."""
    names = Path("/proc/cpuinfo").read_text()
    processor = re.search(r"model name\s*: (.*)", names)
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    libraries = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
    torch = find_spec("torch")  # importing it takes seconds
    assert torch is not None
    assert torch.origin is not None
    facts = Path(torch.origin).with_name("version.py").read_text()
    cuda = re.search(r"^cuda.* = '(\S+)'", facts, re.M)
    built = f"torch {version('torch')} for {f'CUDA {cuda[1]}' if cuda else 'CPUs'}"
    gpus = list(Path("/proc/driver/nvidia/gpus").glob("*"))
    return (
        f"{date.today():%-d %B %Y}: Python {platform.python_version()}, {built}, {libraries}; "
        f"{os.cpu_count()} × {processor[1] if processor else platform.machine()}, "
        f"{gigabytes:.0f} GB of memory, {len(gpus) or 'no'} GPU{'s' * (len(gpus) > 1)}"
    )


def row_of(claim: Claim, measured: str, command: str, place: str) -> Row:
    links = ", ".join(
        f"[{Path(name).stem}]({'' if name.startswith('docs/') else '../'}{Path(name).name})"
        for name in claim.where
        if name.endswith(".md")
    )
    name = f"{claim.name} {CLOCK}" if claim.clock else claim.name
    return (name, claim.said, links, measured, f"`{command}`", place)


# -- the page ----------------------------------------------------------------------------------


def read_page() -> tuple[dict[str, Row], dict[str, int]]:
    """The rows there are, by claim, and the numbers of the machines that they were measured on."""
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    rows = {}
    for line in text.splitlines():
        cells = tuple(cell.strip() for cell in line.strip("|").split(" | "))
        if len(cells) == 6 and cells[0] != "claim":
            rows[cells[0].removesuffix(f" {CLOCK}")] = cells
    places = {words: int(number) for number, words in re.findall(r"^(\d+)\. (.*)$", text, re.M)}
    return rows, places  # type: ignore[return-value]  # six of them


def write_page(rows: dict[str, Row], places: dict[str, int]) -> None:
    """Write rows as said now, the claims without one, and the machines, numbered from 1."""
    kept = []
    for claim in (claim for claim in CLAIMS if claim.name in rows):
        _, _, _, measured, command, place = rows[claim.name]
        kept.append(row_of(claim, measured, command.strip("`"), place))
    used = [words for words, number in places.items() if str(number) in {r[-1] for r in kept}]
    numbers = {str(places[words]): str(at) for at, words in enumerate(used, 1)}
    lines = [f"| {' | '.join((*row[:-1], numbers[row[-1]]))} |" for row in kept]
    machines = [f"{at}. {words}" for at, words in enumerate(used, 1)]
    text = HEAD.format(clock=CLOCK) + "\n".join(lines) + "\n\n"
    if missing := [claim.name for claim in CLAIMS if claim.name not in rows]:
        text += f"Not measured in this environment yet: {'; '.join(missing)}.\n\n"
    text += "## Measured on\n\n"
    PAGE.write_text(text + "\n".join(machines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
