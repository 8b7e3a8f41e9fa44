"""Record which library versions were tested, and what depends on them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Final

from jobs.errors import SpecError
from jobs.spec.rules.strategy import SHARDING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobs.spec.job_spec import RecipeKeys


@dataclass(frozen=True)
class Tested:
    """The versions of a library with which the complete test suite passes.

    Attributes:
        oldest: `(major, minor)`; the lower bound in pyproject.toml.
        newest: `(major, minor)`.
        needed_for: What may not work with other versions.
    """

    oldest: tuple[int, int]
    newest: tuple[int, int]
    needed_for: str


# As last verified by `tests/versions.sh`.
TESTED: Final = {
    "torch": Tested((2, 12), (2, 15), "sharding, packed bases, torch_compile and checkpoints"),
    "accelerate": Tested((1, 13), (1, 15), "launching ranks and trackers"),
    "diffusers": Tested((0, 42), (0, 42), "models, sampling and context parallelism"),
    "transformers": Tested((5, 1), (5, 24), "text encoders"),
    "peft": Tested((0, 19), (0, 21), "LoRA and LoKr"),
    "textual": Tested((8, 2), (8, 2), "the dashboard"),
}
_FOR_JOBS: Final = ("torch", "accelerate", "diffusers", "transformers", "peft")


def find_untested(names: tuple[str, ...] = tuple(TESTED)) -> Iterator[tuple[str, str, str]]:
    """Find installed libraries whose versions were not tested.

    Yields:
        Name, problem, and the command that installs a tested version.
    """
    for name in names:
        tested, version = TESTED[name], installed(name)
        release = _release(version)
        if release is None or tested.oldest <= release <= tested.newest:
            continue
        oldest, newest = _dotted(tested.oldest), _dotted(tested.newest)
        span = oldest if oldest == newest else f"{oldest} to {newest}"
        older = "older" if release < tested.oldest else "newer"
        after = _dotted((tested.newest[0], tested.newest[1] + 1))
        yield (
            name,
            f"{version} is {older} than fsdp-tui was tested with ({span}); "
            f"{tested.needed_for} may not work",
            f"pip install '{name}>={oldest},<{after}'",
        )


def check_versions(spec: RecipeKeys) -> list[str]:
    """Return warnings about untested versions of libraries that the job uses.

    Raises:
        SpecError: Torch cannot shard the job's packed base.
    """
    release = _release(installed("torch"))
    packed = spec.model_type == "lora" and spec.base_precision != "none"
    sharded = spec.strategy in (*SHARDING, "auto")
    if release is not None and release < TESTED["torch"].oldest and packed and sharded:
        raise SpecError(
            f"base_precision: torch {installed('torch')} cannot shard a packed base",
            f"pip install 'torch>={_dotted(TESTED['torch'].oldest)}', or strategy: ddp",
        )
    return [f"{name} {what}; {hint}" for name, what, hint in find_untested(_FOR_JOBS)]


def installed(name: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _release(version: str | None) -> tuple[int, int] | None:
    from packaging.version import InvalidVersion, Version

    try:
        release = Version(version or "").release
    except InvalidVersion:
        return None
    return release[0], release[1] if len(release) > 1 else 0


def _dotted(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))
