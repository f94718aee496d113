"""Reads what is known of the keys of another system's programs from YAML.

A file says for each of its sections, whose name lists the runs that it is for:

- `short`: abbreviations of key prefixes; with `A: actor_rollout_ref.actor` there is `A.optim`.
- `own_keys`: keys that only this kind of run has in the other system, which identify it.
- `defaults`: the other system's defaults of the keys that its rules in Python read; `read` are
  the keys that they read and that have none.
- `refused`: why a rule refuses a key.
- `absent`: why a key is refused at any value that is not `fine`, where no rule decides it.
- `unneeded`: reasons and the keys that are not needed for them, where no rule decides those.
- `old_names`: names of older versions; `shortened` are those that are the end of today's names,
  and `moved` are by the older prefix: the new one, and the names below it.

A mapping may name several keys at once; `a.*` stands for all keys below `a`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, cast

import yaml

from laurel.config.schemas import Kind

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

    def add(self, section: Mapping[str, Any]) -> None:
        """Add the facts of a section of a file."""

        def full(keys: str | Iterable[str]) -> list[str]:
            found = [self.full(k) for k in (keys.split() if isinstance(keys, str) else keys)]
            self.known |= dict.fromkeys(found)
            return found

        self.own_keys |= {*full(section.get("own_keys", ""))}
        defaults = section.get("defaults", {})
        self.defaults |= dict(zip(full(defaults), defaults.values(), strict=True))
        full(section.get("read", ""))
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
        for at in range(len(parts)):
            ends["_".join(parts[at:])].add(key)
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
