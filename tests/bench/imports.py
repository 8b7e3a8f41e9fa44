"""`python tests/bench/imports.py TOOL CHECKOUT [PATH …]`: imports against the tool's own values.

TOOL is ai-toolkit, simpletuner, diffusers-script, onetrainer, diffusion-pipe, kohya, musubi-tuner
or ltx-trainer, CHECKOUT its source. All configurations in it are read, and those among PATHs (files
or folders). What a configuration leaves out is looked up in that source, so that a new version of
the tool shows what has changed. Each key that decides what is trained is then one of:

    same     the job has the tool's value
    said     it has another one, and the report of the import names the key
    SILENT   it has another one, and nothing says so

Then the tool's defaults are written into the configuration. If that makes another job, or the
report names a default as not supported, and the first report does not, that is silent too: `left
out` in the table. Exits with 1 if anything is silent.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from jobs.errors import UserError  # noqa: E402
from jobs.imports.common.import_report import Kind  # noqa: E402
from jobs.spec.values.datasets import datasets_of  # noqa: E402
from jobs.spec.values.resolutions import all_resolutions  # noqa: E402
from tests.bench.import_sources import (  # noqa: E402
    ai_toolkit,
    diffusion_pipe,
    kohya,
    ltx_trainer,
    onetrainer,
    scripts,
    simpletuner,
)

if TYPE_CHECKING:
    from jobs.imports.imported import Imported
    from jobs.spec.job_spec import JobSpec
    from tests.bench.import_sources.real import Real

_ADAM: Final = ("adamw", "adamw_8bit", "adamw_schedule_free", "prodigy")
_VERDICTS: Final = ("same", "said", "SILENT")
_LEFT_OUT: Final = "left out"
# Methods that the report names as not supported; the job trains without them.
_OTHER_METHODS: Final = (
    *("controlnet", "control", "lora_type", "network.type", "distillation_method"),
)
# How a job is run, which changes nothing that is trained.
_NOT_TRAINED: Final = (
    *("name", "cache_text_embeddings", "unload_text_encoder", "num_processes", "fsdp_enable"),
    *(
        "fsdp_cpu_ram_efficient_loading",
        "export_formats",
        "ema_device",
        "tracker_project_name",
        "tracker_run_name",
    ),
)
# Keys of the report that mean another training than a job can be, and what it is then.
_OTHER_TRAININGS: Final = {
    "script": "another training script",
    "model_family": "another model family",
    **dict.fromkeys(("model.arch", "model_type", "model.type"), "another model family"),
    "type": "another kind of training",
    "training_strategy.video": "sound without video",
    "training_strategy.video.is_generated": "sound without video",
    "training_strategy.video.conditions": "other conditions than a first frame",
    "training_strategy.audio.is_generated": "videos of their sound",
}


def main() -> int:
    """Compare, and print a line for each difference and the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tool", choices=_TOOLS)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--only", action="store_true", help="the PATHs without the checkout's own")
    asked = parser.parse_intermixed_args()
    counts: Counter[tuple[str, str]] = Counter()
    reasons: Counter[str] = Counter()
    methods: Counter[str] = Counter()
    compared: set[str] = set()
    for real in _TOOLS[asked.tool](asked.checkout, asked.paths, not asked.only):
        if real.content in compared:
            reasons["the same as another"] += 1
            continue
        compared |= {real.content} - {""}
        try:
            imported = real.read()
        except UserError as error:
            print(f"{real.name}: refused: {error}")
            reasons[_reason_of(str(error))] += 1
            continue
        if reason := _other_training(imported):
            print(f"{real.name}: not trained here: {reason}")
            reasons[reason] += 1
            continue
        if not real.values and real.spelled_out is None:
            print(f"{real.name}: the tool itself refuses it")
            reasons["refused by the tool"] += 1
            continue
        reasons["compared"] += 1
        methods.update(_methods_of(imported))
        _compare(real, imported, counts)
    _print_tables(counts, reasons, methods)
    silent = sum(count for (_, verdict), count in counts.items() if verdict == "SILENT")
    print(f"\n{reasons['compared']} of {reasons.total()} compared; {silent} silent")
    return int(silent > 0)


def _compare(real: Real, imported: Imported, counts: Counter[tuple[str, str]]) -> None:
    for ours, (theirs, value) in real.values.items():
        verdict, mine = judge(imported, ours, theirs, value)
        counts[ours, verdict] += 1
        if verdict == "SILENT":
            print(f"{real.name}: {theirs} is {value!r}, and {ours} {mine!r}")
    if real.spelled_out is None:
        return
    silent = _left_out(imported, *real.spelled_out())
    counts[_LEFT_OUT, "SILENT" if silent else "same"] += max(1, len(silent))
    for line in silent:
        print(f"{real.name}: left out: {line}")


def _reason_of(error: str) -> str:
    for part, reason in (
        ("is not valid", "not valid YAML or JSON"),
        ("not a training config", "another kind of job"),
        ("is missing", "no training in it"),
    ):
        if part in error:
            return reason
    return "refused otherwise"


def _other_training(imported: Imported) -> str:
    """What the report says of another training than a job can be; empty if it is one."""
    lost = imported.report.of(Kind.UNSUPPORTED)
    return next(
        (f"{_OTHER_TRAININGS[e.key]}: {e.value}" for e in lost if e.key in _OTHER_TRAININGS), ""
    ).rstrip(": ")


def _methods_of(imported: Imported) -> list[str]:
    """What of a configuration's method the report names as not supported."""
    lost = imported.report.of(Kind.UNSUPPORTED)
    methods = [f"{e.key}: {e.value}" for e in lost if e.key in _OTHER_METHODS]
    return ["at least one of these", *methods] if methods else []


