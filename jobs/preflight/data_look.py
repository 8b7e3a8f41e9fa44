"""Read a job's data in an engine process, before anything is queued."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.machine.engine_tools import Progress, ask
from jobs.preflight.dataset import check_dataset
from jobs.spec.file.load import dump_spec
from jobs.spec.rules.cascade import settle
from jobs.spec.values.datasets import with_folder_repeats

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs.spec.job_spec import JobSpec


@dataclass(frozen=True)
class DataLook:
    """What a look at a job's data found.

    Attributes:
        report: The fields of `engine.data.report.data_report.DataReport`, as JSON values.
        strips: For each bucket of the report a PNG: some of its samples in a row, cut as they are
            trained on. Empty when they were not asked for.
    """

    report: dict[str, Any]
    strips: tuple[bytes, ...] = ()


def look_at_data(
    spec: JobSpec,
    progress: Progress = lambda done, total: None,
    *,
    cancelled: Callable[[], bool] = lambda: False,
    sheet: Path | None = None,
    strips: bool = False,
) -> DataLook:
    """Read every sample of a job. Takes minutes for a large dataset that is not cached.

    Args:
        spec: The job.
        progress: Called with the samples read and the total.
        cancelled: Asked many times a second, in the thread of the caller.
        sheet: Where to write a contact sheet of all buckets, as PNG.
        strips: Whether to return some images of each bucket.

    Raises:
        UserError: There is nothing usable where the job says its data is.
        ToolError: Looking failed for another reason.
        Cancelled: `cancelled` said so.
    """
    spec, _ = with_folder_repeats(spec)
    check_dataset(spec)
    with tempfile.TemporaryDirectory(prefix="fsdp-tui-") as name:
        job, folder = Path(name, "job.yaml"), Path(name, "strips")
        job.write_text(dump_spec(settle(spec)), encoding="utf-8")
        arguments = [str(job)]
        arguments += ["--sheet", str(sheet)] if sheet else []
        arguments += ["--strips", str(folder)] if strips else []

        def on_line(line: str) -> None:
            match line.split():
                case ["looked", done, total] if done.isdigit() and total.isdigit():
                    progress(int(done), int(total))

        report = ask("engine.data", arguments, Path(name, "answer"), on_line, cancelled)
        names = report.pop("strips", [])
        return DataLook(report, tuple((folder / strip).read_bytes() for strip in names))
