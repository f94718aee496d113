"""How many of NeMo RL's own configuration files Laurel loads and plans, and why it refuses others.

`python tools/nemo_rl_files.py CHECKOUT [CHECKOUT ...] [--causes]`, where each CHECKOUT is a
directory with a work tree of NeMo RL (`git worktree add ../v0.5.0 v0.5.0`); its name is the column
"version". Every file below `examples/configs` that says what is trained goes through the loader
and planner that `laurel rm`, `sft` and `grpo` use; nothing is downloaded or started.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from laurel.config.grpo_run import GRPORun
from laurel.config.load import load_config
from laurel.config.reward_model import RewardTrainingRun
from laurel.config.schemas import SCHEMAS, Kind, Run
from laurel.config.yaml_tree import MISSING, find_node, plain_values, read_file
from laurel.errors import ConfigError
from laurel.run.request import plan_allocation
from laurel.training.stopping import select_by, select_demonstrations_by, select_policy_by

KINDS: tuple[Kind, ...] = ("rm", "grpo", "sft")
OTHERS = ("dpo", "distillation", "ppo")
"""Sections of algorithms that Laurel does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one file."""

    path: Path
    kind: str
    """`rm`, `grpo`, `sft`, or the section of an algorithm that Laurel does not have."""
    is_megatron: bool
    problems: tuple[str, ...] = ()
    """Empty: it loads and plans."""
    feature: str = ""
    """The feature that it is refused for, where Laurel says that it has none such."""


def outcomes(checkout: Path) -> Iterator[Outcome]:
    """What becomes of each file of a checkout that says what is trained."""
    for path in sorted((checkout / "examples" / "configs").rglob("*.yaml")):
        try:
            tree = read_file(path)
        except ConfigError as error:
            yield Outcome(path=path, kind="unread", is_megatron=False, problems=(str(error),))
            continue
        kind = next((k for k in (*OTHERS, *KINDS) if k in tree.value), None)
        if kind is None or "policy" not in tree.value:
            continue
        switch = find_node(tree, ("policy", "megatron_cfg", "enabled"))
        is_megatron = switch is not None and switch.value is True
        problems = tuple(_problems(path, kind if kind in KINDS else "rm"))
        features = [_FEATURE.search(problem) for problem in problems]
        yield Outcome(
            path=path,
            kind=kind,
            is_megatron=is_megatron,
            problems=problems,
            feature=next((found[1] for found in features if found), ""),
        )


_FEATURE = re.compile(r"Laurel has no ([^:;.,]+)")


def _problems(path: Path, kind: Kind) -> list[str]:
    try:
        config = cast(Run, load_config(SCHEMAS[kind], path).config)
        plan_allocation(config)
        _check_metric(config)
    except ConfigError as error:
        _, several, rest = str(error).partition(" problems in the configuration:\n")
        return [line.strip() for line in rest.splitlines()] if several else [str(error)]
    return []


def _check_metric(config: Run) -> None:
    """Refuse a file that would select checkpoints by what its run never measures."""
    chosen = config.checkpointing
    if isinstance(config, GRPORun):
        select_policy_by(
            chosen.metric_name,
            chosen.higher_is_better,
            has_validation=True,
            environments=config.env.names(),
        )
        return
    select = select_by if isinstance(config, RewardTrainingRun) else select_demonstrations_by
    select(chosen.metric_name, chosen.higher_is_better, sets=["default"])


def cause_of(problem: str) -> str:
    """A problem without the file, line and numbers of one case."""
    without_place = re.sub(r"^\S+\.yaml(:\d+)?: ", "", problem)
    return re.sub(r"\d+(\.\d+)?", "N", without_place)[:160]


def _cell(found: Sequence[Outcome]) -> str:
    """Loaded / refused by a feature's name / refused otherwise."""
    loaded = sum(not one.problems for one in found)
    named = sum(bool(one.problems and one.feature) for one in found)
    return f"{loaded} / {named} / {len(found) - loaded - named}" if found else "–"


def table(of_version: dict[str, list[Outcome]]) -> str:
    """The table, in Markdown."""
    rows = [
        "| version | rm | grpo | sft | Megatron: grpo, sft | other algorithms |",
        "|---|---|---|---|---|---|",
    ]
    for version, all_of_it in of_version.items():
        dtensor = [one for one in all_of_it if not one.is_megatron]
        cells = [_cell([one for one in dtensor if one.kind == kind]) for kind in KINDS]
        cells.append(_cell([one for one in all_of_it if one.is_megatron and one.kind in KINDS]))
        cells.append(_cell([one for one in all_of_it if one.kind not in KINDS]))
        rows.append(f"| {version} | {' | '.join(cells)} |")
    return "\n".join(rows)


