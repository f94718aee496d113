"""The math environment: verdicts, figures, bad known answers, real problems."""

import gzip
import itertools
import json
import os
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

from environment_batches import batch_of, log_of
from laurel.environments.interface import EnvironmentReturn
from laurel.errors import EnvironmentFailedError
from laurel.extensions.math.environment import MathEnvironment
from laurel.extensions.math.settings import MathEnvironmentConfig
from laurel.types import Message, Task

HANG = r"\boxed{\binom{1000000000}{500000000}}"


def known(*golds):
    return [{"ground_truth": gold} for gold in golds]


def task_of(gold, number=0):
    metadata = {} if gold is None else {"ground_truth": gold}
    return Task(
        id=str(number), prompt=(Message("user", "?"),), environment="math", metadata=metadata
    )


@pytest.fixture(scope="module")
def environment():
    with MathEnvironment({"num_workers": 2, "timeout_seconds": 3.0}) as environment:
        yield environment


@pytest.mark.slow
def test_what_a_step_returns(environment):
    logs = [log_of(r"\boxed{42}"), log_of(r"\boxed{43}"), log_of("I give up")]
    given = [{"ground_truth": "42", "level": 3}, {"ground_truth": "42"}, {"ground_truth": "42"}]
    returned = environment.step(logs, given)
    assert isinstance(returned, EnvironmentReturn)
    assert torch.equal(returned.rewards, torch.tensor([1.0, 0.0, 0.0], dtype=torch.float32))
    assert [o["content"] for o in returned.observations] == [
        "Environment: correct",
        "Environment: incorrect",
        "Environment: incorrect",
    ]
    assert {o["role"] for o in returned.observations} == {"environment"}
    assert returned.terminateds.dtype == torch.bool
    assert returned.terminateds.all()
    assert returned.answers == ["42", "43", None]
    assert returned.failures == [None, None, None]
    assert returned.next_stop_strings == [None, None, None]
    assert returned.notes == ["correct", "incorrect", "unparseable"]


@pytest.mark.parametrize(
    ("verifier", "answer", "known_answer"),
    [
        ("math", r"\boxed{42}", "42"),
        ("english_multichoice", "Answer: C", "C"),
        ("multilingual_multichoice", "答案: C", "C"),
    ],
)
def test_metadata_comes_back_as_it_was_given(verifier, answer, known_answer):
    given = [{"ground_truth": known_answer, "level": 3}, {"ground_truth": "B"}, None]
    with MathEnvironment({"num_workers": 1, "verifier_type": verifier}) as environment:
        returned = environment.step([log_of(answer)] * 3, given)
    assert returned.rewards[:2].tolist() == [1.0, 0.0]
    assert returned.metadata == [{"ground_truth": known_answer, "level": 3}, given[1], None]


def test_answers_are_asked_for_as_nemo_rl_does(environment):
    logs = [log_of(r"\boxed{42}"), log_of("I give up"), log_of(r"\boxed{137}")]
    given = [{"ground_truth": "42"}] * 3
    assert environment.step(logs, given, True).answers == ["42", None, "137"]
    assert environment.step(logs, given, False).answers is None


def test_the_answer_is_that_of_all_assistant_messages(environment):
    log = [*log_of(r"\boxed{"), {"role": "environment", "content": "7"}, *log_of("42}")[1:]]
    assert environment.step([log], known("42")).rewards.tolist() == [1.0]


def test_what_needs_a_parser(environment):
    answers = [r"\boxed{x^2+2x+1}", r"The answer is $\frac{6}{4}$.", r"\boxed{\{2,1\}}", "It is 7"]
    golds = ["(x+1)^2", "1.5", r"\{1,2\}", "8"]
    returned = environment.step([log_of(one) for one in answers], known(*golds))
    assert returned.rewards.tolist() == [1.0, 1.0, 1.0, 0.0]
    assert returned.answers[0] == "x^2+2x+1"


def test_a_missing_known_answer_is_a_failure_not_a_zero(environment):
    logs = [log_of(r"\boxed{4}")] * 5
    given = [{"ground_truth": "4"}, None, {}, {"ground_truth": ["4"]}, {"ground_truth": ""}]
    returned = environment.step(logs, given)
    assert returned.rewards[0] == 1.0
    assert [failure is None for failure in returned.failures] == [True] + [False] * 4
    assert "ground_truth is missing" in returned.failures[1]
    assert "ground_truth is list" in returned.failures[3]
    assert "empty" in returned.failures[4]


def test_known_answers_may_be_numbers(environment):
    returned = environment.step(
        [log_of(r"\boxed{0.5}"), log_of(r"\boxed{3}")], [{"ground_truth": 0.5}, {"ground_truth": 3}]
    )
    assert returned.rewards.tolist() == [1.0, 1.0]


def test_metadata_must_fit_the_conversations(environment):
    with pytest.raises(EnvironmentFailedError, match="2 conversations came with metadata for 1"):
        environment.step([log_of("4")] * 2, known("4"))


