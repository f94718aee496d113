"""The form of the code in figures, against the bars that were set for it: `make house`.

Counts come from the sources; the modules of a step, and those that only its metrics, logs and
alarms run, are traced in two runs of seconds on the CPU (`--no-trace` leaves them out). The exit
code is 1 where a bar that was met is no longer met.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "laurel"
OF_RUNS = ("config", "run", "cli", "grpo", "training", "extensions")
"""Rooms that may be given the configuration of a whole run."""

# A run of each kind that takes seconds: a model of one layer, three steps.
TINY = {
    "policy": {
        "model_name": None,
        "scratch": {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 320},
        "precision": "float32",
        "max_total_sequence_length": 64,
        "train_global_batch_size": 8,
    },
    "cluster": {"cpu_threads": 1, "device": "cpu"},
    "data": {"train_data_path": "rows.jsonl", "split_validation_size": 0.25},
}
RUNS: dict[str, dict[str, dict[str, Any]]] = {
    "grpo": {
        "grpo": {
            "num_prompts_per_step": 2,
            "num_generations_per_prompt": 4,
            "max_num_steps": 3,
            "val_period": 0,
            "val_at_end": False,
        },
        "policy": {"generation": {"backend": "transformers", "max_new_tokens": 4}},
        "data": {"dataset_name": "ResponseDataset", "env_name": "math"},
    },
    "rm": {"rm": {"max_num_steps": 3, "val_period": 0}},
}
ROWS = {
    "grpo": [{"input": f"What is {i} + 1?", "output": str(i + 1)} for i in range(24)],
    "rm": [{"prompt": f"question {i}?", "chosen": "good", "rejected": "bad"} for i in range(24)],
}
LOOPS = {
    "grpo": ("laurel.grpo.loop", "GRPO"),
    "rm": ("laurel.training.reward_model", "RewardTraining"),
}

# Follows the calls of functions of Laurel: before the loop, in the second step, and then in its
# metrics, in what is logged and in alarms.
TRACER = """
import importlib, inspect, itertools, json, sys, threading
import laurel
root = laurel.__path__[0] + "/"
which, module, name, config, out = sys.argv[1:]
phase, seen = "before", {"before": set(), "step": set(), "metrics": set(), "off": set()}
def follow(frame, event, _):
    code = frame.f_code
    # The bodies of modules and classes run at their import, whenever that is, and are no functions.
    is_function = code.co_flags & inspect.CO_OPTIMIZED
    if event == "call" and is_function and code.co_filename.startswith(root):
        seen[phase].add(code.co_filename[len(root):])
loop = getattr(importlib.import_module(module), name)
take_step, taken = loop.step, 0
def step(self, progress):
    global phase, taken
    taken += 1
    phase = "step" if taken == 2 else "off"
    sys.setprofile(follow)
    try:
        return take_step(self, progress)
    finally:
        phase = "metrics" if taken == 2 else "off"
loop.step = step
# On a busy machine a step would take long enough for a line of progress.
importlib.import_module("laurel.observe.progress")._SECONDS_BETWEEN_LINES = float("inf")
# Answers of random weights are all wrong, and a step without advantages would update nothing.
turn = itertools.count()
def every_other(self, *args, **kwargs):
    graded = grade(self, *args, **kwargs)
    return graded._replace(rewards=[float(next(turn) % 2) for _ in graded.rewards])
environment = importlib.import_module("laurel.extensions.math.environment").MathEnvironment
grade, environment.step = environment.step, every_other
all_of_step = loop.take_step
def step_and_metrics(self, progress):
    global phase
    try:
        return all_of_step(self, progress)
    finally:
        phase = "off"
loop.take_step = step_and_metrics
from laurel.cli.main import main
sys.argv = ["laurel", which, "--config", config]
threading.setprofile(follow)
sys.setprofile(follow)
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
sys.setprofile(None)
# On a busy machine a step may wait and ask the loop around it whether to stop; on a quiet one not.
# The loop itself, which times and logs each step, counts among what runs before.
seen["step"] -= {"training/loop.py"}
seen["metrics"] -= {"training/loop.py"} | seen["step"]
seen["before"] -= seen["step"] | seen["metrics"]
with open(out, "w") as file:
    json.dump({name: sorted(seen[name]) for name in ("step", "metrics", "before")}, file)
