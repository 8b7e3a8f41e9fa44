"""Places where jobs run, by the value of a job's `launcher` key."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

from jobs.errors import UserError

if TYPE_CHECKING:
    from typing import Any, NoReturn

    from jobs.backends.port import Backend
    from jobs.queue.store import Job, Store
    from jobs.run.rundir import RunDir
    from jobs.spec.job_spec import JobSpec

__all__ = ["backend", "names"]


class UnknownBackend:
    """A backend of a newer version, or one that was removed.

    Its jobs are displayed and can be removed from the queue; nothing else works.
    """

    lock = log = hold_hint = ""

    def __init__(self, name: str) -> None:
        self.name = self.title = name

    def _refuse(self) -> NoReturn:
        text = f"this version of fsdp-tui has no launcher {self.name!r}"
        raise UserError(text, "use the version that submitted the job")

    def request(self, spec: JobSpec) -> NoReturn:
        self._refuse()

    def warnings(self, spec: JobSpec) -> list[str]:
        return []

    def keeper(self, store: Store) -> NoReturn:
        self._refuse()

    def holds(self, job: Job) -> str:
        return ""

    def stop(self, store: Store, job: Job, *, now: bool) -> NoReturn:
        self._refuse()

    def facts(self, store: Store, job: Job) -> dict[str, Any]:
        return {}

    def restore(self, run_dir: RunDir) -> dict[str, object]:
        return {}

    def by_hand(self, spec: JobSpec) -> NoReturn:
        self._refuse()


def names() -> tuple[str, ...]:
    """Return the names of all backends; each is a package in this folder."""
    return tuple(module.name for module in iter_modules(__path__) if module.ispkg)


@cache
def backend(name: str) -> Backend:
    """Import a backend by its name, leaving the others unimported."""
    if name not in names():
        return UnknownBackend(name)
    made: Backend = import_module(f"{__name__}.{name}.backend").BACKEND
    return made
