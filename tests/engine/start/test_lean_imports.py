"""What ranks and their launcher import, what they leave out, and what the collector passes over."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from engine.start.lean_imports import QUANTISERS, uncollected, unneeded
from jobs.errors import UserError
from tests.support.engine.toy_jobs import toy_spec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def unfrozen() -> Iterator[None]:
    """Leaves the collector as other tests expect it."""
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("unfrozen")
def test_what_is_imported_is_passed_over_by_the_collector_and_the_rest_is_not() -> None:
    with uncollected():
        assert not gc.isenabled()
        imported: list[object] = [[]]
    made: list[object] = [[]]
    assert gc.isenabled()
    looked_at = {id(thing) for thing in gc.get_objects()}
    assert id(imported) not in looked_at
    assert id(made) in looked_at


@pytest.mark.usefixtures("unfrozen")
def test_an_import_that_fails_leaves_the_collector_on() -> None:
    with pytest.raises(ImportError), uncollected():
        raise ImportError
    assert gc.isenabled()


def test_a_hidden_package_looks_as_if_it_were_not_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("made_up_hidden", "made_up_imported"):
        (tmp_path / f"{name}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    script = (
        "import made_up_imported; from importlib.util import find_spec\n"
        "from engine.start.lean_imports import hide; hide('made_up_hidden', 'made_up_imported')\n"
        "print(find_spec('made_up_hidden'), find_spec('made_up_imported') is not None)\n"
        "import made_up_hidden"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = [{str(tmp_path)!r}]\n{script}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["None", "True"], "what is imported already stays"
    assert "ModuleNotFoundError" in done.stderr


def test_quantisers_are_imported_only_by_jobs_that_need_one(toy: Path) -> None:
    assert unneeded(toy_spec(toy)) == QUANTISERS
    assert unneeded(toy_spec(toy, optimizer="adamw_8bit")) == ()
    with pytest.raises(UserError, match="no such model"):
        unneeded(toy_spec(toy / "nothing"))


@pytest.mark.parametrize("part", ["transformer", "text_encoder_2"])
def test_a_model_with_a_quantised_part_gets_its_quantiser(tmp_path: Path, part: str) -> None:
    for name in ("transformer", "text_encoder_2"):
        config = {"quantization_config": {"quant_method": "torchao"}} if name == part else {}
        (tmp_path / "model" / name).mkdir(parents=True)
        (tmp_path / "model" / name / "config.json").write_text(json.dumps(config))
    assert unneeded(toy_spec(tmp_path)) == ()


def loaded(*processes: tuple[str, str, str]) -> list[set[str]]:
    """Which of two packages are loaded in each of several processes, forked from one that goes on.

    Args:
        processes: A line for the one they are forked from, one for their own, and a module that
            they import then.
    """
    script = f"""
import importlib, os, sys
for before, line, module in {processes}:
    exec(before)
    if not (pid := os.fork()):
        exec(line)
        importlib.import_module(module)
        print(*(n for n in ("torchao", "transformers") if sys.modules.get(n)), flush=True)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return [set(line.split()) for line in done.stdout.split("\n")[:-1]]


@pytest.mark.slow
def test_what_is_hidden_would_be_imported_and_is_not() -> None:
    """Once a library no longer imports it by itself, it need not be hidden."""
    pytest.importorskip("torchao")
    launcher, rank = "accelerate.commands.accelerate_cli", "engine.run_job"
    hide = "from engine.start.lean_imports import hide; hide({!r})"
    of_launcher, of_rank, of_lean_rank = loaded(
        ("import torch", hide.format("transformers"), launcher),
        # A rank imports what the launcher does, and hides nothing of that.
        (f"import {launcher}", "", rank),
        ("", hide.format("torchao"), rank),
    )
    assert "transformers" not in of_launcher
    assert of_rank == {"transformers", "torchao"}
    assert of_lean_rank == {"transformers"}
