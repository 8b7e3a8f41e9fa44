"""Figures of the documents: each stands where docs/measurements.md says, and was measured."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.bench.claims import PAGE, read_page, row_of
from tests.bench.figures import Claim, Output, at_most, count, lines, minutes, number, says, table
from tests.bench.promises import BENCHES, CLAIMS
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from tests.bench.figures import Reader

BENCH = re.compile(r"tests/bench/\w+\.py")
OWN_PAGES = ("README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_a_claim_stands_where_it_is_said(claim: Claim) -> None:
    assert not claim.missing()


def test_a_claim_that_has_changed_is_noticed() -> None:
    claim = Claim("load", "", "8 MiB", {"README.md": "loading 2.3 GB takes {} MiB"}, minutes)
    assert claim.missing() == ["README.md does not say: loading 2.3 GB takes 8 MiB"]


def test_every_claim_was_measured_and_says_what_the_page_says_or_is_named_there() -> None:
    rows, _ = read_page()
    missing = [claim.name for claim in CLAIMS if claim.name not in rows]
    assert not missing or f"yet: {'; '.join(missing)}." in PAGE.read_text(encoding="utf-8")
    for claim in CLAIMS:
        if claim.name in missing:
            continue
        _, _, _, measured, command, place = rows[claim.name]
        assert measured
        assert BENCHES[claim.bench].command in command
        assert rows[claim.name] == row_of(claim, measured, command.strip("`"), place)
    assert len(rows) + len(missing) == len({claim.name for claim in CLAIMS}) == len(CLAIMS)


def test_every_figure_of_the_readmes_table_is_a_claim() -> None:
    rows = re.findall(r"^\| \*\*.*?\| (.*) \| `(.*)` \|$", read("README.md"), re.M)
    assert len(rows) > 5
    commands = {bench.command for bench in BENCHES.values()}
    said = [claim.where.get("README.md", "-").replace("{}", claim.written) for claim in CLAIMS]
    for figure, command in rows:
        assert any(words in figure for words in said), figure
        assert any(measuring.startswith(command) for measuring in commands), command


def test_every_measurement_that_a_page_names_has_a_claim_there() -> None:
    for name in OWN_PAGES:
        if ROOT / name == PAGE:
            continue
        measured = {
            script
            for claim in CLAIMS
            if name in claim.where
            for script in BENCH.findall(BENCHES[claim.bench].command)
        }
        assert set(BENCH.findall(read(name))) <= measured, name


@pytest.mark.parametrize(
    ("said", "reader", "printed", "measured", "holds"),
    [
        ("275 MB", number(r"(\d+) MB"), "270 MB, then 280 MB", "280 MB", True),
        ("275 MB", number(r"(\d+) MB"), "310 MB", "310 MB", False),
        ("275 MB", number(r"(\d+) MB"), "200 MB", "200 MB", False),
        ("275 MB", at_most(r"(\d+) MB"), "200 MB", "200 MB", True),
        ("275 MB", number(r"(\d+) MB"), "MB", "not printed", False),
        ("2.3 GB", number(r"(\S+) MiB", 0.01, 2**20 / 1e9), "2,199 MiB", "2.31 GB", True),
        ("0.00 %", at_most(r"(\S+)%"), "0.004%", "0.004 %", True),
        ("0.00 %", at_most(r"(\S+)%"), "0.01%", "0.01 %", False),
        ("2e-6", at_most(r"^is (\S+)"), "is 2.4e-06", "2e-6", True),
        ("2e-6", at_most(r"^is (\S+)"), "is 4e-06", "4e-6", False),
        ("a minute", at_most(r"(\S+) min"), "1.2 min", "1.2 minute", True),
        ("3 minutes", minutes, "", "2 minutes", True),
        ("1 minute", minutes, "", "2 minute", False),
        ("2 families", count("^same$"), "same\nsame\nother", "2 families", True),
        ("3 families", count("^same$"), "same\nsame\nother", "2 families", False),
        ("so", says("all is equal"), "all is\n  equal", "all is equal", True),
        ("so", says("all is equal"), "all differs", "not printed", False),
    ],
)
def test_what_a_command_prints_is_compared_with_what_is_said(
    said: str, reader: Reader, printed: str, measured: str, holds: bool
) -> None:
    claim = Claim("bench", "name", said, {}, reader)
    assert reader(claim, Output(printed, 0, 120.0)) == (measured, holds)


def test_a_command_that_fails_keeps_no_promise() -> None:
    claim = Claim("bench", "name", "3 minutes", {}, minutes)
    assert minutes(claim, Output("", 1, 60.0)) == ("failed", False)


def test_tables_and_printed_lines_are_compared_with_the_page() -> None:
    (parity,) = (claim for claim in CLAIMS if claim.name == "ranks against one process, table")
    head = next(iter(parity.where.values()))
    page = read("docs/training.md").partition(head)[2].split("\n\n")[0]
    rows = page.replace("| ddp, 2", "| ddp 2").replace("| fsdp2,", "| fsdp2").splitlines()[2:]
    assert parity.read(parity, Output("\n".join(rows), 0, 0))[1]
    assert not parity.read(parity, Output("\n".join(rows[1:]), 0, 0))[1]
    off = "\n".join(rows).replace("e-7", "e-5", 1)
    assert not parity.read(parity, Output(off, 0, 0))[1]
    (example,) = (claim for claim in CLAIMS if claim.read is lines)
    block = read("docs/memory-and-estimate.md").partition("(shortened):")[2].split("```")[1]
    assert example.read(example, Output(block, 0, 0))[1]
    assert not example.read(example, Output(block.replace("30.4", "31.4"), 0, 0))[1]
    assert table(r"^never", 1)(example, Output(block, 0, 0))[1] is False
