"""The mutation script: what it changes, and that it sees whether a test notices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.mutation.mutants import mutants_of
from tests.mutation.which import files_for
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Container
    from pathlib import Path

TRIALS = ROOT / "tests" / "mutation" / "trials.py"
EQUIVALENT = ROOT / "tests" / "mutation" / "equivalent.yaml"

SOURCE = '''"""A module: 1 < 2."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    LIMIT = 1 < 2


def clamp(value: int, least: int = 0) -> int:
    """Not below: `value < least`."""
    if value < least and value is not None:
        return min(value, least)
    return -value


class Box:
    held: "list[int]" = []

    def put(self, one: int) -> str:
        self.held.append(one)
        while not one:
            one += 1
        return f"{one} of {len(self.held)}"
'''


def changed(source: str, places: Container[str] | None = None) -> set[tuple[str, str, str]]:
    return {(one.where, *one.lines(source)) for one in mutants_of(source, places)}


def test_code_that_runs_is_changed_and_words_and_types_are_not() -> None:
    found = changed(SOURCE)
    test = "if value < least and value is not None:"
    assert ("clamp", test, "if (value <= least) and value is not None:") in found
    assert ("clamp", test, "if (value < least or value is not None):") in found
    assert ("clamp", test, "if (value < least):") in found
    assert ("clamp", test, "if value < least and (value is None):") in found
    assert ("clamp", "return min(value, least)", "return (max(value, least))") in found
    assert ("clamp", "return -value", "return (value)") in found
    assert ("clamp", "return -value", "return None") in found
    assert ("Box.put", "self.held.append(one)", "pass") in found
    assert ("Box.put", "while not one:", "while (one):") in found
    assert ("Box.put", "one += 1", "one += (2)") in found
    words = 'return f"{one} of {len(self.held)}"'
    assert ("Box.put", words, "return (f'{len(self.held)} of {one}')") in found
    head = "def clamp(value: int, least: int = 0) -> int:"
    assert ("clamp", head, head.replace("0", "(1)")) in found
    assert not [was for _, was, _ in found if '"""' in was or "LIMIT" in was or "held:" in was]


def test_a_mutant_is_one_change_of_the_text_in_bytes() -> None:
    source = 'note = "größer"; more = 1 < 2  # wie „<“\n'
    texts = {one.applied(source) for one in mutants_of(source)}
    assert 'note = "größer"; more = (1 <= 2)  # wie „<“\n' in texts
    assert all("größer" in text and text.endswith("# wie „<“\n") for text in texts)


def test_a_module_is_held_against_fast_tests_that_exist() -> None:
    assert (
        files_for("jobs.backends.local.placement")[0]
        == "tests/jobs/backends/local/test_placement.py"
    )
    for module in (
        "engine.diffusion.random_numbers",
        "engine.model.files.weights",
        "jobs.queue.store",
        "jobs.spec.rules.strategy",
    ):
        assert all((ROOT / name).exists() for name in files_for(module))
    with pytest.raises(LookupError, match=r"no test in .* imports engine\.nothing"):
        files_for("engine.nothing")


def test_what_is_listed_as_equivalent_is_still_a_mutant() -> None:
    """An entry for code that has changed hides nothing; it is to be taken out."""
    for module, listed in (yaml.safe_load(EQUIVALENT.read_text()) or {}).items():
        source = (ROOT / (module.replace(".", "/") + ".py")).read_text()
        found = changed(source, {one["in"] for one in listed})
        for one in listed:
            assert one["why"]
            assert (one["in"], one["was"], one["now"]) in found, f"{module}: {one}"


def test_a_trial_says_whether_the_tests_notice(tmp_path: Path) -> None:
    code, sound = tmp_path / "code_of_mine.py", "def double(n):\n    return n + n\n"
    code.write_text(sound)
    (tmp_path / "test_it.py").write_text(
        "import subprocess, sys\nfrom code_of_mine import double\n\n\n"
        "def test_here():\n    assert double(2) == 4\n\n\n"
        "def test_in_a_process():\n"
        "    words = [sys.executable, '-c', 'import code_of_mine as m; print(m.double(3))']\n"
        "    assert subprocess.run(words, capture_output=True, text=True).stdout == '6\\n'\n"
    )
    sources = {
        "survives": "def double(n):\n    return 2 * n\n",
        "dies": "def double(n):\n    return n * n\n",  # 2 · 2 is 2 + 2, 3 · 3 is not 3 + 3
        "hangs": "import time\n\n\ndef double(n):\n    while True:\n        time.sleep(1)\n",
    }
    common = {"file": code.name, "tests": ["test_it.py"]}
    seconds = {"survives": 20.0, "dies": 20.0, "hangs": 2.0}
    asked = "".join(
        json.dumps(common | {"source": source, "seconds": seconds[name]}) + "\n"
        for name, source in sources.items()
    )
    done = subprocess.run(
        [sys.executable, "-P", str(TRIALS), "jobs"],
        input=asked,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        check=True,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["outcome"] for one in answers] == list(sources)
    assert answers[1]["by"] == "test_it.py::test_in_a_process"
    assert code.read_text() == sound
