"""What a table says of the keys of another system: where each goes, or why it goes nowhere.

A table is a list of rules. Every key has one rule, and the pages of the documentation are made of
the same rules, so that they cannot differ.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from laurel.config.yaml_tree import YamlNode, graft
from laurel.errors import ConfigError

# --------------------------------------------------------------------------------------------------
# An import while it is made: what the source says, and what has become of each of its keys.

Status = Literal["carried", "default", "not needed", "not carried"]

_SECRETS = re.compile(r"(^|[._])(wandb\.key|use_wandb|hub_token|\w*(api_?key|password|secret)\w*)$")


def is_secret(key: str) -> bool:
    """Whether the value of a key must be neither shown nor written."""
    return _SECRETS.search(key.lower()) is not None


@dataclass(slots=True, kw_only=True)
class KeyOutcome:
    """What became of one key."""

    key: str
    status: Status
    value: Any = None
    to: dict[str, Any] = field(default_factory=dict)
    """Keys of ours, and their values."""
    why: str = ""
    """The conversion, or why there is none and what to do."""
    is_said: bool = True
    """False: the source leaves it out, and this is what the other system takes then."""


class Work:
    """What the converters of a table read and write.

    Args:
        system: The name of the other system, for messages.
        run: `rm`, `sft` or `grpo`.
        said: What the source says, by its keys.
        defaults: What the other system takes for the others.
        devices: Processes the source was started with; None where nobody said.
        total_steps: Optimizer steps of the whole run; None where nobody said.
    """

    def __init__(
        self,
        *,
        system: str,
        run: str,
        said: Mapping[str, Any],
        defaults: Mapping[str, Any],
        devices: int | None = None,
        total_steps: int | None = None,
    ) -> None:
        self.system = system
        self.run = run
        self.said = said
        self.defaults = defaults
        self.devices = devices
        self.total_steps = total_steps
        self.entries: dict[str, KeyOutcome] = {}
        self.values: dict[str, YamlNode] = {}
        """By key of ours."""
        self.came_from: dict[str, tuple[str, ...]] = {}
        self.origins: dict[str, str] = {}
        """For people: where each of them is from."""
        self.reached: dict[str, list[str]] = {}
        """By key of the source, what it decided; also where it was left out."""
        self.named: dict[str, Any] = {}
        """What the steps of a table gave a name."""

    # ----------------------------------------------------------------------------------- the source

    def __getitem__(self, key: str) -> Any:
        """The value that the other system would use: what is said, or its default."""
        if key in self.said:
            return self.said[key]
        return self.defaults.get(key)

    def is_said(self, *keys: str) -> bool:
        """Whether the source says any of them."""
        return any(key in self.said for key in keys)

    def said_of(self, keys: Iterable[str]) -> list[str]:
        """Those of the keys that the source says; all below one that ends in `.*`."""
        found: list[str] = []
        for key in keys:
            if key.endswith(".*"):
                below = [k for k in self.said if k.startswith(key[:-1])]
                found += [k for k in below if k not in self.entries and k not in found]
            elif key in self.said:
                found.append(key)
        return found

    def number(self, key: str) -> float:
        """The value as a number.

        Raises:
            ConfigError: It is none.
        """
        value = self[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            raise self.problem(key, "it must be a number")
        return value

    def whole(self, key: str) -> int:
        """The value as a whole number.

        Raises:
            ConfigError: It is none.
        """
        value = self.number(key)
        if value != int(value):
            raise self.problem(key, "it must be a whole number")
        return int(value)

    def flag(self, key: str) -> bool:
        """The value as true or false; null is false.

        Raises:
            ConfigError: It is neither.
        """
        value = self[key]
        if value in (None, "None"):
            return False
        if not isinstance(value, bool):
            raise self.problem(key, "it must be true or false")
        return value

    def text(self, key: str) -> str | None:
        """The value as text; null and empty text are None."""
        value = self[key]
        return None if value in (None, "", "None") else str(value)

    def pair(self, key: str) -> tuple[float, float]:
        """The value as two numbers.

        Raises:
            ConfigError: It is not.
        """
        value = self[key]
        is_pair = isinstance(value, list | tuple) and len(value) == 2
        if not is_pair or not all(isinstance(one, int | float) for one in value):
            raise self.problem(key, "it must be two numbers")
        return float(value[0]), float(value[1])

    def problem(self, key: str, what: str) -> ConfigError:
        """The error that a value cannot be used."""
        stands = "" if key in self.said else f" (the default of {self.system})"
        return ConfigError(f"{self.system}'s {key}={shown(key, self[key])}{stands}: {what}")

    # --------------------------------------------------------------------------------- what becomes

    def put(
        self, to: str, value: Any, *, by: Iterable[str], how: str = "", origin: str = ""
    ) -> None:
        """Set a key of ours; `by` are the keys of the source that decide it.

        `origin` is for a value that no key decides: an option of the import.
        """
        target = to.format(run=self.run)
        keys = tuple(by)
        said = [key for key in keys if key in self.said]
        for key in keys:
            found = self.reached.setdefault(key, [])
            found += [target] if target not in found else []
        # A default is shown, too: nobody wrote it, and it may differ from ours.
        for key in said or keys:
            entry = self._entry(key, "carried" if said else "default")
            entry.to[target] = value
            entry.why = entry.why or how
        of = ", ".join(said or keys)
        self.values[target] = graft(value, f"{self.system}'s {of}" if of else self.system)
        self.came_from[target] = tuple(said) or ((origin,) if origin else ())
        default = (
            f"default of {', '.join(keys)} in {self.system}" if keys else f"as in {self.system}"
        )
        self.origins[target] = origin or ", ".join(said) or default

    def unneeded(self, key: str, why: str) -> None:
        """A key that there is no need for."""
        entry = self._entry(key, "not needed")
        entry.why = entry.why or why

    def refuse(self, key: str, why: str) -> None:
        """A key that cannot be carried; whatever was set by it stays."""
        entry = self._entry(key, "not carried")
        entry.status, entry.why = "not carried", why

    def note(self, key: str, text: str) -> None:
        """Something to know about a key that is carried."""
        entry = self.entries.get(key)
        if entry is not None:
            entry.why = f"{entry.why}; {text}" if entry.why else text

    def _entry(self, key: str, status: Status) -> KeyOutcome:
        if key not in self.entries:
            self.entries[key] = KeyOutcome(
                key=key, status=status, value=self[key], is_said=key in self.said
            )
        entry = self.entries[key]
        if status == "carried" and entry.status == "not needed":
            entry.status = status
        return entry


def shown(key: str, value: Any) -> str:
    """A value for people, on one line; secrets are not."""
    if key == "policy.scheduler" and value is not None:
        stages = value if isinstance(value, list) else [value]
        names = [stage["name"].rpartition(".")[2] for stage in stages if "name" in stage]
        return " then ".join(names)
    if is_secret(key) and value not in (None, False, ""):
        return "(not shown)"
    if isinstance(value, str):
        text = value if re.fullmatch(r"[\w./:@+-]+", value) else repr(value)
    elif value is None or isinstance(value, bool):
        text = {None: "null", True: "true", False: "false"}[value]
    elif isinstance(value, list | tuple):
        text = "[" + ", ".join(shown("", item) for item in value) + "]"
    elif isinstance(value, float):
        text = f"{value:g}" if float(f"{value:g}") == value else repr(value)
    else:
        text = str(value)
    return text if len(text) <= 72 else text[:69] + "..."


Convert = Callable[[Work], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRule:
    """What becomes of some keys that are read together."""

    keys: tuple[str, ...]
    """Of the source; one that ends in `.*` is all that begin so."""
    to: tuple[str, ...] = ()
    """Every key of ours that it may set. `{run}` is the section of the run: rm, sft or grpo."""
    how: str
    """For people: the conversion, or why there is none."""
    status: Literal["carried", "not needed", "not carried"] = "carried"
    """What becomes of its keys as a rule: of some values it may be another."""
    convert: Convert
    """Reads the keys from the work and says what becomes of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MappingTable:
    """One kind of run of another system."""

    rules: tuple[KeyRule, ...]
    defaults: Mapping[str, Any]
    """What the other system takes where a file says nothing."""
    own_keys: frozenset[str] = frozenset()
    """Keys that no other kind of run of this system has."""
    other_names: Mapping[str, str] | None = None
    """Keys of older versions, and their names in this table."""

    def rule_of(self, key: str) -> KeyRule | None:
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
        """Yield every key of the table, in the order of its rules."""
        for rule in self.rules:
            yield from rule.keys


def same(key: str, to: str, how: str = "as it is") -> KeyRule:
    """A key that has another name here, and the same meaning."""

    def convert(work: Work) -> None:
        if work.is_said(key) or key in work.defaults:
            work.put(to, work[key], by=(key,))

    return KeyRule(keys=(key,), to=(to,), how=how, convert=convert)


def unneeded(how: str, *keys: str) -> KeyRule:
    """Keys that change nothing about what is learned, or that Laurel settles itself."""

    def convert(work: Work) -> None:
        for key in work.said_of(keys):
            work.unneeded(key, how)

    return KeyRule(keys=keys, how=how, convert=convert, status="not needed")


def absent(how: str, *keys: str, off: Sequence[Any] = (None, False, 0, "")) -> KeyRule:
    """Keys for which there is nothing here. At one of the values of `off` nothing is missing."""

    def convert(work: Work) -> None:
        for key in work.said_of(keys):
            value = work[key]
            if any(
                value == one and isinstance(value, bool) == isinstance(one, bool) for one in off
            ) or value in ([], {}):
                work.unneeded(key, "at this value nothing is missing here")
            else:
                work.refuse(key, how)

    return KeyRule(keys=keys, how=how, convert=convert, status="not carried")
