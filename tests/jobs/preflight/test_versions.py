"""Which versions of libraries were tested, and what is said of others."""

from __future__ import annotations

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from jobs.errors import SpecError
from jobs.preflight import versions
from jobs.preflight.versions import TESTED, check_versions, find_untested
from jobs.spec.job_spec import JobSpec
from tests.support.paths import ROOT


def _installed(monkeypatch: pytest.MonkeyPatch, **there: str) -> None:
    monkeypatch.setattr(versions, "installed", there.get)


def test_what_was_tested_spans_from_the_lower_bounds_to_the_lock_at_least() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {r.name: r.specifier for r in map(Requirement, project["dependencies"])}
    lock = dict(re.findall(r"^([\w-]+)==([\d.]+)", (ROOT / "requirements.lock").read_text(), re.M))
    for name, tested in TESTED.items():
        (lowest,) = (Version(s.version) for s in wanted[name] if s.operator == ">=")
        assert tested.oldest == lowest.release[:2], name
        assert tested.oldest <= Version(lock[name]).release[:2] <= tested.newest, name


@pytest.mark.parametrize("name", TESTED)
def test_a_version_outside_of_what_was_tested_is_named_with_what_suffers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tested = TESTED[name]
    major, minor = tested.newest
    for version in (f"{major}.{minor}.9+cpu", ".".join(map(str, tested.oldest)), "unreadable"):
        _installed(monkeypatch, **{name: version})
        assert not list(find_untested())
    for version, word in ((f"{major}.{minor + 1}.0", "newer"), ("0.0.1", "older")):
        _installed(monkeypatch, **{name: version})
        ((found, what, hint),) = find_untested()
        assert found == name
        assert f"{version} is {word}" in what
        assert tested.needed_for in what
        assert hint.startswith("pip install '")


@pytest.mark.parametrize("strategy", ["auto", "fsdp2", "hsdp", "ddp"])
@pytest.mark.parametrize("precision", ["none", "nf4", "int8"])
def test_a_torch_that_cannot_shard_a_packed_base_is_refused_at_submit(
    strategy: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = JobSpec(
        strategy=strategy,  # type: ignore[arg-type]
        base_precision=precision,  # type: ignore[arg-type]
    )
    _installed(monkeypatch, torch="2.12.0")
    assert check_versions(spec) == []
    _installed(monkeypatch, torch="2.11.0")
    if precision != "none" and strategy != "ddp":
        with pytest.raises(SpecError, match="cannot shard a packed base"):
            check_versions(spec)
    else:
        assert "torch 2.11.0 is older" in check_versions(spec)[0]
