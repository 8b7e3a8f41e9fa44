"""A job that is being built from another tool's configuration, key by key.

A tool is a table of rules, one for each of its keys. A rule converts its key in one place: the
report is complete because every key goes through the table, not because someone thought of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from jobs.errors import UserError
from jobs.imports.common.import_report import Entry, Kind, Report, is_secret, shown
from jobs.spec.job_spec import JobSpec
from jobs.spec.values.spellings import as_bool, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

Rule = Callable[["Draft", str, Any], None]

_OFF: Final = ("", "none", "null", "no", "false", "off", "0", "0.0", "default", "[]", "{}")


class Draft:
    """A configuration, and the job that is built from it.

    Attributes:
        theirs: Its keys, as the tool calls them, and their values.
        defaults: What the tool uses for keys that are not set.
        folder: The directory of its file.
        prefix: Put in front of its keys in the report.
        values: What it has set so far.
        job: Keys of the job so far; the values, unless this is a part of another draft.
        report: What became of its keys so far.
    """

    def __init__(
        self,
        theirs: Mapping[str, Any],
        folder: Path,
        *,
        defaults: Mapping[str, Any] | None = None,
        prefix: str = "",
        above: Draft | None = None,
    ) -> None:
        self.theirs = dict(theirs)
        self.defaults = dict(defaults or {})
        self.folder = folder
        self.prefix = prefix
        self.values: dict[str, Any] = {}
        self.job: dict[str, Any] = self.values if above is None else above.job
        self.report: Report = Report() if above is None else above.report
        self._into = self.report.entries

    # -- reading ---------------------------------------------------------------------------

    def get(self, key: str) -> Any:
        """Their value, or the tool's default if it is not set; None for neither."""
        value = self.theirs.get(key)
        return self.defaults.get(key) if is_unset(value) else value

    def on(self, key: str) -> bool:
        """Whether a switch of theirs is on."""
        return not is_off(self.get(key)) and as_bool(self.get(key)) is not False

    def number(self, key: str) -> float | None:
        """Their value as a number; None when it is none."""
        return as_number(self.get(key))

    # -- going through ---------------------------------------------------------------------

    def apply(
        self, rules: Mapping[str, Rule], prefixes: Mapping[str, Rule], first: Iterable[str]
    ) -> None:
        """Give every key its rule, those in `first` before the others."""
        keys = [key for key in first if key in self.theirs]
        for key in [*keys, *(key for key in self.theirs if key not in keys)]:
            self._apply(key, self.theirs[key], rules, prefixes)
        assumed: list[Entry] = []
        self._into = assumed
        for key, value in self.defaults.items():
            if is_unset(self.theirs.get(key)):
                self._apply(key, value, rules, {})
        self._into = self.report.entries
        self.report.assumed += [
            entry for entry in assumed if entry.kind is Kind.UNSUPPORTED or self._differs(entry)
        ]

    def _apply(
        self, key: str, value: Any, rules: Mapping[str, Rule], prefixes: Mapping[str, Rule]
    ) -> None:
        rule = rules.get(key) or next(
            (rule for start, rule in prefixes.items() if key.startswith(start)), None
        )
        if is_secret(key, value):
            self.unneeded(key, "secrets are not copied; use `hf auth login` or the environment")
        elif rule is None:
            near = did_you_mean(key, rules)
            self.record(Kind.UNKNOWN, key, why=f"not a known key{near}")
        elif is_unset(value):
            self.unneeded(key, "not set")
        else:
            rule(self, key, value)

    def _differs(self, entry: Entry) -> bool:
        """Whether the assumed value differs from the job's own default."""
        usual = _usual_job(self.job.get("model_family"), self.job.get("model_flavour"))
        return any(getattr(usual, name) != read(name, v) for name, v in entry.ours.items())

    # -- writing ---------------------------------------------------------------------------

    def record(self, kind: Kind, key: str, *, why: str = "", **ours: Any) -> None:
        """Record what became of a key."""
        has_value = key in self.theirs or key in self.defaults
        value = shown(key, self.theirs.get(key, self.defaults.get(key))) if has_value else ""
        self._into.append(Entry(kind, self.prefix + key, value, ours, why))

    def take(self, key: str, ours: str, value: Any, why: str = "") -> bool:
        """Set a key of the job, if it may have this value."""
        try:
            value = read(ours, value)
        except UserError as error:
            self.unreadable(key, str(error))
            return False
        self.values[ours] = value
        same = key.rpartition(".")[2] == ours and not why
        self.record(Kind.TAKEN if same else Kind.TRANSLATED, key, why=why, **{ours: plain(value)})
        return True

    def assume(self, key: str, why: str, **ours: Any) -> None:
        """Record what the tool assumes for a key that is not set."""
        self.report.assumed.append(Entry(Kind.TRANSLATED, self.prefix + key, "", ours, why))

    def unsupported(self, key: str, why: str) -> None:
        self.record(Kind.UNSUPPORTED, key, why=why)

    def unneeded(self, key: str, why: str) -> None:
        self.record(Kind.UNNEEDED, key, why=why)

    def unreadable(self, key: str, why: str) -> None:
        self.record(Kind.UNREADABLE, key, why=why)


@cache
def _usual_job(family: str | None, flavour: str | None) -> JobSpec:
    """Return a job of a model in which nothing else is set."""
    named = {"model_family": family, "model_flavour": flavour}
    return JobSpec(**{key: name for key, name in named.items() if name is not None})


# -- values ----------------------------------------------------------------------------------


def read(name: str, value: Any) -> Any:
    """Return a value as the job has it.

    Raises:
        UserError: The key may not have it.
    """
    try:
        return getattr(JobSpec.model_validate({name: value}), name)
    except ValidationError as error:
        raise UserError(f"{name}: {in_words(error)}") from None
    except (TypeError, ValueError, OverflowError):  # of no kind that a key has
        raise UserError(f"{name}: cannot be {type(value).__name__}") from None


def plain(value: Any) -> Any:
    """Return a value of a job as JSON has it."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value


def in_words(error: ValidationError) -> str:
    message = error.errors()[0]["msg"]
    return message[0].lower() + message[1:]


def is_unset(value: Any) -> bool:
    """Whether a key has no value; `none` in small letters is a word of its own in places."""
    return value is None or (isinstance(value, str) and value.strip() in ("", "None", "null", "~"))


def is_off(value: Any) -> bool:
    """Whether a value says no, nothing or zero."""
    return not value or (isinstance(value, str) and value.strip().lower() in _OFF)


def as_number(value: Any) -> float | None:
    """Return a value as a number; it may be a number in text."""
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) < float("inf") else None


def flatten(
    values: Mapping[Any, Any], keep: Iterable[str] = (), prefix: str = ""
) -> dict[str, Any]:
    """Flatten nested mappings to one with dotted keys; mappings in `keep` stay nested."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value and name not in keep:
            flat |= flatten(value, keep, f"{name}.")
        else:
            flat[name] = value
    return flat
