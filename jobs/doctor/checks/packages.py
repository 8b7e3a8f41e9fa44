"""Python, the packages that fsdp-tui needs, and those it can use."""

from __future__ import annotations

import sys
import tomllib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

import jobs
from jobs.doctor.finding import Finding, fail, ok, warn
from jobs.errors import UserError
from jobs.preflight.compiler import hint, what_lacks
from jobs.preflight.versions import find_untested, installed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from packaging.requirements import Requirement

    from jobs.doctor.patient import Patient

_NAME: Final = "fsdp-tui"
_FOR_TRAINING: Final = ("optimizers", "datasets", "video")  # extras; the others are for developers


@dataclass(frozen=True)
class Requirements:
    """The requirements of fsdp-tui, as written in pyproject.toml."""

    python: str
    needed: tuple[str, ...]
    extras: dict[str, tuple[str, ...]]


def check_python(_: Patient) -> Iterator[Finding]:
    """Whether this interpreter is one that fsdp-tui runs on."""
    from packaging.specifiers import SpecifierSet

    version = sys.version.split()[0]
    required = read_requirements().python
    facts = {"version": version, "executable": sys.executable, "wanted": required}
    if SpecifierSet(required).contains(version, prereleases=True):
        yield ok("Python", f"{version} ({sys.executable})", **facts)
    else:
        yield fail(
            "Python",
            f"{version} ({sys.executable}) is not {required}",
            f"create an environment with Python {required} and install fsdp-tui there",
            **facts,
        )


def check_packages(_: Patient) -> Iterator[Finding]:
    """Whether every package is there, in the range that was tested."""
    required = read_requirements()
    problems = [problem for text in required.needed if (problem := _judge(text, needed=True))]
    unfit = {problem.name for problem in problems}
    problems += [warn(*untested) for untested in find_untested() if untested[0] not in unfit]
    yield from problems
    if not problems:
        yield ok(
            "packages",
            f"all {len(required.needed)} are of versions that fsdp-tui was tested with",
            versions=_versions(required.needed),
        )


def check_extras(_: Patient) -> Iterator[Finding]:
    """List the optional packages that are installed."""
    required = read_requirements()
    there: list[str] = []
    missing: list[str] = []
    for extra in _FOR_TRAINING:
        texts = required.extras.get(extra, ())
        names = [_parse(text).name for text in texts]
        absent = [name for name in names if installed(name) is None]
        (missing if absent else there).append(f"{extra} ({', '.join(absent or names)})")
        for text in texts:
            if installed(_parse(text).name) and (problem := _judge(text, needed=False)):
                yield problem
    parts = [f"installed: {', '.join(there)}"] if there else []
    if missing:
        parts.append(f"not installed: {', '.join(missing)}; pip install '{_NAME}[EXTRA]' adds one")
    yield ok("extras", "; ".join(parts), versions=_versions(sum(required.extras.values(), ())))


def read_requirements() -> Requirements:
    """Read them from a checkout's pyproject.toml, else from the installed metadata.

    The metadata of a checkout may be older than the file.

    Raises:
        UserError: fsdp-tui is not installed.
    """
    project = _checkout(Path(jobs.__file__).resolve().parent.parent / "pyproject.toml")
    if project is not None:
        return project
    try:
        texts = metadata.requires(_NAME) or []
        python = str(metadata.metadata(_NAME).json.get("requires_python", ">=3.11"))
    except metadata.PackageNotFoundError:
        raise UserError(
            "fsdp-tui is not installed, so its requirements are unknown", "pip install fsdp-tui"
        ) from None
    extras = {
        name: tuple(text for text in texts if _applies(text, name) and not _applies(text, ""))
        for name in _FOR_TRAINING
    }
    return Requirements(python, tuple(text for text in texts if _applies(text, "")), extras)


def _checkout(path: Path) -> Requirements | None:
    try:
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        if project["name"] != _NAME:
            return None
        extras = project.get("optional-dependencies", {})
        return Requirements(
            python=project["requires-python"],
            needed=tuple(project["dependencies"]),
            extras={name: tuple(extras.get(name, ())) for name in _FOR_TRAINING},
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def check_compilers(_: Patient) -> Iterator[Finding]:
    """Whether kernels can be compiled while a job runs."""
    if lack := what_lacks(on_gpus=True):
        yield warn(
            "C compiler",
            f"torch_compile and optimizer: adamw_8bit compile kernels on GPUs, but {lack}",
            hint(on_gpus=True),
        )
    else:
        yield ok("C compiler", "kernels can be compiled: torch_compile, adamw_8bit")


def _judge(text: str, *, needed: bool) -> Finding | None:
    """Return what is wrong with an installed or missing package, if anything is."""
    requirement = _parse(text)
    version = installed(requirement.name)
    install = f"pip install '{requirement.name}{requirement.specifier}'"
    if version is None:
        return fail(requirement.name, "is not installed", install)
    if requirement.specifier.contains(version, prereleases=True):
        return None
    facts = {"version": version, "wanted": str(requirement.specifier)}
    lower = [bound for bound in requirement.specifier if not bound.operator.startswith("<")]
    if all(bound.contains(version, prereleases=True) for bound in lower):
        message = f"{version} is newer than fsdp-tui was tested with ({requirement.specifier})"
        return warn(requirement.name, message, install, **facts)
    message = f"{version} is too old ({requirement.specifier})"
    return (fail if needed else warn)(requirement.name, message, install, **facts)


def _parse(text: str) -> Requirement:
    from packaging.requirements import Requirement

    return Requirement(text)


def _applies(text: str, extra: str) -> bool:
    marker = _parse(text).marker
    return marker is None or marker.evaluate({"extra": extra})


def _versions(texts: Iterable[str]) -> dict[str, str | None]:
    return {(name := _parse(text).name): installed(name) for text in texts}
