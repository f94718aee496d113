"""Reads mapping tables from YAML; each row gives the conversion of another system's keys.

A file holds what the programs of one system share, and one table for each program:

- `short`: abbreviations of key prefixes; with `A: actor_rollout_ref.actor` a row can use `A.optim`.
- `blocks`: rows that several programs use, by name.
- `programs`: by Laurel's kind of run, `defaults`, `own_keys`, `other_names` and `rows`.

A row is one of:

- `{same: KEY, to: OURS, how: TEXT}`: Laurel has the key under another name.
- `{absent: [KEYS], why: TEXT, fine: [VALUES]}`: Laurel lacks the feature; at these values nothing
  is lost.
- `{unneeded: [KEYS], why: TEXT}`: the keys do not affect what is learned.
- `{use: BLOCK, short: {...}}`: the rows of a block are inserted.
- `{keys: [KEYS], how: TEXT, do: [STEPS]}`: the keys have a meaning only together.

Steps are executed in order:

- `{set: OURS, to: EXPRESSION, by: [KEYS], how: TEXT}`: sets a key of Laurel; `by` is left out if
  the expression names the keys.
- `{refuse: KEYS, why: TEXT}`, `{skip: KEYS, why: TEXT}` (those that the source sets), `{note: KEY,
  why: TEXT}`, and `{error: KEY, why: TEXT}`, which ends the import.
- `{let: {NAME: EXPRESSION}}`: names values for later steps and rows.
- `{call: RULE, ...}`: calls a conversion of `optimizing` with the keys that it reads.
- `{do: [STEPS]}`, `{steps: BLOCK, short: {...}}`: execute further steps.

Each step may have `if: EXPRESSION`, and `else: [STEPS]` for the other case. Expressions are
Python's, with keys as names: `whole(KEY)`, `number(KEY)`, `on(KEY)` and `text(KEY)` check the
value of a key, and `said(KEY)` returns whether the source sets it. Texts may contain expressions in
braces.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.resources import files
from types import CodeType
from typing import Any

import yaml

from laurel.config.importing import optimizing
from laurel.config.importing.rules import KeyRule, MappingTable, Work, absent, same, unneeded
from laurel.config.schemas import Kind
from laurel.errors import ConfigError

Step = Callable[[Work], None]

FAR = 1_000_000
"""A number of epochs or steps that no run reaches."""

_OF_KEYS = ("whole", "number", "on", "text", "said", "word", "refused", "key", "pair")
_FUNCTIONS: Mapping[str, Any] = {
    "FAR": FAR,
    "float": float,
    "str": str,
    "int": int,
    "round": round,
    "len": len,
    "list": list,
    "dict": dict,
    "max": max,
    "ceil": math.ceil,
    "sqrt": math.sqrt,
    "sum": sum,
    "any": any,
    "join": ", ".join,
    "sorted": sorted,
    "isinstance": isinstance,
    "bool": bool,
    "key": str,
    "zip": zip,
    "format": format,
    "names": lambda value: [value] if isinstance(value, str) else list(value or []),
}
_OF_WORK = ("devices", "total_steps", "run", "has", "share")
_IN_TEXT = re.compile(r"\{([^{}]+)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The abbreviations and keys that expressions in one mapping table may use."""

    short: Mapping[str, str] = field(default_factory=dict)
    keys: frozenset[str] = frozenset()
    """All keys that the table's rows mention."""

    def whole(self, key: str) -> str:
        """Return a key with its abbreviated prefix expanded."""
        first, dot, rest = key.partition(".")
        if first not in self.short:
            return key
        return f"{self.short[first]}{dot}{rest}".lstrip(".")

    def all(self, keys: str | Sequence[str]) -> tuple[str, ...]:
        """Return one key or several as a tuple, with abbreviated prefixes expanded."""
        return tuple(self.whole(key) for key in ([keys] if isinstance(keys, str) else keys))


class _Keys(ast.NodeTransformer):
    """Replaces key names in an expression's syntax tree by look-ups."""

    def __init__(self, names: Names, known: frozenset[str], text: str) -> None:
        self.names, self.known, self.text = names, known, text
        self.read: list[str] = []

    def key(self, node: ast.expr) -> str | None:
        """Return the key that an expression spells; None if it spells none."""
        dotted = ast.unparse(node)
        if not re.fullmatch(r"[\w.]+", dotted) or dotted[0].isdigit():
            return None
        key = self.names.whole(dotted)
        return key if key in self.names.keys else None

    def found(self, key: str) -> ast.expr:
        if key not in self.read:
            self.read.append(key)
        return ast.Constant(key)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id in _OF_KEYS:
            for at, one in enumerate(node.args):
                key = self.key(one)
                if key is None:
                    raise ValueError(f"{ast.unparse(one)} in {self.text!r} is no key of the table")
                node.args[at] = self.found(key)
            return node
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        key = self.key(node)
        if key is None:
            return self.generic_visit(node)
        return ast.Call(ast.Name("_value", ast.Load()), [self.found(key)], [])

    def visit_Name(self, node: ast.Name) -> ast.AST:
        key = self.key(node)
        if key is not None and node.id not in self.known:
            return ast.Call(ast.Name("_value", ast.Load()), [self.found(key)], [])
        own = {*_FUNCTIONS, *_OF_WORK, *self.known}
        if isinstance(node.ctx, ast.Load) and node.id not in own:
            raise ValueError(f"{node.id} in {self.text!r} is neither a key nor a name of the table")
        return node