"""


@dataclass(frozen=True)
class Bar:
    """A figure, what it is to be at most, and what it counts."""

    name: str
    value: int
    most: int
    held: bool
    """Whether it was met and must stay so."""
    where: tuple[str, ...] = ()

    @property
    def is_met(self) -> bool:
        """Whether the value is no higher than it may be."""
        return self.value <= self.most


class House:
    """The sources of the package, parsed once."""

    def __init__(self, package: Path = PACKAGE) -> None:
        self.trees: dict[str, ast.Module] = {}
        self.texts: dict[str, str] = {}
        for path in sorted(package.rglob("*.py")):
            name = path.relative_to(package).as_posix()
            self.texts[name] = path.read_text(encoding="utf-8")
            self.trees[name] = ast.parse(self.texts[name])
        self.modules = [name for name in self.trees if not name.endswith("__init__.py")]
        self.imports = {name: set(self._imports(name)) - {name} for name in self.modules}

    def _imports(self, name: str) -> Iterator[str]:
        for node in ast.walk(self.trees[name]):
            asked: list[str] = []
            if isinstance(node, ast.Import):
                asked = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                asked = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for module in asked:
                path = module.removeprefix("laurel.").replace(".", "/") + ".py"
                if module.startswith("laurel.") and path in self.trees:
                    yield path

    def circles(self) -> list[list[str]]:
        """Modules that import each other in a circle (Tarjan's algorithm)."""
        index: dict[str, int] = {}
        low: dict[str, int] = {}
        stack: list[str] = []
        found = []

        def visit(name: str) -> None:
            index[name] = low[name] = len(index)
            stack.append(name)
            for other in self.imports[name] & self.imports.keys():
                if other not in index:
                    visit(other)
                    low[name] = min(low[name], low[other])
                elif other in stack:
                    low[name] = min(low[name], index[other])
            if low[name] == index[name]:
                circle = stack[stack.index(name) :]
                del stack[stack.index(name) :]
                if len(circle) > 1:
                    found.append(sorted(circle))

        for name in self.modules:
            if name not in index:
                visit(name)
        return found

    def visited_by_the_run(self) -> list[str]:
        """Modules in which a signature takes the configuration of a run, or of its policy."""
        return [
            name
            for name in self.modules
            if any(_takes_a_run(node) for node in ast.walk(self.trees[name]))
        ]

    def names_defined_twice(self) -> list[str]:
        """Public classes and functions of modules that have a namesake."""
        count = Counter(
            node.name
            for name in self.modules
            for node in self.trees[name].body
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and not node.name.startswith("_")
            # What another program calls by its name: `main` of programs.
            and node.name != "main"
        )
        return sorted(name for name, number in count.items() if number > 1)

    def private_functions_named_once(self) -> list[str]:
        """Private functions and methods whose name occurs once besides where they are defined."""
        words = Counter(word for text in self.texts.values() for word in re.findall(r"\w+", text))
        return [
            f"{name}:{node.lineno} {node.name}"
            for name, tree in self.trees.items()
            for scope in _scopes(tree)
            for node in scope.body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and re.match("_[^_]", node.name)
            and words[node.name] == 2
        ]

    def functions(self) -> Iterator[tuple[str, int, int]]:
        """Every function, with its lines and its parameters besides `self` and `cls`."""
        for name, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    of = node.args
                    known = [one.arg for one in (*of.posonlyargs, *of.args, *of.kwonlyargs)]
                    parameters = [one for one in known if one not in ("self", "cls")]
                    length = (node.end_lineno or node.lineno) - node.lineno + 1
                    yield f"{name}:{node.lineno} {node.name}", length, len(parameters)

    def skips(self) -> list[str]:
        """Lines that the formatter leaves as they are."""
        return [
            f"{name}:{number}"
            for name, text in self.texts.items()
            for number, line in enumerate(text.splitlines(), 1)
            if re.search(r"# fmt: (skip|off)", line)
        ]


def _scopes(tree: ast.Module) -> Iterator[ast.Module | ast.ClassDef]:
    yield tree
    yield from (part for part in tree.body if isinstance(part, ast.ClassDef))


def _takes_a_run(node: ast.AST) -> bool:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    names = {
        part.id
        if isinstance(part, ast.Name)
        else part.attr
        if isinstance(part, ast.Attribute)
        else ""
        for argument in given
        if argument.annotation is not None
        for part in ast.walk(argument.annotation)
    }
    return any(re.fullmatch(r"\w*Run|PolicyConfig", name) for name in names)


def leaf_keys(section: Any, path: str) -> Iterator[str]:
    """The keys without keys of their own that a section may have, those of our plug-ins too.

    A section counts at each place where it may stand, in the form (alone, in a list, by name) that
    it has there; what is written otherwise and read as that form is one with it.
    """
    from laurel.config.plugged import OpenSection
    from laurel.config.schema_info import is_mapping, item_kinds, kinds_of, sections_of

    def places(kinds: Any, here: str) -> Iterator[tuple[Any, str]]:
        yield from ((one, here) for one in dict.fromkeys(sections_of(kinds)))
        for kind in kinds:
            inside = item_kinds(kind) or ()
            yield from places(inside, here + (".NAME" if is_mapping(kind) else "[]"))

    fields = dict(section.model_fields)
    if issubclass(section, OpenSection):
        fields |= dict(section.all_plugged_in())
    for name, field in fields.items():
        below = list(places(kinds_of(field.annotation), f"{path}.{name}"))
        if not below and name in section.model_fields:
            yield f"{path}.{name}"
        for one, here in below:
            if one.__module__.startswith("laurel."):
                yield from leaf_keys(one, here)


def trace(which: str) -> dict[str, list[str]]:
    """The modules whose functions ran in the second step, then in its metrics, or only before."""
    module, name = LOOPS[which]
    with tempfile.TemporaryDirectory() as folder:
        config = json.loads(json.dumps(TINY))
        for section, settings in RUNS[which].items():
            config.setdefault(section, {}).update(settings)
        Path(folder, "config.yaml").write_text(json.dumps(config), encoding="utf-8")
        rows = "".join(f"{json.dumps(row)}\n" for row in ROWS[which])
        Path(folder, "rows.jsonl").write_text(rows, encoding="utf-8")
        Path(folder, "tracer.py").write_text(TRACER, encoding="utf-8")
        out = Path(folder, "out.json")
        done = subprocess.run(
            [sys.executable, "tracer.py", which, module, name, "config.yaml", str(out)],
            cwd=folder,
            capture_output=True,
            text=True,
            env={**os.environ, "COLUMNS": "100"},
            check=False,
        )
        if done.returncode:
            raise SystemExit(
                f"the run of {which} to be traced failed:\n{done.stdout}\n{done.stderr}"
            )
        (log,) = Path(folder).rglob("metrics.jsonl")
        lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        if not any(line["step"] == 2 and line.get("train/grad_norm") for line in lines):
            raise SystemExit(f"the traced step of {which} has updated nothing")
        found: dict[str, list[str]] = json.loads(out.read_text(encoding="utf-8"))
        return found


def bars(*, traced: bool = True) -> list[Bar]:
    """All figures of the house."""
    from laurel.config.schemas import SCHEMAS

    house = House()
    circles = house.circles()
    visited = house.visited_by_the_run()
    strangers = [name for name in visited if name.split("/")[0] not in OF_RUNS]
    skips, twice = house.skips(), house.names_defined_twice()
    once = house.private_functions_named_once()
    long = tuple(name for name, length, _ in house.functions() if length > 80)
    wide = tuple(name for name, _, parameters in house.functions() if parameters > 8)
    thousands = lines(house.texts.values()) / 1000
    found = [
        Bar("circles of imports", len(circles), 0, held=True, where=tuple(map(" ".join, circles))),
        Bar("# fmt: skip", len(skips), 0, held=True, where=tuple(skips)),
        Bar("files a run's configuration visits", len(visited), 15, True, tuple(visited)),
        Bar("of these outside of the rooms of runs", len(strangers), 0, True, tuple(strangers)),
        Bar("public names defined more than once", len(twice), 10, True, tuple(twice)),
        Bar("functions of more than 80 lines", len(long), 4, True, long),
        Bar("functions of more than 8 parameters", len(wide), 12, True, wide),
        # At most 4 per 1,000 lines.
        Bar("private functions named once", len(once), int(4 * thousands), False, tuple(once)),
    ]
    core = [text for name, text in house.texts.items() if not name.startswith("extensions/")]
    tests = [file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("*.py")]
    found += [
        Bar("lines of the core", lines(core), 45_000, held=False),
        Bar("lines with extensions", lines(house.texts.values()), 78_000, held=False),
        Bar("lines of tests", lines(tests), 64_000, held=False),
    ]
    for which, most in (("grpo", 420), ("rm", 180)):
        keys = tuple(key.lstrip(".") for key in leaf_keys(SCHEMAS[which], ""))
        found.append(Bar(f"leaf keys of {which}", len(keys), most, held=True, where=keys))
    if traced:
        modules = {"grpo": (25, 7, 42), "rm": (9, 3, 36)}
        for which, at_most in modules.items():
            run = trace(which)
            names = (
                f"modules that run in a step of {which}",
                f"more that run for its metrics, {which}",
                f"more that run before, {which}",
            )
            parts = (tuple(run[phase]) for phase in ("step", "metrics", "before"))
            found += [
                Bar(name, len(part), bar, True, part)
                for name, part, bar in zip(names, parts, at_most, strict=True)
            ]
    return found


def lines(texts: Iterable[str]) -> int:
    """Count the lines of texts."""
    return sum(text.count("\n") for text in texts)


def main() -> int:
    """Print the table; 1 where a bar is broken that was met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--no-trace", action="store_true", help="only what the sources tell")
    parser.add_argument("--where", action="store_true", help="name what was counted")
    asked = parser.parse_args()
    found = bars(traced=not asked.no_trace)
    print(f"{'figure':46} {'now':>5} {'bar':>5}")
    for bar in found:
        print(f"{bar.name:46} {bar.value:5} {bar.most:5}  {'met' if bar.is_met else 'not met'}")
        if asked.where or (bar.held and not bar.is_met):
            for place in bar.where:
                print(f"    {place}")
    return int(any(bar.held and not bar.is_met for bar in found))


if __name__ == "__main__":
    sys.exit(main())
