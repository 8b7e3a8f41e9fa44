"""Check the block classes that a job names against its model, before any rank starts."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from jobs.errors import SpecError
from jobs.machine.engine_tools import Cancelled, ToolError, ask
from jobs.models.blocks.detection import detect_blocks
from jobs.spec.families import get_family
from jobs.spec.rules.strategy import depends_on_memory, may_import, own_policy, shards
from jobs.spec.values.spellings import nearest

if TYPE_CHECKING:
    from jobs.models.blocks.detection import Detection
    from jobs.spec.job_spec import RecipeKeys

_MOST_NAMED = 6  # classes in an error


def check_block_names(spec: RecipeKeys) -> None:
    """Check `fsdp_transformer_layer_cls_to_wrap`, if it says something else than the family.

    A model that is not cached takes some seconds, others none.

    Raises:
        SpecError: The model has no such class, or one cannot be wrapped; names the nearest.
    """
    names = spec.fsdp_transformer_layer_cls_to_wrap or []
    if set(names) <= set(get_family(spec.model_family).blocks):
        return
    if spec.fsdp_auto_wrap_policy != "TRANSFORMER_BASED_WRAP" or not (
        shards(spec) or depends_on_memory(spec)
    ):
        return
    try:
        detection = detect_blocks(
            model_family=spec.model_family,
            model_flavour=spec.model_flavour,
            pretrained_model=spec.pretrained_model_name_or_path,
        )
    except ToolError:  # the ranks check it as well
        return
    check_names(names, detection)


def check_names(names: list[str], detection: Detection) -> None:
    """Check that each of these classes is in the model and can be a unit of its own.

    Raises:
        SpecError: As `check_block_names`.
    """
    present = {part.class_name for part in detection.parts.parts[:-1]}  # the root is the last
    for name in names:
        if name in present and name not in detection.parts.containers:
            continue
        spelled = {block.class_name.lower(): block.class_name for block in detection.classes}
        best = nearest(name, spelled)
        meant = f' (did you mean "{spelled[best]}"?)' if best else ""
        why = "has no forward and cannot be wrapped" if name in present else "is not in the model"
        likely = ", ".join([block.class_name for block in detection.classes][:_MOST_NAMED])
        raise SpecError(
            f'fsdp_transformer_layer_cls_to_wrap: "{name}" {why}{meant}',
            f"{detection.model_class} has {likely}; `fsdp-tui detect` shows them",
        )


KEY: Final = "fsdp_auto_wrap_policy"
LONGEST: Final = 60.0  # seconds for the import; torch alone may take ten from a cold disk


def check_wrap_policy(spec: RecipeKeys, *, longest: float = LONGEST) -> None:
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