class Expression:
    """A compiled Python expression over another system's keys, as mapping tables contain them.

    Raises:
        ValueError: The expression uses a name that the table does not have.
    """

    def __init__(self, text: Any, names: Names, known: Mapping[str, tuple[str, ...]]) -> None:
        self.text = str(text)
        tree = ast.parse(self.text.strip(), mode="eval")
        bound = {
            n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        }
        named = [n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id in known]
        seen = _Keys(names, frozenset(known) | bound, self.text)
        made = ast.fix_missing_locations(seen.visit(tree))
        self.code: CodeType = compile(made, "<table>", "eval")
        self.keys: tuple[str, ...] = tuple(seen.read)
        """The source's keys that the expression reads, in order."""
        self.behind: tuple[str, ...] = (*seen.read, *(key for name in named for key in known[name]))
        """The keys that the expression reads, directly or through names defined by `let`."""

    def of(self, work: Work) -> Any:
        """Evaluate the expression on the values of an import."""
        functions = {
            "_value": work.__getitem__,
            "whole": work.whole,
            "number": work.number,
            "on": work.flag,
            "text": work.text,
            "said": work.is_said,
            "word": lambda key: str(work[key]).lower(),
            "refused": lambda key: (
                key in work.entries and work.entries[key].status == "not carried"
            ),
            "pair": work.pair,
            "has": work.said.__contains__,
            "share": partial(optimizing.share_of, work),
            "devices": work.devices,
            "total_steps": work.total_steps,
            "run": work.run,
        }
        names = {"__builtins__": {}, **_FUNCTIONS, **functions, **work.named}
        try:
            # The tables are part of the package; nothing that a person gives is evaluated.
            return eval(self.code, names)
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            said = [one for one in dict.fromkeys(self.behind) if one in work.said]
            if isinstance(error, ConfigError) or not said:
                raise
            others = f" (or {', '.join(said[1:])})" if said[1:] else ""
            raise work.problem(
                said[0], f"it{others} is not of the kind that belongs there"
            ) from None


