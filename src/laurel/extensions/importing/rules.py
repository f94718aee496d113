"""Defines an import: what the source says, what becomes of its keys, and the result.

The keys of each system and what becomes of them are in the tables beside this file: openrlhf.yaml,
trl.yaml and verl.yaml.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, cast

import yaml

from laurel.config.load import check_tree
from laurel.config.schema_info import with_defaults
from laurel.config.schemas import SCHEMAS, Kind
from laurel.config.yaml_tree import Section, YamlNode, graft, nearest, plain_values
from laurel.errors import ConfigError
from laurel.extensions.importing.commands import LAUNCHER_FILE, CommandLine

Status = Literal["carried", "default", "not needed", "not carried"]

_SECRETS = re.compile(r"(^|[._])(wandb\.key|use_wandb|hub_token|\w*(api_?key|password|secret)\w*)$")


def is_secret(key: str) -> bool:
    """Report whether a key holds a secret, whose value must be neither shown nor written."""
    return _SECRETS.search(key.lower()) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What is imported, as it was read, with what it may lack."""

    name: str
    """Its name in messages."""
    path: Path | None
    """Its file; None: standard input."""
    values: Mapping[str, Any]
    """The values, nested as in the file."""
    command: CommandLine | None = None
    """The command line that was found in it."""
    run: Kind | None = None
    """The run that the user named."""
    devices: int | None = None
    total_steps: int | None = None


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
    is_known: bool = True
    """False if the source says something, but not here what its value is."""


