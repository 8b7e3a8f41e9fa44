"""Check a wrap policy of the person's own before a job is queued, in a process of its own."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from jobs.errors import SpecError
from jobs.machine.engine_tools import Cancelled, ToolError, ask
from jobs.spec.rules.strategy import depends_on_memory, may_import, own_policy, shards

if TYPE_CHECKING:
    from jobs.spec.job_spec import JobSpec

KEY: Final = "fsdp_auto_wrap_policy"
LONGEST: Final = 60.0  # seconds for the import; torch alone may take ten from a cold disk


def check_wrap_policy(spec: JobSpec, *, longest: float = LONGEST) -> None:
    """Import the job's own wrap policy, if it has one that may be, as its ranks will.

    Another is imported by the ranks alone, see `may_import`.

    Raises:
        SpecError: It cannot be imported or called, or importing it does not end.
    """
    path, deadline = own_policy(spec), time.monotonic() + longest
    if path is None or not may_import(path) or not (shards(spec) or depends_on_memory(spec)):
        return
    with tempfile.TemporaryDirectory(prefix="fsdp-tui-") as name:
        try:
            ask(
                "engine.parallel.wrap_policy",
                [path],
                Path(name, "answer"),
                lambda line: None,
                lambda: time.monotonic() > deadline,
            )
        except Cancelled:
            raise SpecError(f"{KEY}: importing {path} did not finish in {longest:.0f} s") from None
        except ToolError as error:
            raise SpecError(f"{KEY}: importing {path} failed ({error})") from None