class _Reader:
    """Builds the rules of one program from the rows of its table."""

    def __init__(self, spec: Mapping[str, Any], keys: frozenset[str]) -> None:
        self.spec = spec
        self.keys = keys
        self.let: dict[str, tuple[str, ...]] = {}
        self.targets: list[str] = []

    def rules(self, rows: Sequence[Any], short: Mapping[str, str]) -> Iterator[KeyRule]:
        names = Names(short=short, keys=self.keys)
        for row in rows:
            if "use" in row:
                own = {**short, **row.get("short", {})}
                yield from self.rules(self.spec["blocks"][row["use"]], own)
            elif "same" in row:
                yield same(names.whole(row["same"]), row["to"], row.get("how", "as it is"))
            elif "unneeded" in row:
                yield unneeded(row["why"], *names.all(row["unneeded"]))
            elif "absent" in row:
                off = row.get("fine", (None, False, 0, ""))
                yield absent(row["why"], *names.all(row["absent"]), off=off)
            else:
                self.targets = []
                do = self.steps(row["do"], names)
                yield KeyRule(
                    keys=names.all(row["keys"]),
                    to=tuple(dict.fromkeys(self.targets)),
                    how=row["how"],
                    convert=do,
                )

    def steps(self, specs: Sequence[Mapping[str, Any]], names: Names) -> Step:
        done = [self.step(spec, names) for spec in specs]

        def convert(work: Work) -> None:
            for one in done:
                one(work)

        return convert

    def step(self, spec: Mapping[str, Any], names: Names) -> Step:
        act = self.act(spec, names)
        other = self.steps(spec.get("else", ()), names)
        if "if" not in spec:
            return act
        condition = Expression(spec["if"], names, self.let)

        def convert(work: Work) -> None:
            (act if condition.of(work) else other)(work)

        return convert

    def act(self, spec: Mapping[str, Any], names: Names) -> Step:
        if "set" in spec:
            return self.setting(spec, names)
        if "let" in spec:
            found = []
            for name, text in spec["let"].items():
                found.append((name, Expression(text, names, self.let)))
                self.let[name] = found[-1][1].behind

            def bind(work: Work) -> None:
                for name, value in found:
                    work.named[name] = value.of(work)

            return bind
        if "do" in spec:
            return self.steps(spec["do"], names)
        if "steps" in spec:
            own = Names(short={**names.short, **spec.get("short", {})}, keys=names.keys)
            return self.steps(self.spec["blocks"][spec["steps"]], own)
        if "call" in spec:
            return self.calling(spec, names)
        kind = next(kind for kind in ("refuse", "skip", "note", "error") if kind in spec)
        keys, why = names.all(spec[kind]), self.filling(spec["why"], names)

        def tell(work: Work) -> None:
            text = why(work)
            if kind == "error":
                raise work.problem(keys[0], text)
            if kind == "skip":
                for key in work.said_of(keys):
                    work.unneeded(key, text)
                return
            for key in keys:
                (work.refuse if kind == "refuse" else work.note)(key, text)

        return tell

    def setting(self, spec: Mapping[str, Any], names: Names) -> Step:
        value = Expression(spec["to"], names, self.let)
        self.targets.append(spec["set"])
        by = self.deciding(spec["by"], names) if "by" in spec else lambda work: value.keys
        how, origin = self.filling(spec.get("how", ""), names), spec.get("origin", "")

        def put(work: Work) -> None:
            work.put(spec["set"], value.of(work), by=by(work), how=how(work), origin=origin)

        return put

    def deciding(self, by: Any, names: Names) -> Callable[[Work], Sequence[str]]:
        """Build a function that returns the deciding keys, from keys or an expression after `=`."""
        if isinstance(by, str) and by.startswith("="):
            return Expression(by[1:], names, self.let).of
        keys = names.all(by)
        return lambda work: keys

    def calling(self, spec: Mapping[str, Any], names: Names) -> Step:
        """Build a step that calls a Python conversion with keys, or with expressions after `=`."""
        function, targets = optimizing.RULES[spec["call"]]
        self.targets += targets
        given: dict[str, Any] = {}
        for name, given_as in spec.items():
            if name in ("call", "if", "else"):
                continue
            if isinstance(given_as, str) and given_as.startswith("="):
                given[name] = Expression(given_as[1:], names, self.let)
            else:
                given[name] = (
                    names.whole(given_as) if isinstance(given_as, str) else names.all(given_as)
                )

        def convert(work: Work) -> None:
            function(
                work,
                **{
                    name: one.of(work) if isinstance(one, Expression) else one
                    for name, one in given.items()
                },
            )

        return convert

    def filling(self, text: str, names: Names) -> Callable[[Work], str]:
        """Build a function that fills the expressions in braces in a text."""
        parts = {
            found[0]: Expression(found[1], names, self.let) for found in _IN_TEXT.finditer(text)
        }

        def filled(work: Work) -> str:
            return _IN_TEXT.sub(lambda found: str(parts[found[0]].of(work)), text)

        return filled


def _keys_of(rows: Sequence[Any], spec: Mapping[str, Any], names: Names) -> Iterator[str]:
    for row in rows:
        if "use" in row:
            own = Names(short={**names.short, **row.get("short", {})})
            yield from _keys_of(spec["blocks"][row["use"]], spec, own)
            continue
        keys = next(row[kind] for kind in ("same", "absent", "unneeded", "keys") if kind in row)
        yield from names.all(keys)


@cache
def read_tables(system: str) -> Mapping[Kind, MappingTable]:
    """Read the mapping tables of a system from YAML, by the kind of run they convert to.

    Raises:
        ValueError: A row refers to a name that the table lacks, or is of an unknown kind.
    """
    text = files(__package__).joinpath(f"{system}.yaml").read_text(encoding="utf-8")
    spec = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return {run: _table(spec, program) for run, program in spec["programs"].items()}


def _table(spec: Mapping[str, Any], program: Mapping[str, Any]) -> MappingTable:
    short = {**spec.get("short", {}), **program.get("short", {})}
    names = Names(short=short)
    keys = frozenset(_keys_of(program["rows"], spec, names))

    def whole(mappings: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for one in mappings if isinstance(mappings, list) else [mappings]:
            found |= {names.whole(key): value for key, value in one.items()}
        return found

    others = whole(program.get("other_names", {}))
    return MappingTable(
        rules=tuple(_Reader(spec, keys).rules(program["rows"], short)),
        defaults=whole(program["defaults"]),
        own_keys=frozenset(names.all(program["own_keys"])),
        other_names={old: names.whole(new) for old, new in others.items()},
    )
