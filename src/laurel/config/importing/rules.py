"""Defines mapping tables: rules for where each key of another system goes, or why nowhere.

Every key has one rule. The documentation's tables are generated from the same rules, so they
cannot differ.
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
    """Report whether a key holds a secret, whose value must be neither shown nor written."""
    return _SECRETS.search(key.lower()) is not None


@dataclass(slots=True, kw_only=True)
class KeyOutcome:
    """The outcome of importing one source key: its status and the keys of Laurel that it set."""

    key: str
    status: Status
    value: Any = None
    to: dict[str, Any] = field(default_factory=dict)
    """The keys of Laurel that this key sets, with their values."""
    why: str = ""
    """Explains the conversion, or why there is none and what the user can do."""
    is_said: bool = True
    """False if the source leaves the key out, and this is the other system's default."""


class Work:
    """The state of one import, which converters read values from and write results to.

    Args:
        system: The name of the other system, for messages.
        run: The kind of run: `rm`, `sft` or `grpo`.
        said: The values in the source, by its keys.
        defaults: The other system's defaults, by its keys.
        devices: The number of processes the source starts; None if it is unknown.
        total_steps: The optimizer steps of the whole run; None if they are unknown.
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
        """The values set so far, by Laurel's keys."""
        self.came_from: dict[str, tuple[str, ...]] = {}
        self.origins: dict[str, str] = {}
        """The origin of each value as text for people, by Laurel's keys."""
        self.reached: dict[str, list[str]] = {}
        """The keys of Laurel that each source key decides, even if it is left out."""
        self.named: dict[str, Any] = {}
        """The values that the table's `let` steps have named."""

    # ----------------------------------------------------------------------------------- the source

    def __getitem__(self, key: str) -> Any:
        """Return the value that the other system would use: the source's, or the default."""
        if key in self.said:
            return self.said[key]
        return self.defaults.get(key)

    def is_said(self, *keys: str) -> bool:
        """Report whether the source sets any of the keys."""
        return any(key in self.said for key in keys)

    def said_of(self, keys: Iterable[str]) -> list[str]:
        """Return those of the keys that the source sets; `a.*` stands for all keys below `a`."""
        found: list[str] = []
        for key in keys:
            if key.endswith(".*"):
                below = [k for k in self.said if k.startswith(key[:-1])]
                found += [k for k in below if k not in self.entries and k not in found]
            elif key in self.said:
                found.append(key)
        return found

    def number(self, key: str) -> float:
        """Return the value of a source key as a number.

        Raises:
            ConfigError: The value is no number.
        """
        value = self[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            raise self.problem(key, "it must be a number")
        return value

    def whole(self, key: str) -> int:
        """Return the value of a source key as a whole number.

        Raises:
            ConfigError: The value is no whole number.
        """
        value = self.number(key)
        if value != int(value):
            raise self.problem(key, "it must be a whole number")
        return int(value)

    def flag(self, key: str) -> bool:
        """Return the value of a source key as a boolean; null is False.

        Raises:
            ConfigError: The value is no boolean.
        """
        value = self[key]
        if value in (None, "None"):
            return False
        if not isinstance(value, bool):
            raise self.problem(key, "it must be true or false")
        return value

    def text(self, key: str) -> str | None:
        """Return the value of a source key as text; null and empty text are None."""
        value = self[key]
        return None if value in (None, "", "None") else str(value)

    def pair(self, key: str) -> tuple[float, float]:
        """Return the value of a source key as two numbers.

        Raises:
            ConfigError: The value is no pair of numbers.
        """
        value = self[key]
        is_pair = isinstance(value, list | tuple) and len(value) == 2
        if not is_pair or not all(isinstance(one, int | float) for one in value):
            raise self.problem(key, "it must be two numbers")
        return float(value[0]), float(value[1])

    def problem(self, key: str, what: str) -> ConfigError:
        """Return the error for a source key whose value cannot be used; `what` says why."""
        stands = "" if key in self.said else f" (the default of {self.system})"
        return ConfigError(f"{self.system}'s {key}={shown(key, self[key])}{stands}: {what}")

    # --------------------------------------------------------------------------------- what becomes

    def put(
        self, to: str, value: Any, *, by: Iterable[str], how: str = "", origin: str = ""
    ) -> None:
        """Set a key of Laurel.

        Args:
            to: The dotted key of Laurel.
            value: Its value.
            by: The source's keys that decide the value.
            how: An explanation of the conversion.
            origin: The origin of a value that no source key decides, such as an option of the
                import.
        """
        target = to.format(run=self.run)
        keys = tuple(by)
        said = [key for key in keys if key in self.said]
        for key in keys:
            found = self.reached.setdefault(key, [])
            found += [target] if target not in found else []
        # A default is shown, too: it is not in the file, and may differ from Laurel's.
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
        """Record that Laurel does not need a source key; the report shows `why`."""
        entry = self._entry(key, "not needed")
        entry.why = entry.why or why

    def refuse(self, key: str, why: str) -> None:
        """Record that a source key cannot be carried over; values it has already set remain.

        `why` is the reason that the report shows.
        """
        entry = self._entry(key, "not carried")
        entry.status, entry.why = "not carried", why

    def note(self, key: str, text: str) -> None:
        """Attach a note to a source key that is carried over."""
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
    """Format a value for people on one line; the value of a secret key is hidden."""
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
    """The rule for one source key, or for several that are converted together."""

    keys: tuple[str, ...]
    """The source's keys that the rule covers; `a.*` stands for all keys below `a`."""
    to: tuple[str, ...] = ()
    """All keys of Laurel that the rule may set; `{run}` stands for `rm`, `sft` or `grpo`."""
    how: str
    """Describes the conversion for people, or explains why there is none."""
    status: Literal["carried", "not needed", "not carried"] = "carried"
    """The usual status of the keys; the converter may give another for certain values."""
    convert: Convert
    """Converts the keys: reads their values from the `Work` and records an outcome for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MappingTable:
    """All rules that translate another system's configuration of one kind of run into Laurel's."""

    rules: tuple[KeyRule, ...]
    defaults: Mapping[str, Any]
    """The other system's defaults, by its keys."""
    own_keys: frozenset[str] = frozenset()
    """The keys that only this kind of run has in the other system, which identify it."""
    other_names: Mapping[str, str] | None = None
    """Maps keys of older versions of the other system to their names in this table."""

    def rule_of(self, key: str) -> KeyRule | None:
        """Return the rule of a key: its own, or that of its longest known prefix."""
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
        """Yield every source key that the table has a rule for, in the order of the rules."""
        for rule in self.rules:
            yield from rule.keys


def same(key: str, to: str, how: str = "as it is") -> KeyRule:
    """Return a rule for a key that Laurel has under another name with the same meaning."""

    def convert(work: Work) -> None:
        if work.is_said(key) or key in work.defaults:
            work.put(to, work[key], by=(key,))

    return KeyRule(keys=(key,), to=(to,), how=how, convert=convert)


def unneeded(how: str, *keys: str) -> KeyRule:
    """Return a rule for keys that do not affect what is learned, or that Laurel decides itself."""

    def convert(work: Work) -> None:
        for key in work.said_of(keys):
            work.unneeded(key, how)

    return KeyRule(keys=keys, how=how, convert=convert, status="not needed")


def absent(how: str, *keys: str, off: Sequence[Any] = (None, False, 0, "")) -> KeyRule:
    """Return a rule for keys of features that Laurel lacks; a value in `off` loses nothing."""

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