def causes(found: Sequence[Outcome], *, named: bool) -> str:
    """Why files are refused, the most frequent first."""
    refused = [one for one in found if one.problems and bool(one.feature) == named]
    counted: Counter[str] = Counter()
    example: dict[str, Path] = {}
    for one in refused:
        for cause in {one.feature} if named else {cause_of(problem) for problem in one.problems}:
            counted[cause] += 1
            example.setdefault(cause, one.path)
    return "\n".join(
        f"{number:4}  {cause}  [{example[cause].name}]" for cause, number in counted.most_common()
    )


def facts_of(checkout: Path, found: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    """Keys and values of the files of a version, by kind of run, without which file has which.

    `values` are those of files that load, by key, the most frequent first; of plain numbers only
    the most frequent and those that are not above 0. `refused` are the keys and values that ask for
    a feature that Laurel does not have.
    """
    facts: dict[str, dict[str, Any]] = {}
    for one in found:
        if one.kind not in KINDS:
            continue
        name = f"{one.kind}, Megatron" if one.is_megatron else one.kind
        fact = facts.setdefault(name, {"values": {}, "refused": {}})
        if one.problems:
            asked = [_FEATURE_ASKED.search(problem) for problem in one.problems]
            fact["refused"] |= {match[1]: match[2] for match in asked if match}
            continue
        for key, value in _leaves(plain_values(read_file(one.path)), ()):
            values = fact["values"].setdefault(key, Counter())
            values[json.dumps(value, sort_keys=True)] += 1
    for fact in facts.values():
        fact["values"] = {
            key: [json.loads(text) for text in _chosen(key, counted)]
            for key, counted in sorted(fact["values"].items())
        }
    return facts


_FEATURE_ASKED = re.compile(r": ([\w.-]+(?:=[^:]+)?): Laurel has no ([^:;,]+)")


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, child in value.items():
            yield from _leaves(child, (*path, key))
    elif value is not MISSING:
        yield ".".join(path), value


_FREE_TEXT = re.compile(
    r"(^|[._])(name|project|dir|path|paths|file|template|plan|wandb|mlflow|swanlab|tensorboard)$"
)


def _chosen(key: str, counted: Counter[str]) -> list[str]:
    by_frequency = [text for text, _ in counted.most_common()]
    is_free = _FREE_TEXT.search(key) is not None and not key.endswith(
        ("metric_name", "env_name", "dataset_name", "optimizer.name", "adv_estimator.name")
    )
    if is_free:
        return by_frequency[:1]
    return [
        text
        for at, text in enumerate(by_frequency)
        if at == 0 or not re.fullmatch(r"[\d.e+-]+", text) or float(text) <= 0
    ][:4]


def as_lines(of_version: dict[str, dict[str, dict[str, Any]]]) -> Iterator[str]:
    """The facts as text: of each version what differs from the version before.

    `[version] run`, then `key values` in JSON, `-key` for one that is gone, and
    `!key=value: feature` for what is refused.
    """
    before: dict[str, dict[str, Any]] = {}
    for version, facts in of_version.items():
        for run, fact in facts.items():
            old = before.get(run, {"values": {}, "refused": {}})
            yield f"[{version}] {run}"
            for key, values in fact["values"].items():
                if old["values"].get(key) != values:
                    yield f"{key} {json.dumps(values)}"
            yield from (f"-{key}" for key in old["values"] if key not in fact["values"])
            for asked, feature in sorted(fact["refused"].items()):
                if old["refused"].get(asked) != feature:
                    yield f"!{asked}: {feature}"
        before = facts


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and, if asked, the causes; 1 where a file is refused for no named feature."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("checkouts", nargs="+", type=Path, metavar="CHECKOUT")
    parser.add_argument("--causes", action="store_true", help="Why files are refused, by cause.")
    parser.add_argument("--facts", type=Path, metavar="FILE", help="Write the facts for the tests.")
    said: Any = parser.parse_args(arguments)
    of_version = {path.resolve().name: list(outcomes(path)) for path in said.checkouts}
    if said.facts is not None:
        facts = {
            path.resolve().name: facts_of(path, of_version[path.resolve().name])
            for path in said.checkouts
        }
        said.facts.write_text("\n".join(as_lines(facts)) + "\n", encoding="utf-8")
    print("Each cell: loaded and planned / refused for a named feature / refused otherwise\n")
    print(table(of_version))
    for version, found in of_version.items() if said.causes else ():
        print(f"\n{version}: refused for a feature that Laurel does not have")
        print(causes(found, named=True))
        print(f"{version}: refused otherwise")
        print(causes(found, named=False))
    everything = [one for found in of_version.values() for one in found]
    return int(any(one.problems and not one.feature for one in everything))


if __name__ == "__main__":
    sys.exit(main())
