"""What a user's code forks and does not end: it answers nothing, wherever that code is called."""

import asyncio
import json
from contextlib import closing

import pytest

import forking_code
from forking_code import ANSWERS, expected
from laurel.config.environments import FunctionConfig
from laurel.environments.composite import PartCalls
from laurel.extensions.function_tools.environment import ToolEnvironment
from laurel.extensions.reward_functions.scorer import FunctionScorer
from laurel.grpo.grading import PatientThreads
from laurel.types import Completion, Group, Message
from laurel.workers.calls import WorkerCall, attempt
from laurel.workers.process_pool import ProcessPool, ProcessPoolSpec
from laurel.workers.spawned import SpawnedGroup
from tool_templates import TOKENIZERS


def conversation(answer):
    return [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": answer}]


def of_a_function(name, num_workers, answers=ANSWERS):
    config = FunctionConfig(path=f"forking_code:{name}", group=name == "group_scores")
    completions = tuple(Completion(messages=(Message("assistant", a),)) for a in answers)
    group = Group(id="g", prompt=(Message("user", "2 + 2?"),), completions_G=completions)
    with closing(FunctionScorer(config, num_workers=num_workers)) as scorer:
        (scores,) = asyncio.run(scorer.score([group]))
    assert [score.failure for score in scores] == [None] * len(answers)
    return [score.value for score in scores]


def of_a_tool(name):
    settings = {"functions": [f"forking_code.{name}"], "num_workers": 1}
    with ToolEnvironment({**settings, "max_calls": 100}) as tools:
        tools.use_tokenizer(TOKENIZERS["hermes"]())
        logs = [
            conversation(
                f"<tool_call>{json.dumps({'name': name, 'arguments': {'answer': answer}})}"
                "</tool_call>"
            )
            for answer in ANSWERS
        ]
        told = tools.step(logs, [None] * len(logs))
    assert told.failures == [None] * len(logs)
    return [float(one[0]["content"]) for one in told.observations]


def of_an_environment():
    async def judged():
        threads, slots = PatientThreads(2, name="environment"), asyncio.Semaphore(2)
        step = forking_code.Checked().step
        calls = [
            threads.call(slots, step, [conversation(one)], [None], timeout=60) for one in ANSWERS
        ]
        found = await asyncio.gather(*calls)
        threads.close()
        return [float(one.rewards[0]) for one in found]

    return asyncio.run(judged())


def of_a_part():
    calls, step = PartCalls("part"), forking_code.Checked().step
    logs = [conversation(one) for one in ANSWERS]
    return calls.begin(step, logs, [None] * len(logs)).result(60)().rewards.tolist()


def of_a_pool():
    """Of a pool whose function catches nothing, as those of Laurel's own checkers."""
    spec = ProcessPoolSpec(
        name="the pool",
        prepare="forking_code:prepare",
        num_workers=1,
        timeout_seconds=60.0,
    )
    with closing(ProcessPool(spec)) as pool:
        return [pool.submit(answer).result(60) for answer in ANSWERS]


def of_a_worker():
    call = [WorkerCall("check", (answer,)) for answer in ANSWERS]
    return [attempt(forking_code.Worker(None), one, rank=0).value for one in call]


def of_a_spawned_worker():
    group = SpawnedGroup("tester", forking_code.Worker, limit=60.0)
    try:
        return [group.call_one(0, "check", answer) for answer in ANSWERS]
    finally:
        group.shutdown()


PLACES = {
    "function in a thread": lambda: of_a_function("compute_score", 0),
    "function of groups": lambda: of_a_function("group_scores", 0),
    "async function": lambda: of_a_function("awaited_score", 0),
    "function in a process": lambda: of_a_function("compute_score", 1),
    "async function in a process": lambda: of_a_function("awaited_score", 1),
    "function of groups in a process": lambda: of_a_function("group_scores", 1),
    "tool": lambda: of_a_tool("tool"),
    "async tool": lambda: of_a_tool("awaited_tool"),
    "environment": of_an_environment,
    "part of a composite": of_a_part,
    "pool": of_a_pool,
    "worker": of_a_worker,
    "spawned worker": of_a_spawned_worker,
}


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.slow_parameters(
    *(place for place in PLACES if place not in ("async function", "pool", "environment", "worker"))
)
@pytest.mark.parametrize("place", PLACES)
def test_what_is_forked_answers_nothing_and_its_exit_code_is_its_own(place):
    assert PLACES[place]() == [expected(answer) for answer in ANSWERS]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("name", ["late_score", "awaited_late_score"])
def test_a_result_that_forks_when_it_is_read_is_read_once(name):
    assert of_a_function(name, 0, ["4"]) == [0.25]
