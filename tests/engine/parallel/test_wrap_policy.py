"""A person's own wrap policy: how it is found, what it may be, what it chooses, on every rank."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import pytest
from torch.distributed.fsdp.wrap import _recursive_wrap

from engine.parallel.wrap_policy import choose_modules, load_policy
from jobs.errors import UserError
from jobs.preflight import check_job
from jobs.preflight.check_job import check_wrap_policy
from jobs.spec.file.load import load_spec
from jobs.spec.job_spec import JobSpec
from tests.support.engine import wrap_policies
from tests.support.engine.ranks import wrap_policy as wrap_policy_ranks
from tests.support.engine.toy_jobs import start_ranks

if TYPE_CHECKING:
    from pathlib import Path

    import torch

MINE: Final = "tests.support.engine.wrap_policies"


def names(model: torch.nn.Module, chosen: list[torch.nn.Module]) -> list[str]:
    known = {module: name for name, module in model.named_modules()}
    return [known[module] for module in chosen]


@pytest.mark.parametrize("name", ["blocks", "by_size", "by_class", "by_policy", "by_rank"])
def test_what_can_be_called_as_torch_does_is_a_policy(name: str) -> None:
    assert callable(load_policy(f"{MINE}.{name}"))


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("no_such_module.policy", "cannot import no_such_module.policy: ModuleNotFoundError"),
        (
            f"{MINE}.blokcs",
            f"cannot import {MINE}.blokcs: AttributeError",
        ),
        (
            f"{MINE}.number",
            f"{MINE}.number is a int, not a function",
        ),
        (f"{MINE}.without_call", "is a CustomPolicy, not a function"),
        (f"{MINE}.more", "missing a required argument: 'depth'"),
        (
            f"{MINE}.other_names",
            "write def policy(module, recurse, nonwrapped_numel)",
        ),
        ("torch.distributed.fsdp.wrap.transformer_auto_wrap_policy", "transformer_layer_cls"),
    ],
)
def test_what_is_none_is_told_in_one_line(path: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        load_policy(path)
    assert said in str(caught.value)
    assert str(caught.value).startswith("fsdp_auto_wrap_policy: ")


def test_a_module_that_exits_when_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "quits_at_once.py").write_text("raise SystemExit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="cannot import quits_at_once"):
        load_policy("quits_at_once.policy")


@pytest.mark.parametrize(
    "name", ["blocks", "one_of_blocks", "by_size", "by_small_size", "by_class", "nothing"]
)
def test_modules_are_chosen_as_torch_chooses_them(name: str) -> None:
    policy, model = getattr(wrap_policies, name), wrap_policies.Model()
    theirs: list[torch.nn.Module] = []

    def wrap(module: torch.nn.Module, **_: Any) -> torch.nn.Module:
        theirs.append(module)
        return module

    _recursive_wrap(
        model, policy, wrap, ignored_modules=set(), ignored_params=set(), only_wrap_children=True
    )
    assert names(model, choose_modules(model, policy)) == names(model, theirs)


def test_parameters_that_stay_whole_are_not_counted() -> None:
    model = wrap_policies.Model()
    assert "head" in names(model, choose_modules(model, wrap_policies.by_size))
    ignored = set(model.head.parameters())
    assert "head" not in names(model, choose_modules(model, wrap_policies.by_size, ignored))


def test_a_shared_module_is_one_unit() -> None:
    model = wrap_policies.Model(blocks=2)
    model.blocks[1] = model.blocks[0]
    assert names(model, choose_modules(model, wrap_policies.blocks)) == ["blocks.0"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("breaks", "it failed on the full model: KeyError: 'a bad day'"),
        ("containers", "it chose blocks, a ModuleList, which is never called"),
    ],
)
def test_a_policy_that_cannot_be_followed(name: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        choose_modules(wrap_policies.Model(), getattr(wrap_policies, name))
    assert said in str(caught.value)


# -- before a job is queued ----------------------------------------------------------------


def spec_of(policy: str, **changes: Any) -> JobSpec:
    return JobSpec(**{"num_processes": 2, "fsdp_auto_wrap_policy": policy} | changes)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules every Python of this test can import, and one that may be."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FSDP_TUI_WRAP_POLICIES", "theirs, mine")
    return tmp_path


def test_a_good_policy_is_imported_before_the_job_is_queued(installed: Path) -> None:
    (installed / "mine.py").write_text(
        "print('noise on standard output')\n"
        "open(__file__ + '.imported', 'w').close()\n"
        "def policy(module, recurse, nonwrapped_numel):\n    return True\n"
    )
    check_wrap_policy(spec_of("mine.policy"))
    assert (installed / "mine.py.imported").exists()


def test_a_policy_that_the_person_does_not_name_is_left_to_the_ranks(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job file may come from anywhere, and to import is to run."""
    (installed / "mine.py").write_text("open(__file__ + '.imported', 'w').close()\n")
    (installed / "min.py").write_text("open(__file__ + '.imported', 'w').close()\n")
    check_wrap_policy(spec_of("min.policy"))
    monkeypatch.delenv("FSDP_TUI_WRAP_POLICIES")
    check_wrap_policy(spec_of("mine.policy"))
    assert not list(installed.glob("*.imported"))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("", "cannot import mine.policy: AttributeError"),
        ("import no_such_thing", "ModuleNotFoundError: No module named 'no_such_thing'"),
        ("policy = 3", "mine.policy is a int, not a function"),
        ("def policy(module): pass", "cannot be called as a policy"),
        ("import os; os._exit(7)", "importing mine.policy failed"),
        ("import time; time.sleep(600)", "importing mine.policy did not finish in 2 s"),
    ],
)
def test_a_bad_policy_is_told_before_the_job_is_queued(
    installed: Path, source: str, said: str
) -> None:
    (installed / "mine.py").write_text(source)
    with pytest.raises(UserError) as caught:
        check_wrap_policy(spec_of("mine.policy"), longest=2.0 if "sleep" in source else 60.0)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_working_directory_is_not_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks run elsewhere, so that what is only found from here would fail there."""
    (tmp_path / "mine.py").write_text("def policy(module, recurse, nonwrapped_numel): pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FSDP_TUI_WRAP_POLICIES", "mine")
    with pytest.raises(UserError, match="the module must be installed"):
        check_wrap_policy(spec_of("mine.policy"))


@pytest.mark.parametrize(
    "spec", [spec_of("SIZE_BASED_WRAP"), spec_of("no.such", strategy="ddp")], ids=["word", "ddp"]
)
def test_nothing_is_imported_where_nothing_is_wrapped_by_it(
    spec: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setenv("FSDP_TUI_WRAP_POLICIES", "no")
    monkeypatch.setattr("jobs.preflight.check_job.ask", lambda *words: asked.append(words[1]))
    check_wrap_policy(spec)
    assert asked == []
    check_wrap_policy(spec_of("no.such"))
    assert asked == [["no.such"]], "else it is asked"


def test_it_is_looked_at_with_the_rest_of_a_job(
    job_values: dict[str, Any], no_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSDP_TUI_WRAP_POLICIES", "no_such_module")
    spec = load_spec(None, job_values | {"fsdp_auto_wrap_policy": "no_such_module.policy"})
    with pytest.raises(UserError, match="cannot import no_such_module"):
        check_job.check(spec)


# -- on ranks ------------------------------------------------------------------------------


def test_ranks_shard_as_the_policy_says_and_differ_in_nothing(tmp_path: Path) -> None:
    policies = [f"{MINE}.{name}" for name in ("blocks", "by_size", "by_rank", "nothing")]
    start_ranks(wrap_policy_ranks.look, 2, policies, str(tmp_path)).join()
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert first[f"{MINE}.blocks"]["units"] == [
        "Block",
        "Block",
        "Block",
        "Model",
    ]
    assert first[f"{MINE}.blocks"]["worst"] < 1e-6
    assert first[f"{MINE}.by_size"]["worst"] < 1e-6
    assert (
        "it chose different modules on rank 1 than on rank 0" in (first[f"{MINE}.by_rank"]["error"])
    )
    assert "wraps nothing in this model" in first[f"{MINE}.nothing"]["error"]
