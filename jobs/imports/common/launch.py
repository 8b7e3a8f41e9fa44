"""How many processes on which GPUs: flags and files of `accelerate launch`, and FSDP's keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jobs.imports.common.draft import Draft, as_number, flatten
from jobs.imports.common.import_report import Kind
from jobs.imports.common.places import read_beside
from jobs.imports.common.table import shared_table
from jobs.spec.values.spellings import as_list, normal_key

if TYPE_CHECKING:
    from collections.abc import Collection


def gpus(draft: Draft, key: str, value: Any) -> None:
    """GPUs by number, before it is asked for a number of processes."""
    if str(value).strip().lower() == "all":
        draft.unneeded(key, "gpus: N uses any N free GPUs")
        return
    numbers = as_list(value) if isinstance(value, str) else value
    draft.take(key, "gpus", numbers if isinstance(numbers, list) else [numbers])


def processes(draft: Draft, key: str, value: Any) -> None:
    """Ranks; where GPUs are named, as many."""
    named_ones, number = draft.values.get("gpus"), as_number(value)
    if not named_ones:
        draft.take(key, "num_processes", value)
    elif number is not None and 1 <= number < len(named_ones):
        draft.take(key, "gpus", named_ones[: int(number)], "the first")
    else:
        draft.unneeded(key, "defaults to the number of gpus")


def read_flags(draft: Draft, prefix: str, flags: dict[str, Any]) -> None:
    """Read the flags in front of the script's name, and the config file that they may name."""
    rest = {key: value for key, value in flags.items() if key != "config_file"}
    _apply(draft, prefix, rest)
    if "config_file" in flags:
        read_file(draft, f"{prefix}config_file", str(flags["config_file"]), over=rest)


def read_file(draft: Draft, key: str, name: Any, over: Collection[str] = ()) -> None:
    """Read a file that `accelerate config` wrote.

    Args:
        draft: The job.
        key: What names it.
        name: Its path.
        over: Keys that are also flags, which win.
    """
    part = Draft({key: name}, draft.folder, above=draft)
    file = read_beside(part, key, name, dict, "set num_processes or gpus, and the fsdp_* keys")
    if file is None:
        return
    path, values = file
    part.record(Kind.TAKEN, key, why="its keys follow")
    # The levels of these files say nothing that the keys do not; DeepSpeed's are one.
    flat = flatten(values, keep=("deepspeed_config",))
    flat = {normal_key(name.rpartition(".")[2]): value for name, value in flat.items()}
    for name in over:
        if flat.pop(name, None) is not None:
            draft.unneeded(f"{path.name}: {name}", "the flag wins")
    _apply(draft, f"{path.name}: ", flat)


def read_environment(draft: Draft, variables: dict[str, str]) -> None:
    """Variables that are set in front of a command."""
    part = Draft(variables, draft.folder, above=draft)
    part.values = draft.values
    shared_table("environment").apply(part)


def _apply(draft: Draft, prefix: str, flags: dict[str, Any]) -> None:
    """Apply launch settings to a draft, reported under their own names."""
    part = Draft(flags, draft.folder, prefix=prefix, above=draft)
    part.values = draft.values
    shared_table("accelerate").apply(part)
