"""What a table says of the keys of another system: where each goes, or why it goes nowhere.

A table is a list of rules. Every key has one rule, and the pages of the documentation are made of
the same rules, so that they cannot differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from laurel.config.importing.work import Work

Run = Literal["rm", "sft", "grpo"]
Convert = Callable[[Work], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What becomes of some keys that are read together."""

    keys: tuple[str, ...]
    """Of the source; one that ends in `.*` is all that begin so."""
    to: tuple[str, ...] = ()
    """Every key of ours that it may set. `{run}` is the section of the run: rm, sft or grpo."""
    how: str
    """For people: the conversion, or why there is none."""
    fate: Literal["carried", "not needed", "not carried"] = "carried"
    """What becomes of its keys as a rule: of some values it may be another."""
    convert: Convert
    """Reads the keys from the work and says what becomes of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One kind of run of another system."""

    rules: tuple[Rule, ...]
    defaults: Mapping[str, Any]
    """What the other system takes where a file says nothing."""
    told_by: frozenset[str] = frozenset()
    """Keys that no other kind of run of this system has."""
    other_names: Mapping[str, str] | None = None
    """Keys of older versions, and their names in this table."""

    def rule_of(self, key: str) -> Rule | None:
        """The rule of a key: its own, else that of its longest beginning."""
        exact = {k: rule for rule in self.rules for k in rule.keys}
        if key in exact:
            return exact[key]
        parts = key.split(".")
        for length in range(len(parts) - 1, 0, -1):
            rule = exact.get(".".join(parts[:length]) + ".*")
            if rule is not None:
                return rule
        return None

    def known(self) -> Iterator[str]:
        """Every key of the table, in the order of its rules."""
        for rule in self.rules:
            yield from rule.keys


def same(key: str, to: str, how: str = "as it is") -> Rule:
    """A key that has another name here, and the same meaning."""

    def convert(work: Work) -> None:
        if work.is_said(key) or key in work.defaults:
            work.put(to, work[key], by=(key,))

    return Rule(keys=(key,), to=(to,), how=how, convert=convert)


def unneeded(how: str, *keys: str) -> Rule:
    """Keys that change nothing about what is learned, or that Laurel settles itself."""

    def convert(work: Work) -> None:
        for key in work.said_of(keys):
            work.unneeded(key, how)

    return Rule(keys=keys, how=how, convert=convert, fate="not needed")


def absent(how: str, *keys: str, off: Sequence[Any] = (None, False, 0, "")) -> Rule:
    """Keys for which there is nothing here. At one of the values of `off` nothing is missing."""

    def convert(work: Work) -> None:
        for key in work.said_of(keys):
            value = work[key]
            if any(value == one and isinstance(value, bool) == isinstance(one, bool)
                   for one in off) or value in ([], {}):  # fmt: skip
                work.unneeded(key, "at this value nothing is missing here")
            else:
                work.refuse(key, how)

    return Rule(keys=keys, how=how, convert=convert, fate="not carried")