class Work:
    """The state of one import, which rules read values from and write results to.

    Rules name the source's keys as the table does, with its abbreviations.

    Args:
        system: The name of the other system, for messages.
        run: The kind of run: `rm`, `sft` or `grpo`.
        table: The keys of the other system's program.
        said: The values in the source, by its keys.
        devices: The number of processes the source starts; None if it is unknown.
        total_steps: The optimizer steps of the whole run; None if they are unknown.
        program: The program that the source starts, if it is a command line.
    """

    def __init__(
        self,
        *,
        system: str,
        run: Kind,
        table: MappingTable,
        said: Mapping[str, Any],
        devices: int | None = None,
        total_steps: int | None = None,
        program: str = "",
    ) -> None:
        self.system = system
        self.run = run
        self.table = table
        self.said = said
        self.devices = devices
        self.total_steps = total_steps
        self.program = program
        self.entries: dict[str, KeyOutcome] = {}
        self.values: dict[str, YamlNode] = {}
        """The values set so far, by Laurel's keys."""
        self.origins: dict[str, str] = {}
        """The origin of each value as text for people, by Laurel's keys."""
        self.decided: set[str] = set()
        """The keys of Laurel that the source or an option of the import decides, not a default."""
        self.last_read = ""
        """The key that was read last, of those that the source sets."""

    def translate(self) -> None:
        """Translate every key that has a meaning here; each system's class says how."""

    def __getitem__(self, key: str) -> Any:
        """Return the value that the other system would use: the source's, or the default."""
        key = self.table.full(key)
        if key in self.said:
            self.last_read = key
            return self.said[key]
        return self.table.defaults.get(key)

    def has(self, *keys: str) -> bool:
        """Report whether the source sets any of the keys."""
        return any(self.table.full(key) in self.said for key in keys)

    def number(self, key: str) -> float:
        """Return the value of a source key as a number, or raise a ConfigError."""
        value = self[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            raise self.problem(key, "it must be a number")
        return value

    def real(self, key: str) -> float:
        """Return the value of a source key as a number with a decimal point."""
        return float(self.number(key))

    def whole(self, key: str) -> int:
        """Return the value of a source key as a whole number, or raise a ConfigError."""
        value = self.number(key)
        if value != int(value):
            raise self.problem(key, "it must be a whole number")
        return int(value)

    def count(self, key: str) -> int:
        """Return the value of a source key as a number of things, at least one."""
        value = self.whole(key)
        if value < 1:
            raise self.problem(key, "it must be at least 1")
        return value

    def flag(self, key: str) -> bool:
        """Return the value of a source key as a boolean; null is False, or raise a ConfigError."""
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

    def word(self, key: str) -> str:
        """Return the value of a source key as a word in lower case."""
        return str(self[key]).lower()

    def names(self, key: str) -> list[Any]:
        """Return the value of a source key, one name or several, as a list."""
        value = self[key]
        return [value] if isinstance(value, str) else list(value or [])

    def pair(self, key: str) -> list[float]:
        """Return the value of a source key as two numbers, or raise a ConfigError."""
        value = self[key]
        is_pair = isinstance(value, list | tuple) and len(value) == 2
        if not is_pair or not all(isinstance(item, int | float) for item in value):
            raise self.problem(key, "it must be two numbers")
        return [float(item) for item in value]

    def problem(self, key: str, what: str) -> ConfigError:
        """Return the error for a source key whose value cannot be used; `what` says why."""
        stands = "" if self.has(key) else f" (the default of {self.system})"
        value = shown(self.table.full(key), self[key])
        return ConfigError(f"{self.system}'s {self.table.full(key)}={value}{stands}: {what}")

    def put(self, to: str, value: Any, *by: str, how: str = "", origin: str = "") -> None:
        """Set a key of Laurel.

        Args:
            by: The source's keys that decide the value.
            origin: The origin of a value that no source key decides, such as an option of the
                import.
        """
        target = to.replace("{run}", self.run)
        keys = [self.table.full(key) for key in by]
        set_keys = [key for key in keys if key in self.said]
        # A default is shown, too: it is not in the file, and may differ from Laurel's.
        for key in set_keys or keys:
            entry = self._entry(key, "carried" if set_keys else "default")
            entry.to[target] = value
            entry.why = entry.why or how
        names = ", ".join(set_keys or keys)
        self.values[target] = graft(value, f"{self.system}'s {names}" if names else self.system)
        (self.decided.add if set_keys or origin else self.decided.discard)(target)
        default = f"default of {names} in {self.system}" if keys else f"as in {self.system}"
        self.origins[target] = origin or (names if set_keys else default)

    def carry(self, key: str, to: str, read: Read | None = None, how: str = "") -> None:
        """Set a key of Laurel to the value of one source key, if that is set or has a default.

        `read` is the method that reads and checks the value; without it, it is taken as it is.
        """
        if self.has(key) or self.table.full(key) in self.table.defaults:
            self.put(to, self[key] if read is None else read(self, key), key, how=how)

    def refuse(self, key: str, why: str = "", **facts: object) -> None:
        """Record that a source key cannot be carried over; values it has already set remain.

        `why` is the reason that the report shows, the table's if it is left out, where `facts` fill
        the names in braces.
        """
        why = why or self.table.refused[self.table.full(key)].format(run=self.run, **facts)
        entry = self._entry(self.table.full(key), "not carried")
        entry.status, entry.why = "not carried", why

    def is_refused(self, key: str) -> bool:
        """Report whether a source key was refused."""
        entry = self.entries.get(self.table.full(key))
        return entry is not None and entry.status == "not carried"

    def skip(self, why: str, *keys: str) -> None:
        """Record that those of the source's keys that it sets are not needed; `why` says why."""
        for key in map(self.table.full, keys):
            if key in self.said:
                entry = self._entry(key, "not needed")
                entry.why = entry.why or why

    def note(self, key: str, text: str) -> None:
        """Attach a note to a source key that is carried over."""
        entry = self.entries.get(self.table.full(key))
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

    def settle(self) -> None:
        """Decide the source's keys that no rule has: features that Laurel lacks, and no others."""
        for keys, why, fine in self.table.absent:
            for key in self._undecided(keys):
                value = self[key]
                is_fine = any(
                    value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
                    for allowed in fine
                )
                if is_fine or value in ([], {}):
                    self.skip("at this value nothing is missing here", key)
                else:
                    self.refuse(key, why)
        for is_wild in (False, True):
            for why, keys in self.table.unneeded.items():
                some = [key for key in keys if key.endswith(".*") is is_wild]
                self.skip(why, *self._undecided(some))

    def _undecided(self, keys: Iterable[str]) -> list[str]:
        undecided: list[str] = []
        for key in keys:
            below = (
                [k for k in self.said if k.startswith(key[:-1])] if key.endswith(".*") else [key]
            )
            undecided += [k for k in below if k in self.said and k not in self.entries]
        return undecided


Read = Callable[[Any, str], Any]
flag, number, real, text, whole = Work.flag, Work.number, Work.real, Work.text, Work.whole
"""The readings of a value that `carry` takes."""


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
    elif isinstance(value, Mapping):
        text = str({name: "(not shown)" if is_secret(str(name)) else value[name] for name in value})
    elif isinstance(value, list | tuple):
        text = "[" + ", ".join(shown("", item) for item in value) + "]"
    elif isinstance(value, float):
        text = f"{value:g}" if float(f"{value:g}") == value else repr(value)
    else:
        text = str(value)
    return text if len(text) <= 72 else text[:69] + "..."


# The result of an import.

WHOLE = ("policy.optimizer", "policy.scheduler")
"""The keys whose blocks replace Laurel's defaults as a whole, so all their parts are written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The result of an import: Laurel's configuration, and what became of each source key."""

    system: str
    run: Kind
    values: Mapping[str, Any]
    """The imported values by Laurel's dotted keys.

    These are the values in the source, and those defaults of the other system that differ from
    Laurel's.
    """
    origins: Mapping[str, str]
    """The origin of each value as text for people, by Laurel's dotted keys."""
    entries: tuple[KeyOutcome, ...]
    """The outcome of every key in the source, and of relevant defaults, in table order."""
    config: Section
    """The imported values, checked against the schema."""
    recognized_by: str = ""
    """The clue by which the kind of run was recognized; empty if it needed none."""
    keeps_references: bool = False
    """Whether what looks like a reference in a value is one."""

    def with_status(self, status: str) -> list[KeyOutcome]:
        """Return the outcomes with one status: carried, default, not needed or not carried."""
        return [entry for entry in self.entries if entry.status == status]


def import_said(work: Work) -> Imported:
    """Apply a system's rules to the keys of the source, and check the resulting configuration.

    Raises:
        ConfigError: A value, or the combination of values, is invalid; the message names the key of
            the source.
    """
    try:
        work.translate()
    except (TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
        if isinstance(error, ConfigError) or not work.last_read:
            raise
        raise work.problem(work.last_read, "it is not of the kind that belongs there") from None
    work.settle()
    for key in work.said:
        if key not in work.entries:
            _without_rule(work, key)
    run = work.run
    _drop_our_defaults(work, SCHEMAS[run])
    tree = _nested(work.values, f"what {work.system} says")
    config, _ = check_tree(SCHEMAS[run], with_defaults(SCHEMAS[run], tree))
    order = {key: i for i, key in enumerate(work.table.known)}
    entries = sorted(work.entries.values(), key=lambda e: order.get(e.key, len(order)))
    return Imported(
        system=work.system,
        run=run,
        config=config,
        values={key: plain_values(node) for key, node in work.values.items()},
        origins={key: work.origins[key] for key in work.values},
        entries=tuple(entries),
    )


def _without_rule(work: Work, key: str) -> None:
    if work.table.knows(key):
        work.skip("it has no effect beside the other keys of this file", key)
    elif key == LAUNCHER_FILE:
        work.refuse(
            key,
            "the launcher's own file is not read; how many machines and devices there are is "
            "in the section cluster, how weights are spread over them in policy.dtensor_cfg",
        )
    else:
        near = nearest(key, [k for k in work.table.known if not k.endswith(".*")])
        hint = f"; did you mean {near}?" if near else ""
        work.refuse(key, f"not known to this version of Laurel's table of {work.system}{hint}")


def _drop_our_defaults(work: Work, schema: type[Section]) -> None:
    """Leave out values that the source does not set and that equal Laurel's defaults."""
    ours = schema().model_dump(mode="json")
    new = {to for to, node in work.values.items() if default_at(ours, to) != plain_values(node)}
    units = {to: next((w for w in WHOLE if to.startswith(w)), to) for to in work.values}
    needed = {units[to] for to in work.values if to in work.decided or to in new}
    work.values = {to: node for to, node in work.values.items() if units[to] in needed}
    for key, entry in list(work.entries.items()):
        if entry.status == "default":
            entry.to = {to: value for to, value in entry.to.items() if to in new}
            if not entry.to:
                del work.entries[key]


def default_at(ours: Any, dotted: str) -> Any:
    """Return the value of a dotted key in a dumped configuration; None if there is none."""
    for part in dotted.split("."):
        ours = ours.get(part) if isinstance(ours, dict) else None
    return ours


def _nested(values: Mapping[str, YamlNode], place: str) -> YamlNode:
    tree: dict[str, YamlNode] = {}
    for dotted, node in values.items():
        *blocks, last = dotted.split(".")
        level = tree
        for block in blocks:
            below = level.setdefault(block, YamlNode({}, place))
            if not isinstance(below.value, dict):
                raise ConfigError(f"{place}: {dotted} and a key above it are both set; keep one")
            level = below.value
        level[last] = node
    return YamlNode(tree, place)


# Reads what is known of the keys of another system's programs from YAML.
#
# A file says for each of its sections, whose name lists the runs that it is for:
#
# - `short`: abbreviations of key prefixes; with `A: actor_rollout_ref.actor` there is `A.optim`.
# - `own_keys`: keys that only this kind of run has in the other system, which identify it.
# - `defaults`: the other system's defaults of the keys that its rules in Python read; `read` are
#   the keys that they read and that have none.
# - `refused`: why a rule refuses a key.
# - `absent`: why a key is refused at any value that is not `fine`, where no rule decides it.
# - `unneeded`: reasons and the keys that are not needed for them, where no rule decides those.
# - `old_names`: names of older versions; `shortened` are those that are the end of today's names,
#   and `moved` are by the older prefix: the new one, and the names below it.
#
# A mapping may name several keys at once; `a.*` stands for all keys below `a`.

_OFF = (None, False, 0, "")


@dataclass(slots=True, kw_only=True)
class MappingTable:
    """What is known of the keys of one program of another system."""

    short: dict[str, str] = field(default_factory=dict)
    own_keys: frozenset[str] = frozenset()
    defaults: dict[str, Any] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    absent: list[tuple[list[str], str, tuple[Any, ...]]] = field(default_factory=list)
    unneeded: dict[str, list[str]] = field(default_factory=dict)
    other_names: dict[str, str] = field(default_factory=dict)
    mappings: frozenset[str] = frozenset()
    """Keys whose value is a mapping, which may be written key by key: `kwargs.scale=2`."""
    known: dict[str, None] = field(default_factory=dict)
    """All keys that the table mentions, in its order."""

    def full(self, key: str) -> str:
        """Return a key with its abbreviated prefix expanded."""
        first, dot, rest = key.partition(".")
        return f"{self.short[first]}{dot}{rest}".lstrip(".") if first in self.short else key

    def knows(self, key: str) -> bool:
        """Report whether the table mentions a key, or all keys below one of its prefixes."""
        parts = key.split(".")
        prefixes = (".".join(parts[:length]) + ".*" for length in range(1, len(parts)))
        return key in self.known or any(prefix in self.known for prefix in prefixes)

    def mapping_of(self, key: str) -> tuple[str, ...] | None:
        """Return the key whose mapping a key is part of, and the names in that mapping."""
        parts = key.split(".")
        for length in range(1, len(parts)):
            above = ".".join(parts[:length])
            above = self.other_names.get(above, above)
            if above in self.mappings:
                return above, *parts[length:]
        return None

    def add(self, section: Mapping[str, Any]) -> None:
        """Add the facts of a section of a file."""

        def full(keys: str | Iterable[str]) -> list[str]:
            full_keys = [self.full(k) for k in (keys.split() if isinstance(keys, str) else keys)]
            self.known |= dict.fromkeys(full_keys)
            return full_keys

        self.own_keys |= {*full(section.get("own_keys", ""))}
        defaults = section.get("defaults", {})
        self.defaults |= dict(zip(full(defaults), defaults.values(), strict=True))
        full(section.get("read", ""))
        self.mappings |= {*full(section.get("mappings", ""))}
        for keys, why in section.get("refused", {}).items():
            self.refused |= dict.fromkeys(full(keys), why)
        for keys, fact in section.get("absent", {}).items():
            fact = {"why": fact} if isinstance(fact, str) else fact
            self.absent.append((full(keys), fact["why"], tuple(fact.get("fine", _OFF))))
        for why, keys in section.get("unneeded", {}).items():
            self.unneeded.setdefault(why, []).extend(full(keys))


def read_tables(system: str) -> Mapping[Kind, MappingTable]:
    """Read what is known of the keys of a system's programs, by the run they convert to."""
    text = files(__package__).joinpath(f"{system}.yaml").read_text(encoding="utf-8")
    spec = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    sections = [(cast("list[Kind]", names.split()), section) for names, section in spec.items()]
    tables = {run: MappingTable() for runs, _ in sections for run in runs}
    for runs, section in sections:
        for run in runs:
            tables[run].short |= section.get("short", {})
    for runs, section in sections:
        for run in runs:
            tables[run].add(section)
    ends: dict[str, set[str]] = defaultdict(set)
    for key in (key for table in tables.values() for key in table.known):
        parts = key.split(".")
        for start in range(len(parts)):
            ends["_".join(parts[start:])].add(key)
    for runs, section in sections:
        # Unpacking fails where a name is the end of no key, or of several.
        short = {
            name: key for name in section.get("shortened", "").split() for (key,) in [ends[name]]
        }
        old = section.get("old_names", {})
        for before, moved in section.get("moved", {}).items():
            now, *leaves = moved.split()
            old |= {f"{before}.{leaf}": f"{now}.{leaf}" for leaf in leaves}
        for run in runs:
            tables[run].other_names |= {name: tables[run].full(new) for name, new in old.items()}
            tables[run].other_names |= short
    return tables
