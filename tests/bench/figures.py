"""A figure that the documents promise, and how it is read from what a command prints."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
NUMBER: Final = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e-\d+)?")
WORDS: Final = {"none": 0, "a": 1, "two": 2, "three": 3, "four": 4, "six": 6}


@dataclass(frozen=True)
class Output:
    """What a command printed, its exit status, and its seconds by the clock."""

    text: str
    status: int
    seconds: float


@dataclass(frozen=True)
class Bench:
    """A command, as the documents have it; `sample` makes it shorter."""

    command: str
    sample: str = ""

    def words(self, *, whole: bool) -> str:
        """The command line to run."""
        return self.command if whole or not self.sample else f"{self.command} {self.sample}"


@dataclass(frozen=True)
class Claim:
    """A figure.

    Attributes:
        bench: The name of the command that measures it.
        name: What it is a figure of.
        said: The figure and its unit.
        where: File → words there, with {} for the figure. The first is where a table is read.
        read: Returns what was measured, in words, and whether that is what is said.
        clock: Whether it is time by the clock, which depends on machine and load.
    """

    bench: str
    name: str
    said: str
    where: Mapping[str, str]
    read: Reader
    clock: bool = False

    @property
    def written(self) -> str:
        """The figure as it is written, without its unit."""
        found = NUMBER.search(self.said)
        return found[0] if found else self.said.split()[0]

    @property
    def value(self) -> float:
        """The figure."""
        return float(WORDS.get(self.written) or self.written.replace(",", ""))

    def missing(self) -> list[str]:
        """The places that no longer say it, and how they should."""
        lost = []
        for name, words in self.where.items():
            words = " ".join(words.replace("{}", self.written).split())
            if words not in " ".join((ROOT / name).read_text(encoding="utf-8").split()):
                lost.append(f"{name} does not say: {words}")
        return lost


Measured = tuple[str, bool]
Reader = Callable[["Claim", Output], Measured]


def number(pattern: str, within: float = 0.1, scale: float = 1, less: bool = False) -> Reader:
    """Read the largest number that a pattern finds.

    Args:
        pattern: With one group.
        within: How far it may be from what is said, as a part of that.
        scale: What it is multiplied by to have the unit that is said.
        less: Whether any smaller number keeps the promise too.
    """

    def read(claim: Claim, output: Output) -> Measured:
        found = re.findall(pattern, output.text, re.M)
        if not found:
            return "not printed", False
        value = scale * max(float(n.replace(",", "")) for n in found)
        return _compare(claim, value, within, less=less)

    return read


def minutes(claim: Claim, output: Output) -> Measured:
    """Read what the command took."""
    if output.status:
        return "failed", False
    return _compare(claim, output.seconds / 60, 0.25, less=True)


def at_most(pattern: str, within: float = 0.1) -> Reader:
    """Read the largest number that a pattern finds, which may be any that is smaller."""
    return number(pattern, within, less=True)


def _compare(claim: Claim, value: float, within: float, *, less: bool) -> Measured:
    decimals = len(claim.written.partition(".")[2])
    unit = claim.said.replace(claim.written, "", 1)
    if "e-" in claim.written:
        text, rounding = f"{value:.0e}".replace("e-0", "e-"), claim.value / 2
    else:
        # One digit more than is said, unless it is a zero.
        text = f"{value:,.{decimals + 1}f}".rstrip("0").rstrip(".")
        rounding = 0.5 * 10**-decimals
    away = value - claim.value
    return text + unit, (away if less else abs(away)) <= within * claim.value + rounding


def tests_pass(claim: Claim, output: Output) -> Measured:
    """Read how many tests passed."""
    passed = re.search(r"(\d+) passed", output.text)
    count = passed[1] if passed else "no"
    return f"{count} tests pass", passed is not None and not output.status


def says(pattern: str) -> Reader:
    """Read whether the command prints this, spaces and ends of lines alike."""

    def read(claim: Claim, output: Output) -> Measured:
        found = re.search(pattern, " ".join(output.text.split()))
        return (found[found.lastindex or 0], True) if found else ("not printed", False)

    return read


def count(pattern: str) -> Reader:
    """Read how often a pattern is found: as often as is said."""

    def read(claim: Claim, output: Output) -> Measured:
        found = len(re.findall(pattern, output.text, re.M))
        return claim.said.replace(claim.written, str(found), 1), found == claim.value

    return read


def table(row: str, within: float) -> Reader:
    """Read a table of the page, whose head is the claim's words, number by number.

    Args:
        row: Finds each row's numbers in what is printed, in one group.
        within: The largest difference of two of them.
    """

    def read(claim: Claim, output: Output) -> Measured:
        page, head = next(iter(claim.where.items()))
        rows = (ROOT / page).read_text(encoding="utf-8").partition(head)[2].split("\n\n")[0]
        cells = [line.strip("|").partition("|")[2] for line in rows.splitlines()[2:]]
        said = [float(n) for cell in cells for n in NUMBER.findall(cell)]
        printed = "\n".join(re.findall(row, output.text, re.M))
        found = [float(n) for n in NUMBER.findall(printed)]
        if len(said) != len(found) or not said:
            return f"{len(found)} figures instead of {len(said)}", False
        most = max(abs(one - other) for one, other in zip(said, found, strict=True))
        return f"{len(said)} figures, each within {most:.2g}", most <= within

    return read


def lines(claim: Claim, output: Output) -> Measured:
    """Read the lines of the code block of the page that follows the claim's words."""
    page, head = next(iter(claim.where.items()))
    block = (ROOT / page).read_text(encoding="utf-8").partition(head)[2].split("```")[1]
    said = [line.split() for line in block.splitlines()[1:] if line.strip("… ")]
    printed = [line.split() for line in output.text.splitlines()]
    same = sum(line in printed for line in said)
    return f"{same} of {len(said)} lines", same == len(said)
