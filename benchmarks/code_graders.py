"""Does Laurel judge rows of APPS, TACO, LiveCodeBench and verl as their own graders do?

    python benchmarks/code_graders.py [--peer-checkouts DIR]

`code_grader_rows.yaml` holds answers to 60 rows and which graders accept each of them. Each
difference to that is printed. With checkouts (see `peers/peer_code_graders.py`) the graders are
run as well, and what they say is compared with what is written down: without a sandbox.
"""

from __future__ import annotations

import argparse
import base64
import json
import pickle
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent))

from rounds import machine, table

from laurel.extensions.code.environment import CodeEnvironment
from laurel.extensions.code.formats import code_task

ROWS = Path(__file__).parent / "code_grader_rows.yaml"
WORKER = Path(__file__).parent / "peers" / "peer_code_graders.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A program for a row, and what is known of it."""

    benchmark: str
    kind: str
    """stdio, function or class."""
    name: str
    row: Mapping[str, Any]
    """In the benchmark's own format."""
    program: str
    accepted_there: bool
    accepted_here: bool
    why: str
    """Of one that is judged otherwise here on purpose."""

    @property
    def words(self) -> str:
        return f"{self.benchmark} {self.kind} {self.name}: {self.program!r}"


def answers(kind: str | None = None) -> list[Answer]:
    """All answers, one row after the other; of one kind of rows where one is named."""
    found = []
    for number, question in enumerate(yaml.safe_load(ROWS.read_text(encoding="utf-8"))):
        if kind not in (None, question["kind"]):
            continue
        for benchmark in question["benchmarks"]:
            row = ROW_OF[benchmark](question, number)
            for one in question["answers"]:
                there = benchmark in one["accepted_by"]
                found.append(
                    Answer(
                        benchmark=benchmark,
                        kind=question["kind"],
                        name=question["name"],
                        row=row,
                        program=one["program"],
                        accepted_there=there,
                        accepted_here=one.get("accepted_here", there),
                        why=one.get("why", ""),
                    )
                )
    return found


def apps(question: Mapping[str, Any], number: int) -> dict[str, Any]:
    return {
        "problem_id": 9000 + number,
        "question": question["question"],
        "solutions": solutions(question),
        "input_output": json.dumps(inputs_outputs(question)),
        "difficulty": "introductory",
        "url": "",
        "starter_code": question.get("starter_code", ""),
    }


def taco(question: Mapping[str, Any], number: int) -> dict[str, Any]:
    return {
        "question": question["question"],
        "solutions": solutions(question),
        "starter_code": question.get("starter_code", ""),
        "input_output": json.dumps(inputs_outputs(question)),
        "difficulty": "EASY",
        "raw_tags": "[]",
        "tags": "[]",
        "skill_types": "[]",
        "name": None,
        "source": "own",
        "url": None,
        "Expected Auxiliary Space": None,
        "Expected Time Complexity": None,
        "time_limit": None,
        "memory_limit": None,
        "date": None,
        "picture_num": None,
    }


def livecodebench(question: Mapping[str, Any], number: int) -> dict[str, Any]:
    if function := question.get("function"):
        cases = [
            {
                "input": json_lines(one["args"]),
                "output": json.dumps(one["value"]),
                "testtype": "functional",
            }
            for one in question["tests"]
        ]
    else:
        cases = [
            {"input": one["stdin"], "output": one["stdout"], "testtype": "stdin"}
            for one in question["tests"]
        ]
    packed = zlib.compress(pickle.dumps(json.dumps(cases[1:])))
    return {
        "question_title": question["name"],
        "question_content": question["question"],
        "platform": "leetcode" if function else "atcoder",
        "question_id": f"own_{number}",
        "contest_id": "own",
        "contest_date": "2026-11-01T00:00:00",
        "starter_code": question.get("starter_code", ""),
        "difficulty": "easy",
        "public_test_cases": json.dumps(cases[:1]),
        "private_test_cases": base64.b64encode(packed).decode(),
        "metadata": json.dumps({"func_name": function} if function else {}),
    }