def _print_tables(
    counts: Counter[tuple[str, str]], reasons: Counter[str], methods: Counter[str]
) -> None:
    print(f"\n| key | {' | '.join(_VERDICTS)} |\n|---|{'---:|' * len(_VERDICTS)}")
    for ours in dict.fromkeys(key for key, _ in counts):
        row = " | ".join(str(counts[ours, verdict]) for verdict in _VERDICTS)
        print(f"| {ours if ours == _LEFT_OUT else f'`{ours}`'} | {row} |")
    print("\n| configurations | |\n|---|---:|")
    for reason, count in reasons.most_common():
        print(f"| {reason} | {count} |")
    if methods:
        print("\n| compared, and named as not supported | |\n|---|---:|")
        for method, count in methods.most_common():
            print(f"| {method} | {count} |")


def judge(imported: Imported, ours: str, theirs: str, value: Any) -> tuple[str, Any]:
    """same, said or SILENT; and what the job has."""
    spec, mine = imported.spec, _mine(imported.spec, ours)
    if _has_no_effect(spec, ours) or (ours == "seed" and value is None):
        return "same", mine
    if _plain(mine) == _plain(value):
        return "same", mine
    return ("said" if _is_named(imported, ours, theirs) else "SILENT"), mine


def _mine(spec: JobSpec, ours: str) -> Any:
    """The value of the job, in the tool's form."""
    if ours == "resolution":
        return list(all_resolutions(spec))
    if ours == "num_frames":
        return spec.num_frames or 1
    if ours == "first_frame":
        return [float(entry.first_frame) for entry in datasets_of(spec)]
    if ours == "repeats":
        return [entry.repeats for entry in datasets_of(spec)] if spec.datasets else [1]
    if ours == "lora_alpha":
        return spec.lora_alpha or spec.lora_rank
    return getattr(spec, ours)


def _has_no_effect(spec: JobSpec, ours: str) -> bool:
    """Whether a key decides nothing in this job, there and here."""
    return (
        ((ours.startswith("lora_") or ours == "base_precision") and spec.model_type != "lora")
        # Other optimizers have these otherwise.
        or (ours.startswith("adam_") and spec.optimizer not in _ADAM)
        or (ours == "weight_decay" and spec.optimizer == "adafactor")
        or (ours.startswith("validation_") and not spec.validation_prompts)
        or (ours == "lr_warmup_steps" and spec.lr_scheduler == "constant")
        or (ours == "ema_decay" and not spec.use_ema)
        or (ours == "fps" and (spec.num_frames or 1) == 1)
    )


def _is_named(imported: Imported, ours: str, theirs: str) -> bool:
    """Whether the report names a key as other than taken over."""
    report = imported.report
    entries = [*report.entries, *report.assumed]
    texts = [*report.warnings, *report.to_fill_in]
    last = theirs.rpartition(".")[2]
    return any(
        (entry.key == theirs or ours in entry.ours or entry.key.endswith(f"].{last}"))
        and entry.kind is not Kind.TAKEN
        for entry in entries
    ) or any(text.startswith((f"{ours}:", f"{theirs}:", f"{last}:")) for text in texts)


def _left_out(imported: Imported, full: Imported, added: list[str]) -> list[str]:
    """What becomes of the tool's defaults only if they are written out."""
    lines = []
    for ours in type(imported.spec).model_fields:
        mine, theirs = (_comparable(one.spec, ours) for one in (imported, full))
        warned = any(text.startswith(f"{ours}:") for text in imported.report.warnings)
        if mine != theirs and not warned and not _has_no_effect(imported.spec, ours):
            lines.append(f"{ours} is {mine!r}, and {theirs!r} with defaults written out")
    named = {entry.key for entry in [*imported.report.entries, *imported.report.assumed]}
    lines += [
        f"{entry.key}: {entry.value} is not supported"
        for entry in full.report.of(Kind.UNSUPPORTED)
        if entry.key in added and entry.key not in named
    ]
    return lines


def _comparable(spec: JobSpec, ours: str) -> Any:
    """A value by which two jobs are compared."""
    if ours in ("dataset", "datasets"):
        return datasets_of(spec) if spec.dataset or spec.datasets else None
    return None if ours in _NOT_TRAINED else _mine(spec, ours)


def _plain(value: Any) -> Any:
    """Numbers as numbers, switches as such, lists of one as what is in them."""
    if isinstance(value, (list, tuple)):
        entries = {_plain(one) for one in value}
        return entries.pop() if len(entries) == 1 else frozenset(entries)
    if str(value).lower() in ("true", "false"):
        value = str(value).lower() == "true"
    if value is None or isinstance(value, bool):
        return value or None
    with contextlib.suppress(TypeError, ValueError):
        return round(float(value), 12) or None
    sides = str(value).lower().split("x")
    return _plain(sides[0]) if len(sides) == 2 and sides[0] == sides[1] else "x".join(sides)


_TOOLS: Final[dict[str, Any]] = {
    "ai-toolkit": ai_toolkit.read_all,
    "simpletuner": simpletuner.read_all,
    "diffusers-script": scripts.read_all,
    "onetrainer": onetrainer.read_all,
    "diffusion-pipe": diffusion_pipe.read_all,
    "kohya": kohya.read_all,
    "musubi-tuner": kohya.read_all,
    "ltx-trainer": ltx_trainer.read_all,
}

if __name__ == "__main__":
    sys.exit(main())
