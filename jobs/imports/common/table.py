"""Translate the keys of another tool by the rows of a YAML table.

The parts of a table, all of them optional. Names of keys are separated by spaces:

    include      tables for all tools whose rows are a part of this one
    first        keys whose rules run before the others
    defaults     what the tool uses for keys that are not set: rows of values, with a condition
    same         keys that have this name and these values here
    without      what is not done here: a sentence, and its keys, which are no loss where they are
                 off or have one of the values in `neutral`
    needless     what decides nothing here: a sentence, and its keys
    rows         all other keys, each with its row
    parts        more of these, for keys that begin as `under` says, and with a condition for all
    beginnings   rows for keys that have none and begin so

A row is the name of our key, or some of these, or a list of them: the first whose condition holds.

    ours         our key, or `same`; it takes their value, or the one of `value`
    words        their words, with the value of each here and how it differs
    switch       our key, for a switch that is off by default; it takes `value`, or theirs
    always       why a switch cannot be turned off here
    without      why it is not done here, which is no loss where it is off, or of a `neutral` value
    lost         why it is not done here; with `words`, if it is no such word
    needless     why it decides nothing here
    unreadable   what is wrong with the value
    done, taken  what it means here, where that sets no key
    do           a function, for what is more than a row; `args` are its arguments
    like         a row of the table for all tools, of which this one has other parts
    why          how the values differ, or where ours is from
    but          what else of it is not done here
    sets, drops  other keys of ours, which are set with it; one that is no longer set
    check        what a person has to look at in the job
    when         a condition; `else` is why the key decides nothing where it does not hold
    unless       the opposite of a condition

A condition is a name, of `_CONDITIONS` or of a function, or a mapping whose parts all hold:

    word         the value is one of these words
    with         this switch of theirs is on, or one of several
    given        this key of theirs is set, or one of several
    their        these keys of theirs have these words
    mine         this key of ours is set, and not off; or keys with the values that they have
    contains     the value has this text in it
    above        the value is a number above this one
    model        the family is one of these
    is           a condition by its name
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import yaml

from jobs.imports.common.draft import Draft, Rule, as_number, is_off, is_unset
from jobs.imports.common.import_report import Kind
from jobs.imports.common.models import family_of, takes_guidance, takes_negatives
from jobs.spec.job_spec import JobSpec

Condition = Callable[[Draft, str, Any], Any]
Row = Mapping[str, Any]

_OFF: Final = "off is the default"
_NAME: Final = "table.yaml"
_LOADER: Final = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
_SENTENCES: Final = {
    "lost": Kind.UNSUPPORTED,
    "needless": Kind.UNNEEDED,
    "unreadable": Kind.UNREADABLE,
    "done": Kind.TRANSLATED,
    "taken": Kind.TAKEN,
}
_CONDITIONAL: Final = ("when", "unless", "else")

_CONDITIONS: Final[dict[str, Condition]] = {
    "nothing": lambda draft, key, value: is_off(value),
    "flow": lambda draft, key, value: family_of(draft).objective == "flow",
    "video": lambda draft, key, value: family_of(draft).frame_step,
    "lora": lambda draft, key, value: draft.job.get("model_type", "lora") == "lora",
    "lokr": lambda draft, key, value: _mine(draft, "lora_variant") == "lokr",
    "guided": lambda draft, key, value: takes_guidance(draft),
    "negatives": lambda draft, key, value: takes_negatives(draft),
}
_PARTS: Final[dict[str, Callable[[Draft, Any, Any], Any]]] = {
    "word": lambda draft, value, words: word_of(value) in words,
    "with": lambda draft, value, keys: any(map(draft.on, keys.split())),
    "given": lambda draft, value, keys: any(
        not is_unset(draft.theirs.get(k)) for k in keys.split()
    ),
    "their": lambda draft, value, words: all(
        word_of(draft.get(key)) in (word if isinstance(word, list) else [word])
        for key, word in words.items()
    ),
    "mine": lambda draft, value, keys: (
        draft.values.get(keys)
        if isinstance(keys, str)
        else all(_mine(draft, key) == ours for key, ours in keys.items())
    ),
    "contains": lambda draft, value, text: text in str(value),
    "above": lambda draft, value, number: (as_number(value) or 0) > number,
    "model": lambda draft, value, names: family_of(draft).name in names,
}


@dataclass(frozen=True)
class Table:
    """Rules for the keys of a configuration, or of a dataset.

    Attributes:
        rules: A rule for each key.
        beginnings: Rules for other keys, by what they begin with.
        first: Keys whose rules run first.
        defaults: Values of keys that are not set, each with the condition under which they are.
    """

    rules: dict[str, Rule]
    beginnings: dict[str, Rule]
    first: list[str]
    defaults: list[tuple[Condition, dict[str, Any]]]

    def apply(self, draft: Draft, more: Mapping[str, Rule] | None = None) -> None:
        """Give every key of a configuration its rule."""
        draft.apply(self.rules | dict(more or {}), self.beginnings, self.first)

    def with_rules(self, more: Mapping[str, Rule]) -> Table:
        """Return a table that has these rules, too."""
        return replace(self, rules=self.rules | dict(more))

    def defaults_of(self, draft: Draft) -> dict[str, Any]:
        """Return the tool's values of keys that are not set."""
        rows = [values for holds, values in self.defaults if holds(draft, "", None)]
        return {key: value for values in rows for key, value in values.items()}


