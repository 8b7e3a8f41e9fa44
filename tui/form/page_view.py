"""One page of the form: its fields under headings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from textual.binding import Binding
from textual.containers import Container, Vertical, VerticalScroll
from textual.suggester import SuggestFromList
from textual.widgets import Input, Static

from jobs.backends.slurm.commands import in_words
from jobs.spec.families import FAMILIES
from jobs.spec.rules.cascade import FOLLOWING, follow_ranks
from tui.form import draft
from tui.form.beside import FitBars
from tui.form.fields import FieldRow
from tui.form.pages import PAGES, SHOWN

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from textual.app import ComposeResult

    from jobs.backends.slurm.commands import Partition
    from tui.form.pages import Page
    from tui.look.snapshot import Snapshot


class PageView(Container):
    """A page, created when it is first shown, since a hundred fields take time. `rows` by key.

    Args:
        page: The page.
        values: The values of its fields.
        snapshot: The machine's state.
        reasons: Why fields do not apply, by key.
    """

    def __init__(
        self,
        page: Page,
        values: Mapping[str, Any],
        snapshot: Snapshot,
        reasons: Mapping[str, str],
    ) -> None:
        super().__init__(id=f"page-{page.name}", classes="page")
        self.page = page
        self.rows = {
            name: FieldRow(
                name,
                values.get(name),
                snapshot,
                off=reasons.get(name, ""),
                detailed=name not in SHOWN,
            )
            for name in page.fields
            if name != "gpus" or snapshot.gpus
        }

    def compose(self) -> ComposeResult:
        for heading, names in self.page.groups.items():
            with Vertical(classes="group", id=f"group-{names[0]}") as group:
                group.border_title = heading
                yield from (self.rows[name] for name in names if name in self.rows)
                if "num_processes" in names:
                    yield Static("", id="cascade", markup=False)
                    yield FitBars()


# -- all pages ------------------------------------------------------------------------------
# The form's pages and their values, including pages not shown yet.


class Fields(VerticalScroll, can_focus=False):
    """Holds the values: those of `base`, overridden by the fields.

    Args:
        values: Of the job, by key.
        snapshot: The machine's state.
    """

    BINDINGS: ClassVar = [  # instead of scrolling by a line
        Binding("down", "app.focus_next", "next field", show=False, id="fields.down"),
        Binding("up", "app.focus_previous", "previous field", show=False, id="fields.up"),
    ]

    def __init__(self, values: Mapping[str, Any], snapshot: Snapshot) -> None:
        super().__init__(id="fields")
        self.base: dict[str, Any] = draft.complete(values)
        self.page = 0
        self._snapshot = snapshot
        self._defaults: dict[str, Any] = {}  # of the current model
        self._pages = {0: PageView(PAGES[0], self.base, snapshot, draft.in_force(self.base)[1])}
        self.rows = dict(self._pages[0].rows)  # the fields of the pages shown so far
        self._ranks = 1
        self._followed: dict[str, Any] = {}  # what the last change of ranks adjusted
        self._restored = False  # whether that was restored
        self._kept: dict[bool, dict[str, Any]] = {}  # values for one rank, and for several

    def compose(self) -> ComposeResult:
        yield self._pages[0]

    def begin(self) -> None:
        """Start with these values."""
        self._offer_flavours(self.base.get("model_flavour"))
        self._hint_at_model()
        self._defaults = draft.defaults_of(*self.model)
        self._ranks, self._kept, self._followed = draft.ranks_of(self.values), {}, {}

    # -- values ----------------------------------------------------------------------------

    def row(self, name: str) -> FieldRow | None:
        """Return a field if its page was shown."""
        return self.rows.get(name)

    @property
    def values(self) -> dict[str, Any]:
        """The values of all fields, by key."""
        return draft.merge(self.base, {name: row.value for name, row in self.rows.items()})

    @property
    def swept(self) -> dict[str, list[Any]]:
        """Return the fields that are lists of several values, by key."""
        return {
            name: row.values
            for name, row in self.rows.items()
            if row.listed and not row.control.disabled and len(row.values) > 1
        }

    @property
    def model(self) -> tuple[Any, Any]:
        """The family and flavor."""
        values = self.values
        return values.get("model_family"), values.get("model_flavour")

    def put(self, changes: Mapping[str, Any]) -> None:
        """Set some fields."""
        self.base |= changes
        for key, value in changes.items():
            if row := self.row(key):
                row.put(value)

    def fill(self, values: Mapping[str, Any]) -> None:
        """Replace all values; none of them is adjusted to the family or the ranks."""
        self.base = draft.complete(values)
        for name, row in self.rows.items():
            if name != "model_flavour":
                row.put(self.base.get(name))
        self.begin()

    def adopt(self, field: str) -> None:
        """Handle another family or flavor: fields with default values take the new defaults."""
        if field == "model_family":
            self._offer_flavours(self.model[1])
        self._hint_at_model()
        after = draft.defaults_of(*self.model)
        changes = draft.adopt(self.base | self.values, self._defaults, after)
        self._defaults = after
        self.put(changes)

    def follow(self) -> str:
        """Adjust the fields that depend on the number of ranks, or restore them.

        Returns:
            A sentence about what was adjusted and still applies.
        """
        values = self.values
        before, after = self._ranks, draft.ranks_of(values)
        self._ranks = after
        if (before > 1) != (after > 1):
            kept = self._kept.get(after > 1)
            self._followed = follow_ranks(values, before, after, kept)
            self._restored = kept is not None
            self._kept[before > 1] = {key: values.get(key) for key in FOLLOWING}
            self.put(self._followed)
            values = self.values
        still = {key: value for key, value in self._followed.items() if values.get(key) == value}
        return draft.followed(after, still, restored=self._restored)

    def offer_partitions(self, partitions: Sequence[Partition]) -> None:
        """List the partitions below the field, and suggest those that match the input."""
        row = self.row("slurm_partition")
        if row is None or not partitions or not isinstance(row.control, Input):
            return
        row.note(in_words(partitions))
        if row.control.suggester is None:
            names = [partition.name for partition in partitions]
            row.control.suggester = SuggestFromList(names, case_sensitive=True)

    def _offer_flavours(self, chosen: str | None) -> None:
        if row := self.row("model_flavour"):
            row.offer(draft.flavours_of(self.model[0]), chosen)

    def _hint_at_model(self) -> None:
        for name, hint in _hints(*self.model).items():
            row = self.row(name)
            if row and isinstance(row.control, Input):
                row.control.placeholder = hint

    # -- pages -----------------------------------------------------------------------------

    async def turn_to(self, number: int, reasons: Mapping[str, str]) -> None:
        """Show a page.

        Args:
            number: The page.
            reasons: Why fields do not apply, by key.
        """
        if number not in self._pages:
            view = PageView(PAGES[number], self.base | self.values, self._snapshot, reasons)
            await self.mount(view)
            self._pages[number] = view
            self.rows |= view.rows
        self.page = number
        for page, view in self._pages.items():
            if view.display != (page == number):
                view.display = page == number
        self.scroll_home(animate=False)

    def focus_first(self) -> None:
        """Focus the page's first field that applies; none of a page on which none does."""
        rows = self._pages[self.page].rows.values()
        first = next((row for row in rows if row.display and not row.control.disabled), None)
        self.screen.set_focus(None if first is None else first.control)


def _hints(name: Any, flavour: Any) -> dict[str, str]:
    """Return the placeholders that name what this model is and is trained on, by key."""
    family = FAMILIES.get(str(name))
    if family is None:
        return {}
    shown = family.flavours.get(str(flavour)) or next(iter(family.flavours.values()))
    takes = family.references_of(flavour)
    entry = "several: folder x2, other folder"
    if takes is not None and takes.layers:
        entry = "{path: folder, layer_suffix: [_1, _2]}"
    elif takes is not None:
        entry = "{path: folder, conditioning_path: other folder}"
    elif family.takes_keyframes(flavour):
        entry = "{path: folder, first_frame: true, last_frame: true}"
    elif family.takes_first_frame(flavour) and not family.needs_first_frame(flavour):
        entry = "{path: folder, first_frame: true}"
    sample = "cat.mp4" if family.frame_step else "cat.png"
    return {
        "pretrained_model_name_or_path": f"folder, or {shown.hub_id}",
        "dataset": f"folder with {sample}, cat.txt …",
        "datasets": f"or {entry}",
    }
