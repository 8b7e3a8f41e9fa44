"""What the form looks up in threads: its paths, the cluster's partitions, the launch command."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from textual.message import Message
from textual.worker import get_current_worker

from jobs.backends.slurm.partitions import ask_partitions
from jobs.errors import UserError
from jobs.hub.wanted import ask_sizes, find_missing
from jobs.machine.engine_tools import Cancelled
from jobs.service.replay import command_of, launch_facts, script_of
from tui.form.fields import draft
from tui.form.fields.pages import PATHS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from textual.screen import Screen

    from jobs.backends.slurm.partitions import Partition
    from jobs.spec.values.hub_names import HubName


class Looks:
    """Starts lookups for a screen and posts their results to it; only the newest of each counts.

    Args:
        screen: The form.
        on_gpus: Whether the machine has GPUs.
    """

    @dataclass
    class Checked(Message):
        """A thread checked a path."""

        field: str
        good: bool
        text: str
        doubt: str = ""  # what to ask about before the job is queued

    @dataclass
    class Launch(Message):
        """A thread made the launch command: what is seen, and what is copied."""

        command: str
        script: str

    @dataclass
    class Absent(Message):
        """A thread asked the hub for what is not on this machine."""

        values: dict[str, Any]
        sizes: dict[HubName, int]  # bytes to fetch
        problem: str = ""

    @dataclass
    class Partitions(Message):
        """A thread asked Slurm."""

        partitions: tuple[Partition, ...]

    def __init__(self, screen: Screen[Any], *, on_gpus: bool) -> None:
        self._screen = screen
        self._on_gpus = on_gpus
        self._checked: dict[str, tuple[Any, ...]] = {}
        self._launched: dict[str, Any] = {}
        self.bad_paths: dict[str, str] = {}  # what is wrong, by field
        self.doubts: dict[str, str] = {}  # what may be wrong
        self.under_way: set[str] = set()  # fields of which nothing is known yet
        self.partitions: tuple[Partition, ...] = ()  # of the cluster, if Slurm has said which
        self._asked_slurm = False

    def at_paths(self, values: Mapping[str, Any]) -> None:
        """See whether the model and the dataset are there, unless that was just done."""
        for name in PATHS:
            key = _key(name, values)
            if self._checked.get(name) != key:
                self._checked[name] = key
                self.bad_paths.pop(name, None)
                self.doubts.pop(name, None)
                self.under_way.add(name)
                self._run(partial(self._look_at_path, name, dict(values)), f"path-{name}")

    def at_launch(self, values: Mapping[str, Any]) -> None:
        """Make the launch command, unless it is that of these values already."""
        if values != self._launched:
            self._launched = dict(values)
            self._run(partial(self._make_launch, dict(values)), "launch")

    def at_partitions(self, values: Mapping[str, Any]) -> None:
        """Ask Slurm for its partitions, once, if the job is for Slurm."""
        if values.get("launcher") == "slurm" and not self._asked_slurm:
            self._asked_slurm = True
            self._run(partial(self._ask_slurm), "partitions")

    def at_hub(self, values: Mapping[str, Any]) -> None:
        """Ask the hub how large what these values name is."""
        self._run(partial(self._ask_hub, dict(values)), "hub")

    def take(self, checked: Checked) -> None:
        """Take note of what is wrong with a path, or may be."""
        self.under_way.discard(checked.field)
        if not checked.good:
            self.bad_paths[checked.field] = checked.text
        if checked.doubt:
            self.doubts[checked.field] = checked.doubt

    def _run(self, look: partial[None], group: str) -> None:
        self._screen.run_worker(look, group=group, exclusive=True, exit_on_error=False, thread=True)

    def _look_at_path(self, name: str, values: dict[str, Any]) -> None:
        good, text = draft.check_path(name, values)
        doubt = draft.doubt_of(name, values) if good else ""
        if self._checked.get(name) == _key(name, values):
            self._screen.post_message(self.Checked(name, good, text, doubt))

    def _ask_slurm(self) -> None:
        self._screen.post_message(self.Partitions(ask_partitions()))

    def _ask_hub(self, values: dict[str, Any]) -> None:
        worker, sizes, problem = get_current_worker(), {}, ""
        try:
            missing = find_missing(draft.spec_of(values))
            sizes = ask_sizes(missing, lambda: worker.is_cancelled)
        except Cancelled:
            return
        except UserError as error:
            problem = str(error)
        self._screen.post_message(self.Absent(values, sizes, problem))

    def _make_launch(self, values: dict[str, Any]) -> None:
        try:
            spec = draft.spec_of(values)
            on_gpus = spec.device != "cpu" and (self._on_gpus or spec.gpus is not None)
            facts = launch_facts(spec, on_gpus=on_gpus)
            texts = command_of(facts), script_of(facts, f"Job “{spec.name}”")
        except UserError as error:
            texts = f"not yet: {error}", ""
        if values == self._launched:
            self._screen.post_message(self.Launch(*texts))


def _key(name: str, values: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the values that determine the result of a lookup."""
    return tuple(values.get(key) for key in (name, "model_family", *draft.OF_IMAGES))
