"""Random inputs for everything that reads what a person, a rank or a download has written.

An input is answered by a result or by a `UserError`, within 2 seconds of a processor and 200 MB.
"""

from __future__ import annotations

import json
import math
import os
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jobs.errors import UserError
from tests.campaign import targets
from tests.campaign.journal import dice

if TYPE_CHECKING:
    from tests.campaign.journal import Journal

SECONDS: Final = 2.0  # of a processor, for an input
BYTES: Final = 200 << 20  # of memory, for an input
BATCH: Final = 50  # inputs of one process
_HANGS_AFTER: Final = 20  # seconds of a processor, or the input is cut off
_SLEEPS_AFTER: Final = 600  # seconds of a clock; the machine may be busy
_EATS: Final = 1 << 30  # bytes of memory, or the input is cut off
_MOST: Final = 8 << 30  # bytes of addresses that an input may reserve
_LOOKS_EVERY: Final = 0.05  # seconds


def fuzz(journal: Journal, batch: int, size: int = BATCH) -> None:
    """One batch of inputs for one target, in a process of its own."""
    names = list(targets.TARGETS)
    name = names[batch % len(names)]
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        _work(name, journal.seed, batch, size, write)
    os.close(write)
    lines, cut_off = _listen(child, read)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    found = next((said for line in lines if (said := json.loads(line))), "")
    if len(lines) < size:
        ended = cut_off or f"the process ended with status {status}"
        found = found or f"input {len(lines)}: {ended}"
    journal.note(batch, name, found, count=len(lines))


def _listen(child: int, read: int) -> tuple[list[bytes], str]:
    """What the child says, and why it was cut off, if it was: a bomb must not end the machine."""
    said, cut_off, heard = b"", "", time.monotonic()
    most = _resident(child) + _EATS
    with open(read, "rb", buffering=0) as pipe:
        while True:
            if select.select([pipe], [], [], _LOOKS_EVERY)[0]:
                data = pipe.read(1 << 16)
                if not data:
                    return said.splitlines(), cut_off
                said, heard = said + data, time.monotonic()
                continue
            if _resident(child) > most:
                cut_off = f"more than {_EATS >> 20} MB"
            elif time.monotonic() - heard > _SLEEPS_AFTER:
                cut_off = f"no answer for {_SLEEPS_AFTER} s"
            if cut_off:
                os.kill(child, signal.SIGKILL)


def _resident(pid: int) -> int:
    """Bytes of memory that a process of ours has; 0 for one that has ended."""
    pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()


def _work(name: str, seed: int, batch: int, size: int, write: int) -> None:
    """In the child: a line for each input."""
    status = 1
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        addresses = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (addresses + _MOST, addresses + _MOST))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        rng = dice(f"fuzz-{name}", seed, batch)
        with (
            tempfile.TemporaryDirectory(prefix="campaign-") as folder,
            open(write, "w", encoding="utf-8") as lines,
        ):
            for number in range(size):
                place = Path(folder, str(number))
                place.mkdir()
                os.environ["XDG_CONFIG_HOME"] = os.environ["XDG_CACHE_HOME"] = str(place)
                found = _one(targets.TARGETS[name], rng, place)
                lines.write(json.dumps(found and f"input {number}: {found}") + "\n")
                lines.flush()
        status = 0
    except BaseException:
        traceback.print_exc()
    os._exit(status)


def _one(target: Any, rng: Any, place: Path) -> str:
    """Answer one input; what is wrong with the answer."""
    call = target(rng, place)
    limit = math.ceil(time.process_time()) + _HANGS_AFTER
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
    before, begun = _memory(reset=True), time.process_time()
    try:
        call()
    except UserError as error:
        if not str(error) or len(str(error)) > 5000:
            return f"an error of {len(str(error))} characters"
        if isinstance(error.__context__, MemoryError):
            return f"more than {_MOST >> 30} GB, asked for at once"
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-3:]
        places = " < ".join(f"{Path(w.filename).name}:{w.lineno}" for w in reversed(where))
        return f"{type(error).__name__}: {str(error)[:200]} at {places}"
    took, grown = time.process_time() - begun, _memory() - before
    if took > SECONDS:
        return f"{took:.1f} s of a processor"
    return f"{grown >> 20} MB" if grown > BYTES else ""


def _memory(*, reset: bool = False) -> int:
    """The most memory that was resident since it was last asked to begin again."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) << 10
    return 0


def prepare() -> None:
    """Import once what every batch needs; forked processes have it."""
    sys.setrecursionlimit(1000)
    targets.prepare()
