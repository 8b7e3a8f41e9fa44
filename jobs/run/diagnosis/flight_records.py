"""Which collective ranks wait in, and which rank is late for it, from torch's flight recorders.

Torch keeps the newest collectives of each process group in memory. Its watchdog writes them to a
file, by `pickle`, when one of NCCL's times out; a rank of ours writes them as JSON when it is asked
to (`engine.ranks.flight_dump`), which works while it waits.
"""

from __future__ import annotations

import io
import json
import pickle
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from jobs.run.diagnosis.nccl import plain_name
from jobs.untrusted.files import read_regular
from jobs.untrusted.pickles import check_pickle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from jobs.run.rundir import RunDir

    Entries = dict[int, dict[str, Any]]  # sequence number → what was recorded

_COLLECTIVES: Final = 2000  # that a rank remembers, torch's own default for NCCL
_LARGEST: Final = 64 << 20  # bytes of a file


@dataclass(frozen=True)
class Wait:
    """A collective that not all ranks have reached.

    Attributes:
        collective: Such as all_reduce.
        late: The ranks that have not reached it; empty if all have, and it does not end.
        waiting: The ranks that wait in it.
    """

    collective: str
    late: tuple[int, ...]
    waiting: tuple[int, ...]

    def __str__(self) -> str:
        """In words that can follow a semicolon."""
        if not self.late:
            return f"all ranks are in the same {self.collective}, which never finishes"
        many = len(self.waiting) > 1
        return (
            f"{_ranks(self.late)} never reached the {self.collective} that "
            f"{_ranks(self.waiting)} {'wait' if many else 'waits'} in"
        )


def environment(run_dir: RunDir) -> dict[str, str]:
    """Variables that have torch remember collectives, and write them into the run directory."""
    return {
        "TORCH_FR_BUFFER_SIZE": str(_COLLECTIVES),
        "TORCH_FR_DUMP_TEMP_FILE": str(run_dir.flight_prefix),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "true",
    }


def tell_hang(run_dir: RunDir, reason: str, say: Callable[[str], None]) -> str:
    """Say why a job hangs: what was seen, and what its ranks waited for, if their records tell."""
    try:
        wait = find_wait(run_dir)
    except Exception as error:  # whatever another torch wrote, the ranks have to go
        say(f"cannot read the flight records: {type(error).__name__}: {error}")
        return reason
    if not wait:
        return reason
    say(f"hang: {wait}")
    return f"{reason}; {wait}"


def find_wait(run_dir: RunDir) -> Wait | None:
    """Find the earliest collective that blocks the ranks; None if it is unknown."""
    recorded: dict[tuple[int, str], dict[int, Entries]] = {}
    for path in sorted(run_dir.logs.glob(f"{run_dir.flight_prefix.name}*")):
        number = path.name.removeprefix(run_dir.flight_prefix.name).removesuffix(".json")
        if not number.isdigit():
            continue
        with suppress(
            LookupError, TypeError, ValueError, AttributeError
        ):  # a file of another torch
            for place, dump in enumerate(_read(path)):
                for group, entries in _by_group(dump).items():
                    recorded.setdefault((place, group), {})[int(number)] = entries
    waits = [wait for ranks in recorded.values() if (wait := _wait_of(ranks)) is not None]
    return min(waits, key=lambda wait: wait[0])[1] if waits else None


def _read(path: Path) -> list[dict[str, Any]]:
    """Read the recorders in a file: JSON has one for each kind of group, a pickle is one."""
    try:
        data = read_regular(path, _LARGEST)
        if path.suffix == ".json":
            return list(json.loads(data))
        check_pickle(data)
        return [_Plain(io.BytesIO(data)).load()]
    except Exception:  # a torn or foreign file says nothing, whatever is wrong with it
        return []


class _Plain(pickle.Unpickler):
    """Reads numbers, texts, lists and dicts; refuses whatever would run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} in a flight record")


def _by_group(dump: dict[str, Any]) -> dict[str, Entries]:
    """Return the collectives of each process group of a rank, without point-to-point calls."""
    names = (str(config.get("name", "")) for config in dump.get("pg_config", {}).values())
    groups: dict[str, Entries] = {name: {} for name in names if name}
    for entry in dump.get("entries", []):
        if not entry["is_p2p"]:
            group = str(entry["process_group"][0])
            groups.setdefault(group, {})[int(entry["collective_seq_id"])] = entry
    return groups


def _wait_of(ranks: dict[int, Entries]) -> tuple[int, Wait] | None:
    """When ranks of a group began to wait for others, and in what."""
    last = {rank: max(entries, default=0) for rank, entries in ranks.items()}
    least, most = min(last.values()), max(last.values())
    if least == most:
        return _stuck(ranks)
    number = least + 1
    waiting = [rank for rank in ranks if last[rank] >= number]
    seen = [ranks[rank][number] for rank in waiting if number in ranks[rank]]
    if not seen:  # so long ago that it is forgotten
        return None
    late = tuple(rank for rank in ranks if last[rank] == least)
    wait = Wait(plain_name(seen[0]["profiling_name"]), late, tuple(waiting))
    return _begun(seen), wait


def _stuck(ranks: dict[int, Entries]) -> tuple[int, Wait] | None:
    """Return the first collective that all have reached and none has completed; only NCCL tells."""
    open_ones = [
        {
            number: entry
            for number, entry in entries.items()
            if entry["state"] != "completed" and str(entry["profiling_name"]).startswith("nccl:")
        }
        for entries in ranks.values()
    ]
    if not all(open_ones):
        return None
    first = [entries[min(entries)] for entries in open_ones]
    name = plain_name(first[0]["profiling_name"])
    return _begun(first), Wait(name, (), tuple(ranks))


def _begun(entries: Iterable[dict[str, Any]]) -> int:
    return min(int(entry["time_created_ns"]) for entry in entries)


def _ranks(numbers: tuple[int, ...]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