def read_table(module: str, part: str, names: Mapping[str, Any]) -> Table:
    """Read a table of the file next to a module.

    Args:
        module: Its `__file__`.
        part: Which table.
        names: Functions that rows use without naming a module of `jobs.imports.common`.
    """
    parts = _parsed(Path(module).with_name(_NAME))
    row = _in_words(parts[part])
    included = [
        read_table(module, name, names) if name in parts else shared_table(name)
        for name in row.get("include", "").split()
    ]
    return _table(row, names, included)


def read_data(module: str) -> dict[str, Any]:
    """Read what else is in that file: names of models and other data without rules."""
    data: dict[str, Any] = _parsed(Path(module).with_name(_NAME))["data"]
    return data


@cache
def shared_table(name: str) -> Table:
    """Return a table of the file for all tools."""
    row = _in_words(_shared()[name])
    return _table(row, {}, [shared_table(other) for other in row.get("include", "").split()])


def sentence(name: str) -> str:
    """Return a sentence that tables name, as in `$buckets`."""
    return str(_shared()["sentences"][name])


def translation(row: str, word: str) -> tuple[Any, str] | None:
    """Return what a word is by a row for all tools, and how it differs; None for no such word."""
    return _translation(_shared()["rows"][row]["words"], word)


def _translation(words: Mapping[str, Any], word: str) -> tuple[Any, str] | None:
    match = next((ours for names, ours in words.items() if word in names.split()), None)
    if match is None:
        return None
    ours, *why = match if isinstance(match, list) else [match]
    return ours, (why or [""])[0]


def word_of(value: Any) -> str:
    """Return a value as a word, in small letters and with underscores."""
    return str(value).strip().lower().replace("-", "_")


# -- reading a table ---------------------------------------------------------------------------


@cache
def _shared() -> dict[str, Any]:
    """Return what tables of all tools share: sentences, rows, and whole tables."""
    return _parsed(Path(__file__).with_name(_NAME))


