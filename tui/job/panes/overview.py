"""The overview tab: how a job is, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from tui.job.panes.overview_rows import overview_rows
from tui.job.panes.text_pane import TextPane
from tui.keys.key_table import Key, bindings_of, scrolling
from tui.look.collector import where_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tui.look.job_look import Look
    from tui.text.format import Row


class OverviewPane(TextPane):
    """State, progress, trouble, memory, and where the files are."""

    KEYS: ClassVar = (
        *scrolling(),
        Key("copy_path", "y", "y", "copy path", "Copy the run directory's path"),
        Key("copy_all", "Y,shift+y", "Y", "copy all", "Copy the full overview as text"),
    )
    BINDINGS: ClassVar = bindings_of("overview", KEYS)

    def rows_of(self, look: Look, width: int) -> Sequence[Row]:
        return overview_rows(look, self._gpus(look), width)

    def _gpus(self, look: Look) -> str:
        job, present = look.job, self.app.dashboard.snapshot.gpus
        if job.wanted is None:
            return "the CPU"
        names = {gpu.name for gpu in present if gpu.uuid in job.gpus}
        kind = f" ({', '.join(sorted(names))})" if names else ""
        return f"GPUs {where_of(job, present)}{kind}"

    def action_copy_path(self) -> None:
        if self.look is not None:
            self.copy(str(self.look.job.run_dir.root))

    def action_copy_all(self) -> None:
        self.copy(self.as_text())