def verl(question: Mapping[str, Any], number: int) -> dict[str, Any]:
    truth: dict[str, Any] = inputs_outputs(question)
    if function := question.get("function"):
        truth = {
            "fn_name": function,
            "inputs": [json_lines(one["args"]) for one in question["tests"]],
            "outputs": [json.dumps(one["value"]) for one in question["tests"]],
        }
    asked = "\n\n".join(
        part for part in (question["question"], question.get("starter_code", "")) if part
    )
    return {
        "data_source": "taco" if function else "codeforces",
        "prompt": [
            {"role": "system", "content": "Write the program that is asked for."},
            {"role": "user", "content": asked},
        ],
        "ability": "code",
        "reward_model": {"ground_truth": json.dumps(truth), "style": "rule"},
        "extra_info": {"index": number, "split": "train"},
    }


ROW_OF = {"apps": apps, "taco": taco, "livecodebench": livecodebench, "verl": verl}


def inputs_outputs(question: Mapping[str, Any]) -> dict[str, Any]:
    tests = question["tests"]
    if "function" not in question:
        return {
            "inputs": [one["stdin"] for one in tests],
            "outputs": [one["stdout"] for one in tests],
        }
    in_lists = question.get("values_in_lists", True)
    return {
        "fn_name": question["function"],
        "inputs": [one["args"] for one in tests],
        "outputs": [[one["value"]] if in_lists else one["value"] for one in tests],
    }


def json_lines(args: Sequence[Any]) -> str:
    return "\n".join(map(json.dumps, args))


def solutions(question: Mapping[str, Any]) -> str:
    return json.dumps([question["answers"][0]["program"]])


def judged_here(asked: Sequence[Answer], environment: CodeEnvironment) -> list[bool | str]:
    """Whether each is right to the environment; or why it says nothing."""
    logs = [
        [
            {"role": "user", "content": "Write it."},
            {"role": "assistant", "content": f"```python\n{one.program}```"},
        ]
        for one in asked
    ]
    metadata = [dict(code_task(one.row).metadata) for one in asked]
    returned = environment.step(logs, metadata)
    assert returned.failures is not None
    return [
        failure if failure is not None else reward == 1.0
        for reward, failure in zip(returned.rewards.tolist(), returned.failures, strict=True)
    ]


def differences(asked: Sequence[Answer], verdicts: Sequence[bool | str]) -> list[str]:
    """The answers that are not judged as they have to be, in words."""
    return [
        f"{one.words}: {verdict}, not {one.accepted_here}"
        for one, verdict in zip(asked, verdicts, strict=True)
        if verdict is not one.accepted_here
    ]


def judged_there(asked: Sequence[Answer], checkouts: Path) -> list[bool]:
    """What the graders themselves say."""
    questions = "".join(
        json.dumps({"benchmark": one.benchmark, "row": one.row, "program": one.program}) + "\n"
        for one in asked
    )
    done = subprocess.run(
        [sys.executable, str(WORKER), str(checkouts)],
        input=questions,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description="Verdicts here, and those of other graders.")
    parser.add_argument("--peer-checkouts", type=Path, help="run the graders themselves, too")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    asked = answers()
    print(machine())
    environment = CodeEnvironment({"num_workers": 2, "sandbox": {"min_tier": "D"}})
    began = time.monotonic()
    try:
        here = judged_here(asked, environment)
    finally:
        environment.shutdown()
    print(f"{len(asked)} answers in {time.monotonic() - began:.1f} s")
    wrong = differences(asked, here)
    same = Counter(
        (one.benchmark, one.kind)
        for one, verdict in zip(asked, here, strict=True)
        if verdict is one.accepted_there
    )
    meant = Counter(
        (one.benchmark, one.kind) for one in asked if one.accepted_here is not one.accepted_there
    )
    all_of = Counter((one.benchmark, one.kind) for one in asked)
    print(
        table(
            ["benchmark", "rows of", "answers", "as its grader", "otherwise on purpose"],
            [
                [
                    benchmark,
                    kind,
                    str(count),
                    str(same[benchmark, kind]),
                    str(meant[benchmark, kind]),
                ]
                for (benchmark, kind), count in sorted(all_of.items())
            ],
            as_markdown=options.markdown,
        )
    )
    if options.peer_checkouts is not None:
        there = judged_there(asked, options.peer_checkouts)
        wrong += [
            f"{one.words}: its grader says {said}, and {one.accepted_there} is written down"
            for one, said in zip(asked, there, strict=True)
            if said is not one.accepted_there
        ]
        print(f"{len(there)} verdicts of the graders themselves")
    print("\n".join(wrong) or "no difference")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