@cache
def _parsed(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = yaml.load(path.read_text(encoding="utf-8"), _LOADER)
    return values


def _in_words(tree: Any) -> Any:
    """Put in the sentences that are named, as in `$buckets`."""
    if isinstance(tree, dict):
        return {_in_words(key): _in_words(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_in_words(value) for value in tree]
    named = isinstance(tree, str) and tree.startswith("$")
    return sentence(tree[1:]) if named else tree


def _table(part: Row, names: Mapping[str, Any], included: Sequence[Table]) -> Table:
    rules: dict[str, Rule] = {}
    for key, rule in _rules(part, names):
        if key in rules:
            raise ValueError(f"{key} has two rules")
        rules[key] = rule
    beginnings = part.get("beginnings", {}).items()
    own = Table(
        rules,
        {key: _rule(row, names) for keys, row in beginnings for key in keys.split() or [""]},
        part.get("first", "").split(),
        [(_condition(row, names), _bare(row)) for row in part.get("defaults", [])],
    )
    tables = [*included, own]
    return Table(
        {key: rule for table in tables for key, rule in table.rules.items()},
        {key: rule for table in tables for key, rule in table.beginnings.items()},
        [key for table in tables for key in table.first],
        [default for table in tables for default in table.defaults],
    )


def _rules(part: Row, names: Mapping[str, Any]) -> Iterator[tuple[str, Rule]]:
    """Yield the keys of a table, each with its rule."""
    rows: list[tuple[str, Any]] = [(part.get("same", ""), "same")]
    for how in ("without", "needless"):
        for why, keys in part.get(how, {}).items():
            more = keys if isinstance(keys, dict) else {"keys": keys}
            rows.append((more["keys"], {how: why} | more))
    for keys, row in [*rows, *part.get("rows", {}).items()]:
        rule = _rule(row, names)
        yield from ((key, rule) for key in keys.split())
    for more in part.get("parts", []):
        for key, rule in _rules(more, names):
            scoped = _scoped(rule, more, names)
            yield from (
                (f"{start}{key}", scoped) for start in more.get("under", "").split() or [""]
            )


def _scoped(rule: Rule, row: Row, names: Mapping[str, Any]) -> Rule:
    """Apply a rule where the condition of a row holds."""
    if not row.keys() & {"when", "unless"}:
        return rule
    otherwise = partial(_record_sentence, row={"needless": row["else"]}, how="needless")
    return _first_of([(_condition(row, names), rule), (_always_holds, otherwise)])


def _mine(draft: Draft, key: str) -> Any:
    """Return what a key of the job, or of a dataset, is so far."""
    return {**draft.job, **draft.values}.get(key, JobSpec.model_fields[key].default)


# -- rules -------------------------------------------------------------------------------------


def _rule(row: Any, names: Mapping[str, Any]) -> Rule:
    """Make the rule that a row describes."""
    if isinstance(row, list):
        rows = [(_condition(part, names), _rule(_bare(part), names)) for part in row]
        if rows[-1][0] is not _always_holds:
            raise ValueError(f"the last row has a condition: {row[-1]}")
        return _first_of(rows)
    if isinstance(row, str):
        row = {"ours": row}
    if "like" in row:
        like = _in_words(_shared()["rows"][row["like"]])
        more = {key: value for key, value in row.items() if key != "like"}
        return _rule(like if isinstance(like, list) else like | more, names)
    if row.keys() & {"when", "unless"}:
        return _scoped(_rule(_bare(row), names), row, names)
    if "do" in row:
        return partial(_function(row["do"], names), **row.get("args", {}))
    how = next(how for how in _HOW if how in row)
    return partial(_apply, row=row, how=how)


def _apply(draft: Draft, key: str, value: Any, *, row: Row, how: str) -> None:
    if _HOW[how](draft, key, value, row) is not False:
        draft.values |= row.get("sets", {})
        draft.values.pop(row.get("drops", ""), None)
    if "but" in row:
        draft.unsupported(key, row["but"])
    if "check" in row:
        draft.report.to_fill_in.append(_filled(row["check"], key, value))


def _bare(row: Any) -> Any:
    """Return a row without its condition."""
    return {k: v for k, v in row.items() if k not in _CONDITIONAL} if isinstance(row, dict) else row


def _condition(row: Any, names: Mapping[str, Any]) -> Condition:
    """Return the condition of a row, which always holds if it has none."""
    row = row if isinstance(row, dict) else {}
    when = _holds(row["when"], names) if "when" in row else _always_holds
    if "unless" not in row:
        return when
    unless = _holds(row["unless"], names)
    return lambda draft, key, value: when(draft, key, value) and not unless(draft, key, value)


def _always_holds(draft: Draft, key: str, value: Any) -> bool:
    return True


def _holds(condition: str | Row, names: Mapping[str, Any]) -> Condition:
    if isinstance(condition, str):
        if condition in _CONDITIONS:
            return _CONDITIONS[condition]
        function = _function(condition, names)
        return lambda draft, key, value: function(draft, key)
    named = _holds(condition["is"], names) if "is" in condition else _always_holds
    parts = [(_PARTS[part], what) for part, what in condition.items() if part != "is"]
    return lambda draft, key, value: (
        named(draft, key, value) and all(holds(draft, value, what) for holds, what in parts)
    )


def _first_of(rows: list[tuple[Condition, Rule]]) -> Rule:
    """Make a rule of several, of which the first applies whose condition holds."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        next(then for holds, then in rows if holds(draft, key, value))(draft, key, value)

    return rule


def _function(name: str, names: Mapping[str, Any]) -> Callable[..., Any]:
    module, _, last = name.rpartition(".")
    owner = vars(import_module(f"jobs.imports.common.{module}")) if module else names
    function: Callable[..., Any] = owner[last]
    return function


def _words(draft: Draft, key: str, value: Any, row: Row) -> bool | None:
    match = _translation(row["words"], word_of(value))
    if match is None:
        _record_sentence(draft, key, value, row, "lost")
        return False
    return draft.take(key, row["ours"], match[0], match[1] or row.get("why", ""))


def _ours(draft: Draft, key: str, value: Any, row: Row) -> bool:
    ours = key.rpartition(".")[2] if row["ours"] == "same" else row["ours"]
    return draft.take(key, ours, _value(row, value), row.get("why", ""))


def _switch(draft: Draft, key: str, value: Any, row: Row) -> bool:
    if is_off(value):
        draft.unneeded(key, _OFF)
        return False
    why = row.get("why", "the equivalent value")
    return draft.take(key, row["switch"], _value(row, value), why)


def _value(row: Row, value: Any) -> Any:
    """Return what our key gets; `{word}` stands for their value in small letters."""
    ours = row.get("value", value)
    return _filled(ours, "", value) if "{word}" in str(row.get("value")) else ours


def _always(draft: Draft, key: str, value: Any, row: Row) -> None:
    if is_off(value):
        draft.unsupported(key, row["always"])
    else:
        draft.unneeded(key, "on is the default")


def _without(draft: Draft, key: str, value: Any, row: Row) -> None:
    words = [str(word) for word in row.get("neutral", ())]
    numbers = [number for word in words if (number := as_number(word)) is not None]
    if is_off(value) or str(value).strip().lower() in words or as_number(value) in numbers:
        draft.unneeded(key, _OFF)
    else:
        draft.unsupported(key, row["without"])


def _record_sentence(draft: Draft, key: str, value: Any, row: Row, how: str) -> None:
    """Record what a row says of a key."""
    draft.record(_SENTENCES[how], key, why=_filled(row[how], key, value))


def _file_of(text: str) -> str:
    return re.split(r"[/\\]", text)[-1]


def _filled(sentence: str, key: str, value: Any) -> str:
    text = str(value).strip()
    words = {"{key}": key, "{value}": text, "{word}": text.lower(), "{file}": _file_of(text)}
    for mark, word in words.items():
        sentence = sentence.replace(mark, word)
    return sentence


_HOW: Final[dict[str, Callable[[Draft, str, Any, Row], bool | None]]] = {
    "words": _words,
    "ours": _ours,
    "switch": _switch,
    "always": _always,
    "without": _without,
    **{how: partial(_record_sentence, how=how) for how in _SENTENCES},
}