@pytest.mark.slow
def test_d25_d26_figures_of_a_batch_by_hand(environment):
    answers = [r"\boxed{4}", r"\boxed{5}", r"\boxed{4}", HANG, "no idea", r"\boxed{4}"]
    logs = [log_of(one) for one in answers]
    returned = environment.step(logs, known(*["4"] * 6))
    # The third is right but was cut off: it does not count.
    is_end = torch.tensor([True, True, False, True, True, True])
    batch = batch_of(logs, returned, ["a", "a", "a", "b", "b", "b"], is_end=is_end)
    same, figures = environment.global_post_process_and_metrics(batch)
    assert same is batch
    expected = {
        "accuracy": 2 / 6,
        "pass@samples_per_prompt": 1.0,
        "pass@1": 1 / 3,
        "pass@2": 2 / 3,  # 1 - C(2,2)/C(3,2) in both groups
        "fraction_of_samples_properly_ended": 5 / 6,
        "num_problems_in_batch": 2.0,
        "num_samples": 6.0,
        "num_failures": 0.0,
        "generation_lengths": 350.0,
        "prompt_lengths": 10.0,
        "correct_solution_generation_lengths": 350.0,  # (100 + 600) / 2
        "timeouts": 1.0,
        "unparseable": 1.0,
    }
    assert figures == pytest.approx(expected)


@pytest.mark.slow
def test_known_answers_that_would_not_earn_the_reward_are_listed(environment, monkeypatch):
    golds = ["42", None, "", r"\frac{1}{2}", "x" * 10_001, 7, r"\binom{1000000000}{500000000}"]
    asked = MagicMock(side_effect=environment._checker.pool.submit)
    monkeypatch.setattr(environment._checker.pool, "submit", asked)
    rejected = environment.validate([task_of(gold, i) for i, gold in enumerate(golds * 2)])
    assert [one.task.id for one in rejected] == ["1", "2", "4", "6", "8", "9", "11", "13"]
    assert asked.call_count == 4  # each answer that can be read, once
    reasons = [one.reason for one in rejected]
    assert "is missing" in reasons[0]
    assert "empty" in reasons[1]
    assert "takes more than 3 s" in reasons[3]


def test_d17_multiple_choice_takes_the_last_letter():
    with MathEnvironment({"verifier_type": "english_multichoice"}) as environment:
        logs = [log_of("Answer: A\nAnswer: B"), log_of("Respuesta: B"), log_of("Answer: B")]
        returned = environment.step(logs, known("B", "B", "Berlin"))
        assert returned.rewards[:2].tolist() == [1.0, 0.0]
        assert returned.answers == ["B", None, None]
        assert "not a letter" in returned.failures[2]
    with MathEnvironment({"verifier_type": "multilingual_multichoice"}) as environment:
        assert environment.step([log_of("Respuesta: B")], known("B")).rewards.tolist() == [1.0]


@pytest.mark.slow
def test_stop_strings_go_to_every_turn():
    config = MathEnvironmentConfig(num_workers=2, stop_strings=["</answer>"])
    with MathEnvironment(config) as environment:
        assert environment.spec.stop_strings == ("</answer>",)
        returned = environment.step([log_of("4")] * 2, known("4", "4"))
        assert returned.next_stop_strings == [["</answer>"], ["</answer>"]]


def test_after_shutdown_nothing_can_be_checked():
    environment = MathEnvironment({"num_workers": 2})
    environment.shutdown()
    environment.shutdown()
    with pytest.raises(EnvironmentFailedError, match="shut down"):
        environment.step([log_of(r"\boxed{\sqrt{16}}")], known("4"))


def rows_of(name):
    path = Path(os.environ.get("LAUREL_DATA", "../shared/data")) / name
    if not path.exists():
        pytest.skip(f"no {path}; set LAUREL_DATA to the folder that holds the real data")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def test_every_solution_of_math_earns_its_reward(environment):
    rows = rows_of("math_test/math_test.jsonl.gz")
    logs = [log_of(row["solution"]) for row in rows]
    returned = environment.step(logs, known(*(row["answer"] for row in rows)))
    assert len(rows) == 5_000
    assert [row["idx"] for row, r in zip(rows, returned.rewards, strict=True) if r != 1.0] == []


@pytest.mark.slow
def test_the_parser_takes_known_answers_of_math_for_themselves():
    rows = [row for row in rows_of("math_test/math_test.jsonl.gz") if row["in_math500"]]
    assert len(rows) == 500
    with MathEnvironment({"num_workers": 2}) as environment:  # as patient as it is by default
        assert environment.validate([task_of(row["answer"], row["idx"]) for row in rows]) == []


def test_a_wrong_answer_to_math_earns_nothing(environment):
    """Solutions of other problems, whose answer is another whole number."""
    rows = [r for r in rows_of("math_test/math_test.jsonl.gz") if r["answer"].lstrip("-").isdigit()]
    pairs = [(a, b) for a, b in itertools.pairwise(rows) if a["answer"] != b["answer"]]
    logs = [log_of(one["solution"]) for one, _ in pairs]
    returned = environment.step(logs, known(*(other["answer"] for _, other in pairs)))
    assert len(pairs) > 2_500
    assert returned.rewards.sum() == 0.0


def test_every_solution_of_gsm8k_earns_its_reward(environment):
    rows = rows_of("gsm8k/test.jsonl.gz")
    golds = [row["answer"].split("####")[1].strip() for row in rows]
    returned = environment.step([log_of(row["answer"]) for row in rows], known(*golds))
    assert len(rows) == 1_319
    assert returned.rewards.sum() == len(rows)
