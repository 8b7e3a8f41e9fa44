"""Check Python, the packages that fsdp-tui needs, and torch's build."""

from __future__ import annotations

import sys
import tomllib
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import jobs
from jobs.doctor.examine import Finding, fail, ok, warn
from jobs.doctor.processes import run_helper
from jobs.errors import UserError
from jobs.preflight.check_job import hint, what_lacks
from jobs.preflight.versions import find_untested, installed
from jobs.units import gpus

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from packaging.requirements import Requirement

    from jobs.doctor.examine import Patient
    from jobs.doctor.nvml import Nvml


# -- packages -------------------------------------------------------------------------------
# Python, required packages and optional ones.


_NAME: Final = "fsdp-tui"
# extras for users; the others are for developers
_FOR_TRAINING: Final = ("optimizers", "datasets", "video")


@dataclass(frozen=True)
class Requirements:
    """The requirements of fsdp-tui, as written in pyproject.toml."""

    python: str
    needed: tuple[str, ...]
    extras: dict[str, tuple[str, ...]]


def check_python(_: Patient) -> Iterator[Finding]:
    """Check that fsdp-tui supports this interpreter."""
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
    """Check that every package is installed in a tested version."""
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
    """Read the requirements from a checkout's pyproject.toml, or else from installed metadata.

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
    """Check that kernels can be compiled while a job runs."""
    if lack := what_lacks(on_gpus=True):
        yield warn(
            "C compiler",
            f"torch_compile and optimizer: adamw_8bit compile kernels on GPUs, but {lack}",
            hint(on_gpus=True),
        )
    else:
        yield ok("C compiler", "kernels can be compiled: torch_compile, adamw_8bit")


def _judge(text: str, *, needed: bool) -> Finding | None:
    """Return the problem of an installed or missing package; None if there is none."""
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


# -- torch build ----------------------------------------------------------------------------
# The platform torch was built for, and whether the driver supports it.


# for imports from a cold or remote disk, and a driver that initializes many GPUs
SECONDS: Final = 90.0
_SLOW_IMPORT: Final = 20.0  # seconds
_INSTALL: Final = "see https://pytorch.org/get-started/locally"
_CUDA_ERRORS: Final = (  # part of CUDA's message, in lower case → advice
    ("not yet initialized", "start the fabric manager: sudo systemctl start nvidia-fabricmanager"),
    ("driver version is insufficient", "update the NVIDIA driver"),
    ("found no nvidia driver", "install the NVIDIA driver, or start the container with --gpus all"),
    ("out of memory", "another process fills the GPU: see `fsdp-tui gpus`"),
)


@dataclass(frozen=True)
class TorchFacts:
    """The output of `python -m engine.doctor`.

    Attributes:
        version: torch's version.
        cuda: CUDA version it was built for; None for a build without CUDA.
        hip: ROCm version it was built for; None for a build without ROCm.
        nccl: Version of the loaded NCCL library.
        gloo: Whether gloo is available, which CPU ranks need.
        architectures: What its kernels are compiled for: sm_90, compute_90, …
        seconds: Duration of its import.
        error: Why it cannot use the GPUs.
        devices: The GPUs it sees; None if it failed before listing them.
        apart: Pairs of device indices of which the first cannot access the second's memory
            directly.
    """

    version: str
    cuda: str | None = None
    hip: str | None = None
    nccl: tuple[int, ...] | None = None
    gloo: bool = True
    architectures: tuple[str, ...] = ()
    seconds: float = 0.0
    error: str | None = None
    devices: tuple[dict[str, Any], ...] | None = None
    apart: tuple[tuple[int, int], ...] = field(default=())


def ask_torch(patient: Patient) -> Iterator[Finding]:
    """Query torch in a helper process; yield a finding only if that fails."""
    answer = run_helper("engine.doctor", run_id=patient.run_id, seconds=SECONDS)
    facts = answer.facts
    if "torch" in facts:
        patient.torch = TorchFacts(
            version=facts["torch"],
            cuda=facts["cuda"],
            hip=facts["hip"],
            nccl=tuple(facts["nccl"]) if facts["nccl"] else None,
            gloo=facts["gloo"],
            architectures=tuple(facts["architectures"]),
            seconds=facts["seconds"],
            error=facts.get("cuda_error"),
            devices=tuple(facts["devices"]) if "devices" in facts else None,
            apart=tuple((first, other) for first, other in facts.get("apart", ())),
        )
    if answer.status is None:
        where = "while looking for GPUs" if "torch" in facts else "during import"
        yield fail(
            "torch",
            f"hung {where}, for {SECONDS:g} s",
            "check `dmesg` for driver (Xid) or disk errors",
        )
    elif answer.status != 0 and "torch" in facts:
        yield fail(
            "torch",
            f"died while looking for GPUs: {answer.last_line or answer.status}",
            "check `dmesg` for driver (Xid) errors",
        )
    elif answer.status != 0:
        yield fail(
            "torch",
            f"cannot be imported: {answer.last_line or answer.status}",
            f"reinstall it in this environment; {_INSTALL}",
        )


def check_torch(patient: Patient) -> Iterator[Finding]:
    """Check that torch, the driver and the GPUs work together."""
    if patient.torch is not None:
        yield from judge_torch(patient.torch, patient.nvml)


def judge_torch(torch: TorchFacts, nvml: Nvml | None) -> Iterator[Finding]:
    """Judge torch's build and the driver. Pure."""
    present = nvml.counted if nvml is not None else 0
    facts = {"version": torch.version, "cuda": torch.cuda, "seconds": torch.seconds}
    build = f"built for CUDA {torch.cuda}" if torch.cuda else "a CPU-only build"
    if torch.hip:
        yield warn(
            "torch",
            f"{torch.version} is built for AMD GPUs (ROCm {torch.hip})",
            f"fsdp-tui is for NVIDIA GPUs; {_INSTALL}",
            **facts,
        )
        return
    if torch.cuda is None and present:
        yield fail(
            "torch",
            f"{torch.version} is {build}, but this machine has {gpus(present)}",
            f"install a CUDA build of torch; {_INSTALL}",
            **facts,
        )
        return
    yield ok("torch", f"{torch.version}, {build}", **facts)
    if torch.seconds > _SLOW_IMPORT:
        yield warn(
            "torch import",
            f"took {torch.seconds:.0f} s, and every rank imports it",
            "keep the Python environment on a local disk",
        )
    if torch.cuda is not None:
        yield from _judge_cuda(torch, torch.cuda, nvml, present)


def _judge_cuda(
    torch: TorchFacts, built_for: str, nvml: Nvml | None, present: int
) -> Iterator[Finding]:
    driver, knows = (nvml.driver, nvml.cuda) if nvml is not None else (None, None)
    facts = {"driver": driver, "driver_cuda": knows and ".".join(map(str, knows))}
    if knows and knows[0] < int(built_for.split(".")[0]):
        yield fail(
            "driver",
            f"{driver} supports CUDA up to {knows[0]}.{knows[1]}, but torch is built for "
            f"{built_for}",
            f"update the driver, or install torch for CUDA {knows[0]}; {_INSTALL}",
            **facts,
        )
    elif present and torch.error:
        error = torch.error.lower()
        advice = next(
            (what for words, what in _CUDA_ERRORS if words in error),
            "see `nvidia-smi` and `dmesg`; a reboot often fixes it",
        )
        yield fail("driver", f"torch cannot use the GPUs: {torch.error}", advice, **facts)
    elif driver is not None and knows:
        yield ok("driver", f"{driver}, for CUDA up to {knows[0]}.{knows[1]}", **facts)
    shown = len(nvml.gpus) if nvml is not None else 0
    if torch.devices is not None and len(torch.devices) < shown:
        yield fail(
            "CUDA",
            f"torch sees {len(torch.devices)} of {gpus(shown)}",
            "see `nvidia-smi`; a GPU that is lost or in MIG mode cannot be used",
        )
    for index, device in enumerate(torch.devices or ()):
        if not _runs_on(torch.architectures, tuple(device["capability"])):
            major, minor = device["capability"]
            yield fail(
                "kernels",
                f"this torch has none for {device['name']} (device {index}, sm_{major}{minor})",
                f"install a torch build with them; {_INSTALL}",
            )


def _runs_on(architectures: tuple[str, ...], capability: tuple[int, ...]) -> bool:
    """Return whether there is machine code for a GPU, or PTX that its driver can compile."""
    if not architectures:
        return True  # unknown
    for name in architectures:
        kind, _, digits = name.partition("_")
        digits = digits.rstrip("af")
        if not digits.isdigit():
            return True
        made = (int(digits[:-1]), int(digits[-1]))
        if kind == "compute" and made <= capability:
            return True
        if kind == "sm" and made[0] == capability[0] and made <= capability:
            return True
    return False


def check_backends(patient: Patient) -> Iterator[Finding]:
    """Check the libraries through which ranks exchange data."""
    torch = patient.torch
    if torch is None:
        return
    if not torch.gloo:
        yield fail(
            "gloo",
            "this torch was built without it, and ranks need it",
            f"install a standard torch build; {_INSTALL}",
        )
    if torch.nccl is None:
        if torch.cuda is not None:
            yield fail(
                "NCCL",
                "this torch was built without it, and ranks on GPUs need it",
                f"install a standard torch build; {_INSTALL}",
            )
        elif torch.gloo:
            yield ok("NCCL", "none, which CPU ranks do not need: they use gloo")
        return
    loaded = ".".join(map(str, torch.nccl))
    wheel = _wheel_of_nccl(torch.cuda or "")
    if wheel is not None and wheel.split(".")[:3] != list(map(str, torch.nccl[:3])):
        yield warn(
            "NCCL",
            f"{loaded} is loaded, but torch came with {wheel}",
            "another libnccl.so.2 comes first: check LD_LIBRARY_PATH and LD_PRELOAD",
            loaded=loaded,
            installed=wheel,
        )
    else:
        yield ok("NCCL", loaded, loaded=loaded, installed=wheel)


def _wheel_of_nccl(cuda: str) -> str | None:
    try:
        return metadata.version(f"nvidia-nccl-cu{cuda.split('.')[0]}")
    except metadata.PackageNotFoundError:
        return None
